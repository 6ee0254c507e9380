//! Files that are not what they should be: each is a clear error, or is replaced when nobody uses it.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::time::Duration;

use ecpool_core::geometry::LAYOUT_VERSION;
use ecpool_core::region::{Lifetime, OpenRequest, Region, State};
use ecpool_core::{Error, Result};

mod region_support;
use region_support::*;

const SOON: Duration = Duration::from_millis(50);
const READY_OFFSET: u64 = 192;
const LOCK_WORD_OFFSET: u64 = 4096;
const INDEX_OFFSET: u64 = 16384;

fn attach(directory: &Path) -> Result<Region> {
    Region::attach(Some(directory), "r", &mut go_on)
}

/// A file with mode 0600 in the region's place.
fn put(directory: &Path, content: &[u8]) {
    let path = region_file(directory, "r");
    fs::write(&path, content).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
}

/// The bytes of a complete region, without anybody attached.
fn complete_region() -> Vec<u8> {
    let directory = scratch();
    drop(open(directory.path(), "r", Lifetime::Persistent).unwrap());
    fs::read(region_file(directory.path(), "r")).unwrap()
}

fn assert_attach_fails_and_open_replaces(content: &[u8], words: &str) {
    let directory = scratch();
    put(directory.path(), content);
    let error = attach(directory.path()).unwrap_err();
    assert!(matches!(error, Error::RegionFormat { .. }), "{error:?}");
    assert!(error.to_string().contains(words), "{error} does not say {words:?}");
    assert!(fs::read(region_file(directory.path(), "r")).unwrap() == content, "attaching changed it");
    let region = open(directory.path(), "r", Lifetime::Shared).unwrap();
    assert!(region.created());
    region.lock(SOON).unwrap().index_bytes().fill(1);
    drop(region);
    assert!(files_in(directory.path()).is_empty());
}

#[test]
fn an_empty_file() {
    assert_attach_fails_and_open_replaces(b"", "empty");
}

#[test]
fn a_short_file() {
    let region = complete_region();
    assert_attach_fails_and_open_replaces(&region[..100], "100 bytes");
    assert_attach_fails_and_open_replaces(&region[..8192], "8192 bytes");
    assert_attach_fails_and_open_replaces(&region[..region.len() - 1], "bytes long");
}

#[test]
fn random_bytes() {
    let mut state = 1u64;
    let noise: Vec<u8> = (0..3 << 20)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        })
        .collect();
    assert_attach_fails_and_open_replaces(&noise, "does not begin");
    // A true header in front of noise is believed, and the noise survived.
    let directory = scratch();
    let mut region = complete_region();
    region[LOCK_WORD_OFFSET as usize..].iter_mut().zip(&noise).for_each(|(byte, noise)| *byte = *noise);
    put(directory.path(), &region);
    let region = open(directory.path(), "r", Lifetime::Persistent).unwrap();
    assert!(region.lock(SOON).unwrap().is_dirty());
}

#[test]
fn a_region_of_another_layout() {
    let mut region = complete_region();
    region[8..12].copy_from_slice(&(LAYOUT_VERSION + 1).to_ne_bytes());
    assert_attach_fails_and_open_replaces(&region, "layout version");
}

#[test]
fn a_damaged_header() {
    let mut region = complete_region();
    region[24] ^= 1;
    assert_attach_fails_and_open_replaces(&region, "damaged");
}

#[test]
fn a_half_initialised_file() {
    let mut region = complete_region();
    region[READY_OFFSET as usize] ^= 0xff;
    assert_attach_fails_and_open_replaces(&region, "never finished");
    assert_attach_fails_and_open_replaces(&vec![0; 4 << 20], "never finished");
}

#[test]
fn a_region_whose_owners_are_dead_is_replaced_not_attached_to() {
    let mut region = complete_region();
    // The lifetime is part of the header, so a true shared one is needed.
    let directory = scratch();
    let alive = open(directory.path(), "r", Lifetime::Shared).unwrap();
    region.copy_from_slice(&fs::read(region_file(directory.path(), "r")).unwrap());
    drop(alive);
    assert_attach_fails_and_open_replaces(&region, "dead");
}

#[test]
fn a_file_that_is_not_there() {
    let directory = scratch();
    for directory in [directory.path(), &directory.path().join("none")] {
        let Err(Error::Region { source, .. }) = attach(directory) else { panic!() };
        assert_eq!(source.kind(), std::io::ErrorKind::NotFound);
        assert!(files_in(directory).is_empty(), "attaching makes no file");
    }
}

#[test]
fn a_region_in_use_is_never_replaced_however_damaged() {
    let directory = scratch();
    let region = open(directory.path(), "r", Lifetime::Shared).unwrap();
    let file = fs::OpenOptions::new().write(true).open(region_file(directory.path(), "r")).unwrap();
    file.write_all_at(b"garbage", 0).unwrap();
    for error in [attach(directory.path()), open(directory.path(), "r", Lifetime::Shared)] {
        assert!(matches!(error.unwrap_err(), Error::RegionFormat { .. }));
    }
    assert_eq!(files_in(directory.path()).len(), 2);
    region.lock(SOON).unwrap().index_bytes()[0] = 1;
}

#[test]
fn any_lock_word_at_rest_is_survived() {
    for word in [1u32, 0xffff_ffff, 0x8000_0000, 0x0000_1001, 0x7fff_f100] {
        let directory = scratch();
        drop(open(directory.path(), "r", Lifetime::Persistent).unwrap());
        let file = fs::OpenOptions::new().write(true).open(region_file(directory.path(), "r")).unwrap();
        file.write_all_at(&word.to_ne_bytes(), LOCK_WORD_OFFSET).unwrap();
        file.write_all_at(b"kept", INDEX_OFFSET).unwrap();
        let region = open(directory.path(), "r", Lifetime::Persistent).unwrap();
        let mut guard = region.try_lock().unwrap().unwrap();
        assert!(guard.is_dirty(), "{word:#x}");
        assert_eq!(&guard.index_bytes()[..4], b"kept");
    }
}

fn assert_refused(directory: &Path, words: &str) {
    for outcome in [attach(directory), open(directory, "r", Lifetime::Shared)] {
        let error = outcome.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Region { .. }), "{text}");
        assert!(text.contains(words), "{text} does not say {words:?}");
    }
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("left out: foreign-owned files: only root can make one");
    }
    root
}

#[test]
fn what_others_may_use_is_refused() {
    let directory = scratch();
    let path = region_file(directory.path(), "r");
    put(directory.path(), &complete_region());
    fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
    assert_refused(directory.path(), "others may use it (mode 0640)");
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
    assert_refused(directory.path(), "mode 0755");
}

#[test]
fn what_belongs_to_another_user_is_refused() {
    if !is_root() {
        return;
    }
    let directory = scratch();
    let path = region_file(directory.path(), "r");
    put(directory.path(), &complete_region());
    chown(&path, Some(12345), None).unwrap();
    assert_refused(directory.path(), "belongs to user 12345");
    fs::remove_file(&path).unwrap();
    fs::write(lock_file(directory.path(), "r"), b"").unwrap();
    chown(lock_file(directory.path(), "r"), Some(12345), None).unwrap();
    let error = open(directory.path(), "r", Lifetime::Shared).unwrap_err();
    assert!(error.to_string().contains("belongs to user 12345"), "{error}");
    chown(directory.path(), Some(12345), None).unwrap();
    let error = open(directory.path(), "s", Lifetime::Shared).unwrap_err();
    assert!(error.to_string().contains("belongs to user 12345"), "{error}");
}

#[test]
fn a_symbolic_link_is_not_followed() {
    let (elsewhere, directory) = (scratch(), scratch());
    fs::write(elsewhere.path().join("victim"), b"precious").unwrap();
    symlink(elsewhere.path().join("victim"), region_file(directory.path(), "r")).unwrap();
    assert_refused(directory.path(), "symbolic link");
    for file in files_in(directory.path()) {
        fs::remove_file(directory.path().join(file)).unwrap();
    }
    symlink(elsewhere.path().join("victim"), lock_file(directory.path(), "r")).unwrap();
    assert!(open(directory.path(), "r", Lifetime::Shared).unwrap_err().to_string().contains("symbolic link"));
    assert_eq!(fs::read(elsewhere.path().join("victim")).unwrap(), b"precious");

    let link = elsewhere.path().join("link");
    symlink(directory.path(), &link).unwrap();
    let error = open(&link, "r", Lifetime::Shared).unwrap_err();
    assert!(error.to_string().contains("not a directory"), "{error}");
}

#[test]
fn a_directory_or_pipe_in_the_files_place_is_refused() {
    let directory = scratch();
    let path = region_file(directory.path(), "r");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
    assert_refused(directory.path(), "not a regular file");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(open(directory.path(), "r", Lifetime::Shared).is_err());
}

#[test]
fn other_file_systems_are_refused_by_name_and_nothing_is_made_there() {
    let directory = tempfile::tempdir().unwrap();
    let inside = directory.path().join("pools");
    match open(&inside, "r", Lifetime::Shared) {
        Err(Error::InvalidArgument(message)) => assert!(message.contains("must lie on tmpfs"), "{message}"),
        Ok(_) => eprintln!("left out: the temporary directory is on tmpfs itself"),
        Err(other) => panic!("{other}"),
    }
    assert!(!inside.exists());
    let Err(Error::InvalidArgument(message)) = open(Path::new("/proc/ecpool"), "r", Lifetime::Shared) else {
        panic!("made a region in /proc")
    };
    assert!(message.contains("0x9fa0"), "{message}");
}

#[test]
fn the_default_directory_is_the_users_own() {
    let name = format!("default-directory-{}", std::process::id());
    let request = OpenRequest {
        directory: None,
        name: &name,
        geometry: geometry(MIB),
        lifetime: Lifetime::Private { expected_clients: 2 },
    };
    let region = Region::open(&request, &mut go_on).unwrap();
    let own = format!("/dev/shm/ecpool-{}/", rustix::process::geteuid().as_raw());
    assert!(region.path().to_str().unwrap().starts_with(&own), "{:?}", region.path());
    assert!(Region::scan(None).unwrap().iter().any(|found| found.name == name));
    assert!(!open(Path::new(&own), &name, Lifetime::Private { expected_clients: 2 }).unwrap().created());
    drop(region);
    assert!(Region::scan(None).unwrap().iter().all(|found| found.name != name));
}

#[test]
fn dead_files_are_found_and_removed_and_living_ones_left() {
    let directory = scratch();
    let path = directory.path();
    assert_eq!(Region::scan(Some(&path.join("none"))).unwrap(), []);
    let alive = open(path, "alive", Lifetime::Shared).unwrap();
    let _second = open(path, "alive", Lifetime::Shared).unwrap();
    drop(open(path, "kept", Lifetime::Persistent).unwrap());
    let make = |name: String| {
        fs::write(path.join(&name), vec![0; 1000]).unwrap();
        fs::set_permissions(path.join(&name), Permissions::from_mode(0o600)).unwrap();
    };
    // Half made; only a lock file; of another layout version; not ours to touch.
    make(format!("dead.v{LAYOUT_VERSION}.region"));
    make(format!("locked.v{LAYOUT_VERSION}.lock"));
    make("old.v999.region".to_owned());
    make("notes.txt".to_owned());

    let found = Region::scan(Some(path)).unwrap();
    let states: Vec<(&str, u32, State)> =
        found.iter().map(|found| (found.name.as_str(), found.layout, found.state)).collect();
    let (v, dead) = (LAYOUT_VERSION, State::Dead);
    assert_eq!(
        states,
        [
            ("alive", v, State::Alive { clients: 2 }),
            ("dead", v, dead),
            ("kept", v, State::Idle),
            ("locked", v, dead),
            ("old", 999, dead),
        ]
    );
    assert_eq!(found[0].bytes, alive.geometry().file_len);
    assert_eq!(found[0].lifetime, Some(Lifetime::Shared));
    assert_eq!((found[1].bytes, found[1].lifetime), (1000, None));

    assert_eq!(Region::remove_dead(Some(path)).unwrap(), ["dead", "locked", "old"]);
    assert_eq!(files_in(path).len(), 5, "{:?}", files_in(path));
    alive.lock(SOON).unwrap().index_bytes()[0] = 1;
}

#[test]
fn a_start_removes_dead_files_before_it_looks_for_room() {
    let directory = scratch();
    fs::write(directory.path().join("stale.v1.region"), vec![0; 1000]).unwrap();
    fs::set_permissions(directory.path().join("stale.v1.region"), Permissions::from_mode(0o600)).unwrap();
    let _region = open(directory.path(), "r", Lifetime::Shared).unwrap();
    assert!(files_in(directory.path()).iter().all(|file| file.starts_with("r.")));
}

#[test]
fn a_region_larger_than_the_host_is_one_clear_error_and_no_file() {
    let parent = scratch();
    let directory = parent.path().join("pools");
    let error = open_sized(&directory, "r", Lifetime::Shared, 16 << 40).unwrap_err();
    assert!(matches!(error, Error::NoSpace(_)), "{error}");
    assert!(error.to_string().contains("16.0 TiB"), "{error}");
    assert_eq!(files_in(&directory), [""; 0]);
}
