//! What calls do, in which order, and when they give memory back.

use super::Mutation;

/// A change in the CPU engine that the conformance suite must notice. A deadline of 4 seconds ends
/// ranks that would wait for ever.
macro_rules! call {
    ($name:literal, $file:literal, $old:literal, $new:literal, $test:literal $(,)?) => {
        Mutation {
            name: $name,
            file: concat!("crates/deep-ep/src/engine/cpu/", $file),
            old: $old,
            new: $new,
            test: concat!("-p deep-ep --test conformance ", $test),
        }
    };
}

pub(super) const CALLS: &[Mutation] = &[
    call!(
        "push-to-the-first-sources-rows",
        "dispatch/transfer.rs",
        "Self::first_rows(announced, peer)[group.rank()]",
        "Self::first_rows(announced, peer)[0]",
        "named::counts::one_rank_is_empty",
    ),
    call!(
        "pull-by-slot-instead-of-token",
        "dispatch/transfer.rs",
        "copier.copy(rows.row(tokens[i] as usize), to.row(i), store);",
        "copier.copy(rows.row(i), to.row(i), store);",
        "named::counts::counts_of_4095",
    ),
    call!(
        "delivery-of-rows-not-waited-for",
        "dispatch/transfer.rs",
        "let mut missing: Vec<_> = group.peers().collect();",
        "let mut missing: Vec<usize> = vec![];",
        "named::repeated::nothing_is_stale",
    ),
    call!(
        "combine-delivery-not-waited-for",
        "combine.rs",
        "group.wait(at, group.peers().collect(), Absent::Fail, |peer| {",
        "group.wait(at, vec![], Absent::Fail, |peer| {",
        "named::counts::counts_of_4095",
    ),
    call!(
        "staged-rows-delivered-early",
        "dispatch/mod.rs",
        "    this.stage(&mut turn, input, stage);\n    this.deliver(&mut turn, |_| STAGED);",
        "    this.staged = Some(stage.offset());\n    this.deliver(&mut turn, |_| STAGED);\n    this.stage(&mut turn, input, stage);",
        "named::repeated::nothing_is_stale",
    ),
    call!(
        "low-latency-announced-before-rows",
        "low_latency/dispatch.rs",
        "    write_rows(core, &halves, &half, input, &map, &plan, wire);\n    own.post(&core.group, turn.call);",
        "    own.post(&core.group, turn.call);\n    write_rows(core, &halves, &half, input, &map, &plan, wire);",
        "named::repeated::nothing_is_stale",
    ),
    call!(
        "one-half-for-all-low-latency-calls",
        "low_latency/mod.rs",
        "(call % 2) as usize * self.half",
        "(call % 1) as usize * self.half",
        "named::repeated::nothing_is_stale",
    ),
    call!(
        "one-mailbox-for-all-calls",
        "control.rs",
        "(call % 2) as usize * layout.ranks",
        "(call % 1) as usize * layout.ranks",
        "named::repeated::nothing_is_stale",
    ),
    call!(
        "rank-order-reversed-in-combine",
        "combine.rs",
        "                biases.extend(bias.iter()",
        "                rows.reverse();\n                biases.extend(bias.iter()",
        "properties::high_throughput_moves",
    ),
    call!(
        "duplicate-experts-sent-twice",
        "low_latency/dispatch.rs",
        "if !header[1..=found].contains(&local) {",
        "if true {",
        "properties::low_latency_moves",
    ),
    call!(
        "foreign-weights-not-masked",
        "dispatch/received.rs",
        "if local(id) >= 0 { weight } else { 0.0 }",
        "weight",
        "named::counts",
    ),
    call!(
        "reuse-not-waited-for",
        "core.rs",
        "turn.call.saturating_sub(2),",
        "turn.call.saturating_sub(9),",
        "named::abandoned",
    ),
    call!(
        "stale-stamp-accepted",
        "low_latency/combine.rs",
        "(stamp.read() == stamp_of(self.this.call))",
        "(stamp.read() != 1)",
        "named::masks",
    ),
    call!(
        "blocks-given-back-while-peers-read",
        "core.rs",
        "heap.free_after(block, open.call);",
        "heap.free(block);",
        "named::counts",
    ),
    call!(
        "loan-given-back-while-peers-read",
        "core.rs",
        "call => heap.free_after(block, call),",
        "_ => heap.free(block),",
        "named::counts::counts_of_4095",
    ),
    call!(
        "loan-written-while-peers-read",
        "core.rs",
        "        if call == 0 {\n            return Ok(());",
        "        if true {\n            return Ok(());",
        "named::repeated::a_loan_is_written_again",
    ),
    call!(
        "alignment-ignored",
        "dispatch/mod.rs",
        "align_up(*count, input.expert_alignment)",
        "align_up(*count, 1)",
        "properties::high_throughput_moves",
    ),
    call!(
        "own-rows-from-the-first-source",
        "combine.rs",
        "first_row_from()[rank];",
        "first_row_from()[0];",
        "named::counts",
    ),
    call!(
        "worst-case-not-checked",
        "dispatch/mod.rs",
        "            if rows > worst {",
        "            if false && rows > worst {",
        "named::rejects::one_row_more",
    ),
];
