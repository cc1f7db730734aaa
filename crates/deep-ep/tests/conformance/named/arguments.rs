//! Arguments that no engine can use: an error on all ranks, no panic, no hang.

use deep_ep::{
    Buffer, BufferConfig, Communicator, DType, Device, DispatchInput, LowLatencyHandle, Rank,
    Routes, Shape, Tensor, TopK,
};
use half::bf16;

use super::{blames, buffer, invalid, rejected_by_peer, still_works};
use crate::launch::{Launch, Params, config, run, run_both};

/// Rank 1 passes tensors that are said to be on a device.
pub(crate) fn device_memory(communicator: &Communicator, _: &Params) {
    let buffer = buffer(communicator);
    let (x, idx, weights) = (vec![bf16::ONE; 3 * 16], vec![0i64; 6], vec![1f32; 6]);
    for name in ["x", "topk_idx", "topk_weights"] {
        let on_device = |argument: &str, tensor: Tensor<'static>| {
            let there = communicator.rank() == Rank(1) && argument == name;
            let shape = Shape::dense(tensor.dtype(), tensor.shape()).expect("a shape");
            let device = if there {
                Device::Cuda(1000)
            } else {
                Device::Host
            };
            // SAFETY: the memory is leaked below, and on the host nothing else is done with it.
            unsafe { Tensor::from_raw(tensor.as_ptr(), shape, device) }
        };
        let topk = TopK {
            idx: on_device("topk_idx", leaked(&idx, &[3, 2])),
            weights: Some(on_device("topk_weights", leaked(&weights, &[3, 2]))),
        };
        let routes = Routes::TopK {
            topk,
            num_experts: 2 * communicator.size(),
        };
        let input = DispatchInput::new(on_device("x", leaked(&x, &[3, 16])), routes);
        let error = buffer
            .dispatch(input)
            .and_then(|pending| pending.finish())
            .expect_err("not on the host");
        let reject = if communicator.rank() == Rank(1) {
            invalid(error)
        } else {
            rejected_by_peer(error).1
        };
        assert_eq!(&*reject.argument, name);
        assert!(reject.value.contains("Cuda(1000)"), "{reject}");
        still_works(&buffer);
    }
}

fn leaked<T: deep_ep::Element>(data: &[T], shape: &[usize]) -> Tensor<'static> {
    Tensor::new(data.to_vec().leak(), shape).expect("data of that shape")
}

#[test]
fn tensors_on_a_device_are_rejected() {
    run(Launch::Threads, 2, "device_memory", Params::default());
}

/// Rank 1 passes choices that no expert has along a layout.
pub(crate) fn layout_and_wrong_ids(communicator: &Communicator, _: &Params) {
    let buffer = buffer(communicator);
    let x = vec![bf16::ONE; 3 * 16];
    let good = [0i64, 5, 3, 1, 7, 2];
    let experts = 4 * communicator.size();
    let layout = buffer
        .dispatch_layout(Tensor::new(&good, &[3, 2]).unwrap(), experts)
        .expect("good choices");
    // The second has the low 32 bits of a good one.
    for bad in [experts as i64, (1 << 32) + 1, i64::MAX] {
        let mut idx = good;
        if communicator.rank() == Rank(1) {
            idx[3] = bad;
        }
        let topk = TopK {
            idx: Tensor::new(&idx, &[3, 2]).unwrap(),
            weights: None,
        };
        let routes = Routes::Layout {
            layout: &layout,
            topk: Some(topk),
        };
        let error = buffer
            .dispatch(DispatchInput::new(
                Tensor::new(&x, &[3, 16]).unwrap(),
                routes,
            ))
            .and_then(|pending| pending.finish())
            .expect_err("a choice that no expert has");
        let me = communicator.rank();
        blames(error, me, Rank(1), "topk_idx[1, 1]", &bad.to_string());
        still_works(&buffer);
    }
}

#[test]
fn choices_along_a_layout_are_checked() {
    run_both(2, "layout_and_wrong_ids", Params::default());
}

/// Rank 1 cannot make a buffer; its communicator lives on.
pub(crate) fn one_unusable_config(communicator: &Communicator, _: &Params) {
    let unusable = [
        BufferConfig {
            num_sms: 0,
            ..config()
        },
        BufferConfig {
            scale_up_bytes: usize::MAX,
            ..config()
        },
    ];
    for unusable in unusable {
        let me = communicator.rank();
        let mine = if me == Rank(1) { unusable } else { config() };
        let error = Buffer::new(communicator, mine)
            .err()
            .expect("rank 1 cannot make one");
        if me != Rank(1) {
            assert_eq!(rejected_by_peer(error).0, Rank(1));
        }
    }
    still_works(&buffer(communicator));
}

#[test]
fn a_rank_that_cannot_make_a_buffer_does_not_keep_the_others_waiting() {
    run_both(3, "one_unusable_config", Params::default());
}

/// Sizes that no memory holds.
pub(crate) fn absurd_sizes(communicator: &Communicator, _: &Params) {
    let buffer = buffer(communicator);
    for shape in [
        &[][..],
        &[1, 2, 3, 4],
        &[usize::MAX, 2],
        &[1 << 40, 1 << 20],
    ] {
        assert!(buffer.loan(DType::F32, shape).is_err(), "{shape:?}");
    }
    let none: [bf16; 0] = [];
    let wide = Tensor::new(&none, &[0, usize::MAX]).unwrap();
    let topk = TopK {
        idx: Tensor::new::<i64>(&[], &[0, 2]).unwrap(),
        weights: None,
    };
    let routes = Routes::TopK {
        topk,
        num_experts: communicator.size(),
    };
    let error = buffer
        .dispatch(DispatchInput::new(wide, routes))
        .err()
        .expect("rows of 2^65 bytes");
    assert_eq!(&*invalid(error).argument, "x");
    let handle = LowLatencyHandle::from_parts(
        Tensor::new(&[0i32; 8], &[1, 8]).unwrap(),
        Tensor::new(&[0i64; 2], &[1, 2]).unwrap(),
        usize::MAX,
        16,
        2,
    );
    assert!(handle.is_err());
    still_works(&buffer);
}

#[test]
fn sizes_that_no_memory_holds_are_errors() {
    run(Launch::Threads, 2, "absurd_sizes", Params::default());
}
