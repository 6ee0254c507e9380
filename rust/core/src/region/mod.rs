//! Regions: files of shared memory that several processes map, and everything about their coming and going.
//!
//! | module | subject |
//! | --- | --- |
//! | `files` | the directory, names, owners, opening and removing |
//! | `structure` | the lock under which files are made and removed |
//! | `space` | is there room |
//! | `header` | the first pages |
//! | `map` | the mappings, and typed access to shared words |
//! | `open` | creating and attaching |
//! | `guard` | taking the region's lock |
//! | `copy` | bytes in and out of the data area |
//! | `populate` | page tables and huge pages |
//! | `scan` | regions found on disk, and dead ones removed |
//!
//! Outside of the promise, because nothing can be done about it: a process of the same user that writes to
//! the mapping without the lock, or truncates the file.

mod copy;
mod files;
mod guard;
mod header;
mod map;
mod open;
mod populate;
mod scan;
mod space;
mod structure;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub use self::copy::Piece;
use self::files::{Directory, Identity, Names};
pub use self::guard::{Guard, LockCounts};
use self::header::Header;
pub use self::header::Lifetime;
use self::map::{Control, Data};
pub use self::open::OpenRequest;
pub use self::scan::{Found, State};
use crate::fork;
use crate::geometry::{COUNTERS_PER_CLIENT, Geometry, MAX_CLIENTS};
pub use crate::liveness::ClientTag;
use crate::liveness::{LockFile, Range};
use crate::lock::{self, Owner};

/// What a long call is doing, for its progress callback.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Waiting for another process that creates or attaches; `done` is milliseconds so far, `total` 0.
    Waiting,
    /// Reserving memory; `done` and `total` are bytes.
    Reserving,
    /// Filling page tables; `done` and `total` are bytes.
    Populating,
    /// Making huge pages; `done` and `total` are bytes.
    Collapsing,
}

/// Called from time to time during a long call, in the thread that made it, with the phase, what is done and
/// the total. [`ControlFlow::Break`] makes the call give up, with [`crate::Error::Interrupted`].
pub type Progress<'a> = &'a mut dyn FnMut(Phase, u64, u64) -> ControlFlow<()>;

/// How long leaving waits for others that are at work on the files, before it leaves them for the next start
/// to clean up.
const LEAVE_WAIT: Duration = Duration::from_secs(1);
/// How long closing waits for this client's other threads to come out of the lock, before it leaves the
/// leaving to them.
const INSIDE_WAIT: Duration = Duration::from_millis(50);
const NAP: Duration = Duration::from_micros(200);

/// One attachment to a region file: a *client* with a tag of its own, also if one process has several.
///
/// All methods may be called from any thread. In a child forked after the region was opened every call that could
/// touch shared state fails with [`crate::Error::Closed`], and dropping it there changes nothing for the parent.
#[derive(Debug)]
pub struct Region {
    control: Control,
    data: Data,
    header: Header,
    path: PathBuf,
    created: bool,
    tag: ClientTag,
    me: Owner,
    lock_file: LockFile,
    directory: Directory,
    names: Names,
    region_identity: Identity,
    lock_identity: Identity,
    fork_generation: u32,
    /// No new acquisition succeeds. Stored before the word is examined by `close`.
    closed: AtomicBool,
    /// The client's place was given up, or is being given up.
    left: AtomicBool,
}

impl Region {
    /// Where everything lies in the file.
    pub fn geometry(&self) -> &Geometry {
        &self.header.geometry
    }

    /// The region's file; after it was unlinked, the name that it had.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How long its files keep their names.
    pub fn lifetime(&self) -> Lifetime {
        self.header.lifetime
    }

    /// Whether this client created the file, rather than attach to one that was there.
    pub fn created(&self) -> bool {
        self.created
    }

    /// A random number chosen when the region was created, the same for all its clients.
    pub fn seed(&self) -> u64 {
        self.header.seed
    }

    /// This client's tag. No other client of this region had, has or will have the same.
    pub fn client(&self) -> ClientTag {
        self.tag
    }

    /// Whether [`Region::close`] was called.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Whether this process is a fork of the one that opened the region.
    #[inline]
    pub fn is_forked(&self) -> bool {
        self.fork_generation != fork::generation()
    }

    /// Whether a client is attached in place `index`: this one's own is; another's is while its kernel-held lock
    /// stands, in whatever container it runs. False for an index that no client can have. Where it cannot be known
    /// (in a forked child) the answer is true, so that nothing is reclaimed. Costs one system call, no lock.
    pub fn is_client_alive(&self, index: u16) -> bool {
        if index >= MAX_CLIENTS {
            return false;
        }
        index == self.tag.index || self.lock_file.is_locked_elsewhere(Range::client(index)).unwrap_or(true)
    }

    /// The generation that the place `index` has now: its present or last client's. `None` for an index that no
    /// client can have; 0, which no client has, for a place that was never taken.
    pub fn client_generation(&self, index: u16) -> Option<u32> {
        self.control.generation(index).map(|generation| generation.load(Ordering::SeqCst))
    }

    /// A counter of the client in place `client`, or of the last one that was there. Needs no lock. When a place is
    /// taken again, its counters are added to the totals and become 0, so totals and places together hold all that
    /// was ever counted.
    ///
    /// # Panics
    /// If `client` is not below `MAX_CLIENTS`, or `which` not below `COUNTERS_PER_CLIENT`.
    pub fn counter(&self, client: u16, which: usize) -> &AtomicU64 {
        assert!(client < MAX_CLIENTS, "client {client} of {MAX_CLIENTS}");
        self.control.counter(client, which)
    }

    /// The same counter summed over clients whose places were taken again. Needs no lock.
    ///
    /// # Panics
    /// If `which` is not below `COUNTERS_PER_CLIENT`.
    pub fn totals(&self, which: usize) -> &AtomicU64 {
        self.control.counter(MAX_CLIENTS, which)
    }

    /// Adds the counters of the client in place `client` to the totals and makes them 0. Each count is moved
    /// once, whoever else does the same at the same time.
    fn fold_counters(&self, client: u16) {
        for which in 0..COUNTERS_PER_CLIENT {
            let count = self.counter(client, which).swap(0, Ordering::Relaxed);
            if count != 0 {
                self.totals(which).fetch_add(count, Ordering::Relaxed);
            }
        }
    }

    /// The first byte of the data area, at a multiple of 2 MiB; `geometry().data_len` bytes, readable and
    /// writable as long as this `Region` lives, closed or not. Other processes write there, so make no
    /// reference to it.
    #[inline]
    pub fn data_ptr(&self) -> *mut u8 {
        self.data.begin()
    }

    /// Leaves the region: frees the client's place, and removes the files if this was their last user.
    /// The mapping stays until the `Region` is dropped, so that views of it stay valid. Closing again does nothing.
    ///
    /// A thread that holds the lock keeps it until its guard is dropped, and the client stays until then; copies
    /// that are under way in other threads should be over.
    pub fn close(&self) {
        if self.closed.swap(true, Ordering::SeqCst) || self.is_forked() {
            return;
        }
        let begun = Instant::now();
        while self.is_inside() && begun.elapsed() < INSIDE_WAIT {
            std::thread::sleep(NAP);
        }
        self.leave_unless_inside();
    }

    /// Whether a thread of this client has the lock.
    fn is_inside(&self) -> bool {
        lock::is_held_by(self.control.lock_word(), self.me)
    }

    /// Leaves, unless a thread of this client has the lock: then that thread will, when it gives the lock back.
    fn leave_unless_inside(&self) {
        if !self.is_forked() && !self.is_inside() && !self.left.swap(true, Ordering::SeqCst) {
            self.leave();
        }
    }

    fn leave(&self) {
        let orderly = self.enter_to_leave();
        self.lock_file.unlock(Range::client(self.tag.index));
        if orderly {
            if !self.lock_file.is_locked_elsewhere(Range::CLIENTS).unwrap_or(true)
                && self.header.lifetime != Lifetime::Persistent
            {
                self.remove_files();
            }
            self.lock_file.unlock(Range::STRUCTURE);
        }
    }

    /// Takes the structure lock, but not at any price: who leaves may be in a hurry, and whoever has the lock may
    /// be stopped. What is not removed now is removed by the next start.
    fn enter_to_leave(&self) -> bool {
        let begun = Instant::now();
        loop {
            match self.lock_file.try_lock(Range::STRUCTURE) {
                Ok(true) => return true,
                Ok(false) if begun.elapsed() < LEAVE_WAIT => std::thread::sleep(NAP),
                Ok(false) | Err(_) => return false,
            }
        }
    }

    /// Removes this region's names, if they still are its. The caller has the structure lock.
    fn remove_files(&self) {
        // A name that cannot be removed is left for the next start; there is nobody to tell here.
        let _ = self.directory.unlink(&self.names.region, self.region_identity);
        let _ = self.directory.unlink(&self.names.lock, self.lock_identity);
        self.directory.remove_if_empty();
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.close();
    }
}
