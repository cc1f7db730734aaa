//! Kernels by what they are compiled for: found, or made and loaded, once per process and GPU.

use std::{
    collections::HashMap,
    ffi::CStr,
    sync::{Arc, Mutex, OnceLock, PoisonError},
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

/// Shared memory of a block that kernels declare, at most.
const RESERVED_SHARED: u32 = 17 << 10;

/// The kernels of one GPU.
///
/// Loading a module waits for the kernels that run on its GPU. Ranks that share a GPU therefore
/// share what is loaded: the first that comes to a call loads its kernel, with the others waiting
/// for that, and nobody loads anything while a peer's kernel waits for this rank.
pub(crate) struct Kernels {
    context: Arc<Context>,
    /// Bytes of dynamic shared memory that a block may use.
    pub(crate) most_shared: u32,
    /// Whether there are bulk copies through shared memory.
    pub(crate) bulk: bool,
}

type Loaded = HashMap<(usize, Key, &'static CStr), Arc<Function>>;

/// What this process has loaded. It stays: GPUs have room, and unloading waits as loading does.
struct Shared {
    jit: Jit,
    loaded: Mutex<Loaded>,
}

fn shared(context: &Context) -> Result<&'static Shared> {
    static SHARED: OnceLock<Result<Shared>> = OnceLock::new();
    SHARED
        .get_or_init(|| {
            Ok(Shared {
                jit: Jit::new(&Settings::from_env()?, context.device.driver)?,
                loaded: Mutex::default(),
            })
        })
        .as_ref()
        .map_err(Clone::clone)
}

impl Kernels {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        shared(context)?;
        Ok(Self {
            context: Arc::clone(context),
            most_shared: context
                .device
                .shared_memory()?
                .saturating_sub(RESERVED_SHARED),
            bulk: context.device.compute_capability()?.major >= 9,
        })
    }

    /// The kernel `name` of the program `key`.
    pub(crate) fn get(&self, key: Key, name: &'static CStr) -> Result<Arc<Function>> {
        let shared = shared(&self.context)?;
        let place = (self.context.device.ordinal, key, name);
        let mut loaded = shared.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = loaded.get(&place) {
            return Ok(Arc::clone(function));
        }
        let module = shared.jit.module(&self.context, key)?;
        let function = Arc::new(module.function(name, self.most_shared)?);
        loaded.insert(place, Arc::clone(&function));
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
