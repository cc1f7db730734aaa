//! Low-latency calls without some of the ranks.

use std::time::Duration;

use deep_ep::{Buffer, BufferConfig, Communicator, Rank};

use crate::{
    launch::{Launch, Params, run, run_both},
    low_latency::{self, Calls},
    world::{World, WorldPlan},
};

/// One rank stops calling; the others mask it, or find out that it does not come.
pub(crate) fn a_rank_leaves(communicator: &Communicator, params: &Params) {
    let me = communicator.rank();
    let gone = Rank(params.get("gone").expect("a rank"));
    let told = params.get("told") == Some(1);
    let plan = WorldPlan {
        top_k: 4,
        ..Default::default()
    };
    let mut world = World::new(&plan, communicator.size());
    let wires = [0, 1, 2].map(|wire| Calls {
        wire,
        ..Default::default()
    });
    let mut config = BufferConfig {
        enable_shrink: true,
        ..low_latency::config_for(&world, &wires[2])
    };
    if !told {
        config.timeout = Duration::from_millis(1500);
    }
    let buffer = Buffer::new(communicator, config).expect("a buffer");
    // What is in landing memory from now on is not to be taken for something new.
    let rounds = |world: &World| {
        for calls in wires.iter().chain(&wires) {
            low_latency::round_trip(&buffer, world, calls);
        }
    };
    rounds(&world);
    world.masked[gone.0] = true;
    if me != gone {
        if told {
            buffer.set_mask(gone, true).expect("another rank");
        }
        rounds(&world);
        assert_eq!(buffer.masks().expect("masks are enabled"), world.masked);
    }
    // The rank that left must not be seen as dead.
    communicator.barrier().expect("all ranks");
}

#[test]
fn calls_are_made_without_a_masked_rank() {
    for gone in 0..3 {
        let params = Params::default().with("told", 1).with("gone", gone);
        run(Launch::Threads, 3, "a_rank_leaves", params);
    }
}

#[test]
fn a_rank_that_misses_its_deadline_is_masked() {
    let params = Params::default().with("told", 0).with("gone", 1);
    run_both(4, "a_rank_leaves", params);
}
