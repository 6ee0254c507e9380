"""Faults to plant in the connector or its pool: each is one that such software has had."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from ecpool.vllm.scheduler import ECCPUScheduler
from sim.simulation import Simulation


class UnheldPromise(ECCPUScheduler):
    """A missing lease: what is promised is held only when vLLM has decided to load it."""

    def _promise(self, key: str) -> bool:
        promised = super()._promise(key)
        if key in self._leases:
            self._cache.end_leases([self._leases[key].id])
        return promised

    def _load(self, key: str, request_id: str) -> None:
        seen = self._leases.pop(key, None)
        held = None if seen is None else self._cache.lease(key, rows=seen.shape[0])
        if held is not None:
            self._leases[key] = held
        super()._load(key, request_id)


class Wrapped:
    """A cache of one process, with everything of the real one but what a fault replaces."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class EndedByTheFirst(Wrapped):
    """A load is over when the first rank says so."""

    def complete(self, rank: int, ids: Iterable[int], *, ok: bool = True) -> None:
        told = list(ids)
        self._cache.complete(rank, told, ok=ok)
        self._cache.finish_loads(told)


class ReadyTooSoon(Wrapped):
    """A save is ready when it is claimed, not when it is complete."""

    def claim_saves(self, rank: int, saves: Sequence[tuple[int, Any, str]]) -> list[str]:
        outcomes: list[str] = self._cache.claim_saves(rank, saves)
        claimed = [
            save[0] for save, outcome in zip(saves, outcomes, strict=True) if outcome == "claimed"
        ]
        self._cache.finish_saves(claimed)
        return outcomes


class NeverResolved(Wrapped):
    """Now and then the end of a transfer is not told."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        self._rng = random.Random(1)

    def complete(self, rank: int, ids: Iterable[int], *, ok: bool = True) -> None:
        self._cache.complete(rank, [each for each in ids if self._rng.random() < 0.9], ok=ok)


def in_workers(fault: type[Wrapped]) -> Any:
    """``wrap_cache`` that plants a fault in every worker."""
    return lambda cache, name: fault(cache) if name.startswith("rank") else cache


def reuse_orphans(simulation: Simulation) -> None:
    """``at_death`` that gives the blocks of unfinished saves back at once, as if no device could go
    on.
    """
    for rank, engine in enumerate(simulation.engines):
        simulation.pool.caches[rank].complete(rank, list(engine.saving), ok=False)
