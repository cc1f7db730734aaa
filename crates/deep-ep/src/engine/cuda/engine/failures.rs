//! What went wrong on the GPU, as errors.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytemuck::Zeroable;

use super::params::{Report, TEXT_BYTES, Terms, status, verdict};
use crate::{
    engine::{
        Operation,
        cuda::driver::{
            context::Context,
            memory::{Pinned, PinnedWords},
        },
    },
    error::{Error, Reject, Result, Text},
    topology::Rank,
};

/// The pinned words in which kernels report, and in which the host tells them who is gone.
pub(crate) struct Failures {
    rank: Rank,
    timeout: Duration,
    report: Mutex<Pinned<Report>>,
    gone: Gone,
    failed: AtomicBool,
    interrupted: AtomicBool,
}

/// The ranks that are gone, as bits that kernels look at.
#[derive(Clone)]
pub(crate) struct Gone(Arc<PinnedWords>);

impl Gone {
    /// Kernels do not wait for `rank` any more.
    pub(crate) fn set(&self, rank: Rank) {
        self.0.words()[0].fetch_or(1 << (rank.0 % 64), Ordering::AcqRel);
    }
}

/// What all ranks concluded about a call that did not come about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Concluded {
    pub(crate) operation: u32,
    pub(crate) verdict: u32,
    pub(crate) rank: u32,
    pub(crate) status: u32,
    pub(crate) detail: [u64; 2],
    pub(crate) num_experts: usize,
}

impl Failures {
    pub(crate) fn new(context: &Arc<Context>, rank: Rank, timeout: Duration) -> Result<Self> {
        Ok(Self {
            rank,
            timeout,
            report: Mutex::new(Pinned::new(context, Report::zeroed())?),
            gone: Gone(Arc::new(PinnedWords::new(context, 1)?)),
            failed: AtomicBool::new(false),
            interrupted: AtomicBool::new(false),
        })
    }

    pub(crate) fn gone(&self) -> Gone {
        self.gone.clone()
    }

    pub(crate) fn gone_address(&self) -> u64 {
        self.gone.0.address()
    }

    pub(crate) fn report_address(&self) -> u64 {
        self.report().address()
    }

    fn report(&self) -> MutexGuard<'_, Pinned<Report>> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The caller's thread is asked to stop: kernels that wait give up, and the group ends.
    pub(crate) fn interrupt(&self, ranks: usize) {
        self.interrupted.store(true, Ordering::Release);
        (0..ranks).for_each(|rank| self.gone.set(Rank(rank)));
    }

    /// The group has ended.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire) || self.check_failed().is_err()
    }

    /// The error that ended the group, if one did.
    pub(crate) fn check_failed(&self) -> Result<()> {
        let report = self.report();
        // SAFETY: the field lies in memory of ours; a kernel writes it whole.
        let failed = unsafe { (&raw const (*report.as_ptr()).failed).read_volatile() };
        if failed == 0 {
            return Ok(());
        }
        self.failed.store(true, Ordering::Release);
        // Its other fields were written before.
        std::sync::atomic::fence(Ordering::Acquire);
        Err(self.failure(&report.load()))
    }

    fn failure(&self, report: &Report) -> Error {
        let ranks_of = |bits: u64| {
            (0..64)
                .filter(|rank| bits >> rank & 1 != 0)
                .map(Rank)
                .collect()
        };
        let ranks = ranks_of(report.missing);
        let operation = operation_name(report.operation);
        match report.failed {
            1 | 3 if self.interrupted.load(Ordering::Acquire) => Error::Aborted {
                by: self.rank,
                operation,
                stage: stage_name(report.stage),
                ranks,
            },
            1 => Error::Timeout {
                operation,
                stage: stage_name(report.stage),
                ranks,
                waited: self.timeout,
            },
            2 => Error::Aborted {
                by: Rank((report.abort >> 32 & 0x7fff_ffff) as usize),
                operation: operation_name(report.abort as u32 >> 8 & 0xff),
                stage: stage_name(report.abort as u32 & 0xff),
                ranks: ranks_of(report.abort_missing),
            },
            _ => Error::PeerLost {
                operation,
                stage: stage_name(report.stage),
                ranks,
            },
        }
    }

    /// The error that ended the group, or what the last call that nobody waited for came to, once.
    pub(crate) fn check(&self) -> Result<()> {
        self.check_failed()?;
        let report = self.report();
        let seen = report.load();
        if seen.verdict == 0 {
            return Ok(());
        }
        // SAFETY: as above; a kernel writes the other fields only while this one is 0.
        unsafe { (&raw mut (*report.as_ptr()).verdict).write_volatile(0) };
        drop(report);
        Err(self.concluded(Concluded {
            operation: seen.verdict_operation,
            verdict: seen.verdict,
            rank: seen.verdict_rank,
            status: seen.verdict_status,
            detail: seen.verdict_detail,
            num_experts: 0,
        }))
    }

    /// The error that a verdict means on this rank.
    pub(crate) fn concluded(&self, what: Concluded) -> Error {
        let rank = Rank(what.rank as usize);
        match what.verdict {
            verdict::DIFFER => self.differs(what.operation, what.detail),
            verdict::HANDLE => Error::invalid(
                "handle",
                format!("on rank {rank} of other row counts"),
                "must be of the same dispatch on all ranks",
            ),
            verdict::OVERFLOW | verdict::GROW => self.rejected(
                rank,
                Reject::new(
                    "num_worst_tokens",
                    what.detail[1],
                    format!(
                        "must be at least the {} rows that come to rank {rank}",
                        what.detail[0]
                    ),
                ),
            ),
            _ if what.status == status::EXPERT_ID => self.rejected(rank, bad_id(&what)),
            _ => {
                let text = self.report().load().text;
                let reject = decode_reject(bytemuck::cast_slice(&text));
                self.rejected(rank, reject)
            }
        }
    }

    fn rejected(&self, rank: Rank, reason: Reject) -> Error {
        if rank == self.rank {
            return reason.into();
        }
        Error::PeerRejected { rank, reason }
    }

    /// Another rank announced another word than this one.
    fn differs(&self, operation: u32, detail: [u64; 2]) -> Error {
        let (word, other) = (detail[0] >> 32 & 0xff, Rank(detail[0] as u32 as usize));
        let (mine, theirs) = ((detail[1] >> 32) as u32, detail[1] as u32);
        let (setting, this_value, other_value) = describe_difference(operation, word, mine, theirs);
        Error::SettingsDiffer {
            setting,
            this_rank: self.rank,
            this_value,
            other_rank: other,
            other_value,
        }
    }
}

fn bad_id(what: &Concluded) -> Reject {
    let (token, choice) = (what.detail[0] >> 8, what.detail[0] & 0xff);
    let argument = format!("topk_idx[{token}, {choice}]");
    let limit = match what.num_experts {
        0 => "must be below num_experts".to_owned(),
        experts => format!("must be below num_experts = {experts}"),
    };
    Reject::new(argument, what.detail[1] as i64, limit)
}

/// The setting that a word of an announcement is about, and two values of it in words.
fn describe_difference(operation: u32, word: u64, a: u32, b: u32) -> (Text, String, String) {
    let numbers = |name: &'static str| (name.into(), a.to_string(), b.to_string());
    match word {
        1 => numbers("the bytes of a row"),
        2 => numbers("num_experts"),
        3 if is_low_latency(operation) => numbers("num_max_dispatch_tokens_per_rank"),
        3 => numbers("words of scales of a row"),
        _ => {
            let (x, y) = (Terms::of_word(a), Terms::of_word(b));
            let name = |terms: Terms| operation_name(terms.operation.into()).into_owned();
            let pick = |setting: &'static str, value: fn(Terms) -> String| {
                (Text::from(setting), value(x), value(y))
            };
            if x.operation != y.operation {
                ("the operation".into(), name(x), name(y))
            } else if x.top_k != y.top_k {
                pick("top-k", |t| t.top_k.to_string())
            } else if x.wide_index != y.wide_index {
                pick("dtype of topk_idx", |t| {
                    if t.wide_index { "i64" } else { "i32" }.into()
                })
            } else if x.weights != y.weights {
                pick("topk_weights", |t| {
                    if t.weights { "given" } else { "none" }.into()
                })
            } else if x.choices != y.choices {
                pick("topk_idx", |t| {
                    if t.choices { "given" } else { "none" }.into()
                })
            } else if x.cached != y.cached {
                pick("handle", |t| if t.cached { "given" } else { "none" }.into())
            } else if x.attempt != y.attempt {
                pick("the call", |t| format!("number {} (modulo 512)", t.attempt))
            } else if x.worst != y.worst {
                pick("num_worst_tokens", |t| {
                    if t.worst { "given" } else { "none" }.into()
                })
            } else if is_low_latency(operation) {
                pick("the format", |t| t.format_name().into())
            } else {
                pick("dtype of x", |t| {
                    ["bf16", "f16", "f32"]
                        .get(usize::from(t.dtype))
                        .copied()
                        .unwrap_or("other")
                        .into()
                })
            }
        }
    }
}

fn is_low_latency(operation: u32) -> bool {
    operation == Operation::LowLatencyDispatch as u32
        || operation == Operation::LowLatencyCombine as u32
}

fn operation_name(code: u32) -> Text {
    Operation::from_code(code.into()).map_or("a call".into(), |operation| operation.name().into())
}

/// `Stage` in words.
fn stage_name(stage: u32) -> Text {
    match stage {
        2 => "counts",
        4 => "rows",
        5 => "weights",
        7 => "blocks of this rank",
        8 => "barrier",
        _ => "unknown",
    }
    .into()
}

/// Argument, value and limit with a NUL behind each, cut to fit.
pub(crate) fn encode_reject(reject: &Reject) -> [u8; TEXT_BYTES] {
    let mut text = [0; TEXT_BYTES];
    let mut at = 0;
    for (part, room) in [
        (reject.argument.as_ref(), 96),
        (reject.value.as_str(), 200),
        (reject.limit.as_ref(), 200),
    ] {
        let mut end = part.len().min(room);
        while !part.is_char_boundary(end) {
            end -= 1;
        }
        text[at..at + end].copy_from_slice(&part.as_bytes()[..end]);
        at += end + 1;
    }
    text
}

fn decode_reject(text: &[u8]) -> Reject {
    let mut parts = text
        .split(|&byte| byte == 0)
        .map(|part| String::from_utf8_lossy(part).into_owned());
    let mut next = || parts.next().unwrap_or_default();
    let (argument, value) = (next(), next());
    Reject::new(argument, value, next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reject_survives_its_text() {
        let reject = Reject::new("topk_idx[17, 3]", 256, "must be below num_experts = 256");
        assert_eq!(decode_reject(&encode_reject(&reject)), reject);
        let long = Reject::new("x".repeat(300), "ä".repeat(300), "y".repeat(300));
        let cut = decode_reject(&encode_reject(&long));
        assert_eq!(
            (cut.argument.len(), cut.value.len(), cut.limit.len()),
            (96, 200, 200)
        );
    }
}
