//! What is counted.

use deep_ep::Communicator;

use super::buffer;
use crate::{
    high_throughput::{self, Calls},
    launch::{Params, run_both},
    world::{World, WorldPlan},
};

/// With loans a row is copied once for each (token, rank), by its source, and combine copies none.
/// What is copied depends on how an engine moves rows, and on a GPU the host does not know it: this
/// is about the CPU engine.
pub(crate) fn rows_copied(communicator: &Communicator, _: &Params) {
    let plan = WorldPlan {
        tokens: 40,
        hidden: 136,
        top_k: 3,
        none: 20,
        ..Default::default()
    };
    let world = World::new(&plan, communicator.size());
    let buffer = buffer(communicator);
    if buffer.engine() != "cpu" {
        return;
    }
    let row_bytes = (plan.hidden * 2) as u64;
    let copied = || buffer.statistics().row_bytes_copied;
    for _ in 0..3 {
        let before = copied();
        let received = high_throughput::dispatch(&buffer, &world, &Calls::default());
        let goes = received.handle.is_token_in_rank();
        let goes = goes.as_slice::<u8>().expect("dense");
        let sent: u64 = goes.iter().map(|&goes| u64::from(goes)).sum();
        assert_eq!(copied() - before, sent * row_bytes, "with loans");
        let before = copied();
        let back = Calls {
            back_from: 2,
            back_hidden: plan.hidden,
            ..Default::default()
        };
        high_throughput::combine(&buffer, &world, &back, received);
        assert_eq!(copied() - before, 0, "combine from a loan");

        // In the caller's memory: staged once for all ranks, then copied out by the receiver.
        let before = copied();
        let calls = Calls {
            landing: 1,
            into: 1,
            ..Default::default()
        };
        let received = high_throughput::dispatch(&buffer, &world, &calls);
        let me = communicator.rank().0;
        let leaves = |goes: &&[u8]| {
            goes.iter()
                .enumerate()
                .any(|(to, &goes)| to != me && goes > 0)
        };
        let goes = received.handle.is_token_in_rank();
        let goes = goes
            .as_slice::<u8>()
            .expect("dense")
            .chunks_exact(communicator.size());
        let staged = goes.filter(leaves).count() + received.counts.output_rows;
        assert_eq!(
            copied() - before,
            staged as u64 * row_bytes,
            "in the caller's memory"
        );
    }
}

#[test]
fn with_loans_one_row_is_copied_for_each_token_and_rank() {
    run_both(4, "rows_copied", Params::default());
}
