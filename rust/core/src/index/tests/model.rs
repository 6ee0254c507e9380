//! A naive model of the index: lists, loops, and nothing derived.

use std::collections::BTreeSet;

use crate::index::ClaimOutcome;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Writing,
    Ready,
    Doomed,
    Orphaned,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Lease,
    Pin(u32),
    Load,
    Save,
}

#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) number: u64,
    pub(super) key: u8,
    pub(super) state: State,
    pub(super) blocks: u32,
    pub(super) rows: u64,
}

#[derive(Debug, Clone)]
pub(super) struct Hold {
    pub(super) id: u64,
    pub(super) entry: u64,
    pub(super) owner: usize,
    pub(super) kind: Kind,
    pub(super) participants: BTreeSet<u32>,
    pub(super) claimed: BTreeSet<u32>,
    pub(super) completed: BTreeSet<u32>,
    pub(super) failed: bool,
}

/// What an allocation came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Begun {
    Yes,
    Exists,
    TooLarge,
    NoRoom,
}

#[derive(Debug, Clone)]
pub(super) struct Model {
    pub(super) num_blocks: u32,
    pub(super) num_slots: usize,
    pub(super) num_holds: usize,
    pub(super) entries: Vec<Entry>,
    pub(super) holds: Vec<Hold>,
    /// Numbers of the entries that are READY without a firm hold, the oldest first.
    pub(super) queue: Vec<u64>,
    next_number: u64,
}

impl Model {
    pub(super) fn new(num_blocks: u32, num_slots: usize, num_holds: usize) -> Self {
        Self { num_blocks, num_slots, num_holds, entries: vec![], holds: vec![], queue: vec![], next_number: 1 }
    }

    pub(super) fn free_blocks(&self) -> u32 {
        self.num_blocks - self.entries.iter().map(|e| e.blocks).sum::<u32>()
    }

    pub(super) fn evictable(&self) -> Vec<u64> {
        self.queue.iter().copied().filter(|n| !self.holds.iter().any(|h| h.entry == *n)).collect()
    }

    pub(super) fn find(&self, key: u8) -> Option<&Entry> {
        self.entries.iter().find(|e| e.key == key && matches!(e.state, State::Writing | State::Ready))
    }

    pub(super) fn entry(&self, number: u64) -> &Entry {
        self.entries.iter().find(|e| e.number == number).unwrap()
    }

    fn entry_mut(&mut self, number: u64) -> &mut Entry {
        self.entries.iter_mut().find(|e| e.number == number).unwrap()
    }

    fn is_firm(hold: &Hold) -> bool {
        hold.kind != Kind::Lease
    }

    fn has_firm(&self, entry: u64) -> bool {
        self.holds.iter().any(|h| h.entry == entry && Self::is_firm(h))
    }

    fn remove_entry(&mut self, number: u64) {
        self.entries.retain(|e| e.number != number);
        self.queue.retain(|n| *n != number);
    }

    pub(super) fn drop_entry(&mut self, number: u64) {
        if !self.holds.iter().any(|h| h.entry == number) {
            return self.remove_entry(number);
        }
        self.queue.retain(|n| *n != number);
        let entry = self.entry_mut(number);
        if matches!(entry.state, State::Writing | State::Ready) {
            entry.state = State::Doomed;
        }
    }

    pub(super) fn begin(&mut self, key: u8, blocks: u64, id: u64, owner: usize, participants: BTreeSet<u32>) -> Begun {
        let outcome = self.try_begin(key, blocks);
        if outcome == Begun::Yes {
            let number = self.next_number;
            self.next_number += 1;
            self.entries.push(Entry { number, key, state: State::Writing, blocks: blocks as u32, rows: 0 });
            self.hold(id, number, owner, Kind::Save, participants);
        }
        outcome
    }

    fn try_begin(&mut self, key: u8, blocks: u64) -> Begun {
        if self.find(key).is_some() {
            return Begun::Exists;
        }
        if blocks > u64::from(self.num_blocks) {
            return Begun::TooLarge;
        }
        let evictable = self.evictable();
        let reachable = self.free_blocks() + evictable.iter().map(|n| self.entry(*n).blocks).sum::<u32>();
        let has_slot = self.entries.len() < self.num_slots || !evictable.is_empty();
        if u64::from(reachable) < blocks || !has_slot || self.holds.len() == self.num_holds {
            return Begun::NoRoom;
        }
        for victim in evictable {
            if u64::from(self.free_blocks()) >= blocks && self.entries.len() < self.num_slots {
                break;
            }
            self.remove_entry(victim);
        }
        Begun::Yes
    }

    pub(super) fn hold(&mut self, id: u64, entry: u64, owner: usize, kind: Kind, participants: BTreeSet<u32>) {
        let hold = Hold {
            id,
            entry,
            owner,
            kind,
            participants,
            claimed: BTreeSet::new(),
            completed: BTreeSet::new(),
            failed: false,
        };
        if Self::is_firm(&hold) {
            self.queue.retain(|n| *n != entry);
        }
        self.holds.push(hold);
    }

    pub(super) fn hold_of(&self, id: u64) -> Option<&Hold> {
        self.holds.iter().find(|h| h.id == id)
    }

    pub(super) fn hold_mut(&mut self, id: u64) -> Option<&mut Hold> {
        self.holds.iter_mut().find(|h| h.id == id)
    }

    pub(super) fn end_hold(&mut self, id: u64) {
        let at = self.holds.iter().position(|h| h.id == id).unwrap();
        let hold = self.holds.remove(at);
        let entry = self.entry(hold.entry).clone();
        if Self::is_firm(&hold) && entry.state == State::Ready && !self.has_firm(entry.number) {
            self.queue.push(entry.number);
        }
        if entry.state == State::Doomed && !self.holds.iter().any(|h| h.entry == entry.number) {
            self.remove_entry(entry.number);
        }
    }

    pub(super) fn resolve_save(&mut self, id: u64, ok: bool) {
        let number = self.hold_of(id).unwrap().entry;
        if ok && self.entry(number).state == State::Writing {
            self.entry_mut(number).state = State::Ready;
            return self.end_hold(id);
        }
        self.end_hold(id);
        let gone =
            self.entries.iter().any(|e| e.number == number && matches!(e.state, State::Writing | State::Orphaned));
        if gone {
            self.remove_entry(number);
        }
    }

    pub(super) fn resolve_if_due(&mut self, id: u64) {
        let Some(hold) = self.hold_of(id) else { return };
        let awaited = if hold.failed { &hold.claimed } else { &hold.participants };
        let due = awaited.is_subset(&hold.completed);
        let (failed, by_itself) = (hold.failed, hold.participants.is_empty());
        match hold.kind {
            Kind::Load if due => self.end_hold(id),
            Kind::Save if due && failed => self.resolve_save(id, false),
            Kind::Save if due && !by_itself => self.resolve_save(id, true),
            _ => {}
        }
    }

    pub(super) fn dispatch(&mut self, id: u64, participants: BTreeSet<u32>) {
        let Some(hold) = self.hold_mut(id).filter(|h| h.kind == Kind::Lease) else { return };
        (hold.kind, hold.participants) = (Kind::Load, participants);
        let entry = hold.entry;
        self.queue.retain(|n| *n != entry);
        self.resolve_if_due(id);
    }

    pub(super) fn claim_load(&mut self, rank: u32, id: u64) -> ClaimOutcome {
        match self.hold_mut(id) {
            Some(hold)
                if hold.kind == Kind::Lease || (hold.kind == Kind::Load && hold.participants.contains(&rank)) =>
            {
                if hold.claimed.insert(rank) { ClaimOutcome::Claimed } else { ClaimOutcome::Repeated }
            }
            _ => ClaimOutcome::Refused,
        }
    }

    pub(super) fn claim_save(&mut self, rank: u32, id: u64, rows: u64, fits: bool) -> ClaimOutcome {
        let Some(hold) = self.hold_of(id).cloned() else { return ClaimOutcome::Refused };
        if hold.kind != Kind::Save || hold.failed || !hold.participants.contains(&rank) {
            return ClaimOutcome::Refused;
        }
        if hold.claimed.contains(&rank) {
            return ClaimOutcome::Repeated;
        }
        let entry = self.entry(hold.entry).clone();
        if entry.state != State::Writing || (!hold.claimed.is_empty() && entry.rows != rows) {
            return ClaimOutcome::Refused;
        }
        if !fits {
            self.hold_mut(id).unwrap().failed = true;
            self.resolve_if_due(id);
            return ClaimOutcome::TooLarge;
        }
        self.entry_mut(entry.number).rows = rows;
        self.hold_mut(id).unwrap().claimed.insert(rank);
        ClaimOutcome::Claimed
    }

    pub(super) fn complete(&mut self, rank: u32, id: u64, ok: bool) {
        let Some(hold) = self.hold_mut(id) else { return };
        if hold.kind == Kind::Save && !ok && hold.participants.contains(&rank) {
            hold.failed = true;
            hold.claimed.insert(rank);
        }
        if hold.claimed.contains(&rank) {
            hold.completed.insert(rank);
        }
        self.resolve_if_due(id);
    }

    pub(super) fn close_unclaimed(&mut self, id: u64) -> bool {
        let Some(hold) = self.hold_mut(id) else { return false };
        match hold.kind {
            Kind::Save if hold.claimed != hold.participants => hold.failed = true,
            Kind::Load => hold.participants = hold.participants.intersection(&hold.claimed).copied().collect(),
            _ => {}
        }
        self.resolve_if_due(id);
        self.hold_of(id).is_some()
    }

    /// The client is dead: what nobody else relied on ends; true when nothing is left to wait for.
    pub(super) fn bury(&mut self, client: usize) -> bool {
        let mut left = false;
        for hold in self.holds.clone().into_iter().filter(|h| h.owner == client) {
            match hold.kind {
                Kind::Pin(_) => self.end_hold(hold.id),
                Kind::Lease if hold.claimed.is_empty() => self.end_hold(hold.id),
                Kind::Save if !hold.participants.is_empty() && hold.claimed.is_empty() => {
                    self.resolve_save(hold.id, false);
                }
                Kind::Save => {
                    self.entry_mut(hold.entry).state = State::Orphaned;
                    left = true;
                }
                _ => left = true,
            }
        }
        !left
    }

    pub(super) fn release(&mut self, client: usize) {
        for hold in self.holds.clone().into_iter().filter(|h| h.owner == client) {
            match hold.kind {
                Kind::Save => self.resolve_save(hold.id, false),
                _ => self.end_hold(hold.id),
            }
        }
    }
}
