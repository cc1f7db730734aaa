//! What may be waited for between the halves of a call.

use deep_ep::{
    Buffer, CombineInput, Communicator, DispatchInput, Landing, LowLatencyCombineInput,
    LowLatencyDispatchInput, Rank, Routes, Tensor,
};
use half::bf16;

use super::buffer_for;
use crate::{
    high_throughput,
    launch::{Params, run_both},
    low_latency,
    world::{World, WorldPlan},
};

/// Rank `first` makes its half before any other rank has begun, then the others make theirs.
fn one_before_the_others<T>(
    communicator: &Communicator,
    first: Rank,
    half: impl FnOnce() -> T,
) -> T {
    if communicator.rank() == first {
        let done = half();
        communicator.barrier().expect("all ranks");
        done
    } else {
        communicator.barrier().expect("all ranks");
        half()
    }
}

/// What is begun waits for nobody; hooks run when all ranks have sent.
pub(crate) fn begin_waits_for_nobody(communicator: &Communicator, _: &Params) {
    let world = World::new(&WorldPlan::default(), communicator.size());
    let buffer = buffer_for(communicator, &world);
    for first in (0..communicator.size()).map(Rank).cycle().take(7) {
        for landing in [Landing::Caller, Landing::Loan] {
            dispatch_and_combine(communicator, &buffer, &world, first, landing);
        }
        hooks(communicator, &buffer, &world, first);
    }
}

fn dispatch_and_combine(
    communicator: &Communicator,
    buffer: &Buffer,
    world: &World,
    first: Rank,
    landing: Landing,
) {
    let data = &world.ranks[communicator.rank().0];
    let routes = Routes::TopK {
        topk: data.topk(),
        num_experts: world.experts(),
    };
    let input = DispatchInput {
        landing,
        ..DispatchInput::new(data.x(), routes)
    };
    let pending = one_before_the_others(communicator, first, || buffer.dispatch(input).unwrap());
    let received = high_throughput::finish(pending).unwrap();
    high_throughput::check_from_choices(world, communicator.rank(), &received);
    let ones = vec![bf16::ONE; received.counts.output_rows * 16];
    let ones = Tensor::new(&ones, &[received.counts.output_rows, 16]).unwrap();
    let input = CombineInput::new(ones, &received.handle);
    let pending = one_before_the_others(communicator, first, || buffer.combine(input).unwrap());
    pending.finish().unwrap();
}

fn hooks(communicator: &Communicator, buffer: &Buffer, world: &World, first: Rank) {
    let rank = communicator.rank();
    let data = &world.ranks[rank.0];
    let input =
        LowLatencyDispatchInput::new(data.x(), data.idx(), world.plan.tokens, world.experts());
    let send = || buffer.low_latency_dispatch(input).unwrap();
    let hook = one_before_the_others(communicator, first, send).hook();
    // Nothing is received before all have sent, and ranks receive one after the other.
    communicator.barrier().unwrap();
    let mut received = None;
    let mut hook = Some(hook);
    for turn in 0..communicator.size() {
        if turn == rank.0 {
            received = hook.take().map(|hook| hook().unwrap());
        }
        communicator.barrier().unwrap();
    }
    let received = received.expect("its turn came");
    let handle = received.handle.clone();
    low_latency::check_bf16(world, rank, received);
    // A combine's send waits for the peers' sends, and for no receive.
    let rows = communicator.size() * world.plan.tokens;
    let y = vec![bf16::ONE; world.plan.experts * rows * 16];
    let y = Tensor::new(&y, &[world.plan.experts, rows, 16]).unwrap();
    let weights = data.weights().unwrap();
    let input = LowLatencyCombineInput::new(y, data.idx(), weights, &handle);
    let hook = buffer.low_latency_combine(input).unwrap().hook();
    communicator.barrier().unwrap();
    let mut hook = Some(hook);
    for turn in (0..communicator.size()).rev() {
        if turn == rank.0 {
            hook.take().map(|hook| hook().unwrap());
        }
        communicator.barrier().unwrap();
    }
}

#[test]
fn begin_waits_for_nobody_and_hooks_run_in_any_order() {
    run_both(3, "begin_waits_for_nobody", Params::default());
}
