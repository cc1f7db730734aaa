//! Low-latency dispatch and combine, from the inputs of all ranks.
//!
//! Differences to high throughput: a row is delivered once for each *distinct expert* of its token,
//! grouped by expert, and combine weights the rows.

use half::bf16;

use super::{Number, hosts};

/// What one rank passes to dispatch.
#[derive(Debug, Clone, Copy)]
pub struct RankInput<'a> {
    /// `T`, its number of tokens, at most `M`.
    pub tokens: usize,
    /// `H`.
    pub hidden: usize,
    /// `[T, H]`.
    pub x: &'a [bf16],
    /// `K`.
    pub top_k: usize,
    /// `[T, K]`: chosen experts.
    pub topk_idx: &'a [i64],
}

/// What one rank gets from dispatch.
///
/// `recv_x` is `[E/R, R * M, H]`: row `i` of `experts[e]` lies at `[e, i]`, for `i` below
/// `recv_count()[e]`; rows beyond are undefined. Not quantised, its bits are those of
/// [`ExpertRows::x`]; quantised, they are [`fp8::cast_row`](super::fp8::cast_row) of it. Of the
/// scales the logical shape `[E/R, R * M, S]` is meant here, element `[e, i, s]` being scale `s` of
/// that cast row; engines may store the last two dimensions column-major. `src_info` is
/// `[E/R, R * M]` in the same way.
#[derive(Debug, Clone, PartialEq)]
pub struct Dispatched<'a> {
    /// `[E/R]`: the rows of each expert of this rank.
    pub experts: Vec<ExpertRows<'a>>,
    /// `[E/R, R]`: where the rows of each source begin (high 32 bits) and how many they are (low 32
    /// bits).
    pub layout_range: Vec<i64>,
}

/// The rows of one expert, packed: sources ascending, then tokens ascending.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ExpertRows<'a> {
    /// The rows `[H]`, borrowed from the senders.
    pub x: Vec<&'a [bf16]>,
    /// The rank whose token it is.
    pub src_rank: Vec<u32>,
    /// The number of the token there.
    pub src_info: Vec<i32>,
}

impl Dispatched<'_> {
    /// `[E/R]`: the number of rows of each expert.
    pub fn recv_count(&self) -> Vec<i32> {
        let counts = self.experts.iter().map(|rows| rows.x.len() as i32);
        counts.collect()
    }

    /// The row of `token` of `source` among those of `local_expert`, if it came here.
    pub fn row_of(&self, local_expert: usize, source: usize, token: usize) -> Option<usize> {
        let rows = &self.experts[local_expert];
        let place = (source as u32, token as i32);
        (0..rows.x.len()).find(|&row| (rows.src_rank[row], rows.src_info[row]) == place)
    }
}

/// What `rank` gets when all ranks dispatch `inputs [R]`. `masked [R]` are the ranks that `rank`
/// has masked out: nothing comes from them.
pub fn dispatch_to<'a>(
    rank: usize,
    inputs: &[RankInput<'a>],
    num_experts: usize,
    masked: &[bool],
) -> Dispatched<'a> {
    let experts_per_rank = num_experts / inputs.len();
    let mut out = Dispatched {
        experts: Vec::new(),
        layout_range: Vec::new(),
    };
    for local in 0..experts_per_rank {
        let expert = (rank * experts_per_rank + local) as i64;
        let mut rows = ExpertRows::default();
        for (source, input) in inputs.iter().enumerate() {
            let begin = rows.x.len();
            for token in 0..input.tokens {
                let choices = &input.topk_idx[token * input.top_k..][..input.top_k];
                // Once, even if the token chose this expert twice.
                if choices.contains(&expert) && !masked[source] {
                    rows.x
                        .push(&input.x[token * input.hidden..][..input.hidden]);
                    rows.src_rank.push(source as u32);
                    rows.src_info.push(token as i32);
                }
            }
            let count = rows.x.len() - begin;
            out.layout_range.push((begin as i64) << 32 | count as i64);
        }
        out.experts.push(rows);
    }
    out
}

/// What every rank gets when nobody is masked: [`dispatch_to`] for all of them.
pub fn dispatch<'a>(inputs: &[RankInput<'a>], num_experts: usize) -> Vec<Dispatched<'a>> {
    let masked = vec![false; inputs.len()];
    (0..inputs.len())
        .map(|rank| dispatch_to(rank, inputs, num_experts, &masked))
        .collect()
}

/// What the owner of tokens passes to combine.
#[derive(Debug, Clone, Copy)]
pub struct CombineInput<'a> {
    /// `T`.
    pub tokens: usize,
    /// `H`.
    pub hidden: usize,
    /// `K`.
    pub top_k: usize,
    /// `[T, K]`.
    pub topk_idx: &'a [i64],
    /// `[T, K]`; anything where there is no choice.
    pub topk_weights: &'a [f32],
    /// `E`.
    pub num_experts: usize,
    /// `[R]`: the ranks that the owner has masked out; choices of their experts are dropped.
    pub masked: &'a [bool],
}

impl CombineInput<'_> {
    /// The `(expert, weight)` that count for `token`, in the order of its choices. An expert that
    /// was chosen twice is here twice.
    fn terms(&self, token: usize) -> Vec<(usize, f32)> {
        let experts_per_rank = self.num_experts / self.masked.len();
        let dropped = |id| {
            let mut ranks = self.masked.iter().enumerate();
            ranks.any(|(rank, &masked)| masked && hosts(rank, id, experts_per_rank))
        };
        let choices = token * self.top_k..(token + 1) * self.top_k;
        choices
            .map(|i| (self.topk_idx[i], self.topk_weights[i]))
            .filter(|&(id, _)| id >= 0 && !dropped(id))
            .map(|(id, weight)| (id as usize, weight))
            .collect()
    }
}

/// The owner's result of combine in `exact` mode, `[T, H]`, to be met bit for bit:
/// `acc = fma(weight, row, acc)` in f32 from +0.0 over the choices in order, rounded once to bf16.
/// `output(token, expert)` is the row `[H]` that `expert` (of all `E`) made of the owner's token.
pub fn combine_at(
    input: &CombineInput<'_>,
    output: impl Fn(usize, usize) -> Vec<bf16>,
) -> Vec<bf16> {
    let mut combined = Vec::new();
    for token in 0..input.tokens {
        let mut sum = vec![0.0f32; input.hidden];
        for (expert, weight) in input.terms(token) {
            for (sum, value) in sum.iter_mut().zip(output(token, expert)) {
                *sum = weight.mul_add(value.to_f32(), *sum);
            }
        }
        combined.extend(sum.into_iter().map(<bf16 as Number>::from_f32));
    }
    combined
}

/// What an element of combine's result may be when not in `exact` mode.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bound {
    /// The weighted sum.
    pub sum: f64,
    /// How far from it the element may be: `2^-7 * sum over k of |w_k * x_k|`, plus 2^-133 (the
    /// smallest positive bf16).
    pub tolerance: f64,
}

impl Bound {
    /// Whether `value` is within the tolerance. If the sum is NaN or infinite, it must be the same.
    pub fn allows(&self, value: bf16) -> bool {
        let value = value.to_f64();
        match self.sum.is_finite() {
            true => (value - self.sum).abs() <= self.tolerance,
            false => value == self.sum || (value.is_nan() && self.sum.is_nan()),
        }
    }
}

/// The bounds `[H]` of one token's result; `output` as for [`combine_at`].
pub fn combine_bound(
    input: &CombineInput<'_>,
    token: usize,
    output: impl Fn(usize, usize) -> Vec<bf16>,
) -> Vec<Bound> {
    let smallest = 2f64.powi(-133);
    let mut bounds = vec![
        Bound {
            sum: 0.0,
            tolerance: smallest
        };
        input.hidden
    ];
    for (expert, weight) in input.terms(token) {
        for (bound, value) in bounds.iter_mut().zip(output(token, expert)) {
            // The product of an f32 and a bf16 is exact in f64.
            let term = f64::from(weight) * value.to_f64();
            bound.sum += term;
            bound.tolerance += term.abs() / 128.0;
        }
    }
    bounds
}

/// How different two tensors are, `1 - 2<a,b> / (<a,a> + <b,b>)`: 0 for equal ones. With `use_logfmt`
/// combine's result must stay below [`LOGFMT_LIMIT`] against the unquantised one.
pub fn difference(a: &[bf16], b: &[bf16]) -> f64 {
    assert_eq!(a.len(), b.len(), "tensors to compare have the same shape");
    let dot = |a: &[bf16], b: &[bf16]| -> f64 {
        let products = a.iter().zip(b).map(|(a, b)| a.to_f64() * b.to_f64());
        products.sum()
    };
    let norms = dot(a, a) + dot(b, b);
    if norms == 0.0 {
        return 0.0;
    }
    1.0 - 2.0 * dot(a, b) / norms
}

/// The largest [`difference`] that LogFMT may make, over random data.
pub const LOGFMT_LIMIT: f64 = 1e-5;
