//! Objects that C holds.
//!
//! What C sees as a pointer is a number that is never used again and never dereferenced. So a
//! pointer that was freed, or that is of another type, is found and is an error, and a thread may free
//! an object while another uses it: the call that uses it holds it until it returns.

use std::{
    any::Any,
    collections::HashMap,
    sync::{Arc, LazyLock, PoisonError, RwLock},
};

use deep_ep::{Error, Result};

/// Something that C holds by a pointer.
pub(crate) trait Object: Any + Send + Sync {
    /// Its name in C.
    const NAME: &'static str;
}

#[derive(Default)]
struct Live {
    made: usize,
    objects: HashMap<usize, Arc<dyn Any + Send + Sync>>,
}

static LIVE: LazyLock<RwLock<Live>> = LazyLock::new(RwLock::default);

/// Numbers look like pointers into the first pages, where nothing is mapped: who dereferences one
/// finds out at once. They step by more than one, so that arithmetic does not reach the next.
const STEP: usize = 16;

/// Gives `object` to C.
pub(crate) fn give<T: Object>(object: T) -> *mut T {
    give_shared(Arc::new(object))
}

/// Gives C another hold on `object`.
pub(crate) fn give_shared<T: Object>(object: Arc<T>) -> *mut T {
    let mut live = LIVE.write().unwrap_or_else(PoisonError::into_inner);
    live.made += 1;
    let number = live.made * STEP;
    live.objects.insert(number, object);
    std::ptr::without_provenance_mut(number)
}

/// The object that C passed as `argument`.
pub(crate) fn get<T: Object>(pointer: *const T, argument: &'static str) -> Result<Arc<T>> {
    let live = LIVE.read().unwrap_or_else(PoisonError::into_inner);
    let object = live.objects.get(&pointer.addr()).cloned();
    object
        .and_then(|object| object.downcast().ok())
        .ok_or_else(|| unknown(pointer, argument))
}

/// The object that C passed as `argument`, if it passed one.
pub(crate) fn get_optional<T: Object>(
    pointer: *const T,
    argument: &'static str,
) -> Result<Option<Arc<T>>> {
    match pointer.is_null() {
        true => Ok(None),
        false => get(pointer, argument).map(Some),
    }
}

/// Takes an object back from C; NULL is nothing to take. The object is dropped when the last call
/// that uses it returns.
pub(crate) fn take<T: Object>(pointer: *mut T, argument: &'static str) -> Result<()> {
    if pointer.is_null() {
        return Ok(());
    }
    get(pointer.cast_const(), argument)?;
    let mut live = LIVE.write().unwrap_or_else(PoisonError::into_inner);
    let object = live.objects.remove(&pointer.addr());
    // Dropping may take a while (leaving a group), during which others go on.
    drop(live);
    object
        .map(drop)
        .ok_or_else(|| unknown(pointer.cast_const(), argument))
}

fn unknown<T: Object>(pointer: *const T, argument: &'static str) -> Error {
    let value = match pointer.is_null() {
        true => "NULL".to_owned(),
        false => format!("{pointer:p}"),
    };
    let limit = format!("must be a {} that was not freed", T::NAME);
    Error::invalid(argument, value, limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct One(u32);
    struct Other;

    impl Object for One {
        const NAME: &'static str = "one";
    }

    impl Object for Other {
        const NAME: &'static str = "other";
    }

    #[test]
    fn an_object_is_found_until_it_is_taken_back_and_only_as_what_it_is() {
        let pointer = give(One(7));
        assert_eq!(get(pointer, "p").unwrap().0, 7);
        assert!(get(pointer.cast::<Other>(), "p").is_err());
        assert!(take(pointer.cast::<Other>(), "p").is_err());
        let held = get(pointer, "p").unwrap();
        take(pointer, "p").unwrap();
        assert_eq!(held.0, 7, "a call that uses it holds it");
        let again = take(pointer, "p").unwrap_err().to_string();
        assert!(
            again.ends_with("must be a one that was not freed"),
            "{again}"
        );
        assert!(get(pointer, "p").is_err());
        assert_ne!(give(One(8)), pointer, "numbers are not used again");
    }
}
