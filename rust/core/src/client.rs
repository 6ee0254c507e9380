//! A client: one attachment to an index, on the heap or in a region.
//!
//! It takes the lock, rebuilds what a dead holder left dirty, and keeps what could not be given back in time for the next
//! call. Safe to use from many threads.

use std::collections::VecDeque;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use memmap2::{Advice, MmapMut, MmapOptions};

use crate::counters::{COUNTERS, Counter};
use crate::error::{Error, Result};
use crate::geometry::{COUNTERS_PER_CLIENT, HUGE_PAGE, MAX_CLIENTS};
use crate::index::crash::crash_point;
use crate::index::{
    Checked, ClientInfo, ClientRef, Damaged, Index, IndexLayout, IndexStats, NamespaceInfo, Reclaimed, Registration,
    Role, Tally,
};
use crate::region::{Guard, Region};

mod deferred;
mod flush;
#[cfg(test)]
mod tests;

pub use deferred::Deferred;
pub use flush::FlushedNamespace;

/// How long the blocks of a dead group stay as they are: a device may still be writing.
pub const QUARANTINE: Duration = Duration::from_secs(2);
/// How long calls wait that are not on an engine's step path.
pub const PATIENT: Duration = Duration::from_secs(2);
/// After a missed deadline, calls for this long wait no more than [`BRIEF`]: the holder may be stopped.
const STALL: Duration = Duration::from_secs(1);
const BRIEF: Duration = Duration::from_millis(1);
/// How often a full pool looks for dead clients.
const RECLAIM_EVERY: Duration = Duration::from_millis(100);

/// An index of this process alone, and whether it must be rebuilt before it is used.
struct HeapIndex {
    /// Pages of their own, which begin as zeros and take memory as they are used.
    memory: MmapMut,
    dirty: bool,
}

impl HeapIndex {
    fn new(len: usize) -> io::Result<Self> {
        let memory = MmapOptions::new().len(len).map_anon()?;
        // In a large index each operation meets pages that it has not met for long: huge ones spare it most of the walks
        // through page tables. Where the kernel has none to give it is slower, nothing else.
        if len >= HUGE_PAGE {
            let _ = memory.advise(Advice::HugePage);
        }
        Ok(Self { memory, dirty: false })
    }
}

struct Heap {
    index: Mutex<HeapIndex>,
    counters: Vec<AtomicU64>,
    seed: u64,
}

enum Store {
    Heap(Heap),
    Region(Box<Region>),
}

/// Where an operation's view of the index comes from.
enum Held<'a> {
    Heap(MutexGuard<'a, HeapIndex>),
    Region(Guard<'a>),
}

impl Held<'_> {
    fn bytes(&mut self) -> &mut [u8] {
        match self {
            Held::Heap(index) => &mut index.memory,
            Held::Region(guard) => guard.index_bytes(),
        }
    }

    fn is_dirty(&self) -> bool {
        match self {
            Held::Heap(index) => index.dirty,
            Held::Region(guard) => guard.is_dirty(),
        }
    }

    fn mark_dirty(&mut self) {
        match self {
            Held::Heap(index) => index.dirty = true,
            Held::Region(guard) => guard.mark_dirty(),
        }
    }

    fn clear_dirty(&mut self) {
        match self {
            Held::Heap(index) => index.dirty = false,
            Held::Region(guard) => guard.clear_dirty(),
        }
    }
}

/// How a client presents itself when it attaches.
#[derive(Debug, Clone, Copy)]
pub struct Introduction<'a> {
    /// What it is.
    pub role: Role,
    /// Its rank within its group.
    pub rank: u32,
    /// The name that all clients of one engine share; empty for a client on its own.
    pub group: &'a str,
}

/// One attachment to an index.
pub struct Client {
    store: Store,
    layout: IndexLayout,
    me: ClientRef,
    deferred: Mutex<VecDeque<Deferred>>,
    has_deferred: AtomicU64,
    /// Until when the lock's holder is taken for stopped; nanoseconds of the monotonic clock.
    stalled_until: AtomicU64,
    last_reclaim: AtomicU64,
    /// The client's record was given up: whoever gets the lock from now on must not act in its name.
    left: AtomicBool,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("me", &self.me).field("layout", &self.layout).finish_non_exhaustive()
    }
}

impl Client {
    /// The one client of an index on the heap.
    ///
    /// # Errors
    /// `InvalidArgument` for a size that does not fit into memory.
    pub fn on_heap(num_blocks: u32, num_slots: u32, block_size: u64) -> Result<Self> {
        let layout = IndexLayout::on_heap(num_blocks, num_slots, block_size);
        let index = HeapIndex::new(layout.total_len())
            .map_err(|_| Error::invalid("num_blocks", num_blocks, "small enough that its index fits into memory"))?;
        let counters = (0..COUNTERS_PER_CLIENT).map(|_| AtomicU64::new(0)).collect();
        let seed = RandomState::new().build_hasher().finish();
        let store = Store::Heap(Heap { index: Mutex::new(index), counters, seed });
        Self::attach(store, layout, &Introduction { role: Role::Pool, rank: 0, group: "" })
    }

    /// The client that `region` is.
    ///
    /// # Errors
    /// `Busy` if the region's lock cannot be had, `ClientsFull` if too many dead still have their records.
    pub fn in_region(region: Region, introduction: &Introduction<'_>) -> Result<Self> {
        let layout = IndexLayout::of(region.geometry());
        Self::attach(Store::Region(Box::new(region)), layout, introduction)
    }

    fn attach(store: Store, layout: IndexLayout, introduction: &Introduction<'_>) -> Result<Self> {
        let mut client = Self {
            store,
            layout,
            me: ClientRef::default(),
            deferred: Mutex::default(),
            has_deferred: AtomicU64::new(0),
            stalled_until: AtomicU64::new(0),
            last_reclaim: AtomicU64::new(0),
            left: AtomicBool::new(false),
        };
        client.reclaim()?;
        let (byte, byte_generation) = match &client.store {
            Store::Heap(_) => (0, 0),
            Store::Region(region) => (u32::from(region.client().index), region.client().generation),
        };
        let registration = Registration {
            role: introduction.role,
            rank: introduction.rank,
            group: group_digest(introduction.group),
            label: introduction.group,
            byte,
            byte_generation,
            pid: std::process::id(),
            attached_at_unix: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        };
        let me = client.with(PATIENT, |index| index.register_client(&registration))?;
        client.me = me.ok_or(Error::ClientsFull { limit: u32::from(MAX_CLIENTS) })?;
        Ok(client)
    }

    /// The region, where there is one.
    pub fn region(&self) -> Option<&Region> {
        match &self.store {
            Store::Heap(_) => None,
            Store::Region(region) => Some(region),
        }
    }

    /// The layout of the index.
    pub fn layout(&self) -> &IndexLayout {
        &self.layout
    }

    /// Whose holds this client's are.
    pub fn me(&self) -> ClientRef {
        self.me
    }

    /// Runs `operation` on the index, waiting for the lock no longer than `wait`; a zero `wait` tries once.
    ///
    /// `operation` can run twice: if the index turns out to contradict itself, it is rebuilt in between.
    ///
    /// # Errors
    /// `Busy` at the deadline, `Closed` after a close or in a forked child.
    pub fn with<R>(&self, wait: Duration, mut operation: impl FnMut(&mut Index<'_>) -> Checked<R>) -> Result<R> {
        let mut held = self.hold(wait)?;
        if self.left.load(Ordering::Acquire) {
            return Err(Error::Closed("the region was closed"));
        }
        crash_point();
        let mut tally = Tally::default();
        let outcome = self.run(&mut held, &mut tally, &mut operation);
        crash_point();
        if !tally.is_empty() {
            self.count_tally(&held, &tally);
        }
        outcome
    }

    fn run<R>(
        &self,
        held: &mut Held<'_>,
        tally: &mut Tally,
        operation: &mut impl FnMut(&mut Index<'_>) -> Checked<R>,
    ) -> Result<R> {
        if held.is_dirty() {
            self.view(held, |index| self.rebuild(index)).map_err(unusable)?;
            crash_point();
            held.clear_dirty();
        }
        let outcome = self.view(held, |index| {
            if !index.is_initialised() {
                index.initialise(self.seed())?;
            }
            self.attempt(index, tally, operation)
        });
        match outcome {
            Ok(value) => Ok(value),
            Err(_) => self.run_rebuilt(held, tally, operation),
        }
    }

    #[cold]
    fn run_rebuilt<R>(
        &self,
        held: &mut Held<'_>,
        tally: &mut Tally,
        operation: &mut impl FnMut(&mut Index<'_>) -> Checked<R>,
    ) -> Result<R> {
        let outcome = self.view(held, |index| {
            self.rebuild(index)?;
            self.attempt(index, tally, operation)
        });
        if outcome.is_err() {
            held.mark_dirty();
        }
        outcome.map_err(unusable)
    }

    #[inline]
    fn attempt<R>(
        &self,
        index: &mut Index<'_>,
        tally: &mut Tally,
        operation: &mut impl FnMut(&mut Index<'_>) -> Checked<R>,
    ) -> Checked<R> {
        self.settle_deferred(index)?;
        let outcome = operation(index);
        *tally = index.tally;
        outcome
    }

    fn seed(&self) -> u64 {
        match &self.store {
            Store::Heap(heap) => heap.seed,
            Store::Region(region) => region.seed(),
        }
    }

    #[inline]
    fn view<R>(&self, held: &mut Held<'_>, f: impl FnOnce(&mut Index<'_>) -> Checked<R>) -> Checked<R> {
        f(&mut Index::view(&self.layout, held.bytes())?)
    }

    fn rebuild(&self, index: &mut Index<'_>) -> Checked<()> {
        self.count(Counter::Rebuilds, 1);
        index.rebuild(self.seed())
    }

    #[inline]
    fn hold(&self, wait: Duration) -> Result<Held<'_>> {
        match &self.store {
            Store::Heap(heap) => match heap.index.try_lock() {
                Ok(index) => Ok(Held::Heap(index)),
                Err(error) => hold_heap(heap, error, wait),
            },
            Store::Region(region) => self.hold_region(region, wait),
        }
    }

    fn hold_region<'r>(&self, region: &'r Region, wait: Duration) -> Result<Held<'r>> {
        if let Some(guard) = region.try_lock()? {
            if self.stalled_until.load(Ordering::Relaxed) != 0 {
                self.stalled_until.store(0, Ordering::Relaxed);
            }
            return Ok(Held::Region(guard));
        }
        if wait.is_zero() {
            return Err(Error::Busy { waited: Duration::ZERO });
        }
        let now = monotonic_nanos();
        let stalled = wait < PATIENT && now < self.stalled_until.load(Ordering::Relaxed);
        match region.lock(if stalled { wait.min(BRIEF) } else { wait }) {
            Ok(guard) => {
                self.stalled_until.store(0, Ordering::Relaxed);
                Ok(Held::Region(guard))
            }
            Err(error) => {
                if matches!(error, Error::Busy { .. }) {
                    self.stalled_until.store(now + as_nanos(STALL), Ordering::Relaxed);
                    self.count(Counter::LockTimeouts, 1);
                }
                Err(error)
            }
        }
    }

    /// Takes back what dead clients left, as far as that is safe yet.
    ///
    /// # Errors
    /// As [`Self::with`].
    pub fn reclaim(&self) -> Result<Reclaimed> {
        let now = monotonic_nanos();
        self.last_reclaim.store(now, Ordering::Relaxed);
        let reclaimed =
            self.with(PATIENT, |index| index.reclaim(now, as_nanos(QUARANTINE), &mut |b, g| self.is_alive(b, g)))?;
        self.count(Counter::DeadClients, u64::from(reclaimed.died));
        Ok(reclaimed)
    }

    /// The same within an operation that found no room, unless it was done a moment ago; whether anything came back.
    pub(crate) fn reclaim_for_room(&self, index: &mut Index<'_>) -> Checked<bool> {
        let now = monotonic_nanos();
        let last = self.last_reclaim.load(Ordering::Relaxed);
        if self.region().is_none() || now.saturating_sub(last) < as_nanos(RECLAIM_EVERY) {
            return Ok(false);
        }
        self.last_reclaim.store(now, Ordering::Relaxed);
        let reclaimed = index.reclaim(now, as_nanos(QUARANTINE), &mut |b, g| self.is_alive(b, g))?;
        self.count(Counter::DeadClients, u64::from(reclaimed.died));
        Ok(reclaimed.died > 0 || reclaimed.released > 0)
    }

    fn is_alive(&self, byte: u32, generation: u32) -> bool {
        match &self.store {
            Store::Heap(_) => true,
            Store::Region(region) => u16::try_from(byte)
                .is_ok_and(|byte| region.client_generation(byte) == Some(generation) && region.is_client_alive(byte)),
        }
    }

    /// Adds to one of this client's counters.
    pub fn count(&self, counter: Counter, by: u64) {
        if by > 0 {
            self.counter(counter as usize).fetch_add(by, Ordering::Relaxed);
        }
    }

    fn counter(&self, number: usize) -> &AtomicU64 {
        match &self.store {
            Store::Heap(heap) => &heap.counters[number],
            Store::Region(region) => region.counter(region.client().index, number),
        }
    }

    /// Nobody but this adds to these counters, and only one thread of a client has the lock: an addition need not be atomic.
    fn count_tally(&self, _held: &Held<'_>, tally: &Tally) {
        let count = |counter: Counter, by: u64| {
            if by > 0 {
                let counter = self.counter(counter as usize);
                counter.store(counter.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
            }
        };
        count(Counter::Evictions, tally.evictions);
        count(Counter::EvictedBlocks, tally.evicted_blocks);
        count(Counter::Mismatches, tally.mismatches);
        count(Counter::Flushed, tally.flushed);
        count(Counter::SavesCompleted, tally.saves_completed);
        count(Counter::SavesDropped, tally.saves_dropped);
        count(Counter::LoadsCompleted, tally.loads_completed);
        count(Counter::Corrupted, tally.corrupted);
    }

    /// This client's counters by name. Takes no lock.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        COUNTERS.iter().map(|(c, name)| (*name, self.counter(*c as usize).load(Ordering::Relaxed))).collect()
    }

    /// The counters of all clients that ever were, by name. Takes no lock.
    pub fn total_counters(&self) -> Vec<(&'static str, u64)> {
        let Store::Region(region) = &self.store else { return self.counters() };
        let sum = |which: usize| {
            let clients = (0..MAX_CLIENTS).map(|c| region.counter(c, which).load(Ordering::Relaxed));
            clients.fold(region.totals(which).load(Ordering::Relaxed), u64::wrapping_add)
        };
        COUNTERS.iter().map(|(c, name)| (*name, sum(*c as usize))).collect()
    }

    /// Sums over the index.
    ///
    /// # Errors
    /// As [`Self::with`].
    pub fn stats(&self) -> Result<IndexStats> {
        self.with(PATIENT, |index| Ok(index.stats()))
    }

    /// Every client that has a record, and every namespace.
    ///
    /// # Errors
    /// As [`Self::with`].
    pub fn people(&self) -> Result<(Vec<ClientInfo>, Vec<NamespaceInfo>)> {
        self.with(PATIENT, |index| Ok((index.client_infos(), index.namespace_infos())))
    }

    /// What is wrong with the index, in words; empty when nothing is.
    ///
    /// # Errors
    /// As [`Self::with`].
    pub fn violations(&self) -> Result<Vec<String>> {
        self.with(PATIENT, |index| Ok(index.violations()))
    }

    /// Leaves: ends this client's holds and closes its region. Further calls fail; a second close does nothing.
    pub fn close(&self) {
        if let Store::Region(region) = &self.store {
            let registered = self.me != ClientRef::default();
            if registered && !region.is_closed() && !region.is_forked() {
                // Without the lock the client's record stays, and the next reclaim takes it for dead, which it then is.
                let _ = self.with(PATIENT, |index| {
                    index.deregister_client(self.me)?;
                    self.left.store(true, Ordering::Release);
                    Ok(())
                });
                self.left.store(true, Ordering::Release);
            }
            region.close();
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.close();
    }
}

/// What there is to do where the heap's lock was not simply free.
#[cold]
fn hold_heap<'a>(heap: &'a Heap, error: TryLockError<MutexGuard<'a, HeapIndex>>, wait: Duration) -> Result<Held<'a>> {
    let locked = match error {
        TryLockError::WouldBlock if wait.is_zero() => return Err(Error::Busy { waited: Duration::ZERO }),
        TryLockError::WouldBlock => heap.index.lock(),
        TryLockError::Poisoned(poisoned) => Err(poisoned),
    };
    let index = locked.unwrap_or_else(|poisoned| {
        heap.index.clear_poison();
        let mut index = poisoned.into_inner();
        index.dirty = true;
        index
    });
    Ok(Held::Heap(index))
}

fn unusable(damaged: Damaged) -> Error {
    Error::Unusable(damaged)
}

/// Which group a name means; 0 for none.
fn group_digest(group: &str) -> u64 {
    if group.is_empty() {
        return 0;
    }
    let digest = blake3::hash(group.as_bytes());
    u64::from_le_bytes(std::array::from_fn(|i| digest.as_bytes()[i])).max(1)
}

fn monotonic_nanos() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

fn as_nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
