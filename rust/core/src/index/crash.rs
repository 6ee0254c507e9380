//! Where an operation could be killed.
//!
//! `crash_point()` stands between the stores that a rebuild relies on. In normal builds it is nothing. With the
//! feature `crash-points`, and in unit tests, a thread can ask to be stopped at the n-th point it passes: by a
//! panic (the index is left as it is, as after a kill) or, for the kill harness, by a real SIGKILL.

#[cfg(any(test, feature = "crash-points"))]
mod armed {
    use std::cell::Cell;

    /// What happens when the countdown of a thread ends.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum CrashKind {
        /// Unwinds with a [`Crash`] payload.
        Panic,
        /// Kills the process with SIGKILL.
        Kill,
    }

    /// The payload of a crash by panic.
    #[derive(Debug)]
    pub struct Crash;

    thread_local! {
        static COUNTDOWN: Cell<Option<(u64, CrashKind)>> = const { Cell::new(None) };
        static PASSED: Cell<u64> = const { Cell::new(0) };
    }

    /// Stops this thread at the `n`-th crash point from now on (0 is the next one); `None` disarms.
    pub fn arm(countdown: Option<(u64, CrashKind)>) {
        COUNTDOWN.set(countdown);
        PASSED.set(0);
    }

    /// Crash points that this thread passed since the last [`arm`].
    pub fn passed() -> u64 {
        PASSED.get()
    }

    pub(crate) fn crash_point() {
        PASSED.set(PASSED.get() + 1);
        match COUNTDOWN.get() {
            None => {}
            Some((0, kind)) => {
                COUNTDOWN.set(None);
                crash(kind);
            }
            Some((n, kind)) => COUNTDOWN.set(Some((n - 1, kind))),
        }
    }

    fn crash(kind: CrashKind) -> ! {
        if kind == CrashKind::Kill {
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
        std::panic::resume_unwind(Box::new(Crash))
    }
}

#[cfg(any(test, feature = "crash-points"))]
pub(crate) use armed::crash_point;
#[cfg(any(test, feature = "crash-points"))]
pub use armed::{Crash, CrashKind, arm, passed};

#[cfg(not(any(test, feature = "crash-points")))]
#[inline(always)]
pub(crate) fn crash_point() {}
