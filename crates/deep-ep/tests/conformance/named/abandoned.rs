//! Calls that were begun and not finished.

use deep_ep::{
    Buffer, CombineInput, Communicator, DType, DispatchInput, DispatchOutput, Landing,
    LowLatencyDispatchInput, Rank, Result, Routes,
};
use half::bf16;

use super::{buffer, buffer_for, invalid, rejected_by_peer, still_works};
use crate::{
    high_throughput::{self, Calls},
    launch::{Launch, Params, run, run_both},
    low_latency,
    world::{Memory, World, WorldPlan},
};

/// How rank 1 gets rid of a call.
fn give_up<T>(pending: T, forget: bool) {
    if forget {
        std::mem::forget(pending);
    } else {
        drop(pending);
    }
}

/// Rank 1 does not finish a dispatch.
pub(crate) fn dispatch_not_finished(communicator: &Communicator, _: &Params) {
    let me = communicator.rank();
    let world = World::new(&WorldPlan::default(), communicator.size());
    let buffer = buffer(communicator);
    let data = &world.ranks[me.0];
    let routes = Routes::TopK {
        topk: data.topk(),
        num_experts: world.experts(),
    };
    for (landing, forget) in [
        (Landing::Loan, false),
        (Landing::Loan, true),
        (Landing::Caller, false),
        (Landing::Caller, true),
    ] {
        let input = DispatchInput {
            landing,
            ..DispatchInput::new(data.x(), routes)
        };
        let mut pending = buffer.dispatch(input).expect("the arguments are accepted");
        if me == Rank(1) {
            if forget {
                pending.counts().expect("every rank has begun");
            }
            give_up(pending, forget);
        } else {
            outcome(pending.finish(), landing, world.plan.hidden);
        }
        still_works(&buffer);
    }
}

/// Rows for the caller's memory were sent when the call was begun. Rows of a loan may be sent when
/// it is finished; then the others learn that rank 1 gave up.
fn outcome(done: Result<deep_ep::Dispatched>, landing: Landing, hidden: usize) {
    match done {
        Ok(received) => assert_eq!(received.x.shape()[1], hidden),
        Err(error) => {
            assert_eq!(
                landing,
                Landing::Loan,
                "the rows were there already: {error}"
            );
            let (rank, reason) = rejected_by_peer(error);
            assert_eq!((rank, &*reason.value), (Rank(1), "abandoned"));
        }
    }
}

#[test]
fn a_dispatch_that_is_dropped_or_forgotten_ends_with_a_reject_and_the_next_call_works() {
    run_both(3, "dispatch_not_finished", Params::default());
}

/// Rank 1 finishes neither combines nor low-latency calls, whose rows are sent when they begin.
pub(crate) fn others_not_finished(communicator: &Communicator, _: &Params) {
    let me = communicator.rank();
    let world = World::new(&WorldPlan::default(), communicator.size());
    let buffer = buffer_for(communicator, &world);
    for forget in [false, true, false] {
        let received = high_throughput::dispatch(&buffer, &world, &Calls::default());
        let rows = vec![bf16::ONE; received.counts.output_rows * 16];
        let rows = deep_ep::Tensor::new(&rows, &[received.counts.output_rows, 16]).unwrap();
        let pending = buffer
            .combine(CombineInput::new(rows, &received.handle))
            .unwrap();
        if me == Rank(1) {
            give_up(pending, forget);
        } else {
            pending.finish().expect("the rows were there already");
        }
        low_latency_not_finished(&buffer, &world, forget);
        still_works(&buffer);
        low_latency::round_trip(&buffer, &world, &low_latency::Calls::default());
    }
}

fn low_latency_not_finished(buffer: &Buffer, world: &World, forget: bool) {
    let data = &world.ranks[buffer.rank().0];
    let input =
        LowLatencyDispatchInput::new(data.x(), data.idx(), world.plan.tokens, world.experts());
    let pending = buffer.low_latency_dispatch(input).unwrap();
    if buffer.rank() == Rank(1) {
        give_up(pending, forget);
    } else {
        pending.finish().expect("the rows were there already");
    }
}

#[test]
fn other_calls_that_are_dropped_or_forgotten_do_not_disturb_the_next() {
    run(Launch::Threads, 3, "others_not_finished", Params::default());
}

/// A pending call on which another was begun is an error, not a wrong result.
pub(crate) fn finished_too_late(communicator: &Communicator, _: &Params) {
    let me = communicator.rank();
    let world = World::new(&WorldPlan::default(), communicator.size());
    let buffer = buffer(communicator);
    let data = &world.ranks[me.0];
    let routes = Routes::TopK {
        topk: data.topk(),
        num_experts: world.experts(),
    };
    let input = DispatchInput::new(data.x(), routes);
    let first = buffer.dispatch(input).unwrap();
    still_works(&buffer);
    let error = first.finish().expect_err("another call was begun");
    assert!(matches!(error, deep_ep::Error::Abandoned { .. }), "{error}");
    still_works(&buffer);
}

#[test]
fn a_call_cannot_be_finished_after_another_was_begun() {
    run(Launch::Threads, 3, "finished_too_late", Params::default());
}

/// Rank 1 passes outputs that do not fit.
pub(crate) fn wrong_outputs(communicator: &Communicator, _: &Params) {
    let me = communicator.rank();
    let world = World::new(&WorldPlan::default(), communicator.size());
    let buffer = buffer(communicator);
    let data = &world.ranks[me.0];
    let routes = Routes::TopK {
        topk: data.topk(),
        num_experts: world.experts(),
    };
    for landing in [Landing::Loan, Landing::Caller] {
        let input = DispatchInput {
            landing,
            ..DispatchInput::new(data.x(), routes)
        };
        let mut pending = buffer.dispatch(input).expect("the arguments are accepted");
        if me == Rank(1) {
            let rows = pending.counts().expect("every rank has begun").output_rows;
            let mut x = Memory::new(DType::Bf16, &[rows + 1, world.plan.hidden]);
            let done = pending.finish_into(DispatchOutput::new(x.tensor_mut()));
            let reject = invalid(done.expect_err("a row too many"));
            assert_eq!(reject.argument, "recv_x");
        } else {
            outcome(pending.finish(), landing, world.plan.hidden);
        }
        still_works(&buffer);
    }
}

#[test]
fn outputs_that_do_not_fit_end_the_call_and_the_next_works() {
    run(Launch::Threads, 3, "wrong_outputs", Params::default());
}
