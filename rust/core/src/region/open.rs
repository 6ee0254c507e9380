//! Creating a region, or attaching to one that is there.
#![allow(unsafe_code, reason = "getrandom has no safe wrapper among the crates used here")]

use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::files::{Directory, Identity, Names, default_directory, failed, identity_of};
use super::header::{ATTACHED, Header, IS_READY, Lifetime, READY};
use super::map::{Control, Data};
use super::structure::Structure;
use super::{Phase, Progress, Region, scan, space};
use crate::error::{Error, Result};
use crate::fork;
use crate::geometry::{Geometry, GeometryRequest, MAX_CLIENTS};
use crate::liveness::{ClientTag, LockFile, Range};
use crate::lock::{GENERATION_MASK, Owner};

/// What [`Region::open`] is asked for.
#[derive(Debug, Clone)]
pub struct OpenRequest<'a> {
    /// Where the files are; by default `ecpool-<uid>` in `/dev/shm`. Made if missing, for its user alone.
    pub directory: Option<&'a Path>,
    /// The region's name: 1 to 100 letters, digits, `.`, `_` and `-`, not beginning with `.`.
    pub name: &'a str,
    /// Its size and division.
    pub geometry: GeometryRequest,
    /// How long its files keep their names.
    pub lifetime: Lifetime,
}

impl Region {
    /// Creates the region, or attaches to it if somebody uses it already. Files in the directory whose owners
    /// are dead are removed first. Waits, for as long as it takes, while another process creates the same region.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`] for a request that is not allowed, or that differs from the region in use.
    /// - [`Error::NoSpace`] if the host cannot hold it; then no file is left behind.
    /// - [`Error::Region`] if files cannot be made or are not the user's alone.
    /// - [`Error::RegionFormat`] if somebody uses a file of this name that is no region.
    /// - [`Error::ClientsFull`]; [`Error::Interrupted`] if `progress` asks to stop.
    pub fn open(request: &OpenRequest<'_>, progress: Progress<'_>) -> Result<Region> {
        let names = Names::new(request.name)?;
        if let Lifetime::Private { expected_clients: 0 } = request.lifetime {
            return Err(Error::invalid("expected_clients", 0, "at least 1"));
        }
        let geometry = Geometry::new(&request.geometry)?;
        let seed = random().map_err(|e| failed(Path::new("getrandom"), "asking", e))?;
        let wanted = Header { geometry, lifetime: request.lifetime, seed };
        let path = path_or_default(request.directory);
        let directory = Directory::open_or_create(&path)?;
        scan::remove_dead_but(&directory, Some(&names))?;
        let mut attempt = Attempt { directory, names, wanted: Some(wanted) };
        loop {
            if let Some(region) = attempt.run(&mut *progress)? {
                return Ok(region);
            }
            // The directory or the files went away just now.
            pause(&mut *progress)?;
            attempt.directory = Directory::open_or_create(&path)?;
        }
    }

    /// Attaches to a region that is there, whatever its size.
    ///
    /// # Errors
    /// - [`Error::Region`] if there is none of this name (its source is `NotFound`), or it is not the user's alone.
    /// - [`Error::RegionFormat`] if the file is no complete region of this layout, or its owners are dead.
    /// - [`Error::InvalidArgument`] for a bad name; [`Error::ClientsFull`]; [`Error::Interrupted`].
    pub fn attach(directory: Option<&Path>, name: &str, progress: Progress<'_>) -> Result<Region> {
        let names = Names::new(name)?;
        let path = path_or_default(directory);
        let missing =
            |names: &Names| failed(&path.join(&names.region), "attaching to", io::Error::from(io::ErrorKind::NotFound));
        loop {
            let Some(directory) = Directory::open(&path)? else { return Err(missing(&names)) };
            // Before a lock file is made for nothing.
            if directory.identity(&names.region).is_none() {
                return Err(missing(&names));
            }
            let attempt = Attempt { directory, names: names.clone(), wanted: None };
            if let Some(region) = attempt.run(&mut *progress)? {
                return Ok(region);
            }
            pause(&mut *progress)?;
        }
    }
}

fn path_or_default(directory: Option<&Path>) -> PathBuf {
    directory.map_or_else(default_directory, Path::to_owned)
}

fn pause(progress: Progress<'_>) -> Result<()> {
    match progress(Phase::Waiting, 0, 0) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(Error::Interrupted { doing: "opening a region" }),
    }
}

fn random() -> io::Result<u64> {
    let mut bytes = [0u8; 8];
    // SAFETY: the buffer is live and as long as said.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    // Requests of up to 256 bytes are never cut short.
    if usize::try_from(got) == Ok(bytes.len()) {
        Ok(u64::from_ne_bytes(bytes))
    } else {
        Err(io::Error::last_os_error())
    }
}

/// One try to get hold of a region.
struct Attempt {
    directory: Directory,
    names: Names,
    /// What to create or to find; `None` to take whatever is there.
    wanted: Option<Header>,
}

/// A region's file, open and worth mapping.
struct Ready {
    file: File,
    identity: Identity,
    header: Header,
    created: bool,
}

impl Attempt {
    /// `None` if something was removed in between and all must begin anew.
    fn run(&self, progress: Progress<'_>) -> Result<Option<Region>> {
        let Some(structure) = Structure::enter(&self.directory, &self.names, &mut *progress)? else {
            return Ok(None);
        };
        match self.prepare(&structure, progress) {
            Ok(Some(place)) => self.assemble(structure, place).map(Some),
            other => {
                self.clean_up(&structure);
                other.map(|_| None)
            }
        }
    }

    /// A lock file without a region, which this attempt may have made, goes.
    fn clean_up(&self, structure: &Structure) {
        let unused = !structure.is_anyone_attached().unwrap_or(true);
        if unused && self.directory.identity(&self.names.region).is_none() {
            // The error that led here, if any, says more than this one would.
            let _ = structure.remove_lock_file(&self.directory, &self.names);
            self.directory.remove_if_empty();
        }
    }

    fn prepare(&self, structure: &Structure, progress: Progress<'_>) -> Result<Option<Place>> {
        let Some(ready) = self.find_or_create(structure, progress)? else { return Ok(None) };
        let (created, identity) = (ready.created, ready.identity);
        let place = self.take_place(structure, ready);
        if place.is_err() && created {
            self.directory.unlink(&self.names.region, identity)?;
        }
        place.map(Some)
    }

    fn find_or_create(&self, structure: &Structure, progress: Progress<'_>) -> Result<Option<Ready>> {
        let attached = structure.is_anyone_attached()?;
        let Some(file) = self.directory.open_file(&self.names.region)? else {
            if attached {
                // Its clients go on without a name; theirs is not the region that is to be made.
                structure.remove_lock_file(&self.directory, &self.names)?;
                return Ok(None);
            }
            return match &self.wanted {
                Some(wanted) => self.create(wanted, progress),
                None => Ok(None),
            };
        };
        let path = self.region_path();
        let found = Header::read(&file).map_err(|e| failed(&path, "reading", e))?;
        let identity = identity_of(&file).map_err(|e| failed(&path, "examining", e))?;
        match self.judge(found, attached)? {
            Some(header) => Ok(Some(Ready { file, identity, header, created: false })),
            None => {
                // Its memory must be free before room is looked for.
                drop(file);
                self.directory.unlink(&self.names.region, identity)?;
                match &self.wanted {
                    Some(wanted) => self.create(wanted, progress),
                    None => Ok(None),
                }
            }
        }
    }

    /// What to do with a file that is there: attach to it with this header, or replace it (`None`).
    fn judge(&self, found: std::result::Result<Header, String>, attached: bool) -> Result<Option<Header>> {
        let in_use = |header: &Header| attached || header.lifetime == Lifetime::Persistent;
        match (found, &self.wanted) {
            (Ok(header), Some(wanted)) if in_use(&header) => {
                check_same(&self.names.name, &header, wanted)?;
                Ok(Some(header))
            }
            (Ok(header), None) if in_use(&header) => Ok(Some(header)),
            (Ok(_), None) => Err(self.unusable("whoever used it is dead".to_owned())),
            (Err(why), None) => Err(self.unusable(why)),
            (Err(why), Some(_)) if attached => Err(self.unusable(why)),
            (_, Some(_)) => Ok(None),
        }
    }

    fn create(&self, wanted: &Header, progress: Progress<'_>) -> Result<Option<Ready>> {
        let Some(file) = self.directory.create_file(&self.names.region)? else { return Ok(None) };
        let path = self.region_path();
        let identity = identity_of(&file).map_err(|e| failed(&path, "examining", e))?;
        let filled = self.fill(&file, wanted, progress);
        if let Err(error) = filled {
            self.directory.unlink(&self.names.region, identity)?;
            return Err(error);
        }
        Ok(Some(Ready { file, identity, header: *wanted, created: true }))
    }

    /// Makes an empty file a region; the word that says so comes last.
    fn fill(&self, file: &File, wanted: &Header, progress: Progress<'_>) -> Result<()> {
        let path = self.region_path();
        let geometry = &wanted.geometry;
        space::reserve(file, self.directory.path(), &path, geometry.file_len, progress)?;
        wanted.write(file).map_err(|e| failed(&path, "writing", e))?;
        let control = Control::map(file, geometry).map_err(|e| failed(&path, "mapping", e))?;
        control.header_word(READY).store(IS_READY, Ordering::Release);
        Ok(())
    }

    fn take_place(&self, structure: &Structure, ready: Ready) -> Result<Place> {
        let geometry = &ready.header.geometry;
        let map = || -> io::Result<_> { Ok((Control::map(&ready.file, geometry)?, Data::map(&ready.file, geometry)?)) };
        let (control, data) = map().map_err(|e| failed(&self.region_path(), "mapping", e))?;
        let index = self.lock_first_free(&structure.lock)?;
        let generation = raise_generation(&control, index)?;
        Ok(Place { ready, control, data, tag: ClientTag { index, generation } })
    }

    fn lock_first_free(&self, lock: &LockFile) -> Result<u16> {
        for index in 0..MAX_CLIENTS {
            let locked = lock.try_lock(Range::client(index));
            if locked.map_err(|e| failed(&self.lock_path(), "locking", e))? {
                return Ok(index);
            }
        }
        Err(Error::ClientsFull { limit: u32::from(MAX_CLIENTS) })
    }

    /// Counts this client among those that a private region waits for; tools that merely attach are not.
    /// With the last of them the files lose their names.
    fn count_in(&self, structure: &Structure, place: &Place) -> Result<()> {
        let Some(_) = self.wanted else { return Ok(()) };
        let attached = place.control.header_word(ATTACHED).fetch_add(1, Ordering::Relaxed) + 1;
        match place.ready.header.lifetime {
            Lifetime::Private { expected_clients } if attached >= expected_clients => {
                self.directory.unlink(&self.names.region, place.ready.identity)?;
                structure.remove_lock_file(&self.directory, &self.names)?;
                self.directory.remove_if_empty();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn assemble(&self, structure: Structure, place: Place) -> Result<Region> {
        // On failure all goes back: the client's lock with the structure, which is dropped here.
        self.count_in(&structure, &place)?;
        let directory = self.directory.try_clone()?;
        let region = Region {
            path: self.region_path(),
            created: place.ready.created,
            header: place.ready.header,
            region_identity: place.ready.identity,
            control: place.control,
            data: place.data,
            tag: place.tag,
            me: Owner::new(place.tag),
            lock_identity: structure.identity,
            lock_file: structure.exit(),
            directory,
            names: self.names.clone(),
            fork_generation: fork::generation(),
            closed: AtomicBool::new(false),
            left: AtomicBool::new(false),
        };
        // What a dead client that had this place counted.
        region.fold_counters(place.tag.index);
        Ok(region)
    }

    fn region_path(&self) -> PathBuf {
        self.directory.path_of(&self.names.region)
    }

    fn lock_path(&self) -> PathBuf {
        self.directory.path_of(&self.names.lock)
    }

    fn unusable(&self, why: String) -> Error {
        Error::RegionFormat { path: self.region_path(), why }
    }
}

/// A client's place in a mapped region, its byte locked.
struct Place {
    ready: Ready,
    control: Control,
    data: Data,
    tag: ClientTag,
}

/// Makes a place's generation its new client's: unlike any before, and never 0 in the bits that the lock's word
/// has. The caller has locked the place's byte.
fn raise_generation(control: &Control, index: u16) -> Result<u32> {
    let place = control.generation(index).ok_or(Error::ClientsFull { limit: u32::from(MAX_CLIENTS) })?;
    let mut generation = place.load(Ordering::SeqCst).wrapping_add(1);
    if generation & GENERATION_MASK == 0 {
        generation += 1;
    }
    place.store(generation, Ordering::SeqCst);
    Ok(generation)
}

/// Refuses to attach to a region that is not what was asked for, with all differences in the message.
fn check_same(name: &str, found: &Header, wanted: &Header) -> Result<()> {
    let (has, asked) = (&found.geometry, &wanted.geometry);
    let numbers = [
        ("block_size", has.block_size, asked.block_size),
        ("blocks", u64::from(has.num_blocks), u64::from(asked.num_blocks)),
        ("slots", u64::from(has.num_slots), u64::from(asked.num_slots)),
        ("holds", u64::from(has.num_holds), u64::from(asked.num_holds)),
        ("segment_size", has.segment_size, asked.segment_size),
    ];
    let mut differences: Vec<String> = numbers
        .iter()
        .filter(|(_, has, asked)| has != asked)
        .map(|(what, has, asked)| format!("it has {what} {has}, but {asked} was asked for"))
        .collect();
    if found.lifetime != wanted.lifetime {
        differences.push(format!("it is {}, but {} was asked for", found.lifetime, wanted.lifetime));
    }
    if differences.is_empty() {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!("region {name:?} is in use and differs: {}", differences.join("; "))))
}
