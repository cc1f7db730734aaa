//! The library's errors, made again from what C tells of them.

use std::{ffi::CStr, time::Duration};

use deep_ep_c::status::{ErrorDetails, deep_ep_last_error_details};
use library::{Error, Rank, Reject, Result};

use super::made;

/// The error of the call of `rank` that returned `status`.
pub(crate) fn check(status: i32, rank: usize) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    let mut details = made!(ErrorDetails);
    // SAFETY: a struct with its size.
    assert_eq!(unsafe { deep_ep_last_error_details(&mut details) }, 0);
    assert_eq!(details.status, status);
    let error = error(&details, rank);
    // What C shows is what the library would have said.
    assert_eq!(text(details.message), error.to_string());
    Err(error)
}

fn text(pointer: *const std::ffi::c_char) -> String {
    // SAFETY: texts are never NULL, and good until another call fails.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().expect("UTF-8").to_owned()
}

fn error(details: &ErrorDetails, this_rank: usize) -> Error {
    assert_eq!(details.ranks.is_null(), details.num_ranks == 0);
    // SAFETY: so many ranks are there.
    let ranks = (0..details.num_ranks).map(|at| unsafe { details.ranks.add(at).read() });
    let ranks: Vec<_> = ranks.map(Rank).collect();
    let rank = || Rank(usize::try_from(details.rank).expect("a rank"));
    let [argument, value, limit, operation, stage] = [
        details.argument,
        details.value,
        details.limit,
        details.operation,
        details.stage,
    ]
    .map(text);
    let (operation, stage) = (operation.into(), stage.into());
    match details.status {
        1 => Reject::new(argument, value, limit).into(),
        2 => Error::PeerRejected {
            rank: rank(),
            reason: Reject::new(argument, value, limit),
        },
        3 => Error::SettingsDiffer {
            setting: argument.into(),
            this_rank: Rank(this_rank),
            this_value: value,
            other_rank: rank(),
            other_value: limit,
        },
        4 => Error::Timeout {
            operation,
            stage,
            ranks,
            waited: Duration::from_secs_f64(details.waited_seconds),
        },
        5 => Error::Aborted {
            by: rank(),
            operation,
            stage,
            ranks,
        },
        6 => Error::PeerLost {
            operation,
            stage,
            ranks,
        },
        7 => Error::Abandoned { operation },
        8 => Error::Unsupported {
            feature: argument.into(),
            why: limit,
        },
        9 => Error::OutOfMemory {
            purpose: argument.into(),
            requested: value.parse().expect("bytes"),
            limit: limit.parse().expect("bytes"),
        },
        10 => Error::Bootstrap {
            stage,
            reason: limit,
        },
        other => panic!("status {other}: {}", text(details.message)),
    }
}
