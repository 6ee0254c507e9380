//! The operations that random tests choose from, each done to the index and to the model.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::harness::{BLOCK, Harness, NUM_KEYS, digest};
use super::model::{Begun, Kind, State};
use crate::dtype;
use crate::index::{BeginSave, Expected, SaveRequest, SaveShape, SaveSkip};

#[derive(Debug, Clone)]
pub(super) enum Operation {
    Alloc { client: usize, key: u8, blocks: u64 },
    MarkReady { client: usize, key: u8 },
    Discard { client: usize, key: u8 },
    Pin { client: usize, key: u8 },
    Unpin { client: usize, key: u8 },
    Lease { client: usize, key: u8, rows: Option<u64> },
    EndLease { id: usize },
    Dispatch { id: usize, ranks: u64 },
    BeginSave { client: usize, key: u8, rows: u64, ranks: u64 },
    ClaimSave { id: usize, rank: u32, rows: u64 },
    ClaimLoad { id: usize, rank: u32 },
    Complete { id: usize, rank: u32, ok: bool },
    Withdraw { id: usize },
    CloseUnclaimed { id: usize },
    Flush,
    Die { client: usize },
}

pub(super) fn operation() -> impl Strategy<Value = Operation> {
    let (client, key, id, rank) = (0..2usize, 0..NUM_KEYS, 0..12usize, 0..3u32);
    prop_oneof![
        4 => (client.clone(), key.clone(), 0..14u64).prop_map(|(client, key, blocks)| Operation::Alloc { client, key, blocks }),
        4 => (client.clone(), key.clone()).prop_map(|(client, key)| Operation::MarkReady { client, key }),
        1 => (client.clone(), key.clone()).prop_map(|(client, key)| Operation::Discard { client, key }),
        2 => (client.clone(), key.clone()).prop_map(|(client, key)| Operation::Pin { client, key }),
        3 => (client.clone(), key.clone()).prop_map(|(client, key)| Operation::Unpin { client, key }),
        4 => (client.clone(), key.clone(), prop::option::weighted(0.3, 1..4u64)).prop_map(|(client, key, rows)| Operation::Lease { client, key, rows }),
        2 => id.clone().prop_map(|id| Operation::EndLease { id }),
        3 => (id.clone(), 0..8u64).prop_map(|(id, ranks)| Operation::Dispatch { id, ranks }),
        4 => (client.clone(), key, 1..4u64, 1..8u64).prop_map(|(client, key, rows, ranks)| Operation::BeginSave { client, key, rows, ranks }),
        4 => (id.clone(), rank.clone(), 1..5u64).prop_map(|(id, rank, rows)| Operation::ClaimSave { id, rank, rows }),
        4 => (id.clone(), rank.clone()).prop_map(|(id, rank)| Operation::ClaimLoad { id, rank }),
        6 => (id.clone(), rank, prop::bool::weighted(0.9)).prop_map(|(id, rank, ok)| Operation::Complete { id, rank, ok }),
        1 => id.clone().prop_map(|id| Operation::Withdraw { id }),
        1 => id.prop_map(|id| Operation::CloseUnclaimed { id }),
        1 => Just(Operation::Flush),
        1 => client.prop_map(|client| Operation::Die { client }),
    ]
}

fn bits(mask: u64) -> BTreeSet<u32> {
    (0..64).filter(|rank| mask & (1 << rank) != 0).collect()
}

pub(super) fn shape(rows: u64) -> SaveShape {
    SaveShape::new(&[rows, 2 * BLOCK / 2], dtype::by_name("bfloat16").unwrap()).unwrap()
}

impl Harness {
    fn id(&self, number: usize) -> u64 {
        let recent = self.ids.len().saturating_sub(12);
        self.ids.get(recent + number).copied().unwrap_or(0x7777_0000_0003)
    }

    pub(super) fn request(&self, client: usize, key: u8, rows: u64, participants: u64) -> SaveRequest<'static> {
        let row_bytes = 2 * BLOCK;
        let owner = self.clients[client];
        SaveRequest { key: "key", digest: digest(key), rows, row_bytes, modality: 0, participants, owner }
    }

    /// Does the operation to the index alone, as a crash test needs it.
    pub(super) fn do_to_index(&mut self, operation: &Operation) {
        let namespace = self.namespace();
        let ids: Vec<u64> = (0..12).map(|n| self.id(n)).collect();
        let owners = self.clients;
        let request = |harness: &Self| match *operation {
            Operation::Alloc { client, key, .. } => Some(harness.request(client, key, 0, 0)),
            Operation::BeginSave { client, key, rows, ranks } => Some(harness.request(client, key, rows, ranks)),
            _ => None,
        };
        let request = request(self);
        let mut index = self.memory.index();
        match *operation {
            Operation::Alloc { blocks, .. } => drop(index.alloc(&request.unwrap(), &namespace, blocks).unwrap()),
            Operation::BeginSave { .. } => drop(index.begin_save(&request.unwrap(), &namespace).unwrap()),
            Operation::MarkReady { client, key } => {
                let _ = index.end_writing(&digest(key), &namespace, owners[client], true).unwrap();
            }
            Operation::Discard { client, key } => {
                let _ = index.end_writing(&digest(key), &namespace, owners[client], false).unwrap();
            }
            Operation::Pin { client, key } => {
                let _ = index.pin(&digest(key), &namespace, owners[client]).unwrap();
            }
            Operation::Unpin { client, key } => {
                let _ = index.unpin(&digest(key), &namespace, owners[client]).unwrap();
            }
            Operation::Lease { client, key, rows } => {
                drop(
                    index
                        .lease(&digest(key), &namespace, &Expected { rows, ..Expected::default() }, owners[client])
                        .unwrap(),
                );
            }
            Operation::EndLease { id } => index.end_lease(ids[id]).unwrap(),
            Operation::Dispatch { id, ranks } => index.dispatch_load(ids[id], ranks).unwrap(),
            Operation::ClaimSave { id, rank, rows } => drop(index.claim_save(rank, ids[id], &shape(rows)).unwrap()),
            Operation::ClaimLoad { id, rank } => drop(index.claim_load(rank, ids[id]).unwrap()),
            Operation::Complete { id, rank, ok } => index.complete(rank, ids[id], ok).unwrap(),
            Operation::Withdraw { id } => index.withdraw(ids[id]).unwrap(),
            Operation::CloseUnclaimed { id } => drop(index.close_unclaimed(ids[id]).unwrap()),
            Operation::Flush => {
                index.raise_epoch(&namespace).unwrap();
                index.sweep_flushed(namespace.row, 0, 1000).unwrap();
            }
            Operation::Die { client } => index.deregister_client(owners[client]).unwrap(),
        }
    }

    /// Does the operation to both, comparing what each says.
    pub(super) fn apply(&mut self, operation: &Operation) {
        let namespace = self.namespace();
        match *operation {
            Operation::Alloc { client, key, blocks } => {
                let request = self.request(client, key, 0, 0);
                let begun = self.memory.index().alloc(&request, &namespace, blocks).unwrap();
                if !self.model_writers(client, key).1.is_empty() {
                    assert!(
                        matches!(begun, BeginSave::Skipped(SaveSkip::Exists)),
                        "its flushed writer is still at work"
                    );
                    return;
                }
                let begun = outcome_of(begun, |entry| (entry.id, entry.num_blocks));
                self.compare_begun(begun, client, key, blocks, 0);
            }
            Operation::BeginSave { client, key, rows, ranks } => {
                let request = self.request(client, key, rows, ranks);
                let begun = self.memory.index().begin_save(&request, &namespace).unwrap();
                let begun = outcome_of(begun, |entry| (entry.id, entry.num_blocks));
                self.compare_begun(begun, client, key, rows * 2, ranks);
            }
            Operation::MarkReady { client, key } | Operation::Discard { client, key } => {
                self.apply_own_writing(operation, client, key);
            }
            Operation::Pin { client, key } => self.apply_pin(client, key),
            Operation::Unpin { client, key } => self.apply_unpin(client, key),
            Operation::Lease { client, key, rows } => self.apply_lease(client, key, rows),
            Operation::EndLease { id } => {
                let id = self.id(id);
                self.memory.index().end_lease(id).unwrap();
                if self.model.hold_of(id).is_some_and(|h| h.kind == Kind::Lease && h.claimed.is_empty()) {
                    self.model.end_hold(id);
                }
            }
            Operation::Dispatch { id, ranks } => {
                let id = self.id(id);
                self.memory.index().dispatch_load(id, ranks).unwrap();
                self.model.dispatch(id, bits(ranks));
            }
            Operation::ClaimSave { id, rank, rows } => {
                let id = self.id(id);
                let outcome = self.memory.index().claim_save(rank, id, &shape(rows)).unwrap();
                let blocks = self.model.hold_of(id).map_or(0, |h| self.model.entry(h.entry).blocks);
                let fits = rows * 2 <= u64::from(blocks);
                assert_eq!(outcome, self.model.claim_save(rank, id, rows, fits));
            }
            Operation::ClaimLoad { id, rank } => {
                let id = self.id(id);
                let outcome = self.memory.index().claim_load(rank, id).unwrap();
                assert_eq!(outcome, self.model.claim_load(rank, id));
            }
            Operation::Complete { id, rank, ok } => {
                let id = self.id(id);
                self.memory.index().complete(rank, id, ok).unwrap();
                self.model.complete(rank, id, ok);
            }
            Operation::Withdraw { id } => {
                let id = self.id(id);
                self.memory.index().withdraw(id).unwrap();
                if self.model.hold_of(id).is_some_and(|h| h.kind == Kind::Save && h.claimed.is_empty()) {
                    self.model.resolve_save(id, false);
                }
            }
            Operation::CloseUnclaimed { id } => {
                let id = self.id(id);
                let open = self.memory.index().close_unclaimed(id).unwrap();
                assert_eq!(open, self.model.close_unclaimed(id));
            }
            Operation::Flush => self.apply_flush(),
            Operation::Die { client } => self.apply_death(client),
        }
    }

    /// `begun` is the new save's id and blocks, or why there is none.
    fn compare_begun(&mut self, begun: Result<(u64, u32), SaveSkip>, client: usize, key: u8, blocks: u64, ranks: u64) {
        let (outcome, id) = match begun {
            Ok((id, _)) => (Begun::Yes, id),
            Err(SaveSkip::Exists) => (Begun::Exists, 0),
            Err(SaveSkip::TooLarge) => (Begun::TooLarge, 0),
            Err(SaveSkip::NoRoom) => (Begun::NoRoom, 0),
            Err(SaveSkip::Empty) => panic!("nothing empty was asked for"),
        };
        assert_eq!(outcome, self.model.begin(key, blocks, id, client, bits(ranks)));
        if let Ok((_, num_blocks)) = begun {
            assert_eq!(u64::from(num_blocks), blocks);
            assert!(!self.ids.contains(&id), "ids never repeat");
            self.ids.push(id);
        }
    }

    fn apply_own_writing(&mut self, operation: &Operation, client: usize, key: u8) {
        let (namespace, owner) = (self.namespace(), self.clients[client]);
        let ready = matches!(operation, Operation::MarkReady { .. });
        let (own, of_doomed) = self.model_writers(client, key);
        if own.is_none() && of_doomed.len() > 1 {
            return;
        }
        let mut index = self.memory.index();
        let outcome = index.end_writing(&digest(key), &namespace, owner, ready).unwrap();
        assert_eq!(outcome.is_ok(), own.is_some() || !of_doomed.is_empty());
        if let Some(id) = own.or(of_doomed.first().copied()) {
            self.model.resolve_save(id, ready);
        }
    }

    /// The hold under which this client writes a findable entry by itself, and those of its doomed entries.
    fn model_writers(&self, client: usize, key: u8) -> (Option<u64>, Vec<u64>) {
        let of = |state: State| {
            let entries = self.model.entries.iter().filter(move |e| e.key == key && e.state == state);
            entries.filter_map(|entry| {
                let own = |h: &&super::model::Hold| {
                    h.entry == entry.number && h.owner == client && h.kind == Kind::Save && h.participants.is_empty()
                };
                self.model.holds.iter().find(own).map(|h| h.id)
            })
        };
        (of(State::Writing).next(), of(State::Doomed).collect())
    }

    fn apply_pin(&mut self, client: usize, key: u8) {
        let (namespace, owner) = (self.namespace(), self.clients[client]);
        let pinned = self.memory.index().pin(&digest(key), &namespace, owner).unwrap().is_ok();
        let ready = self.model.find(key).filter(|e| e.state == State::Ready).map(|e| e.number);
        let own = ready.and_then(|entry| self.model_pin(entry, client));
        let mut of_doomed = self.model.entries.iter().filter(|e| e.key == key && e.state == State::Doomed);
        let pinned_before = of_doomed.any(|e| self.model_pin(e.number, client).is_some());
        let room = self.model.holds.len() < self.model.num_holds && !pinned_before;
        let expected = ready.is_some() && (own.is_some() || room);
        assert_eq!(pinned, expected);
        match (own, ready) {
            (Some(id), _) => {
                if let Kind::Pin(count) = &mut self.model.hold_mut(id).unwrap().kind {
                    *count += 1;
                }
            }
            (None, Some(entry)) if pinned => {
                self.pins_made += 1;
                let id = u64::MAX - self.pins_made;
                self.model.hold(id, entry, client, Kind::Pin(1), BTreeSet::new());
            }
            _ => {}
        }
    }

    fn model_pin(&self, entry: u64, client: usize) -> Option<u64> {
        let own = |h: &&super::model::Hold| h.entry == entry && h.owner == client && matches!(h.kind, Kind::Pin(_));
        self.model.holds.iter().find(own).map(|h| h.id)
    }

    fn apply_unpin(&mut self, client: usize, key: u8) {
        let (namespace, owner) = (self.namespace(), self.clients[client]);
        let findable = self.model.find(key).map(|e| e.number);
        let own = findable.and_then(|entry| self.model_pin(entry, client));
        let doomed: Vec<u64> =
            self.model.entries.iter().filter(|e| e.key == key && e.state == State::Doomed).map(|e| e.number).collect();
        let of_doomed: Vec<u64> = doomed.iter().filter_map(|entry| self.model_pin(*entry, client)).collect();
        if own.is_none() && of_doomed.len() > 1 {
            return;
        }
        let outcome = self.memory.index().unpin(&digest(key), &namespace, owner).unwrap();
        let pin = own.or(of_doomed.first().copied());
        assert_eq!(outcome.is_ok(), pin.is_some());
        let Some(id) = pin else { return };
        let Kind::Pin(count) = &mut self.model.hold_mut(id).unwrap().kind else { unreachable!() };
        *count -= 1;
        if *count == 0 {
            self.model.end_hold(id);
        }
    }

    fn apply_lease(&mut self, client: usize, key: u8, rows: Option<u64>) {
        let (namespace, owner) = (self.namespace(), self.clients[client]);
        let lease = self
            .memory
            .index()
            .lease(&digest(key), &namespace, &Expected { rows, ..Expected::default() }, owner)
            .unwrap();
        let ready = self.model.find(key).filter(|e| e.state == State::Ready).cloned();
        let found_rows = |entry: &super::model::Entry| if entry.rows == 0 { 1 } else { entry.rows };
        match ready {
            Some(entry) if rows.is_some_and(|rows| rows != found_rows(&entry)) => {
                assert!(lease.is_none());
                self.model.drop_entry(entry.number);
            }
            Some(entry) if self.model.holds.len() < self.model.num_holds => {
                let id = lease.unwrap().id;
                self.ids.push(id);
                self.model.hold(id, entry.number, client, Kind::Lease, BTreeSet::new());
            }
            _ => assert!(lease.is_none()),
        }
    }

    fn apply_flush(&mut self) {
        let namespace = self.namespace();
        let mut index = self.memory.index();
        index.raise_epoch(&namespace).unwrap();
        index.sweep_flushed(namespace.row, 0, 1000).unwrap();
        let live: Vec<u64> = self.model.entries.iter().map(|e| e.number).collect();
        live.into_iter().for_each(|number| self.model.drop_entry(number));
    }

    /// The client dies; after the quarantine its record is released and a new client takes its place.
    fn apply_death(&mut self, client: usize) {
        let mut index = self.memory.index();
        index.deregister_client(self.clients[client]).unwrap();
        self.model.bury(client);
        self.compare();
        let mut index = self.memory.index();
        index.reclaim(10, 5, &mut |_, _| true).unwrap();
        index.reclaim(20, 5, &mut |_, _| true).unwrap();
        self.model.release(client);
        let role = crate::index::Role::Pool;
        let next = index.register_client(&super::harness::registration(role, 0)).unwrap().unwrap();
        self.clients[client] = next;
    }
}

fn outcome_of<T>(begun: BeginSave<T>, wanted: impl FnOnce(T) -> (u64, u32)) -> Result<(u64, u32), SaveSkip> {
    match begun {
        BeginSave::Begun(entry) => Ok(wanted(entry)),
        BeginSave::Skipped(skip) => Err(skip),
    }
}
