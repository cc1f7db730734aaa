//! Ranks, nodes and the domains they form.
//!
//! Ranks are numbered node by node. With 2 nodes of 4 ranks:
//!
//! ```text
//!           rail 0   rail 1   rail 2   rail 3
//! node 0  |   0        1        2        3   |   <- a scale-up domain
//! node 1  |   4        5        6        7   |   <- another one
//!             ^ scale-out peers: 0 and 4
//! ```
//!
//! - **Scale-up**: the ranks of one node. They can load and store each other's memory (NVLink, or
//!   shared memory on a CPU), so rows move between them in one step.
//! - **Scale-out**: between nodes, over the network.
//! - **Rail**: the ranks with the same local index, one on each node. In a cluster their network
//!   cards hang on the same switch. Scale-out traffic stays on its rail: a row crosses the network
//!   to the rank with the sender's local index, which passes it on inside its node.

use std::{fmt, ops::Range};

use crate::error::{Error, Result};

/// The number of a participant, `0..R`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub usize);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How the ranks `0..R` lie on nodes of equal size: node `n` has the ranks
/// `[n * ranks_per_node, (n + 1) * ranks_per_node)`.
///
/// The nodes may be real or declared: several "nodes" on one machine test the scale-out path.
///
/// ```
/// # use deep_ep::topology::{Rank, Topology};
/// let topology = Topology::new(8, 4)?;
/// assert_eq!(topology.nodes(), 2);
/// assert_eq!(topology.node_of(Rank(5)), 1);
/// assert_eq!(topology.local_index(Rank(5)), 1);
/// assert_eq!(topology.scale_out_peers(Rank(5)).collect::<Vec<_>>(), [Rank(1)]);
/// # Ok::<(), deep_ep::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Topology {
    ranks: usize,
    ranks_per_node: usize,
}

impl Topology {
    /// `ranks` ranks on nodes of `ranks_per_node`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if one of them is 0, or `ranks` is no multiple of
    /// `ranks_per_node`.
    pub fn new(ranks: usize, ranks_per_node: usize) -> Result<Self> {
        if ranks == 0 {
            return Err(Error::invalid("ranks", ranks, "must be at least 1"));
        }
        if ranks_per_node == 0 || !ranks.is_multiple_of(ranks_per_node) {
            return Err(Error::invalid(
                "ranks_per_node",
                ranks_per_node,
                format!("must divide ranks = {ranks}"),
            ));
        }
        Ok(Self {
            ranks,
            ranks_per_node,
        })
    }

    /// All `ranks` ranks on one node.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `ranks` is 0.
    pub fn single_node(ranks: usize) -> Result<Self> {
        Self::new(ranks, ranks.max(1))
    }

    /// The number of ranks, `R`.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The number of ranks on each node, which is also the number of rails.
    pub fn ranks_per_node(&self) -> usize {
        self.ranks_per_node
    }

    /// The number of nodes.
    pub fn nodes(&self) -> usize {
        self.ranks / self.ranks_per_node
    }

    /// The node on which `rank` is, `0..nodes`.
    pub fn node_of(&self, rank: Rank) -> usize {
        rank.0 / self.ranks_per_node
    }

    /// The place of `rank` on its node, `0..ranks_per_node`: the number of its rail.
    pub fn local_index(&self, rank: Rank) -> usize {
        rank.0 % self.ranks_per_node
    }

    /// The rank at place `local_index` of `node`.
    pub fn rank_at(&self, node: usize, local_index: usize) -> Rank {
        Rank(node * self.ranks_per_node + local_index)
    }

    /// The ranks of `node`, as numbers, ascending.
    pub fn ranks_of_node(&self, node: usize) -> Range<usize> {
        let first = node * self.ranks_per_node;
        first..first + self.ranks_per_node
    }

    /// The ranks with place `local_index` on their node, one of each node, ascending.
    pub fn rail(self, local_index: usize) -> impl Iterator<Item = Rank> + Clone {
        (0..self.nodes()).map(move |node| self.rank_at(node, local_index))
    }

    /// The other ranks of `rank`'s node, ascending.
    pub fn scale_up_peers(self, rank: Rank) -> impl Iterator<Item = Rank> + Clone {
        self.ranks_of_node(self.node_of(rank))
            .map(Rank)
            .filter(move |&peer| peer != rank)
    }

    /// The other ranks of `rank`'s rail, one of each other node, ascending.
    pub fn scale_out_peers(self, rank: Rank) -> impl Iterator<Item = Rank> + Clone {
        self.rail(self.local_index(rank))
            .filter(move |&peer| peer != rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(ranks: impl Iterator<Item = Rank>) -> Vec<usize> {
        ranks.map(|rank| rank.0).collect()
    }

    #[test]
    fn nodes_and_rails_of_two_nodes_of_three() {
        let topology = Topology::new(6, 3).unwrap();
        assert_eq!(topology.nodes(), 2);
        assert_eq!(numbers(topology.rail(2)), [2, 5]);
        assert_eq!(numbers(topology.scale_up_peers(Rank(4))), [3, 5]);
        assert_eq!(numbers(topology.scale_out_peers(Rank(4))), [1]);
        assert_eq!(topology.ranks_of_node(1), 3..6);
        for rank in (0..6).map(Rank) {
            let (node, index) = (topology.node_of(rank), topology.local_index(rank));
            assert_eq!(topology.rank_at(node, index), rank);
        }
    }

    #[test]
    fn one_node_has_no_scale_out_and_lone_ranks_have_no_scale_up() {
        let one = Topology::single_node(5).unwrap();
        assert_eq!(one.nodes(), 1);
        assert_eq!(one.scale_out_peers(Rank(3)).count(), 0);
        assert_eq!(numbers(one.scale_up_peers(Rank(3))), [0, 1, 2, 4]);
        let lone = Topology::new(3, 1).unwrap();
        assert_eq!(lone.scale_up_peers(Rank(1)).count(), 0);
        assert_eq!(numbers(lone.scale_out_peers(Rank(1))), [0, 2]);
    }

    #[test]
    fn unusable_sizes_are_named() {
        let message = |ranks, per_node| Topology::new(ranks, per_node).unwrap_err().to_string();
        assert_eq!(message(0, 1), "ranks is 0, but it must be at least 1");
        assert_eq!(
            message(7, 2),
            "ranks_per_node is 2, but it must divide ranks = 7"
        );
        assert_eq!(
            message(7, 0),
            "ranks_per_node is 0, but it must divide ranks = 7"
        );
        assert!(Topology::single_node(0).is_err());
    }
}
