//! What can go wrong, once for the whole crate.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// Every failure that a caller can meet; each message says what was wrong, the value, and what is allowed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument or setting is not allowed.
    #[error("{0}")]
    InvalidArgument(String),
    /// The host cannot hold a region of this size.
    #[error("{0}")]
    NoSpace(String),
    /// A region's file cannot be created, opened, locked or mapped.
    #[error("{doing} {}: {source}", path.display())]
    Region {
        /// The file or directory.
        path: PathBuf,
        /// What was being done.
        doing: &'static str,
        /// The operating system's word.
        source: io::Error,
    },
    /// A file is not a region that this version can use.
    #[error("{} is not a usable ecpool region: {why}", path.display())]
    RegionFormat {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The caller's progress callback asked to stop.
    #[error("interrupted while {doing}")]
    Interrupted {
        /// What was being done.
        doing: &'static str,
    },
    /// The lock was not free within the deadline.
    #[error("the pool's lock was not free within {:.1} ms", waited.as_secs_f64() * 1e3)]
    Busy {
        /// How long it was waited for.
        waited: Duration,
    },
    /// The region was closed, or this process is a fork of the one that opened it.
    #[error("{0}")]
    Closed(&'static str),
    /// Every client record of the region is in use.
    #[error("the region has {limit} clients already, which is its limit")]
    ClientsFull {
        /// How many clients a region can have.
        limit: u32,
    },
    /// Every namespace row of the region is in use.
    #[error("the region has {limit} namespaces in use already, which is its limit")]
    NamespacesFull {
        /// How many namespaces a region can have.
        limit: u32,
    },
    /// No entry of this key is in the cache.
    #[error("no entry for key {key:?}")]
    KeyNotFound {
        /// The key.
        key: String,
    },
    /// The entry is not in the state that the call needs.
    #[error("{doing} needs {needed}, but the entry of key {key:?} is {found}")]
    EntryState {
        /// The call.
        doing: &'static str,
        /// The key.
        key: String,
        /// The state it is in.
        found: &'static str,
        /// What the call needs.
        needed: &'static str,
    },
    /// More blocks than the whole cache has.
    #[error("alloc of key {key:?}: {wanted} blocks wanted, but the whole cache has {capacity}")]
    TooLarge {
        /// The key.
        key: String,
        /// Blocks wanted.
        wanted: u64,
        /// Blocks there are.
        capacity: u64,
    },
    /// The index contradicts itself even after a rebuild.
    #[error("the pool cannot be used: {0}, even after a rebuild; remove it and start anew")]
    Unusable(crate::index::Damaged),
    /// Every record of a kind is in use.
    #[error("{doing} of key {key:?}: all {limit} {what} are in use")]
    Exhausted {
        /// The call.
        doing: &'static str,
        /// The key.
        key: String,
        /// What has run out.
        what: &'static str,
        /// How many there are.
        limit: u32,
    },
}

impl Error {
    /// An `InvalidArgument` for `what`, with the value found and what would be allowed.
    pub fn invalid(what: &str, value: impl std::fmt::Display, allowed: &str) -> Self {
        Error::InvalidArgument(format!("{what} is {value}, but must be {allowed}"))
    }
}
