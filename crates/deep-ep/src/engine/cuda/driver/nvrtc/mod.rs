//! NVRTC, the run-time compiler: one library of those that are here, and compiling with it.

mod search;

use std::{
    ffi::{CStr, CString, OsStr, c_char, c_int, c_uint},
    path::PathBuf,
    ptr::NonNull,
};

use cudarc::nvrtc::sys::{self, nvrtcProgram};

pub(crate) use search::{Attempt, Places, builtins_beside};

use super::{
    checked::Version,
    library::{Library, file_of, table},
};
use crate::error::{Error, Result};

table! {
    /// The functions of `libnvrtc` that this library calls.
    Api from sys, code nvrtcResult {
        required {
            fn nvrtcVersion(*mut c_int, *mut c_int);
            fn nvrtcGetNumSupportedArchs(*mut c_int);
            fn nvrtcGetSupportedArchs(*mut c_int);
            fn nvrtcCreateProgram(*mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
            fn nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char);
            fn nvrtcDestroyProgram(*mut nvrtcProgram);
            fn nvrtcGetCUBINSize(nvrtcProgram, *mut usize);
            fn nvrtcGetCUBIN(nvrtcProgram, *mut c_char);
            fn nvrtcGetPTXSize(nvrtcProgram, *mut usize);
            fn nvrtcGetPTX(nvrtcProgram, *mut c_char);
            fn nvrtcGetProgramLogSize(nvrtcProgram, *mut usize);
            fn nvrtcGetProgramLog(nvrtcProgram, *mut c_char);
        }
        optional {}
        unchecked {}
    }
}

/// NVRTC, loaded.
#[derive(Debug)]
pub(crate) struct Nvrtc {
    api: Api,
    pub(crate) version: Version,
    /// Its file.
    pub(crate) file: PathBuf,
    /// Architectures that it compiles for, as 90 for `sm_90`.
    architectures: Vec<u32>,
}

/// What was looked at, and the library that is used.
#[derive(Debug)]
pub(crate) struct Search {
    /// Every library that was tried, the used one last.
    pub(crate) attempts: Vec<Attempt>,
    pub(crate) found: Result<Nvrtc>,
}

impl Search {
    /// Tries the candidates of `places` in their order.
    ///
    /// `newest` is the newest CUDA that the driver supports, if there is a driver: code of a newer
    /// compiler may not load, so such a library is refused.
    pub(crate) fn run(places: &Places, newest: Option<Version>) -> Self {
        let mut attempts = Vec::new();
        for (place, candidate) in places.candidates() {
            let opened = Nvrtc::open(&candidate).and_then(|nvrtc| match newest {
                Some(newest) if nvrtc.version > newest => Err(format!(
                    "NVRTC {} is newer than the driver, which supports CUDA {newest}",
                    nvrtc.version
                )),
                _ => Ok(nvrtc),
            });
            let attempt = |refused| Attempt {
                place,
                candidate: candidate.clone(),
                refused,
            };
            match opened {
                Ok(nvrtc) => {
                    attempts.push(attempt(None));
                    return Self {
                        attempts,
                        found: Ok(nvrtc),
                    };
                }
                Err(why) => attempts.push(attempt(Some(why))),
            }
        }
        let tried: Vec<_> = attempts
            .iter()
            .filter_map(|attempt| {
                let why = attempt.refused.as_ref()?;
                Some(format!("{}: {why}", attempt.candidate.display()))
            })
            .collect();
        let why = format!(
            "no usable libnvrtc was found (pip install nvidia-cuda-nvrtc, or set DEEP_EP_NVRTC); {}",
            tried.join("; ")
        );
        Self {
            attempts,
            found: Err(Error::Unsupported {
                feature: "compiling kernels".into(),
                why,
            }),
        }
    }
}

/// A program to compile.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Program<'a> {
    /// Its name in messages.
    pub(crate) name: &'a str,
    pub(crate) source: &'a str,
    /// What it may include: names and texts.
    pub(crate) headers: &'a [(&'a str, &'a str)],
}

/// What NVRTC makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Image {
    /// Machine code of one architecture.
    Cubin,
    /// Text that the driver compiles.
    Ptx,
}

impl Nvrtc {
    /// Opens this file, or what the loader finds under this name, after its builtins library.
    fn open(candidate: &std::path::Path) -> Result<Self, String> {
        if let Some(builtins) = builtins_beside(candidate) {
            // SAFETY: it belongs to NVRTC, which would open it by name and not find it. If it
            // cannot be opened, compiling says so.
            let _ = unsafe { Library::open(builtins.as_os_str()) };
        }
        // SAFETY: a library of this name is NVRTC, whose initialisers may run in any process.
        let library = unsafe { Library::open(OsStr::new(candidate)) }?;
        // SAFETY: as above: these are NVRTC's functions.
        let api = unsafe { Api::load(&library) }.map_err(|name| format!("it has no {name}"))?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the pointers are valid for the call.
        succeeded("nvrtcVersion", unsafe {
            (api.nvrtcVersion)(&mut major, &mut minor)
        })?;
        let mut count = 0;
        // SAFETY: as above.
        succeeded("nvrtcGetNumSupportedArchs", unsafe {
            (api.nvrtcGetNumSupportedArchs)(&mut count)
        })?;
        let mut architectures = vec![0; count.max(0) as usize];
        // SAFETY: there is room for `count` numbers.
        succeeded("nvrtcGetSupportedArchs", unsafe {
            (api.nvrtcGetSupportedArchs)(architectures.as_mut_ptr())
        })?;
        let file = NonNull::new(api.nvrtcVersion as *mut std::ffi::c_void).and_then(file_of);
        Ok(Self {
            api,
            version: Version {
                major: major as u32,
                minor: minor as u32,
            },
            file: file.unwrap_or_else(|| candidate.to_owned()),
            architectures: architectures.into_iter().map(|a| a as u32).collect(),
        })
    }

    /// The architectures that it compiles for, ascending, as 90 for `sm_90`.
    pub(crate) fn architectures(&self) -> &[u32] {
        &self.architectures
    }

    /// Compiles a program and returns the image and what the compiler said.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`] with the compiler's log as its message.
    pub(crate) fn compile(
        &self,
        program: Program<'_>,
        options: &[String],
        image: Image,
    ) -> Result<(Vec<u8>, String)> {
        let program = self.create(program)?;
        let options = options
            .iter()
            .map(|o| c_string(o))
            .collect::<Result<Vec<_>>>()?;
        let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: the program is alive; there are as many options as said, which live until the
        // call ends.
        let done = unsafe {
            (self.api.nvrtcCompileProgram)(program.raw, pointers.len() as c_int, pointers.as_ptr())
        };
        let log = program.bytes(self.api.nvrtcGetProgramLogSize, self.api.nvrtcGetProgramLog);
        let log = text(&log.unwrap_or_default());
        check("nvrtcCompileProgram", done, &log)?;
        let bytes = match image {
            Image::Cubin => program.bytes(self.api.nvrtcGetCUBINSize, self.api.nvrtcGetCUBIN),
            Image::Ptx => program.bytes(self.api.nvrtcGetPTXSize, self.api.nvrtcGetPTX),
        }?;
        Ok((bytes, log))
    }

    fn create(&self, program: Program<'_>) -> Result<Compilation<'_>> {
        let source = c_string(program.source)?;
        let name = c_string(program.name)?;
        let mut names = Vec::new();
        let mut texts = Vec::new();
        for (name, text) in program.headers {
            names.push(c_string(name)?);
            texts.push(c_string(text)?);
        }
        let name_pointers: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
        let text_pointers: Vec<_> = texts.iter().map(|text| text.as_ptr()).collect();
        let mut raw = std::ptr::null_mut();
        // SAFETY: all strings live until the call ends, which copies them; both lists have the
        // length that is given.
        let done = unsafe {
            (self.api.nvrtcCreateProgram)(
                &mut raw,
                source.as_ptr(),
                name.as_ptr(),
                names.len() as c_int,
                text_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        };
        check("nvrtcCreateProgram", done, program.name)?;
        Ok(Compilation { nvrtc: self, raw })
    }
}

/// A program that NVRTC holds.
struct Compilation<'a> {
    nvrtc: &'a Nvrtc,
    raw: nvrtcProgram,
}

impl Compilation<'_> {
    /// A result of which NVRTC tells the size and then fills a buffer.
    fn bytes(
        &self,
        size_of: unsafe extern "C" fn(nvrtcProgram, *mut usize) -> c_uint,
        get: unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> c_uint,
    ) -> Result<Vec<u8>> {
        let mut size = 0;
        // SAFETY: the program is alive and the pointer valid for the call.
        check("nvrtc..Size", unsafe { size_of(self.raw, &mut size) }, "")?;
        let mut bytes = vec![0u8; size];
        // SAFETY: the buffer has the size that NVRTC said.
        let done = unsafe { get(self.raw, bytes.as_mut_ptr().cast()) };
        check("nvrtcGet..", done, "")?;
        Ok(bytes)
    }
}

impl Drop for Compilation<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is ours and not used again.
        unsafe { (self.nvrtc.api.nvrtcDestroyProgram)(&mut self.raw) };
    }
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::invalid("kernel source", "text", "must have no NUL"))
}

fn text(bytes: &[u8]) -> String {
    let text = CStr::from_bytes_until_nul(bytes).unwrap_or_default();
    text.to_string_lossy().trim().to_owned()
}

fn succeeded(call: &str, code: c_uint) -> Result<(), String> {
    match code {
        0 => Ok(()),
        code => Err(format!("{call} failed with {code}")),
    }
}

fn check(call: &'static str, code: c_uint, message: &str) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    let name = match code {
        1 => "NVRTC_ERROR_OUT_OF_MEMORY",
        2 => "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
        5 => "NVRTC_ERROR_INVALID_OPTION",
        6 => "NVRTC_ERROR_COMPILATION",
        7 => "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
        11 => "NVRTC_ERROR_INTERNAL_ERROR",
        _ => "NVRTC error",
    };
    Err(Error::Cuda {
        call: call.into(),
        code,
        name: name.into(),
        message: message.into(),
    })
}
