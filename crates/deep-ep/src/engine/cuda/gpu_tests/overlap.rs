//! Between the halves of a low-latency call nothing of it runs: work that fills the GPU takes no longer
//! there than alone, and what it hides need not be waited for.

use std::time::Duration;

use bytemuck::NoUninit;

use super::{Rank, Setup, Source, run};
use crate::{
    buffer::{
        BufferConfig, LowLatencyCombineInput, LowLatencyConfig, LowLatencyDispatchInput,
        LowLatencyDispatchOutput, LowLatencyHandle, RowFormat,
    },
    codec::ScaleFormat,
    dtype::DType,
    engine::cuda::{
        driver::module::{Function, Shape},
        gpu::GpuEvent,
    },
    tensor::{OwnedTensor, Tensor},
};

pub(super) const SOURCE: Source = Source {
    name: "occupy.cu",
    text: include_str!("occupy.cu"),
    constants: &[],
};

const RANKS: usize = 2;
const TOKENS: usize = 128;
const HIDDEN: usize = 7168;
const TOP_K: usize = 8;
const EXPERTS: usize = 64;
/// About 4 ms on an H200.
const ROUNDS: u32 = 800_000;
/// Before what is timed, so that the host is ahead of the GPU.
const LEAD_IN: u32 = 100_000;
const RUNS: usize = 15;
/// How much longer the work may take.
const LONGER: f64 = 1.02;

/// `OccupyParams`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct Params {
    out: u64,
    rounds: u32,
    reserved: u32,
}

/// What the parts of a call took on the GPU.
#[derive(Debug, Clone, Copy)]
struct Times {
    send: Duration,
    work: Duration,
    receive: Duration,
    all: Duration,
}

#[derive(Debug, Clone, Copy)]
enum Call {
    Dispatch,
    Combine,
}

struct Case<'a> {
    rank: &'a Rank,
    occupy: Function,
    shape: Shape,
    events: [GpuEvent; 4],
    x: OwnedTensor,
    idx: OwnedTensor,
    weights: OwnedTensor,
    rows: OwnedTensor,
    scales: OwnedTensor,
    y: OwnedTensor,
    sums: OwnedTensor,
    handle: Option<LowLatencyHandle>,
}

impl<'a> Case<'a> {
    fn new(rank: &'a Rank) -> Self {
        let zeros = |dtype, shape: &[usize]| rank.gpu.zeros(dtype, shape, &rank.stream).unwrap();
        let up = |tensor: Tensor<'_>| rank.gpu.upload(&tensor, &rank.stream).unwrap();
        // All experts alike, half of them here.
        let idx: Vec<i64> = (0..TOKENS * TOP_K)
            .map(|i| ((i / TOP_K * 5 + i % TOP_K * 9) % EXPERTS) as i64)
            .collect();
        let [local, most] = [EXPERTS / RANKS, RANKS * TOKENS];
        // A block takes all shared memory of its SM, so that no other has room there.
        let shared_bytes = rank.context.device.shared_memory().unwrap();
        Self {
            rank,
            occupy: rank.kernel(c"occupy", shared_bytes),
            shape: Shape {
                blocks: rank.gpu.sms().unwrap(),
                threads: 1024,
                shared_bytes,
                cooperative: false,
            },
            events: std::array::from_fn(|_| rank.gpu.event().unwrap()),
            x: zeros(DType::Bf16, &[TOKENS, HIDDEN]),
            idx: up(Tensor::new(&idx, &[TOKENS, TOP_K]).unwrap()),
            weights: up(Tensor::new(&[1f32; TOKENS * TOP_K], &[TOKENS, TOP_K]).unwrap()),
            rows: zeros(DType::F8E4M3, &[local, most, HIDDEN]),
            scales: zeros(DType::F32, &[local, most, HIDDEN / 128]),
            y: zeros(DType::Bf16, &[local, most, HIDDEN]),
            sums: zeros(DType::Bf16, &[TOKENS, HIDDEN]),
            handle: None,
        }
    }

    fn mark(&self, event: usize) {
        self.events[event].record(&self.rank.stream).unwrap();
    }

    /// Enqueues work on all SMs.
    fn work(&self, rounds: u32) {
        let params = Params {
            out: self.sums.as_tensor().as_ptr().addr() as u64,
            rounds,
            reserved: 0,
        };
        // SAFETY: the struct is the kernel's parameter; it writes nothing.
        unsafe {
            self.occupy
                .launch(&self.rank.driver_stream(), self.shape, &params)
        }
        .unwrap();
    }

    /// All ranks are idle but for the lead-in.
    fn ready(&self) {
        self.rank.settle();
        self.work(LEAD_IN);
    }

    fn alone(&self) -> Duration {
        self.ready();
        self.mark(0);
        self.work(ROUNDS);
        self.mark(1);
        self.events[1].synchronize().unwrap();
        self.events[1].elapsed(&self.events[0]).unwrap()
    }

    /// Both halves of a call with work between them, or as one launch.
    fn call(&mut self, call: Call, works: bool) -> Times {
        self.ready();
        self.mark(0);
        match call {
            Call::Dispatch => self.dispatch(works),
            Call::Combine => self.combine(works),
        }
        self.mark(3);
        self.events[3].synchronize().unwrap();
        let part = |from: usize, to: usize| self.events[to].elapsed(&self.events[from]).unwrap();
        Times {
            send: part(0, 1),
            work: part(1, 2),
            receive: part(2, 3),
            all: part(0, 3),
        }
    }

    fn between(&self, works: bool) {
        self.mark(1);
        if works {
            self.work(ROUNDS);
        }
        self.mark(2);
    }

    fn dispatch(&mut self, works: bool) {
        let (x, idx) = (self.x.as_tensor(), self.idx.as_tensor());
        let input = LowLatencyDispatchInput {
            format: RowFormat::Fp8(ScaleFormat::F32),
            stream: self.rank.stream.as_stream(),
            at_once: !works,
            ..LowLatencyDispatchInput::new(x, idx, TOKENS, EXPERTS)
        };
        let pending = self.rank.buffer.low_latency_dispatch(input).unwrap();
        self.between(works);
        let out = LowLatencyDispatchOutput {
            x: self.rows.as_tensor_mut(),
            scales: Some(self.scales.as_tensor_mut()),
        };
        let (_, handle) = pending.finish_into(out).unwrap();
        self.handle = Some(handle);
    }

    fn combine(&mut self, works: bool) {
        let handle = self.handle.as_ref().expect("dispatched before");
        let (y, idx) = (self.y.as_tensor(), self.idx.as_tensor());
        let input = LowLatencyCombineInput {
            stream: self.rank.stream.as_stream(),
            at_once: !works,
            ..LowLatencyCombineInput::new(y, idx, self.weights.as_tensor(), handle)
        };
        let pending = self.rank.buffer.low_latency_combine(input).unwrap();
        self.between(works);
        pending.finish_into(self.sums.as_tensor_mut()).unwrap();
    }
}

fn median(times: impl Iterator<Item = Duration>) -> Duration {
    let mut times: Vec<_> = times.collect();
    times.sort_unstable();
    times[times.len() / 2]
}

#[test]
fn work_between_the_halves_takes_no_longer_and_hides_the_wire() {
    let setup = Setup {
        ranks: RANKS,
        config: BufferConfig {
            low_latency: Some(LowLatencyConfig {
                max_tokens_per_rank: TOKENS,
                hidden: HIDDEN,
                num_experts: EXPERTS,
                exact_top_k: None,
            }),
            ..BufferConfig::default()
        },
        source: Some(SOURCE),
    };
    // On one GPU the ranks' work would wait for each other's.
    run(2, &setup, |rank| {
        let mut case = Case::new(rank);
        for call in [Call::Dispatch, Call::Combine] {
            for _ in 0..3 {
                case.call(call, false);
                case.call(call, true);
                case.alone();
            }
        }
        for call in [Call::Dispatch, Call::Combine] {
            // By turns, so that the GPU's clock is the same for all.
            let runs: Vec<_> = (0..RUNS)
                .map(|_| (case.alone(), case.call(call, true), case.call(call, false)))
                .collect();
            let alone = median(runs.iter().map(|run| run.0));
            let work = median(runs.iter().map(|run| run.1.work));
            let send = median(runs.iter().map(|run| run.1.send));
            let receive = median(runs.iter().map(|run| run.1.receive));
            let together = median(runs.iter().map(|run| run.2.all));
            let longer = work.as_secs_f64() / alone.as_secs_f64();
            println!(
                "rank {}, {call:?}: work {alone:?} alone, {work:?} between the halves ({longer:.4}); \
                 send {send:?}, receive behind the work {receive:?}, both as one launch without work {together:?}",
                rank.rank
            );
            assert!(
                longer <= LONGER,
                "{call:?}: {longer:.4} times as long as alone"
            );
            assert!(receive < together, "{call:?}: {receive:?} of {together:?}");
        }
        rank.settle();
    });
}
