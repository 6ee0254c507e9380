//! Commit words: the one field of a record that says whether the rest of it counts.
//!
//! A process can be killed between any two stores. Going down, a record's commit word is stored first and
//! fenced, before any other field is touched; coming up, it is stored last. What a rebuild finds committed is
//! therefore complete. The words are atomics because the compiler may delete the first of two plain stores.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use zerocopy::{FromBytes, IntoBytes, KnownLayout};

use super::crash::crash_point;

/// Which table a record is in: mixed into the check bits, so that bytes of one table do not pass for another's.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Table {
    Slots = 1,
    Holds = 2,
    Clients = 3,
    Namespaces = 4,
}

/// What a record's check bits depend on besides its state and generation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Whose {
    pub(crate) table: Table,
    pub(crate) index: u32,
    /// Of a record that is not free: fields that the check bits vouch for.
    pub(crate) also: u64,
}

impl Table {
    /// The record of this number, of which the check bits vouch for no other field.
    pub(crate) fn record(self, index: u32) -> Whose {
        Whose { table: self, index, also: 0 }
    }
}

/// What a commit word says. State 0 is "free" in every table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Commit {
    pub(crate) state: u8,
    pub(crate) generation: u32,
}

impl Commit {
    /// The state `state` of the next generation, which is never 0.
    pub(crate) fn next_generation(self, state: u8) -> Self {
        let generation = self.generation.wrapping_add(1).max(1);
        Self { state, generation }
    }

    pub(crate) fn with_state(self, state: u8) -> Self {
        Self { state, ..self }
    }

    fn encode(self, whose: Whose) -> u64 {
        if self == Self::default() {
            return 0;
        }
        let check = check_bits(whose, self);
        (u64::from(self.generation) << 32) | (check << 8) | u64::from(self.state)
    }

    fn decode(word: u64, whose: Whose) -> Option<Self> {
        let commit = Self { state: word as u8, generation: (word >> 32) as u32 };
        (commit.encode(whose) == word).then_some(commit)
    }
}

fn check_bits(whose: Whose, commit: Commit) -> u64 {
    let Whose { table, index, also } = whose;
    // The other fields of a free record may change before it is committed again.
    let also = if commit.state == 0 { 0 } else { also.wrapping_mul(0xd6e8_feb8_6659_fd93) };
    let seed = (u64::from(commit.generation) << 32) ^ (u64::from(index) << 11) ^ (u64::from(commit.state) << 3);
    let mixed = (seed ^ also ^ (also >> 32) ^ table as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40
}

/// A commit word in a region.
#[derive(Debug, FromBytes, IntoBytes, KnownLayout)]
#[repr(transparent)]
pub(crate) struct CommitWord(AtomicU64);

impl CommitWord {
    /// What the word says, or `None` where its check bits do not fit.
    pub(crate) fn load(&self, whose: Whose) -> Option<Commit> {
        Commit::decode(self.0.load(Ordering::Acquire), whose)
    }

    /// What the word says where it is known to be good, for records that were validated before.
    pub(crate) fn load_or_free(&self, whose: Whose) -> Commit {
        self.load(whose).unwrap_or_default()
    }

    /// Whether nothing was ever stored in the word.
    pub(crate) fn is_untouched(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }

    /// The generation bits of a word whose check bits do not fit.
    pub(crate) fn raw_generation(&self) -> u32 {
        (self.0.load(Ordering::Relaxed) >> 32) as u32
    }

    /// Stores `commit` before anything that follows in program order.
    pub(crate) fn lower(&self, whose: Whose, commit: Commit) {
        crash_point();
        self.0.store(commit.encode(whose), Ordering::Relaxed);
        fence(Ordering::AcqRel);
        crash_point();
    }

    /// Stores `commit` after everything that precedes in program order.
    pub(crate) fn raise(&self, whose: Whose, commit: Commit) {
        crash_point();
        self.0.store(commit.encode(whose), Ordering::Release);
        fence(Ordering::AcqRel);
        crash_point();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zero_word_is_free_and_every_other_word_needs_its_check_bits() {
        let whose = Whose { also: 5, ..Table::Slots.record(7) };
        assert_eq!(Commit::decode(0, whose), Some(Commit::default()));
        let commit = Commit { state: 2, generation: 9 };
        let word = commit.encode(whose);
        assert_eq!(Commit::decode(word, whose), Some(commit));
        assert_eq!(Commit::decode(word, Whose { index: 8, ..whose }), None, "of another record");
        assert_eq!(Commit::decode(word, Whose { table: Table::Holds, ..whose }), None, "of another table");
        for bit in 0..64 {
            assert_eq!(Commit::decode(word ^ (1 << bit), whose), None, "bit {bit}");
            assert_eq!(Commit::decode(word, Whose { also: 5 ^ (1 << bit), ..whose }), None, "bit {bit} beside it");
        }
    }

    #[test]
    fn the_other_fields_of_a_free_record_may_change() {
        let free = Commit { state: 0, generation: 9 };
        let whose = Whose { also: 5, ..Table::Slots.record(7) };
        assert_eq!(Commit::decode(free.encode(whose), Whose { also: 6, ..whose }), Some(free));
    }

    #[test]
    fn generations_wrap_around_zero() {
        let last = Commit { state: 0, generation: u32::MAX };
        assert_eq!(last.next_generation(1).generation, 1);
    }
}
