//! Memory of the library on a GPU that Python has dropped.
//!
//! The library uses a block again as soon as it is given back: what comes next is behind it in the order
//! of the buffer's calls. But what a caller's own kernels do with a tensor is not: they may still read it
//! when Python drops it. So dropped memory waits here until the package, which knows the caller's stream,
//! has ordered the communication stream behind it or has seen that it is past.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;

use crate::tensor::Owner;

/// Where dropped memory of one buffer waits.
#[derive(Clone, Default)]
pub(crate) struct Lot(Arc<Mutex<Vec<Owner>>>);

/// Memory whose owner goes to the lot when this is dropped.
struct Parked {
    owner: Option<Owner>,
    lot: Weak<Mutex<Vec<Owner>>>,
}

impl Drop for Parked {
    fn drop(&mut self) {
        // Without the buffer nobody uses the memory again.
        if let (Some(owner), Some(lot)) = (self.owner.take(), self.lot.upgrade()) {
            let mut waiting = lot.lock().unwrap_or_else(PoisonError::into_inner);
            waiting.push(owner);
        }
    }
}

impl Lot {
    /// What Python is to hold of memory that lives as long as `owner`, on the host (-1) or a GPU, where
    /// `owner` waits here once Python has dropped it.
    pub(crate) fn owner(&self, device: i32, owner: Owner) -> Owner {
        if device < 0 {
            return owner;
        }
        Arc::new(Parked {
            owner: Some(owner),
            lot: Arc::downgrade(&self.0),
        })
    }

    /// What waits here now.
    pub(crate) fn take(&self) -> Option<Dropped> {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match waiting.is_empty() {
            true => None,
            false => Some(Dropped {
                _owners: std::mem::take(&mut waiting),
            }),
        }
    }
}

/// Dropped memory, which is given back when this object goes.
#[pyclass(frozen, module = "deep_ep._native")]
pub(crate) struct Dropped {
    _owners: Vec<Owner>,
}
