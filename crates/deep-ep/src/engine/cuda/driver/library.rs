//! Shared libraries opened at run time.
//!
//! The CUDA bindings' own loader ends the process when a library or a function is missing, and takes
//! the first library of a matching name. Here a missing one is an answer, and the library is the one
//! that was looked for.

use std::{
    ffi::{CStr, CString, OsStr, c_void},
    os::unix::ffi::OsStrExt,
    path::PathBuf,
    ptr::NonNull,
};

/// An open shared library. It is never closed: code in it may run until the process ends.
#[derive(Debug)]
pub(crate) struct Library {
    handle: NonNull<c_void>,
}

// SAFETY: the handle is only passed to `dlsym`, which any thread may call.
unsafe impl Send for Library {}
// SAFETY: as above; `dlsym` may be called by several threads at a time.
unsafe impl Sync for Library {}

impl Library {
    /// Opens `name`: a path if it has a slash, else what the loader finds under that name.
    ///
    /// # Safety
    ///
    /// Opening runs the library's initialisers: it must be one that may run in this process.
    ///
    /// # Errors
    ///
    /// The loader's message.
    pub(crate) unsafe fn open(name: &OsStr) -> Result<Self, String> {
        let text = CString::new(name.as_bytes()).map_err(|_| "a NUL in the path".to_owned())?;
        // SAFETY: the name is a C string; the caller vouches for the initialisers.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        NonNull::new(handle)
            .map(|handle| Self { handle })
            .ok_or_else(last_error)
    }

    /// The address of a function, if the library has it.
    pub(crate) fn symbol(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle is open and never closed.
        NonNull::new(unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) })
    }
}

/// The file that holds this function, as the loader knows it.
pub(crate) fn file_of(function: NonNull<c_void>) -> Option<PathBuf> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `dladdr` only reads its tables; a result other than 0 means that it filled `info`,
    // whose name lives as long as the library, which is never closed.
    unsafe {
        if libc::dladdr(function.as_ptr(), info.as_mut_ptr()) == 0 {
            return None;
        }
        let name = info.assume_init().dli_fname;
        let name = NonNull::new(name.cast_mut())?;
        let name = CStr::from_ptr(name.as_ptr());
        Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
    }
}

/// What the loader said last in this thread.
fn last_error() -> String {
    // SAFETY: the text, if there is one, is valid until the next loader call of this thread.
    unsafe {
        let text = libc::dlerror();
        match text.is_null() {
            true => "the loader gave no reason".to_owned(),
            false => CStr::from_ptr(text).to_string_lossy().into_owned(),
        }
    }
}

/// Declares the functions of a library as a table of pointers.
///
/// Every function returns a status code. It is kept as a plain integer, since a newer library may
/// return codes that the bindings' enum does not have. The compiler checks each signature against
/// that of the bindings, except the `unchecked`, which take a code or have an older version's name.
macro_rules! table {
    (
        $(#[$meta:meta])*
        $name:ident from $sys:ident, code $code:ident {
            required { $(fn $req:ident($($req_ty:ty),* $(,)?);)* }
            optional { $(fn $opt:ident($($opt_ty:ty),* $(,)?);)* }
            unchecked { $(fn $text:ident($($text_ty:ty),* $(,)?);)* }
        }
    ) => {
        $(#[$meta])*
        #[allow(non_snake_case)]
        #[derive(Debug)]
        pub(crate) struct $name {
            $(pub(crate) $req: unsafe extern "C" fn($($req_ty),*) -> ::std::ffi::c_uint,)*
            $(pub(crate) $opt: Option<unsafe extern "C" fn($($opt_ty),*) -> ::std::ffi::c_uint>,)*
            $(pub(crate) $text: unsafe extern "C" fn($($text_ty),*) -> ::std::ffi::c_uint,)*
        }

        impl $name {
            /// Looks all functions up; an error is the name of one that is missing.
            ///
            /// # Safety
            ///
            /// The library must be the one that these signatures are of.
            pub(crate) unsafe fn load(
                library: &$crate::engine::cuda::driver::library::Library,
            ) -> ::std::result::Result<Self, &'static str> {
                macro_rules! find {
                    ($function:ident) => {
                        library.symbol(const {
                            match ::std::ffi::CStr::from_bytes_with_nul(
                                concat!(stringify!($function), "\0").as_bytes(),
                            ) {
                                Ok(name) => name,
                                Err(_) => panic!(),
                            }
                        })
                    };
                }
                Ok(Self {
                    $($req: {
                        let found = find!($req).ok_or(stringify!($req))?;
                        // SAFETY: the caller vouches for the library, whose function this is.
                        unsafe { ::std::mem::transmute::<
                            ::std::ptr::NonNull<::std::ffi::c_void>,
                            unsafe extern "C" fn($($req_ty),*) -> ::std::ffi::c_uint,
                        >(found) }
                    },)*
                    // SAFETY: as above.
                    $($opt: find!($opt).map(|found| unsafe { ::std::mem::transmute::<
                        ::std::ptr::NonNull<::std::ffi::c_void>,
                        unsafe extern "C" fn($($opt_ty),*) -> ::std::ffi::c_uint,
                    >(found) }),)*
                    $($text: {
                        let found = find!($text).ok_or(stringify!($text))?;
                        // SAFETY: as above.
                        unsafe { ::std::mem::transmute::<
                            ::std::ptr::NonNull<::std::ffi::c_void>,
                            unsafe extern "C" fn($($text_ty),*) -> ::std::ffi::c_uint,
                        >(found) }
                    },)*
                })
            }
        }

        // Codes are 32 bits wide, so that reading them as integers is right.
        const _: () = assert!(size_of::<$sys::$code>() == size_of::<::std::ffi::c_uint>());
        $(const _: unsafe fn($($req_ty),*) -> $sys::$code = $sys::$req;)*
        $(const _: unsafe fn($($opt_ty),*) -> $sys::$code = $sys::$opt;)*
    };
}
pub(crate) use table;
