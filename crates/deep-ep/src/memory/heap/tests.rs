use proptest::prelude::*;

use super::*;

const CONTROL: u64 = 1000;

fn no_growth(_: u64) -> Result<u64> {
    panic!("grew although there was room")
}

/// Grows to what was asked for, exactly.
fn exact(len: u64) -> Result<u64> {
    Ok(len)
}

#[test]
fn large_blocks_are_pages_and_small_ones_lines() {
    let mut heap = Heap::new(CONTROL, 1 << 20, 1 << 20);
    let small = heap.alloc(1, Purpose::Metadata, &mut no_growth).unwrap();
    assert_eq!((small.offset(), small.len()), (1024, 64));
    let large = heap
        .alloc(4097, Purpose::DispatchLoan, &mut no_growth)
        .unwrap();
    assert_eq!((large.offset(), large.len()), (4096, 8192));
    // The gap before the page is used by what fits there.
    let gap = heap.alloc(0, Purpose::Metadata, &mut no_growth).unwrap();
    assert_eq!((gap.offset(), gap.len()), (1088, 64));
}

#[test]
fn growth_asks_for_what_is_missing_behind_the_last_block() {
    let mut heap = Heap::new(0, 8192, 1 << 20);
    let first = heap.alloc(4096, Purpose::DispatchLoan, &mut exact).unwrap();
    let mut asked = Vec::new();
    let second = heap
        .alloc(12288, Purpose::DispatchLoan, &mut |len| {
            asked.push(len);
            Ok(len + 4096)
        })
        .unwrap();
    assert_eq!(asked, [16384]);
    assert_eq!(second.offset(), 4096);
    assert_eq!(heap.stats().committed, 20480);
    heap.free(first);
    let third = heap
        .alloc(4096, Purpose::DispatchLoan, &mut no_growth)
        .unwrap();
    assert_eq!(third.offset(), 0);
}

#[test]
fn what_cannot_fit_is_an_error_and_changes_nothing() {
    let mut heap = Heap::new(0, 4096, 1 << 20);
    for len in [(1 << 20) + 1, u64::MAX, u64::MAX - 4095, u64::MAX - 8192] {
        let error = heap
            .alloc(len, Purpose::LowLatency, &mut no_growth)
            .unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    }
    let mut refuse = |_| Err(Error::invalid("a", 1, "b"));
    assert!(heap.alloc(8192, Purpose::LowLatency, &mut refuse).is_err());
    assert!(
        heap.alloc(8192, Purpose::LowLatency, &mut |_| Ok(0))
            .is_err()
    );
    let block = heap
        .alloc(4096, Purpose::LowLatency, &mut no_growth)
        .unwrap();
    assert_eq!(block.offset(), 0);
    assert_eq!(heap.stats().total.peak, 4096);
}

#[test]
fn quarantine_ends_with_the_call() {
    let mut heap = Heap::new(0, 16384, 16384);
    let take = |heap: &mut Heap| heap.alloc(8192, Purpose::CombineStaging, &mut no_growth);
    let (first, second) = (take(&mut heap).unwrap(), take(&mut heap).unwrap());
    heap.free_after(second, 8);
    heap.free_after(first, 7);
    assert_eq!(heap.reap(6), 0);
    assert_eq!(heap.reap(7), 8192);
    let stats = heap.stats();
    assert_eq!((stats.total.in_use, stats.total.quarantined), (0, 8192));
    assert_eq!(take(&mut heap).unwrap().offset(), 0);
    assert_eq!(heap.reap(u64::MAX), 8192);
    let usage = heap.stats().by_purpose[Purpose::CombineStaging as usize];
    assert_eq!(
        (usage.in_use, usage.quarantined, usage.peak),
        (8192, 0, 16384)
    );
}

#[derive(Debug, Clone)]
enum Step {
    Alloc(u64, usize),
    Free(usize),
    FreeAfter(usize, u64),
    Reap(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let size = prop_oneof![0u64..200, 3000u64..6000, 1u64..200_000];
    let step = prop_oneof![
        4 => (size, 0..Purpose::COUNT).prop_map(|(len, purpose)| Step::Alloc(len, purpose)),
        2 => any::<usize>().prop_map(Step::Free),
        1 => (any::<usize>(), 0u64..50).prop_map(|(which, call)| Step::FreeAfter(which, call)),
        1 => (0u64..50).prop_map(Step::Reap),
    ];
    prop::collection::vec(step, 1..200)
}

/// Blocks that must not be handed out again: in use, or given back for a call.
fn assert_disjoint(heap: &Heap, live: &[Block]) {
    let quarantined = heap.quarantine.values().flatten();
    let mut ranges: Vec<_> = live
        .iter()
        .chain(quarantined)
        .map(|block| (block.offset, block.end()))
        .chain(
            heap.free
                .iter()
                .map(|(&offset, &len)| (offset, offset + len)),
        )
        .collect();
    ranges.sort_unstable();
    // Nothing overlaps and nothing is lost: blocks and free space tile the heap.
    let mut at = heap.start;
    for (start, end) in ranges {
        assert_eq!(start, at);
        assert!(end > start);
        at = end;
    }
    assert_eq!(at, heap.end);
    let mut free = heap
        .free
        .iter()
        .map(|(&offset, &len)| (offset, offset + len));
    if let Some(mut last) = free.next() {
        for next in free {
            assert!(last.1 < next.0, "neighbours were not merged");
            last = next;
        }
    }
}

proptest! {
    #[test]
    fn blocks_never_overlap_and_merge_back(steps in steps()) {
        let mut heap = Heap::new(CONTROL, 0, 1 << 40);
        let mut live = Vec::new();
        for step in steps {
            match step {
                Step::Alloc(len, purpose) => {
                    let purpose = Purpose::ALL[purpose];
                    let block = heap.alloc(len, purpose, &mut exact).unwrap();
                    prop_assert!(block.len() >= len);
                    let align = if len >= PAGE { PAGE } else { LINE };
                    prop_assert!(block.offset().is_multiple_of(align));
                    live.push(block);
                }
                Step::Free(which) if !live.is_empty() => {
                    let block = live.swap_remove(which % live.len());
                    heap.free(block);
                }
                Step::FreeAfter(which, call) if !live.is_empty() => {
                    let block = live.swap_remove(which % live.len());
                    heap.free_after(block, call);
                }
                Step::Reap(consumed) => {
                    heap.reap(consumed);
                    prop_assert!(heap.quarantine.keys().all(|&call| call > consumed));
                }
                _ => {}
            }
            assert_disjoint(&heap, &live);
            let stats = heap.stats();
            prop_assert_eq!(stats.total.in_use, live.iter().map(Block::len).sum::<u64>());
            let sums = stats.by_purpose.iter().fold((0, 0), |sum, usage| {
                (sum.0 + usage.in_use, sum.1 + usage.quarantined)
            });
            prop_assert_eq!(sums, (stats.total.in_use, stats.total.quarantined));
            // First fit needs at most log2(largest / smallest) + 1 times what was ever live
            // (Robson, 1977); alignment adds up to a page for every page-sized block.
            let bound = (stats.total.peak + PAGE) * 13 * 2;
            prop_assert!(stats.committed <= heap.start + bound);
        }
        live.into_iter().for_each(|block| heap.free(block));
        heap.reap(u64::MAX);
        prop_assert!(heap.free.len() <= 1);
        prop_assert_eq!(heap.stats().total.in_use + heap.stats().total.quarantined, 0);
    }

    #[test]
    fn repeated_calls_of_one_shape_do_not_grow(sizes in prop::collection::vec(1u64..1_000_000, 1..20)) {
        let mut heap = Heap::new(CONTROL, 0, 1 << 40);
        let mut committed = 0;
        for call in 0..10u64 {
            if call >= 2 {
                heap.reap(call - 2);
            }
            let blocks: Vec<_> = sizes
                .iter()
                .map(|&len| heap.alloc(len, Purpose::DispatchStaging, &mut exact).unwrap())
                .collect();
            blocks.into_iter().for_each(|block| heap.free_after(block, call));
            if call == 3 {
                committed = heap.stats().committed;
            } else if call > 3 {
                prop_assert_eq!(heap.stats().committed, committed);
            }
        }
    }
}

#[test]
fn a_shrunk_block_gives_its_end_back() {
    let mut heap = Heap::new(0, 16 * PAGE, 16 * PAGE);
    let mut none = |_| -> Result<u64> { panic!("there is room") };
    let mut block = heap
        .alloc(10 * PAGE, Purpose::DispatchLoan, &mut none)
        .unwrap();
    heap.shrink(&mut block, 3 * PAGE + 1);
    assert_eq!(block.len(), 4 * PAGE);
    assert_eq!(heap.stats().total.in_use, 4 * PAGE);
    heap.shrink(&mut block, 9 * PAGE);
    assert_eq!(block.len(), 4 * PAGE);
    let rest = heap
        .alloc(12 * PAGE, Purpose::DispatchLoan, &mut none)
        .unwrap();
    assert_eq!(rest.offset(), block.end());
    heap.free(block);
    heap.free(rest);
    assert_eq!(heap.stats().total.in_use, 0);
}
