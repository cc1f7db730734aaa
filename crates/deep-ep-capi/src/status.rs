//! Status codes, and what is known of the last error of each thread.

use std::{
    cell::RefCell,
    ffi::{CStr, CString, c_char, c_void},
};

use deep_ep::{Error, Rank, Reject};

use crate::{
    boundary,
    pointers::{self, OutStruct, Versioned},
};

/// What a function returns: 0, or a value of `deep_ep_status`.
pub type Status = i32;

/// Why a function failed.
#[repr(C)]
#[allow(non_camel_case_types, clippy::upper_case_acronyms)]
pub enum StatusCode {
    /// It did not fail.
    DEEP_EP_OK = 0,
    /// An argument of this call is not usable. Peers end the same call with
    /// DEEP_EP_EPEER_REJECTED; the buffer stays usable.
    DEEP_EP_EINVAL = 1,
    /// Another rank rejected the call, so no rows moved. The buffer stays usable.
    DEEP_EP_EPEER_REJECTED = 2,
    /// Ranks passed different values where they must agree; an error on every rank.
    DEEP_EP_ESETTINGS_DIFFER = 3,
    /// A wait reached its deadline. Later calls on the buffer fail.
    DEEP_EP_ETIMEOUT = 4,
    /// Another rank gave up, or this one was interrupted. Later calls on the buffer fail.
    DEEP_EP_EABORTED = 5,
    /// Ranks are gone before they did their part.
    DEEP_EP_EPEER_LOST = 6,
    /// The call was given up on this rank: another one was begun before it was finished.
    DEEP_EP_EABANDONED = 7,
    /// What was asked for exists, but not here.
    DEEP_EP_EUNSUPPORTED = 8,
    /// Memory could not be had.
    DEEP_EP_ENOMEM = 9,
    /// The ranks could not find each other, or lost each other while exchanging settings.
    DEEP_EP_EBOOTSTRAP = 10,
    /// CUDA's driver or compiler refused.
    DEEP_EP_ECUDA = 11,
    /// The operating system refused.
    DEEP_EP_EIO = 12,
    /// A fault of this library. Please report it.
    DEEP_EP_EINTERNAL = 13,
}

use StatusCode as Code;

/// What is known of an error. Texts that do not apply are empty, never NULL. All pointers are good
/// until another call of the same thread fails.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ErrorDetails {
    /// Set by `deep_ep_error()`.
    pub struct_size: usize,
    /// Number of ranks in `ranks`.
    pub num_ranks: usize,
    /// The ranks that were waited for, or that are gone.
    pub ranks: *const usize,
    /// The rank that rejected or gave up, or that has the other value of a setting; -1: none.
    pub rank: i64,
    /// CUDA's or the operating system's code, 0 if there is none.
    pub code: i64,
    /// How long this rank waited.
    pub waited_seconds: f64,
    /// Status of the call.
    pub status: Status,
    /// 0; room for later.
    pub reserved: i32,
    /// The whole message.
    pub message: *const c_char,
    /// The argument, setting, feature or purpose that it is about.
    pub argument: *const c_char,
    /// Its value.
    pub value: *const c_char,
    /// The limit that the value breaks, the other rank's value, or the reason.
    pub limit: *const c_char,
    /// The operation, for example `dispatch`.
    pub operation: *const c_char,
    /// The stage in it, for example `counts`.
    pub stage: *const c_char,
}

// SAFETY: see the trait; all zeros are NULL pointers and numbers.
unsafe impl Versioned for ErrorDetails {
    const NAME: &'static str = "deep_ep_error_t";
}

/// The fields of an error, owned.
#[derive(Default)]
struct Fields {
    status: Status,
    ranks: Vec<usize>,
    rank: Option<usize>,
    code: i64,
    waited_seconds: f64,
    message: CString,
    argument: CString,
    value: CString,
    limit: CString,
    operation: CString,
    stage: CString,
}

thread_local! {
    static LAST: RefCell<Option<Fields>> = const { RefCell::new(None) };
}

fn c(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

impl Fields {
    fn of(error: &Error) -> Self {
        let mut fields = Self {
            message: c(&error.to_string()),
            ..Self::default()
        };
        fields.status = fields.fill(error) as Status;
        fields
    }

    fn reject(&mut self, reject: &Reject) {
        self.argument = c(&reject.argument);
        self.value = c(&reject.value);
        self.limit = c(&reject.limit);
    }

    fn place(&mut self, operation: &str, stage: &str, ranks: &[Rank]) {
        self.operation = c(operation);
        self.stage = c(stage);
        self.ranks = ranks.iter().map(|rank| rank.0).collect();
    }

    fn fill(&mut self, error: &Error) -> Code {
        match error {
            Error::InvalidArgument(why) => {
                self.reject(why);
                Code::DEEP_EP_EINVAL
            }
            Error::PeerRejected { rank, reason } => {
                self.reject(reason);
                self.rank = Some(rank.0);
                Code::DEEP_EP_EPEER_REJECTED
            }
            Error::SettingsDiffer {
                setting,
                this_value,
                other_rank,
                other_value,
                ..
            } => {
                self.reject(&Reject::new(
                    setting.clone(),
                    this_value,
                    other_value.clone(),
                ));
                self.rank = Some(other_rank.0);
                Code::DEEP_EP_ESETTINGS_DIFFER
            }
            _ => self.fill_failure(error),
        }
    }

    /// Errors that no argument caused.
    fn fill_failure(&mut self, error: &Error) -> Code {
        match error {
            Error::Timeout {
                operation,
                stage,
                ranks,
                waited,
            } => {
                self.place(operation, stage, ranks);
                self.waited_seconds = waited.as_secs_f64();
                Code::DEEP_EP_ETIMEOUT
            }
            Error::Aborted {
                by,
                operation,
                stage,
                ranks,
            } => {
                self.place(operation, stage, ranks);
                self.rank = Some(by.0);
                Code::DEEP_EP_EABORTED
            }
            Error::PeerLost {
                operation,
                stage,
                ranks,
            } => {
                self.place(operation, stage, ranks);
                Code::DEEP_EP_EPEER_LOST
            }
            Error::Abandoned { operation } => {
                self.operation = c(operation);
                Code::DEEP_EP_EABANDONED
            }
            Error::Unsupported { feature, why } => {
                self.reject(&Reject::new(feature.clone(), "", why.clone()));
                Code::DEEP_EP_EUNSUPPORTED
            }
            Error::OutOfMemory {
                purpose,
                requested,
                limit,
            } => {
                self.reject(&Reject::new(purpose.clone(), requested, limit.to_string()));
                Code::DEEP_EP_ENOMEM
            }
            Error::Bootstrap { stage, reason } => {
                self.stage = c(stage);
                self.limit = c(reason);
                Code::DEEP_EP_EBOOTSTRAP
            }
            Error::Cuda {
                call,
                code,
                name,
                message,
            } => {
                self.operation = c(call);
                self.value = c(name);
                self.limit = c(message);
                self.code = i64::from(*code);
                Code::DEEP_EP_ECUDA
            }
            Error::Io { context, source } => {
                self.argument = c(context);
                self.limit = c(&source.to_string());
                self.code = i64::from(source.raw_os_error().unwrap_or(0));
                Code::DEEP_EP_EIO
            }
            _ => Code::DEEP_EP_EINTERNAL,
        }
    }
}

/// Keeps `error` as this thread's last one.
pub(crate) fn remember(error: Error) -> Status {
    keep(Fields::of(&error))
}

/// Keeps what a panic said.
pub(crate) fn remember_panic(said: String) -> Status {
    keep(Fields {
        status: Code::DEEP_EP_EINTERNAL as Status,
        message: c(&format!("a fault of the library: {said}")),
        ..Fields::default()
    })
}

fn keep(fields: Fields) -> Status {
    let status = fields.status;
    LAST.with_borrow_mut(|last| *last = Some(fields));
    status
}

/// The message of the last call of this thread that failed; an empty text if none did. It is good
/// until another call of the same thread fails. Any thread, any time.
#[unsafe(no_mangle)]
pub extern "C" fn deep_ep_last_error() -> *const c_char {
    LAST.with_borrow(|last| {
        last.as_ref()
            .map_or(c"".as_ptr(), |last| last.message.as_ptr())
    })
}

/// Everything that is known of the last call of this thread that failed; `error` was made by
/// `deep_ep_error()`. Its status is DEEP_EP_OK if none failed. Any thread, any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn deep_ep_last_error_details(error: *mut ErrorDetails) -> Status {
    boundary::call(|| {
        let out = OutStruct::new(error, "error")?;
        let details = LAST.with_borrow(|last| match last {
            Some(last) => details(last),
            None => details(&Fields::default()),
        });
        out.set(details);
        Ok(())
    })
}

/// Pointers into `fields`, or to constants where there is no text.
fn details(fields: &Fields) -> ErrorDetails {
    let text = |text: &CString| match text.is_empty() {
        true => c"".as_ptr(),
        false => text.as_ptr(),
    };
    ErrorDetails {
        struct_size: size_of::<ErrorDetails>(),
        num_ranks: fields.ranks.len(),
        ranks: pointers::first(&fields.ranks),
        rank: fields.rank.map_or(-1, |rank| rank as i64),
        code: fields.code,
        waited_seconds: fields.waited_seconds,
        status: fields.status,
        reserved: 0,
        message: text(&fields.message),
        argument: text(&fields.argument),
        value: text(&fields.value),
        limit: text(&fields.limit),
        operation: text(&fields.operation),
        stage: text(&fields.stage),
    }
}

/// The name of a status, for example "DEEP_EP_EINVAL". Any thread, any time.
#[unsafe(no_mangle)]
pub extern "C" fn deep_ep_status_name(status: Status) -> *const c_char {
    const NAMES: [&CStr; 14] = [
        c"DEEP_EP_OK",
        c"DEEP_EP_EINVAL",
        c"DEEP_EP_EPEER_REJECTED",
        c"DEEP_EP_ESETTINGS_DIFFER",
        c"DEEP_EP_ETIMEOUT",
        c"DEEP_EP_EABORTED",
        c"DEEP_EP_EPEER_LOST",
        c"DEEP_EP_EABANDONED",
        c"DEEP_EP_EUNSUPPORTED",
        c"DEEP_EP_ENOMEM",
        c"DEEP_EP_EBOOTSTRAP",
        c"DEEP_EP_ECUDA",
        c"DEEP_EP_EIO",
        c"DEEP_EP_EINTERNAL",
    ];
    let name = usize::try_from(status).ok().and_then(|at| NAMES.get(at));
    name.copied().unwrap_or(c"unknown status").as_ptr()
}

/// Version of the library, for example "0.1.0". Any thread, any time.
#[unsafe(no_mangle)]
pub extern "C" fn deep_ep_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Asked now and then by a call that waits, whether it should give up: any other value than 0.
pub type InterruptCheck = Option<unsafe extern "C" fn(context: *mut c_void) -> i32>;

/// Lets calls of this thread that wait for other ranks ask `check(context)` about 20 times a second;
/// once it returns another value than 0, the call ends with DEEP_EP_EABORTED, on all ranks. NULL: ask
/// nothing. For programs that must react to Ctrl-C. Concerns the calling thread only.
#[unsafe(no_mangle)]
pub extern "C" fn deep_ep_set_interrupt_check(check: InterruptCheck, context: *mut c_void) {
    boundary::set_check(check, context);
}
