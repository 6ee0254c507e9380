"""The simulated engine's pool: a real region, and what can trouble it from outside.

Every process of the engine is a client of its own. Further clients are a neighbour engine of the
same namespace, and somebody who stops under the lock.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
import time
import uuid
from typing import Any

import torch

from ecpool import EmbeddingCache, Region
from sim.content import Content, Variant, Violation
from sim.settings import Settings

BLOCK = 4096
NAMESPACE = "simulated"
DEADLINE = 0.0002  # seconds; a stalled lock costs each call this much
# Where the lock's word and the generations of the clients' places lie in the file.
LOCK_WORD, GENERATIONS = 4096, 8192
# Seconds that a device may go on after its processes, and until what it may have touched returns.
AFTERLIFE, QUARANTINE = 1.2, 2.2


def _buffer(tensor: torch.Tensor) -> Any:
    """A contiguous tensor's memory."""
    return tensor.view(torch.uint8).numpy()


class Pool:
    """``regions`` and ``caches`` are the workers', by rank; ``scheduler`` is its cache."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._name = f"sim-{uuid.uuid4().hex}"
        self._engines = 0
        self._last_death = 0.0
        # A private region loses its name once all have come: the engine and three more clients.
        self._expected = settings.ranks + 3
        self.neighbour_region = self._open("pool", 0, "neighbour")
        with open(self.neighbour_region.path, "r+b") as file:
            self._head = mmap.mmap(file.fileno(), 3 * 4096)
        self.neighbour = self._cache(self.neighbour_region, deadline=5.0)
        self._staller = self._open("tool", 0, "staller")
        self.regions: list[Region] = []
        self.caches: list[EmbeddingCache] = []
        self.start_engine()
        if not settings.restarts and os.path.exists(self._staller.path):
            raise Violation(f"a private region has a name still: {self._staller.path}")

    def start_engine(self) -> None:
        """Workers first, as in vLLM."""
        self._engines += 1
        group = f"engine-{self._engines}"
        ranks = range(self._settings.ranks)
        self.regions = [self._open("worker", rank, group) for rank in ranks]
        self.caches = [self._cache(region) for region in self.regions]
        self.scheduler_region = self._open("scheduler", 0, group)
        self.scheduler = self._cache(self.scheduler_region)

    def end_engine(self, rng: random.Random) -> None:
        """All processes of the engine end, in any order."""
        regions = [self.scheduler_region, *self.regions]
        for region in rng.sample(regions, len(regions)):
            region.close()
        self._last_death = time.monotonic()

    def is_after_death(self, seconds: float) -> bool:
        return time.monotonic() - self._last_death > seconds

    def _open(self, role: Any, rank: int, group: str) -> Region:
        return Region.open(
            self._name,
            capacity=self._settings.blocks * BLOCK,
            block_size=BLOCK,
            lifetime="shared" if self._settings.restarts else "private",
            role=role,
            rank=rank,
            group=group,
            expected_clients=0 if self._settings.restarts else self._expected,
        )

    def _cache(self, region: Region, *, deadline: float = DEADLINE) -> EmbeddingCache:
        return EmbeddingCache(region=region, namespace=NAMESPACE, deadline=deadline)

    # A holder of the lock that has stopped.

    def stall(self) -> None:
        """From now on the lock is held by a client that lives and does nothing."""
        place = self._staller.client
        (generation,) = struct.unpack_from("I", self._head, GENERATIONS + 4 * place)
        word = (generation & 0x7FFFF) << 12 | (place + 1)
        struct.pack_into("I", self._head, LOCK_WORD, word)

    def go_on(self) -> None:
        struct.pack_into("I", self._head, LOCK_WORD, 0)

    # Another engine of the same namespace.

    def neighbour_saves(self, variant: Variant, content: Content) -> None:
        """It saves an item, at once, if there is room."""
        begun = self.neighbour.begin_save(
            variant.key,
            rows=variant.rows,
            row_bytes=variant.shape[1] * variant.dtype.itemsize,
            modality=variant.modality,
        )
        if isinstance(begun, str):
            return
        outcomes = self.neighbour.claim_saves(0, [(begun.id, variant.shape, "float32")])
        if outcomes == ["claimed"]:
            self.neighbour_region.write(begun.extents, _buffer(content.variant(variant)))
        self.neighbour.complete(0, [begun.id])

    def flush(self) -> None:
        self.neighbour.flush()

    # What is left.

    def wait_for_the_dead(self) -> None:
        """Until what dead processes left behind may be used again."""
        if self._last_death:
            time.sleep(max(0.0, self._last_death + QUARANTINE - time.monotonic()))
            self.neighbour_region.reclaim()
            self._last_death = 0.0

    def check(self) -> None:
        wrong = self.neighbour.check()
        if wrong:
            raise Violation(f"the index is not in order: {wrong}")

    def check_at_rest(self) -> None:
        """With nothing under way: no entry unfinished or held, no block missing."""
        self.check()
        stats = self.neighbour.stats()
        unfinished = {name: stats[name] for name in ("writing", "doomed", "orphaned", "holds")}
        if any(unfinished.values()):
            raise Violation(f"something was left behind: {unfinished} of {stats}")
        if stats["free_blocks"] + stats["evictable_blocks"] != stats["num_blocks"]:
            raise Violation(f"blocks are missing: {stats}")

    def check_contents(self, variants: list[Variant], content: Content) -> None:
        """Everything that is ready holds the bytes of its key."""
        for key in {variant.key for variant in variants}:
            lease = self.neighbour.lease(key)
            if lease is None:
                continue
            tensor = torch.empty(lease.shape, dtype=getattr(torch, lease.dtype))
            self.neighbour_region.read(lease.extents, _buffer(tensor))
            self.neighbour.end_leases([lease.id])
            content.check(tensor, key, "the pool")

    def close(self) -> None:
        regions = [*self.regions, self.scheduler_region, self._staller, self.neighbour_region]
        for region in regions:
            region.close()
        self._head.close()
