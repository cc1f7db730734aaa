//! What all calls of one rank share: the group, the memory, the call in progress.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use super::{
    announce::{ABANDONED, post_reject},
    control::Kind,
    group::{Absent, At, Group, Stage},
    low_latency::Area,
    workers::Workers,
};
use crate::{
    engine::{LoanMemory, Operation},
    error::{Error, Reject, Result},
    memory::{
        heap::{Block, Heap, Purpose},
        region::Region,
    },
};

/// One rank's side of a buffer.
pub(super) struct Core {
    pub(super) group: Group,
    pub(super) workers: Workers,
    pub(super) counters: Counters,
    /// Landing memory of the low-latency calls.
    pub(super) area: Option<Area>,
    /// What low-latency calls do about ranks that do not come.
    pub(super) absent: Absent,
    region: Arc<Region>,
    heap: Mutex<Heap>,
    session: Mutex<Session>,
}

/// Bytes copied and summed.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) rows: AtomicU64,
    pub(super) metadata: AtomicU64,
    pub(super) summed: AtomicU64,
    pub(super) wire: AtomicU64,
}

impl Counters {
    pub(super) fn add(counter: &AtomicU64, bytes: usize) {
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// The calls of a buffer, one after the other.
#[derive(Default)]
pub(super) struct Session {
    /// Number of the last call begun, 0 before the first.
    call: u64,
    open: Option<Open>,
}

/// A call that was begun and not finished.
struct Open {
    call: u64,
    /// Given back when every peer has finished the call.
    blocks: Vec<Block>,
    /// Whether peers wait for a landing note, or a delivery note, of this rank.
    owes: Vec<Kind>,
}

/// The right to work on one call: calls of a buffer are made one at a time.
pub(super) struct Turn<'a> {
    core: &'a Core,
    session: MutexGuard<'a, Session>,
    pub(super) call: u64,
}

impl Core {
    pub(super) fn new(
        group: Group,
        region: Arc<Region>,
        heap: Heap,
        workers: Workers,
        area: Option<Area>,
        absent: Absent,
    ) -> Self {
        Self {
            group,
            workers,
            counters: Counters::default(),
            area,
            absent,
            region,
            heap: Mutex::new(heap),
            session: Mutex::default(),
        }
    }

    fn session(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn heap(&self) -> MutexGuard<'_, Heap> {
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of calls begun so far.
    pub(super) fn calls(&self) -> u64 {
        self.session().call
    }

    /// Begins the next call; abandons one that was not finished. Returns when the words and landing
    /// memory of the call before last may be used again.
    pub(super) fn begin(&self, operation: Operation) -> Result<Turn<'_>> {
        let mut turn = Turn {
            core: self,
            session: self.session(),
            call: 0,
        };
        turn.abandon();
        self.group.check_abort()?;
        turn.session.call += 1;
        turn.call = turn.session.call;
        let absent = match operation {
            Operation::Dispatch | Operation::Combine => Absent::Fail,
            _ => self.absent,
        };
        self.group.wait_finished(
            At {
                operation,
                stage: Stage::Reuse,
            },
            turn.call.saturating_sub(2),
            absent,
        )?;
        if self.absent == Absent::Mask {
            self.group.heed_exclusions();
        }
        turn.session.open = Some(Open {
            call: turn.call,
            blocks: vec![],
            owes: vec![],
        });
        Ok(turn)
    }

    /// Continues call number `call`, unless another was begun since.
    pub(super) fn resume(&self, operation: Operation, call: u64) -> Result<Turn<'_>> {
        let session = self.session();
        match &session.open {
            Some(open) if open.call == call => Ok(Turn {
                core: self,
                session,
                call,
            }),
            _ => Err(Error::Abandoned {
                operation: operation.name().into(),
            }),
        }
    }

    /// Abandons call number `call` if it is still open. Never waits for a peer.
    pub(super) fn abandon(&self, call: u64) {
        let mut turn = Turn {
            core: self,
            session: self.session(),
            call,
        };
        if turn
            .session
            .open
            .as_ref()
            .is_some_and(|open| open.call == call)
        {
            turn.abandon();
        }
    }

    /// A block of this rank's symmetric memory.
    pub(super) fn alloc(&self, len: usize, purpose: Purpose) -> Result<Block> {
        let finished = self.group.finished_by_all();
        let mut heap = self.heap();
        heap.reap(finished);
        heap.alloc(len as u64, purpose, &mut |wanted| {
            self.region.commit(wanted)
        })
    }

    /// Commits at least `len` bytes of the region.
    pub(super) fn reserve(&self, len: u64) -> Result<()> {
        let mut heap = self.heap();
        let committed = self.region.commit(len)?;
        heap.extend(committed);
        Ok(())
    }

    /// The address of a block.
    pub(super) fn at(&self, block: &Block) -> *mut u8 {
        self.region
            .ptr(block.offset(), block.len())
            .expect("a block lies in committed memory")
    }

    pub(super) fn region(&self) -> &Region {
        &self.region
    }
}

/// This rank's membership, held by the engine and by every call in flight. When the last of them is
/// dropped the peers are told; loans alone do not count.
pub(super) struct Member {
    pub(super) core: Arc<Core>,
}

impl Drop for Member {
    fn drop(&mut self) {
        self.core.group.close();
    }
}

impl Turn<'_> {
    fn open(&mut self) -> &mut Open {
        self.session
            .open
            .as_mut()
            .expect("a turn works on an open call")
    }

    /// Keeps a block until every peer has finished this call.
    pub(super) fn hold(&mut self, block: Block) {
        self.open().blocks.push(block);
    }

    /// Notes that peers will wait for a message of this rank, to be told if it does not come.
    pub(super) fn owe(&mut self, kind: Kind) {
        self.open().owes.push(kind);
    }

    /// Notes that the message was sent.
    pub(super) fn paid(&mut self, kind: Kind) {
        self.open().owes.retain(|&owed| owed != kind);
    }

    /// Rejects this call in place of announcing it.
    pub(super) fn reject(mut self, reject: &Reject) {
        post_reject(&self.core.group, self.call, reject);
        self.open().owes.clear();
        self.close();
    }

    /// Rejects this call because of `error`, which it gives back.
    pub(super) fn reject_for(self, error: Error) -> Error {
        match &error {
            Error::InvalidArgument(reject) => self.reject(reject),
            Error::OutOfMemory {
                purpose,
                requested,
                limit,
            } => self.reject(&Reject::new(
                format!("memory for {purpose}"),
                format!("{requested} bytes"),
                format!("must fit the limit of {limit} bytes"),
            )),
            other => self.reject(&Reject::new("the call", other, "must not fail")),
        }
        error
    }

    /// Ends the call: successfully, or with an error that left no peer waiting for this rank.
    pub(super) fn finish<T>(mut self, result: Result<T>) -> Result<T> {
        match &result {
            Ok(_) => self.close(),
            Err(_) => self.abandon(),
        }
        result
    }

    fn abandon(&mut self) {
        let Some(open) = &self.session.open else {
            return;
        };
        for &kind in &open.owes {
            for peer in self.core.group.peers() {
                self.core.group.post(peer, kind, open.call, &[ABANDONED]);
            }
        }
        self.close();
    }

    /// Gives memory back and tells the peers that this rank is done with the call.
    fn close(&mut self) {
        let Some(open) = self.session.open.take() else {
            return;
        };
        if self.core.group.check_abort().is_err() {
            // Peers may still be writing or reading; the blocks go with the region.
            return;
        }
        let mut heap = self.core.heap();
        for block in open.blocks {
            heap.free_after(block, open.call);
        }
        drop(heap);
        self.core.group.finish(open.call);
    }
}

/// A block of symmetric memory that the caller holds.
pub(super) struct CpuLoan {
    core: Arc<Core>,
    block: Option<Block>,
    base: *mut u8,
    /// The last call in which peers read it, 0 for none.
    last_read: AtomicU64,
}

// SAFETY: `base` points into the region that `core` keeps alive; access to the bytes is the `Loan`'s
// matter, which hands them out under the usual borrow rules.
unsafe impl Send for CpuLoan {}
// SAFETY: as above.
unsafe impl Sync for CpuLoan {}

impl CpuLoan {
    pub(super) fn new(core: Arc<Core>, block: Block) -> Self {
        let base = core.at(&block);
        Self {
            core,
            block: Some(block),
            base,
            last_read: AtomicU64::new(0),
        }
    }

    /// Offset in the region, if the loan is `core`'s.
    pub(super) fn offset_in(&self, core: &Core) -> Option<u64> {
        std::ptr::eq(&*self.core, core)
            .then(|| self.block.as_ref().map(Block::offset))
            .flatten()
    }

    /// Notes that peers read it in `call`.
    pub(super) fn read_in(&self, call: u64) {
        self.last_read.fetch_max(call, Ordering::Relaxed);
    }
}

impl LoanMemory for CpuLoan {
    fn as_ptr(&self) -> *const u8 {
        self.base
    }

    fn wait_unread(&self) -> Result<()> {
        let call = self.last_read.load(Ordering::Relaxed);
        if call == 0 {
            return Ok(());
        }
        self.core.group.check_abort()?;
        let at = At {
            operation: Operation::Combine,
            stage: Stage::LoanReaders,
        };
        self.core.group.wait_unused(at, call, self.core.absent)
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

impl Drop for CpuLoan {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else {
            return;
        };
        let mut heap = self.core.heap();
        match *self.last_read.get_mut() {
            0 => heap.free(block),
            call => heap.free_after(block, call),
        }
    }
}
