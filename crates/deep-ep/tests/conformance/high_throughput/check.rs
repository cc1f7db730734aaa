//! Comparison of what a dispatch gave.

use deep_ep::{
    Buffer, DispatchHandle, DispatchInput, Layout, Rank, Routes, Tensor,
    reference::high_throughput as reference,
};

use super::{Calls, Received, input};
use crate::{
    compare::{Of, same_rows, same_values},
    world::World,
};

/// Compares what a dispatch from the choices of `world`, with default options, gave.
pub(crate) fn check_from_choices(world: &World, rank: Rank, received: &Received) {
    let expected = reference::dispatch_to(rank.0, &world.inputs(), world.experts(), 1);
    let routes = Routes::TopK {
        topk: world.ranks[rank.0].topk(),
        num_experts: world.experts(),
    };
    let input = input(world, rank, routes, &Calls::default());
    check(world, rank, &expected, received, &input, true);
}

/// Compares what a dispatch gave with the reference.
pub(super) fn check(
    world: &World,
    rank: Rank,
    expected: &reference::Dispatched<'_>,
    received: &Received,
    input: &DispatchInput<'_>,
    travels: bool,
) {
    let of = |what| Of { rank, what };
    let rows = expected.rows();
    let counts = &received.counts;
    let output_rows = input.num_worst_tokens.unwrap_or(rows);
    assert_eq!(
        (counts.rows, counts.output_rows),
        (Some(rows), output_rows),
        "rows of rank {rank}"
    );
    let prefix = counts.rows_from.iter().scan(0, |sum, n| {
        *sum += n;
        Some(*sum)
    });
    let prefix: Vec<usize> = prefix.collect();
    assert_eq!(
        prefix, expected.rank_prefix,
        "prefix sums of rows of rank {rank}"
    );
    let counted = input.num_worst_tokens.is_none() && !matches!(input.routes, Routes::Handle(_));
    let per_expert: &[usize] = if counted {
        &expected.tokens_per_expert
    } else {
        &[]
    };
    assert_eq!(
        counts.tokens_per_expert, per_expert,
        "choices per expert of rank {rank}"
    );

    let describe = |row: usize| {
        format!(
            "from rank {}, token {}",
            expected.src_rank[row], expected.src_idx[row]
        )
    };
    assert_eq!(
        received.x.tensor().shape(),
        [output_rows, world.plan.hidden]
    );
    same_rows(of("recv_x"), &expected.x, &received.x.tensor(), describe);
    assert_eq!(
        received.scales.is_some(),
        expected.scales.is_some(),
        "scales of rank {rank}"
    );
    if let (Some(scales), Some(expected)) = (&received.scales, &expected.scales) {
        let columns = world.plan.scales;
        same_values(
            of("recv_scales"),
            columns,
            &expected.concat(),
            &scales[..rows * columns],
        );
    }
    let k = world.plan.top_k;
    assert_eq!(
        received.topk_idx.is_some(),
        travels,
        "recv_topk_idx of rank {rank}"
    );
    if let Some(idx) = &received.topk_idx {
        let mut padded = expected.topk_idx.clone();
        padded.resize(output_rows * k, -1);
        same_values(of("recv_topk_idx"), k, &padded, idx);
    }
    let weighted = travels && expected.topk_weights.is_some();
    assert_eq!(
        received.topk_weights.is_some(),
        weighted,
        "recv_topk_weights of rank {rank}"
    );
    if let (Some(weights), Some(expected)) = (&received.topk_weights, &expected.topk_weights) {
        same_values(of("recv_topk_weights"), k, expected, &weights[..rows * k]);
    }
    check_handle(rank, expected, &received.handle, output_rows);
}

fn check_handle(
    rank: Rank,
    expected: &reference::Dispatched<'_>,
    handle: &DispatchHandle,
    output_rows: usize,
) {
    let of = |what| Of { rank, what };
    let ranks = expected.rank_prefix.len();
    assert_eq!(
        handle.num_recv_rows(),
        expected.rows(),
        "rows of the handle of rank {rank}"
    );
    let src_idx = handle.recv_src_idx();
    let src_idx = src_idx.as_slice::<i32>().expect("dense");
    assert_eq!(src_idx.len(), output_rows, "recv_src_idx of rank {rank}");
    let expected_idx: Vec<i32> = expected.src_idx.iter().map(|&token| token as i32).collect();
    same_values(
        of("recv_src_idx"),
        1,
        &expected_idx,
        &src_idx[..expected.rows()],
    );
    let matrix = handle.rank_prefix_matrix();
    let column: Vec<i32> = (0..ranks).map(|source| matrix.at(source, rank.0)).collect();
    let prefix: Vec<i32> = expected
        .rank_prefix
        .iter()
        .map(|&rows| rows as i32)
        .collect();
    same_values(of("rank_prefix_matrix"), 1, &prefix, &column);
    let goes: Vec<u8> = expected
        .is_token_in_rank
        .iter()
        .map(|&goes| goes.into())
        .collect();
    let found = handle.is_token_in_rank();
    same_values(
        of("is_token_in_rank"),
        ranks,
        &goes,
        found.as_slice().expect("dense"),
    );
    let mut next = vec![0; ranks];
    let heads = goes.iter().enumerate().map(|(i, &goes)| {
        let next = &mut next[i % ranks];
        *next += i32::from(goes);
        if goes > 0 { *next - 1 } else { -1 }
    });
    let heads: Vec<i32> = heads.collect();
    let found = handle.send_head();
    same_values(
        of("send_head"),
        ranks,
        &heads,
        found.as_slice().expect("dense"),
    );
}

/// Checks the layout of this rank's tokens, and gives it back made from its tensors.
pub(crate) fn layout(buffer: &Buffer, world: &World) -> Layout {
    let (rank, ranks) = (buffer.rank(), buffer.num_ranks());
    let layout = buffer.dispatch_layout(world.ranks[rank.0].idx(), world.experts());
    let layout = layout.expect("the choices are accepted");
    let expected = reference::layout(&world.inputs()[rank.0], world.experts(), ranks, ranks);
    let of = |what| Of { rank, what };
    let same = |what, expected: &[usize], found: Tensor<'_>| {
        let expected: Vec<i32> = expected.iter().map(|&n| n as i32).collect();
        same_values(of(what), 1, &expected, found.as_slice().expect("dense"));
    };
    same(
        "num_tokens_per_rank",
        &expected.tokens_per_rank,
        layout.num_tokens_per_rank(),
    );
    same(
        "num_tokens_per_expert",
        &expected.tokens_per_expert,
        layout.num_tokens_per_expert(),
    );
    assert!(layout.num_tokens_per_node().is_none(), "one node");
    let goes: Vec<u8> = expected
        .is_token_in_rank
        .iter()
        .map(|&goes| goes.into())
        .collect();
    let found = layout.is_token_in_rank();
    same_values(
        of("is_token_in_rank"),
        ranks,
        &goes,
        found.as_slice().expect("dense"),
    );
    Layout::from_parts(
        found,
        layout.num_tokens_per_rank(),
        layout.num_tokens_per_expert(),
    )
    .expect("its own parts")
}
