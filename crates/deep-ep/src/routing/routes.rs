//! The routes of one batch: who gets which token.

use super::{
    ExpertMap,
    indices::{ExpertIndex, TopK, check_matrix, check_shape},
    lists::{Lists, MAX_MASK_RANKS, spread_masks},
};
use crate::{
    dtype::DType,
    error::{Error, Result},
    tensor::Tensor,
    topology::{Rank, Topology},
};

/// Routes and counts of this rank's tokens, rebuilt for every batch without new allocations.
///
/// ```
/// # use deep_ep::{Rank, Tensor, routing::{ExpertMap, Routes}};
/// // Four experts on two ranks; three tokens with two choices each.
/// let map = ExpertMap::new(4, 2)?;
/// let topk_idx = [0i64, 1, 3, 0, -1, 2];
/// let mut routes = Routes::new();
/// routes.rebuild(&Tensor::new(&topk_idx, &[3, 2])?, &map)?;
/// assert_eq!(routes.is_token_in_rank(), [1, 0, 1, 1, 0, 1]);
/// assert_eq!(routes.tokens_of_rank(Rank(1)), [1, 2]);
/// assert_eq!(routes.tokens_per_rank(), [2, 2]);
/// assert_eq!(routes.tokens_per_expert(), [2, 1, 1, 1]);
/// # Ok::<(), deep_ep::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Routes {
    tokens: usize,
    ranks: usize,
    top_k: usize,
    is_token_in_rank: Vec<u8>,
    tokens_per_rank: Vec<u32>,
    tokens_per_expert: Vec<u32>,
    lists: Lists,
    scratch: Scratch,
}

/// What a rebuild needs besides its results.
#[derive(Debug, Clone, Default)]
struct Scratch {
    /// `[T]`: bit `r` says that the token goes to rank `r`.
    masks: Vec<u32>,
    /// `(rank, token)` in token order; only the front part is in use.
    pairs: Vec<(u32, u32)>,
}

impl Routes {
    /// Routes of no tokens; nothing is allocated.
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets the batch, keeping the memory.
    pub fn clear(&mut self) {
        (self.tokens, self.ranks, self.top_k) = (0, 0, 0);
        self.is_token_in_rank.clear();
        self.tokens_per_rank.clear();
        self.tokens_per_expert.clear();
        self.lists.clear();
    }

    /// Builds the routes from `topk_idx`, `i64` or `i32` `[T, K]` with any strides, for
    /// `K` in 1 to 64.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unusable tensor, or naming the first `topk_idx[t, k]` that
    /// is no expert. All ids are checked before anything is built; after an error the routes are
    /// those of no tokens.
    pub fn rebuild(&mut self, topk_idx: &Tensor<'_>, map: &ExpertMap) -> Result<()> {
        self.clear();
        let (tokens, top_k) = check_shape(topk_idx)?;
        match topk_idx.dtype() {
            DType::I32 => self.build(&TopK::<i32>::new(topk_idx, map.experts())?, tokens, map),
            _ => self.build(&TopK::<i64>::new(topk_idx, map.experts())?, tokens, map),
        }
        self.top_k = top_k;
        Ok(())
    }

    /// Builds the routes from `is_token_in_rank`, `u8` `[T, R]` with any strides (0 or not).
    /// [`Self::top_k`] is then 0 and [`Self::tokens_per_expert`] empty.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it is not such a tensor for `num_ranks` ranks. After an error
    /// the routes are those of no tokens.
    pub fn rebuild_from_ranks(
        &mut self,
        is_token_in_rank: &Tensor<'_>,
        num_ranks: usize,
    ) -> Result<()> {
        self.clear();
        if is_token_in_rank.dtype() != DType::U8 {
            return Err(Error::invalid(
                "is_token_in_rank",
                is_token_in_rank.dtype(),
                "must be u8 (0 or 1)",
            ));
        }
        let (tokens, ranks) = check_matrix("is_token_in_rank", is_token_in_rank)?;
        if ranks != num_ranks || ranks == 0 {
            return Err(Error::invalid(
                "is_token_in_rank",
                format!("[{tokens}, {ranks}]"),
                format!("must have one column for each of {num_ranks} ranks"),
            ));
        }
        (self.tokens, self.ranks) = (tokens, ranks);
        self.copy_is_token_in_rank(is_token_in_rank);
        self.lists_from_bytes();
        Ok(())
    }

    fn build<I: ExpertIndex>(&mut self, topk: &TopK<'_, I>, tokens: usize, map: &ExpertMap) {
        (self.tokens, self.ranks) = (tokens, map.ranks());
        // Entry E counts the places without a choice, so that no branch depends on them.
        self.tokens_per_expert.resize(map.experts() + 1, 0);
        if self.ranks <= MAX_MASK_RANKS {
            self.build_by_masks(topk, map);
        } else {
            self.build_by_pairs(topk, map);
        }
        self.tokens_per_expert.truncate(map.experts());
    }

    fn build_by_masks<I: ExpertIndex>(&mut self, topk: &TopK<'_, I>, map: &ExpertMap) {
        let ranks = self.ranks;
        let masks = &mut self.scratch.masks;
        masks.clear();
        let counts = &mut self.tokens_per_expert[..];
        topk.for_each_row(|_, row| {
            let mut mask = 0u32;
            for &id in row {
                let expert = expert_or_end(id, map);
                counts[expert] += 1;
                mask |= 1 << map.block_of(expert);
            }
            masks.push(mask & !(1 << ranks));
        });
        self.lists.build_from_masks(masks, ranks, topk.top_k());
        spread_masks(masks, ranks, &mut self.is_token_in_rank);
        count_lists(&self.lists, &mut self.tokens_per_rank);
    }

    fn build_by_pairs<I: ExpertIndex>(&mut self, topk: &TopK<'_, I>, map: &ExpertMap) {
        let ranks = self.ranks;
        // Places without a choice belong to "rank" R, whose byte is the next row's first one (there
        // is one more at the end). It is still 0 then and stays so.
        self.is_token_in_rank.resize(self.tokens * ranks + 1, 0);
        self.tokens_per_rank.resize(ranks + 1, 0);
        let pairs = &mut self.scratch.pairs;
        let room = self.tokens * ranks.min(topk.top_k()) + 1;
        if pairs.len() < room {
            pairs.resize(room, (0, 0));
        }
        let (bytes, per_rank) = (&mut self.is_token_in_rank, &mut self.tokens_per_rank);
        let counts = &mut self.tokens_per_expert[..];
        let mut end = 0;
        topk.for_each_row(|t, row| {
            for &id in row {
                let expert = expert_or_end(id, map);
                counts[expert] += 1;
                let rank = map.block_of(expert);
                let byte = &mut bytes[t * ranks + rank];
                let new = u8::from(rank < ranks) & !*byte;
                *byte |= new;
                per_rank[rank] += u32::from(new);
                // Every choice is written; only the first one of its rank is kept.
                pairs[end] = (rank as u32, t as u32);
                end += usize::from(new);
            }
        });
        bytes.truncate(self.tokens * ranks);
        per_rank.truncate(ranks);
        self.lists.build_from_pairs(&pairs[..end], per_rank);
    }

    /// Copies with any strides, as 0 or 1.
    fn copy_is_token_in_rank(&mut self, given: &Tensor<'_>) {
        let bytes = &mut self.is_token_in_rank;
        if let Ok(dense) = given.as_slice::<u8>() {
            bytes.extend(dense.iter().map(|&byte| u8::from(byte != 0)));
            return;
        }
        for t in 0..self.tokens {
            bytes.extend((0..self.ranks).map(|rank| u8::from(given.at::<u8>(t, rank) != 0)));
        }
    }

    fn lists_from_bytes(&mut self) {
        let ranks = self.ranks;
        let Scratch { masks, pairs, .. } = &mut self.scratch;
        let rows = self.is_token_in_rank.chunks_exact(ranks);
        if ranks <= MAX_MASK_RANKS {
            masks.clear();
            masks.extend(rows.map(|row| {
                let bits = row.iter().enumerate();
                bits.fold(0, |mask, (rank, &byte)| mask | u32::from(byte) << rank)
            }));
            self.lists.build_from_masks(masks, ranks, ranks);
            count_lists(&self.lists, &mut self.tokens_per_rank);
            return;
        }
        pairs.clear();
        self.tokens_per_rank.resize(ranks, 0);
        for (t, row) in rows.enumerate() {
            for (rank, _) in row.iter().enumerate().filter(|(_, byte)| **byte != 0) {
                self.tokens_per_rank[rank] += 1;
                pairs.push((rank as u32, t as u32));
            }
        }
        self.lists.build_from_pairs(pairs, &self.tokens_per_rank);
    }

    /// The number of tokens, `T`.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The number of ranks, `R`.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The choices of each token, `K`; 0 if the routes were not built from choices.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// `[T, R]`, row-major: 1 where the token goes to the rank, else 0.
    pub fn is_token_in_rank(&self) -> &[u8] {
        &self.is_token_in_rank
    }

    /// `[R]`: how many tokens go to each rank.
    pub fn tokens_per_rank(&self) -> &[u32] {
        &self.tokens_per_rank
    }

    /// `[E]`: how often each expert was chosen. The same expert twice in a row counts twice. Empty
    /// if the routes were not built from choices.
    pub fn tokens_per_expert(&self) -> &[u32] {
        &self.tokens_per_expert
    }

    /// The tokens that go to `rank`, ascending: the order in which they are sent. A token's position
    /// in this list is its slot. Empty if there is no such rank.
    pub fn tokens_of_rank(&self, rank: Rank) -> &[u32] {
        self.lists.of(rank.0)
    }

    /// The lists of all ranks one behind the other, and `[R + 1]` offsets: list `r` is
    /// `tokens[offsets[r]..offsets[r + 1]]`. The offsets are empty before the first build.
    pub fn tokens_of_ranks(&self) -> (&[u32], &[usize]) {
        (self.lists.all(), self.lists.offsets())
    }

    /// The first slot of `rank` whose token is `token` or a later one: where a worker starts that
    /// handles the tokens from `token` on.
    pub fn first_slot(&self, rank: Rank, token: usize) -> usize {
        self.tokens_of_rank(rank)
            .partition_point(|&sent| (sent as usize) < token)
    }

    /// Writes to `counts` how many tokens go to each node of `topology`, `[nodes]`. A token counts
    /// once for a node, however many of its ranks it goes to.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `topology` has another number of ranks.
    pub fn tokens_per_node(&self, topology: &Topology, counts: &mut Vec<u32>) -> Result<()> {
        if topology.ranks() != self.ranks {
            return Err(Error::invalid(
                "ranks of the topology",
                topology.ranks(),
                format!("must be {}, as in the routes", self.ranks),
            ));
        }
        counts.clear();
        counts.resize(topology.nodes(), 0);
        for token in self.is_token_in_rank.chunks_exact(self.ranks) {
            let nodes = token.chunks_exact(topology.ranks_per_node());
            for (count, node) in counts.iter_mut().zip(nodes) {
                *count += u32::from(node.iter().fold(0, |any, &byte| any | byte));
            }
        }
        Ok(())
    }
}

/// The chosen expert, or `E` for any negative id, which lies in the block of "rank" `R`.
#[inline]
fn expert_or_end<I: ExpertIndex>(id: I, map: &ExpertMap) -> usize {
    (id.widen() as u64).min(map.experts() as u64) as usize
}

fn count_lists(lists: &Lists, counts: &mut Vec<u32>) {
    let ends = lists.offsets().windows(2);
    counts.extend(ends.map(|range| (range[1] - range[0]) as u32));
}
