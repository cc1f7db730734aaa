//! High-throughput dispatch and combine of a [`World`], compared with the reference.

use bytemuck::cast_slice;
use deep_ep::{
    Buffer, CombineInput, CombineOutput, CombineRows, DType, DispatchHandle, DispatchInput,
    DispatchOutput, Element, Landing, Layout, Loan, PendingDispatch, Rank, ReceivedCounts, Result,
    Routes, Tensor,
    reference::{
        Number,
        high_throughput::{self as reference, CombineRoutes},
    },
};
use half::{bf16, f16};

use crate::{
    compare::{Of, same_rows, same_values},
    launch::plan,
    random::Random,
    world::{Memory, World},
};

plan! {
    /// How the calls are made. Where a choice is between two, 2 means that ranks differ.
    Calls {
        /// 0: from the choices; 1: from a layout, choices travel; 2: from a layout, none travel;
        /// 3: from the handle of a dispatch before.
        routes = 0,
        /// Hint: 0 loan, 1 caller.
        landing = 0,
        /// 0: rows as a loan; 1: into the caller's memory.
        into = 0,
        /// Alignment of counts per expert.
        alignment = 1,
        /// 0: no worst case; 1: as many rows as come; more: so many more less one.
        worst = 0,
        /// Bound on worker threads, 0 for none.
        num_sms = 0,
        /// Type of rows that come back: 0 bf16, 1 f32, 2 f16.
        back_dtype = 0,
        /// Elements of rows that come back.
        back_hidden = 16,
        /// Tensors that the sum begins with.
        biases = 0,
        /// Whether weights come back.
        back_weights = 0,
        /// Rows that come back are: 0 in the caller's memory, 1 in a loan, 2 in the loan of the
        /// dispatch if they fit, 3 in the caller's memory, apart.
        back_from = 0,
        /// The sum goes: 0 where the library likes, 1 into the caller's memory.
        back_into = 0,
    }
}

/// Whether option `value` holds for this rank: 0 no, 1 yes, 2 for every other rank.
fn holds(value: usize, rank: Rank) -> bool {
    value == 1 || (value == 2 && rank.0 % 2 == 1)
}

/// Received rows.
pub(crate) enum Rows {
    Loan(Loan),
    Caller(Memory),
}

impl Rows {
    pub(crate) fn tensor(&self) -> Tensor<'_> {
        match self {
            Self::Loan(loan) => loan.as_tensor(),
            Self::Caller(memory) => memory.tensor(),
        }
    }
}

/// What a dispatch gave.
pub(crate) struct Received {
    pub(crate) x: Rows,
    pub(crate) topk_idx: Option<Vec<i64>>,
    pub(crate) topk_weights: Option<Vec<f32>>,
    scales: Option<Vec<u32>>,
    pub(crate) counts: ReceivedCounts,
    pub(crate) handle: DispatchHandle,
}

impl Received {
    /// What is needed to bring rows back along a handle alone.
    pub(crate) fn of_handle(handle: DispatchHandle) -> Self {
        Self {
            x: Rows::Caller(Memory::new(DType::Bf16, &[0, 16])),
            topk_idx: None,
            topk_weights: None,
            scales: None,
            counts: ReceivedCounts {
                rows: 0,
                output_rows: 0,
                rows_from: vec![],
                tokens_per_expert: vec![],
            },
            handle,
        }
    }
}

/// Choices of either type as i64.
fn wide(idx: &Tensor<'_>) -> Vec<i64> {
    match idx.dtype() {
        DType::I64 => idx.as_slice::<i64>().expect("dense").to_vec(),
        _ => {
            let ids = idx.as_slice::<i32>().expect("dense").iter();
            ids.map(|&id| i64::from(id)).collect()
        }
    }
}

fn bits(scales: &Tensor<'_>) -> Vec<u32> {
    match scales.dtype() {
        DType::F32 => cast_slice(scales.as_slice::<f32>().expect("dense")).to_vec(),
        _ => cast_slice(scales.as_slice::<i32>().expect("dense")).to_vec(),
    }
}

fn floats(weights: &Tensor<'_>) -> Vec<f32> {
    weights.as_slice::<f32>().expect("dense").to_vec()
}

/// Rows of `world` from this rank along `routes`, as `calls` says.
pub(crate) fn input<'a>(
    world: &'a World,
    rank: Rank,
    routes: Routes<'a>,
    calls: &Calls,
) -> DispatchInput<'a> {
    let data = &world.ranks[rank.0];
    let mut input = DispatchInput::new(data.x(), routes);
    input.scales = data.scales();
    input.expert_alignment = calls.alignment;
    input.landing = match holds(calls.landing, rank) {
        true => Landing::Caller,
        false => Landing::Loan,
    };
    input.num_sms = (calls.num_sms > 0).then_some(calls.num_sms);
    input
}

/// Completes a dispatch into a loan.
pub(crate) fn finish(pending: PendingDispatch<'_>) -> Result<Received> {
    let received = pending.finish()?;
    Ok(Received {
        topk_idx: received.topk_idx.as_ref().map(|idx| wide(&idx.as_tensor())),
        topk_weights: received
            .topk_weights
            .as_ref()
            .map(|w| floats(&w.as_tensor())),
        scales: received.scales.as_ref().map(|s| bits(&s.as_tensor())),
        x: Rows::Loan(received.x),
        counts: received.counts,
        handle: received.handle,
    })
}

/// Completes a dispatch of `input` into memory of the caller.
pub(crate) fn finish_into(
    mut pending: PendingDispatch<'_>,
    input: &DispatchInput<'_>,
) -> Result<Received> {
    let rows = pending.counts()?.output_rows;
    let topk = match &input.routes {
        Routes::TopK { topk, .. } => Some(*topk),
        Routes::Layout { topk, .. } => *topk,
        Routes::Handle(_) => None,
    };
    let like = |tensor: &Tensor<'_>| Memory::new(tensor.dtype(), &[rows, tensor.shape()[1]]);
    let mut x = like(&input.x);
    let mut scales = input.scales.as_ref().map(like);
    let mut idx = topk.map(|topk| like(&topk.idx));
    let mut weights = topk.and_then(|topk| topk.weights).map(|w| like(&w));
    let mut out = DispatchOutput::new(x.tensor_mut());
    out.scales = scales.as_mut().map(Memory::tensor_mut);
    out.topk_idx = idx.as_mut().map(Memory::tensor_mut);
    out.topk_weights = weights.as_mut().map(Memory::tensor_mut);
    let (counts, handle) = pending.finish_into(out)?;
    Ok(Received {
        x: Rows::Caller(x),
        topk_idx: idx.map(|idx| wide(&idx.tensor())),
        topk_weights: weights.map(|weights| floats(&weights.tensor())),
        scales: scales.map(|scales| bits(&scales.tensor())),
        counts,
        handle,
    })
}

/// Dispatches `world` from the choices as `calls` says, and compares.
pub(crate) fn dispatch(buffer: &Buffer, world: &World, calls: &Calls) -> Received {
    let data = &world.ranks[buffer.rank().0];
    let routes = Routes::TopK {
        topk: data.topk(),
        num_experts: world.experts(),
    };
    dispatch_along(buffer, world, calls, routes)
}

/// Dispatches `world` along `routes` as `calls` says, and compares.
pub(crate) fn dispatch_along(
    buffer: &Buffer,
    world: &World,
    calls: &Calls,
    routes: Routes<'_>,
) -> Received {
    let rank = buffer.rank();
    let inputs = world.inputs();
    let expected = reference::dispatch_to(rank.0, &inputs, world.experts(), calls.alignment);
    let mut input = input(world, rank, routes, calls);
    let travels = !matches!(
        routes,
        Routes::Handle(_) | Routes::Layout { topk: None, .. }
    );
    if calls.worst > 0 && !matches!(routes, Routes::Layout { topk: None, .. }) {
        input.num_worst_tokens = Some(expected.rows() + calls.worst - 1);
    }
    let pending = buffer.dispatch(input).expect("the arguments are accepted");
    let received = match holds(calls.into, rank) {
        true => finish_into(pending, &input),
        false => finish(pending),
    };
    let received = received.expect("every rank dispatches");
    check(world, rank, &expected, &received, &input, travels);
    received
}

/// Compares what a dispatch from the choices of `world`, with default options, gave.
pub(crate) fn check_from_choices(world: &World, rank: Rank, received: &Received) {
    let expected = reference::dispatch_to(rank.0, &world.inputs(), world.experts(), 1);
    let routes = Routes::TopK {
        topk: world.ranks[rank.0].topk(),
        num_experts: world.experts(),
    };
    let input = input(world, rank, routes, &Calls::default());
    check(world, rank, &expected, received, &input, true);
}

/// Compares what a dispatch gave with the reference.
fn check(
    world: &World,
    rank: Rank,
    expected: &reference::Dispatched<'_>,
    received: &Received,
    input: &DispatchInput<'_>,
    travels: bool,
) {
    let of = |what| Of { rank, what };
    let rows = expected.rows();
    let counts = &received.counts;
    let output_rows = input.num_worst_tokens.unwrap_or(rows);
    assert_eq!(
        (counts.rows, counts.output_rows),
        (rows, output_rows),
        "rows of rank {rank}"
    );
    let prefix = counts.rows_from.iter().scan(0, |sum, n| {
        *sum += n;
        Some(*sum)
    });
    let prefix: Vec<usize> = prefix.collect();
    assert_eq!(
        prefix, expected.rank_prefix,
        "prefix sums of rows of rank {rank}"
    );
    let counted = input.num_worst_tokens.is_none() && !matches!(input.routes, Routes::Handle(_));
    let per_expert: &[usize] = if counted {
        &expected.tokens_per_expert
    } else {
        &[]
    };
    assert_eq!(
        counts.tokens_per_expert, per_expert,
        "choices per expert of rank {rank}"
    );

    let describe = |row: usize| {
        format!(
            "from rank {}, token {}",
            expected.src_rank[row], expected.src_idx[row]
        )
    };
    assert_eq!(
        received.x.tensor().shape(),
        [output_rows, world.plan.hidden]
    );
    same_rows(of("recv_x"), &expected.x, &received.x.tensor(), describe);
    assert_eq!(
        received.scales.is_some(),
        expected.scales.is_some(),
        "scales of rank {rank}"
    );
    if let (Some(scales), Some(expected)) = (&received.scales, &expected.scales) {
        let columns = world.plan.scales;
        same_values(
            of("recv_scales"),
            columns,
            &expected.concat(),
            &scales[..rows * columns],
        );
    }
    let k = world.plan.top_k;
    assert_eq!(
        received.topk_idx.is_some(),
        travels,
        "recv_topk_idx of rank {rank}"
    );
    if let Some(idx) = &received.topk_idx {
        let mut padded = expected.topk_idx.clone();
        padded.resize(output_rows * k, -1);
        same_values(of("recv_topk_idx"), k, &padded, idx);
    }
    let weighted = travels && expected.topk_weights.is_some();
    assert_eq!(
        received.topk_weights.is_some(),
        weighted,
        "recv_topk_weights of rank {rank}"
    );
    if let (Some(weights), Some(expected)) = (&received.topk_weights, &expected.topk_weights) {
        same_values(of("recv_topk_weights"), k, expected, &weights[..rows * k]);
    }
    check_handle(rank, expected, &received.handle, output_rows);
}

fn check_handle(
    rank: Rank,
    expected: &reference::Dispatched<'_>,
    handle: &DispatchHandle,
    output_rows: usize,
) {
    let of = |what| Of { rank, what };
    let ranks = expected.rank_prefix.len();
    assert_eq!(
        handle.num_recv_rows(),
        expected.rows(),
        "rows of the handle of rank {rank}"
    );
    let src_idx = handle.recv_src_idx();
    let src_idx = src_idx.as_slice::<i32>().expect("dense");
    assert_eq!(src_idx.len(), output_rows, "recv_src_idx of rank {rank}");
    let expected_idx: Vec<i32> = expected.src_idx.iter().map(|&token| token as i32).collect();
    same_values(
        of("recv_src_idx"),
        1,
        &expected_idx,
        &src_idx[..expected.rows()],
    );
    let matrix = handle.rank_prefix_matrix();
    let column: Vec<i32> = (0..ranks).map(|source| matrix.at(source, rank.0)).collect();
    let prefix: Vec<i32> = expected
        .rank_prefix
        .iter()
        .map(|&rows| rows as i32)
        .collect();
    same_values(of("rank_prefix_matrix"), 1, &prefix, &column);
    let goes: Vec<u8> = expected
        .is_token_in_rank
        .iter()
        .map(|&goes| goes.into())
        .collect();
    let found = handle.is_token_in_rank();
    same_values(
        of("is_token_in_rank"),
        ranks,
        &goes,
        found.as_slice().expect("dense"),
    );
    let mut next = vec![0; ranks];
    let heads = goes.iter().enumerate().map(|(i, &goes)| {
        let next = &mut next[i % ranks];
        *next += i32::from(goes);
        if goes > 0 { *next - 1 } else { -1 }
    });
    let heads: Vec<i32> = heads.collect();
    let found = handle.send_head();
    same_values(
        of("send_head"),
        ranks,
        &heads,
        found.as_slice().expect("dense"),
    );
}

/// The row that `rank` returns for `token` of `owner`.
fn returned<V: Number>(world: &World, len: usize, [owner, rank, token]: [usize; 3]) -> Vec<V> {
    Random::new(&[world.plan.seed, 4, world.plan.salt, owner, rank, token]).row(len)
}

/// The weights that `rank` returns for `token` of `owner`.
fn returned_weights(world: &World, [owner, rank, token]: [usize; 3]) -> Vec<f32> {
    let seed = [world.plan.seed, 5, world.plan.salt, owner, rank, token];
    Random::new(&seed).row(world.plan.top_k)
}

/// Brings rows back along the handle as `calls` says, and compares.
pub(crate) fn combine(buffer: &Buffer, world: &World, calls: &Calls, received: Received) {
    match calls.back_dtype {
        0 => combine_as::<bf16>(buffer, world, calls, received),
        1 => combine_as::<f32>(buffer, world, calls, received),
        _ => combine_as::<f16>(buffer, world, calls, received),
    }
}

fn combine_as<V: Number>(buffer: &Buffer, world: &World, calls: &Calls, received: Received) {
    let rank = buffer.rank();
    let inputs = world.inputs();
    let hidden = calls.back_hidden.next_multiple_of(16 / size_of::<V>());
    let expected = reference::dispatch_to(rank.0, &inputs, world.experts(), 1);
    let sources = || expected.src_rank.iter().zip(&expected.src_idx);
    let y: Vec<V> = sources()
        .flat_map(|(&owner, &token)| {
            returned::<V>(world, hidden, [owner as usize, rank.0, token as usize])
        })
        .collect();
    let weights: Option<Vec<f32>> = (calls.back_weights > 0).then(|| {
        let rows = sources().flat_map(|(&owner, &token)| {
            returned_weights(world, [owner as usize, rank.0, token as usize])
        });
        rows.collect()
    });
    let tokens = world.ranks[rank.0].tokens;
    let bias: Vec<Vec<V>> = (0..calls.biases)
        .map(|i| Random::new(&[world.plan.seed, 6, rank.0, i]).row(tokens * hidden))
        .collect();
    let handle = received.handle.clone();
    let rows = BackRows::new(
        buffer,
        calls.back_from,
        &y,
        [expected.rows(), hidden],
        received,
    );
    let mut input = CombineInput::new(rows.as_rows(), &handle);
    let shape = [expected.rows(), world.plan.top_k];
    input.topk_weights = weights
        .as_ref()
        .map(|w| Tensor::new(w, &shape).expect("as long"));
    for (to, bias) in input.bias.iter_mut().zip(&bias) {
        *to = Some(Tensor::new(bias, &[tokens, hidden]).expect("as long as the shape"));
    }
    input.num_sms = (calls.num_sms > 0).then_some(calls.num_sms);
    let (x, weights) = combined(buffer, input, calls.back_into > 0, [tokens, hidden]);

    let routes = CombineRoutes::of(rank.0, &inputs, world.experts());
    let bias: Vec<&[V]> = bias.iter().map(Vec::as_slice).collect();
    let sum = reference::combine_at(&routes, hidden, &bias, |from, token| {
        returned(world, hidden, [rank.0, from, token])
    });
    let of = |what| Of { rank, what };
    same_values(of("combined_x"), hidden, cast_slice::<V, u8>(&sum), &x);
    if let Some(weights) = weights {
        let sum = reference::combine_at(&routes, world.plan.top_k, &[], |from, token| {
            returned_weights(world, [rank.0, from, token])
        });
        same_values(
            of("combined_topk_weights"),
            world.plan.top_k,
            &sum,
            &weights,
        );
    }
}

/// Combines; the bytes of the sum, and the weights.
fn combined(
    buffer: &Buffer,
    input: CombineInput<'_>,
    into: bool,
    [tokens, hidden]: [usize; 2],
) -> (Vec<u8>, Option<Vec<f32>>) {
    let dtype = input.x.as_tensor().dtype();
    let k = input.topk_weights.map(|weights| weights.shape()[1]);
    let pending = buffer.combine(input).expect("the arguments are accepted");
    if into {
        let mut x = Memory::new(dtype, &[tokens, hidden]);
        let mut weights = k.map(|k| Memory::new(DType::F32, &[tokens, k]));
        let mut out = CombineOutput::new(x.tensor_mut());
        out.topk_weights = weights.as_mut().map(Memory::tensor_mut);
        pending.finish_into(out).expect("every rank combines");
        return (
            x.bytes().to_vec(),
            weights.map(|weights| floats(&weights.tensor())),
        );
    }
    let done = pending.finish().expect("every rank combines");
    assert_eq!(
        (done.x.dtype(), done.x.shape()),
        (dtype, &[tokens, hidden][..])
    );
    let mut bytes = vec![];
    for token in 0..tokens {
        bytes.extend(done.x.as_tensor().row(token));
    }
    (
        bytes,
        done.topk_weights
            .map(|weights| floats(&weights.as_tensor())),
    )
}

/// Rows that go back, wherever the test wants them to be.
enum BackRows<V> {
    Caller {
        rows: Vec<V>,
        shape: [usize; 2],
        stride: usize,
    },
    Loan(Loan),
}

impl<V: Element> BackRows<V> {
    fn new(buffer: &Buffer, from: usize, y: &[V], shape: [usize; 2], received: Received) -> Self {
        let [rows, hidden] = shape;
        let caller = |apart: usize| {
            let stride = hidden + apart;
            let mut spread = vec![V::zeroed(); rows * stride];
            for row in 0..rows {
                spread[row * stride..][..hidden].copy_from_slice(&y[row * hidden..][..hidden]);
            }
            Self::Caller {
                rows: spread,
                shape,
                stride,
            }
        };
        match (from, received.x) {
            (0, _) => caller(0),
            (3, _) => caller(24),
            (2, Rows::Loan(mut loan)) if loan.dtype() == V::DTYPE && loan.shape()[1] == hidden => {
                let all = loan.as_mut_slice::<V>().expect("of that type");
                all[..y.len()].copy_from_slice(y);
                Self::Loan(loan)
            }
            _ => {
                let mut loan = buffer.loan(V::DTYPE, &shape).expect("memory");
                loan.as_mut_slice::<V>()
                    .expect("of that type")
                    .copy_from_slice(y);
                Self::Loan(loan)
            }
        }
    }

    fn as_rows(&self) -> CombineRows<'_> {
        match self {
            Self::Loan(loan) => loan.into(),
            Self::Caller {
                rows,
                shape,
                stride,
            } => {
                let rows = Tensor::strided(rows, shape, &[*stride, 1]);
                CombineRows::Caller(rows.expect("as long as the shape"))
            }
        }
    }
}

/// Checks the layout of this rank's tokens, and gives it back made from its tensors.
pub(crate) fn layout(buffer: &Buffer, world: &World) -> Layout {
    let (rank, ranks) = (buffer.rank(), buffer.num_ranks());
    let layout = buffer.dispatch_layout(world.ranks[rank.0].idx(), world.experts());
    let layout = layout.expect("the choices are accepted");
    let expected = reference::layout(&world.inputs()[rank.0], world.experts(), ranks, ranks);
    let of = |what| Of { rank, what };
    let same = |what, expected: &[usize], found: Tensor<'_>| {
        let expected: Vec<i32> = expected.iter().map(|&n| n as i32).collect();
        same_values(of(what), 1, &expected, found.as_slice().expect("dense"));
    };
    same(
        "num_tokens_per_rank",
        &expected.tokens_per_rank,
        layout.num_tokens_per_rank(),
    );
    same(
        "num_tokens_per_expert",
        &expected.tokens_per_expert,
        layout.num_tokens_per_expert(),
    );
    assert!(layout.num_tokens_per_node().is_none(), "one node");
    let goes: Vec<u8> = expected
        .is_token_in_rank
        .iter()
        .map(|&goes| goes.into())
        .collect();
    let found = layout.is_token_in_rank();
    same_values(
        of("is_token_in_rank"),
        ranks,
        &goes,
        found.as_slice().expect("dense"),
    );
    Layout::from_parts(
        found,
        layout.num_tokens_per_rank(),
        layout.num_tokens_per_expert(),
    )
    .expect("its own parts")
}

/// A dispatch and a combine of `world` as `calls` says, both compared.
pub(crate) fn round_trip(buffer: &Buffer, world: &World, calls: &Calls) {
    let data = &world.ranks[buffer.rank().0];
    let received = match calls.routes {
        0 => dispatch(buffer, world, calls),
        1 | 2 => {
            let layout = layout(buffer, world);
            let topk = (calls.routes == 1).then(|| data.topk());
            let routes = Routes::Layout {
                layout: &layout,
                topk,
            };
            dispatch_along(buffer, world, calls, routes)
        }
        _ => {
            let first = Calls {
                worst: 0,
                ..calls.clone()
            };
            let handle = dispatch(buffer, world, &first).handle;
            let mut plan = world.plan.clone();
            plan.salt += 1_000_000;
            let other = World::new(&plan, world.ranks.len());
            dispatch_along(buffer, &other, calls, Routes::Handle(&handle))
        }
    };
    combine(buffer, world, calls, received);
}
