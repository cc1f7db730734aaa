//! Numbers of tokens, and where they go.

use deep_ep::Communicator;

use super::{buffer, buffer_for};
use crate::{
    high_throughput,
    launch::{Launch, Params, run, run_both},
    low_latency,
    world::{World, WorldPlan},
};

fn every_kind() -> impl Iterator<Item = high_throughput::Calls> + Clone {
    let kinds = (0..=2).flat_map(|landing| (0..=2).map(move |into| (landing, into)));
    kinds.map(|(landing, into)| high_throughput::Calls {
        landing,
        into,
        back_from: landing,
        ..Default::default()
    })
}

/// Each rank in turn has no tokens, or is the only one that has some.
pub(crate) fn roles_swap(communicator: &Communicator, _: &Params) {
    let ranks = communicator.size();
    let plan = WorldPlan {
        tokens: 5,
        ..Default::default()
    };
    let world = World::new(&plan, ranks);
    let buffer = buffer_for(communicator, &world);
    let mut kinds = every_kind().cycle();
    for call in 0..100 {
        let spread = 2 + call % 2;
        let world = World::new(
            &WorldPlan {
                seed: call,
                spread,
                ..plan.clone()
            },
            ranks,
        );
        high_throughput::round_trip(&buffer, &world, &kinds.next().expect("a cycle"));
        let calls = low_latency::Calls {
            capacity: 5,
            ..Default::default()
        };
        low_latency::round_trip(&buffer, &world, &calls);
    }
}

#[test]
fn one_rank_is_empty_and_roles_swap_for_100_calls() {
    run_both(3, "roles_swap", Params::default());
}

/// No rank has a token, then all have.
pub(crate) fn nobody_has_tokens(communicator: &Communicator, _: &Params) {
    let full = World::new(&WorldPlan::default(), communicator.size());
    let empty = World::of_tokens(&WorldPlan::default(), &vec![0; communicator.size()]);
    let buffer = buffer_for(communicator, &full);
    for world in [&empty, &empty, &full, &empty] {
        for calls in every_kind() {
            high_throughput::round_trip(&buffer, world, &calls);
        }
        let worst = high_throughput::Calls {
            worst: 4,
            ..Default::default()
        };
        high_throughput::round_trip(&buffer, world, &worst);
        let calls = low_latency::Calls {
            capacity: 8,
            ..Default::default()
        };
        low_latency::round_trip(&buffer, world, &calls);
    }
}

#[test]
fn all_ranks_are_empty() {
    run_both(4, "nobody_has_tokens", Params::default());
    run(Launch::Threads, 1, "nobody_has_tokens", Params::default());
}

/// Numbers of tokens around a power of two.
pub(crate) fn around_4096(communicator: &Communicator, _: &Params) {
    let plan = WorldPlan {
        hidden: 8,
        top_k: 3,
        experts: 4,
        ..Default::default()
    };
    let world = World::of_tokens(&plan, &[4095, 4096, 1, 4095]);
    let buffer = buffer(communicator);
    for calls in every_kind() {
        high_throughput::round_trip(&buffer, &world, &calls);
    }
}

#[test]
fn counts_of_4095_4096_1_and_4095() {
    run(Launch::Threads, 4, "around_4096", Params::default());
}

/// A capacity that one rank uses up and another not at all.
pub(crate) fn capacity_256(communicator: &Communicator, _: &Params) {
    let plan = WorldPlan {
        top_k: 4,
        experts: 3,
        ..Default::default()
    };
    let world = World::of_tokens(&plan, &[256, 64, 1, 0]);
    let buffer = buffer_for(communicator, &world);
    let all_to_one = World::of_tokens(&WorldPlan { skew: 3, ..plan }, &[256, 64, 1, 0]);
    for world in [&world, &all_to_one, &world] {
        low_latency::round_trip(&buffer, world, &low_latency::Calls::default());
        for worst in [1, 2, 700] {
            let calls = high_throughput::Calls {
                worst,
                ..Default::default()
            };
            high_throughput::round_trip(&buffer, world, &calls);
        }
    }
}

#[test]
fn capacity_of_256_with_256_64_1_and_no_tokens() {
    run_both(4, "capacity_256", Params::default());
}

/// One rank hosts what almost all tokens choose.
pub(crate) fn one_rank_is_hot(communicator: &Communicator, params: &Params) {
    let plan = WorldPlan {
        tokens: 96,
        top_k: 8,
        experts: 8,
        skew: params.get("skew").expect("a skew"),
        stray: params.get("stray").expect("a number"),
        ..Default::default()
    };
    let world = World::new(&plan, communicator.size());
    let buffer = buffer_for(communicator, &world);
    for calls in every_kind() {
        high_throughput::round_trip(&buffer, &world, &calls);
    }
    low_latency::round_trip(&buffer, &world, &low_latency::Calls::default());
}

#[test]
fn all_but_10_tokens_go_to_the_same_eight_experts_of_one_rank() {
    let params = Params::default().with("skew", 2).with("stray", 10);
    run(Launch::Threads, 4, "one_rank_is_hot", params);
}

#[test]
fn every_token_goes_to_one_expert() {
    let params = Params::default().with("skew", 3).with("stray", 0);
    run(Launch::Threads, 4, "one_rank_is_hot", params);
}

/// So many bytes that they are not left in caches, in rows that no cache line fits.
pub(crate) fn many_bytes(communicator: &Communicator, _: &Params) {
    let plan = WorldPlan {
        dtype: 1,
        hidden: 4112,
        top_k: 3,
        none: 20,
        strided: 1,
        ..Default::default()
    };
    let world = World::of_tokens(&plan, &[9000, 9001]);
    let buffer = buffer(communicator);
    for landing in 0..=2 {
        for into in 0..=1 {
            let calls = high_throughput::Calls {
                landing,
                into,
                ..Default::default()
            };
            high_throughput::round_trip(&buffer, &world, &calls);
        }
    }
}

#[test]
fn rows_of_more_bytes_than_caches_hold() {
    run(Launch::Processes, 2, "many_bytes", Params::default());
}
