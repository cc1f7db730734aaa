//! The inputs of all ranks, which every rank makes for itself from the same numbers.

use bytemuck::cast_slice;
use deep_ep::{
    DType, Element, F8E4M3, Tensor, TensorMut, TopK,
    reference::{high_throughput, low_latency},
};
use half::{bf16, f16};

use crate::{launch::plan, random::Random};

/// Element types by number, see [`WorldPlan::dtype`].
pub(crate) const DTYPES: [DType; 8] = [
    DType::Bf16,
    DType::F8E4M3,
    DType::F32,
    DType::F16,
    DType::U8,
    DType::I8,
    DType::I32,
    DType::I64,
];

plan! {
    /// What the inputs look like.
    WorldPlan {
        /// Everything random follows from it.
        seed = 1,
        /// Most tokens of a rank.
        tokens = 8,
        /// 0: all ranks have so many; 1: each any number up to it; 2: one rank has none; 3: all but
        /// one have none; 4: none has any; 5: odd numbers, all different.
        spread = 0,
        /// Experts of each rank, `E/R`.
        experts = 2,
        /// Choices of a token, `K`.
        top_k = 2,
        /// Elements of a row, `H`; rounded up to a multiple of 16 bytes.
        hidden = 16,
        /// Element type of a row, a place in [`DTYPES`].
        dtype = 0,
        /// 0: any experts; 1: low numbers more often; 2: all of one rank; 3: all the same.
        skew = 0,
        /// So many tokens of rank 0 choose any experts all the same.
        stray = 0,
        /// Chance that a choice is none, in percent.
        none = 0,
        /// Chance that a token chooses its previous expert again.
        duplicates = 0,
        /// Choices are i32.
        narrow = 0,
        /// Choices have weights.
        weights = 1,
        /// Columns of scales, 0 for none. Rows then are bytes.
        scales = 0,
        /// Scales are i32.
        integer_scales = 0,
        /// Rows are apart, choices, weights and scales are stored by columns.
        strided = 0,
        /// Changes the rows and nothing else.
        salt = 0,
    }
}

/// The inputs of all ranks.
pub(crate) struct World {
    pub(crate) plan: WorldPlan,
    pub(crate) ranks: Vec<RankData>,
    /// Ranks without which low-latency calls are made.
    pub(crate) masked: Vec<bool>,
}

/// The inputs of one rank.
pub(crate) struct RankData {
    pub(crate) tokens: usize,
    pub(crate) hidden: usize,
    pub(crate) top_k: usize,
    pub(crate) dtype: DType,
    /// `[T, H]` dense.
    x: Vec<u64>,
    /// `[T, K]`.
    pub(crate) topk_idx: Vec<i64>,
    pub(crate) topk_weights: Option<Vec<f32>>,
    /// `[T, S]`.
    scales: Option<Vec<u32>>,
    scale_columns: usize,
    /// The same as callers pass them.
    passed: Passed,
}

struct Passed {
    x: Vec<u64>,
    /// In elements.
    stride: usize,
    narrow: bool,
    integer_scales: bool,
    strided: bool,
    idx: Vec<i64>,
    idx32: Vec<i32>,
    weights: Vec<f32>,
    scales: Vec<u32>,
}

impl World {
    /// The inputs of `ranks` ranks.
    pub(crate) fn new(plan: &WorldPlan, ranks: usize) -> Self {
        let tokens: Vec<_> = (0..ranks)
            .map(|rank| tokens_of(plan, rank, ranks))
            .collect();
        Self::of_tokens(plan, &tokens)
    }

    /// The inputs of as many ranks as there are numbers of tokens.
    pub(crate) fn of_tokens(plan: &WorldPlan, tokens: &[usize]) -> Self {
        let mut plan = plan.clone();
        if plan.scales > 0 && DTYPES[plan.dtype].size() > 1 {
            plan.dtype = 1;
        }
        let grain = 16 / DTYPES[plan.dtype].size();
        plan.hidden = plan.hidden.next_multiple_of(grain);
        let ranks = tokens.len();
        let data = tokens.iter().enumerate();
        let data = data.map(|(rank, &tokens)| RankData::new(&plan, rank, ranks, tokens));
        Self {
            ranks: data.collect(),
            masked: vec![false; ranks],
            plan,
        }
    }

    /// `E`.
    pub(crate) fn experts(&self) -> usize {
        self.plan.experts * self.ranks.len()
    }

    /// Most tokens of any rank.
    pub(crate) fn most_tokens(&self) -> usize {
        let tokens = self.ranks.iter().map(|rank| rank.tokens);
        tokens.max().unwrap_or(0)
    }

    /// For the reference.
    pub(crate) fn inputs(&self) -> Vec<high_throughput::RankInput<'_>> {
        self.ranks.iter().map(RankData::input).collect()
    }

    /// For the reference; rows must be bf16.
    pub(crate) fn low_latency_inputs(&self) -> Vec<low_latency::RankInput<'_>> {
        self.ranks.iter().map(RankData::low_latency_input).collect()
    }
}

impl RankData {
    fn new(plan: &WorldPlan, rank: usize, ranks: usize, tokens: usize) -> Self {
        let (dtype, hidden) = (DTYPES[plan.dtype], plan.hidden);
        let mut random = Random::new(&[plan.seed, 1, rank]);
        let stray = if rank == 0 { plan.stray } else { 0 };
        let topk_idx = choices(plan, [tokens, ranks, stray], &mut random);
        let topk_weights = (plan.weights > 0).then(|| {
            let weight = |&id: &i64| match id {
                0.. => random.signed(),
                _ => [f32::NAN, f32::INFINITY, 7.0][random.below(3)],
            };
            topk_idx.iter().map(weight).collect::<Vec<_>>()
        });
        let scales = (plan.scales > 0).then(|| {
            let count = tokens * plan.scales;
            (0..count).map(|_| random.next() as u32).collect::<Vec<_>>()
        });
        let x = rows(
            dtype,
            tokens * hidden,
            &mut Random::new(&[plan.seed, 2, rank, plan.salt]),
        );
        let passed = Passed::new(plan, tokens, &x, &topk_idx, &topk_weights, &scales);
        Self {
            tokens,
            hidden,
            top_k: plan.top_k,
            dtype,
            x,
            topk_idx,
            topk_weights,
            scales,
            scale_columns: plan.scales,
            passed,
        }
    }

    fn input(&self) -> high_throughput::RankInput<'_> {
        let row_bytes = self.hidden * self.dtype.size();
        high_throughput::RankInput {
            tokens: self.tokens,
            row_bytes,
            x: &cast_slice(&self.x)[..self.tokens * row_bytes],
            scales: self.scales.as_ref().map(|data| high_throughput::Scales {
                per_row: self.scale_columns,
                data,
            }),
            top_k: self.top_k,
            topk_idx: &self.topk_idx,
            topk_weights: self.topk_weights.as_deref(),
        }
    }

    fn low_latency_input(&self) -> low_latency::RankInput<'_> {
        low_latency::RankInput {
            tokens: self.tokens,
            hidden: self.hidden,
            x: &cast_slice(&self.x)[..self.tokens * self.hidden],
            top_k: self.top_k,
            topk_idx: &self.topk_idx,
        }
    }

    /// Makes every choice that is none this negative number.
    pub(crate) fn replace_none_by(&mut self, id: i64) {
        let none = |choice: &&mut i64| **choice < 0;
        let (mine, passed) = (&mut self.topk_idx, &mut self.passed);
        mine.iter_mut().filter(none).for_each(|choice| *choice = id);
        passed
            .idx
            .iter_mut()
            .filter(none)
            .for_each(|choice| *choice = id);
        passed.idx32 = passed.idx.iter().map(|&id| id as i32).collect();
    }

    /// Replaces all choices; `id` gives the one at a place of `[T, K]`.
    pub(crate) fn choose(&mut self, id: impl Fn(usize) -> i64) {
        assert!(!self.passed.strided, "choices are stored by rows");
        self.topk_idx = (0..self.tokens * self.top_k).map(id).collect();
        self.passed.idx = self.topk_idx.clone();
        self.passed.idx32 = self.topk_idx.iter().map(|&id| id as i32).collect();
    }

    /// `[T, H]`.
    pub(crate) fn x(&self) -> Tensor<'_> {
        let (shape, strides) = ([self.tokens, self.hidden], [self.passed.stride, 1]);
        let words = &self.passed.x;
        match self.dtype {
            DType::Bf16 => strided::<bf16>(words, &shape, &strides),
            DType::F16 => strided::<f16>(words, &shape, &strides),
            DType::F32 => strided::<f32>(words, &shape, &strides),
            DType::F8E4M3 => strided::<F8E4M3>(words, &shape, &strides),
            DType::U8 => strided::<u8>(words, &shape, &strides),
            DType::I8 => strided::<i8>(words, &shape, &strides),
            DType::I32 => strided::<i32>(words, &shape, &strides),
            _ => strided::<i64>(words, &shape, &strides),
        }
    }

    /// `[T, K]` choices.
    pub(crate) fn idx(&self) -> Tensor<'_> {
        let strides = self.column_strides(self.top_k);
        let shape = [self.tokens, self.top_k];
        if self.passed.narrow {
            Tensor::strided(&self.passed.idx32, &shape, &strides).expect("as long as the shape")
        } else {
            Tensor::strided(&self.passed.idx, &shape, &strides).expect("as long as the shape")
        }
    }

    /// `[T, K]` weights.
    pub(crate) fn weights(&self) -> Option<Tensor<'_>> {
        self.topk_weights.as_ref()?;
        let strides = self.column_strides(self.top_k);
        let shape = [self.tokens, self.top_k];
        Some(Tensor::strided(&self.passed.weights, &shape, &strides).expect("as long as the shape"))
    }

    pub(crate) fn topk(&self) -> TopK<'_> {
        TopK {
            idx: self.idx(),
            weights: self.weights(),
        }
    }

    /// `[T, S]` scales.
    pub(crate) fn scales(&self) -> Option<Tensor<'_>> {
        self.scales.as_ref()?;
        let strides = self.column_strides(self.scale_columns);
        let shape = [self.tokens, self.scale_columns];
        let bits = &self.passed.scales;
        let tensor = if self.passed.integer_scales {
            Tensor::strided(cast_slice::<u32, i32>(bits), &shape, &strides)
        } else {
            Tensor::strided(cast_slice::<u32, f32>(bits), &shape, &strides)
        };
        Some(tensor.expect("as long as the shape"))
    }

    fn column_strides(&self, columns: usize) -> [usize; 2] {
        match self.passed.strided {
            true => [1, self.tokens],
            false => [columns, 1],
        }
    }
}

fn strided<'a, T: Element>(words: &'a [u64], shape: &[usize], strides: &[usize]) -> Tensor<'a> {
    Tensor::strided(cast_slice::<u64, T>(words), shape, strides).expect("as long as the shape")
}

impl Passed {
    fn new(
        plan: &WorldPlan,
        tokens: usize,
        x: &[u64],
        idx: &[i64],
        weights: &Option<Vec<f32>>,
        scales: &Option<Vec<u32>>,
    ) -> Self {
        let strided = plan.strided > 0;
        let size = DTYPES[plan.dtype].size();
        let row = plan.hidden * size;
        let apart = if strided { row + 48 } else { row };
        let mut spread = vec![u64::MAX; (tokens * apart).div_ceil(8)];
        let to: &mut [u8] = bytemuck::cast_slice_mut(&mut spread);
        for token in 0..tokens {
            to[token * apart..][..row].copy_from_slice(&cast_slice(x)[token * row..][..row]);
        }
        let idx = by_columns(idx, plan.top_k, strided);
        // What does not fit i32 is rejected in either type, and not made here.
        let idx32 = idx.iter().map(|&id| id as i32).collect();
        Self {
            x: spread,
            stride: apart / size,
            narrow: plan.narrow > 0,
            integer_scales: plan.integer_scales > 0,
            strided,
            idx,
            idx32,
            weights: by_columns(weights.as_deref().unwrap_or(&[]), plan.top_k, strided),
            scales: by_columns(scales.as_deref().unwrap_or(&[]), plan.scales, strided),
        }
    }
}

/// The values of a row-major matrix, by columns if `strided`.
fn by_columns<T: Copy>(values: &[T], columns: usize, strided: bool) -> Vec<T> {
    if !strided {
        return values.to_vec();
    }
    let by_column = (0..columns).flat_map(|j| values.iter().skip(j).step_by(columns).copied());
    by_column.collect()
}

fn tokens_of(plan: &WorldPlan, rank: usize, ranks: usize) -> usize {
    let special = plan.seed % ranks;
    match plan.spread {
        0 => plan.tokens,
        1 => Random::new(&[plan.seed, 3, rank]).below(plan.tokens + 1),
        2 if rank == special => 0,
        2 => plan.tokens,
        3 if rank == special => plan.tokens,
        3 | 4 => 0,
        _ => (2 * rank + 1).min(plan.tokens),
    }
}

fn choices(plan: &WorldPlan, [tokens, ranks, stray]: [usize; 3], random: &mut Random) -> Vec<i64> {
    let experts = plan.experts * ranks;
    let hot = plan.seed % experts;
    let mut all: Vec<i64> = Vec::with_capacity(tokens * plan.top_k);
    for i in 0..tokens * plan.top_k {
        let skew = if i / plan.top_k < stray { 0 } else { plan.skew };
        let id = match skew {
            0 => random.below(experts),
            1 => random
                .below(experts)
                .min(random.below(experts))
                .min(random.below(experts)),
            2 => hot / plan.experts * plan.experts + random.below(plan.experts),
            _ => hot,
        };
        let none = random.percent(plan.none);
        let again = i % plan.top_k > 0 && random.percent(plan.duplicates);
        all.push(match (none, again) {
            (true, _) => [-1, -1, -7, i64::from(i32::MIN)][random.below(4)],
            (_, true) => all[i - 1],
            _ => id as i64,
        });
    }
    all
}

/// Elements of rows: any bits where they are only moved, numbers where they may be quantised.
fn rows(dtype: DType, len: usize, random: &mut Random) -> Vec<u64> {
    let mut words = vec![0u64; (len * dtype.size()).div_ceil(8)];
    if dtype == DType::Bf16 {
        let values: &mut [bf16] = bytemuck::cast_slice_mut(&mut words);
        values
            .iter_mut()
            .for_each(|value| *value = bf16::from_f32(random.any_value()));
    } else {
        words.iter_mut().for_each(|word| *word = random.next());
    }
    words
}

/// Memory of a caller for an output, full of something that no result is.
pub(crate) struct Memory {
    words: Vec<u64>,
    dtype: DType,
    shape: Vec<usize>,
}

impl Memory {
    pub(crate) fn new(dtype: DType, shape: &[usize]) -> Self {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        Self {
            words: vec![0xeeee_eeee_eeee_eeee; bytes.div_ceil(8)],
            dtype,
            shape: shape.to_vec(),
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        let len = self.shape.iter().product::<usize>() * self.dtype.size();
        &cast_slice(&self.words)[..len]
    }

    pub(crate) fn tensor(&self) -> Tensor<'_> {
        Tensor::from_bytes(cast_slice(&self.words), self.dtype, &self.shape).expect("long enough")
    }

    pub(crate) fn tensor_mut(&mut self) -> TensorMut<'_> {
        let bytes = bytemuck::cast_slice_mut(&mut self.words);
        TensorMut::from_bytes(bytes, self.dtype, &self.shape).expect("long enough")
    }
}
