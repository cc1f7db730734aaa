//! CUDA's driver and compiler, loaded at run time; nothing of CUDA is needed to build.
//!
//! Three layers: raw tables of functions (`sys`, with the types of `cudarc`), checked calls
//! (`checked`: codes as errors), and owned types (the rest). A machine without the libraries gets a
//! typed answer that says what is not there and where it was looked for.
//!
//! Owned types hold their context, make it current for the time of a call, and put back the one that
//! was current before: the thread may be a framework's.

pub(crate) mod checked;
pub(crate) mod context;
pub(crate) mod device;
pub(crate) mod graph;
pub(crate) mod library;
pub(crate) mod memory;
pub(crate) mod module;
pub(crate) mod nvrtc;
pub(crate) mod ordered;
pub(crate) mod staging;
pub(crate) mod stream;
pub(crate) mod sys;
pub(crate) mod vmm;
