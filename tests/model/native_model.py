"""A naive model of `ecpool.EmbeddingCache`, `ecpool.Region` and `ecpool.StepTracker`, in plain
Python.

It is written to be obviously right, not fast: every question is answered by looking at all entries.
Tests use it as the shadow of the native classes, and as their stand-in where the scheduler's
decisions alone are tested. What it leaves out: locks, dead clients, limits on slots and holds, and
time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ecpool.errors import (
    EntryStateError,
    InvalidArgumentError,
    KeyNotFoundError,
    TooLargeError,
)
from support.memory import bytes_of

DTYPE_SIZES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}

Extents = tuple[tuple[int, int], ...]

WRITING, READY, DOOMED, FREE = "WRITING", "READY", "DOOMED", "FREE"


@dataclass(eq=False)
class Hold:
    """One copy or promise: a lease, a load or a save."""

    id: int
    kind: str  # "lease", "load", "save"
    entry: Entry
    ranks: set[int] = field(default_factory=set)
    claimed: set[int] = field(default_factory=set)
    completed: set[int] = field(default_factory=set)
    failed: bool = False


@dataclass(eq=False)
class Entry:
    namespace: str
    key: str
    extents: Extents
    nbytes: int
    state: str = WRITING
    shape: tuple[int, ...] = ()
    dtype: str = ""
    modality: str = ""
    pins: int = 0
    by_owner: bool = False  # written by whoever allocated it, until `mark_ready` or `discard`
    holds: list[Hold] = field(default_factory=list)
    queued_at: int = 0  # place in the eviction order; 0 means not in it

    @property
    def num_blocks(self) -> int:
        return sum(num for _, num in self.extents)

    @property
    def held(self) -> bool:
        return self.pins > 0 or bool(self.holds) or self.by_owner

    def transferring(self) -> bool:
        return any(hold.kind != "lease" for hold in self.holds)


class CacheEntry:
    """What `get` and `alloc` return."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    @property
    def block_ids(self) -> tuple[int, ...]:
        return tuple(
            block for first, num in self._entry.extents for block in range(first, first + num)
        )

    @property
    def extents(self) -> Extents:
        return self._entry.extents

    @property
    def ready(self) -> bool:
        return self._entry.state == READY

    @property
    def evictable(self) -> bool:
        return self._entry.state == READY and not self._entry.held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheEntry) and self._entry is other._entry

    def __hash__(self) -> int:
        return id(self._entry)


@dataclass(frozen=True)
class Transfer:
    """What `lease` and `begin_save` return."""

    id: int
    extents: Extents
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    unverified: int | None = None  # nobody ever leaves this model and comes back

    @property
    def num_blocks(self) -> int:
        return sum(num for _, num in self.extents)

    @property
    def as_load(self) -> tuple[int, Extents, tuple[int, ...], str]:
        return self.id, self.extents, self.shape, self.dtype

    @property
    def as_save(self) -> tuple[int, Extents]:
        return self.id, self.extents


class Region:
    """The blocks of one pool and their bytes. Block i lies at i * block_size."""

    def __init__(self, num_blocks: int, block_size: int = 16384) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.nbytes = num_blocks * block_size
        self.blocks: dict[int, bytes] = {}
        self.entries: list[Entry] = []
        self.learned: dict[tuple[str, str], int] = {}
        self.closed = False
        self._ids = itertools.count(1)
        self._places = itertools.count(1)

    def write(self, extents: Sequence[tuple[int, int]], source: Any) -> None:
        data = bytes(bytes_of(source))
        blocks = _blocks_of(extents)
        if len(data) > len(blocks) * self.block_size:
            raise InvalidArgumentError("more bytes than the extents hold")
        for index, block in enumerate(blocks):
            piece = data[index * self.block_size : (index + 1) * self.block_size]
            if piece:
                self.blocks[block] = piece

    def read(self, extents: Sequence[tuple[int, int]], destination: Any) -> None:
        view = bytes_of(destination)
        blocks = _blocks_of(extents)
        if view.nbytes > len(blocks) * self.block_size:
            raise InvalidArgumentError("more bytes than the extents hold")
        for index, block in enumerate(blocks):
            start = index * self.block_size
            size = max(0, min(self.block_size, view.nbytes - start))
            stored = self.blocks.get(block, b"")[:size]
            view[start : start + size] = stored + bytes(size - len(stored))

    def close(self) -> None:
        self.closed = True

    def next_id(self) -> int:
        return next(self._ids)

    def next_place(self) -> int:
        return next(self._places)

    def free_blocks(self) -> list[int]:
        taken = {block for entry in self.entries for block in _blocks_of(entry.extents)}
        return [block for block in range(self.num_blocks) if block not in taken]

    def eviction_order(self) -> list[Entry]:
        evictable = [e for e in self.entries if e.state == READY and not e.held]
        return sorted(evictable, key=lambda entry: entry.queued_at)

    def reserve(self, num_blocks: int) -> Extents | None:
        """Extents of this many blocks, evicting what must go; None when even that is not enough."""
        evictable = self.eviction_order()
        if len(self.free_blocks()) + sum(e.num_blocks for e in evictable) < num_blocks:
            return None
        while len(self.free_blocks()) < num_blocks:
            self.release(evictable.pop(0))
        return _gather(self.free_blocks(), num_blocks)

    def release(self, entry: Entry) -> None:
        entry.state = FREE
        self.entries.remove(entry)


class EmbeddingCache:
    """The model of `ecpool.EmbeddingCache`: one namespace's view of a region's entries."""

    num_deferred = 0  # there is no lock that could be taken

    def __init__(
        self,
        num_blocks: int | None = None,
        *,
        region: Region | None = None,
        namespace: str = "",
        block_size: int = 16384,
        deadline: float = 0.02,
    ) -> None:
        if region is None:
            assert num_blocks is not None
            region = Region(num_blocks, block_size)
        self.region = region
        self.namespace = namespace
        self.num_blocks = region.num_blocks
        self.block_size = region.block_size
        self._counters: Counter[str] = Counter()

    # The methods of vLLM 0.26's class of this name.

    def get(self, key: str) -> CacheEntry | None:
        entry = self._find(key)
        return None if entry is None else CacheEntry(entry)

    def alloc(self, key: str, n_blocks: int) -> CacheEntry | None:
        if self._find(key) is not None or any(each.by_owner for each in self._doomed(key)):
            raise EntryStateError(f"alloc of {key!r}: there is one already")
        if n_blocks > self.num_blocks:
            raise TooLargeError(f"alloc of {key!r}: {n_blocks} of {self.num_blocks} blocks")
        extents = self.region.reserve(n_blocks)
        if extents is None:
            return None
        entry = Entry(self.namespace, key, extents, n_blocks * self.block_size, by_owner=True)
        self.region.entries.append(entry)
        return CacheEntry(entry)

    def mark_ready(self, key: str) -> None:
        self._written(key, ok=True)

    def pin(self, key: str) -> None:
        entry = self._need(key)
        if entry.state != READY:
            raise EntryStateError(f"pin of {key!r} in state {entry.state}")
        if entry.pins == 0 and any(each.pins for each in self._doomed(key)):
            raise EntryStateError(f"pin of {key!r}, which is pinned from before a flush")
        entry.pins += 1

    def unpin(self, key: str) -> None:
        entry = self._find_pinned(key) or self._need(key)
        if entry.pins == 0:
            raise EntryStateError(f"unpin of {key!r}, which is not pinned")
        entry.pins -= 1
        if entry.pins == 0:
            self._hold_ended(entry)

    def discard(self, key: str) -> None:
        self._written(key, ok=False)

    def _written(self, key: str, *, ok: bool) -> None:
        own = [entry for entry in self._mine() if entry.key == key and entry.by_owner]
        entry = own[0] if own else self._need(key)
        if not entry.by_owner:
            raise EntryStateError(f"{key!r} is {entry.state} and not this caller's to write")
        entry.by_owner = False
        if ok and entry.state == WRITING:
            self._become_ready(entry)
        else:
            self._doom(entry)

    def has_held_entries(self) -> bool:
        return any(entry.state != READY or entry.held for entry in self._mine())

    # Promises and transfers.

    def contains(self, key: str) -> bool:
        entry = self._find(key)
        return entry is not None and entry.state == READY

    def lease(
        self, key: str, *, rows: int = -1, dtype: str | None = None, modality: str = ""
    ) -> Transfer | None:
        entry = self._find(key)
        if entry is None or entry.state != READY:
            self._counters["misses"] += 1
            return None
        found_rows = entry.shape[0] if entry.shape else 1
        wrong_rows = rows >= 0 and found_rows != rows
        wrong_dtype = dtype is not None and entry.dtype != dtype
        wrong_modality = bool(modality and entry.modality) and entry.modality != modality
        if wrong_rows or wrong_dtype or wrong_modality:
            self._counters["mismatches"] += 1
            self._doom(entry)
            return None
        self._counters["hits"] += 1
        return self._transfer(self._hold("lease", entry))

    def end_leases(self, ids: Iterable[int]) -> None:
        for hold in self._open(ids, "lease"):
            if not hold.claimed:
                self._end(hold, moves=False)

    def dispatch_loads(self, ids: Iterable[int], *, ranks: int) -> None:
        for hold in self._open(ids, "lease"):
            hold.kind = "load"
            hold.ranks = _ranks_of(ranks)
            self._settle(hold)

    def begin_save(
        self, key: str, *, rows: int, row_bytes: int, modality: str = "", ranks: int = 1
    ) -> Transfer | str:
        if rows <= 0:
            return "empty"
        if self._find(key) is not None:
            return "exists"
        row_bytes = self.region.learned.get((self.namespace, modality), row_bytes)
        nbytes = rows * row_bytes
        num_blocks = max(1, -(-nbytes // self.block_size))
        if num_blocks > self.num_blocks:
            return "too_large"
        extents = self.region.reserve(num_blocks)
        if extents is None:
            return "no_room"
        entry = Entry(self.namespace, key, extents, nbytes)
        self.region.entries.append(entry)
        hold = self._hold("save", entry)
        hold.ranks = _ranks_of(ranks)
        entry.modality = modality
        return self._transfer(hold)

    def claim_loads(self, rank: int, ids: Sequence[int]) -> list[str]:
        return [self._claim(self._find_hold(each, "load", "lease"), rank) for each in ids]

    def claim_saves(
        self, rank: int, saves: Sequence[tuple[int, tuple[int, ...], str]]
    ) -> list[str]:
        return [self._claim_save(rank, *each) for each in saves]

    def complete(self, rank: int, ids: Iterable[int], *, ok: bool = True) -> None:
        for each in ids:
            hold = self._find_hold(each, "lease", "load", "save")
            if hold is None:
                continue
            if hold.kind == "save" and not ok and rank in hold.ranks:
                hold.failed = True
                hold.claimed.add(rank)
            if rank in hold.claimed:
                hold.completed.add(rank)
            self._settle(hold)

    def withdraw(self, ids: Iterable[int]) -> None:
        for hold in self._open(ids, "save"):
            if not hold.claimed:
                hold.failed = True
                self._settle(hold)

    def close_unclaimed(self, ids: Iterable[int]) -> list[int]:
        wanted = list(ids)
        for hold in self._open(wanted, "load", "save"):
            if hold.kind == "load":
                hold.ranks &= hold.claimed
            elif hold.claimed != hold.ranks:
                hold.failed = True
            self._settle(hold)
        return [each for each in wanted if self._find_hold(each, "lease", "load", "save")]

    def unclaimed(self, ids: Iterable[int]) -> list[int]:
        return [
            hold.id
            for hold in self._open(ids, "lease", "load", "save")
            if hold.kind == "lease" or hold.ranks - hold.claimed
        ]

    def finish_saves(self, ids: Iterable[int]) -> None:
        for hold in self._open(ids, "save"):
            self._end_save(hold, ok=True)

    def finish_loads(self, ids: Iterable[int]) -> None:
        for hold in self._open(ids, "load"):
            self._end(hold)

    def flush(self) -> int:
        gone = [entry for entry in self._mine() if entry.state in (WRITING, READY)]
        for entry in gone:
            self._doom(entry)
        return len(gone)

    def stats(self) -> dict[str, int]:
        states = Counter(entry.state for entry in self.region.entries)
        return {
            "num_blocks": self.num_blocks,
            "free_blocks": len(self.region.free_blocks()),
            "evictable_blocks": sum(e.num_blocks for e in self.region.eviction_order()),
            "writing": states[WRITING],
            "ready": states[READY],
            "doomed": states[DOOMED],
        }

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def check(self) -> list[str]:
        wrong = []
        taken = Counter(b for entry in self.region.entries for b in _blocks_of(entry.extents))
        wrong += [f"block {block} is owned twice" for block, times in taken.items() if times > 1]
        keys = Counter(
            (e.namespace, e.key) for e in self.region.entries if e.state in (WRITING, READY)
        )
        wrong += [f"key {key} is found twice" for key, times in keys.items() if times > 1]
        for entry in self.region.entries:
            if entry.state == DOOMED and not entry.held:
                wrong.append(f"{entry.key} is doomed and held by nobody")
        return wrong

    # Not part of the native class: what tests and the simulator look at.

    def keys(self) -> list[str]:
        """Keys that `contains`, in eviction order first, then the held ones."""
        order = [e.key for e in self.region.eviction_order() if e.namespace == self.namespace]
        return order + [e.key for e in self._mine() if e.state == READY and e.held]

    def is_flushed(self, key: str) -> bool:
        """Whether an entry of this key lives on unfindable, since somebody holds or writes it."""
        return bool(self._doomed(key))

    def _doomed(self, key: str) -> list[Entry]:
        return [entry for entry in self._mine() if entry.key == key and entry.state == DOOMED]

    # Inside.

    def _mine(self) -> list[Entry]:
        return [entry for entry in self.region.entries if entry.namespace == self.namespace]

    def _find(self, key: str) -> Entry | None:
        found = [e for e in self._mine() if e.key == key and e.state in (WRITING, READY)]
        return found[0] if found else None

    def _find_pinned(self, key: str) -> Entry | None:
        pinned = [entry for entry in self._mine() if entry.key == key and entry.pins]
        return pinned[0] if pinned else None

    def _need(self, key: str) -> Entry:
        entry = self._find(key)
        if entry is None:
            raise KeyNotFoundError(f"no entry of key {key!r}")
        return entry

    def _hold(self, kind: str, entry: Entry) -> Hold:
        hold = Hold(self.region.next_id(), kind, entry)
        entry.holds.append(hold)
        return hold

    def _find_hold(self, wanted: int, *kinds: str) -> Hold | None:
        for entry in self.region.entries:
            for hold in entry.holds:
                if hold.id == wanted and hold.kind in kinds:
                    return hold
        return None

    def _open(self, ids: Iterable[int], *kinds: str) -> list[Hold]:
        found = (self._find_hold(each, *kinds) for each in ids)
        return [hold for hold in found if hold is not None]

    def _transfer(self, hold: Hold) -> Transfer:
        entry = hold.entry
        return Transfer(hold.id, entry.extents, entry.nbytes, entry.shape, entry.dtype)

    def _become_ready(self, entry: Entry) -> None:
        entry.state = READY
        entry.queued_at = self.region.next_place()

    def _hold_ended(self, entry: Entry, *, moves: bool = True) -> None:
        if entry.state == DOOMED and not entry.held:
            self.region.release(entry)
        elif moves and entry.state == READY and not entry.pins and not entry.transferring():
            entry.queued_at = self.region.next_place()

    def _end(self, hold: Hold, *, moves: bool = True) -> None:
        hold.entry.holds.remove(hold)
        self._hold_ended(hold.entry, moves=moves)

    def _doom(self, entry: Entry) -> None:
        """The entry is found no more; its blocks return when nobody reads or writes them."""
        entry.state = DOOMED
        self._hold_ended(entry)

    def _claim(self, hold: Hold | None, rank: int) -> str:
        if hold is None or (hold.kind != "lease" and rank not in hold.ranks):
            return "refused"
        if rank in hold.claimed:
            return "repeated"
        hold.claimed.add(rank)
        return "claimed"

    def _claim_save(self, rank: int, wanted: int, shape: tuple[int, ...], dtype: str) -> str:
        if dtype not in DTYPE_SIZES:
            raise InvalidArgumentError(f"dtype {dtype!r} is not known")
        hold = self._find_hold(wanted, "save")
        if hold is not None and hold.failed:
            return "refused"
        if hold is not None and hold.entry.state != WRITING and rank not in hold.claimed:
            return "refused"
        outcome = self._claim(hold, rank)
        if hold is None or outcome != "claimed":
            return outcome
        nbytes = DTYPE_SIZES[dtype]
        for size in shape:
            nbytes *= size
        if shape and shape[0]:
            self.region.learned[hold.entry.namespace, hold.entry.modality] = nbytes // shape[0]
        if nbytes > hold.entry.num_blocks * self.block_size:
            hold.claimed.discard(rank)
            hold.failed = True
            self._settle(hold)
            return "too_large"
        hold.entry.shape, hold.entry.dtype, hold.entry.nbytes = tuple(shape), dtype, nbytes
        return "claimed"

    def _settle(self, hold: Hold) -> None:
        """End a transfer whose ranks have all spoken."""
        if hold.kind == "load" and hold.ranks <= hold.completed:
            self._end(hold)
        elif hold.kind == "save":
            awaited = hold.claimed if hold.failed else hold.ranks
            if awaited <= hold.completed:
                self._end_save(hold, ok=not hold.failed)

    def _end_save(self, hold: Hold, *, ok: bool) -> None:
        entry = hold.entry
        entry.holds.remove(hold)
        if ok and entry.state == WRITING:
            self._become_ready(entry)
        else:
            self._doom(entry)


class StepTracker:
    """What was added comes back after some steps, or once its request finishes."""

    def __init__(self, max_concurrent_batches: int) -> None:
        if max_concurrent_batches < 1:
            raise InvalidArgumentError("max_concurrent_batches must be at least 1")
        self._batches = max_concurrent_batches
        self._pending: list[tuple[int, str, str]] = []  # step of expiry, key, request
        self._step = 0

    def add(self, mm_hash: str, request_id: str) -> None:
        self._pending.append((self._step + self._batches, mm_hash, request_id))

    def step(self, finished_req_ids: Iterable[str]) -> list[str]:
        returned = []
        for request_id in finished_req_ids:
            returned += self._take(lambda item, wanted=request_id: item[2] == wanted)
        returned += self._take(lambda item: item[0] <= self._step)
        self._step += 1
        return returned

    def drain_all(self) -> list[str]:
        newest_first = sorted(self._pending, key=lambda item: -item[0])
        self._pending = []
        return [key for _, key, _ in newest_first]

    def __len__(self) -> int:
        return len(self._pending)

    def _take(self, wanted) -> list[str]:  # type: ignore[no-untyped-def]
        taken = [item for item in self._pending if wanted(item)]
        self._pending = [item for item in self._pending if not wanted(item)]
        return [key for _, key, _ in taken]


def _blocks_of(extents: Iterable[tuple[int, int]]) -> list[int]:
    return [block for first, num in extents for block in range(first, first + num)]


def _ranks_of(bitmask: int) -> set[int]:
    return {rank for rank in range(64) if bitmask >> rank & 1}


def _gather(free: list[int], num_blocks: int) -> Extents:
    """The first run that is long enough, else the first free blocks, joined into runs."""
    runs: list[tuple[int, int]] = []
    for block in free:
        if runs and sum(runs[-1]) == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    for first, num in runs:
        if num >= num_blocks:
            return ((first, num_blocks),)
    extents = []
    for first, num in runs:
        taken = min(num, num_blocks)
        if taken:
            extents.append((first, taken))
        num_blocks -= taken
    return tuple(extents)
