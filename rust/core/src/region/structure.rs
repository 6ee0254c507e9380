//! The structure lock: held by whoever creates, attaches to, leaves, replaces or removes a region.
//!
//! It is byte 0 of the region's lock file. The kernel frees it when its holder dies, so waiting for it needs no
//! timeout: whoever holds it is alive and at work. A lock file can be removed while others wait for it, so a lock
//! counts only if the name still leads to the file that was locked; otherwise one begins anew.

use std::fs::File;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use super::files::{Directory, Identity, Names, failed, identity_of};
use super::{Phase, Progress};
use crate::error::{Error, Result};
use crate::liveness::{LockFile, Range};

const SHORTEST_NAP: Duration = Duration::from_millis(1);
const LONGEST_NAP: Duration = Duration::from_millis(20);

/// One open of a region's lock file; see the functions for whether it has the structure lock.
#[derive(Debug)]
pub(super) struct Structure {
    pub(super) lock: LockFile,
    pub(super) identity: Identity,
}

impl Structure {
    /// Takes the structure lock, creating the lock file if there is none, and waiting for whoever is at work.
    /// `None` if the directory was removed meanwhile.
    pub(super) fn enter(directory: &Directory, names: &Names, progress: Progress<'_>) -> Result<Option<Self>> {
        let begun = Instant::now();
        loop {
            let structure = match Self::open_existing(directory, names)? {
                Some(structure) => structure,
                None => match Self::create(directory, names)? {
                    Some(structure) => structure,
                    // Made by another just now; or the directory has gone.
                    None if directory.identity(&names.lock).is_some() => continue,
                    None => return Ok(None),
                },
            };
            structure.wait(&directory.path_of(&names.lock), begun, progress)?;
            if structure.is_current(directory, names) {
                return Ok(Some(structure));
            }
        }
    }

    /// Takes the structure lock if nobody has it. The lock file is created if only the region file is left.
    pub(super) fn try_enter(directory: &Directory, names: &Names) -> Result<Option<Self>> {
        let structure = match Self::open_existing(directory, names)? {
            Some(structure) => structure,
            None => match Self::create(directory, names)? {
                Some(structure) => structure,
                None => return Ok(None),
            },
        };
        let entered = structure.try_lock(&directory.path_of(&names.lock))?;
        Ok((entered && structure.is_current(directory, names)).then_some(structure))
    }

    /// Opens the lock file, if there is one, without taking any lock.
    pub(super) fn open_existing(directory: &Directory, names: &Names) -> Result<Option<Self>> {
        Self::open(&directory.path_of(&names.lock), || directory.open_file(&names.lock))
    }

    fn create(directory: &Directory, names: &Names) -> Result<Option<Self>> {
        Self::open(&directory.path_of(&names.lock), || directory.create_file(&names.lock))
    }

    fn open(path: &Path, open: impl FnOnce() -> Result<Option<File>>) -> Result<Option<Self>> {
        // `LockFile` must see the file being opened, so what else there is to say travels beside.
        let mut other = Ok(());
        let opened = LockFile::open(|| match open() {
            Ok(Some(file)) => Ok(file.into()),
            Ok(None) => Err(std::io::ErrorKind::NotFound.into()),
            Err(e) => {
                other = Err(e);
                Err(std::io::ErrorKind::Other.into())
            }
        });
        other?;
        let lock = match opened {
            Ok(lock) => lock,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(failed(path, "opening", e)),
        };
        let identity = lock.with_fd(|fd| identity_of(fd)).map_err(|e| failed(path, "examining", e))?;
        Ok(Some(Self { lock, identity }))
    }

    fn try_lock(&self, path: &Path) -> Result<bool> {
        self.lock.try_lock(Range::STRUCTURE).map_err(|e| failed(path, "locking", e))
    }

    /// Polls rather than sleeping in the kernel, so that progress is told and a signal heard.
    fn wait(&self, path: &Path, begun: Instant, progress: Progress<'_>) -> Result<()> {
        let mut nap = SHORTEST_NAP;
        while !self.try_lock(path)? {
            let waited = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
            if let ControlFlow::Break(()) = progress(Phase::Waiting, waited, 0) {
                return Err(Error::Interrupted { doing: "waiting for another process to create or attach a region" });
            }
            std::thread::sleep(nap);
            nap = (nap * 2).min(LONGEST_NAP);
        }
        Ok(())
    }

    /// Whether the name still leads to this file.
    pub(super) fn is_current(&self, directory: &Directory, names: &Names) -> bool {
        directory.identity(&names.lock) == Some(self.identity)
    }

    /// Whether anybody else is attached. Only under the structure lock does the answer stay true, and then only "no".
    pub(super) fn is_anyone_attached(&self) -> Result<bool> {
        self.lock.is_locked_elsewhere(Range::CLIENTS).map_err(|e| failed(Path::new("lock file"), "examining", e))
    }

    /// Takes the lock file's name away, after which the next one who comes begins anew.
    pub(super) fn remove_lock_file(&self, directory: &Directory, names: &Names) -> Result<()> {
        directory.unlink(&names.lock, self.identity)
    }

    /// Gives the structure lock back; the client's own byte, if taken, stays locked.
    pub(super) fn exit(self) -> LockFile {
        self.lock.unlock(Range::STRUCTURE);
        self.lock
    }
}
