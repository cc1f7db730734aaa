//! Several buffers, and several jobs, at the same time.

use deep_ep::{
    Buffer, BufferConfig, CombineInput, Communicator, DispatchInput, Landing,
    LowLatencyDispatchInput, Routes, Tensor,
};
use half::bf16;

use super::buffer_for;
use crate::{
    high_throughput::{self, Calls},
    launch::{Job, Launch, Params, config, run, run_both},
    low_latency,
    world::{World, WorldPlan},
};

fn worlds(ranks: usize) -> [World; 2] {
    [1, 2].map(|seed| {
        World::new(
            &WorldPlan {
                seed,
                tokens: 6,
                ..Default::default()
            },
            ranks,
        )
    })
}

fn input<'a>(world: &'a World, buffer: &Buffer, landing: Landing) -> DispatchInput<'a> {
    let data = &world.ranks[buffer.rank().0];
    let routes = Routes::TopK {
        topk: data.topk(),
        num_experts: world.experts(),
    };
    DispatchInput {
        landing,
        ..DispatchInput::new(data.x(), routes)
    }
}

/// The buffers in the order in which this rank uses them.
fn order(rank: usize, opposite: bool) -> [usize; 2] {
    if opposite && rank % 2 == 1 {
        [1, 0]
    } else {
        [0, 1]
    }
}

/// Begins on both buffers, in opposite orders on different ranks, and finishes on both.
pub(crate) fn two_buffers(communicator: &Communicator, params: &Params) {
    let ranks = communicator.size();
    let worlds = worlds(ranks);
    // Calls that are in flight at once share what ranks that share a GPU have of it.
    let small = || {
        let config = BufferConfig {
            num_sms: 6,
            ..config()
        };
        Buffer::new(communicator, config).expect("a buffer")
    };
    let buffers = [small(), small()];
    let me = communicator.rank().0;
    // Loans are pushed when they are finished, so all ranks finish them in the same order.
    let pushed = params.get("loan") == Some(1);
    let landing = if pushed {
        Landing::Loan
    } else {
        Landing::Caller
    };
    let inputs = [0, 1].map(|i| input(&worlds[i], &buffers[i], landing));
    for _ in 0..40 {
        let mut pending = [None, None];
        for i in order(me, true) {
            pending[i] = Some(buffers[i].dispatch(inputs[i]).expect("accepted"));
        }
        let mut received = [None, None];
        for i in order(me + 1, !pushed) {
            let pending = pending[i].take().expect("begun");
            let done = match landing {
                Landing::Loan => high_throughput::finish(pending),
                Landing::Caller => high_throughput::finish_into(pending, &inputs[i]),
            };
            received[i] = Some(done.expect("every rank dispatches"));
        }
        let received = received.map(|received| received.expect("finished"));
        for (world, received) in worlds.iter().zip(&received) {
            high_throughput::check_from_choices(world, communicator.rank(), received);
        }
        combine_both(
            &buffers,
            &received
                .each_ref()
                .map(|r| (&r.handle, r.counts.output_rows)),
        );
    }
    for (buffer, world) in buffers.iter().zip(&worlds) {
        high_throughput::round_trip(buffer, world, &Calls::default());
    }
}

/// Each rank returns ones, so the sum is the number of ranks that a token went to.
fn combine_both(buffers: &[Buffer; 2], handles: &[(&deep_ep::DispatchHandle, usize); 2]) {
    let me = buffers[0].rank().0;
    let ones = [0, 1].map(|i| vec![bf16::ONE; handles[i].1 * 16]);
    let mut pending = [None, None];
    for i in order(me, true) {
        let (handle, rows) = handles[i];
        let rows = Tensor::new(&ones[i], &[rows, 16]).unwrap();
        pending[i] = Some(
            buffers[i]
                .combine(CombineInput::new(rows, handle))
                .expect("accepted"),
        );
    }
    for i in order(me + 1, true) {
        let sums = pending[i]
            .take()
            .expect("begun")
            .finish()
            .expect("every rank combines");
        let goes = handles[i].0.is_token_in_rank();
        let goes = goes
            .as_slice::<u8>()
            .unwrap()
            .chunks_exact(buffers[0].num_ranks());
        for (token, (goes, sums)) in goes
            .zip(sums.x.as_slice::<bf16>().unwrap().chunks_exact(16))
            .enumerate()
        {
            let expected: u8 = goes.iter().sum();
            let right = sums.iter().all(|sum| sum.to_f32() == f32::from(expected));
            assert!(
                right,
                "rank {me}, token {token}: {sums:?} are not {expected}"
            );
        }
    }
}

#[test]
fn two_buffers_are_used_in_opposite_orders_on_different_ranks() {
    run_both(3, "two_buffers", Params::default());
    run(
        Launch::Threads,
        4,
        "two_buffers",
        Params::default().with("loan", 1),
    );
}

/// The same with low-latency sends and receives.
pub(crate) fn two_low_latency_buffers(communicator: &Communicator, _: &Params) {
    let worlds = worlds(communicator.size());
    let buffers = worlds
        .each_ref()
        .map(|world| buffer_for(communicator, world));
    let me = communicator.rank().0;
    for _ in 0..40 {
        let mut pending = [None, None];
        for i in order(me, true) {
            let data = &worlds[i].ranks[me];
            let (max, experts) = (worlds[i].most_tokens(), worlds[i].experts());
            let input = LowLatencyDispatchInput::new(data.x(), data.idx(), max, experts);
            pending[i] = Some(buffers[i].low_latency_dispatch(input).expect("accepted"));
        }
        for i in order(me + 1, true) {
            let done = pending[i]
                .take()
                .expect("sent")
                .finish()
                .expect("every rank sends");
            low_latency::check_bf16(&worlds[i], communicator.rank(), done);
        }
    }
    for (buffer, world) in buffers.iter().zip(&worlds) {
        low_latency::round_trip(buffer, world, &Default::default());
    }
}

#[test]
fn two_low_latency_buffers_are_used_in_opposite_orders_on_different_ranks() {
    run_both(3, "two_low_latency_buffers", Params::default());
}

#[test]
fn two_jobs_run_at_once_on_one_machine() {
    let params = |seed| {
        Params::from(&WorldPlan {
            seed,
            tokens: 50,
            ..Default::default()
        })
    };
    let jobs = [1, 2].map(|seed| {
        let params = params(seed);
        [
            Job::start(3, "high_throughput_case", &params),
            Job::start(2, "low_latency_case", &params),
        ]
    });
    for job in jobs.into_iter().flatten() {
        let failures = job.wait();
        assert!(failures.is_empty(), "{}", failures.join("\n"));
    }
}
