//! Low-latency dispatch and combine of a [`World`], compared with the reference.

use deep_ep::{
    Buffer, BufferConfig, CombineRows, CombineWire, DType, Element, F8E4M3, LowLatencyCombineInput,
    LowLatencyConfig, LowLatencyDispatchInput, LowLatencyDispatchOutput, LowLatencyDispatched,
    LowLatencyHandle, OwnedTensor, Rank, RowFormat, Tensor, TensorMut,
    codec::ScaleFormat,
    reference::{fp8, low_latency as reference},
};
use half::bf16;

use crate::{
    compare::{Of, same_row, same_values},
    launch::{config, plan},
    random::Random,
    world::{Memory, World},
};

plan! {
    /// How the calls are made.
    Calls {
        /// `M`, or as many as the largest rank has tokens if that is more.
        capacity = 1,
        /// 0 bf16, 1 fp8, 2 fp8 with power-of-two scales, 3 fp8 with packed exponents.
        format = 0,
        /// Outputs in the caller's memory.
        into = 0,
        /// 1 receive by the hook, 2 both halves at once, 3 so on every other rank.
        hook = 0,
        /// Combines with the handle.
        combines = 1,
        /// Wire: 0 bf16, 1 LogFMT, 2 exact.
        wire = 0,
        /// Elements of rows that come back.
        back_hidden = 16,
        /// Rows that come back are: 0 dense, 1 apart, 2 in the buffer for zero copy.
        back_from = 0,
        /// Use handles made from their parts.
        rebuild = 0,
    }
}

/// The formats by number, see [`Calls::format`].
pub(crate) const FORMATS: [RowFormat; 4] = [
    RowFormat::Bf16,
    RowFormat::Fp8(ScaleFormat::F32),
    RowFormat::Fp8(ScaleFormat::PowerOfTwo),
    RowFormat::Fp8(ScaleFormat::Ue8m0),
];
const WIRES: [CombineWire; 3] = [CombineWire::Bf16, CombineWire::LogFmt, CombineWire::Exact];

/// `M` of a call.
fn capacity(world: &World, calls: &Calls) -> usize {
    calls.capacity.max(world.most_tokens())
}

/// Whether a rank makes both halves at once.
fn at_once(calls: &Calls, rank: Rank) -> bool {
    calls.hook == 2 || calls.hook == 3 && rank.0 % 2 == 1
}

/// A configuration with room for `calls` with `world`.
pub(crate) fn config_for(world: &World, calls: &Calls) -> BufferConfig {
    BufferConfig {
        low_latency: Some(LowLatencyConfig {
            max_tokens_per_rank: capacity(world, calls),
            hidden: world.plan.hidden.max(calls.back_hidden),
            num_experts: world.experts(),
            exact_top_k: (calls.wire == 2).then_some(world.plan.top_k),
        }),
        ..config()
    }
}

/// Element `[i, j, k]` of a tensor of any strides.
fn element<T: Element>(tensor: &Tensor<'_>, at: [usize; 3]) -> T {
    let inside = at.iter().zip(tensor.shape()).all(|(at, n)| at < n);
    assert!(inside && tensor.dtype() == T::DTYPE, "{at:?} of {tensor:?}");
    let offset: usize = at
        .iter()
        .zip(tensor.strides())
        .map(|(at, stride)| at * stride)
        .sum();
    // SAFETY: the index is inside the tensor's shape, so the element is borrowed by it.
    unsafe { tensor.as_ptr().cast::<T>().add(offset).read() }
}

fn row<T: Element>(tensor: &Tensor<'_>, [i, j]: [usize; 2]) -> Vec<T> {
    (0..tensor.shape()[2])
        .map(|k| element(tensor, [i, j, k]))
        .collect()
}

/// Outputs of a dispatch.
enum Output {
    Library(OwnedTensor, Option<OwnedTensor>),
    Caller(Memory, Option<Memory>),
}

impl Output {
    fn x(&self) -> Tensor<'_> {
        match self {
            Self::Library(x, _) => x.as_tensor(),
            Self::Caller(x, _) => x.tensor(),
        }
    }

    fn scales(&self) -> Option<Tensor<'_>> {
        match self {
            Self::Library(_, scales) => scales.as_ref().map(OwnedTensor::as_tensor),
            Self::Caller(_, scales) => scales.as_ref().map(Memory::tensor),
        }
    }
}

/// Dispatches `world` as `calls` says, compares, and returns the handle.
pub(crate) fn dispatch(buffer: &Buffer, world: &World, calls: &Calls) -> LowLatencyHandle {
    let (rank, ranks) = (buffer.rank(), buffer.num_ranks());
    let data = &world.ranks[rank.0];
    let local = world.plan.experts;
    let before = 1000;
    let mut received = vec![before; local];
    let mut waited = vec![0i64; ranks];
    let max = capacity(world, calls);
    let mut input = LowLatencyDispatchInput::new(data.x(), data.idx(), max, world.experts());
    input.format = FORMATS[calls.format];
    input.at_once = at_once(calls, rank);
    input.recv_stats = Some(TensorMut::new(&mut received, &[local]).expect("as long"));
    input.wait_stats = Some(TensorMut::new(&mut waited, &[ranks]).expect("as long"));
    let pending = buffer
        .low_latency_dispatch(input)
        .expect("the arguments are accepted");
    let shape = [local, ranks * max, world.plan.hidden];
    let (output, counts, handle) = if calls.into > 0 {
        let (dtype, scales) = match calls.format {
            0 => (DType::Bf16, None),
            3 => (DType::F8E4M3, Some((DType::I32, shape[2] / 512))),
            _ => (DType::F8E4M3, Some((DType::F32, shape[2] / 128))),
        };
        let mut x = Memory::new(dtype, &shape);
        let mut scales = scales.map(|(dtype, n)| Memory::new(dtype, &[shape[0], shape[1], n]));
        let out = LowLatencyDispatchOutput {
            x: x.tensor_mut(),
            scales: scales.as_mut().map(Memory::tensor_mut),
        };
        let (counts, handle) = pending.finish_into(out).expect("every rank dispatches");
        (Output::Caller(x, scales), counts, handle)
    } else {
        let done = match calls.hook == 1 {
            true => pending.hook()(),
            false => pending.finish(),
        };
        let done = done.expect("every rank dispatches");
        (
            Output::Library(done.x, done.scales),
            done.recv_count,
            done.handle,
        )
    };
    let of = |what| Of { rank, what };
    let counts = counts.as_slice::<i32>().expect("dense i32");
    check(world, rank, calls, &output, counts, &handle);
    let sums: Vec<i32> = counts.iter().map(|count| before + count).collect();
    same_values(of("recv_stats"), 1, &sums, &received);
    assert!(
        waited.iter().all(|&cycles| cycles >= 0),
        "wait_stats of {rank}: {waited:?}"
    );
    handle
}

/// Compares what a dispatch in bf16 gave.
pub(crate) fn check_bf16(world: &World, rank: Rank, received: LowLatencyDispatched) {
    let output = Output::Library(received.x, received.scales);
    let calls = Calls::default();
    check(
        world,
        rank,
        &calls,
        &output,
        received.recv_count.as_slice().expect("dense i32"),
        &received.handle,
    );
}

fn check(
    world: &World,
    rank: Rank,
    calls: &Calls,
    output: &Output,
    counts: &[i32],
    handle: &LowLatencyHandle,
) {
    let inputs = world.low_latency_inputs();
    let expected = reference::dispatch_to(rank.0, &inputs, world.experts(), &world.masked);
    let of = Of {
        rank,
        what: "recv_count",
    };
    same_values(of, 1, &expected.recv_count(), counts);
    check_rows(rank, &expected, output, calls);
    let sizes = [capacity(world, calls), world.plan.hidden, world.experts()];
    check_handle(rank, &expected, handle, sizes);
}

fn check_rows(rank: Rank, expected: &reference::Dispatched<'_>, output: &Output, calls: &Calls) {
    let (x, scales) = (output.x(), output.scales());
    let of = |what| Of { rank, what };
    for (expert, rows) in expected.experts.iter().enumerate() {
        for (i, sent) in rows.x.iter().enumerate() {
            let describe = |row: usize| {
                format!(
                    "of local expert {expert} from rank {}, token {}",
                    rows.src_rank[row], rows.src_info[row]
                )
            };
            let bytes = |what, size, expected: &[u8], found: &[u8]| {
                same_row(of(what), i, size, expected, found, describe);
            };
            if calls.format == 0 {
                let found: Vec<bf16> = row(&x, [expert, i]);
                bytes(
                    "recv_x",
                    2,
                    bytemuck::cast_slice(sent),
                    bytemuck::cast_slice(&found),
                );
                continue;
            }
            let format = match calls.format {
                1 => fp8::ScaleFormat::F32,
                _ => fp8::ScaleFormat::PowerOfTwo,
            };
            let cast = fp8::cast_row(sent, format);
            let found: Vec<F8E4M3> = row(&x, [expert, i]);
            bytes("recv_x", 1, &cast.codes, bytemuck::cast_slice(&found));
            let scales = scales.as_ref().expect("fp8 rows have scales");
            if calls.format == 3 {
                let found: Vec<i32> = row(scales, [expert, i]);
                let words = cast.ue8m0_words();
                bytes(
                    "scales",
                    4,
                    bytemuck::cast_slice(&words),
                    bytemuck::cast_slice(&found),
                );
            } else {
                let found: Vec<f32> = row(scales, [expert, i]);
                bytes(
                    "scales",
                    4,
                    bytemuck::cast_slice(&cast.scales),
                    bytemuck::cast_slice(&found),
                );
            }
        }
    }
    if let Output::Library(x, Some(scales)) = output {
        let column = x.shape()[1].next_multiple_of(4);
        let strides = [scales.shape()[2] * column, 1, column];
        assert_eq!(scales.strides(), strides, "scales are stored by columns");
    }
}

fn check_handle(
    rank: Rank,
    expected: &reference::Dispatched<'_>,
    handle: &LowLatencyHandle,
    sizes: [usize; 3],
) {
    let of = |what| Of { rank, what };
    let found = [
        handle.max_tokens_per_rank(),
        handle.hidden(),
        handle.num_experts(),
    ];
    assert_eq!(found, sizes, "(M, H, E) of the handle of rank {rank}");
    let (ranges, info) = (handle.layout_range(), handle.src_info());
    let ranks = ranges.shape()[1];
    let ranges = ranges.as_slice::<i64>().expect("dense");
    same_values(of("layout_range"), ranks, &expected.layout_range, ranges);
    for (expert, rows) in expected.experts.iter().enumerate() {
        let found: Vec<i32> = (0..rows.x.len()).map(|row| info.at(expert, row)).collect();
        same_values(
            Of {
                rank,
                what: &format!("src_info of expert {expert}"),
            },
            1,
            &rows.src_info,
            &found,
        );
    }
}

/// What `expert` (of all) makes of `token` of `owner` in combine number `n`.
fn output(world: &World, calls: &Calls, n: usize, [owner, token, expert]: [usize; 3]) -> Vec<bf16> {
    let seed = [world.plan.seed, 7, world.plan.salt, n, owner, token, expert];
    let mut random = Random::new(&seed);
    match calls.wire {
        2 => random.row(calls.back_hidden),
        // LogFMT's criterion is about data such as models have.
        1 => {
            let values = (0..calls.back_hidden).map(|_| bf16::from_f32(random.normal()));
            values.collect()
        }
        // The tolerance is about finite sums.
        _ => random.tame_row(calls.back_hidden),
    }
}

/// Combines number `n` of `handle` as `calls` says, and compares.
pub(crate) fn combine(
    buffer: &Buffer,
    world: &World,
    calls: &Calls,
    handle: &LowLatencyHandle,
    n: usize,
) {
    let (rank, ranks) = (buffer.rank(), buffer.num_ranks());
    let data = &world.ranks[rank.0];
    let (local, rows) = (world.plan.experts, ranks * handle.max_tokens_per_rank());
    let hidden = calls.back_hidden;
    let stride = if calls.back_from == 1 {
        hidden + 8
    } else {
        hidden
    };
    // NaN where no row is: it must not be read.
    let mut y = vec![bf16::NAN; local * rows * stride];
    let inputs = world.low_latency_inputs();
    let received = reference::dispatch_to(rank.0, &inputs, world.experts(), &world.masked);
    for (expert, outputs) in received.experts.iter().enumerate() {
        let sources = outputs.src_rank.iter().zip(&outputs.src_info).enumerate();
        for (i, (&owner, &token)) in sources {
            let at = [owner as usize, token as usize, rank.0 * local + expert];
            let row = output(world, calls, n, at);
            y[(expert * rows + i) * stride..][..hidden].copy_from_slice(&row);
        }
    }
    let mut loan = None;
    let x: CombineRows<'_> = if calls.back_from == 2 {
        let next = buffer
            .next_low_latency_combine_buffer(handle, hidden)
            .expect("memory");
        let next = loan.insert(next);
        next.as_mut_slice::<bf16>()
            .expect("bf16")
            .copy_from_slice(&y);
        (&*next).into()
    } else {
        let strides = [rows * stride, stride, 1];
        let y = Tensor::strided(&y, &[local, rows, hidden], &strides);
        y.expect("as long as the shape").into()
    };
    let weights = data.weights().expect("combine needs weights");
    let mut waited = vec![0i64; ranks];
    let mut input = LowLatencyCombineInput::new(x, data.idx(), weights, handle);
    input.wire = WIRES[calls.wire];
    input.at_once = at_once(calls, rank);
    input.wait_stats = Some(TensorMut::new(&mut waited, &[ranks]).expect("as long"));
    let pending = buffer
        .low_latency_combine(input)
        .expect("the arguments are accepted");
    let shape = [data.tokens, hidden];
    let combined: Vec<bf16> = if calls.into > 0 {
        let mut out = Memory::new(DType::Bf16, &shape);
        pending
            .finish_into(out.tensor_mut())
            .expect("every rank combines");
        bytemuck::cast_slice(out.bytes()).to_vec()
    } else {
        let out = match calls.hook > 0 {
            true => pending.hook()(),
            false => pending.finish(),
        };
        let out = out.expect("every rank combines");
        assert_eq!(out.shape(), shape);
        out.as_slice().expect("dense").to_vec()
    };
    check_combined(rank, world, calls, n, &combined);
}

fn check_combined(rank: Rank, world: &World, calls: &Calls, n: usize, combined: &[bf16]) {
    let data = &world.ranks[rank.0];
    let hidden = calls.back_hidden;
    let input = reference::CombineInput {
        tokens: data.tokens,
        hidden,
        top_k: data.top_k,
        topk_idx: &data.topk_idx,
        topk_weights: data.topk_weights.as_deref().expect("combine needs weights"),
        num_experts: world.experts(),
        masked: &world.masked,
    };
    let output = |token, expert| output(world, calls, n, [rank.0, token, expert]);
    let of = Of {
        rank,
        what: "combined_x",
    };
    if calls.wire == 0 {
        for token in 0..data.tokens {
            let bounds = reference::combine_bound(&input, token, output);
            for (column, bound) in bounds.iter().enumerate() {
                let found = combined[token * hidden + column];
                assert!(
                    bound.allows(found),
                    "{of}, token {token}, column {column}: found {found}, allowed {bound:?}"
                );
            }
        }
        return;
    }
    let exact = reference::combine_at(&input, output);
    if calls.wire == 2 {
        return same_values(of, hidden, &exact, combined);
    }
    let difference = reference::difference(combined, &exact);
    // The criterion is one of averages: few values may lie to one side of it.
    let few = if combined.len() < 1024 { 4.0 } else { 1.0 };
    assert!(
        difference < few * reference::LOGFMT_LIMIT,
        "{of}: difference {difference:e} by LogFMT"
    );
}

/// A dispatch and its combines as `calls` says, all compared.
pub(crate) fn round_trip(buffer: &Buffer, world: &World, calls: &Calls) {
    let mut handle = dispatch(buffer, world, calls);
    if calls.rebuild > 0 {
        handle = LowLatencyHandle::from_parts(
            handle.src_info(),
            handle.layout_range(),
            handle.max_tokens_per_rank(),
            handle.hidden() + 64,
            handle.num_experts(),
        )
        .expect("its own parts");
    }
    for n in 0..calls.combines {
        combine(buffer, world, calls, &handle, n);
    }
}
