//! What a panic under the lock costs, and that what was put off is not lost.

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use super::*;
use crate::cache::EmbeddingCache;
use crate::geometry::GeometryRequest;
use crate::index::crash::{Crash, CrashKind, arm};
use crate::index::{ClaimOutcome, Expected};
use crate::region::{Lifetime, OpenRequest};

const WAIT: Duration = Duration::from_millis(5);
const BLOCKS: u64 = 8;

fn in_region(directory: &Path) -> Client {
    in_group(directory, "")
}

fn in_group(directory: &Path, group: &str) -> Client {
    let geometry =
        GeometryRequest { capacity: BLOCKS * 4096, block_size: 4096, segment_size: 2 << 20, num_slots: None };
    let request = OpenRequest { directory: Some(directory), name: "r", geometry, lifetime: Lifetime::Shared };
    let region = Region::open(&request, &mut |_, _, _| ControlFlow::Continue(())).unwrap();
    Client::in_region(region, &Introduction { role: Role::Pool, rank: 0, group }).unwrap()
}

/// Runs the test on the heap and on a region.
fn on_both(test: impl Fn(&EmbeddingCache)) {
    test(&EmbeddingCache::new(Arc::new(Client::on_heap(BLOCKS as u32, 16, 4096).unwrap()), "n"));
    let parent = tempfile::tempdir_in("/dev/shm").unwrap();
    test(&EmbeddingCache::new(Arc::new(in_region(&parent.path().join("pools"))), "n"));
}

fn counter(cache: &EmbeddingCache, name: &str) -> u64 {
    cache.client().counters().iter().find(|(n, _)| *n == name).unwrap().1
}

fn store(cache: &EmbeddingCache, key: &str) {
    cache.alloc(WAIT, key, 2).unwrap().unwrap();
    cache.mark_ready(WAIT, key).unwrap();
}

/// Every block is free or can be evicted, no hold is left, nothing is wrong.
fn assert_whole(cache: &EmbeddingCache) {
    let stats = cache.client().stats().unwrap();
    assert_eq!(cache.client().violations().unwrap(), Vec::<String>::new());
    assert_eq!((stats.free_blocks + stats.evictable_blocks, stats.holds), (BLOCKS as u32, 0));
}

#[test]
fn a_panic_under_the_lock_costs_a_rebuild_and_nothing_else() {
    on_both(|cache| {
        store(cache, "kept");
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            cache.client().with(WAIT, |_| -> Checked<()> { std::panic::resume_unwind(Box::new("a defect")) })
        }));
        assert!(outcome.is_err());
        assert!(cache.contains(WAIT, "kept").unwrap());
        assert_eq!(counter(cache, "rebuilds"), 1);
        store(cache, "after");
        assert_eq!(counter(cache, "rebuilds"), 1, "once is enough");
        assert_whole(cache);
    });
}

#[test]
fn a_panic_between_any_two_stores_of_any_call_loses_no_block_and_no_other_entry() {
    let calls: [fn(&EmbeddingCache); 5] = [
        |cache| drop(cache.alloc(WAIT, "new", 5)),
        |cache| drop(cache.mark_ready(WAIT, "writing")),
        |cache| drop(cache.discard(WAIT, "writing")),
        |cache| drop(cache.lease(WAIT, "kept", &Expected::default())),
        |cache| drop(cache.flush()),
    ];
    for (number, call) in calls.iter().enumerate() {
        // More than any of them passes.
        for point in 0..20 {
            on_both(|cache| {
                store(cache, "kept");
                cache.alloc(WAIT, "writing", 1).unwrap().unwrap();
                let crashed = crash_at(point, || call(cache));
                assert_eq!(cache.client().violations().unwrap(), Vec::<String>::new(), "call {number}, point {point}");
                assert_eq!(counter(cache, "rebuilds"), u64::from(crashed));
                assert!(number == 4 || cache.contains(WAIT, "kept").unwrap(), "call {number}, point {point}");
                assert!(point < 19 || !crashed);
                everything_comes_back(cache);
            });
        }
    }
}

fn crash_at(point: u64, call: impl FnOnce()) -> bool {
    arm(Some((point, CrashKind::Panic)));
    let outcome = catch_unwind(AssertUnwindSafe(call));
    arm(None);
    match outcome {
        Ok(()) => false,
        Err(payload) => {
            assert!(payload.is::<Crash>(), "it panicked by itself");
            true
        }
    }
}

/// When the client has left and all was flushed.
fn everything_comes_back(cache: &EmbeddingCache) {
    let me = cache.client().me();
    let left = cache.client().with(WAIT, |index| {
        index.deregister_client(me)?;
        index.reclaim(1, 0, &mut |_, _| true)
    });
    left.unwrap();
    cache.flush().unwrap();
    let stats = cache.client().stats().unwrap();
    assert_eq!((stats.free_blocks, stats.entries, stats.holds), (BLOCKS as u32, 0, 0));
}

#[test]
fn what_was_put_off_is_done_also_by_a_cache_that_never_had_the_lock_before() {
    let parent = tempfile::tempdir_in("/dev/shm").unwrap();
    let client = Arc::new(in_region(&parent.path().join("pools")));
    let (first, second) = (EmbeddingCache::new(Arc::clone(&client), "n"), EmbeddingCache::new(client, "n"));
    first.alloc(WAIT, "a", 1).unwrap().unwrap();
    first.alloc(WAIT, "b", 1).unwrap().unwrap();
    store(&first, "c");
    first.pin(WAIT, "c").unwrap();
    let guard = first.client().region().unwrap().lock(WAIT).unwrap();
    second.mark_ready(WAIT, "a").unwrap();
    second.discard(WAIT, "b").unwrap();
    second.unpin(WAIT, "c").unwrap();
    assert_eq!(first.client().deferred_len(), 3);
    drop(guard);
    assert!(first.contains(WAIT, "a").unwrap());
    assert!(first.get(WAIT, "b").unwrap().is_none());
    assert_eq!(first.client().deferred_len(), 0);
    assert_whole(&first);
}

#[test]
fn an_alloc_without_a_hold_record_evicts_nothing() {
    let cache = EmbeddingCache::new(Arc::new(Client::on_heap(BLOCKS as u32, 16, 4096).unwrap()), "n");
    (0..4).for_each(|n| store(&cache, &n.to_string()));
    while cache.lease(WAIT, "0", &Expected::default()).unwrap().is_some() {}
    assert!(cache.alloc(WAIT, "new", 2).unwrap().is_none());
    assert!((0..4).all(|n| cache.contains(WAIT, &n.to_string()).unwrap()));
}

#[test]
fn a_flush_from_outside_reaches_the_namespaces_that_it_names() {
    let parent = tempfile::tempdir_in("/dev/shm").unwrap();
    let directory = parent.path().join("pools");
    let one = EmbeddingCache::new(Arc::new(in_region(&directory)), "model-a, old");
    let other = EmbeddingCache::new(Arc::new(in_region(&directory)), "model-b");
    let same = EmbeddingCache::new(Arc::clone(one.client()), "model-a, new");
    for (cache, key) in [(&one, "x"), (&one, "y"), (&other, "x"), (&same, "x")] {
        store(cache, key);
    }
    one.pin(WAIT, "y").unwrap();
    let tool = in_region(&directory);
    let flushed = tool.flush(|label| label.starts_with("model-a")).unwrap();
    let found: Vec<_> = flushed.iter().map(|f| (f.label.as_str(), f.dropped)).collect();
    assert_eq!(found, [("model-a, old", 2), ("model-a, new", 1)]);
    assert!(
        !one.contains(WAIT, "x").unwrap() && !one.contains(WAIT, "y").unwrap() && !same.contains(WAIT, "x").unwrap()
    );
    assert!(other.contains(WAIT, "x").unwrap());
    one.unpin(WAIT, "y").unwrap();
    assert_whole(&other);
    store(&one, "x");
    assert!(one.contains(WAIT, "x").unwrap(), "what is stored afterwards is found");
    assert_eq!(tool.flush(|_| true).unwrap().len(), 3);
    assert_eq!(tool.flush(|_| false).unwrap(), []);
}

#[test]
fn a_close_in_the_middle_of_other_threads_work_leaves_nothing_behind() {
    let parent = tempfile::tempdir_in("/dev/shm").unwrap();
    let directory = parent.path().join("pools");
    let observer = in_region(&directory);
    for round in 0..40 {
        let cache = EmbeddingCache::new(Arc::new(in_region(&directory)), "n");
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let cache = &cache;
                scope.spawn(move || {
                    for number in 0.. {
                        let key = format!("{round}-{thread}-{number}");
                        if matches!(cache.alloc(WAIT, &key, 1), Err(Error::Closed(_))) {
                            return;
                        }
                        let _ = cache.mark_ready(WAIT, &key).and_then(|()| cache.pin(WAIT, &key));
                        let _ = cache.lease(WAIT, &key, &Expected::default());
                        let _ = cache.unpin(WAIT, &key);
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(1));
            cache.client().close();
        });
        drop(cache);
    }
    observer.with(WAIT, |index| index.reclaim(1, 0, &mut |byte, _| byte == 0)).unwrap();
    assert_eq!(observer.violations().unwrap(), Vec::<String>::new());
    let stats = observer.stats().unwrap();
    assert_eq!((stats.holds, stats.writing, stats.orphaned), (0, 0, 0));
}

/// A scheduler with a load that its rank has begun to copy while the lock was not free, and that rank.
struct PutOffClaim {
    _parent: tempfile::TempDir,
    directory: std::path::PathBuf,
    scheduler: EmbeddingCache,
    worker: EmbeddingCache,
    load: u64,
}

impl PutOffClaim {
    /// `meanwhile` happens while the lock is still not free.
    fn new(meanwhile: impl FnOnce(&EmbeddingCache, u64)) -> Self {
        Self::in_group("engine", meanwhile)
    }

    fn in_group(group: &str, meanwhile: impl FnOnce(&EmbeddingCache, u64)) -> Self {
        let parent = tempfile::tempdir_in("/dev/shm").unwrap();
        let directory = parent.path().join("pools");
        let member = |group| EmbeddingCache::new(Arc::new(in_group(&directory, group)), "n");
        let (scheduler, worker, stranger) = (member(group), member(group), member("other"));
        let load = load_of(&scheduler, "x");
        let guard = stranger.client().region().unwrap().lock(WAIT).unwrap();
        assert_eq!(worker.claim_loads(WAIT, 0, &[load]).unwrap(), [ClaimOutcome::Claimed]);
        meanwhile(&scheduler, load);
        drop(guard);
        Self { _parent: parent, directory, scheduler, worker, load }
    }

    fn close(&self) -> Vec<u64> {
        self.scheduler.close_unclaimed(WAIT, &[self.load]).unwrap()
    }

    fn is_held(&self) -> bool {
        self.scheduler.has_held_entries(WAIT).unwrap()
    }
}

/// A load of an item, for rank 0, that nobody has claimed.
fn load_of(scheduler: &EmbeddingCache, key: &str) -> u64 {
    store(scheduler, key);
    let load = scheduler.lease(WAIT, key, &Expected::default()).unwrap().unwrap().id;
    scheduler.give_back(WAIT, &[Deferred::DispatchLoad(load, 1)]).unwrap();
    load
}

#[test]
fn a_load_is_not_closed_under_a_rank_whose_claim_was_put_off() {
    let setting = PutOffClaim::new(|_, _| {});
    assert_eq!(setting.close(), [setting.load]);
    assert!(setting.is_held());
    assert!(setting.worker.unclaimed(WAIT, &[]).unwrap().is_empty());
    assert_eq!(setting.close(), [setting.load], "its copy goes on");
    assert!(setting.is_held());
    setting.worker.give_back(WAIT, &[Deferred::Complete(0, setting.load, true)]).unwrap();
    assert_eq!(setting.close(), [0u64; 0]);
    assert_whole(&setting.scheduler);
}

#[test]
fn neither_does_a_closing_that_was_put_off_as_well() {
    let setting = PutOffClaim::new(|scheduler, load| {
        assert_eq!(scheduler.close_unclaimed(WAIT, &[load]).unwrap(), [load]);
        assert_eq!(scheduler.client().deferred_len(), 1);
    });
    assert!(setting.is_held());
    assert_eq!(setting.scheduler.client().deferred_len(), 0);
    setting.worker.give_back(WAIT, &[Deferred::Complete(0, setting.load, true)]).unwrap();
    assert_whole(&setting.scheduler);
}

#[test]
fn claims_that_a_dead_client_put_off_keep_nothing_open() {
    let setting = PutOffClaim::new(|_, _| {});
    // Without a word, as a process that is killed.
    setting.worker.client().region().unwrap().close();
    assert_eq!(setting.close(), [0u64; 0]);
    assert_whole(&setting.scheduler);
}

#[test]
fn claims_that_another_group_put_off_keep_nothing_open() {
    let setting = PutOffClaim::new(|_, _| {});
    let other = EmbeddingCache::new(Arc::new(in_group(&setting.directory, "other")), "n");
    let load = load_of(&other, "y");
    assert_eq!(other.close_unclaimed(WAIT, &[load]).unwrap(), [0u64; 0]);
    assert_eq!(setting.close(), [setting.load]);
}

#[test]
fn clients_without_a_group_keep_nothing_of_each_other_open() {
    let setting = PutOffClaim::in_group("", |_, _| {});
    assert_eq!(setting.worker.client().deferred_len(), 1);
    let other = EmbeddingCache::new(Arc::new(in_group(&setting.directory, "")), "n");
    let load = load_of(&other, "y");
    assert_eq!(other.close_unclaimed(WAIT, &[load]).unwrap(), [0u64; 0]);
}
