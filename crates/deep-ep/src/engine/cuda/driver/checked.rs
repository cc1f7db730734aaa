//! Checked layer: the driver found and started once per process, and its codes as errors.

use std::{
    ffi::{CStr, OsStr, c_char, c_int, c_uint},
    fmt,
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::OnceLock,
};

use super::{
    library::{Library, file_of},
    sys::{Api, code},
};
use crate::error::{Error, Result};

/// Where the library is looked for: the loader's places, then where containers mount it.
const PLACES: [&str; 4] = [
    "libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
    "libcuda.so",
];

/// A CUDA version, as `13.0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Before the point.
    pub major: u32,
    /// Behind the point.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The driver's library, initialised.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) api: Api,
    /// The newest CUDA that it supports.
    pub(crate) version: Version,
    /// Its file.
    pub(crate) file: PathBuf,
}

/// Calls a function of the driver's table, within an `unsafe` block: `Ok(())` or an [`Error::Cuda`]
/// with the function's name.
macro_rules! call {
    ($driver:expr, $function:ident($($arg:expr),* $(,)?)) => {
        $driver.check(stringify!($function), ($driver.api.$function)($($arg),*))
    };
}
pub(crate) use call;

/// As [`call`], of a function that the driver may lack: then [`Error::Unsupported`].
macro_rules! call_optional {
    ($driver:expr, $function:ident($($arg:expr),* $(,)?)) => {
        match $driver.api.$function {
            Some(function) => $driver.check(stringify!($function), function($($arg),*)),
            None => Err($driver.lacks(stringify!($function))),
        }
    };
}
pub(crate) use call_optional;

impl Driver {
    /// The driver of this process.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if there is no driver or it has no device; [`Error::Cuda`] if it does
    /// not start. The first answer stays: a driver does not come later.
    pub(crate) fn get() -> Result<&'static Self> {
        static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
        DRIVER
            .get_or_init(Self::start)
            .as_ref()
            .map_err(Clone::clone)
    }

    fn start() -> Result<Self> {
        let mut reasons = Vec::new();
        let library = PLACES.into_iter().find_map(|place| {
            // SAFETY: the driver's library may be opened in any process; its initialisers only
            // set its own state up.
            match unsafe { Library::open(OsStr::new(place)) } {
                Ok(library) => Some(library),
                Err(reason) => {
                    reasons.push(reason);
                    None
                }
            }
        });
        let Some(library) = library else {
            return Err(missing(format!(
                "the NVIDIA driver's library is not here ({})",
                reasons.first().map_or("", String::as_str)
            )));
        };
        // SAFETY: a library of this name is the CUDA driver, whose functions these are.
        let api = unsafe { Api::load(&library) }.map_err(|function| {
            missing(format!(
                "the NVIDIA driver is too old: it has no {function}; CUDA 12.0 or newer is needed"
            ))
        })?;
        let file = NonNull::new(api.cuInit as *mut std::ffi::c_void).and_then(file_of);
        let mut this = Self {
            api,
            version: Version { major: 0, minor: 0 },
            file: file.unwrap_or_else(|| Path::new(PLACES[0]).to_owned()),
        };
        // SAFETY: the only flag that exists is 0, and nothing else has to come before.
        let started = unsafe { (this.api.cuInit)(0) };
        if started == code::NO_DEVICE {
            return Err(missing("the NVIDIA driver sees no GPU"));
        }
        this.check("cuInit", started)?;
        // SAFETY: the pointer is valid for the call.
        let version: c_int =
            unsafe { this.out(|version| call!(this, cuDriverGetVersion(version)))? };
        this.version = Version {
            major: version as u32 / 1000,
            minor: version as u32 % 1000 / 10,
        };
        Ok(this)
    }

    /// `Ok` for success, else the error that `call` made.
    pub(crate) fn check(&self, call: &'static str, code: c_uint) -> Result<()> {
        if code == code::SUCCESS {
            return Ok(());
        }
        Err(Error::Cuda {
            call: call.into(),
            code,
            name: self.text(self.api.cuGetErrorName, code),
            message: self.text(self.api.cuGetErrorString, code),
        })
    }

    /// The error for an optional function that is not there.
    pub(crate) fn lacks(&self, function: &'static str) -> Error {
        missing(format!(
            "the NVIDIA driver (CUDA {}) has no {function}",
            self.version
        ))
    }

    fn text(
        &self,
        lookup: unsafe extern "C" fn(c_uint, *mut *const c_char) -> c_uint,
        code: c_uint,
    ) -> String {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the pointer is valid for the call; any number may be asked for, and the text, if
        // there is one, is a constant of the library.
        unsafe {
            if lookup(code, &mut text) != code::SUCCESS || text.is_null() {
                return "unknown".to_owned();
            }
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }

    /// The value that `get` writes through the pointer it is given.
    ///
    /// # Safety
    ///
    /// All zeros must be a `T`, as for numbers and pointers, and `get` must write nothing else.
    pub(crate) unsafe fn out<T>(&self, get: impl FnOnce(*mut T) -> Result<()>) -> Result<T> {
        // SAFETY: zeros are a `T`, as the caller says.
        let mut value: T = unsafe { std::mem::zeroed() };
        get(&mut value)?;
        Ok(value)
    }
}

fn missing(why: impl Into<String>) -> Error {
    Error::Unsupported {
        feature: "CUDA".into(),
        why: why.into(),
    }
}
