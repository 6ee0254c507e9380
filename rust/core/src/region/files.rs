//! The directory of a user's regions and the files in it: who may own them, and how they are opened,
//! created and removed. Nothing here follows a symbolic link, believes a foreign file, or waits.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::error::{Error, Result};
use crate::geometry::LAYOUT_VERSION;

const SHM: &str = "/dev/shm";
const TMPFS_MAGIC: u64 = 0x0102_1994;
const MAX_NAME: usize = 100;

/// A file, whatever its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    fn of(stat: &Stat) -> Self {
        #[allow(clippy::useless_conversion, reason = "narrower on some architectures")]
        Self { device: u64::from(stat.st_dev), inode: u64::from(stat.st_ino) }
    }
}

/// The names of the two files of a region.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Names {
    pub(super) name: String,
    pub(super) layout: u32,
    pub(super) region: String,
    pub(super) lock: String,
}

impl Names {
    /// The files of `name` in the present layout version.
    pub(super) fn new(name: &str) -> Result<Self> {
        if !is_valid_name(name) {
            return Err(Error::InvalidArgument(format!(
                "name is {name:?}, but must be 1 to {MAX_NAME} letters, digits, '.', '_' or '-', \
                 and not begin with '.'"
            )));
        }
        Ok(Self::of_layout(name, LAYOUT_VERSION))
    }

    fn of_layout(name: &str, layout: u32) -> Self {
        Self {
            name: name.to_owned(),
            layout,
            region: format!("{name}.v{layout}.region"),
            lock: format!("{name}.v{layout}.lock"),
        }
    }

    /// The region that a file in the directory belongs to, of whatever layout version.
    pub(super) fn of_file(file: &str) -> Option<Self> {
        let stem = file.strip_suffix(".region").or_else(|| file.strip_suffix(".lock"))?;
        let (name, layout) = stem.rsplit_once(".v")?;
        let layout: u32 = layout.parse().ok()?;
        let names = Self::of_layout(name, layout);
        (is_valid_name(name) && (names.region == file || names.lock == file)).then_some(names)
    }
}

fn is_valid_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && !name.starts_with('.')
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

/// Where a user's regions are unless told otherwise.
pub(super) fn default_directory() -> PathBuf {
    Path::new(SHM).join(format!("ecpool-{}", geteuid().as_raw()))
}

/// An open, checked directory.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    fd: OwnedFd,
}

impl Directory {
    /// Opens the directory, or returns `None` if there is none.
    pub(super) fn open(path: &Path) -> Result<Option<Self>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = match fs::open(path, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::NOTDIR | Errno::LOOP) => {
                return Err(refused(path, "it is not a directory (a symbolic link is not followed)"));
            }
            Err(e) => return Err(failed(path, "opening directory", e)),
        };
        let stat = fs::fstat(&fd).map_err(|e| failed(path, "examining directory", e))?;
        check_owner(path, &stat)?;
        check_file_system(path, fd.as_fd())?;
        Ok(Some(Self { path: path.to_owned(), fd }))
    }

    /// Opens the directory and makes it if need be; its parent must exist.
    pub(super) fn open_or_create(path: &Path) -> Result<Self> {
        loop {
            if let Some(directory) = Self::open(path)? {
                return Ok(directory);
            }
            check_parent(path)?;
            match fs::mkdir(path, Mode::RWXU) {
                // Somebody else made it, or removes it again just now.
                Ok(()) | Err(Errno::EXIST) => {}
                Err(e) => return Err(failed(path, "creating directory", e)),
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Another descriptor of it.
    pub(super) fn try_clone(&self) -> Result<Self> {
        let fd = self.fd.try_clone().map_err(|e| failed(&self.path, "opening directory", e))?;
        Ok(Self { path: self.path.clone(), fd })
    }

    pub(super) fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Opens a file that is there and ours, for reading and writing.
    pub(super) fn open_file(&self, name: &str) -> Result<Option<File>> {
        let path = self.path_of(name);
        // Not blocking: a pipe of this name must not hold us up.
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fd = match fs::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::LOOP) => return Err(refused(&path, "it is a symbolic link")),
            Err(e) => return Err(failed(&path, "opening", e)),
        };
        let stat = fs::fstat(&fd).map_err(|e| failed(&path, "examining", e))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(refused(&path, "it is not a regular file"));
        }
        check_owner(&path, &stat)?;
        Ok(Some(File::from(fd)))
    }

    /// Creates a file; `None` if one is there already, or if the directory has been removed.
    pub(super) fn create_file(&self, name: &str) -> Result<Option<File>> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match fs::openat(&self.fd, name, flags, Mode::RUSR | Mode::WUSR) {
            Ok(fd) => Ok(Some(File::from(fd))),
            Err(Errno::EXIST | Errno::NOENT) => Ok(None),
            Err(Errno::NOSPC) => Err(Error::NoSpace(format!(
                "{} cannot hold one more file: no space or no inode is left",
                self.path.display()
            ))),
            Err(e) => Err(failed(&self.path_of(name), "creating", e)),
        }
    }

    /// The file that has this name now.
    pub(super) fn identity(&self, name: &str) -> Option<Identity> {
        fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW).ok().as_ref().map(Identity::of)
    }

    /// Takes the name away if it still names that file. Names change under the structure lock only, which the
    /// caller has.
    pub(super) fn unlink(&self, name: &str, identity: Identity) -> Result<()> {
        if self.identity(name) != Some(identity) {
            return Ok(());
        }
        match fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(e) => Err(failed(&self.path_of(name), "removing", e)),
        }
    }

    /// Removes the default directory if nothing is in it any more; whoever needs it makes it again. A directory that
    /// somebody chose is his, and stays.
    pub(super) fn remove_if_empty(&self) {
        if self.path != default_directory() {
            return;
        }
        // Not empty, gone already, a mount point, a parent that may not be written to: it stays.
        let _ = fs::rmdir(&self.path);
    }

    /// The regions of which there is at least one file, in order of their names.
    pub(super) fn regions(&self) -> Result<Vec<Names>> {
        let listed = || -> rustix::io::Result<Vec<OsString>> {
            fs::Dir::read_from(&self.fd)?
                .map(|entry| Ok(OsString::from_vec(entry?.file_name().to_bytes().to_vec())))
                .collect()
        };
        let files = listed().map_err(|e| failed(&self.path, "listing directory", e))?;
        let mut regions: Vec<Names> = files.iter().filter_map(|file| Names::of_file(file.to_str()?)).collect();
        regions.sort();
        regions.dedup();
        Ok(regions)
    }
}

/// The identity of an open file.
pub(super) fn identity_of(fd: impl AsFd) -> io::Result<Identity> {
    Ok(Identity::of(&fs::fstat(fd)?))
}

fn check_owner(path: &Path, stat: &Stat) -> Result<()> {
    let me = geteuid().as_raw();
    if stat.st_uid != me {
        return Err(refused(path, &format!("it belongs to user {}, not to {me}", stat.st_uid)));
    }
    let mode = stat.st_mode & 0o777;
    if mode & 0o077 != 0 {
        return Err(refused(path, &format!("others may use it (mode {mode:04o}); make it yours alone")));
    }
    Ok(())
}

/// Refuses before anything is made there.
fn check_parent(path: &Path) -> Result<()> {
    let parent = match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => return Ok(()),
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = fs::open(parent, flags, Mode::empty()).map_err(|e| failed(parent, "opening directory", e))?;
    check_file_system(parent, fd.as_fd())
}

fn check_file_system(path: &Path, fd: impl AsFd) -> Result<()> {
    let found = fs::fstatfs(fd).map_err(|e| failed(path, "examining the file system of", e))?;
    // The low 32 bits: the field's width and sign differ between architectures.
    let magic = found.f_type as u64 & 0xffff_ffff;
    if magic == TMPFS_MAGIC {
        return Ok(());
    }
    let name = file_system_name(magic);
    Err(Error::InvalidArgument(format!(
        "{} lies on {name}, but a region must lie on tmpfs, as under {SHM}",
        path.display()
    )))
}

fn file_system_name(magic: u64) -> String {
    let known = match magic {
        0xef53 => "ext2, ext3 or ext4",
        0x5846_5342 => "xfs",
        0x9123_683e => "btrfs",
        0x2fc1_2fc1 => "zfs",
        0xf2f5_2010 => "f2fs",
        0x6969 => "nfs",
        0xff53_4d42 | 0xfe53_4d42 => "smb",
        0x794c_7630 => "overlayfs",
        0x6573_5546 => "a fuse file system",
        0x0102_1997 => "9p",
        0x8584_58f6 => "ramfs",
        0x9584_58f6 => "hugetlbfs",
        _ => return format!("a file system of type {magic:#x}"),
    };
    known.to_owned()
}

pub(super) fn failed(path: &Path, doing: &'static str, source: impl Into<io::Error>) -> Error {
    Error::Region { path: path.to_owned(), doing, source: source.into() }
}

fn refused(path: &Path, why: &str) -> Error {
    let source = io::Error::new(io::ErrorKind::PermissionDenied, why);
    Error::Region { path: path.to_owned(), doing: "refusing to use", source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        for good in ["a", "pool-1", "A.b_c", &"x".repeat(MAX_NAME), "a.v1.region"] {
            let names = Names::new(good).unwrap();
            assert_eq!(Names::of_file(&names.region).as_ref(), Some(&names));
            assert_eq!(Names::of_file(&names.lock), Some(names));
        }
        for bad in ["", ".", "..", ".a", "a/b", "ä", "a b", "a\0", &"x".repeat(MAX_NAME + 1)] {
            assert!(Names::new(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn other_files_are_no_regions() {
        for file in ["x", "x.region", "x.v.lock", "x.v1.lock~", "x.v01.region", ".v1.lock", "x.v-1.lock"] {
            assert_eq!(Names::of_file(file), None, "{file:?}");
        }
        assert_eq!(Names::of_file("x.v77.lock").unwrap().layout, 77);
    }
}
