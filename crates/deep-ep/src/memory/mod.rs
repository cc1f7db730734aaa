//! Symmetric memory: one region per rank, which every rank of the scale-up domain can load and
//! store.
//!
//! ```text
//!  region of rank r:   0            control             committed                     reserve
//!                      | control words | heap: blocks ... | address space, no memory yet |
//! ```
//!
//! * `region` reserves a large address range once and commits memory behind it, so that an
//!   address never changes while the region lives.
//! * `exchange` passes regions between the processes of a host.
//! * `heap` hands out blocks of the committed part.
//! * `futex` lets a rank sleep on a word of a region until another rank changes it.
//! * [`system`] reads what the machine has and allows.
//!
//! A region never has a name in a file system: memory is anonymous between threads and a memfd
//! between processes, and processes find each other by abstract sockets. Whatever dies, the kernel
//! takes everything back with the last process that maps it.

// The engines are the users; tests of this module reach every item.

pub(crate) mod exchange;
pub(crate) mod futex;
pub(crate) mod heap;
pub(crate) mod region;
pub mod system;
