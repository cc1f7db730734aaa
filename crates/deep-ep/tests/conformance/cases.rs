//! The cases by name, so that a started process finds the one it is to play.

use crate::{
    launch,
    launch::Case,
    named::{
        abandoned, arguments, counts, deterministic, handles, interleaved, large, masks, overlap,
        rejects, repeated, sanitized, settings, statistics,
    },
    properties,
};

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
    abandoned::dispatch_not_finished,
    abandoned::finished_too_late,
    abandoned::others_not_finished,
    abandoned::wrong_outputs,
    arguments::absurd_sizes,
    arguments::device_memory,
    arguments::layout_and_wrong_ids,
    arguments::one_unusable_config,
    counts::around_4096,
    counts::capacity_256,
    counts::many_bytes,
    counts::nobody_has_tokens,
    counts::one_rank_is_hot,
    counts::roles_swap,
    deterministic::again_and_with_others,
    handles::handles_of_two_dispatches,
    handles::on_a_later_buffer,
    handles::shapes_do_not_fit,
    interleaved::two_buffers,
    interleaved::two_low_latency_buffers,
    large::all_rows_to_one_rank,
    large::many_experts,
    masks::a_rank_leaves,
    overlap::begin_waits_for_nobody,
    rejects::ids_out_of_range,
    rejects::minus_seven,
    rejects::one_row_more,
    rejects::one_token_more,
    rejects::wrong_low_latency_combine,
    repeated::numbered_calls,
    repeated::one_loan,
    sanitized::every_kind,
    settings::buffers_made_differently,
    settings::calls_made_differently,
    statistics::rows_copied,
}
