"""Calls that give something back to the pool, and that must therefore not be lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ecpool.vllm.boundary import Boundary, is_containable

if TYPE_CHECKING:
    from ecpool import EmbeddingCache

ATTEMPTS = 1000


@dataclass(slots=True)
class _Owed:
    function: Callable[[list[int]], object]
    ids: list[int]
    attempts: int = 0


class GiveBack:
    """Makes such calls; those that fail are made again with every step, up to a bound."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._owed: list[_Owed] = []

    def __call__(self, function: Callable[[list[int]], object], ids: list[int]) -> None:
        """Call ``function(ids)``, now or, if it fails, once more with each `retry`."""
        if ids:
            self._attempt(_Owed(function, ids))

    def retry(self) -> None:
        """Make the calls that failed before."""
        if not self._owed:
            return
        owed, self._owed = self._owed, []
        for each in owed:
            self._attempt(each)

    def _attempt(self, call: _Owed) -> None:
        try:
            call.function(call.ids)
        except BaseException as error:
            if not is_containable(error):
                raise
            self._boundary.failed(getattr(call.function, "__name__", "a call"), error)
            call.attempts += 1
            if call.attempts < ATTEMPTS:
                self._owed.append(call)


class Settler:
    """Does with a later step what the native cache put off because its lock was not free.

    The cache does so itself with its next call, but where everything is held back there may be no
    such call: a worker that is given nothing to copy makes none. Where nothing was put off this
    takes no lock.
    """

    def __init__(self, cache: EmbeddingCache, boundary: Boundary) -> None:
        self._cache = cache
        self._boundary = boundary
        self._settled = 0

    def settle(self) -> None:
        """Once in every step."""
        self._boundary.call(None, self._settle)

    def _settle(self) -> None:
        before = self._cache.counters()
        put_off = before.get("deferred", 0)
        if put_off == self._settled:
            return
        self._cache.unclaimed(())  # any call that gets the lock does what was put off first
        if self._cache.counters().get("lock_timeouts", 0) == before.get("lock_timeouts", 0):
            self._settled = put_off
