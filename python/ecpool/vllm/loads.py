"""Loads that were announced to the workers, until every rank has claimed them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ecpool.vllm.boundary import Boundary
from ecpool.vllm.log import get_logger
from ecpool.vllm.metadata import PlainLoad

if TYPE_CHECKING:
    from ecpool import EmbeddingCache, Transfer

logger = get_logger("scheduler")

PATIENCE = 60.0  # seconds until a load that no worker takes is given up
MIN_STEPS = (
    3  # steps with tokens that must have named it by then: an idle engine is no reason to give up
)


@dataclass(slots=True)
class _Late:
    """A load that some rank had not claimed when the next step was made."""

    id: int
    since: float
    steps: int = 0  # metadata with tokens that have named it since: those that no worker skips


class OpenLoads:
    """The newest announced load of each key. Those that every rank has claimed leave by themselves.

    ``close_later`` closes a transfer once no worker can still be about to claim it.
    """

    def __init__(
        self,
        cache: EmbeddingCache,
        boundary: Boundary,
        close_later: Callable[[int], None],
        clock: Callable[[], float],
        counts: Counter[str],
    ) -> None:
        self._cache = cache
        self._boundary = boundary
        self._close_later = close_later
        self._clock = clock
        self._counts = counts
        self._open: dict[str, PlainLoad] = {}
        self._late: dict[str, _Late] = {}

    def forget(self, keys: Iterable[str]) -> None:
        """Announce the loads of these keys no more: vLLM frees them.

        They stay open for workers that are still about to run a step that named them, and that may
        need them in that very step.
        """
        for key in keys if self._open else ():
            old = self._open.pop(key, None)
            if old is not None:
                self._close_later(_id(old))

    def refresh(self) -> None:
        """Leave out what all ranks have claimed, and give up what nobody claims."""
        if not self._open:
            return
        ids = [_id(load) for load in self._open.values()]
        # In doubt all are announced again: claiming twice changes nothing.
        waiting = self._boundary.call(ids, self._cache.unclaimed, ids)
        if waiting:
            self._keep(set(waiting))
        else:
            self._open.clear()
            self._late.clear()

    def add(self, transfers: Mapping[str, Transfer]) -> None:
        """Announce these loads, by key, from now on; older ones of these keys no more."""
        for key, transfer in transfers.items():
            old = self._open.get(key)
            self._open[key] = (key, *transfer.as_load)
            if old is not None:
                self._close_later(_id(old))

    def announce(self, *, with_tokens: bool) -> list[PlainLoad]:
        """The loads for a step's metadata."""
        for late in self._late.values():
            late.steps += with_tokens
        return list(self._open.values())

    def _keep(self, ids: set[int]) -> None:
        """Keep these, as late ones, and of them those that are not too late."""
        now = self._clock()
        self._open = {key: load for key, load in self._open.items() if _id(load) in ids}
        late, self._late = self._late, {}
        for key, load in self._open.items():
            known = late.get(key)
            is_same = known is not None and known.id == _id(load)
            self._late[key] = known if known and is_same else _Late(_id(load), now)
        self._give_up(now - PATIENCE)

    def _give_up(self, deadline: float) -> None:
        too_late = [
            key
            for key, late in self._late.items()
            if late.since < deadline and late.steps >= MIN_STEPS
        ]
        for key in too_late:
            self._counts["loads_given_up"] += 1
            logger.error("ecpool: no worker has loaded %s in %g seconds", key, PATIENCE)
            del self._open[key]
            self._close_later(self._late.pop(key).id)


def _id(load: PlainLoad) -> int:
    return load[1]
