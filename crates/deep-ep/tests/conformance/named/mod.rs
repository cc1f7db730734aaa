//! Cases with a name: what has gone wrong in libraries of this kind, or might.

pub(crate) mod abandoned;
pub(crate) mod arguments;
pub(crate) mod counts;
pub(crate) mod deterministic;
pub(crate) mod handles;
pub(crate) mod interleaved;
pub(crate) mod large;
pub(crate) mod masks;
pub(crate) mod overlap;
pub(crate) mod rejects;
pub(crate) mod repeated;
pub(crate) mod sanitized;
pub(crate) mod settings;
pub(crate) mod statistics;

use deep_ep::{Buffer, Communicator, Error, Rank, Reject};

use crate::{
    high_throughput,
    launch::config,
    low_latency,
    world::{World, WorldPlan},
};

/// A buffer for low-latency calls with `world`, and all others.
fn buffer_for(communicator: &Communicator, world: &World) -> Buffer {
    let config = low_latency::config_for(world, &low_latency::Calls::default());
    Buffer::new(communicator, config).expect("a buffer")
}

/// A buffer for high-throughput calls.
fn buffer(communicator: &Communicator) -> Buffer {
    Buffer::new(communicator, config()).expect("a buffer")
}

/// Shows that a buffer made by [`buffer`] still works: all kinds of landing, and a combine.
fn still_works(buffer: &Buffer) {
    let world = World::new(&WorldPlan::default(), buffer.num_ranks());
    for landing in 0..=2 {
        let calls = high_throughput::Calls {
            landing,
            ..Default::default()
        };
        high_throughput::round_trip(buffer, &world, &calls);
    }
}

/// The reject in the error of the rank that is to blame.
#[track_caller]
fn invalid(error: Error) -> Reject {
    match error {
        Error::InvalidArgument(reject) => reject,
        other => panic!("expected an invalid argument, found {other}"),
    }
}

/// The rank and the reason in the error of its peers.
#[track_caller]
fn rejected_by_peer(error: Error) -> (Rank, Reject) {
    match error {
        Error::PeerRejected { rank, reason } => (rank, reason),
        other => panic!("expected a peer's reject, found {other}"),
    }
}

/// Checks that the error of `me` is of `to_blame`'s doing and names `argument` and `value`.
#[track_caller]
fn blames(error: Error, me: Rank, to_blame: Rank, argument: &str, value: &str) {
    let reject = if me == to_blame {
        invalid(error)
    } else {
        let (rank, reason) = rejected_by_peer(error);
        assert_eq!(rank, to_blame, "{reason}");
        reason
    };
    assert_eq!(
        (&*reject.argument, &*reject.value),
        (argument, value),
        "{reject}"
    );
}
