//! Kernels by what they are compiled for: found, or made and loaded, once per buffer.

use std::{
    collections::HashMap,
    ffi::CStr,
    sync::{Arc, Mutex, PoisonError},
};

use crate::{
    engine::cuda::{
        driver::{
            context::Context,
            module::{Function, Shape},
        },
        jit::{Jit, Key},
    },
    error::{Error, Result},
    settings::Settings,
};

/// Shared memory of a block that the driver keeps for itself, and that kernels declare.
const RESERVED_SHARED: u32 = 2048;

/// Loaded kernels.
pub(crate) struct Kernels {
    context: Arc<Context>,
    jit: Jit,
    most_shared: u32,
    functions: Mutex<HashMap<(Key, &'static CStr), Arc<Function>>>,
}

impl Kernels {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        Ok(Self {
            context: Arc::clone(context),
            jit: Jit::new(&Settings::from_env()?, context.device.driver)?,
            most_shared: context
                .device
                .shared_memory()?
                .saturating_sub(RESERVED_SHARED),
            functions: Mutex::default(),
        })
    }

    /// The kernel `name` of the program `key`.
    pub(crate) fn get(&self, key: Key, name: &'static CStr) -> Result<Arc<Function>> {
        let mut functions = self
            .functions
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(&(key, name)) {
            return Ok(Arc::clone(function));
        }
        let module = self.jit.module(&self.context, key)?;
        let function = Arc::new(module.function(name, self.most_shared)?);
        functions.insert((key, name), Arc::clone(&function));
        Ok(function)
    }

    /// The shape of a launch.
    ///
    /// # Errors
    ///
    /// More shared memory than a block may use, because of so many of `what`.
    pub(crate) fn shape(
        &self,
        blocks: u32,
        threads: u32,
        shared_bytes: u64,
        what: &'static str,
    ) -> Result<Shape> {
        if shared_bytes > u64::from(self.most_shared) {
            return Err(Error::invalid(
                what,
                format!("{shared_bytes} bytes of shared memory"),
                format!("must need at most {} of them", self.most_shared),
            ));
        }
        Ok(Shape {
            blocks: blocks.max(1),
            threads,
            shared_bytes: shared_bytes as u32,
            cooperative: false,
        })
    }
}
