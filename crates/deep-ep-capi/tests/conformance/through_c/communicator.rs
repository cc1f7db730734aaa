//! Communicators.

use deep_ep_c::communicator::{
    CommunicatorObject, deep_ep_communicator_all_gather, deep_ep_communicator_barrier,
    deep_ep_communicator_free, deep_ep_communicator_from_env, deep_ep_communicator_local,
    deep_ep_communicator_rank, deep_ep_communicator_size,
};
use library::{Rank, Result};

use super::{Owned, c};

/// One rank's end of a group.
pub(crate) struct Communicator(Owned<CommunicatorObject>);

impl Communicator {
    fn new(pointer: *mut CommunicatorObject) -> Self {
        Self(Owned::new(pointer, deep_ep_communicator_free))
    }

    pub(crate) fn local(ranks: usize) -> Result<Vec<Self>> {
        let mut ends = vec![std::ptr::null_mut(); ranks];
        c!(0, deep_ep_communicator_local(ranks, ends.as_mut_ptr()))?;
        Ok(ends.into_iter().map(Self::new).collect())
    }

    pub(crate) fn from_env() -> Result<Self> {
        let mut end = std::ptr::null_mut();
        c!(0, deep_ep_communicator_from_env(&mut end))?;
        Ok(Self::new(end))
    }

    pub(crate) fn pointer(&self) -> *const CommunicatorObject {
        self.0.pointer
    }

    pub(crate) fn rank(&self) -> Rank {
        let mut rank = usize::MAX;
        c!(0, deep_ep_communicator_rank(self.pointer(), &mut rank)).expect("a communicator");
        Rank(rank)
    }

    pub(crate) fn size(&self) -> usize {
        let mut size = 0;
        c!(0, deep_ep_communicator_size(self.pointer(), &mut size)).expect("a communicator");
        size
    }

    pub(crate) fn barrier(&self) -> Result<()> {
        c!(self.rank().0, deep_ep_communicator_barrier(self.pointer()))
    }

    /// As the library's, for contributions of different lengths.
    pub(crate) fn all_gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let lengths = self.gather(&mine.len().to_ne_bytes())?;
        let lengths: Vec<usize> = lengths
            .iter()
            .map(|bytes| usize::from_ne_bytes(bytes[..].try_into().expect("8 bytes")))
            .collect();
        let longest = lengths.iter().copied().max().expect("a rank");
        let mut padded = mine.to_vec();
        padded.resize(longest, 0);
        let mut all = self.gather(&padded)?;
        for (bytes, length) in all.iter_mut().zip(lengths) {
            bytes.truncate(length);
        }
        Ok(all)
    }

    fn gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut all = vec![0u8; mine.len() * self.size()];
        let (from, to) = (mine.as_ptr().cast(), all.as_mut_ptr().cast());
        c!(
            self.rank().0,
            deep_ep_communicator_all_gather(self.pointer(), from, mine.len(), to)
        )?;
        Ok(all.chunks_exact(mine.len()).map(<[u8]>::to_vec).collect())
    }
}
