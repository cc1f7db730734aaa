//! Rows back to their owners, and comparison of the sums.

use bytemuck::cast_slice;
use deep_ep::{
    Buffer, CombineInput, CombineOutput, CombineRows, DType, Element, Loan, Tensor,
    reference::{
        Number,
        high_throughput::{self as reference, CombineRoutes},
    },
};
use half::{bf16, f16};

use super::{Calls, Received, Rows, floats};
use crate::{
    compare::{Of, same_values},
    random::Random,
    world::{Memory, World},
};

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
