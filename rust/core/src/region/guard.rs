//! Taking a region's lock, and what it lends while it is held.
#![allow(unsafe_code, reason = "lends the index area as a slice, which the lock makes sound")]

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Region;
use crate::error::{Error, Result};
use crate::lock::{self, Owner, Owners, Taken};

/// What the lock has seen since the region was created; approximate while it is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LockCounts {
    /// Acquisitions that had to wait.
    pub waited: u64,
    /// Acquisitions that gave up at their deadline.
    pub gave_up: u64,
    /// Locks taken over from a dead holder.
    pub taken_over: u64,
    /// Holders that panicked.
    pub panicked: u64,
}

const WAITED: usize = 0;
const GAVE_UP: usize = 1;
const TAKEN_OVER: usize = 2;
const PANICKED: usize = 3;

/// The region's lock, held. Dropping it gives the lock back; dropping it in a panic leaves the index dirty.
///
/// A process must not fork while one of its threads holds a guard: the child's copy of it would still lend the
/// index, which the child has no right to.
#[derive(Debug)]
#[must_use = "the lock is given back at once if the guard is not kept"]
pub struct Guard<'a> {
    region: &'a Region,
}

impl Guard<'_> {
    /// The index area. Its content may be anything; the bytes are those that the last holder left, which may be
    /// half changed if [`Guard::is_dirty`].
    pub fn index_bytes(&mut self) -> &mut [u8] {
        let mut index = self.region.control.index();
        // SAFETY: the area is mapped as long as the region lives, which the guard borrows. Holding the lock
        // excludes every other guard, in this process and in others, and no other code reaches the area;
        // `&mut self` excludes a second slice from this guard. Any bytes are valid `u8`s.
        unsafe { index.as_mut() }
    }

    /// Whether a holder died, panicked, or found the index damaged: what can be derived must be rebuilt first.
    pub fn is_dirty(&self) -> bool {
        self.region.control.dirty().load(Ordering::Acquire) != 0
    }

    /// Says that the index is damaged; the next holder that looks will rebuild it.
    pub fn mark_dirty(&mut self) {
        self.region.control.dirty().store(1, Ordering::SeqCst);
    }

    /// Says that the index has been rebuilt, completely.
    pub fn clear_dirty(&mut self) {
        // Release: the rebuilding stores come first, also if this process is killed right after.
        self.region.control.dirty().store(0, Ordering::Release);
    }
}

impl Drop for Guard<'_> {
    #[inline]
    fn drop(&mut self) {
        let region = self.region;
        if region.is_forked() {
            // The parent's lock; it has a guard of its own.
            return;
        }
        if std::thread::panicking() {
            region.count(PANICKED);
            region.control.dirty().store(1, Ordering::SeqCst);
        }
        lock::give_back(region.control.lock_word());
        // In this order: `close` stores `closed` and then looks at the word, so one of the two sees the other.
        if region.closed.load(Ordering::SeqCst) {
            region.leave_unless_inside();
        }
    }
}

impl Owners for Region {
    fn is_alive(&self, owner: Owner) -> bool {
        let Some(index) = owner.index() else { return false };
        let Some(generation) = self.control.generation(index) else { return false };
        if index == self.tag.index {
            return owner == self.me;
        }
        if !self.is_client_alive(index) {
            return false;
        }
        // The byte is taken; by this owner, unless the place has a later generation.
        generation.load(Ordering::SeqCst) & lock::GENERATION_MASK == owner.generation()
    }
}

impl Region {
    /// Takes the lock if it is free, or if its holder is dead; never waits. From any thread.
    ///
    /// # Errors
    /// [`Error::Closed`] after [`Region::close`], and in a process forked from the one that opened the region.
    #[inline]
    pub fn try_lock(&self) -> Result<Option<Guard<'_>>> {
        self.check_usable()?;
        let word = self.control.lock_word();
        let taken = if lock::try_take(word, self.me) {
            Taken::Free
        } else {
            match lock::try_take_over(word, self.me, self) {
                Some(taken) => taken,
                None => return Ok(None),
            }
        };
        self.entered(taken).map(Some)
    }

    /// Takes the lock, waiting for it for `wait` at the most. From any thread. Threads of one region exclude
    /// each other as they exclude other clients; taking it twice in one thread waits in vain.
    ///
    /// # Errors
    /// [`Error::Busy`] when the time is up; [`Error::Closed`] as [`Region::try_lock`].
    #[inline]
    pub fn lock(&self, wait: Duration) -> Result<Guard<'_>> {
        self.check_usable()?;
        if lock::try_take(self.control.lock_word(), self.me) {
            return self.entered(Taken::Free);
        }
        self.lock_slowly(wait)
    }

    #[cold]
    fn lock_slowly(&self, wait: Duration) -> Result<Guard<'_>> {
        let begun = Instant::now();
        self.count(WAITED);
        // A wait too long to be a point in time is a wait without end.
        let deadline = begun.checked_add(wait);
        match lock::take_by(self.control.lock_word(), self.me, self, deadline) {
            Some(taken) => self.entered(taken),
            None => {
                self.count(GAVE_UP);
                Err(Error::Busy { waited: begun.elapsed() })
            }
        }
    }

    /// The word is ours; is the region?
    #[inline]
    fn entered(&self, taken: Taken) -> Result<Guard<'_>> {
        if taken == Taken::FromDead {
            self.control.dirty().store(1, Ordering::SeqCst);
            self.count(TAKEN_OVER);
        }
        if self.closed.load(Ordering::SeqCst) {
            // It was closed meanwhile, and may have given up its liveness lock already.
            lock::back_out(self.control.lock_word(), self.me);
            self.leave_unless_inside();
            return Err(CLOSED);
        }
        Ok(Guard { region: self })
    }

    #[inline]
    pub(super) fn check_usable(&self) -> Result<()> {
        if self.closed.load(Ordering::Relaxed) || self.is_forked() {
            return Err(self.why_unusable());
        }
        Ok(())
    }

    #[cold]
    fn why_unusable(&self) -> Error {
        if self.is_forked() { FORKED } else { CLOSED }
    }

    /// What the lock has seen.
    pub fn lock_counts(&self) -> LockCounts {
        let count = |which| self.control.lock_count(which).load(Ordering::Relaxed);
        LockCounts {
            waited: count(WAITED),
            gave_up: count(GAVE_UP),
            taken_over: count(TAKEN_OVER),
            panicked: count(PANICKED),
        }
    }

    #[cold]
    fn count(&self, which: usize) {
        self.control.lock_count(which).fetch_add(1, Ordering::Relaxed);
    }
}

const CLOSED: Error = Error::Closed("the region is closed");
const FORKED: Error =
    Error::Closed("the region was opened before this process was forked; a forked process must open it anew");
