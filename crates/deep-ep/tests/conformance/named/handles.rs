//! Handles belong to no buffer, and what does not fit one is an error.

use deep_ep::{
    CombineInput, Communicator, DispatchHandle, DispatchInput, Error, Rank, Routes, Tensor,
};
use half::bf16;

use super::{blames, buffer, buffer_for, still_works};
use crate::{
    high_throughput::{self, Calls, Received},
    launch::{Launch, Params, run, run_both},
    low_latency,
    world::{World, WorldPlan},
};

/// The handle in its parts and put together again.
fn rebuilt(handle: &DispatchHandle) -> DispatchHandle {
    DispatchHandle::from_parts(
        handle.rank(),
        handle.rank_prefix_matrix(),
        handle.recv_src_idx(),
        handle.is_token_in_rank(),
    )
    .expect("its own parts")
}

/// A handle of a buffer that is gone serves combine and dispatch on another.
pub(crate) fn on_a_later_buffer(communicator: &Communicator, _: &Params) {
    let world = World::new(
        &WorldPlan {
            tokens: 9,
            ..Default::default()
        },
        communicator.size(),
    );
    let first = buffer_for(communicator, &world);
    let handle = high_throughput::dispatch(&first, &world, &Calls::default()).handle;
    let low_latency_handle = low_latency::dispatch(&first, &world, &Default::default());
    drop(first);
    let later = buffer_for(communicator, &world);
    for handle in [handle.clone(), rebuilt(&handle)] {
        let routes = Routes::Handle(&handle);
        let again = high_throughput::dispatch_along(&later, &world, &Calls::default(), routes);
        high_throughput::combine(&later, &world, &Calls::default(), again);
        let old = Received::of_handle(handle);
        high_throughput::combine(&later, &world, &Calls::default(), old);
    }
    low_latency::combine(&later, &world, &Default::default(), &low_latency_handle, 0);
}

#[test]
fn a_handle_serves_a_buffer_made_later() {
    run_both(3, "on_a_later_buffer", Params::default());
}

/// Rank 1 uses its handle with tensors of other shapes, or that of another rank.
pub(crate) fn shapes_do_not_fit(communicator: &Communicator, _: &Params) {
    let me = communicator.rank();
    let world = World::new(&WorldPlan::default(), communicator.size());
    let buffer = buffer(communicator);
    let handle = high_throughput::dispatch(&buffer, &world, &Calls::default()).handle;
    let blame = me == Rank(1);
    let many = vec![bf16::ONE; 100 * 16];

    let tokens = world.plan.tokens + usize::from(blame);
    let x = Tensor::new(&many, &[tokens, 16]).unwrap();
    let done = buffer.dispatch(DispatchInput::new(x, Routes::Handle(&handle)));
    let error = done
        .and_then(|pending| pending.finish())
        .expect_err("a token too many");
    blames(
        error,
        me,
        Rank(1),
        "handle",
        &value_on(Rank(1), &handle, communicator),
    );
    still_works(&buffer);

    let rows = handle.num_recv_rows() - usize::from(blame);
    let x = Tensor::new(&many, &[rows, 16]).unwrap();
    let done = buffer.combine(CombineInput::new(x, &handle));
    let error = done
        .and_then(|pending| pending.finish())
        .expect_err("a row too few");
    let argument = match error {
        Error::InvalidArgument(reject) if blame => reject.argument,
        Error::PeerRejected {
            rank: Rank(1),
            reason,
        } if !blame => reason.argument,
        other => panic!("{other}"),
    };
    assert_eq!(argument, "x");
    still_works(&buffer);

    // A handle of rank 0.
    let stranger = of_rank_zero(&handle);
    let used = if blame { &stranger } else { &handle };
    let x = Tensor::new(&many, &[world.plan.tokens, 16]).unwrap();
    let done = buffer.dispatch(DispatchInput::new(x, Routes::Handle(used)));
    let error = done
        .and_then(|pending| pending.finish())
        .expect_err("not its handle");
    assert!(matches!(
        error,
        Error::InvalidArgument(_) | Error::PeerRejected { rank: Rank(1), .. }
    ));
    still_works(&buffer);
}

/// How the handle of `rank` is shown.
fn value_on(rank: Rank, handle: &DispatchHandle, communicator: &Communicator) -> String {
    let shown = communicator
        .all_gather(format!("{handle:?}").as_bytes())
        .expect("all ranks");
    String::from_utf8_lossy(&shown[rank.0]).into_owned()
}

fn of_rank_zero(handle: &DispatchHandle) -> DispatchHandle {
    let ranks = handle.num_ranks();
    DispatchHandle::from_parts(
        Rank(0),
        Tensor::new(&vec![0; ranks * ranks], &[ranks, ranks]).unwrap(),
        handle.recv_src_idx(),
        handle.is_token_in_rank(),
    )
    .expect("parts that fit each other")
}

#[test]
fn a_handle_whose_shapes_do_not_fit_is_an_error_and_the_next_call_works() {
    run_both(3, "shapes_do_not_fit", Params::default());
}

/// Rank 0 uses the handle of another dispatch than the others.
pub(crate) fn handles_of_two_dispatches(communicator: &Communicator, _: &Params) {
    let me = communicator.rank();
    let buffer = buffer(communicator);
    // Every token goes to every rank.
    let all = |tokens: usize| {
        let ranks = communicator.size();
        let mut world = World::of_tokens(
            &WorldPlan {
                experts: 1,
                top_k: 3,
                ..Default::default()
            },
            &vec![tokens; ranks],
        );
        for rank in &mut world.ranks {
            rank.choose(|i| (i % 3) as i64);
        }
        world
    };
    let (short, long) = (all(2), all(5));
    let handles = [&short, &long]
        .map(|world| high_throughput::dispatch(&buffer, world, &Calls::default()).handle);
    let (mine, tokens) = if me == Rank(0) {
        (&handles[0], 2)
    } else {
        (&handles[1], 5)
    };
    let many = vec![bf16::ONE; 100 * 16];
    for landing in [deep_ep::Landing::Loan, deep_ep::Landing::Caller] {
        let x = Tensor::new(&many, &[tokens, 16]).unwrap();
        let input = DispatchInput::new(x, Routes::Handle(mine));
        let input = DispatchInput { landing, ..input };
        let error = buffer
            .dispatch(input)
            .unwrap()
            .finish()
            .expect_err("handles differ");
        assert_eq!(super::invalid(error).argument, "handle");
        still_works(&buffer);
        let x = Tensor::new(&many, &[mine.num_recv_rows(), 16]).unwrap();
        let error = buffer.combine(CombineInput::new(x, mine)).unwrap().finish();
        assert_eq!(
            super::invalid(error.expect_err("handles differ")).argument,
            "handle"
        );
        still_works(&buffer);
    }
}

#[test]
fn handles_of_different_dispatches_are_an_error() {
    run(
        Launch::Threads,
        3,
        "handles_of_two_dispatches",
        Params::default(),
    );
}
