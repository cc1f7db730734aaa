//! Settings that ranks must agree on.

use deep_ep::{
    Buffer, BufferConfig, CombineInput, Communicator, DispatchInput, Error, Landing,
    LowLatencyConfig, Rank, Routes, Tensor, TopK,
};
use half::bf16;

use super::{buffer, still_works};
use crate::launch::{Launch, Params, config, run, run_both};

/// Rank 2 makes its buffer with another setting.
pub(crate) fn buffers_made_differently(communicator: &Communicator, _: &Params) {
    let me = communicator.rank();
    let other = me == Rank(2);
    let low_latency = |tokens| LowLatencyConfig {
        max_tokens_per_rank: tokens,
        hidden: 16,
        num_experts: 8,
        exact_top_k: None,
    };
    let pick = |same: usize, different: usize| Some(if other { different } else { same });
    let configs = [
        (
            "hidden",
            BufferConfig {
                hidden: pick(1234, 5678),
                ..config()
            },
        ),
        (
            "top_k",
            BufferConfig {
                top_k: pick(1234, 5678),
                ..config()
            },
        ),
        (
            "num_experts",
            BufferConfig {
                num_experts: pick(1234, 5678),
                ..config()
            },
        ),
        (
            "low_latency",
            BufferConfig {
                low_latency: pick(1234, 5678).map(low_latency),
                ..config()
            },
        ),
    ];
    for (name, config) in configs {
        let error = Buffer::new(communicator, config)
            .err()
            .expect("settings differ");
        let Error::SettingsDiffer {
            setting,
            this_rank,
            this_value,
            other_rank,
            other_value,
        } = error
        else {
            panic!("{error}");
        };
        let (mine, theirs) = if other {
            ("5678", "1234")
        } else {
            ("1234", "5678")
        };
        assert_eq!((&*setting, this_rank), (name, me));
        assert_eq!(other_rank, if other { Rank(0) } else { Rank(2) });
        assert!(this_value.contains(mine) && other_value.contains(theirs));
    }
    still_works(&buffer(communicator));
}

#[test]
fn settings_that_differ_are_an_error_on_every_rank_that_names_both() {
    run_both(4, "buffers_made_differently", Params::default());
}

/// Rank 1 dispatches with another hidden size, top-k or number of experts, or combines.
pub(crate) fn calls_made_differently(communicator: &Communicator, _: &Params) {
    let me = communicator.rank();
    let buffer = buffer(communicator);
    let x = vec![bf16::ONE; 4 * 32];
    let idx = vec![1i64; 4 * 3];
    for landing in [Landing::Loan, Landing::Caller] {
        for what in [
            "the bytes of a row",
            "top-k",
            "num_experts",
            "the operation",
        ] {
            let other = me == Rank(1);
            let pick = |name, same, different| match other && what == name {
                true => different,
                false => same,
            };
            let (hidden, k) = (pick("the bytes of a row", 16, 32), pick("top-k", 2, 3));
            let experts = communicator.size() * pick("num_experts", 2, 4);
            let topk = TopK {
                idx: Tensor::new(&idx, &[4, k]).unwrap(),
                weights: None,
            };
            let routes = Routes::TopK {
                topk,
                num_experts: experts,
            };
            let input = DispatchInput::new(Tensor::new(&x, &[4, hidden]).unwrap(), routes);
            let input = DispatchInput { landing, ..input };
            let error = if other && what == "the operation" {
                combine_instead(&buffer)
            } else {
                buffer
                    .dispatch(input)
                    .and_then(|pending| pending.finish())
                    .map(drop)
            };
            let error = error.expect_err("ranks differ");
            let Error::SettingsDiffer {
                setting,
                this_rank,
                other_rank,
                ..
            } = error
            else {
                panic!("{error}");
            };
            assert_eq!((&*setting, this_rank), (what, me));
            assert_eq!(other_rank, if other { Rank(0) } else { Rank(1) });
            still_works(&buffer);
        }
    }
}

/// A combine with a handle of no tokens.
fn combine_instead(buffer: &Buffer) -> deep_ep::Result<()> {
    let ranks = buffer.num_ranks();
    let (matrix, none) = (vec![0i32; ranks * ranks], [0u8; 0]);
    let handle = deep_ep::DispatchHandle::from_parts(
        buffer.rank(),
        Tensor::new(&matrix, &[ranks, ranks])?,
        Tensor::new(&matrix, &[0])?,
        Tensor::new(&none, &[0, ranks])?,
    )?;
    let x = Tensor::new::<bf16>(&[], &[0, 16])?;
    buffer
        .combine(CombineInput::new(x, &handle))?
        .finish()
        .map(drop)
}

#[test]
fn calls_that_differ_are_an_error_on_every_rank_and_the_next_works() {
    run(
        Launch::Threads,
        3,
        "calls_made_differently",
        Params::default(),
    );
    run(
        Launch::Processes,
        2,
        "calls_made_differently",
        Params::default(),
    );
}
