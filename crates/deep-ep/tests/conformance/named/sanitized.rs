//! One small call of every kind: for compute-sanitizer, under which everything takes long.

use deep_ep::{Buffer, Communicator, Routes};

use crate::{
    high_throughput,
    launch::{Launch, Params, run},
    low_latency,
    world::{World, WorldPlan},
};

/// All ways to dispatch and combine, with rows of `hidden` elements.
pub(crate) fn every_kind(communicator: &Communicator, params: &Params) {
    let hidden = params.get("hidden").expect("elements of a row");
    let plan = WorldPlan {
        tokens: 7,
        spread: 1,
        top_k: 3,
        hidden,
        none: 10,
        ..Default::default()
    };
    let world = World::new(&plan, communicator.size());
    let low_latency_calls = |format, wire, hook| low_latency::Calls {
        // A combine has the rows of a model, too.
        back_hidden: hidden,
        format,
        wire,
        hook,
        ..Default::default()
    };
    let exact = low_latency_calls(0, 2, 0);
    let config = low_latency::config_for(&world, &exact);
    let buffer = Buffer::new(communicator, config).expect("a buffer");
    // In a loan and in the caller's memory; without and with a worst case; along a handle.
    for landing in 0..=1 {
        for worst in [0, 3] {
            let calls = high_throughput::Calls {
                landing,
                into: landing,
                worst,
                back_hidden: hidden,
                back_weights: 1,
                back_into: landing,
                ..Default::default()
            };
            high_throughput::round_trip(&buffer, &world, &calls);
        }
        let calls = high_throughput::Calls {
            landing,
            into: landing,
            back_hidden: hidden,
            ..Default::default()
        };
        let handle = high_throughput::dispatch(&buffer, &world, &calls).handle;
        let routes = Routes::Handle(&handle);
        let again = high_throughput::dispatch_along(&buffer, &world, &calls, routes);
        high_throughput::combine(&buffer, &world, &calls, again);
    }
    // Every format, every wire, by hooks and at once.
    for (format, wire, hook) in [
        (0, 0, 1),
        (1, 1, 1),
        (2, 2, 2),
        (3, 0, 2),
        (0, 1, 2),
        (0, 2, 1),
    ] {
        low_latency::round_trip(&buffer, &world, &low_latency_calls(format, wire, hook));
    }
}

#[test]
fn small_calls_of_every_kind() {
    let params = Params::default().with("hidden", 512);
    run(Launch::Threads, 3, "every_kind", params);
}

/// Kernels that are compiled for their sizes.
#[test]
fn small_calls_of_every_kind_with_rows_of_a_model() {
    let params = Params::default().with("hidden", 7168);
    run(Launch::Threads, 3, "every_kind", params);
}
