//! What one rank rejects ends the call on all, and the next call works.

use deep_ep::{
    Buffer, CombineRows, Communicator, DType, DispatchInput, Error, Landing,
    LowLatencyCombineInput, LowLatencyDispatchInput, OwnedTensor, Rank, Routes, Tensor, TopK,
};
use half::bf16;

use super::{blames, buffer, buffer_for, still_works};
use crate::{
    high_throughput,
    launch::{Launch, Params, run, run_both},
    low_latency,
    world::{World, WorldPlan},
};

/// Choices that no expert has.
const BAD_IDS: [i64; 5] = [8, 9, (1 << 31) - 1, (1 << 32) + 1, i64::MAX];

/// Rank 1 has a choice that no expert has.
pub(crate) fn ids_out_of_range(communicator: &Communicator, _: &Params) {
    let (me, to_blame) = (communicator.rank(), Rank(1));
    let experts = 8;
    let plan = WorldPlan {
        experts: experts / communicator.size(),
        ..Default::default()
    };
    let world = World::new(&plan, communicator.size());
    let buffer = buffer_for(communicator, &world);
    let x = vec![bf16::ONE; 3 * 16];
    let x = Tensor::new(&x, &[3, 16]).unwrap();
    for (i, &bad) in BAD_IDS.iter().enumerate() {
        let mut idx = vec![0i64, 5, 3, -1, 7, 2];
        if me == to_blame {
            idx[3] = bad;
        }
        let narrow: Vec<i32> = idx.iter().map(|&id| id.try_into().unwrap_or(-1)).collect();
        let topk = if bad < 1 << 31 && i % 2 == 0 {
            Tensor::new(&narrow, &[3, 2]).unwrap()
        } else {
            Tensor::new(&idx, &[3, 2]).unwrap()
        };
        for landing in [Landing::Loan, Landing::Caller] {
            let error = dispatch_error(&buffer, x, topk, landing);
            blames(error, me, to_blame, "topk_idx[1, 1]", &bad.to_string());
        }
        let error = low_latency_error(&buffer, x, topk);
        blames(error, me, to_blame, "topk_idx[1, 1]", &bad.to_string());
        if me == to_blame {
            let error = buffer
                .dispatch_layout(topk, experts)
                .expect_err("a bad choice");
            assert!(error.to_string().contains(&bad.to_string()), "{error}");
        }
        still_works(&buffer);
        low_latency::round_trip(&buffer, &world, &low_latency::Calls::default());
    }
}

fn dispatch_error(buffer: &Buffer, x: Tensor<'_>, idx: Tensor<'_>, landing: Landing) -> Error {
    let topk = TopK { idx, weights: None };
    let routes = Routes::TopK {
        topk,
        num_experts: 8,
    };
    let input = DispatchInput {
        landing,
        ..DispatchInput::new(x, routes)
    };
    let done = buffer.dispatch(input).and_then(|pending| pending.finish());
    done.expect_err("a bad choice")
}

fn low_latency_error(buffer: &Buffer, x: Tensor<'_>, idx: Tensor<'_>) -> Error {
    let input = LowLatencyDispatchInput::new(x, idx, 8, 8);
    let done = buffer
        .low_latency_dispatch(input)
        .and_then(|pending| pending.finish());
    done.expect_err("a bad choice")
}

#[test]
fn ids_from_e_to_2_pow_31_and_beyond_are_rejected_naming_the_token() {
    run_both(4, "ids_out_of_range", Params::default());
    run(Launch::Threads, 2, "ids_out_of_range", Params::default());
}

/// A choice of -7 is none.
pub(crate) fn minus_seven(communicator: &Communicator, _: &Params) {
    let plan = WorldPlan {
        none: 50,
        top_k: 5,
        ..Default::default()
    };
    let mut world = World::new(&plan, communicator.size());
    for rank in &mut world.ranks {
        rank.replace_none_by(-7);
    }
    let buffer = buffer_for(communicator, &world);
    high_throughput::round_trip(&buffer, &world, &Default::default());
    low_latency::round_trip(&buffer, &world, &Default::default());
}

#[test]
fn an_id_of_minus_seven_is_no_choice() {
    run(Launch::Threads, 3, "minus_seven", Params::default());
}

/// One rank gets one row more than its worst case.
pub(crate) fn one_row_more(communicator: &Communicator, _: &Params) {
    let me = communicator.rank();
    let world = World::new(&WorldPlan::default(), communicator.size());
    let buffer = buffer(communicator);
    let rows = high_throughput::dispatch(&buffer, &world, &Default::default())
        .counts
        .output_rows;
    assert!(rows > 0, "this case needs rows on every rank");
    for to_blame in (0..communicator.size()).map(Rank) {
        let data = &world.ranks[me.0];
        let routes = Routes::TopK {
            topk: data.topk(),
            num_experts: world.experts(),
        };
        for landing in [Landing::Loan, Landing::Caller] {
            let worst = if me == to_blame { rows - 1 } else { rows };
            let input = DispatchInput {
                num_worst_tokens: Some(worst),
                landing,
                ..DispatchInput::new(data.x(), routes)
            };
            let pending = buffer.dispatch(input).expect("only the counts show it");
            let error = match landing {
                Landing::Loan => pending.finish().err(),
                Landing::Caller => high_throughput::finish_into(pending, &input).err(),
            };
            let error = error.expect("a row too many");
            let (argument, limit) = match error {
                Error::InvalidArgument(reject) if me == to_blame => (reject.argument, reject.limit),
                Error::PeerRejected { rank, reason } if me != to_blame && rank == to_blame => {
                    (reason.argument, reason.limit)
                }
                other => panic!("{other}"),
            };
            assert_eq!(argument, "num_worst_tokens");
            assert!(limit.contains(&format!("rank {to_blame}")), "{limit}");
        }
        still_works(&buffer);
    }
}

#[test]
fn one_row_more_than_num_worst_tokens_is_rejected_on_all_ranks() {
    run_both(3, "one_row_more", Params::default());
}

/// One rank has one token more than the low-latency capacity, or all want more than there is.
pub(crate) fn one_token_more(communicator: &Communicator, _: &Params) {
    let me = communicator.rank();
    let world = World::new(&WorldPlan::default(), communicator.size());
    let buffer = buffer_for(communicator, &world);
    let capacity = world.plan.tokens;
    for to_blame in (0..communicator.size()).map(Rank) {
        let tokens = capacity + usize::from(me == to_blame);
        let (x, idx) = (vec![bf16::ONE; tokens * 16], vec![1i64; tokens * 2]);
        let x = Tensor::new(&x, &[tokens, 16]).unwrap();
        let idx = Tensor::new(&idx, &[tokens, 2]).unwrap();
        let input = LowLatencyDispatchInput::new(x, idx, capacity, world.experts());
        let done = buffer
            .low_latency_dispatch(input)
            .and_then(|pending| pending.finish());
        let error = done.expect_err("a token too many");
        blames(error, me, to_blame, "x", &(capacity + 1).to_string());
        low_latency::round_trip(&buffer, &world, &low_latency::Calls::default());
        // More for every token than the memory was made for.
        let input = LowLatencyDispatchInput::new(x, idx, 20 * capacity, world.experts());
        let error = buffer
            .low_latency_dispatch(input)
            .err()
            .expect("no memory for it");
        assert_eq!(super::invalid(error).argument, "low_latency");
        low_latency::round_trip(&buffer, &world, &low_latency::Calls::default());
    }
}

#[test]
fn one_token_more_than_the_low_latency_capacity_is_rejected_on_all_ranks() {
    run_both(3, "one_token_more", Params::default());
}

/// Rank 0 passes wrong things to a low-latency combine.
pub(crate) fn wrong_low_latency_combine(communicator: &Communicator, _: &Params) {
    let me = communicator.rank();
    let ranks = communicator.size();
    let world = World::new(&WorldPlan::default(), ranks);
    let buffer = buffer_for(communicator, &world);
    let calls = low_latency::Calls::default();
    let data = &world.ranks[me.0];
    for wrong in ["an id", "the shape"] {
        let handle = low_latency::dispatch(&buffer, &world, &calls);
        let blame = me == Rank(0);
        let mut idx = data.topk_idx.clone();
        if blame && wrong == "an id" {
            idx[1] = world.experts() as i64;
        }
        let rows =
            ranks * handle.max_tokens_per_rank() - usize::from(blame && wrong == "the shape");
        let x = OwnedTensor::zeros(DType::Bf16, &[world.plan.experts, rows, 16]).unwrap();
        let idx = Tensor::new(&idx, &[data.tokens, 2]).unwrap();
        let x = CombineRows::Caller(x.as_tensor());
        let input = LowLatencyCombineInput::new(x, idx, data.weights().unwrap(), &handle);
        let error = buffer.low_latency_combine(input).err();
        let error = error.expect("the send of a combine needs all ranks' choices");
        let reject = match blame {
            true => super::invalid(error),
            false => {
                let (rank, reason) = super::rejected_by_peer(error);
                assert_eq!(rank, Rank(0));
                reason
            }
        };
        let argument = if wrong == "an id" {
            "topk_idx[0, 1]"
        } else {
            "x"
        };
        assert_eq!(reject.argument, argument);
        low_latency::combine(&buffer, &world, &calls, &handle, 0);
    }
}

#[test]
fn a_wrong_low_latency_combine_is_rejected_on_all_ranks() {
    run(
        Launch::Threads,
        3,
        "wrong_low_latency_combine",
        Params::default(),
    );
}
