"""What an operation costs as the pool fills up, and as it holds more entries: it must not grow."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from benches.measure import Effort, Turn, growth, summarise, take_turns
from benches.peers import vllm_embedding_cache
from benches.report import Goal, Row
from ecpool import EmbeddingCache

ENTRIES = (1_000, 10_000, 100_000, 1_000_000)
OCCUPANCIES = (10, 25, 50, 75, 90, 100)
CYCLE_GOAL, HIT_GOAL = Goal(at_most=1.5), Goal(at_most=2.0)
MIXED_SIZES = range(8, 25)  # blocks, 16 on average
MEAN_SIZE = 16
HOT = 1_000  # entries
PEER = "vLLM's EmbeddingCache"


def rows(effort: Effort) -> Iterator[Row]:
    yield from _by_entries(effort)
    yield from _by_occupancy(effort)


class Pool:
    """A pool filled by `fill`. Keys are numbers, written out anew for each batch.

    So their text is fresh in the processor's caches, as that of a request that has just come is,
    while what the pool knows of them is not.
    """

    def __init__(self, cache: Any, sizes: list[int]) -> None:
        self.cache = cache
        self._sizes = sizes
        self._random = random.Random(1)
        self.oldest = self.next = 0

    def fill(self, entries: int) -> None:
        for key in self._new(entries):
            self.cache.alloc(key, self._sizes[0])
            self.cache.mark_ready(key)

    def fill_mixed(self, entries: int) -> None:
        for key in self._new(entries):
            self.cache.alloc(key, self._random.choice(self._sizes))
            self.cache.mark_ready(key)

    def _new(self, count: int) -> list[str]:
        first, self.next = self.next, self.next + count
        return [f"{number:064x}" for number in range(first, self.next)]

    def _stored(self, count: int, newest: int | None = None) -> list[str]:
        first = self.oldest if newest is None else max(self.oldest, self.next - newest)
        numbers = range(first, self.next)
        return [f"{number:064x}" for number in self._random.choices(numbers, k=count)]

    def cycles(self, count: int) -> float:
        """Seconds of so many cycles, each of which evicts one entry."""
        keys = self._new(count)
        sizes = self._random.choices(self._sizes, k=count)
        alloc, mark_ready = self.cache.alloc, self.cache.mark_ready
        pin, unpin = self.cache.pin, self.cache.unpin
        started = time.perf_counter()
        for key, size in zip(keys, sizes, strict=True):
            alloc(key, size)
            mark_ready(key)
            pin(key)
            unpin(key)
        seconds = time.perf_counter() - started
        self.oldest += count
        return seconds

    def gets(self, count: int) -> float:
        """Hits on entries anywhere in the pool: what it knows of them is in no cache."""
        return self._get(self._stored(count))

    def hot_gets(self, count: int) -> float:
        """Hits on a few entries, over and over."""
        return self._get(self._stored(count, HOT))

    def _get(self, keys: list[str]) -> float:
        get = self.cache.get
        started = time.perf_counter()
        for key in keys:
            get(key)
        return time.perf_counter() - started

    def leases(self, count: int) -> float:
        keys = self._stored(count)
        lease, end_leases = self.cache.lease, self.cache.end_leases
        started = time.perf_counter()
        for key in keys:
            end_leases((lease(key).id,))
        return time.perf_counter() - started


OPERATIONS: tuple[tuple[str, Goal, Callable[[Pool, int], float]], ...] = (
    ("cycle", CYCLE_GOAL, Pool.cycles),
    ("hit among the newest, get", HIT_GOAL, Pool.hot_gets),
    ("hit, get", HIT_GOAL, Pool.gets),
    ("hit, lease + end_leases", HIT_GOAL, Pool.leases),
)


def _by_entries(effort: Effort) -> Iterator[Row]:
    sizes = ENTRIES[:2] if effort.quick else ENTRIES
    pools = {f"ours {size}": Pool(EmbeddingCache(size), [1]) for size in sizes}
    pools |= {f"vllm {size}": Pool(vllm_embedding_cache(size), [1]) for size in sizes}
    for name, pool in pools.items():
        pool.fill(int(name.split()[1]))
    for title, goal, operation in OPERATIONS:
        able = {n: p for n, p in pools.items() if operation is not Pool.leases or n[:4] == "ours"}
        turns = {name: _turn(pool, operation, effort) for name, pool in able.items()}
        yield from _entry_rows(title, sizes, take_turns(turns, effort), goal)


def _turn(pool: Pool, operation: Callable[[Pool, int], float], effort: Effort) -> Turn:
    count = 20 if effort.rounds < 2 else 500 if effort.quick else 2_000
    return lambda: operation(pool, count) / count


def _entry_rows(
    title: str, sizes: tuple[int, ...], values: dict[str, list[float]], goal: Goal
) -> Iterator[Row]:
    for size in sizes:
        peer = values.get(f"vllm {size}")
        yield Row(
            "scaling",
            f"{size:,} entries: {title}",
            "s",
            summarise(values[f"ours {size}"]),
            PEER if peer else "",
            summarise(peer) if peer else None,
        )
    small, large = sizes[0], sizes[-1]
    factor = growth(values, f"ours {small}", f"ours {large}")
    yield Row("scaling", f"growth from {small:,} to {large:,}: {title}", "×", factor, goal=goal)


# By occupancy.


def _by_occupancy(effort: Effort) -> Iterator[Row]:
    entries = 200 if effort.quick else 10_000
    turns: dict[str, Turn] = {}
    for percent in OCCUPANCIES:
        turns[f"ours {percent}"] = _at(percent, entries, EmbeddingCache)
        turns[f"vllm {percent}"] = _at(percent, entries, vllm_embedding_cache)
    few = Effort(min(effort.rounds, 9), effort.batch, effort.quick)
    values = take_turns(turns, few)
    for percent in OCCUPANCIES:
        mine, theirs = (summarise(values[f"{side} {percent}"]) for side in ("ours", "vllm"))
        yield Row("scaling", f"{percent} % full, mixed sizes: cycle", "s", mine, PEER, theirs)
    factor = growth(values, f"ours {OCCUPANCIES[0]}", f"ours {OCCUPANCIES[-1]}")
    yield Row("scaling", "growth from 10 % to 100 % full: cycle", "×", factor, goal=CYCLE_GOAL)


def _at(percent: int, entries: int, make: Callable[[int], Any]) -> Turn:
    """Cycles in a pool that is so full; a few, so that it stays about so full."""

    def turn() -> float:
        pool = Pool(make(entries * MEAN_SIZE), list(MIXED_SIZES))
        # Once round, so that the free blocks are not one run as in a pool that is new.
        pool.fill_mixed(entries * percent // 100 if percent < 100 else entries * 5 // 4)
        count = max(1, entries // 50)
        return pool.cycles(count) / count

    return turn
