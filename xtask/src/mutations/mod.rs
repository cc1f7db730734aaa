//! Ways to break the code that a test must notice.

mod calls;

/// A change of one place, and the tests that must then fail.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mutation {
    pub(crate) name: &'static str,
    /// From the top folder.
    pub(crate) file: &'static str,
    /// Must be there exactly once.
    pub(crate) old: &'static str,
    pub(crate) new: &'static str,
    /// Arguments of `cargo test`, separated by spaces.
    pub(crate) test: &'static str,
}

const SYNC: &str = "crates/deep-ep/src/engine/cpu/sync/mod.rs";
const GROUP: &str = "crates/deep-ep/src/engine/cpu/group.rs";
/// Every interleaving of small programs.
const MODELS: &str = "-p deep-ep --lib engine::cpu::sync";

const fn model(name: &'static str, old: &'static str, new: &'static str) -> Mutation {
    Mutation {
        name,
        file: SYNC,
        old,
        new,
        test: MODELS,
    }
}

const fn group(
    name: &'static str,
    old: &'static str,
    new: &'static str,
    test: &'static str,
) -> Mutation {
    Mutation {
        name,
        file: GROUP,
        old,
        new,
        test,
    }
}

/// All of them.
pub(crate) fn all() -> impl Iterator<Item = &'static Mutation> {
    WORDS.iter().chain(calls::CALLS)
}

/// The protocol's words: their orderings, and what ranks notice and when.
const WORDS: &[Mutation] = &[
    // The protocol's orderings.
    model(
        "mailbox-posted-relaxed",
        "self.call.store(call, Release);",
        "self.call.store(call, Relaxed);",
    ),
    model(
        "mailbox-looked-at-relaxed",
        "match self.call.load(Acquire) {",
        "match self.call.load(Relaxed) {",
    ),
    model(
        "mailbox-number-before-payload",
        "pub(super) fn post(&self, call: u64, payload: &[u64]) {",
        "pub(super) fn post(&self, call: u64, payload: &[u64]) {\n        self.call.store(call, Release);",
    ),
    model(
        "mailbox-takes-an-older-call",
        "found if found == call => Mail::Here,",
        "found if found > 0 && found <= call => Mail::Here,",
    ),
    model(
        "counter-advanced-relaxed",
        "self.0.store(call, Release);",
        "self.0.store(call, Relaxed);",
    ),
    model(
        "counter-read-relaxed",
        "self.0.load(Acquire)",
        "self.0.load(Relaxed)",
    ),
    model(
        "doorbell-rung-relaxed",
        "self.rings.add(1, AcqRel);",
        "self.rings.add(1, Relaxed);",
    ),
    model(
        "doorbell-waited-for-relaxed",
        "let expected = self.rings.add(0, AcqRel);",
        "let expected = self.rings.add(0, Relaxed);",
    ),
    model(
        "doorbell-only-loaded-by-the-waiter",
        "let expected = self.rings.add(0, AcqRel);",
        "let expected = self.rings.load(Acquire);",
    ),
    model(
        "doorbell-rung-after-looking-for-sleepers",
        "        self.rings.add(1, AcqRel);\n        if self.sleepers.load(Relaxed) > 0 {\n            wake();\n        }",
        "        let asleep = self.sleepers.load(Relaxed) > 0;\n        self.rings.add(1, AcqRel);\n        if asleep {\n            wake();\n        }",
    ),
    model(
        "doorbell-sleeper-counts-itself-late",
        "        self.sleepers.add(1, Relaxed);\n        let expected = self.rings.add(0, AcqRel);",
        "        let expected = self.rings.add(0, AcqRel);\n        self.sleepers.add(1, Relaxed);",
    ),
    model(
        "doorbell-looked-at-before-the-last-look",
        "        let expected = self.rings.add(0, AcqRel);\n        let seen = ready();",
        "        let seen = ready();\n        let expected = self.rings.add(0, AcqRel);",
    ),
    model(
        "doorbell-sleeper-forgets-to-leave",
        "        let seen = ready();\n        if !seen {",
        "        let seen = false;\n        if !seen {",
    ),
    model(
        "abort-raised-relaxed",
        "self.state.store(2 + rank as u64, Release);",
        "self.state.store(2 + rank as u64, Relaxed);",
    ),
    model(
        "abort-read-relaxed",
        "            .load(Acquire)\n            .checked_sub(2)",
        "            .load(Relaxed)\n            .checked_sub(2)",
    ),
    model(
        "abort-raised-twice",
        "if self.state.compare_exchange(0, CLAIMED).is_ok() {",
        "if self.state.load(Acquire) == 0 {",
    ),
    // What ranks notice, and when.
    group(
        "lost-rank-not-noticed",
        "self.gone[rank].load(Ordering::Acquire) || own.closed(rank).finished() != 0",
        "own.closed(rank).finished() != 0",
        "-p deep-ep --test failure killed::loans",
    ),
    group(
        "departure-not-told",
        "self.control(peer).closed(self.rank).advance(1);",
        "",
        "-p deep-ep --test failure silent::a_rank_that_drops",
    ),
    group(
        "deadline-ten-times-too-long",
        "let timed_out = waited >= self.timeout;",
        "let timed_out = waited >= self.timeout * 10;",
        "-p deep-ep --test failure silent::the_deadline_comes",
    ),
    group(
        "absent-rank-not-masked",
        "                self.set_mask(rank, true);\n            }\n            return Ok(());",
        "            }\n            return Ok(());",
        "-p deep-ep --test failure masks",
    ),
    group(
        "masked-rank-not-told",
        "self.control(rank).excluded(self.rank).advance(1);",
        "",
        "-p deep-ep --test failure masks::a_masked_rank_that_comes_late",
    ),
    group(
        "masked-rank-waited-for",
        "(0..self.ranks()).filter(|&rank| rank != self.rank && !self.is_masked(rank))",
        "(0..self.ranks()).filter(|&rank| rank != self.rank)",
        "-p deep-ep --test failure masks",
    ),
];
