//! Ranks as threads, each with a GPU and a stream.

use deep_ep::{
    Buffer, BufferConfig, Communicator, EngineChoice, LowLatencyConfig,
    cuda::{Gpu, GpuStream},
};

/// One rank of a test.
pub(crate) struct Rank {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) communicator: Communicator,
    pub(crate) buffer: Buffer,
    pub(crate) gpu: Gpu,
    pub(crate) stream: GpuStream,
}

impl Rank {
    fn new(communicator: Communicator, low_latency: Option<LowLatencyConfig>) -> Self {
        let gpus = Gpu::count().expect("GPUs are here");
        let (rank, ranks) = (communicator.rank().0, communicator.size());
        let config = BufferConfig {
            engine: EngineChoice::Cuda,
            device: Some(rank % gpus),
            timeout: std::time::Duration::from_secs(10),
            low_latency,
            ..BufferConfig::default()
        };
        let gpu = Gpu::new(rank % gpus).expect("a GPU");
        Self {
            rank,
            ranks,
            buffer: Buffer::new(&communicator, config).expect("a buffer"),
            communicator,
            stream: gpu.stream().expect("a stream"),
            gpu,
        }
    }

    /// Everything that was enqueued is done and went well, on all ranks.
    #[track_caller]
    pub(crate) fn settle(&self) {
        self.stream.synchronize().expect("no kernel failed");
        self.buffer.check().expect("every call went well");
        self.communicator.barrier().expect("all ranks");
    }
}

/// Runs `work` on so many ranks, if there is a GPU.
pub(crate) fn run(
    ranks: usize,
    low_latency: Option<LowLatencyConfig>,
    work: impl Fn(&Rank) + Send + Sync,
) {
    if Gpu::count().unwrap_or(0) == 0 {
        eprintln!("left out: there is no GPU");
        return;
    }
    let group = Communicator::local(ranks).expect("a group of threads");
    std::thread::scope(|scope| {
        let threads: Vec<_> = group
            .into_iter()
            .map(|communicator| scope.spawn(|| work(&Rank::new(communicator, low_latency))))
            .collect();
        for thread in threads {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
}
