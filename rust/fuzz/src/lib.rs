//! What the fuzz targets do with their bytes. Each `run` panics if something is wrong, and returns soon.

pub mod header;
pub mod index;
pub mod operations;
mod poke;

/// A target by name, for tools that run without libFuzzer.
pub fn target(name: &str) -> Option<fn(&[u8])> {
    match name {
        "header" => Some(header::run),
        "index" => Some(index::run),
        "operations" => Some(operations::run),
        _ => None,
    }
}

/// Random bytes that are the same for the same seed, and the same everywhere.
pub fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut reader = blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof();
    reader.fill(&mut bytes);
    bytes
}
