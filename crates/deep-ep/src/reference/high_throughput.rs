//! High-throughput dispatch and combine, from the inputs of all ranks.
//!
//! ```
//! use deep_ep::reference::high_throughput::{self as reference, CombineRoutes, RankInput};
//!
//! // Two ranks, four experts, rows of one byte. Rank 0's token goes to both ranks, rank 1's token
//! // stays at home.
//! let input = |x, topk_idx| RankInput {
//!     tokens: 1, row_bytes: 1, x, scales: None, top_k: 2, topk_idx, topk_weights: None,
//! };
//! let inputs = [input(&[7], &[0, 3]), input(&[9], &[2, -1])];
//!
//! let received = reference::dispatch_to(1, &inputs, 4, 1);
//! assert_eq!(received.x, [[7], [9]]);
//! assert_eq!(received.topk_idx, [-1, 1, 0, -1]);
//! assert_eq!(received.tokens_per_expert, [1, 1]);
//!
//! // Every rank returns 1.0 for rank 0's token: the sum is the number of ranks it went to.
//! let routes = CombineRoutes::of(0, &inputs, 4);
//! assert_eq!(reference::combine_at(&routes, 1, &[], |_rank, _token| vec![1.0f32]), [2.0]);
//! ```

use super::{Number, hosts};

/// What one rank passes to dispatch.
#[derive(Debug, Clone, Copy)]
pub struct RankInput<'a> {
    /// `T`, its number of tokens.
    pub tokens: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// `[T, row_bytes]`: the rows, whatever they mean.
    pub x: &'a [u8],
    /// Scales that travel with the rows. All ranks have them, or none.
    pub scales: Option<Scales<'a>>,
    /// `K`, the same on all ranks.
    pub top_k: usize,
    /// `[T, K]`: chosen experts.
    pub topk_idx: &'a [i64],
    /// `[T, K]`: their weights. All ranks have them, or none.
    pub topk_weights: Option<&'a [f32]>,
}

/// Scales of rows: 4-byte values, whatever they mean.
#[derive(Debug, Clone, Copy)]
pub struct Scales<'a> {
    /// `S`, the number of scales of a row.
    pub per_row: usize,
    /// `[T, S]`, row-major.
    pub data: &'a [u32],
}

impl RankInput<'_> {
    fn choices(&self, token: usize) -> &[i64] {
        &self.topk_idx[token * self.top_k..][..self.top_k]
    }

    /// Whether `token` goes to `rank`.
    fn goes_to(&self, token: usize, rank: usize, experts_per_rank: usize) -> bool {
        let mut choices = self.choices(token).iter();
        choices.any(|&id| hosts(rank, id, experts_per_rank))
    }
}

/// What `get_dispatch_layout` returns on one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Layout {
    /// `[R]`: tokens that go to each rank.
    pub tokens_per_rank: Vec<usize>,
    /// `[R / ranks_per_node]`: tokens that go to each node, each counted once.
    pub tokens_per_node: Vec<usize>,
    /// `[E]`: choices of each expert.
    pub tokens_per_expert: Vec<usize>,
    /// `[T, R]`: whether the token goes to the rank.
    pub is_token_in_rank: Vec<bool>,
}

/// The layout of one rank's tokens.
pub fn layout(
    input: &RankInput<'_>,
    num_experts: usize,
    num_ranks: usize,
    ranks_per_node: usize,
) -> Layout {
    let experts_per_rank = num_experts / num_ranks;
    let mut layout = Layout {
        tokens_per_rank: vec![0; num_ranks],
        tokens_per_node: vec![0; num_ranks / ranks_per_node],
        tokens_per_expert: vec![0; num_experts],
        is_token_in_rank: Vec::new(),
    };
    for token in 0..input.tokens {
        let goes: Vec<bool> = (0..num_ranks)
            .map(|rank| input.goes_to(token, rank, experts_per_rank))
            .collect();
        for (rank, &goes) in goes.iter().enumerate() {
            layout.tokens_per_rank[rank] += usize::from(goes);
        }
        for (node, ranks) in goes.chunks(ranks_per_node).enumerate() {
            layout.tokens_per_node[node] += usize::from(ranks.contains(&true));
        }
        for &id in input.choices(token).iter().filter(|&&id| id >= 0) {
            layout.tokens_per_expert[id as usize] += 1;
        }
        layout.is_token_in_rank.extend(goes);
    }
    layout
}

/// What one rank gets from dispatch: `N` rows, ordered by source rank, then by token.
#[derive(Debug, Clone, PartialEq)]
pub struct Dispatched<'a> {
    /// `[N, row_bytes]`: the rows, borrowed from the senders.
    pub x: Vec<&'a [u8]>,
    /// `[N, S]`: their scales, row-major.
    pub scales: Option<Vec<&'a [u32]>>,
    /// `[N, K]`: the choices by their numbers on this rank; -1 for none and those hosted elsewhere.
    pub topk_idx: Vec<i64>,
    /// `[N, K]`: the weights; 0 where `topk_idx` is -1.
    pub topk_weights: Option<Vec<f32>>,
    /// `[N]`: the rank whose token it is.
    pub src_rank: Vec<u32>,
    /// `[N]`: the number of the token there.
    pub src_idx: Vec<u32>,
    /// `[R]`: rows received from this source and all before it.
    pub rank_prefix: Vec<usize>,
    /// `[E/R]`: received choices of each local expert, rounded up to the expert alignment.
    pub tokens_per_expert: Vec<usize>,
    /// `[T, R]`: whether this rank's own token goes to the rank.
    pub is_token_in_rank: Vec<bool>,
}

impl Dispatched<'_> {
    /// `N`, the number of received rows.
    pub fn rows(&self) -> usize {
        self.x.len()
    }

    /// The row of `token` of `source`, if it came here.
    pub fn row_of(&self, source: usize, token: usize) -> Option<usize> {
        let place = (source as u32, token as u32);
        (0..self.rows()).find(|&row| (self.src_rank[row], self.src_idx[row]) == place)
    }
}

/// What `rank` gets when all ranks dispatch `inputs [R]`.
///
/// `num_experts` must be a multiple of `R`; each of `tokens_per_expert` is rounded up to a multiple
/// of `expert_alignment` (at least 1).
pub fn dispatch_to<'a>(
    rank: usize,
    inputs: &[RankInput<'a>],
    num_experts: usize,
    expert_alignment: usize,
) -> Dispatched<'a> {
    let num_ranks = inputs.len();
    let experts_per_rank = num_experts / num_ranks;
    let mut out = Dispatched {
        x: Vec::new(),
        scales: inputs[rank].scales.map(|_| Vec::new()),
        topk_idx: Vec::new(),
        topk_weights: inputs[rank].topk_weights.map(|_| Vec::new()),
        src_rank: Vec::new(),
        src_idx: Vec::new(),
        rank_prefix: Vec::new(),
        tokens_per_expert: vec![0; experts_per_rank],
        is_token_in_rank: layout(&inputs[rank], num_experts, num_ranks, 1).is_token_in_rank,
    };
    for (source, input) in inputs.iter().enumerate() {
        for token in 0..input.tokens {
            if input.goes_to(token, rank, experts_per_rank) {
                receive(&mut out, rank, (source, token), input, experts_per_rank);
            }
        }
        out.rank_prefix.push(out.x.len());
    }
    for count in &mut out.tokens_per_expert {
        *count = count.next_multiple_of(expert_alignment);
    }
    out
}

/// Appends one token to what `rank` has received.
fn receive<'a>(
    out: &mut Dispatched<'a>,
    rank: usize,
    (source, token): (usize, usize),
    input: &RankInput<'a>,
    experts_per_rank: usize,
) {
    out.x
        .push(&input.x[token * input.row_bytes..][..input.row_bytes]);
    if let (Some(out), Some(scales)) = (&mut out.scales, input.scales) {
        out.push(&scales.data[token * scales.per_row..][..scales.per_row]);
    }
    out.src_rank.push(source as u32);
    out.src_idx.push(token as u32);
    for (k, &id) in input.choices(token).iter().enumerate() {
        let hosted = hosts(rank, id, experts_per_rank);
        let local = if hosted {
            id - (rank * experts_per_rank) as i64
        } else {
            -1
        };
        out.topk_idx.push(local);
        if let (Some(out), Some(weights)) = (&mut out.topk_weights, input.topk_weights) {
            let weight = weights[token * input.top_k + k];
            out.push(if hosted { weight } else { 0.0 });
        }
        if hosted {
            out.tokens_per_expert[local as usize] += 1;
        }
    }
}

/// What every rank gets: [`dispatch_to`] for all of them.
pub fn dispatch<'a>(
    inputs: &[RankInput<'a>],
    num_experts: usize,
    expert_alignment: usize,
) -> Vec<Dispatched<'a>> {
    (0..inputs.len())
        .map(|rank| dispatch_to(rank, inputs, num_experts, expert_alignment))
        .collect()
}

/// How combine sums the tokens of one rank, the owner.
#[derive(Debug, Clone, PartialEq)]
pub struct CombineRoutes {
    /// The owner.
    pub owner: usize,
    /// `R`.
    pub num_ranks: usize,
    /// Ranks of each node; `R` if there is one node.
    pub ranks_per_node: usize,
    /// Whether partial sums of other nodes cross the network as f32, not in the rows' type.
    pub exact: bool,
    /// `[T, R]`: whether the owner's token went to the rank.
    pub is_token_in_rank: Vec<bool>,
}

impl CombineRoutes {
    /// The routes that dispatch of `inputs` made for the tokens of `owner`, all ranks on one node.
    pub fn of(owner: usize, inputs: &[RankInput<'_>], num_experts: usize) -> Self {
        let num_ranks = inputs.len();
        let layout = layout(&inputs[owner], num_experts, num_ranks, num_ranks);
        Self {
            owner,
            num_ranks,
            ranks_per_node: num_ranks,
            exact: false,
            is_token_in_rank: layout.is_token_in_rank,
        }
    }

    /// The same with nodes of `ranks_per_node` ranks.
    pub fn on_nodes(self, ranks_per_node: usize, exact: bool) -> Self {
        Self {
            ranks_per_node,
            exact,
            ..self
        }
    }

    /// `T`, the owner's tokens.
    pub fn tokens(&self) -> usize {
        self.is_token_in_rank.len() / self.num_ranks
    }

    /// The ranks of `node` to which `token` went, ascending.
    fn ranks_on(&self, node: usize, token: usize) -> Vec<usize> {
        let first = node * self.ranks_per_node;
        (first..first + self.ranks_per_node)
            .filter(|rank| self.is_token_in_rank[token * self.num_ranks + rank])
            .collect()
    }
}

/// The owner's result of combine, `[T, hidden]`: for each token the sum of what the ranks it went to
/// return for it. `returned(rank, token)` is the row `[hidden]` that `rank` returns for the owner's
/// token; `bias` are 0 to 2 tensors `[T, hidden]`.
///
/// The sum is taken in f32 from +0.0 and rounded once. On one node: the biases in order, then the
/// ranks ascending. On several nodes each node sums its own ranks, ascending, from +0.0, and the
/// sum is: the biases in order, the owner's node, the other nodes ascending. The sums of the other
/// nodes are rounded to the rows' type before they are added, unless `exact`. A token that went
/// nowhere gives the bias, or 0.
///
/// `combined_topk_weights [T, K]` is the same sum without bias over the weights returned, with
/// `V = f32` and `hidden = K`.
pub fn combine_at<V: Number>(
    routes: &CombineRoutes,
    hidden: usize,
    bias: &[&[V]],
    returned: impl Fn(usize, usize) -> Vec<V>,
) -> Vec<V> {
    let mut combined = Vec::new();
    for token in 0..routes.tokens() {
        let mut sum = vec![0.0f32; hidden];
        for bias in bias {
            add(&mut sum, &bias[token * hidden..][..hidden]);
        }
        if routes.ranks_per_node == routes.num_ranks {
            for rank in routes.ranks_on(0, token) {
                add(&mut sum, &returned(rank, token));
            }
        } else {
            add_nodes(&mut sum, routes, token, &returned);
        }
        combined.extend(sum.into_iter().map(V::from_f32));
    }
    combined
}

/// Adds the partial sums of the nodes, the owner's node first.
fn add_nodes<V: Number>(
    sum: &mut [f32],
    routes: &CombineRoutes,
    token: usize,
    returned: &impl Fn(usize, usize) -> Vec<V>,
) {
    let nodes = routes.num_ranks / routes.ranks_per_node;
    let own = routes.owner / routes.ranks_per_node;
    let others = (0..nodes).filter(|&node| node != own);
    for node in std::iter::once(own).chain(others) {
        let mut partial = vec![0.0f32; sum.len()];
        for rank in routes.ranks_on(node, token) {
            add(&mut partial, &returned(rank, token));
        }
        if node != own && !routes.exact {
            for value in &mut partial {
                *value = V::from_f32(*value).to_f32();
            }
        }
        add(sum, &partial);
    }
}

fn add<V: Number>(sum: &mut [f32], row: &[V]) {
    assert_eq!(sum.len(), row.len(), "a returned row has another length");
    for (sum, value) in sum.iter_mut().zip(row) {
        *sum += value.to_f32();
    }
}

/// What every rank gets from combine when rank `r` returns `y[r]`, `[N, hidden]` with rows as in
/// `dispatched[r]`: [`combine_at`] for all of them, on one node and without bias.
pub fn combine<V: Number>(
    dispatched: &[Dispatched<'_>],
    hidden: usize,
    y: &[Vec<V>],
) -> Vec<Vec<V>> {
    let num_ranks = dispatched.len();
    let combined_of = |owner: usize| {
        let routes = CombineRoutes {
            owner,
            num_ranks,
            ranks_per_node: num_ranks,
            exact: false,
            is_token_in_rank: dispatched[owner].is_token_in_rank.clone(),
        };
        combine_at(&routes, hidden, &[], |rank, token| {
            let row = dispatched[rank].row_of(owner, token);
            let row = row.expect("the token went to this rank");
            y[rank][row * hidden..][..hidden].to_vec()
        })
    };
    (0..num_ranks).map(combined_of).collect()
}
