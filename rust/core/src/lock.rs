//! The one lock of a region: mutual exclusion between all threads of all clients, which survives the
//! death of any of them.
//!
//! # The word
//!
//! One `u32` in the region, 0 when free, otherwise the holder and whether somebody may be asleep:
//!
//! | bit 31 | bits 12 to 30 | bits 0 to 11 |
//! | --- | --- | --- |
//! | waiters | low 19 bits of the holder's generation, never 0 | the holder's index + 1 |
//!
//! It names a *client*, not a process or thread: process and thread ids repeat between pid namespaces
//! that share the file, client tags do not. The threads of one client exclude each other through the
//! same word, since it can be taken only from 0.
//!
//! # The protocol
//!
//! - **Take**: compare-and-swap 0 → me. Free, this is the whole cost: no system call.
//! - **Give back**: swap to 0; if the old value had the waiters bit, wake one sleeper.
//! - **Wait**: spin briefly; ask whether the holder lives; note the deadline; set the waiters bit; sleep
//!   on the word for one slice at the most; begin again. Having slept, a client takes the word *with* the
//!   waiters bit, as others may be asleep still (at worst this costs one useless wake).
//! - **Take over**: if the holder is found dead, compare-and-swap exactly the word that was examined →
//!   me, and report the index as dirty.
//!
//! # Why it excludes
//!
//! A client's tag is settled under its liveness lock: it locks its byte, then raises the generation of
//! that place; from then until it has left for good it holds the byte. The holder `(i, g)` in the word is
//! *dead* if byte `i` is not locked by anyone, or generation `i` is not `g` any more. Either way the client
//! `(i, g)` has given its byte up, or never existed (a word of random bits), so none of its threads is or
//! will ever be inside, and the word cannot come to say `(i, g)` again. So when the compare-and-swap of a
//! takeover succeeds, the word has said `(i, g)` all the time since before the examination, hence
//! nobody else was inside either, and of several who try only one succeeds. (The generation has 19 bits
//! here: a dead word could be mistaken for a live one's after the same place was taken 2^19 times
//! with nobody touching the lock between.) The examination errs only to the side of "alive", for instance
//! while a successor has locked the byte and not yet raised the generation; the next slice sees it.
//!
//! A client leaves in an order that keeps this true for its own threads: it says that it is closed,
//! and then gives its byte up only while the word is not its own; a thread that takes the word looks
//! *afterwards* whether the client is closed, and backs out if so. All four accesses are sequentially
//! consistent, so at least one of the two sees the other. Backing out is a compare-and-swap, since the
//! byte may be gone by then and the word another's.
//!
//! # What a holder wrote is seen
//!
//! Give-back and take are a release and an acquire of the same word. A dead holder released nothing;
//! but its stores came before its death, the kernel freed its byte after that, and the examination read
//! the byte under the same kernel lock that freed it. What the dead holder left half done is for the new
//! one to repair, which is what the dirty flag is for. It is set by whoever takes over, and cleared only
//! when the repair is complete; if the repairer dies in turn, it still is set, and whoever dies between
//! taking over and setting the flag is itself taken over from.
//!
//! # Nobody waits for ever
//!
//! - A sleeper that was woken and killed before it could act has swallowed a wake: the next sleeper's slice
//!   ends, it finds the word free and takes it. Cost: one slice.
//! - A giver killed between its swap and its wake: the same.
//! - A holder killed: its byte is free at once, found before the first sleep or after the present slice.
//! - A holder stopped, or slow: alive, never robbed. The others give up at their deadlines.
//! - A waiters bit that nobody stands behind costs one wake.
//!
//! There is no fairness: a running thread may take the word before one that was just woken. Sections under the
//! lock are microseconds long, and every acquisition has a deadline.

use std::time::{Duration, Instant};

use crate::liveness::ClientTag;
use crate::sync::Word;

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

const WAITERS: u32 = 1 << 31;
const INDEX_BITS: u32 = 12;
const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;
const GENERATION_BITS: u32 = 19;
/// The part of a generation that fits in the word.
pub(crate) const GENERATION_MASK: u32 = (1 << GENERATION_BITS) - 1;

/// How long a waiter sleeps before it looks again: what a lost wake or a dead holder can cost.
pub(crate) const SLICE: Duration = Duration::from_millis(2);

/// A word's holder: the form that a client tag takes in the word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner(u32);

impl Owner {
    pub(crate) fn new(tag: ClientTag) -> Self {
        let generation = tag.generation & GENERATION_MASK;
        Self(generation << INDEX_BITS | (u32::from(tag.index) + 1))
    }

    fn of_word(word: u32) -> Self {
        Self(word & !WAITERS)
    }

    /// The holder's index, or `None` for a word that no client ever wrote.
    pub(crate) fn index(self) -> Option<u16> {
        let index = (self.0 & INDEX_MASK).checked_sub(1)?;
        u16::try_from(index).ok()
    }

    /// The low bits of the holder's generation.
    pub(crate) fn generation(self) -> u32 {
        self.0 >> INDEX_BITS & GENERATION_MASK
    }
}

/// Tells dead holders from live ones.
pub(crate) trait Owners {
    /// False only if no thread of `owner` is or will ever be under the lock.
    fn is_alive(&self, owner: Owner) -> bool;
}

/// How the word was come by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    /// From nobody: the last holder gave it back.
    Free,
    /// From a dead holder: what the lock guards may be half changed.
    FromDead,
}

/// Takes the word if it is free.
#[inline]
pub(crate) fn try_take(word: &impl Word, me: Owner) -> bool {
    word.compare_exchange(0, me.0).is_ok()
}

/// Takes the word if it is free or its holder is dead; never waits.
pub(crate) fn try_take_over(word: &impl Word, me: Owner, owners: &impl Owners) -> Option<Taken> {
    let seen = word.load();
    if seen == 0 {
        return try_take(word, me).then_some(Taken::Free);
    }
    if owners.is_alive(Owner::of_word(seen)) {
        return None;
    }
    let new = me.0 | seen & WAITERS;
    word.compare_exchange(seen, new).is_ok().then_some(Taken::FromDead)
}

/// Takes the word, waiting until `deadline` (`None`: for ever). `None` when the time is up.
#[cold]
pub(crate) fn take_by(word: &impl Word, me: Owner, owners: &impl Owners, deadline: Option<Instant>) -> Option<Taken> {
    // What is added to the word when taking it: the waiters bit once this thread has been a waiter.
    let mut mark = 0;
    loop {
        let seen = spin_while_taken(word);
        if seen == 0 {
            if word.compare_exchange(0, me.0 | mark).is_ok() {
                return Some(Taken::Free);
            }
            continue;
        }
        if !owners.is_alive(Owner::of_word(seen)) {
            if word.compare_exchange(seen, me.0 | seen & WAITERS | mark).is_ok() {
                return Some(Taken::FromDead);
            }
            continue;
        }
        let slice = next_slice(deadline)?;
        let marked = seen | WAITERS;
        if seen == marked || word.compare_exchange(seen, marked).is_ok() {
            word.wait(marked, slice);
            mark = WAITERS;
        }
    }
}

/// The last value seen: 0, or what it still was after spinning.
fn spin_while_taken<W: Word>(word: &W) -> u32 {
    for _ in 0..W::SPINS {
        if word.load() == 0 {
            return 0;
        }
        word.pause();
    }
    word.load()
}

fn next_slice(deadline: Option<Instant>) -> Option<Duration> {
    let Some(deadline) = deadline else { return Some(SLICE) };
    let left = deadline.saturating_duration_since(Instant::now());
    (!left.is_zero()).then(|| left.min(SLICE))
}

/// Gives the word back. The caller holds it, as a client that lives.
#[inline]
pub(crate) fn give_back(word: &impl Word) {
    if word.swap(0) & WAITERS != 0 {
        word.wake_one();
    }
}

/// Gives the word back if it is still `me`'s, who may count as dead already.
pub(crate) fn back_out(word: &impl Word, me: Owner) {
    loop {
        let seen = word.load();
        if Owner::of_word(seen) != me {
            return;
        }
        if word.compare_exchange(seen, 0).is_ok() {
            if seen & WAITERS != 0 {
                word.wake_one();
            }
            return;
        }
    }
}

/// Whether a thread of `me` holds the word.
pub(crate) fn is_held_by(word: &impl Word, me: Owner) -> bool {
    Owner::of_word(word.load()) == me
}
