//! Creating, attaching and removing with several processes, in small file systems and small memory cgroups.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ecpool_core::Error;
use ecpool_core::geometry::Geometry;
use ecpool_core::region::{Lifetime, OpenRequest, Phase, Region, State};
use rustix::process::Signal;

mod region_support;
use region_support::*;

const SOON: Duration = Duration::from_millis(100);

#[test]
fn child_role() {
    let Some(role) = my_role() else { return };
    let directory = Path::new(&role[1]);
    match role[0].as_str() {
        "open" => open_and_stay(directory, Lifetime::Shared),
        "open private" => open_and_stay(directory, Lifetime::Private { expected_clients: 2 }),
        "create slowly" => create_slowly(directory),
        "open in a storm" => open_in_a_storm(directory),
        "too large" => too_large(directory, role.get(2).map(Path::new)),
        other => panic!("unknown role {other}"),
    }
}

fn open_and_stay(directory: &Path, lifetime: Lifetime) {
    say("ready");
    listen();
    let region = open_sized(directory, "r", lifetime, 64 * MIB).unwrap();
    let mut guard = region.lock(PATIENCE).unwrap();
    guard.index_bytes()[0] += 1;
    drop(guard);
    say(if region.created() { "created" } else { "attached" });
    listen();
}

/// Is in the middle of creating until told.
fn create_slowly(directory: &Path) {
    let mut first = true;
    let mut progress = |phase, _, _| {
        if phase == Phase::Reserving && std::mem::take(&mut first) {
            say("creating");
            listen();
        }
        ControlFlow::Continue(())
    };
    let request =
        OpenRequest { directory: Some(directory), name: "r", geometry: geometry(MIB), lifetime: Lifetime::Shared };
    let region = Region::open(&request, &mut progress).unwrap();
    say(if region.created() { "created" } else { "attached" });
    listen();
}

/// Asks for more than there is, within the cgroup whose process list is given.
fn too_large(directory: &Path, group: Option<&Path>) {
    if let Some(group) = group {
        fs::write(group, std::process::id().to_string()).unwrap();
    }
    match open_sized(directory, "r", Lifetime::Shared, 128 * MIB) {
        Err(Error::NoSpace(message)) => say(&message),
        other => panic!("{other:?}"),
    }
    say(&format!("{:?}", files_in(directory)));
    // What does fit can still be had.
    drop(open_sized(directory, "r", Lifetime::Shared, 16 * MIB).unwrap());
    say("fits");
}

#[test]
fn of_eight_processes_that_start_at_once_exactly_one_creates() {
    for lifetime in ["open", "open private"] {
        let parent = scratch();
        let directory = parent.path().join("pools");
        let path = directory.to_str().unwrap();
        let mut actors: Vec<Actor> = (0..8).map(|_| Actor::start(lifetime, &[path])).collect();
        actors.iter_mut().for_each(|actor| actor.expect("ready"));
        actors.iter_mut().for_each(Actor::tell);
        let said: Vec<String> = actors.iter_mut().map(|actor| actor.hear().unwrap()).collect();
        let created = said.iter().filter(|word| *word == "created").count();
        if lifetime == "open" {
            assert_eq!(created, 1, "{said:?}");
            let region = Region::attach(Some(&directory), "r", &mut go_on).unwrap();
            assert_eq!(region.lock(SOON).unwrap().index_bytes()[0], 8);
        } else {
            // Every second one completes a pair, and the next begins a new one.
            assert_eq!(created, 4, "{said:?}");
            assert_eq!(files_in(&directory), [""; 0]);
        }
        actors.iter_mut().for_each(Actor::tell);
        actors.iter_mut().for_each(Actor::finish);
        assert_eq!(files_in(&directory), [""; 0]);
        assert!(directory.exists(), "a directory that somebody chose stays");
    }
}

#[test]
fn who_waits_for_a_creator_is_told_so_and_may_give_up() {
    let directory = scratch();
    let mut creator = Actor::start("create slowly", &[directory.path().to_str().unwrap()]);
    creator.expect("creating");
    assert_eq!(Region::scan(Some(directory.path())).unwrap()[0].state, State::Busy);
    assert_eq!(Region::remove_dead(Some(directory.path())).unwrap(), [""; 0]);
    let mut asked = 0;
    let mut progress = |phase, _, _| {
        assert_eq!(phase, Phase::Waiting);
        asked += 1;
        if asked < 5 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    };
    let request = OpenRequest {
        directory: Some(directory.path()),
        name: "r",
        geometry: geometry(MIB),
        lifetime: Lifetime::Shared,
    };
    assert!(matches!(Region::open(&request, &mut progress), Err(Error::Interrupted { .. })));
    creator.tell();
    creator.expect("created");
    assert!(!Region::open(&request, &mut go_on).unwrap().created());
}

#[test]
fn a_creator_killed_half_way_is_replaced_by_whoever_waits() {
    let directory = scratch();
    let mut creator = Actor::start("create slowly", &[directory.path().to_str().unwrap()]);
    creator.expect("creating");
    assert_eq!(files_in(directory.path()).len(), 2);
    let mut killed = false;
    let mut progress = |phase, _, _| {
        if phase == Phase::Waiting && !killed {
            creator.kill();
            killed = true;
        }
        ControlFlow::Continue(())
    };
    let request = OpenRequest {
        directory: Some(directory.path()),
        name: "r",
        geometry: geometry(MIB),
        lifetime: Lifetime::Shared,
    };
    let region = Region::open(&request, &mut progress).unwrap();
    assert!(killed && region.created());
    drop(region);
    assert!(files_in(directory.path()).is_empty());
}

#[test]
fn after_a_sigkill_the_next_start_removes_what_is_left() {
    let directory = scratch();
    let path = directory.path().to_str().unwrap();
    for role in ["open", "open private"] {
        let mut actor = Actor::start(role, &[path]);
        actor.expect("ready");
        actor.tell();
        actor.expect("created");
        actor.kill();
        assert_eq!(files_in(directory.path()).len(), 2);
        let found = Region::scan(Some(directory.path())).unwrap();
        assert_eq!(found[0].state, State::Dead);
        // Another name: the dead one's memory must be free before room is looked for.
        drop(open(directory.path(), "another", Lifetime::Shared).unwrap());
        assert!(files_in(directory.path()).is_empty(), "{:?}", files_in(directory.path()));
    }
}

#[test]
fn a_killed_clients_region_lives_on_with_the_others() {
    let directory = scratch();
    let path = directory.path().to_str().unwrap();
    let region = open_sized(directory.path(), "r", Lifetime::Shared, 64 * MIB).unwrap();
    let mut actor = Actor::start("open", &[path]);
    actor.expect("ready");
    actor.tell();
    actor.expect("attached");
    assert!(region.is_client_alive(1));
    actor.kill();
    assert!(!region.is_client_alive(1));
    assert_eq!(region.lock(SOON).unwrap().index_bytes()[0], 1);
    drop(region);
    assert!(files_in(directory.path()).is_empty());
}

#[test]
fn who_leaves_is_not_held_up_for_long_by_one_who_was_stopped() {
    let directory = scratch();
    let region = open(directory.path(), "r", Lifetime::Shared).unwrap();
    // Stopped while it has the structure lock of the same file.
    let lock = fs::OpenOptions::new().write(true).open(lock_file(directory.path(), "r")).unwrap();
    hold_structure(&lock);
    let begun = std::time::Instant::now();
    region.close();
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    assert_eq!(files_in(directory.path()).len(), 2, "left for the next start");
    drop(lock);
    assert_eq!(Region::remove_dead(Some(directory.path())).unwrap(), ["r"]);
}

#[allow(unsafe_code, reason = "fcntl")]
fn hold_structure(file: &fs::File) {
    use std::os::fd::AsRawFd;
    let request = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open and the request initialised.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const request) }, 0);
}

/// Reserves 300 MiB while a signal with a handler comes every few hundred microseconds, as a profiler's timer does.
#[allow(unsafe_code, reason = "signals")]
fn open_in_a_storm(directory: &Path) {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    static HEARD: AtomicU64 = AtomicU64::new(0);
    extern "C" fn hear(_: libc::c_int) {
        HEARD.fetch_add(1, Ordering::Relaxed);
    }
    let hear: extern "C" fn(libc::c_int) = hear;
    // SAFETY: the handler only adds to an atomic.
    unsafe { libc::signal(libc::SIGUSR1, hear as libc::sighandler_t) };
    // SAFETY: asks for this thread's own handle.
    let target = unsafe { libc::pthread_self() };
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                // SAFETY: the target waits for this thread, so it exists.
                unsafe { libc::pthread_kill(target, libc::SIGUSR1) };
                std::thread::sleep(Duration::from_micros(300));
            }
        });
        let opened = open_sized(directory, "r", Lifetime::Shared, 300 * MIB);
        over.store(true, Ordering::Relaxed);
        assert_eq!(fs::metadata(opened.unwrap().path()).unwrap().len() / MIB, 300 + overhead(300 * MIB));
    });
    // Recent kernels hold them back while they reserve a piece; others break it off.
    say(if HEARD.load(Ordering::Relaxed) > 0 { "stormy" } else { "calm" });
}

fn overhead(capacity: u64) -> u64 {
    let geometry = Geometry::new(&geometry(capacity)).unwrap();
    (geometry.file_len - geometry.data_len) / MIB
}

#[test]
fn signals_do_not_keep_a_region_from_being_reserved() {
    let directory = scratch();
    let mut actor = Actor::start("open in a storm", &[directory.path().to_str().unwrap()]);
    actor.expect("stormy");
    actor.finish();
}

fn assert_too_large(actor: &mut Actor, parts: &[&str]) {
    let message = actor.hear().unwrap();
    let needed = format!("({} bytes)", Geometry::new(&geometry(128 * MIB)).unwrap().file_len);
    for part in parts.iter().copied().chain([needed.as_str()]) {
        assert!(message.contains(part), "{message} lacks {part:?}");
    }
    actor.expect("[]");
    actor.expect("fits");
    actor.finish();
}

#[test]
fn a_file_system_too_small_is_an_error_with_both_sizes_and_leaves_no_file() {
    let directory = scratch();
    let path = directory.path().to_str().unwrap();
    let mount = format!("mount -t tmpfs -o size=64m,mode=700 ecpool-test {path}");
    if !can_run(&["unshare", "--mount", "sh", "-c", &mount], "a small tmpfs") {
        return;
    }
    let script = format!("{mount} && exec \"$@\"");
    let program = ["unshare", "--mount", "sh", "-c", &script, "sh"];
    let mut actor = Actor::spawn(Actor::command_by(&program, "too large", &[path]));
    assert_too_large(&mut actor, &[path, "free space", "64.0 MiB (67108864 bytes)"]);
}

/// A memory cgroup that is removed in the end.
struct Group(PathBuf);

impl Group {
    fn make(limit: u64) -> Option<Self> {
        let name = format!("ecpool-test-{}", std::process::id());
        for (top, limit_file) in [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]
        {
            let path = Path::new(top).join(&name);
            if fs::create_dir(&path).is_err() {
                continue;
            }
            let group = Self(path);
            if fs::write(group.0.join(limit_file), limit.to_string()).is_ok() {
                return Some(group);
            }
        }
        None
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // What tmpfs was charged for goes when its files do; the kernel may need a moment after the last process.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn a_memory_cgroup_too_small_is_an_error_and_not_an_oom_kill() {
    let Some(group) = Group::make(64 * MIB) else {
        eprintln!("left out: memory cgroups: none can be made here");
        return;
    };
    let directory = scratch();
    let tasks = group.0.join("cgroup.procs");
    let mut actor = Actor::start("too large", &[directory.path().to_str().unwrap(), tasks.to_str().unwrap()]);
    assert_too_large(&mut actor, &["memory cgroup", "64.0 MiB (67108864 bytes)"]);
}

#[test]
fn a_stopped_client_stays_alive() {
    let directory = scratch();
    let region = open_sized(directory.path(), "r", Lifetime::Shared, 64 * MIB).unwrap();
    let mut actor = Actor::start("open", &[directory.path().to_str().unwrap()]);
    actor.expect("ready");
    actor.tell();
    actor.expect("attached");
    actor.signal(Signal::STOP);
    assert!(region.is_client_alive(1));
    drop(region);
    assert_eq!(files_in(directory.path()).len(), 2);
    actor.signal(Signal::CONT);
    actor.tell();
    actor.finish();
    assert!(files_in(directory.path()).is_empty());
}
