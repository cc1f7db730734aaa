//! Runs of an operation: graphs or single calls between events.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use deep_ep::{
    Communicator,
    cuda::{Gpu, GpuEvent, GpuStream, Graph},
};

use super::Plan;

/// What runs are made with, on one rank.
pub(super) struct Timer<'a> {
    pub(super) communicator: &'a Communicator,
    pub(super) gpu: &'a Gpu,
    pub(super) stream: &'a GpuStream,
    pub(super) plan: &'a Plan,
}

/// Microseconds of one call in each run, on one rank.
#[derive(Debug, Clone, Default)]
pub(super) struct Runs {
    pub(super) gpu_us: Vec<f64>,
    /// What the calling thread spent in the calls.
    pub(super) host_us: Vec<f64>,
}

impl Timer<'_> {
    /// Runs of calls that the host can make without waiting, as graphs.
    pub(super) fn graph(&self, mut call: impl FnMut() -> deep_ep::Result<()>) -> Result<Runs> {
        let host_us = self.host(&mut call)?;
        let mut graph = self.capture(|| (0..self.plan.calls).try_for_each(|_| call()))?;
        let (start, end) = (self.gpu.event()?, self.gpu.event()?);
        let mut gpu_us = Vec::with_capacity(self.plan.runs);
        for _ in 0..self.plan.runs {
            self.communicator.barrier()?;
            for _ in 0..self.plan.warmup {
                self.launch(&mut graph)?;
            }
            start.record(self.stream)?;
            self.launch(&mut graph)?;
            end.record(self.stream)?;
            self.stream.synchronize()?;
            gpu_us.push(self.per_call(end.elapsed(&start)?));
        }
        Ok(Runs { gpu_us, host_us })
    }

    /// Runs of calls in which the host waits.
    pub(super) fn eager(&self, mut call: impl FnMut() -> deep_ep::Result<()>) -> Result<Runs> {
        let (start, end) = (self.gpu.event()?, self.gpu.event()?);
        let mut runs = Runs::default();
        for _ in 0..self.plan.runs {
            self.communicator.barrier()?;
            for _ in 0..self.plan.warmup {
                call()?;
            }
            start.record(self.stream)?;
            let begin = Instant::now();
            (0..self.plan.calls).try_for_each(|_| call())?;
            runs.host_us.push(self.per_call(begin.elapsed()));
            end.record(self.stream)?;
            self.stream.synchronize()?;
            runs.gpu_us.push(self.per_call(end.elapsed(&start)?));
        }
        Ok(runs)
    }

    /// Runs of both halves of a call, each half a graph of its own: of the first half, and of the
    /// second. `begin` leaves what `finish` takes.
    pub(super) fn halves<P>(
        &self,
        begin: impl FnOnce() -> deep_ep::Result<P>,
        finish: impl FnOnce(P) -> deep_ep::Result<()>,
    ) -> Result<[Runs; 2]> {
        let mut pending = None;
        let mut send = self.capture(|| {
            pending = Some(begin()?);
            Ok(())
        })?;
        let pending = pending.context("a recorded send leaves a call")?;
        let mut receive = self.capture(|| finish(pending))?;
        let calls = self.plan.calls;
        let events = (0..2 * calls + 1)
            .map(|_| self.gpu.event())
            .collect::<deep_ep::Result<Vec<GpuEvent>>>()?;
        let mut runs = [Runs::default(), Runs::default()];
        for _ in 0..self.plan.runs {
            self.communicator.barrier()?;
            // Enough work that the host is ahead of the GPU from here on.
            for _ in 0..self.plan.warmup * calls {
                self.launch(&mut send)?;
                self.launch(&mut receive)?;
            }
            for pair in events.chunks_exact(2) {
                pair[0].record(self.stream)?;
                self.launch(&mut send)?;
                pair[1].record(self.stream)?;
                self.launch(&mut receive)?;
            }
            events[2 * calls].record(self.stream)?;
            self.stream.synchronize()?;
            let mut sums = [Duration::ZERO; 2];
            for (at, pair) in events.windows(2).enumerate() {
                sums[at % 2] += pair[1].elapsed(&pair[0])?;
            }
            for (runs, sum) in runs.iter_mut().zip(sums) {
                runs.gpu_us.push(self.per_call(sum));
            }
        }
        Ok(runs)
    }

    /// What the calling thread spends in calls that the GPU does later.
    fn host(&self, call: &mut impl FnMut() -> deep_ep::Result<()>) -> Result<Vec<f64>> {
        let mut host_us = Vec::with_capacity(self.plan.runs);
        for _ in 0..self.plan.runs {
            self.communicator.barrier()?;
            let begin = Instant::now();
            (0..self.plan.calls).try_for_each(|_| call())?;
            host_us.push(self.per_call(begin.elapsed()));
            self.stream.synchronize()?;
        }
        Ok(host_us)
    }

    fn capture(&self, work: impl FnOnce() -> deep_ep::Result<()>) -> Result<Graph> {
        self.gpu
            .capture(self.stream, work)
            .context("the calls could not be recorded into a graph")
    }

    #[expect(unsafe_code, reason = "only the caller knows what a graph uses")]
    fn launch(&self, graph: &mut Graph) -> Result<()> {
        // SAFETY: the calls in it use tensors, loans, handles and a buffer that the operation's
        // owner holds beyond the runs, which end with the stream synchronised, and nothing else
        // uses them. All ranks launch the same in the same order. If a launch fails, the error ends
        // the program.
        unsafe { graph.launch(self.stream) }?;
        Ok(())
    }

    fn per_call(&self, time: Duration) -> f64 {
        time.as_secs_f64() * 1e6 / self.plan.calls as f64
    }
}
