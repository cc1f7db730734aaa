//! The processes of a host give each other their regions.
//!
//! ```text
//!  every rank                    rank i                              rank j
//!  ----------                    ------                              ------
//!  listen on a random name
//!  all_gather(card)  ........    knows name and token of j           knows token of i
//!                                connect, check uid      ----------> accept, check uid
//!                                request (i, token of j, token of i) check both tokens
//!                                check both tokens       <---------- reply (j, ..) + memfd
//!                                map the memfd
//! ```
//!
//! Each rank does both sides for all its peers in one loop that never blocks on one connection, so
//! the order in which ranks come does not matter. A rank leaves when it has every peer's memory
//! and every peer has its own.
//!
//! Strangers: the socket's name is random, another user's connections are closed at once, and one
//! without the right tokens gets nothing. Whoever connects and stays silent, or sends something
//! else, holds one place in a bounded list for `meeting::PATIENCE`; a peer that is crowded out comes
//! back.
//!
//! [`Meeting`] does this with any file, and keeps the connections for who has more to send.
//!
//! Names are abstract and files are memfds: nothing is left behind, whatever dies.

mod card;
mod meeting;
pub(crate) mod socket;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

pub(crate) use self::meeting::{Meeting, Met};
use super::region::{PeerRegion, Region, Window};
use crate::{
    error::{Error, Result},
    topology::Rank,
};

/// Gathers a message of every rank, in rank order; every rank calls it.
pub(crate) type AllGather<'a> = &'a dyn Fn(&[u8]) -> Result<Vec<Vec<u8>>>;

/// Who exchanges what.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Exchange<'a> {
    /// This rank.
    pub rank: Rank,
    /// The ranks that map each other, this one included; the same on all of them.
    pub domain: &'a [Rank],
    /// This rank's region; a memfd.
    pub region: &'a Arc<Region>,
    /// How long it may take, without the gathering.
    pub timeout: Duration,
}

impl Exchange<'_> {
    /// Maps the regions of all ranks in the domain, in the domain's order. All ranks of the group
    /// call this, since all take part in `all_gather`.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] names ranks that this one cannot reach by a Unix socket,
    /// [`Error::PeerLost`] those that went away, [`Error::Timeout`] those that did not come in
    /// time, [`Error::Bootstrap`] one that sent nonsense.
    pub(crate) fn run(&self, all_gather: AllGather<'_>) -> Result<Vec<Window>> {
        let Some(file) = self.region.file() else {
            let limit = "must be a memfd to be shared between processes";
            return Err(Error::invalid("region", "private memory", limit));
        };
        let meeting = Meeting {
            rank: self.rank,
            domain: self.domain,
            reserve: self.region.reserve(),
            file,
            timeout: self.timeout,
        };
        let met = meeting.run(all_gather, &mut |_, reserve, file| {
            PeerRegion::map(file, reserve).map(Arc::new)
        })?;
        let mut mapped = met.into_iter();
        let windows = self.domain.iter().filter_map(|&rank| {
            if rank == self.rank {
                Some(Window::Local(self.region.clone()))
            } else {
                mapped.next().map(|met| Window::Mapped(met.value))
            }
        });
        Ok(windows.collect())
    }
}
