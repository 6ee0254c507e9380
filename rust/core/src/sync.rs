//! The one place where the cross-process lock touches an atomic or the kernel, so that a model checker
//! can stand in for both.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::thread::futex;

/// One shared word with a wait queue.
pub(crate) trait Word {
    /// Looks at a taken word before the first sleep: a few microseconds, about what a section under the lock takes.
    const SPINS: u32;

    /// The present value.
    fn load(&self) -> u32;
    /// Replaces `current` by `new`; otherwise returns what was found.
    fn compare_exchange(&self, current: u32, new: u32) -> Result<u32, u32>;
    /// Replaces whatever is there.
    fn swap(&self, new: u32) -> u32;
    /// Sleeps while the word is `expected`: until woken, for `slice` at the longest, perhaps shorter.
    fn wait(&self, expected: u32, slice: Duration);
    /// Wakes one sleeper, of whatever process.
    fn wake_one(&self);
    /// Lets a moment pass while spinning.
    fn pause(&self);
}

/// The real thing: a futex in memory that several processes map.
impl Word for AtomicU32 {
    const SPINS: u32 = 64;

    #[inline]
    fn load(&self) -> u32 {
        AtomicU32::load(self, Ordering::SeqCst)
    }

    #[inline]
    fn compare_exchange(&self, current: u32, new: u32) -> Result<u32, u32> {
        // SeqCst on success: closing a region relies on a total order of this and the closed flag.
        AtomicU32::compare_exchange(self, current, new, Ordering::SeqCst, Ordering::Relaxed)
    }

    #[inline]
    fn swap(&self, new: u32) -> u32 {
        AtomicU32::swap(self, new, Ordering::SeqCst)
    }

    fn wait(&self, expected: u32, slice: Duration) {
        let timeout = futex::Timespec {
            tv_sec: i64::try_from(slice.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(slice.subsec_nanos()),
        };
        // Woken, changed, interrupted, timed out: the caller looks at the word again in every case. Not
        // the private flavour: the sleepers are in other processes.
        let _ = futex::wait(self, futex::Flags::empty(), expected, Some(&timeout));
    }

    fn wake_one(&self) {
        // It fails only for an address that is not mapped, and this one is.
        let _ = futex::wake(self, futex::Flags::empty(), 1);
    }

    #[inline]
    fn pause(&self) {
        std::hint::spin_loop();
    }
}
