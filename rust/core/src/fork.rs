//! What a fork does to the regions of a process.
//!
//! A kernel-held lock belongs to an *open file description*, and a forked child shares its parent's.
//! So a child that merely lives on would keep its dead parent looking alive. Therefore:
//!
//! - every descriptor of a lock file is a [`Descriptor`], which is noted in a fixed table, and the
//!   handler that the C library runs in a new child closes all of them there;
//! - the same handler raises a process-wide number, by which a region sees that it was opened by an
//!   ancestor and refuses every call; what it would undo when dropped belongs to the parent and is left
//!   alone;
//! - opening and noting a descriptor (and forgetting and closing it) happen behind a gate that a fork
//!   waits for, so no child is ever born holding a descriptor that its table does not name.
//!
//! The handler only loads, stores and closes, which is all that may be done in the child of a process
//! with threads. Children born by `vfork` or `posix_spawn` run no handlers, and need none: they become
//! another program at once, and the descriptors are `O_CLOEXEC`.
#![allow(unsafe_code, reason = "the C library's fork handlers, and raw descriptors that only they may outlive")]

use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

/// Descriptors that one process can have noted at a time: regions open, and a few passing ones.
const TABLE_LEN: usize = 4096;

/// How many forks lie between the first process that loaded this library and the present one.
static GENERATION: AtomicU32 = AtomicU32::new(0);
/// Noted descriptors, each plus one; 0 is a free place.
static TABLE: [AtomicI32; TABLE_LEN] = [const { AtomicI32::new(0) }; TABLE_LEN];
/// Closed while the table and the process's descriptors may disagree, and during a fork.
static GATE: AtomicBool = AtomicBool::new(false);
static HANDLERS: OnceLock<i32> = OnceLock::new();

unsafe extern "C" {
    // glibc keeps this one in the static part of its library, and the `libc` crate does not declare it for Linux.
    fn pthread_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
    ) -> libc::c_int;
}

/// The number of forks between this process and the first one: differs in a child from what its parent saw.
#[inline]
pub(crate) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

fn shut_gate() {
    while GATE.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
        // Held for one `open` or `close` at the most.
        std::thread::yield_now();
    }
}

fn open_gate() {
    GATE.store(false, Ordering::Release);
}

/// No fork happens while one of these lives.
struct Passing;

impl Passing {
    fn begin() -> Self {
        shut_gate();
        Self
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        open_gate();
    }
}

extern "C" fn before_fork() {
    shut_gate();
}

extern "C" fn after_fork_in_parent() {
    open_gate();
}

extern "C" fn after_fork_in_child() {
    for place in &TABLE {
        let noted = place.swap(0, Ordering::Relaxed);
        if noted > 0 {
            // SAFETY: the number was open when it was noted and is forgotten before it is closed, both
            // behind the gate that this fork held; in the child nobody else runs yet.
            unsafe { libc::close(noted - 1) };
        }
    }
    GENERATION.fetch_add(1, Ordering::Relaxed);
    open_gate();
}

fn install_handlers() -> io::Result<()> {
    let status = *HANDLERS.get_or_init(|| {
        // SAFETY: the three functions are `extern "C"`, take nothing, live as long as this library, and
        // do in the child only what is async-signal-safe.
        unsafe { pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child)) }
    });
    if status == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(status)) }
}

/// A descriptor that exists in this process only: closed when dropped, and in every child at its birth.
#[derive(Debug)]
pub(crate) struct Descriptor {
    number: RawFd,
    place: usize,
    generation: u32,
}

impl Descriptor {
    /// Opens and notes a descriptor; no fork happens in between.
    pub(crate) fn open(open: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<Self> {
        install_handlers()?;
        let _passing = Passing::begin();
        open().and_then(Self::note)
    }

    fn note(owned: OwnedFd) -> io::Result<Self> {
        let place = TABLE
            .iter()
            .position(|place| place.load(Ordering::Relaxed) == 0)
            .ok_or_else(|| io::Error::from(io::ErrorKind::QuotaExceeded))?;
        let number = owned.into_raw_fd();
        TABLE[place].store(number + 1, Ordering::Relaxed);
        Ok(Self { number, place, generation: generation() })
    }

    /// Whether the calling process is the one that opened it.
    pub(crate) fn is_ours(&self) -> bool {
        self.generation == generation()
    }

    /// The descriptor, or `None` in a forked child, where it is closed and its number may name something else.
    pub(crate) fn get(&self) -> Option<BorrowedFd<'_>> {
        if !self.is_ours() {
            return None;
        }
        // SAFETY: in the process that opened it, it stays open until `self` is dropped, which the
        // returned lifetime forbids.
        Some(unsafe { BorrowedFd::borrow_raw(self.number) })
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        if !self.is_ours() {
            return;
        }
        let _passing = Passing::begin();
        TABLE[self.place].store(0, Ordering::Relaxed);
        // SAFETY: it is open and owned by `self` alone: it was taken out of an `OwnedFd` and is closed only here.
        drop(unsafe { OwnedFd::from_raw_fd(self.number) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn null() -> io::Result<OwnedFd> {
        Ok(std::fs::File::open("/dev/null")?.into())
    }

    #[test]
    fn a_dropped_descriptor_frees_its_place_and_is_closed() {
        let descriptor = Descriptor::open(null).unwrap();
        let (number, place) = (descriptor.number, descriptor.place);
        assert_eq!(TABLE[place].load(Ordering::Relaxed), number + 1);
        drop(descriptor);
        assert_ne!(TABLE[place].load(Ordering::Relaxed), number + 1);
    }

    #[test]
    fn a_failed_open_leaves_the_gate_open() {
        assert!(Descriptor::open(|| Err(io::Error::other("no"))).is_err());
        assert!(Descriptor::open(null).is_ok());
    }
}
