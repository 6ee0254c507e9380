//! Sequences of operations, some of them stopped between two stores: nothing is lost, and no block has two owners.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use arbitrary::{Arbitrary, Unstructured};
use ecpool_core::cache::{EmbeddingCache, Item};
use ecpool_core::client::{Client, Deferred};
use ecpool_core::dtype;
use ecpool_core::index::crash::{Crash, CrashKind, arm};
use ecpool_core::index::{BeginSave, Expected, SaveShape};

const WAIT: Duration = Duration::from_secs(5);
const BLOCKS: u32 = 24;
const BLOCK: u64 = 4096;
const MOST_OPERATIONS: usize = 200;

#[derive(Debug, Arbitrary)]
enum Operation {
    Alloc {
        key: u8,
        blocks: u8,
    },
    MarkReady {
        key: u8,
    },
    Discard {
        key: u8,
    },
    Pin {
        key: u8,
    },
    Unpin {
        key: u8,
    },
    Lease {
        key: u8,
        rows: Option<u8>,
    },
    BeginSave {
        key: u8,
        rows: u8,
        ranks: u8,
    },
    Dispatch {
        id: u8,
        ranks: u8,
    },
    ClaimLoad {
        id: u8,
        rank: u8,
    },
    ClaimSave {
        id: u8,
        rank: u8,
        rows: u8,
    },
    Complete {
        id: u8,
        rank: u8,
        ok: bool,
    },
    EndLease {
        id: u8,
    },
    Withdraw {
        id: u8,
    },
    CloseUnclaimed {
        id: u8,
    },
    Finish {
        id: u8,
        save: bool,
    },
    Flush,
    /// The next operation stops at this point.
    Crash {
        point: u8,
    },
}

struct World {
    cache: EmbeddingCache,
    ids: Vec<u64>,
    /// The blocks of leases and saves about which nothing was said since they began: surely nobody else's.
    untouched: HashMap<u64, Vec<(u32, u32)>>,
}

fn key_of(key: u8) -> String {
    format!("k{}", key % 9)
}

fn shape(rows: u8) -> SaveShape {
    let uint8 = dtype::by_name("uint8").expect("it is known");
    SaveShape::new(&[u64::from(rows % 6), BLOCK], uint8).expect("two dimensions")
}

impl World {
    fn new() -> Self {
        let client = Client::on_heap(BLOCKS, 6, BLOCK).expect("it is small");
        Self { cache: EmbeddingCache::new(Arc::new(client), "n"), ids: vec![], untouched: HashMap::new() }
    }

    fn id(&mut self, number: u8) -> u64 {
        let recent = self.ids.len().saturating_sub(12);
        let id = self.ids.get(recent + usize::from(number % 12)).copied().unwrap_or(77);
        self.untouched.remove(&id);
        id
    }

    fn begun(&mut self, id: u64, new: &[(u32, u32)], is_new: bool) {
        if is_new {
            for (other, extents) in &self.untouched {
                for (first, len) in new {
                    let free = extents.iter().all(|(f, l)| first + len <= *f || f + l <= *first);
                    assert!(free, "blocks of {other:#x} were given to {id:#x}");
                }
            }
        }
        assert!(!self.ids.contains(&id), "an id came twice");
        self.ids.push(id);
        self.untouched.insert(id, new.to_vec());
    }

    fn give_back(&self, operation: Deferred) {
        self.cache.give_back(WAIT, &[operation]).expect("the heap's lock is free");
    }

    fn perform(&mut self, operation: &Operation) {
        match *operation {
            Operation::Alloc { key, blocks } => {
                if let Ok(Some(entry)) = self.cache.alloc(WAIT, &key_of(key), u64::from(blocks % 26)) {
                    self.begun(entry.id, entry.extents.as_slice(), true);
                    self.untouched.remove(&entry.id); // it ends by key
                }
            }
            Operation::MarkReady { key } => drop(self.cache.mark_ready(WAIT, &key_of(key))),
            Operation::Discard { key } => drop(self.cache.discard(WAIT, &key_of(key))),
            Operation::Pin { key } => drop(self.cache.pin(WAIT, &key_of(key))),
            Operation::Unpin { key } => drop(self.cache.unpin(WAIT, &key_of(key))),
            Operation::Lease { key, rows } => {
                let rows = rows.map(|rows| u64::from(rows % 6));
                if let Ok(Some(lease)) = self.cache.lease(WAIT, &key_of(key), &Expected { rows, ..Expected::default() })
                {
                    self.begun(lease.id, lease.extents.as_slice(), false);
                }
            }
            Operation::BeginSave { key, rows, ranks } => {
                let (key, rows) = (key_of(key), u64::from(rows % 6));
                let participants = u64::from(ranks % 7 + 1);
                let item = Item { key: &key, rows, row_bytes: BLOCK, modality: "", participants };
                if let Ok(BeginSave::Begun(save)) = self.cache.begin_save(WAIT, &item) {
                    self.begun(save.id, save.extents.as_slice(), true);
                }
            }
            _ => self.perform_on_transfer(operation),
        }
    }

    fn perform_on_transfer(&mut self, operation: &Operation) {
        match *operation {
            Operation::Dispatch { id, ranks } => {
                let id = self.id(id);
                self.give_back(Deferred::DispatchLoad(id, u64::from(ranks)));
            }
            Operation::ClaimLoad { id, rank } => {
                let id = self.id(id);
                drop(self.cache.claim_loads(WAIT, u32::from(rank % 4), &[id]));
            }
            Operation::ClaimSave { id, rank, rows } => {
                let id = self.id(id);
                drop(self.cache.claim_saves(WAIT, u32::from(rank % 4), &[(id, shape(rows))]));
            }
            Operation::Complete { id, rank, ok } => {
                let id = self.id(id);
                self.give_back(Deferred::Complete(u32::from(rank % 4), id, ok));
            }
            Operation::EndLease { id } => {
                let id = self.id(id);
                self.give_back(Deferred::EndLease(id));
            }
            Operation::Withdraw { id } => {
                let id = self.id(id);
                self.give_back(Deferred::Withdraw(id));
            }
            Operation::CloseUnclaimed { id } => {
                let id = self.id(id);
                drop(self.cache.close_unclaimed(WAIT, &[id]));
            }
            Operation::Finish { id, save } => {
                let id = self.id(id);
                self.give_back(if save { Deferred::FinishSave(id) } else { Deferred::FinishLoad(id) });
            }
            Operation::Flush => drop(self.cache.flush()),
            _ => {}
        }
    }

    fn check(&self) {
        let violations = self.cache.client().violations().expect("the heap's lock is free");
        assert_eq!(violations, Vec::<String>::new());
    }

    /// When the client has left and all was flushed, every block is free.
    fn end(&self) {
        let me = self.cache.client().me();
        let left = self.cache.client().with(WAIT, |index| {
            index.deregister_client(me)?;
            index.reclaim(1, 0, &mut |_, _| false)
        });
        left.expect("the heap's lock is free");
        self.cache.flush().expect("the heap's lock is free");
        let stats = self.cache.client().stats().expect("the heap's lock is free");
        assert_eq!((stats.free_blocks, stats.entries, stats.holds), (BLOCKS, 0, 0));
        self.check();
    }
}

/// Runs one input.
pub fn run(data: &[u8]) {
    let mut source = Unstructured::new(data);
    let mut world = World::new();
    for _ in 0..MOST_OPERATIONS {
        if source.is_empty() {
            break;
        }
        let Ok(operation) = Operation::arbitrary(&mut source) else { break };
        if let Operation::Crash { point } = operation {
            arm(Some((u64::from(point % 40), CrashKind::Panic)));
            continue;
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| world.perform(&operation)));
        if let Err(payload) = outcome {
            arm(None);
            assert!(payload.is::<Crash>(), "{operation:?} panicked by itself");
        }
        arm(None);
        world.check();
    }
    arm(None);
    world.end();
}
