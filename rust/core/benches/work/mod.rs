//! The operations that are measured, with the state that each of them needs: shared by the timed and the counted benches.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ecpool_core::cache::{EmbeddingCache, Item, dtype_code};
use ecpool_core::client::{Client, Deferred, Introduction, PATIENT};
use ecpool_core::geometry::GeometryRequest;
use ecpool_core::index::{BeginSave, Expected, Role, SaveShape};
use ecpool_core::region::{Lifetime, OpenRequest, Region};
use ecpool_core::tracker::StepTracker;

const BLOCK_SIZE: u64 = 16384;
/// Rows of an item, and its bytes: what a large picture takes in a model of seven billion parameters.
const ROWS: u64 = 1296;
const ROW_BYTES: u64 = 7168;
/// Items that a full pool holds.
const ITEMS: u64 = 4;
const WAIT: Duration = Duration::from_millis(20);

/// One operation, ready to run any number of times.
pub(crate) type Operation = Box<dyn FnMut()>;

/// Makes an operation with the state that it needs.
pub(crate) type Setup = fn() -> Operation;

/// The operations with a fixed size, by name.
pub(crate) const OPERATIONS: [(&str, Setup); 9] = [
    ("cycle", || cycle(1296)),
    ("hit", hit),
    ("miss", miss),
    ("save", save),
    ("load", load),
    ("tracker, 8 adds and a step", || tracker(8)),
    ("region cycle", region_cycle),
    ("lock and unlock", lock),
    ("rebuild of 1,000 entries", || rebuild(1_000)),
];

/// Keys as vLLM has them, written out beforehand. They come round again long after their entries have gone.
struct Keys {
    texts: Vec<String>,
    next: usize,
}

impl Keys {
    fn new(count: u64) -> Self {
        Self { texts: (0..count).map(|number| format!("{number:064x}")).collect(), next: 0 }
    }

    fn next(&mut self) -> &str {
        self.next = (self.next + 1) % self.texts.len();
        &self.texts[self.next]
    }
}

impl Default for Keys {
    fn default() -> Self {
        Self::new(1024)
    }
}

fn heap(num_blocks: u64) -> EmbeddingCache {
    let client = Client::on_heap(num_blocks as u32, num_blocks as u32 + 64, BLOCK_SIZE).expect("a small index");
    EmbeddingCache::new(Arc::new(client), "bench")
}

fn fill(cache: &EmbeddingCache, keys: &mut Keys, items: u64, blocks: u64) {
    for _ in 0..items {
        let key = keys.next();
        cache.alloc(WAIT, key, blocks).expect("room");
        cache.mark_ready(WAIT, key).expect("an entry that was just made");
    }
}

/// alloc, which evicts, mark_ready, pin and unpin of an item of so many blocks.
pub(crate) fn cycle(blocks: u64) -> Operation {
    cycle_in(heap(ITEMS * blocks), blocks)
}

fn cycle_in(cache: EmbeddingCache, blocks: u64) -> Operation {
    let mut keys = Keys::default();
    fill(&cache, &mut keys, ITEMS, blocks);
    Box::new(move || {
        let key = keys.next();
        let entry = cache.alloc(WAIT, key, blocks).expect("room");
        std::hint::black_box(&entry);
        cache.mark_ready(WAIT, key).expect("an entry that was just made");
        cache.pin(WAIT, key).expect("a ready entry");
        cache.unpin(WAIT, key).expect("a pinned entry");
    })
}

fn hit() -> Operation {
    let (cache, key) = stored();
    Box::new(move || {
        let lease = cache
            .lease(WAIT, &key, &Expected { rows: Some(ROWS), ..Expected::default() })
            .expect("a free lock")
            .expect("a stored item");
        cache.give_back(WAIT, &[Deferred::EndLease(lease.id)]).expect("a free lock");
    })
}

fn miss() -> Operation {
    let (cache, _) = stored();
    let mut keys = Keys::default();
    keys.texts.swap_remove(1); // the one that is stored
    Box::new(move || {
        let lease = cache.lease(WAIT, keys.next(), &Expected { rows: Some(ROWS), ..Expected::default() });
        std::hint::black_box(&lease);
    })
}

/// A cache with one item that was saved as workers save.
fn stored() -> (EmbeddingCache, String) {
    let cache = heap(ITEMS * ROWS);
    let key = Keys::default().next().to_owned();
    save_item(&cache, &key);
    (cache, key)
}

fn save_item(cache: &EmbeddingCache, key: &str) {
    let item = Item { key, rows: ROWS, row_bytes: ROW_BYTES, modality: "image", participants: 1 };
    let BeginSave::Begun(entry) = cache.begin_save(WAIT, &item).expect("a free lock") else { panic!("no room") };
    let shape = SaveShape::new(&[ROWS, ROW_BYTES / 2], dtype_code("bfloat16").expect("a known type"));
    cache.claim_saves(WAIT, 0, &[(entry.id, shape.expect("two sizes"))]).expect("a free lock");
    cache.give_back(WAIT, &[Deferred::Complete(0, entry.id, true)]).expect("a free lock");
}

/// begin_save, which evicts, claim and completion.
fn save() -> Operation {
    let cache = heap(ITEMS * ROWS);
    let mut keys = Keys::default();
    Box::new(move || save_item(&cache, keys.next()))
}

/// lease, dispatch, claim and completion.
fn load() -> Operation {
    let (cache, key) = stored();
    Box::new(move || {
        let lease = cache
            .lease(WAIT, &key, &Expected { rows: Some(ROWS), ..Expected::default() })
            .expect("a free lock")
            .expect("a stored item");
        cache.give_back(WAIT, &[Deferred::DispatchLoad(lease.id, 1)]).expect("a free lock");
        cache.claim_loads(WAIT, 0, &[lease.id]).expect("a free lock");
        cache.give_back(WAIT, &[Deferred::Complete(0, lease.id, true)]).expect("a free lock");
    })
}

/// So many adds, each of another request, and a step in which as many expire.
pub(crate) fn tracker(adds: u64) -> Operation {
    let mut tracker: StepTracker<u64, u64> = StepTracker::new(2).expect("a delay");
    Box::new(move || {
        (0..adds).for_each(|number| tracker.add(number, number));
        std::hint::black_box(tracker.step([]));
    })
}

/// A rebuild of an index that is full of so many entries of one block.
pub(crate) fn rebuild(entries: u64) -> Operation {
    let cache = heap(entries);
    fill(&cache, &mut Keys::new(entries), entries, 1);
    Box::new(move || cache.client().with(PATIENT, |index| index.rebuild(1)).expect("an index in order"))
}

/// A directory that goes when the operation does.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Self {
        let path = PathBuf::from(format!("/dev/shm/ecpool-core-bench-{}", std::process::id()));
        Self(path)
    }

    fn region(&self, name: &str, blocks: u64) -> Region {
        let geometry = GeometryRequest {
            capacity: blocks * BLOCK_SIZE,
            block_size: BLOCK_SIZE,
            segment_size: 32 << 30,
            num_slots: None,
        };
        let request = OpenRequest { directory: Some(&self.0), name, geometry, lifetime: Lifetime::Shared };
        Region::open(&request, &mut |_, _, _| std::ops::ControlFlow::Continue(())).expect("a small region")
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The cycle in a region, under the lock that processes share.
fn region_cycle() -> Operation {
    let directory = Directory::new();
    let region = directory.region("cycle", ITEMS * ROWS);
    let introduction = Introduction { role: Role::Tool, rank: 0, group: "" };
    let client = Client::in_region(region, &introduction).expect("a new region");
    let mut run = cycle_in(EmbeddingCache::new(Arc::new(client), "bench"), ROWS);
    Box::new(move || {
        let _ = &directory;
        run();
    })
}

/// The lock of a region that nobody else wants.
fn lock() -> Operation {
    let directory = Directory::new();
    let region = directory.region("lock", ITEMS);
    Box::new(move || {
        let _ = &directory;
        drop(region.try_lock().expect("an open region").expect("a free lock"));
    })
}
