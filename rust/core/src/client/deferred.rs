//! What could not be given back in time: kept in this process, done by the next call that gets the lock, never dropped.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{Client, Store};
use crate::counters::Counter;
use crate::error::{Error, Result};
use crate::geometry::MAX_CLIENTS;
use crate::index::{Checked, Index, TransferId};

/// One operation that must happen, sooner or later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deferred {
    /// End a lease.
    EndLease(TransferId),
    /// Make a lease a load with these ranks.
    DispatchLoad(TransferId, u64),
    /// A rank has begun to copy out of an entry.
    ClaimLoad(u32, TransferId),
    /// A rank's copy is over, well or not.
    Complete(u32, TransferId, bool),
    /// Record the checksum of a save's bytes.
    SetChecksum(TransferId, u64),
    /// A leased entry's bytes fit their checksum, or not.
    Confirm(TransferId, bool),
    /// Drop a save of which no rank knows.
    Withdraw(TransferId),
    /// Let no further rank claim a transfer.
    CloseUnclaimed(TransferId),
    /// Declare a save ready.
    FinishSave(TransferId),
    /// Declare a load over.
    FinishLoad(TransferId),
    /// An entry's owner has filled it: the key's digest and the namespace's, as in the next two.
    MarkReady([u64; 4], [u64; 4]),
    /// An entry's owner will not fill it.
    Discard([u64; 4], [u64; 4]),
    /// End a pin.
    Unpin([u64; 4], [u64; 4]),
}

impl Deferred {
    /// How many claims it makes.
    fn claims(self) -> u64 {
        u64::from(matches!(self, Deferred::ClaimLoad(..)))
    }
}

impl Client {
    /// Does `operation` now if the lock can be had within `wait`, and else with the next call.
    ///
    /// # Errors
    /// `Closed` after a close or in a forked child, where nothing of the kind is left to do.
    pub fn do_or_defer(&self, wait: Duration, operation: Deferred) -> Result<()> {
        match self.with(wait, |index| self.perform(index, operation)) {
            Err(Error::Busy { .. }) => {
                self.defer(operation);
                Ok(())
            }
            outcome => outcome,
        }
    }

    /// Keeps `operation` for the next call that gets the lock.
    pub fn defer(&self, operation: Deferred) {
        // Who has left owes nothing, and its counters may be another client's by now.
        if self.left.load(Ordering::Acquire) {
            return;
        }
        self.count(Counter::Deferred, 1);
        self.count(Counter::ClaimsPutOff, operation.claims());
        let mut queue = self.deferred.lock().unwrap_or_else(PoisonError::into_inner);
        queue.push_back(operation);
        self.has_deferred.store(queue.len() as u64, Ordering::Release);
    }

    /// Operations that wait for a call that gets the lock.
    pub fn deferred_len(&self) -> u64 {
        self.has_deferred.load(Ordering::Acquire)
    }

    /// Does what was put off, oldest first. What meets damage is tried again after the rebuild that follows.
    #[inline]
    pub(super) fn settle_deferred(&self, index: &mut Index<'_>) -> Checked<()> {
        if self.deferred_len() == 0 { Ok(()) } else { self.settle_all(index) }
    }

    #[cold]
    fn settle_all(&self, index: &mut Index<'_>) -> Checked<()> {
        let mut queue = self.deferred.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(operation) = queue.front() {
            self.perform(index, *operation)?;
            self.count(Counter::ClaimsMadeLate, operation.claims());
            queue.pop_front();
            self.has_deferred.store(queue.len() as u64, Ordering::Release);
        }
        Ok(())
    }

    /// Lets no further rank claim a transfer; returns whether it is still open.
    ///
    /// A load is left as it is while its group may have claims that are not recorded yet: such a rank copies already, and
    /// without it the load would end under its copy.
    pub(crate) fn close_unclaimed(&self, index: &mut Index<'_>, id: TransferId) -> Checked<bool> {
        if index.is_unclaimed_load(id)? && self.group_owes_claims(index)? {
            return Ok(true);
        }
        index.close_unclaimed(id)
    }

    /// Whether a living client of this one's group has put claims off. Who did so counted it before its copy began, and counts
    /// it as made under the lock.
    fn group_owes_claims(&self, index: &Index<'_>) -> Checked<bool> {
        let Store::Region(region) = &self.store else { return Ok(owes_claims(|which| self.counter(which))) };
        index.any_of_group(self.me, &mut |byte, generation| {
            let place = u16::try_from(byte).ok().filter(|place| *place < MAX_CLIENTS);
            place.is_some_and(|place| owes_claims(|which| region.counter(place, which)))
                && self.is_alive(byte, generation)
        })
    }

    pub(crate) fn perform(&self, index: &mut Index<'_>, operation: Deferred) -> Checked<()> {
        match operation {
            Deferred::EndLease(id) => index.end_lease(id),
            Deferred::DispatchLoad(id, ranks) => index.dispatch_load(id, ranks),
            Deferred::ClaimLoad(rank, id) => index.claim_load(rank, id).map(drop),
            Deferred::Complete(rank, id, ok) => index.complete(rank, id, ok),
            Deferred::SetChecksum(id, checksum) => index.set_checksum(id, checksum),
            Deferred::Confirm(id, fits) => index.confirm(id, fits),
            Deferred::Withdraw(id) => index.withdraw(id),
            Deferred::CloseUnclaimed(id) => self.close_unclaimed(index, id).map(drop),
            Deferred::FinishSave(id) => index.finish_save(id),
            Deferred::FinishLoad(id) => index.finish_load(id),
            Deferred::MarkReady(digest, namespace) => match index.namespace_by_digest(&namespace)? {
                Some(namespace) => index.end_writing(&digest, &namespace, self.me, true).map(drop),
                None => Ok(()),
            },
            Deferred::Discard(digest, namespace) => match index.namespace_by_digest(&namespace)? {
                Some(namespace) => index.end_writing(&digest, &namespace, self.me, false).map(drop),
                None => Ok(()),
            },
            Deferred::Unpin(digest, namespace) => match index.namespace_by_digest(&namespace)? {
                Some(namespace) => index.unpin(&digest, &namespace, self.me).map(drop),
                None => Ok(()),
            },
        }
    }
}

fn owes_claims<'c>(counter: impl Fn(usize) -> &'c AtomicU64) -> bool {
    let read = |which: Counter| counter(which as usize).load(Ordering::Relaxed);
    read(Counter::ClaimsMadeLate) != read(Counter::ClaimsPutOff)
}
