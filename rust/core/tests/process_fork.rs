//! What a fork does: the child may not use the region, and neither undoes nor prolongs what is the parent's.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(unsafe_code, reason = "fork")]

use std::path::Path;
use std::time::Duration;

use ecpool_core::Error;
use ecpool_core::region::{Lifetime, Region};

mod region_support;
use region_support::*;

const SOON: Duration = Duration::from_millis(100);

/// Runs `child` in a forked child that ends without any clean-up, and returns the child's process id. The caller is a
/// process without other threads that matter, so the child may use the allocator.
fn fork(child: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child runs `child` and ends by `_exit`; the threads of the test harness, which do not exist there,
    // hold no lock that it needs, because they only wait.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(99);
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(code) };
    }
    pid
}

fn exit_code(pid: i32) -> i32 {
    let mut status = 0;
    // SAFETY: `status` is writable.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status), "{status:#x}");
    libc::WEXITSTATUS(status)
}

#[test]
fn child_role() {
    let Some(role) = my_role() else { return };
    let directory = Path::new(&role[1]);
    match role[0].as_str() {
        "fork" => fork_and_use(directory),
        "leave child behind" => leave_child_behind(directory),
        "fork under the lock" => fork_under_the_lock(directory),
        other => panic!("unknown role {other}"),
    }
}

fn is_refused<T>(outcome: Result<T, Error>) -> bool {
    matches!(outcome, Err(Error::Closed(why)) if why.contains("fork"))
}

fn refuses_everything(region: &Region) -> i32 {
    let refusals = [
        is_refused(region.lock(SOON)),
        is_refused(region.try_lock()),
        is_refused(region.write_pieces(&[(0, 1)], b"x")),
        is_refused(region.read_pieces(&[(0, 1)], &mut [0])),
        is_refused(region.populate(1, &mut go_on)),
        is_refused(region.collapse_huge_pages(&mut go_on)),
        region.is_forked(),
        // Nothing may be reclaimed on a child's word.
        region.is_client_alive(77),
    ];
    refusals.iter().position(|refused| !refused).map_or(0, |index| index as i32 + 1)
}

fn fork_and_use(directory: &Path) {
    let region = open(directory, "r", Lifetime::Shared).unwrap();
    let mut region = Some(region);
    let pid = fork(|| {
        let code = refuses_everything(region.as_ref().unwrap());
        // Closing and dropping in the child leave the parent's file, lock and place alone.
        region.as_ref().unwrap().close();
        region = None;
        code
    });
    assert_eq!(exit_code(pid), 0);
    let region = region.unwrap();
    region.lock(SOON).unwrap().index_bytes()[0] = 7;
    assert_eq!(files_in(directory).len(), 2);
    let other = open(directory, "r", Lifetime::Shared).unwrap();
    assert!(other.is_client_alive(region.client().index));

    // A child can open the region anew, as a client of its own.
    let pid = fork(|| {
        let mine = open(directory, "r", Lifetime::Shared).unwrap();
        let seen = mine.lock(SOON).unwrap().index_bytes()[0];
        i32::from(seen != 7 || mine.client().index != 2 || mine.created())
    });
    assert_eq!(exit_code(pid), 0);
    say("done");
}

fn leave_child_behind(directory: &Path) {
    let region = open(directory, "r", Lifetime::Shared).unwrap();
    let _guard = region.lock(SOON).unwrap();
    let pid = fork(|| {
        std::thread::sleep(Duration::from_secs(30));
        0
    });
    say(&pid.to_string());
    listen();
}

fn fork_under_the_lock(directory: &Path) {
    let region = open(directory, "r", Lifetime::Shared).unwrap();
    let mut guard = Some(region.lock(SOON).unwrap());
    let pid = fork(|| {
        guard = None;
        0
    });
    assert_eq!(exit_code(pid), 0);
    let held = std::thread::scope(|scope| scope.spawn(|| region.try_lock().unwrap().is_none()).join().unwrap());
    assert!(held, "the child gave the parent's lock back");
    drop(guard);
    assert!(!region.try_lock().unwrap().unwrap().is_dirty());
    say("done");
}

#[test]
fn a_child_is_refused_and_changes_nothing_for_its_parent() {
    let directory = scratch();
    let mut actor = Actor::start("fork", &[directory.path().to_str().unwrap()]);
    actor.expect("done");
    actor.finish();
    assert!(files_in(directory.path()).is_empty());
}

#[test]
fn a_child_that_lives_on_does_not_make_its_dead_parent_look_alive() {
    let directory = scratch();
    let region = open(directory.path(), "r", Lifetime::Shared).unwrap();
    let mut actor = Actor::start("leave child behind", &[directory.path().to_str().unwrap()]);
    let child: i32 = actor.hear().unwrap().parse().unwrap();
    assert!(region.is_client_alive(1));
    actor.kill();
    // The child closes what it inherited before it does anything else, but it must have run at all.
    eventually("the parent's death", || !region.is_client_alive(1));
    assert!(region.lock(SOON).unwrap().is_dirty());
    let child = rustix::process::Pid::from_raw(child).unwrap();
    rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn a_child_born_under_the_lock_does_not_give_it_back() {
    let directory = scratch();
    let mut actor = Actor::start("fork under the lock", &[directory.path().to_str().unwrap()]);
    actor.expect("done");
    actor.finish();
}
