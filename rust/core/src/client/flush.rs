//! Flushing: what was stored in a namespace before is found no more, in whatever process.

use super::{Client, PATIENT};
use crate::error::Result;

/// Slots that a flush looks at per acquisition of the lock.
const SWEEP: u32 = 4096;

/// A namespace that was flushed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlushedNamespace {
    /// Its label.
    pub label: String,
    /// Entries that were dropped, those included that holds keep for the moment.
    pub dropped: u64,
}

impl Client {
    /// Flushes every namespace whose label (see [`crate::index::label_of`]) `wanted` accepts.
    ///
    /// All become unfindable at once; what is dropped afterwards only gives its room back.
    ///
    /// # Errors
    /// As [`Self::with`]; then nothing was flushed.
    pub fn flush(&self, wanted: impl Fn(&str) -> bool) -> Result<Vec<FlushedNamespace>> {
        let found = self.with(PATIENT, |index| {
            let found = index.namespaces_by_label(&wanted);
            for (namespace, _) in &found {
                index.raise_epoch(namespace)?;
            }
            Ok(found)
        })?;
        let sweep = |(namespace, label): (crate::index::NamespaceKey, String)| FlushedNamespace {
            label,
            dropped: self.sweep_flushed(namespace.row),
        };
        Ok(found.into_iter().map(sweep).collect())
    }

    /// Drops the entries of a namespace whose epoch was raised; returns how many. What is not dropped now, since the lock
    /// cannot be had, is unfindable all the same, and dropped on sight or evicted.
    pub(crate) fn sweep_flushed(&self, row: u32) -> u64 {
        let (mut dropped, mut next) = (0, Some(0));
        while let Some(from) = next {
            let Ok((count, rest)) = self.with(PATIENT, |index| index.sweep_flushed(row, from, SWEEP)) else { break };
            (dropped, next) = (dropped + count, rest);
        }
        dropped
    }
}
