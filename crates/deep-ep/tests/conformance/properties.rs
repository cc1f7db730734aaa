//! Random inputs and random ways to make the calls.
//!
//! The seed is printed; `DEEP_EP_TEST_SEED` sets it, `DEEP_EP_TEST_CASES` multiplies the number of
//! cases (1 by default).

use deep_ep::{Buffer, Communicator};
use proptest::{
    prelude::*,
    test_runner::{Config, RngSeed, TestCaseError, TestRunner},
};

use crate::{
    high_throughput,
    launch::{Launch, Params, config, try_run},
    low_latency,
    world::{DTYPES, World, WorldPlan},
};

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Checks that `case` succeeds on random ranks and parameters.
fn check(launch: Launch, cases: u32, case: &str, strategy: impl Strategy<Value = (usize, Params)>) {
    let seed =
        number("DEEP_EP_TEST_SEED").unwrap_or_else(|| getrandom::u64().expect("random bytes"));
    println!("DEEP_EP_TEST_SEED={seed}");
    let times = number("DEEP_EP_TEST_CASES").unwrap_or(1) as u32;
    let mut runner = TestRunner::new(Config {
        cases: cases * times,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        max_shrink_iters: 40,
        ..Config::default()
    });
    let outcome = runner.run(&strategy, |(ranks, params)| {
        try_run(launch, ranks, case, &params).map_err(TestCaseError::fail)
    });
    if let Err(failure) = outcome {
        panic!("with DEEP_EP_TEST_SEED={seed}: {failure}");
    }
}

/// Small numbers more often than large ones.
fn choices_of_a_token() -> impl Strategy<Value = usize> {
    prop_oneof![3 => 1..=4usize, 2 => 5..=12usize, 1 => 13..=32usize]
}

fn experts_of_a_rank() -> impl Strategy<Value = usize> {
    prop_oneof![Just(1), Just(2), Just(3), Just(8), Just(32)]
}

/// Worlds of rows of `hidden` elements.
fn world(hidden: impl Strategy<Value = usize>) -> impl Strategy<Value = WorldPlan> {
    let shape = (
        prop_oneof![Just(0usize), Just(1), Just(7), 2..=40usize],
        0..=5usize,
        experts_of_a_rank(),
        choices_of_a_token(),
        hidden,
    );
    let content = (
        0..1_000_000usize,
        0..=3usize,
        prop_oneof![3 => Just(0usize), 2 => 1..=60usize, 1 => Just(100)],
        prop_oneof![3 => Just(0usize), 1 => Just(40)],
        0..=1usize,
        0..=1usize,
    );
    (shape, content).prop_map(|(shape, content)| {
        let (tokens, spread, experts, top_k, hidden) = shape;
        let (seed, skew, none, duplicates, narrow, strided) = content;
        WorldPlan {
            seed,
            // Rows are long: fewer of them.
            tokens: if hidden >= 2048 {
                tokens.min(13)
            } else {
                tokens
            },
            spread,
            experts,
            top_k,
            hidden,
            skew,
            none,
            duplicates,
            narrow,
            strided,
            ..WorldPlan::default()
        }
    })
}

fn hidden() -> impl Strategy<Value = usize> {
    prop_oneof![
        4 => Just(8usize),
        4 => Just(16),
        4 => Just(136),
        1 => Just(2048),
        1 => Just(7168),
    ]
}

fn high_throughput_cases() -> impl Strategy<Value = (usize, Params)> {
    let kind = (
        prop_oneof![2 => Just(0usize), 1 => 0..DTYPES.len()],
        0..=1usize,
        prop_oneof![2 => Just(0usize), 1 => 1..=5usize],
        0..=1usize,
    );
    let there = (
        0..=3usize,
        0..=2usize,
        0..=2usize,
        prop_oneof![Just(1usize), Just(4), Just(128)],
        prop_oneof![2 => Just(0usize), 1 => 1..=7usize],
        prop_oneof![2 => Just(0usize), 1 => Just(1)],
    );
    let back = (
        0..=2usize,
        hidden(),
        0..=2usize,
        0..=1usize,
        0..=3usize,
        0..=1usize,
    );
    (1..=8usize, world(hidden()), kind, there, back).prop_map(
        |(ranks, world, kind, there, back)| {
            let (dtype, weights, scales, integer_scales) = kind;
            let (routes, landing, into, alignment, worst, num_sms) = there;
            let (back_dtype, back_hidden, biases, back_weights, back_from, back_into) = back;
            let world = WorldPlan {
                dtype,
                weights,
                scales,
                integer_scales,
                ..world
            };
            let calls = high_throughput::Calls {
                routes,
                landing,
                into,
                alignment,
                worst,
                num_sms,
                back_dtype,
                back_hidden: if back_hidden >= 2048 {
                    world.hidden.min(back_hidden)
                } else {
                    back_hidden
                },
                biases,
                back_weights,
                back_from,
                back_into,
            };
            (ranks, Params::from(&world).and(&calls))
        },
    )
}

fn low_latency_cases() -> impl Strategy<Value = (usize, Params)> {
    let there = (0..=40usize, 0..=3usize, 0..=1usize, 0..=3usize);
    let back = (0..=2usize, 0..=2usize, 0..=2usize, 0..=1usize, hidden());
    (1..=8usize, world(hidden()), there, back).prop_map(|(ranks, world, there, back)| {
        let (capacity, format, into, hook) = there;
        let (combines, wire, back_from, rebuild, back_hidden) = back;
        // fp8 needs blocks of 128, packed exponents of 512.
        let grain = [8, 128, 128, 512][format];
        let hidden = world.hidden.next_multiple_of(grain);
        let world = WorldPlan {
            hidden,
            weights: 1,
            ..world
        };
        let calls = low_latency::Calls {
            capacity,
            format,
            into,
            hook,
            combines,
            wire,
            back_hidden: if back_hidden >= 2048 {
                hidden
            } else {
                back_hidden
            },
            back_from,
            rebuild,
        };
        (ranks, Params::from(&world).and(&calls))
    })
}

/// A high-throughput round trip, twice, so that memory is used again.
pub(crate) fn high_throughput_case(communicator: &Communicator, params: &Params) {
    let world = World::new(&params.into(), communicator.size());
    let buffer = Buffer::new(communicator, config()).expect("a buffer");
    let calls = params.into();
    for _ in 0..2 {
        high_throughput::round_trip(&buffer, &world, &calls);
    }
}

/// A low-latency round trip, twice, so that both halves are used.
pub(crate) fn low_latency_case(communicator: &Communicator, params: &Params) {
    let world = World::new(&params.into(), communicator.size());
    let calls = params.into();
    let config = low_latency::config_for(&world, &calls);
    let buffer = Buffer::new(communicator, config).expect("a buffer");
    for _ in 0..2 {
        low_latency::round_trip(&buffer, &world, &calls);
    }
}

#[test]
fn high_throughput_moves_and_sums_what_the_reference_does() {
    check(
        Launch::Threads,
        300,
        "high_throughput_case",
        high_throughput_cases(),
    );
}

#[test]
fn high_throughput_does_so_between_processes() {
    check(
        Launch::Processes,
        25,
        "high_throughput_case",
        high_throughput_cases(),
    );
}

#[test]
fn low_latency_moves_and_sums_what_the_reference_does() {
    check(
        Launch::Threads,
        300,
        "low_latency_case",
        low_latency_cases(),
    );
}

#[test]
fn low_latency_does_so_between_processes() {
    check(
        Launch::Processes,
        25,
        "low_latency_case",
        low_latency_cases(),
    );
}
