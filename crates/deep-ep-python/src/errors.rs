//! The library's errors as Python exceptions: `deep_ep.errors` holds the classes, fields become
//! keyword arguments of their constructors.

use deep_ep::{Error, Rank, Reject};
use pyo3::{
    prelude::*,
    types::{PyDict, PyDictMethods},
};

/// The Python exception for `error`.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    build(py, error).unwrap_or_else(|failed| failed)
}

fn build(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let fields = PyDict::new(py);
    let class = fill(error, &fields)?;
    let class = py.import("deep_ep.errors")?.getattr(class)?;
    let value = class.call((error.to_string(),), Some(&fields))?;
    Ok(PyErr::from_value(value))
}

/// Sets the fields and returns the name of the class.
fn fill(error: &Error, fields: &Bound<'_, PyDict>) -> PyResult<&'static str> {
    let ranks = |ranks: &[Rank]| ranks.iter().map(|rank| rank.0).collect::<Vec<_>>();
    let reject = |reject: &Reject| {
        fields.set_item("argument", &*reject.argument)?;
        fields.set_item("value", &reject.value)?;
        fields.set_item("limit", &*reject.limit)
    };
    let place = |operation: &str, stage: &str, missing: &[Rank]| {
        fields.set_item("operation", operation)?;
        fields.set_item("stage", stage)?;
        fields.set_item("ranks", ranks(missing))
    };
    Ok(match error {
        Error::InvalidArgument(why) => {
            reject(why)?;
            "InvalidArgument"
        }
        Error::PeerRejected { rank, reason } => {
            reject(reason)?;
            fields.set_item("ranks", [rank.0])?;
            "PeerRejected"
        }
        Error::SettingsDiffer {
            setting,
            this_value,
            other_rank,
            other_value,
            ..
        } => {
            fields.set_item("argument", &**setting)?;
            fields.set_item("value", this_value)?;
            fields.set_item("limit", format!("must be {other_value} as on that rank"))?;
            fields.set_item("ranks", [other_rank.0])?;
            "SettingsDiffer"
        }
        Error::Timeout {
            operation,
            stage,
            ranks,
            waited,
        } => {
            place(operation, stage, ranks)?;
            fields.set_item("waited", waited.as_secs_f64())?;
            "Timeout"
        }
        Error::Aborted {
            by,
            operation,
            stage,
            ranks,
        } => {
            place(operation, stage, ranks)?;
            fields.set_item("by", by.0)?;
            "Aborted"
        }
        Error::PeerLost {
            operation,
            stage,
            ranks,
        } => {
            place(operation, stage, ranks)?;
            "PeerLost"
        }
        Error::Abandoned { operation } => {
            fields.set_item("operation", &**operation)?;
            "Abandoned"
        }
        Error::Unsupported { feature, .. } => {
            fields.set_item("argument", &**feature)?;
            "Unsupported"
        }
        Error::OutOfMemory {
            purpose,
            requested,
            limit,
        } => {
            fields.set_item("argument", &**purpose)?;
            fields.set_item("value", requested)?;
            fields.set_item("limit", limit)?;
            "OutOfMemory"
        }
        Error::Bootstrap { stage, .. } => {
            fields.set_item("stage", &**stage)?;
            "BootstrapError"
        }
        Error::Cuda { call, code, .. } => {
            fields.set_item("operation", &**call)?;
            fields.set_item("value", code)?;
            "CudaError"
        }
        _ => "Error",
    })
}
