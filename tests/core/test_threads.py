"""Many threads on one cache at once, through every method."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from core.helpers import is_whole

from ecpool import EmbeddingCache, EntryStateError, KeyNotFoundError, PoolBusyError, Region

THREADS = 8
SECONDS = 1.5
KEYS = [f"k{n}" for n in range(12)]
BLOCK = 4096


@pytest.fixture
def switching_often() -> Iterator[None]:
    """Threads change places every few instructions, not every few milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Thread:
    """One thread's share of the work; what it took it gives back at the end."""

    def __init__(self, cache: EmbeddingCache, region: Region | None, seed: int) -> None:
        self._cache, self._region = cache, region
        self._rng = random.Random(seed)
        self._me = seed
        self._leases: list[int] = []
        self._loads: list[int] = []
        self._saves: list[int] = []
        self._writing: list[str] = []
        self._pinned: list[str] = []
        self.calls = 0

    def run(self, until: float) -> None:
        actions = [
            self._alloc, self._finish_alloc, self._pin, self._unpin, self._look, self._lease,
            self._dispatch, self._finish_load, self._save, self._finish_save, self._look_around,
        ]  # fmt: skip
        while time.monotonic() < until:
            self._try(self._rng.choice(actions))
            self.calls += 1
        for _ in range(1000):
            for action in (self._finish_alloc, self._unpin, self._finish_load, self._finish_save):
                self._try(action)
            self._cache.end_leases(self._leases)
            if not (self._writing or self._pinned or self._loads or self._saves):
                return
        raise AssertionError("something cannot be given back")

    def _try(self, action: Callable[[], None]) -> None:
        # Other threads have the same keys.
        with suppress(KeyNotFoundError, EntryStateError, PoolBusyError):
            action()

    def _key(self) -> str:
        return self._rng.choice(KEYS)

    def _alloc(self) -> None:
        key = f"{self._me}-{self._key()}"
        if self._cache.alloc(key, self._rng.randrange(3)) is not None:
            self._writing.append(key)

    def _finish_alloc(self) -> None:
        if self._writing:
            key = self._writing.pop()
            self._rng.choice([self._cache.mark_ready, self._cache.discard])(key)

    def _pin(self) -> None:
        key = f"{self._me}-{self._key()}"
        self._cache.pin(key)
        self._pinned.append(key)

    def _unpin(self) -> None:
        if self._pinned:
            self._cache.unpin(self._pinned.pop())

    def _look(self) -> None:
        entry = self._cache.get(self._key())
        if entry is not None:
            _ = (entry.ready, entry.evictable, entry.block_ids, entry == entry, repr(entry))
        self._cache.contains(self._key())
        self._cache.is_written_elsewhere(self._key())
        self._cache.has_held_entries()

    def _lease(self) -> None:
        lease = self._cache.lease(self._key(), rows=self._rng.choice([-1, 1, 1, 1, 2]))
        if lease is None:
            return
        if self._region is not None:
            found = bytearray(lease.nbytes)
            self._region.read(lease.extents, found)
            # Whoever wrote it wrote one value; a mixture would be two writers in one block.
            assert len(set(found)) == 1, "bytes of two entries under one lease"
        self._leases.append(lease.id)

    def _dispatch(self) -> None:
        if self._leases:
            load = self._leases.pop()
            self._cache.dispatch_loads([load], ranks=0b11)
            self._loads.append(load)

    def _finish_load(self) -> None:
        if self._loads:
            ids, self._loads = self._loads, []
            for rank in (0, 1):
                assert "refused" not in self._cache.claim_loads(rank, ids)
                self._cache.complete(rank, ids)

    def _save(self) -> None:
        save = self._cache.begin_save(self._key(), rows=1, row_bytes=BLOCK, modality="image")
        if isinstance(save, str):
            return
        if self._cache.claim_saves(0, [(save.id, (1, BLOCK), "uint8")]) != ["claimed"]:
            self._cache.withdraw([save.id])  # flushed just now
            return
        if self._region is not None:
            self._region.write(save.extents, bytes([self._rng.randrange(256)]) * BLOCK)
        self._saves.append(save.id)

    def _finish_save(self) -> None:
        if self._saves:
            self._cache.unclaimed(self._saves)
            self._cache.close_unclaimed(self._saves)
            self._cache.complete(0, self._saves, ok=self._rng.random() < 0.9)
            self._saves = []

    def _look_around(self) -> None:
        if self._rng.random() < 0.1:
            self._cache.flush()
        _ = (self._cache.stats(), self._cache.counters(), self._cache.finish_loads([1 << 60]))
        assert self._cache.check() == []
        if self._region is not None:
            _ = (self._region.status(), self._region.counters(), self._region.reclaim())


@pytest.mark.parametrize("on", ["heap", "region", "two clients of a region"])
@pytest.mark.usefixtures("switching_often")
def test_threads_on_every_method(open_region: Callable[..., Region], on: str) -> None:
    regions = {"heap": [None], "region": [open_region(capacity=10 * BLOCK)]}.get(on)
    if regions is None:
        regions = [open_region(capacity=10 * BLOCK), open_region(capacity=10 * BLOCK)]
    # Patient enough that nothing is put off for longer than the other threads are at work.
    caches = [
        EmbeddingCache(10, block_size=BLOCK) if r is None else EmbeddingCache(region=r, deadline=5)
        for r in regions
    ]
    threads = [
        Thread(caches[n % len(caches)], regions[n % len(regions)], n) for n in range(THREADS)
    ]
    until = time.monotonic() + SECONDS
    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(thread.run, until) for thread in threads]:
            future.result(timeout=60)
    assert sum(thread.calls for thread in threads) > 500
    for cache in caches:
        assert is_whole(cache)
    caches[0].flush()
    assert caches[0].stats()["free_blocks"] == 10


def test_closing_while_others_are_at_work(open_region: Callable[..., Region]) -> None:
    """Each call either works or says that the region is closed, and the place is given up."""
    watcher = open_region()
    for round_number in range(20):
        region = open_region()
        cache = EmbeddingCache(region=region)
        barrier = threading.Barrier(4)

        def use(cache: EmbeddingCache = cache, barrier: threading.Barrier = barrier) -> str:
            barrier.wait()
            try:
                while True:
                    cache.alloc("k", 1)
                    cache.discard("k")
            except (EntryStateError, KeyNotFoundError):
                return use_on(cache)
            except RuntimeError as error:
                return str(error)

        def use_on(cache: EmbeddingCache) -> str:
            try:
                while True:
                    cache.contains("k")
            except RuntimeError as error:
                return str(error)

        with ThreadPoolExecutor(4) as pool:
            users = [pool.submit(use) for _ in range(3)]
            barrier.wait()
            time.sleep(0.001 * (round_number % 4))
            region.close()
            assert all("closed" in user.result(timeout=30) for user in users)
        watcher.reclaim()
        # What it was writing keeps its record for the quarantine, but it counts as gone.
        assert sum(client["live"] for client in watcher.status()["clients"]) == 1
    assert watcher.check() == []


def test_one_tracker_for_many_threads() -> None:
    from ecpool import StepTracker

    tracker = StepTracker(3)
    added, returned = 4 * 5000, []

    def add(number: int) -> None:
        for n in range(5000):
            tracker.add(f"{number}-{n}", f"r{n % 7}")
            if n % 10 == 0:
                returned.extend(tracker.step([f"r{n % 7}"]))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    returned.extend(tracker.drain_all())
    assert len(returned) == added == len(set(returned))
