//! Results depend on a rank's own tokens and the experts, on nothing else.

use deep_ep::{
    Buffer, BufferConfig, CombineInput, CombineWire, Communicator, DispatchInput, Landing,
    LowLatencyCombineInput, LowLatencyConfig, LowLatencyDispatchInput, Rank, Routes, RowFormat,
    Tensor, codec::ScaleFormat,
};
use half::bf16;

use crate::{
    launch::{Params, config, run_both},
    world::{World, WorldPlan},
};

const HIDDEN: usize = 512;

fn plan(seed: usize) -> WorldPlan {
    WorldPlan {
        seed,
        tokens: 12,
        hidden: HIDDEN,
        top_k: 4,
        experts: 4,
        ..Default::default()
    }
}

/// What expert `e` does to a row.
fn expert(e: usize, row: &[bf16]) -> Vec<bf16> {
    let scale = 1.0 + e as f32 / 7.0;
    row.iter()
        .map(|x| bf16::from_f32(x.to_f32() * scale))
        .collect()
}

/// The results of this rank in every mode.
fn results(buffer: &Buffer, world: &World) -> Vec<Vec<u16>> {
    let mut all = vec![];
    for landing in [Landing::Loan, Landing::Caller] {
        all.push(high_throughput(buffer, world, landing));
    }
    for format in [RowFormat::Bf16, RowFormat::Fp8(ScaleFormat::F32)] {
        for wire in [CombineWire::Bf16, CombineWire::LogFmt, CombineWire::Exact] {
            all.push(low_latency(buffer, world, format, wire));
        }
    }
    all
}

fn high_throughput(buffer: &Buffer, world: &World, landing: Landing) -> Vec<u16> {
    let data = &world.ranks[buffer.rank().0];
    let routes = Routes::TopK {
        topk: data.topk(),
        num_experts: world.experts(),
    };
    let input = DispatchInput {
        landing,
        ..DispatchInput::new(data.x(), routes)
    };
    let received = buffer.dispatch(input).unwrap().finish().unwrap();
    let x = received.x.as_slice::<bf16>().unwrap().chunks_exact(HIDDEN);
    let idx = received
        .topk_idx
        .as_ref()
        .unwrap()
        .as_slice::<i64>()
        .unwrap()
        .chunks_exact(4);
    let rows = x.zip(idx).flat_map(|(row, idx)| {
        let first = idx.iter().find(|&&e| e >= 0).expect("a reason to be here");
        expert(buffer.rank().0 * 4 + *first as usize, row)
    });
    let rows: Vec<bf16> = rows.collect();
    let rows = Tensor::new(&rows, &[received.counts.output_rows, HIDDEN]).unwrap();
    let done = buffer
        .combine(CombineInput::new(rows, &received.handle))
        .unwrap()
        .finish();
    bytemuck::cast_slice(done.unwrap().x.as_slice::<bf16>().unwrap()).to_vec()
}

fn low_latency(buffer: &Buffer, world: &World, format: RowFormat, wire: CombineWire) -> Vec<u16> {
    let data = &world.ranks[buffer.rank().0];
    let max = world.plan.tokens;
    let mut input = LowLatencyDispatchInput::new(data.x(), data.idx(), max, world.experts());
    input.format = format;
    let received = buffer
        .low_latency_dispatch(input)
        .unwrap()
        .finish()
        .unwrap();
    let [local, rows] = [world.plan.experts, buffer.num_ranks() * max];
    let mut y = vec![bf16::ZERO; local * rows * HIDDEN];
    let counts = received.recv_count.as_slice::<i32>().unwrap();
    for (e, &count) in counts.iter().enumerate() {
        for i in 0..count as usize {
            let at = (e * rows + i) * HIDDEN;
            // Of fp8 rows the codes, as numbers.
            let row: Vec<bf16> = match format {
                RowFormat::Bf16 => received.x.as_slice::<bf16>().unwrap()[at..][..HIDDEN].to_vec(),
                _ => {
                    let codes = received.x.as_slice::<deep_ep::F8E4M3>().unwrap();
                    let codes = codes[at..][..HIDDEN].iter();
                    codes
                        .map(|code| bf16::from_f32(f32::from(code.0)))
                        .collect()
                }
            };
            y[at..][..HIDDEN].copy_from_slice(&expert(buffer.rank().0 * local + e, &row));
        }
    }
    let y = Tensor::new(&y, &[local, rows, HIDDEN]).unwrap();
    let weights = data.weights().unwrap();
    let mut input = LowLatencyCombineInput::new(y, data.idx(), weights, &received.handle);
    input.wire = wire;
    let sums = buffer.low_latency_combine(input).unwrap().finish().unwrap();
    bytemuck::cast_slice(sums.as_slice::<bf16>().unwrap()).to_vec()
}

/// Twice the same, then with other tokens on all ranks but one.
pub(crate) fn again_and_with_others(communicator: &Communicator, _: &Params) {
    let ranks = communicator.size();
    let me = communicator.rank();
    let config = BufferConfig {
        low_latency: Some(LowLatencyConfig {
            max_tokens_per_rank: 12,
            hidden: HIDDEN,
            num_experts: 4 * ranks,
            exact_top_k: Some(4),
        }),
        ..config()
    };
    let world = World::new(&plan(1), ranks);
    let buffer = Buffer::new(communicator, config.clone()).unwrap();
    let first = results(&buffer, &world);
    assert!(
        first == results(&buffer, &world),
        "rank {me}: the same again is not the same"
    );
    drop(buffer);
    let buffer = Buffer::new(communicator, config).unwrap();
    assert!(
        first == results(&buffer, &world),
        "rank {me}: not the same on another buffer"
    );
    for same in (0..ranks).map(Rank) {
        let counts: Vec<_> = (0..ranks)
            .map(|rank| {
                if rank == same.0 {
                    12
                } else {
                    (5 * rank + same.0) % 13
                }
            })
            .collect();
        let mut others = World::of_tokens(&plan(7 + same.0), &counts);
        let mine = World::new(&plan(1), ranks).ranks.swap_remove(same.0);
        others.ranks[same.0] = mine;
        let found = results(&buffer, &others);
        assert!(
            same != me || found == first,
            "rank {me}: others' tokens change the result"
        );
    }
}

#[test]
fn results_are_the_same_in_every_run_and_whatever_other_ranks_send() {
    run_both(4, "again_and_with_others", Params::default());
}
