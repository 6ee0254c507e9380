//! The core of ecpool: a region of shared memory, the index that lives in it, and the step tracker.
//!
//! Layers, each knowing only those above it in this list:
//! [`region`] (files, mapping) and the cross-process lock, the only modules with `unsafe`;
//! [`index`] (slots, holds, extents, eviction: integer arithmetic over slices);
//! [`cache`] (an index on the heap or in a region, reached by key from any thread);
//! [`tracker`] (the clock of engine steps).

pub mod cache;
pub mod client;
pub mod counters;
pub mod dtype;
pub mod error;
mod fork;
pub mod geometry;
pub mod index;
pub mod liveness;
pub mod lock;
mod memo;
pub mod policy;
pub mod region;
mod sync;
pub mod tracker;

pub use error::{Error, Result};
