//! Kernels compiled when they are first needed.
//!
//! A program's image depends on its source and headers, the options (constants and architecture
//! among them) and the compiler's version; the hash of these names it on disk ([`disk`]). In memory
//! it is found by its typed [`Key`], without making any text. Modules are loaded at once and whole,
//! and shared as long as somebody uses them.

mod disk;
mod key;
mod target;
#[cfg(test)]
pub(crate) mod test_folder;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Instant,
};

use sha2::{Digest, Sha256};

pub(crate) use disk::Disk;
pub(crate) use key::{CombineKey, Contraction, DispatchKey, Key, LimitKey, LowLatencyKey};
pub(crate) use target::Target;
#[cfg(test)]
pub(crate) use tests::nvrtc;

use super::driver::{
    checked::Driver,
    context::Context,
    module::Module,
    nvrtc::{Nvrtc, Places, Program, Search},
};
use crate::{
    error::{Error, Result},
    settings::Settings,
};

/// An image, when it is there. The lock of one is held while it is compiled.
type Slot = Arc<Mutex<Option<Arc<[u8]>>>>;

/// The compiler and what it has made.
#[derive(Debug)]
pub(crate) struct Jit {
    nvrtc: Nvrtc,
    disk: Disk,
    images: Mutex<HashMap<(Target, Key), Slot>>,
    modules: Mutex<HashMap<(usize, Key), Weak<Module>>>,
}

impl Jit {
    /// The compiler that these settings and the driver lead to.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Unsupported`] if there is none, saying where it was looked for.
    pub(crate) fn new(settings: &Settings, driver: &Driver) -> Result<Self> {
        let places = Places::of_process(settings.nvrtc.value.clone());
        let nvrtc = Search::run(&places, Some(driver.version)).found?;
        Ok(Self::with(nvrtc, settings.cache_dir.value.clone()))
    }

    pub(crate) fn with(nvrtc: Nvrtc, cache: Option<PathBuf>) -> Self {
        Self {
            nvrtc,
            disk: Disk::new(cache),
            images: Mutex::default(),
            modules: Mutex::default(),
        }
    }

    /// The loaded module of this key in this context.
    pub(crate) fn module(&self, context: &Arc<Context>, key: Key) -> Result<Arc<Module>> {
        let place = (context.device.ordinal, key);
        if let Some(module) = lock(&self.modules).get(&place).and_then(Weak::upgrade) {
            return Ok(module);
        }
        let target = Target::with(context.device.compute_capability()?, &self.nvrtc)?;
        let image = self.image(&target, key)?;
        // SAFETY: NVRTC made the image, now or before it was kept with its checksum.
        let module = unsafe { Module::load(context, &image) }?;
        lock(&self.modules).insert(place, Arc::downgrade(&module));
        Ok(module)
    }

    /// The compiler.
    pub(crate) fn nvrtc(&self) -> &Nvrtc {
        &self.nvrtc
    }

    /// Sees to it that the image of this key is on disk; whether it was there already.
    ///
    /// # Errors
    ///
    /// It could not be compiled, or not be kept.
    pub(crate) fn keep(&self, target: &Target, key: Key) -> Result<bool> {
        let name = name(&self.nvrtc, key.program(), &options(target, key));
        if self.disk.load(&name).is_some() {
            return Ok(true);
        }
        let image = self.image(target, key)?;
        match self.disk.load(&name) {
            Some(kept) if *kept == *image => Ok(false),
            _ => Err(Error::Unsupported {
                feature: "keeping compiled kernels".into(),
                why: "the cache folder (DEEP_EP_CACHE_DIR) cannot be written".into(),
            }),
        }
    }

    /// The image of this key, from memory, from disk, or compiled.
    pub(crate) fn image(&self, target: &Target, key: Key) -> Result<Arc<[u8]>> {
        let slot = {
            let mut images = lock(&self.images);
            Arc::clone(images.entry((target.clone(), key)).or_default())
        };
        let mut slot = lock(&slot);
        if let Some(image) = &*slot {
            return Ok(Arc::clone(image));
        }
        let program = key.program();
        let options = options(target, key);
        let name = name(&self.nvrtc, program, &options);
        let image = match self.disk.load(&name) {
            Some(image) => image,
            None => {
                let start = Instant::now();
                let (image, _log) = self.nvrtc.compile(program, &options, target.image())?;
                let took = start.elapsed();
                tracing::debug!(program = program.name, target = %target.architecture, ?took, "compiled");
                self.disk.store(&name, &image);
                image
            }
        };
        Ok(Arc::clone(slot.insert(image.into())))
    }
}

/// The compiler's options for a key.
fn options(target: &Target, key: Key) -> Vec<String> {
    let mut options = vec![
        format!("--gpu-architecture={}", target.architecture),
        "--std=c++17".to_owned(),
        // Exact division, square root and denormals: results are the same everywhere.
        "--prec-div=true".to_owned(),
        "--prec-sqrt=true".to_owned(),
        "--ftz=false".to_owned(),
        match key.contraction() {
            Contraction::Explicit => "--fmad=false".to_owned(),
        },
    ];
    let constants = key.constants();
    options.extend(
        constants
            .into_iter()
            .map(|(name, value)| format!("--define-macro={name}={value}")),
    );
    options
}

/// The hash of everything that an image depends on. Each part is hashed with its length, so that
/// no two lists of parts look alike.
fn name(nvrtc: &Nvrtc, program: Program<'_>, options: &[String]) -> disk::Name {
    let mut hash = Sha256::new();
    let mut add = |part: &str| {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    };
    add(&nvrtc.version.to_string());
    add(program.name);
    add(program.source);
    for (name, text) in program.headers {
        add(name);
        add(text);
    }
    options.iter().for_each(|option| add(option));
    hash.finalize().into()
}

/// What the lock guards is whole at every moment, so a panic elsewhere does not spoil it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
