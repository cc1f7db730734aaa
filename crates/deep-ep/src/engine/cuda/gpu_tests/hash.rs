//! A hundred calls at the size of a model, none waited for, whose rows are made and looked at on the GPU.

use bytemuck::NoUninit;

use super::{Rank, Setup, Source, run};
use crate::{
    buffer::{
        BufferConfig, DispatchHandle, DispatchInput, DispatchOutput, Dispatched, Landing, Routes,
        TopK,
    },
    dtype::DType,
    engine::cuda::{
        driver::module::{Function, Shape},
        gpu::Gpu,
    },
    tensor::{OwnedTensor, Tensor},
};

pub(super) const SOURCE: Source = Source {
    name: "hash.cu",
    text: include_str!("hash.cu"),
    constants: &[],
};

const TOKENS: usize = 8192;
const HIDDEN: usize = 7168;
const TOP_K: usize = 2;
const LOCAL: usize = 4;
const CALLS: usize = 100;

/// `HashParams`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct Params {
    x: u64,
    topk: u64,
    src_idx: u64,
    rank_prefix: u64,
    found: u64,
    words: u32,
    rank: u32,
    ranks: u32,
    tokens: u32,
    call: u32,
    local_experts: u32,
}

struct Batch<'a> {
    rank: &'a Rank,
    fill: Function,
    check: Function,
    x: OwnedTensor,
    idx: OwnedTensor,
    out: OwnedTensor,
    out_idx: OwnedTensor,
    /// Words that are wrong, rows that came, rows that were to come.
    found: OwnedTensor,
}

fn address(tensor: &Tensor<'_>) -> u64 {
    tensor.as_ptr().addr() as u64
}

impl<'a> Batch<'a> {
    fn new(rank: &'a Rank) -> Self {
        let zeros = |dtype, shape: &[usize]| rank.gpu.zeros(dtype, shape, &rank.stream).unwrap();
        let rows = rank.ranks * TOKENS;
        Self {
            rank,
            fill: rank.kernel(c"fill", 0),
            check: rank.kernel(c"check", 0),
            x: zeros(DType::Bf16, &[TOKENS, HIDDEN]),
            idx: zeros(DType::I64, &[TOKENS, TOP_K]),
            out: zeros(DType::Bf16, &[rows, HIDDEN]),
            out_idx: zeros(DType::I64, &[rows, TOP_K]),
            found: zeros(DType::I64, &[3]),
        }
    }

    fn launch(
        &self,
        kernel: &Function,
        call: usize,
        x: &Tensor<'_>,
        handle: Option<&DispatchHandle>,
    ) {
        let rank = self.rank;
        let params = Params {
            x: address(x),
            topk: address(&self.idx.as_tensor()),
            src_idx: handle.map_or(0, |handle| address(&handle.recv_src_idx())),
            rank_prefix: handle.map_or(0, |handle| address(&handle.rank_prefix_matrix())),
            found: address(&self.found.as_tensor()),
            words: (HIDDEN * 2 / 16) as u32,
            rank: rank.rank as u32,
            ranks: rank.ranks as u32,
            tokens: TOKENS as u32,
            call: call as u32,
            local_experts: LOCAL as u32,
        };
        let shape = Shape {
            blocks: 4 * rank.gpu.sms().unwrap(),
            threads: 512,
            shared_bytes: 0,
            cooperative: false,
        };
        // SAFETY: the struct is the kernel's parameter. Tensors live until the stream is synchronised,
        // or their memory goes to others in its order.
        unsafe { kernel.launch(&rank.driver_stream(), shape, &params) }.unwrap();
    }

    /// One call, enqueued: other rows in the same memory, sent, and what comes is looked at.
    fn call(&mut self, call: usize) {
        let rank = self.rank;
        let landing = [Landing::Loan, Landing::Caller][call % 2];
        self.launch(&self.fill, call, &self.x.as_tensor(), None);
        let routes = Routes::TopK {
            topk: TopK {
                idx: self.idx.as_tensor(),
                weights: None,
            },
            num_experts: rank.ranks * LOCAL,
        };
        let input = DispatchInput {
            landing,
            num_worst_tokens: Some(rank.ranks * TOKENS),
            stream: rank.stream.as_stream(),
            ..DispatchInput::new(self.x.as_tensor(), routes)
        };
        let pending = rank.buffer.dispatch(input).unwrap();
        match landing {
            Landing::Loan => {
                let Dispatched { x, handle, .. } = pending.finish().unwrap();
                self.launch(&self.check, call, &x.as_tensor(), Some(&handle));
            }
            Landing::Caller => {
                let mut out = DispatchOutput::new(self.out.as_tensor_mut());
                out.topk_idx = Some(self.out_idx.as_tensor_mut());
                let (_, handle) = pending.finish_into(out).unwrap();
                self.launch(&self.check, call, &self.out.as_tensor(), Some(&handle));
            }
        }
    }

    fn found(&self) -> [i64; 3] {
        let found = self
            .rank
            .gpu
            .download(&self.found.as_tensor(), &self.rank.stream);
        let found = found.unwrap();
        found.as_slice::<i64>().unwrap().try_into().unwrap()
    }
}

#[test]
fn a_hundred_unsynchronised_calls_of_8192_rows_of_7168_bring_every_row() {
    let setup = Setup {
        ranks: Gpu::count().unwrap_or(0).clamp(2, 4),
        config: BufferConfig::default(),
        source: Some(SOURCE),
    };
    run(1, &setup, |rank| {
        let mut batch = Batch::new(rank);
        // Memory grows and kernels are loaded before.
        for call in 0..2 {
            batch.call(call);
            rank.settle();
        }
        let start = std::time::Instant::now();
        for call in 2..2 + CALLS {
            batch.call(call);
        }
        let enqueued = start.elapsed();
        rank.settle();
        let [wrong, rows, expected] = batch.found();
        println!(
            "rank {}: {rows} rows in {} calls, enqueued in {enqueued:?}, done in {:?}",
            rank.rank,
            CALLS + 2,
            start.elapsed()
        );
        assert_eq!((wrong, rows), (0, expected));
        assert!(rows > 0);
        rank.settle();
    });
}

/// The check itself: a changed word is found.
#[test]
fn a_wrong_word_is_found() {
    let setup = Setup {
        ranks: 2,
        config: BufferConfig::default(),
        source: Some(SOURCE),
    };
    run(1, &setup, |rank| {
        let mut batch = Batch::new(rank);
        batch.call(1);
        rank.settle();
        assert_eq!(batch.found()[0], 0);
        // The rows of the last call, looked at as those of the next.
        let pending = {
            let routes = Routes::TopK {
                topk: TopK {
                    idx: batch.idx.as_tensor(),
                    weights: None,
                },
                num_experts: rank.ranks * LOCAL,
            };
            let input = DispatchInput {
                num_worst_tokens: Some(rank.ranks * TOKENS),
                stream: rank.stream.as_stream(),
                ..DispatchInput::new(batch.x.as_tensor(), routes)
            };
            rank.buffer.dispatch(input).unwrap()
        };
        let done = pending.finish().unwrap();
        batch.launch(&batch.check, 2, &done.x.as_tensor(), Some(&done.handle));
        rank.settle();
        let [wrong, rows, _] = batch.found();
        assert!(
            wrong >= rows / 2 * (HIDDEN * 2 / 16) as i64,
            "{wrong} of {rows} rows"
        );
        rank.settle();
    });
}
