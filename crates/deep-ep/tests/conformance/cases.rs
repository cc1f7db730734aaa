//! The cases by name, so that a started process finds the one it is to play.

use crate::{launch, launch::Case, properties};

/// The case called `name`.
pub(crate) fn find(name: &str) -> Case {
    let found = CASES.iter().find(|(known, _)| *known == name);
    found
        .unwrap_or_else(|| panic!("{name} is not in the list of cases"))
        .1
}

macro_rules! cases {
    ($($module:ident::$case:ident,)*) => {
        const CASES: &[(&str, Case)] = &[$((stringify!($case), $module::$case),)*];
    };
}

cases! {
    launch::fails_on_one_rank,
    properties::high_throughput_case,
    properties::low_latency_case,
}
