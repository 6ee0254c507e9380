//! Is there room? Asked before anything is reserved, because the kernel's own answers come too late: a file
//! on tmpfs can be given any size and then faults with SIGBUS, and a reservation beyond a memory cgroup's
//! limit is answered by the OOM killer rather than by an error.
//!
//! The readers take the root of the file system as an argument, so tests hand them a made-up one.

use std::fs::{self, File};
use std::ops::ControlFlow;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate, fstatfs};
use rustix::io::Errno;

use super::files::failed;
use super::{Phase, Progress};
use crate::error::{Error, Result};

/// A reservation is made in pieces of this many bytes, so that progress can be told and a signal heard.
const PIECE: u64 = 256 << 20;
/// A piece that a signal interrupted is tried again with half the length, down to this: the kernel undoes an
/// interrupted piece, so under a fast timer a large one would never be complete.
const LEAST_PIECE: u64 = 2 << 20;
/// cgroup v1 writes "no limit" as a huge number.
const NO_LIMIT: u64 = 1 << 62;

/// Something that bounds how much more memory can be had.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Limit {
    /// Bytes that it still allows.
    pub(super) available: u64,
    /// What it is, for people.
    pub(super) what: String,
}

/// `need` bytes, or an error that names the tightest limit.
fn check(need: u64, path: &Path, limits: &[Limit]) -> Result<()> {
    match limits.iter().min_by_key(|limit| limit.available) {
        Some(tightest) if tightest.available < need => Err(Error::NoSpace(format!(
            "{} needs {} more, but {} leaves only {}; ask for a smaller capacity, or make room there",
            path.display(),
            human(need),
            tightest.what,
            human(tightest.available)
        ))),
        _ => Ok(()),
    }
}

/// Every limit on a file in `directory` (open as `file`) for a process that sees the file system at `root`.
fn limits(file: &File, directory: &Path, root: &Path) -> Result<Vec<Limit>> {
    let mut limits = memory_limits(root);
    limits.extend(mount_limit(file, directory)?);
    Ok(limits)
}

fn mount_limit(file: &File, directory: &Path) -> Result<Option<Limit>> {
    let stat = fstatfs(file).map_err(|e| failed(directory, "examining the file system of", e))?;
    // A tmpfs mounted without a size reports no blocks at all.
    if stat.f_blocks == 0 {
        return Ok(None);
    }
    let available = stat.f_bavail.saturating_mul(stat.f_bsize as u64);
    let what = format!("free space on the file system of {}", directory.display());
    Ok(Some(Limit { available, what }))
}

/// The host's available memory, and what each memory cgroup from this process's up to the root still allows.
pub(super) fn memory_limits(root: &Path) -> Vec<Limit> {
    let mut limits = cgroup_limits(root);
    limits.extend(available_memory(root));
    limits
}

fn available_memory(root: &Path) -> Option<Limit> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Limit { available: kib.saturating_mul(1024), what: "this host's available memory".to_owned() })
}

/// The two generations of memory cgroups, which name the same things differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hierarchy {
    V1,
    V2,
}

impl Hierarchy {
    /// File names: the limit, the usage, and the line of `memory.stat` with reclaimable page cache.
    fn files(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Hierarchy::V1 => ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            Hierarchy::V2 => ("memory.max", "memory.current", "inactive_file"),
        }
    }
}

fn cgroup_limits(root: &Path) -> Vec<Limit> {
    let read = |file: &str| fs::read_to_string(root.join(file)).unwrap_or_default();
    let (mounts, groups) = (read("proc/self/mountinfo"), read("proc/self/cgroup"));
    mounts
        .lines()
        .filter_map(Mount::parse)
        .filter_map(|mount| Some((group_of(mount.hierarchy, &groups)?, mount)))
        .flat_map(|(group, mount)| limits_upwards(root, &mount, &group))
        .collect()
}

/// A mounted cgroup hierarchy that may govern memory.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    hierarchy: Hierarchy,
    /// The cgroup that is seen at the mount point.
    top: PathBuf,
    /// Relative to the root.
    point: PathBuf,
}

impl Mount {
    /// A line of mountinfo: `id parent device root point options… - type source options`.
    fn parse(line: &str) -> Option<Self> {
        let (place, kind) = line.split_once(" - ")?;
        let mut kind = kind.split(' ');
        let (file_system, options) = (kind.next()?, kind.nth(1)?);
        let hierarchy = match file_system {
            "cgroup2" => Hierarchy::V2,
            "cgroup" if options.split(',').any(|option| option == "memory") => Hierarchy::V1,
            _ => return None,
        };
        let mut place = place.split(' ').skip(3);
        let top = PathBuf::from(unescape(place.next()?));
        let point = unescape(place.next()?);
        Some(Self { hierarchy, top, point: PathBuf::from(point.trim_start_matches('/')) })
    }
}

/// mountinfo writes blanks in paths as octal escapes.
fn unescape(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

/// This process's cgroup: a line `0::path` for v2, `id:controllers:path` for v1.
fn group_of(hierarchy: Hierarchy, groups: &str) -> Option<PathBuf> {
    groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let found = match hierarchy {
            Hierarchy::V2 => controllers.is_empty(),
            Hierarchy::V1 => controllers.split(',').any(|name| name == "memory"),
        };
        found.then(|| PathBuf::from(path))
    })
}

/// The limits of a group and of all above it that can be seen from here.
fn limits_upwards(root: &Path, mount: &Mount, group: &Path) -> Vec<Limit> {
    let mut below = group.strip_prefix(&mount.top).unwrap_or(Path::new(""));
    // A group outside of what is mounted here (a container with a foreign view) can be seen only at the top.
    if below.components().any(|part| part == Component::ParentDir) {
        below = Path::new("");
    }
    below
        .ancestors()
        .map(|part| mount.point.join(part.strip_prefix("/").unwrap_or(part)))
        .filter_map(|directory| limit_of(root, &directory, mount.hierarchy))
        .collect()
}

fn limit_of(root: &Path, directory: &Path, hierarchy: Hierarchy) -> Option<Limit> {
    let number =
        |file: &str| -> Option<u64> { fs::read_to_string(root.join(directory).join(file)).ok()?.trim().parse().ok() };
    let (limit_file, usage_file, cache_line) = hierarchy.files();
    // v2 says "max" where there is no limit, which is no number.
    let limit = number(limit_file).filter(|&limit| limit < NO_LIMIT)?;
    let usage = number(usage_file)?;
    let stat = fs::read_to_string(root.join(directory).join("memory.stat")).unwrap_or_default();
    // Page cache of files that nobody used lately goes before anybody is killed. What lies on tmpfs is not in
    // this number.
    let cache = stat.lines().find_map(|line| line.strip_prefix(cache_line)?.trim().parse::<u64>().ok()).unwrap_or(0);
    let what = format!("the limit of {} of memory cgroup /{}", human(limit), directory.display());
    Some(Limit { available: limit.saturating_sub(usage.saturating_sub(cache)), what })
}

/// Gives `file` its full length with memory behind every byte. Whatever fails, the caller removes the file.
pub(super) fn reserve(file: &File, directory: &Path, path: &Path, len: u64, progress: Progress<'_>) -> Result<()> {
    let (mut done, mut piece) = (0, PIECE);
    while done < len {
        if let ControlFlow::Break(()) = progress(Phase::Reserving, done, len) {
            return Err(Error::Interrupted { doing: "reserving memory for a region" });
        }
        // Before each piece: others take memory at the same time.
        check(len - done, path, &limits(file, directory, Path::new("/"))?)?;
        let now = piece.min(len - done);
        match fallocate(file, FallocateFlags::empty(), done, now) {
            Ok(()) => done += now,
            Err(Errno::INTR) => piece = (piece / 2).max(LEAST_PIECE),
            Err(Errno::NOSPC | Errno::NOMEM | Errno::FBIG | Errno::DQUOT) => {
                return Err(ran_out(path, done, len));
            }
            Err(e) => return Err(failed(path, "reserving memory for", e)),
        }
    }
    // The caller hears of the end with the next phase or the result.
    let _ = progress(Phase::Reserving, len, len);
    Ok(())
}

fn ran_out(path: &Path, done: u64, len: u64) -> Error {
    Error::NoSpace(format!(
        "{} needs {}, but the system ran out after {}; ask for a smaller capacity, or make room",
        path.display(),
        human(len),
        human(done)
    ))
}

/// A size for people, and exactly.
fn human(bytes: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match UNITS.iter().find(|(_, shift)| bytes >> shift != 0) {
        Some((unit, shift)) => {
            format!("{:.1} {unit} ({bytes} bytes)", bytes as f64 / (1u64 << shift) as f64)
        }
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A made-up root with these files.
    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        root
    }

    fn found(files: &[(&str, &str)]) -> Vec<(u64, String)> {
        let root = tree(files);
        memory_limits(root.path()).into_iter().map(|limit| (limit.available, limit.what)).collect()
    }

    const V2_MOUNT: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1_MOUNT: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n\
                            36 31 0:33 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices\n";

    #[test]
    fn memory_of_the_host() {
        let meminfo = "MemTotal:       100 kB\nMemFree: 1 kB\nMemAvailable:     50 kB\n";
        let limits = found(&[("proc/meminfo", meminfo)]);
        assert_eq!(limits, [(51200, "this host's available memory".to_owned())]);
        assert_eq!(found(&[("proc/meminfo", "MemAvailable: much\n")]), []);
        assert_eq!(found(&[]), []);
    }

    #[test]
    fn every_group_up_to_the_root_counts_in_v2() {
        let limits = found(&[
            ("proc/self/mountinfo", V2_MOUNT),
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.current", "10\n"),
            ("sys/fs/cgroup/a/memory.max", "1000\n"),
            ("sys/fs/cgroup/a/memory.current", "400\n"),
            ("sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_anon 90\ninactive_file 100\nactive_file 7\n"),
        ]);
        assert_eq!(limits.len(), 1);
        assert_eq!(limits[0].0, 1000 - (400 - 100));
        assert!(limits[0].1.contains("/sys/fs/cgroup/a"), "{limits:?}");
    }

    #[test]
    fn every_group_up_to_the_root_counts_in_v1() {
        let limits = found(&[
            ("proc/self/mountinfo", V1_MOUNT),
            ("proc/self/cgroup", "9:devices:/elsewhere\n4:cpu,memory:/a/b\n0::/\n"),
            ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", "10\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "5000\n"),
            ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "4000\n"),
            ("sys/fs/cgroup/memory/a/memory.stat", "inactive_file 1\ntotal_inactive_file 600\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "7000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "9000\n"),
        ]);
        assert_eq!(limits.iter().map(|limit| limit.0).collect::<Vec<_>>(), [1600, 0]);
    }

    #[test]
    fn a_container_sees_its_group_at_the_mount_point() {
        let files = |mount: &'static str, group: &'static str| {
            found(&[
                ("proc/self/mountinfo", mount),
                ("proc/self/cgroup", group),
                ("sys/fs/cgroup/memory.max", "100"),
                ("sys/fs/cgroup/memory.current", "40"),
            ])
        };
        // Without a cgroup namespace the path repeats what the mount shows; with one it is the root.
        let bound = "30 23 0:26 /docker/x /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        assert_eq!(files(bound, "0::/docker/x\n")[0].0, 60);
        assert_eq!(files(V2_MOUNT, "0::/\n")[0].0, 60);
        assert_eq!(files(V2_MOUNT, "0::/../other\n")[0].0, 60);
        assert_eq!(files(bound, "0::/elsewhere\n")[0].0, 60);
        assert_eq!(files("garbage\n\n - \n", "0::/\n"), []);
        assert_eq!(files(V2_MOUNT, "garbage\n"), []);
    }

    #[test]
    fn the_tightest_limit_is_named_with_both_sizes() {
        let limit = |available, what: &str| Limit { available, what: what.to_owned() };
        let limits = [limit(3 << 30, "A"), limit(64 << 20, "B"), limit(1 << 30, "C")];
        let path = Path::new("/x");
        assert!(check(64 << 20, path, &limits).is_ok());
        assert!(check(u64::MAX, path, &[]).is_ok());
        let Err(Error::NoSpace(message)) = check(128 << 20, path, &limits) else { panic!() };
        for part in ["B", "128.0 MiB (134217728 bytes)", "64.0 MiB (67108864 bytes)"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn sizes_for_people() {
        assert_eq!(human(0), "0 bytes");
        assert_eq!(human(1023), "1023 bytes");
        assert_eq!(human(1536), "1.5 KiB (1536 bytes)");
        assert_eq!(human(5 << 40), "5.0 TiB (5497558138880 bytes)");
    }

    #[test]
    fn this_machine_can_be_asked() {
        assert!(!memory_limits(Path::new("/")).is_empty());
    }
}
