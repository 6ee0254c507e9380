//! Who lives: locks that the kernel holds for a client and frees when it dies.
//!
//! A region's lock file has no content; only its byte ranges are locked, with *open file description*
//! locks. Such a lock belongs to one `open` of the file: not to a process id, so it means the same in every
//! pid namespace, and not to the process as a whole, so closing another descriptor of the file does not
//! free it, and two clients in one process are two owners.
//!
//! | byte | held by | while |
//! | --- | --- | --- |
//! | 0 | whoever creates, attaches, replaces, leaves or removes | it does so |
//! | 1 + i | client i | it is attached |
//!
//! This table, and the first bytes of a region's header, are the same in every layout version, so
//! that any version can tell and remove another's dead files.
#![allow(unsafe_code, reason = "fcntl's open file description locks have no safe wrapper")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use crate::fork::Descriptor;
use crate::geometry::MAX_CLIENTS;

/// Which client of a region, and which of those that had this place in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ClientTag {
    /// The client's place: 0 to `MAX_CLIENTS - 1`.
    pub index: u16,
    /// Raised each time the place is taken; its low 19 bits are never 0.
    pub generation: u32,
}

/// A range of bytes of the lock file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    start: i64,
    len: i64,
}

impl Range {
    /// Held while a region's files are made, taken into use, left or removed.
    pub(crate) const STRUCTURE: Range = Range { start: 0, len: 1 };
    /// Every client's byte.
    pub(crate) const CLIENTS: Range = Range { start: 1, len: MAX_CLIENTS as i64 };

    /// Every byte of the table above.
    const ALL: Range = Range { start: 0, len: 1 + MAX_CLIENTS as i64 };

    /// The byte of the client at `index`.
    pub(crate) fn client(index: u16) -> Range {
        Range { start: 1 + i64::from(index), len: 1 }
    }

    fn request(self, kind: libc::c_int) -> libc::flock {
        libc::flock {
            l_type: kind as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: self.start,
            l_len: self.len,
            // Must be 0 for locks of this kind.
            l_pid: 0,
        }
    }
}

/// One open file description of a lock file: the owner of the locks taken through it.
#[derive(Debug)]
pub(crate) struct LockFile {
    descriptor: Descriptor,
}

impl LockFile {
    pub(crate) fn open(open: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<Self> {
        Ok(Self { descriptor: Descriptor::open(open)? })
    }

    /// Whether the calling process opened it, rather than one that it was forked from.
    pub(crate) fn is_ours(&self) -> bool {
        self.descriptor.is_ours()
    }

    /// Calls `f` with the descriptor, or fails in a forked child.
    pub(crate) fn with_fd<T>(&self, f: impl FnOnce(BorrowedFd<'_>) -> io::Result<T>) -> io::Result<T> {
        let fd = self.descriptor.get().ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))?;
        f(fd)
    }

    /// Takes the range unless another owner has part of it; never waits.
    pub(crate) fn try_lock(&self, range: Range) -> io::Result<bool> {
        match self.fcntl(libc::F_OFD_SETLK, range.request(libc::F_WRLCK)) {
            Ok(_) => Ok(true),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Gives the range back, also if copies of the descriptor live on elsewhere.
    pub(crate) fn unlock(&self, range: Range) {
        // Freeing can fail only for want of memory to split a range; the kernel then frees it with the descriptor.
        let _ = self.fcntl(libc::F_OFD_SETLK, range.request(libc::F_UNLCK));
    }

    /// Whether another owner has part of the range. What this owner has does not count.
    pub(crate) fn is_locked_elsewhere(&self, range: Range) -> io::Result<bool> {
        let answer = self.fcntl(libc::F_OFD_GETLK, range.request(libc::F_WRLCK))?;
        Ok(libc::c_int::from(answer.l_type) != libc::F_UNLCK)
    }

    fn fcntl(&self, command: libc::c_int, mut lock: libc::flock) -> io::Result<libc::flock> {
        self.with_fd(|fd| {
            // SAFETY: the descriptor is open for as long as it is borrowed, and `lock` is a live, fully
            // initialised `flock`, which is all that these commands read or write.
            let status = unsafe { libc::fcntl(fd.as_raw_fd(), command, &raw mut lock) };
            if status == -1 { Err(io::Error::last_os_error()) } else { Ok(lock) }
        })
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        // Closing would do, were it not for children that no fork handler has seen (made by a bare `clone`):
        // they keep the description open, and with it what it has locked.
        if self.is_ours() {
            self.unlock(Range::ALL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(file: &tempfile::NamedTempFile) -> LockFile {
        LockFile::open(|| Ok(file.reopen()?.into())).unwrap()
    }

    #[test]
    fn two_descriptors_of_one_process_are_two_owners() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (a, b) = (open(&file), open(&file));
        assert!(a.try_lock(Range::client(3)).unwrap());
        assert!(!b.try_lock(Range::client(3)).unwrap());
        assert!(b.try_lock(Range::client(4)).unwrap());
        assert!(b.is_locked_elsewhere(Range::client(3)).unwrap());
        assert!(!a.is_locked_elsewhere(Range::client(3)).unwrap(), "one's own does not count");
        assert!(a.is_locked_elsewhere(Range::CLIENTS).unwrap());
        assert!(!a.is_locked_elsewhere(Range::STRUCTURE).unwrap());
    }

    #[test]
    fn a_lock_ends_when_given_back_or_when_its_descriptor_closes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (a, b) = (open(&file), open(&file));
        assert!(a.try_lock(Range::client(0)).unwrap());
        a.unlock(Range::client(0));
        assert!(b.try_lock(Range::client(0)).unwrap());
        assert!(a.try_lock(Range::client(1)).unwrap());
        drop(a);
        assert!(!b.is_locked_elsewhere(Range::CLIENTS).unwrap());
        // Opening and closing the file once more frees nothing, which a POSIX lock would not survive.
        drop(open(&file));
        assert!(open(&file).is_locked_elsewhere(Range::client(0)).unwrap());
    }

    #[test]
    fn the_last_client_has_a_byte_of_its_own() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (a, b) = (open(&file), open(&file));
        assert!(a.try_lock(Range::client(MAX_CLIENTS - 1)).unwrap());
        assert!(b.is_locked_elsewhere(Range::CLIENTS).unwrap());
    }
}
