"""Completion by steps, as vLLM 0.26 has it, instead of by the workers' word.

What is as old as the steps that can be in flight counts as done, and so does what a finished
request has begun.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ecpool.vllm.boundary import Boundary
from ecpool.vllm.giveback import GiveBack

if TYPE_CHECKING:
    from ecpool import EmbeddingCache, StepTracker


class CompletionBySteps:
    """Ends one engine's transfers. ``batches`` is the number of steps that can be in flight."""

    def __init__(
        self,
        cache: EmbeddingCache,
        boundary: Boundary,
        give_back: GiveBack,
        step_tracker: type[StepTracker],
        batches: int,
    ) -> None:
        self._cache = cache
        self._boundary = boundary
        self._give_back = give_back
        self._saves = step_tracker(batches)
        self._loads = step_tracker(batches)

    def begin_save(self, transfer_id: int, request_id: str) -> None:
        """A save goes into this step's metadata."""
        self._start(self._saves, transfer_id, request_id)

    def begin_load(self, transfer_id: int, request_id: str) -> None:
        """A load goes into this step's metadata."""
        self._start(self._loads, transfer_id, request_id)

    def step(self, finished: Iterable[str]) -> None:
        """End a step in which these requests were finished."""
        requests = list(finished)
        saves = self._expired(self._saves, requests)
        # Of a save that no worker has claimed not even the shape is known.
        unseen = self._unclaimed(saves)
        self._give_back(self._close_saves, [each for each in saves if each in unseen])
        self._give_back(self._cache.finish_saves, [each for each in saves if each not in unseen])
        loads = self._expired(self._loads, requests)
        # A load that some rank has not seen is not over, however many steps have gone by.
        unseen = self._unclaimed(loads)
        for each in unseen:
            self.begin_load(each, "")
        self._give_back(self._cache.finish_loads, [each for each in loads if each not in unseen])

    def end_loads(self) -> None:
        """Declare every load over: there are no further steps."""
        drained = self._boundary.call([], self._loads.drain_all)
        self._give_back(self._cache.finish_loads, [int(each) for each in drained])

    def _start(self, clock: StepTracker, transfer_id: int, request_id: str) -> None:
        """What is not on its clock is never given back, so this is not to be lost either."""

        def start_clock(ids: list[int]) -> None:
            clock.add(str(ids[0]), request_id)

        self._give_back(start_clock, [transfer_id])

    def _expired(self, clock: StepTracker, finished: list[str]) -> list[int]:
        return [int(each) for each in self._boundary.call([], clock.step, finished)]

    def _unclaimed(self, ids: list[int]) -> set[int]:
        """Those that some rank has not claimed; in doubt all."""
        return set(self._boundary.call(ids, self._cache.unclaimed, ids)) if ids else set()

    def _close_saves(self, ids: list[int]) -> None:
        """Where the lock was not free, one may be claimed after all, and no worker will end it."""
        for each in self._cache.close_unclaimed(ids):
            self.begin_save(each, "")
