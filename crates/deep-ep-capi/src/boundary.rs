//! The boundary between C and the library: errors become status codes, and panics stop.

use std::{
    any::Any,
    cell::Cell,
    ffi::c_void,
    panic::{AssertUnwindSafe, catch_unwind},
    rc::Rc,
};

use deep_ep::{Result, interrupt};

use crate::status::{InterruptCheck, Status, remember, remember_panic};

thread_local! {
    static CHECK: Cell<(InterruptCheck, *mut c_void)> =
        const { Cell::new((None, std::ptr::null_mut())) };
}

/// Sets what calls of this thread ask.
pub(crate) fn set_check(check: InterruptCheck, context: *mut c_void) {
    CHECK.set((check, context));
}

/// Runs the body of an exported function.
pub(crate) fn call(body: impl FnOnce() -> Result<()>) -> Status {
    match catch_unwind(AssertUnwindSafe(|| interruptible(body))) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => remember(error),
        Err(panic) => remember_panic(text(&*panic)),
    }
}

fn interruptible(body: impl FnOnce() -> Result<()>) -> Result<()> {
    let (Some(check), context) = CHECK.get() else {
        return body();
    };
    // SAFETY: the caller gave this function and this context to be called with each other.
    let stop = move || unsafe { check(context) != 0 };
    interrupt::with_check(Rc::new(stop), body)
}

fn text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()))
        .unwrap_or_else(|| "no message".into())
}
