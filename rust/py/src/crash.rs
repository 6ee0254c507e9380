//! Deaths on demand, in the build that the kill harness uses.

use ecpool_core::index::crash::{CrashKind, arm, passed};
use pyo3::prelude::*;

use crate::error::invalid;

/// Stops this thread at the n-th crash point from now on (0 is the next one), by kind "kill" (SIGKILL of the whole process) or
/// "panic" (an unwinding panic under the lock); a negative n disarms. Returns how many points were passed since the last call.
#[pyfunction]
#[pyo3(name = "_arm_crash")]
pub(crate) fn arm_crash(n: i64, kind: &str) -> PyResult<u64> {
    let kind = match kind {
        "kill" => CrashKind::Kill,
        "panic" => CrashKind::Panic,
        _ => return Err(invalid(format!("kind is {kind:?}, but must be one of \"kill\", \"panic\""))),
    };
    let before = passed();
    arm(u64::try_from(n).ok().map(|n| (n, kind)));
    Ok(before)
}
