//! Reading and writing through pointers that C passed.
//!
//! What the header demands of every call is what makes this safe: a pointer is NULL or points to what
//! its type says, for as long as the call lasts. NULL is found here.

use std::{
    ffi::{CStr, c_char},
    mem::MaybeUninit,
    ptr::NonNull,
};

use deep_ep::{Error, Result};

/// A struct that begins with its size, so that programs built for an older or newer version of the
/// header can pass it.
///
/// # Safety
/// It is `repr(C)`, its first field is a `usize` that the caller sets to the size he knows, any
/// field may be all zeros, and what follows the last field of the past is never read by old callers.
pub(crate) unsafe trait Versioned: Copy {
    /// Its name in C.
    const NAME: &'static str;
}

const SIZE: usize = size_of::<usize>();

fn size_known<T: Versioned>(pointer: *const T, argument: &'static str) -> Result<usize> {
    let limit = || {
        format!(
            "must point to a {}, made by the function of that name",
            T::NAME.trim_end_matches("_t")
        )
    };
    if pointer.is_null() {
        return Err(Error::invalid(argument, "NULL", limit()));
    }
    // SAFETY: not NULL, so it points to a struct that begins with its size.
    let size = unsafe { pointer.cast::<usize>().read_unaligned() };
    if !(SIZE..=1 << 16).contains(&size) {
        let value = format!("a struct with struct_size = {size}");
        return Err(Error::invalid(argument, value, limit()));
    }
    Ok(size)
}

/// The struct at `pointer`; what the caller does not know is 0.
pub(crate) fn read<T: Versioned>(pointer: *const T, argument: &'static str) -> Result<T> {
    let size = size_known(pointer, argument)?;
    let mut value = MaybeUninit::<T>::zeroed();
    let bytes = size.min(size_of::<T>());
    // SAFETY: the caller's struct has `size` bytes, ours has room for them.
    unsafe {
        let to = value.as_mut_ptr().cast::<u8>();
        to.copy_from_nonoverlapping(pointer.cast(), bytes);
    }
    // SAFETY: as above; a newer caller's struct is longer than ours.
    let unknown =
        unsafe { std::slice::from_raw_parts(pointer.cast::<u8>().add(bytes), size - bytes) };
    if unknown.iter().any(|&byte| byte != 0) {
        return Err(Error::invalid(
            argument,
            format!("a struct of {size} bytes, some beyond {bytes} not 0"),
            "must not use fields that this version of the library does not know",
        ));
    }
    // SAFETY: any field may be all zeros, and the rest are the caller's values of the same type.
    Ok(unsafe { value.assume_init() })
}

/// The struct at `pointer`, if there is one.
pub(crate) fn read_optional<T: Versioned>(
    pointer: *const T,
    argument: &'static str,
) -> Result<Option<T>> {
    match pointer.is_null() {
        true => Ok(None),
        false => read(pointer, argument).map(Some),
    }
}

/// A place for a result, which is checked before anything is done.
pub(crate) struct Out<T>(NonNull<T>);

// SAFETY: it is used by one thread at a time, as a plain place in memory.
unsafe impl<T: Send> Send for Out<T> {}

impl<T> Out<T> {
    pub(crate) fn new(pointer: *mut T, argument: &'static str) -> Result<Self> {
        NonNull::new(pointer)
            .map(Self)
            .ok_or_else(|| Error::invalid(argument, "NULL", "must point to where the result goes"))
    }

    pub(crate) fn set(self, value: T) {
        // SAFETY: not NULL, so it points to memory for a `T`.
        unsafe { self.0.as_ptr().write_unaligned(value) };
    }
}

/// A place for a struct that begins with its size.
pub(crate) struct OutStruct<T: Versioned> {
    place: NonNull<T>,
    size: usize,
}

impl<T: Versioned> OutStruct<T> {
    pub(crate) fn new(pointer: *mut T, argument: &'static str) -> Result<Self> {
        let size = size_known(pointer, argument)?;
        let place = Out::new(pointer, argument)?.0;
        Ok(Self { place, size })
    }

    /// Writes what the caller knows of `value`, but for its size.
    pub(crate) fn set(self, value: T) {
        let bytes = self.size.min(size_of::<T>()) - SIZE;
        // SAFETY: both structs have so many bytes after the first field.
        unsafe {
            let from = (&raw const value).cast::<u8>().add(SIZE);
            let to = self.place.as_ptr().cast::<u8>().add(SIZE);
            to.copy_from_nonoverlapping(from, bytes);
        }
    }
}

/// `len` values for reading.
pub(crate) fn slice<'a, T>(
    pointer: *const T,
    len: usize,
    argument: &'static str,
) -> Result<&'a [T]> {
    check_values(pointer, len, argument)?;
    if len == 0 {
        return Ok(&[]);
    }
    // SAFETY: the caller has `len` values there, which nobody writes during the call.
    Ok(unsafe { std::slice::from_raw_parts(pointer, len) })
}

/// `len` values for writing.
pub(crate) fn slice_mut<'a, T>(
    pointer: *mut T,
    len: usize,
    argument: &'static str,
) -> Result<&'a mut [T]> {
    check_values(pointer, len, argument)?;
    if len == 0 {
        return Ok(&mut []);
    }
    // SAFETY: the caller has room for `len` values there, which nobody uses during the call.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer, len) })
}

fn check_values<T>(pointer: *const T, len: usize, argument: &'static str) -> Result<()> {
    let align = align_of::<T>();
    let fits = len
        .checked_mul(size_of::<T>())
        .is_some_and(|bytes| bytes < isize::MAX as usize);
    if len == 0 || (fits && !pointer.is_null() && pointer.addr().is_multiple_of(align)) {
        return Ok(());
    }
    Err(Error::invalid(
        argument,
        format!("{pointer:p} for {len} values"),
        format!("must point to so many values, aligned to {align} bytes"),
    ))
}

/// The address of a list for C, NULL where it is empty.
pub(crate) fn first<T>(list: &[T]) -> *const T {
    list.first().map_or(std::ptr::null(), std::ptr::from_ref)
}

/// A text, if there is one.
pub(crate) fn text_optional(
    pointer: *const c_char,
    argument: &'static str,
) -> Result<Option<String>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL, so it is a string that ends with a zero.
    let text = unsafe { CStr::from_ptr(pointer) };
    let text = text
        .to_str()
        .map_err(|_| Error::invalid(argument, format!("{text:?}"), "must be UTF-8"))?;
    Ok(Some(text.to_owned()))
}
