//! Runs a target on seeded random inputs without libFuzzer, or writes such inputs as a first corpus.
//!
//!     random run TARGET COUNT [FIRST-SEED]
//!     random seeds TARGET COUNT DIRECTORY

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ecpool_fuzz::{random_bytes, target};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["run", name, count] => run(name, count, "0"),
        ["run", name, count, first] => run(name, count, first),
        ["seeds", name, count, directory] => write_seeds(name, count, Path::new(directory)),
        _ => None,
    };
    if done.is_some() {
        return ExitCode::SUCCESS;
    }
    eprintln!("random run TARGET COUNT [FIRST-SEED] | random seeds TARGET COUNT DIRECTORY");
    ExitCode::FAILURE
}

/// Lengths from a few bytes to some hundreds of operations.
fn input(seed: u64) -> Vec<u8> {
    random_bytes(seed, 8 << (seed % 8))
}

fn run(name: &str, count: &str, first: &str) -> Option<()> {
    let (target, count, first) = (target(name)?, count.parse::<u64>().ok()?, first.parse::<u64>().ok()?);
    let mut slowest = (Duration::ZERO, first);
    for seed in first..first + count {
        let begun = Instant::now();
        target(&input(seed));
        slowest = slowest.max((begun.elapsed(), seed));
    }
    let (longest, seed) = slowest;
    println!("{name}: {count} inputs from seed {first}; the slowest, {seed}, took {longest:?}");
    Some(())
}

fn write_seeds(name: &str, count: &str, directory: &Path) -> Option<()> {
    let (_, count) = (target(name)?, count.parse::<u64>().ok()?);
    std::fs::create_dir_all(directory).ok()?;
    (0..count).try_for_each(|seed| std::fs::write(directory.join(format!("seed-{seed}")), input(seed)).ok())
}
