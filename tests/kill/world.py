"""What the processes of the kill harness share: settings, items and their bytes, heartbeats.

Everything here is made before the first fork, so each process has it at once. No torch: a process
must start within milliseconds, since thousands of them are killed.
"""

from __future__ import annotations

import hashlib
import mmap
import random
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

if TYPE_CHECKING:
    from ecpool import EmbeddingCache, Region

P = ParamSpec("P")
R = TypeVar("R")
Lifetime = Literal["private", "shared", "persistent"]
Role = Literal["scheduler", "worker", "pool", "tool"]

BLOCK_SIZE = 4096
NUM_BLOCKS = 1024
SEGMENT_SIZE = 2 << 20
ROW_BYTES = 2000  # no divisor of a block, so that items end inside one
DTYPE = "uint8"
NUM_KEYS = 400
MOST_ROWS = 16
NAMESPACES = ("model-a", "model-b")
QUARANTINE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Settings:
    """kills: processes that die before the run ends. engines: each a scheduler and `workers`
    workers. clients: processes that use the pool by themselves. batch: kills between two audits.
    stops: the share of victims that are stopped for a moment first. crash_points: the native module
    is the build that can kill itself between two stores."""

    directory: Path
    kills: int = 100
    seed: int = 0
    engines: int = 1
    workers: int = 2
    clients: int = 0
    lifetime: Lifetime = "persistent"
    batch: int = 100
    stops: float = 0.05
    crash_points: bool = False
    name: str = "pool"


@dataclass(frozen=True, slots=True)
class Item:
    """One key with the rows that its owner's model makes of it."""

    key: str
    rows: int

    @property
    def nbytes(self) -> int:
        return self.rows * ROW_BYTES


def _items() -> list[Item]:
    rng = random.Random("items")
    return [Item(f"image-{n}", rng.randint(1, MOST_ROWS)) for n in range(NUM_KEYS)]


ITEMS = _items()


def bytes_of(namespace: str, key: str, rows: int) -> bytes:
    """The only right content of an entry: no two keys, namespaces or places in an item agree."""
    return hashlib.shake_128(f"{namespace}/{key}/{rows}".encode()).digest(rows * ROW_BYTES)


CONTENT = {(ns, item.key): bytes_of(ns, item.key, item.rows) for ns in NAMESPACES for item in ITEMS}


def some_item(rng: random.Random) -> Item:
    """Popular ones more often, so that there are hits as well as evictions."""
    return ITEMS[int(NUM_KEYS * rng.random() ** 2)]


def open_region(
    settings: Settings, name: str, role: Role, group: str, rank: int = 0, expected: int = 1
) -> Region:
    from ecpool import Region

    return Region.open(
        name,
        capacity=NUM_BLOCKS * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        segment_size=SEGMENT_SIZE,
        lifetime=settings.lifetime,
        role=role,
        group=group,
        rank=rank,
        expected_clients=expected if settings.lifetime == "private" else 0,
        directory=str(settings.directory),
    )


def open_cache(region: Region, namespace: str) -> EmbeddingCache:
    from ecpool import EmbeddingCache

    return EmbeddingCache(region=region, namespace=namespace)


class Pulse:
    """Heartbeats in memory that survives the one who wrote them: calls so far, and the longest."""

    _RECORD = struct.Struct("Qd")

    def __init__(self, places: int) -> None:
        self._memory = mmap.mmap(-1, places * self._RECORD.size)

    def clear(self, place: int) -> None:
        self._RECORD.pack_into(self._memory, place * self._RECORD.size, 0, 0.0)

    def write(self, place: int, calls: int, longest: float) -> None:
        self._RECORD.pack_into(self._memory, place * self._RECORD.size, calls, longest)

    def read(self, place: int) -> tuple[int, float]:
        calls, longest = self._RECORD.unpack_from(self._memory, place * self._RECORD.size)
        return int(calls), float(longest)


class Probe:
    """Makes the calls of one process: beats, times them, and arms crash points now and then."""

    _MOST_POINTS = 40  # an operation that needs room passes about so many
    _SHARE_ARMED = 0.004

    def __init__(self, rng: random.Random, pulse: Pulse, place: int, crash_points: bool) -> None:
        self._rng, self._pulse, self._place = rng, pulse, place
        self._calls, self._longest = 0, 0.0
        self._arm: Callable[[int, str], Any] | None = None
        if crash_points:
            from ecpool import _native

            self._arm = _native._arm_crash  # type: ignore[attr-defined]

    def __call__(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if self._arm is not None and self._rng.random() < self._SHARE_ARMED:
            self._arm(self._rng.randrange(self._MOST_POINTS), "kill")
        begun = time.perf_counter()
        result = call(*args, **kwargs)
        self._longest = max(self._longest, time.perf_counter() - begun)
        self.beat()
        return result

    def beat(self) -> None:
        """Says that the process is not stuck, for instance while it waits for others."""
        self._calls += 1
        self._pulse.write(self._place, self._calls, self._longest)
