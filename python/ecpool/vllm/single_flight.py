"""Waiting for an item that another engine is encoding at this moment, instead of encoding it twice.

vLLM asks about a request again and again: every step for running ones, and thousands of times a
second where it has nothing else to do. So the pool is looked at only once in a while, and in
between the last answer is given again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ecpool.errors import PoolBusyError

LOOK_EVERY = 1e-3  # seconds for which an answer stands
BLIND_FOR = 0.1  # seconds without a look after one that failed: the pool's lock may be stuck
MOST_ITEMS = 32  # that one look is about; those behind them are far from being needed


@dataclass(slots=True)
class _Waiting:
    """One live request. first: the first of its items that is not behind its computed tokens.
    until: when the wait for an item ends, by its key; an item is waited for once. settled: keys
    that are waited for no more."""

    computed: int = 0
    first: int = 0
    look_at: float = 0.0
    may_go: bool = True  # the last answer
    until: dict[str, float] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)


class SingleFlight:
    """Which requests are held back, and for how long.

    Each item of each request is waited for once, at most ``limit`` seconds from when it was first
    seen to be written elsewhere; time passes whether vLLM asks or not. After that the request goes
    on for good, so two engines that wait for each other part again. Nothing is ever waited for that
    this engine writes itself.

    ``is_written_elsewhere`` tells whether another living client writes an item of this key. Where
    it raises PoolBusyError the request goes; what else it raises goes on to the caller, who lets
    the request go too. Not thread-safe: vLLM's scheduler has one thread.
    """

    def __init__(
        self,
        is_written_elsewhere: Callable[[str], bool],
        limit: float,
        clock: Callable[[], float],
        counts: Counter[str],
    ) -> None:
        self._is_written_elsewhere = is_written_elsewhere
        self._limit = limit
        self._clock = clock
        self._counts = counts
        self._requests: dict[str, _Waiting] = {}
        self._blind_until = 0.0

    def lets_go(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the request may be scheduled now. O(1) but for one look per millisecond."""
        features = request.mm_features
        if not features:
            return True
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = _Waiting()
        self._skip_computed(state, features, num_computed_tokens)
        if state.first >= len(features):
            return True
        now = self._clock()
        if now >= state.look_at:
            state.look_at = now + LOOK_EVERY
            state.may_go = True
            state.may_go = self._look(state, features, now)
        return state.may_go

    def settle(self, request_id: str, key: str) -> None:
        """The item has its place in vLLM's encoder cache: the request waits for it no more."""
        state = self._requests.get(request_id)
        if state is not None:
            state.settled.add(key)

    def forget(self, request_id: str) -> None:
        """The request is finished; unknown ones are ignored."""
        self._requests.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._requests)

    def _skip_computed(self, state: _Waiting, features: Sequence[Any], computed: int) -> None:
        if computed < state.computed:  # it was preempted and begins anew
            state.first = 0
        state.computed = computed
        while state.first < len(features):
            position = features[state.first].mm_position
            if position.offset + position.length > computed:
                return
            state.first += 1

    def _look(self, state: _Waiting, features: Sequence[Any], now: float) -> bool:
        if now < self._blind_until:
            return True
        next_ones = features[state.first : state.first + MOST_ITEMS]
        try:
            # All are looked at, so that the times of several run side by side.
            waits = [self._waits_for(state, each.identifier, now) for each in next_ones]
        except BaseException as error:
            # From now, since the look itself has taken as long as one waits for the lock.
            self._blind_until = self._clock() + BLIND_FOR
            if isinstance(error, PoolBusyError):
                return True
            raise
        return not any(waits)

    def _waits_for(self, state: _Waiting, key: str, now: float) -> bool:
        if key in state.settled:
            return False
        until = state.until.get(key)
        if until is not None and now >= until:
            state.settled.add(key)
            self._counts["waits_expired"] += 1
            return False
        if not self._is_written_elsewhere(key):
            if until is not None:
                state.settled.add(key)
            return False
        if until is None:
            state.until[key] = now + self._limit
            self._counts["waits"] += 1
        return True
