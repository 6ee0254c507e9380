//! What the region's tests share: directories, requests, and children that are this same program in another role.
#![allow(unreachable_pub, reason = "a module of test programs, which export nothing")]
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::io::{BufRead, BufReader, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use ecpool_core::Result;
use ecpool_core::geometry::GeometryRequest;
use ecpool_core::region::{Lifetime, OpenRequest, Phase, Region};

pub const MIB: u64 = 1 << 20;
const ROLE: &str = "ECPOOL_TEST_ROLE";
/// Nothing here takes a fraction of this; beyond it a test has hung.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A directory on tmpfs, for its owner alone.
pub fn scratch() -> tempfile::TempDir {
    let mine = std::fs::Permissions::from_mode(0o700);
    tempfile::Builder::new().prefix("ecpool-test-").permissions(mine).tempdir_in("/dev/shm").unwrap()
}

pub fn geometry(capacity: u64) -> GeometryRequest {
    GeometryRequest { capacity, block_size: 16384, segment_size: 1 << 30, num_slots: None }
}

pub fn go_on(_: Phase, _: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

pub fn open_sized(directory: &Path, name: &str, lifetime: Lifetime, capacity: u64) -> Result<Region> {
    let request = OpenRequest { directory: Some(directory), name, geometry: geometry(capacity), lifetime };
    Region::open(&request, &mut go_on)
}

pub fn open(directory: &Path, name: &str, lifetime: Lifetime) -> Result<Region> {
    open_sized(directory, name, lifetime, MIB)
}

pub fn files_in(directory: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A child process in a role; killed when dropped.
pub struct Actor {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Actor {
    /// This test program, running only its `child_role` test, as `role` with `arguments`.
    pub fn command(role: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        Self::prepare(&mut command, role, arguments);
        command
    }

    /// The same started by another program, which is given it as its last arguments.
    pub fn command_by(program: &[&str], role: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).arg(std::env::current_exe().unwrap());
        Self::prepare(&mut command, role, arguments);
        command
    }

    fn prepare(command: &mut Command, role: &str, arguments: &[&str]) {
        command
            .args(["--exact", "child_role", "--nocapture", "--test-threads=1"])
            .env(ROLE, [&[role], arguments].concat().join("\n"));
    }

    pub fn start(role: &str, arguments: &[&str]) -> Self {
        Self::spawn(Self::command(role, arguments))
    }

    pub fn spawn(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The next thing that the child says; `None` if it ended instead.
    pub fn hear(&mut self) -> Option<String> {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            // The test harness writes to the same stream, also without ending its line.
            if let Some((_, said)) = line.split_once("@say ") {
                return Some(said.trim().to_owned());
            }
            line.clear();
        }
        None
    }

    pub fn expect(&mut self, words: &str) {
        assert_eq!(self.hear().as_deref(), Some(words));
    }

    /// Lets the child's `listen` return.
    pub fn tell(&mut self) {
        writeln!(self.input, "go").unwrap();
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub fn kill(&mut self) -> ExitStatus {
        let _ = self.child.kill();
        self.child.wait().unwrap()
    }

    pub fn wait(&mut self) -> ExitStatus {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.child.kill();
        panic!("a child did not end by itself");
    }

    pub fn finish(&mut self) {
        let status = self.wait();
        assert!(status.success(), "{status}");
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In a child: its role and arguments. `None` in the process that runs the tests.
pub fn my_role() -> Option<Vec<String>> {
    let role = std::env::var(ROLE).ok()?;
    Some(role.split('\n').map(str::to_owned).collect())
}

/// In a child: says something to its parent.
pub fn say(words: &str) {
    println!("@say {words}");
    std::io::stdout().flush().unwrap();
}

/// In a child: waits for its parent's `tell`, or its death.
pub fn listen() {
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// Whether a helper program can do what a test needs; says why a test is left out if not.
pub fn can_run(program: &[&str], for_what: &str) -> bool {
    let can = Command::new(program[0])
        .args(&program[1..])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !can {
        eprintln!("left out: {for_what}: {} is not permitted here", program.join(" "));
    }
    can
}

/// Waits until something becomes true.
pub fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is() {
        assert!(begun.elapsed() < PATIENCE, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn region_file(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}.v{}.region", ecpool_core::geometry::LAYOUT_VERSION))
}

pub fn lock_file(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}.v{}.lock", ecpool_core::geometry::LAYOUT_VERSION))
}
