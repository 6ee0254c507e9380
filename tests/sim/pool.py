"""The simulated engine's pool: a real region with one client per process of the engine, and what can trouble it from outside."""

from __future__ import annotations

import mmap
import os
import random
import struct
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


class Pool:
    """``caches[rank]`` and ``regions[rank]`` are the workers', ``scheduler`` and ``neighbour`` further clients' views."""

    def __init__(self, settings: Settings) -> None:
        self.name = f"sim-{uuid.uuid4().hex}"
        self._blocks = settings.blocks
        # The scheduler, a neighbour engine, and somebody who stalls under the lock.
        self._clients = settings.ranks + 3
        self.regions = [self._open("worker", rank) for rank in range(settings.ranks)]
        with open(self.regions[0].path, "r+b") as file:
            self._head = mmap.mmap(file.fileno(), 3 * 4096)
        self.caches = [self._cache(region) for region in self.regions]
        self.scheduler_region = self._open("scheduler", 0)
        self.scheduler = self._cache(self.scheduler_region)
        self._neighbour_region = self._open("pool", 0, group="neighbour")
        self.neighbour = self._cache(self._neighbour_region, patient=True)
        self._staller = self._open("tool", 0, group="staller")
        self._check_gone()

    def _open(self, role: Any, rank: int, group: str = "engine") -> Region:
        return Region.open(
            self.name,
            capacity=self._blocks * BLOCK,
            block_size=BLOCK,
            lifetime="private",
            role=role,
            rank=rank,
            group=group,
            expected_clients=self._clients,
        )

    def _cache(self, region: Region, *, patient: bool = False) -> EmbeddingCache:
        return EmbeddingCache(
            region=region, namespace=NAMESPACE, deadline=1.0 if patient else DEADLINE
        )

    def _check_gone(self) -> None:
        if os.path.exists(self._staller.path):
            raise Violation(f"the file of a private region has its name still: {self._staller.path}")

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
        row_bytes = variant.shape[1] * variant.dtype.itemsize
        begun = self.neighbour.begin_save(
            variant.key, rows=variant.rows, row_bytes=row_bytes, modality=variant.modality
        )
        if isinstance(begun, str):
            return
        outcomes = self.neighbour.claim_saves(0, [(begun.id, variant.shape, "float32")])
        if outcomes == ["claimed"]:
            data = content.variant(variant).view(torch.uint8).numpy()
            self._neighbour_region.write(begun.extents, data)
        self.neighbour.complete(0, [begun.id])

    def flush(self) -> None:
        self.neighbour.flush()

    # What is left.

    def stats(self) -> dict[str, int]:
        return self.neighbour.stats()

    def check(self) -> None:
        wrong = self.neighbour.check()
        if wrong:
            raise Violation(f"the index is not in order: {wrong}")

    def check_at_rest(self) -> None:
        """With nothing under way: no entry unfinished or held, no block missing."""
        self.check()
        stats = self.stats()
        unfinished = {name: stats[name] for name in ("writing", "doomed", "orphaned", "holds")}
        if any(unfinished.values()):
            raise Violation(f"something was left behind: {unfinished} of {stats}")
        if stats["free_blocks"] + stats["evictable_blocks"] != stats["num_blocks"]:
            raise Violation(f"blocks are missing: {stats}")
        if stats["entries"] > stats["num_slots"]:
            raise Violation(f"more entries than slots: {stats}")

    def check_contents(self, variants: list[Variant], content: Content, rng: random.Random) -> None:
        """Everything that is ready holds the bytes of its key."""
        for variant in rng.sample(variants, len(variants)):
            if variant.rows == 0:
                continue
            lease = self.neighbour.lease(variant.key)
            if lease is None:
                continue
            dtype = getattr(torch, lease.dtype)
            tensor = torch.empty(lease.shape, dtype=dtype)
            self._neighbour_region.read(lease.extents, tensor.view(torch.uint8).numpy())
            self.neighbour.end_leases([lease.id])
            content.check(tensor, variant.key, "the pool")

    def close(self) -> None:
        for region in (self._neighbour_region, self._staller, self.scheduler_region, *self.regions):
            region.close()
        self._head.close()
