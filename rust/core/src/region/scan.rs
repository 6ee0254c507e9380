//! Which regions a directory holds, and the removal of those whose owners are dead. Never waits, and never
//! touches what a living process may be using.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use super::Region;
use super::files::{Directory, Names, default_directory, failed, identity_of};
use super::header::{Lifetime, peek_lifetime};
use super::structure::Structure;
use crate::error::{Error, Result};
use crate::geometry::MAX_CLIENTS;
use crate::liveness::Range;

/// A region found in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Its name.
    pub name: String,
    /// Its layout version; a region of another version than this library's can be seen and removed, not attached.
    pub layout: u32,
    /// Its file, which may not exist if only the lock file is left.
    pub path: PathBuf,
    /// Bytes of the file.
    pub bytes: u64,
    /// What its header says; `None` if that is not a region's.
    pub lifetime: Option<Lifetime>,
    /// Whether anybody uses it.
    pub state: State,
}

/// Whether anybody uses a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// So many clients are attached.
    Alive {
        /// How many.
        clients: u32,
    },
    /// Somebody is creating, attaching or removing it at this moment.
    Busy,
    /// Nobody is attached, and it is persistent: it stays.
    Idle,
    /// Whoever used it is dead: it can be removed.
    Dead,
}

impl Region {
    /// The regions in `directory` (default: the user's own), in order of their names; none if there is no such
    /// directory. Needs no region to be open.
    ///
    /// # Errors
    /// [`Error::Region`] if the directory is not the user's alone, or cannot be read.
    pub fn scan(directory: Option<&Path>) -> Result<Vec<Found>> {
        let Some(directory) = open(directory)? else { return Ok(Vec::new()) };
        Ok(directory.regions()?.iter().filter_map(|names| look_at(&directory, names).ok()).collect())
    }

    /// Removes the files of all regions in `directory` (default: the user's own) that nobody uses any more, and
    /// returns their names. Persistent regions stay.
    ///
    /// # Errors
    /// As [`Region::scan`]. A region that cannot be removed is left out of the result.
    pub fn remove_dead(directory: Option<&Path>) -> Result<Vec<String>> {
        let Some(directory) = open(directory)? else { return Ok(Vec::new()) };
        let removed = remove_dead_but(&directory, None)?;
        directory.remove_if_empty();
        Ok(removed)
    }

    /// Removes the files of the region `name`, persistent or not and of whatever layout version, which nobody may be using.
    ///
    /// # Errors
    /// - [`Error::Region`] if there is none of this name (its source is `NotFound`), and as [`Region::scan`].
    /// - [`Error::InvalidArgument`] if somebody uses it; then nothing of that version is removed.
    pub fn remove(directory: Option<&Path>, name: &str) -> Result<()> {
        let path = directory.map_or_else(default_directory, Path::to_owned);
        let missing = || failed(&path.join(name), "removing region", io::Error::from(io::ErrorKind::NotFound));
        let Some(directory) = Directory::open(&path)? else { return Err(missing()) };
        let mut found = directory.regions()?;
        found.retain(|names| names.name == name);
        if found.is_empty() {
            return Err(missing());
        }
        for names in found {
            if !remove_unused(&directory, &names, Persistent::Goes)? {
                return Err(Error::InvalidArgument(format!(
                    "region {name:?} is in use; end the processes that use it first"
                )));
            }
        }
        directory.remove_if_empty();
        Ok(())
    }
}

fn open(directory: Option<&Path>) -> Result<Option<Directory>> {
    match directory {
        Some(path) => Directory::open(path),
        None => Directory::open(&default_directory()),
    }
}

fn look_at(directory: &Directory, names: &Names) -> Result<Found> {
    let path = directory.path_of(&names.region);
    let region = directory.open_file(&names.region)?;
    let (bytes, lifetime) = match &region {
        Some(file) => examine(file, &path)?,
        None => (0, None),
    };
    let state = match Structure::open_existing(directory, names)? {
        None => State::Dead,
        Some(structure) => state_of(&structure),
    };
    let state = match (state, lifetime) {
        (State::Dead, Some(Lifetime::Persistent)) => State::Idle,
        (state, _) => state,
    };
    Ok(Found { name: names.name.clone(), layout: names.layout, path, bytes, lifetime, state })
}

fn examine(file: &File, path: &Path) -> Result<(u64, Option<Lifetime>)> {
    let read = || -> io::Result<_> { Ok((file.metadata()?.len(), peek_lifetime(file)?)) };
    read().map_err(|e| failed(path, "examining", e))
}

fn state_of(structure: &Structure) -> State {
    // What cannot be examined counts as alive.
    let locked = |range| structure.lock.is_locked_elsewhere(range).unwrap_or(true);
    let clients = (0..MAX_CLIENTS).filter(|&index| locked(Range::client(index))).count();
    match u32::try_from(clients) {
        Ok(0) if locked(Range::STRUCTURE) => State::Busy,
        Ok(0) => State::Dead,
        Ok(clients) => State::Alive { clients },
        Err(_) => State::Busy,
    }
}

/// Removes every dead region but the one named `but`.
pub(super) fn remove_dead_but(directory: &Directory, but: Option<&Names>) -> Result<Vec<String>> {
    let mut removed = Vec::new();
    for names in directory.regions()? {
        // What cannot be removed (it may belong to somebody else) is in nobody's way here.
        if Some(&names) != but && remove_unused(directory, &names, Persistent::Stays).unwrap_or(false) {
            removed.push(names.name);
        }
    }
    Ok(removed)
}

/// What becomes of a persistent region that nobody uses.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Persistent {
    Stays,
    Goes,
}

fn remove_unused(directory: &Directory, names: &Names, persistent: Persistent) -> Result<bool> {
    let Some(structure) = Structure::try_enter(directory, names)? else { return Ok(false) };
    if structure.is_anyone_attached()? {
        return Ok(false);
    }
    if let Some(file) = directory.open_file(&names.region)? {
        let path = directory.path_of(&names.region);
        if persistent == Persistent::Stays && matches!(examine(&file, &path)?, (_, Some(Lifetime::Persistent))) {
            return Ok(false);
        }
        let identity = identity_of(&file).map_err(|e| failed(&path, "examining", e))?;
        directory.unlink(&names.region, identity)?;
    }
    structure.remove_lock_file(directory, names)?;
    Ok(true)
}
