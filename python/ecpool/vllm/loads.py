"""Loads that were announced to the workers, until every rank has claimed them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ecpool.vllm.boundary import Boundary
from ecpool.vllm.giveback import GiveBack
from ecpool.vllm.log import get_logger
from ecpool.vllm.metadata import Load

if TYPE_CHECKING:
    from ecpool import EmbeddingCache

logger = get_logger("scheduler")

PATIENCE = 60.0  # seconds until a load that no worker takes is given up
MIN_STEPS = (
    3  # steps with tokens that must have named it by then: an idle engine is no reason to give up
)


@dataclass(slots=True)
class _OpenLoad:
    load: Load
    since: float
    steps: int = 0  # metadata with tokens that have named it: those that no worker skips


class OpenLoads:
    """The newest announced load of each key. Those that every rank has claimed leave by themselves.

    ``close_later`` closes a transfer once no worker can still be about to claim it.
    """

    def __init__(
        self,
        cache: EmbeddingCache,
        boundary: Boundary,
        give_back: GiveBack,
        close_later: Callable[[int], None],
        clock: Callable[[], float],
        counts: Counter[str],
    ) -> None:
        self._cache = cache
        self._boundary = boundary
        self._give_back = give_back
        self._close_later = close_later
        self._clock = clock
        self._counts = counts
        self._open: dict[str, _OpenLoad] = {}

    def forget(self, keys: Iterable[str]) -> None:
        """Announce the loads of these keys no more: vLLM frees them.

        They stay open for workers that are still about to run a step that named them, and that may
        need them in that very step.
        """
        for key in keys if self._open else ():
            old = self._open.pop(key, None)
            if old is not None:
                self._close_later(old.load.id)

    def refresh(self) -> None:
        """Leave out what all ranks have claimed, and give up what nobody claims."""
        if not self._open:
            return
        ids = [each.load.id for each in self._open.values()]
        # In doubt all are announced again: claiming twice changes nothing.
        waiting = set(self._boundary.call(ids, self._cache.unclaimed, ids))
        self._open = {key: each for key, each in self._open.items() if each.load.id in waiting}
        self._give_up()

    def add(self, load: Load) -> None:
        """Announce a load from now on; an older one of its key no more."""
        old = self._open.get(load.key)
        self._open[load.key] = _OpenLoad(load, self._clock())
        if old is not None:
            self._close_later(old.load.id)

    def announce(self, *, with_tokens: bool) -> list[Load]:
        """The loads for a step's metadata."""
        for each in self._open.values():
            each.steps += with_tokens
        return [each.load for each in self._open.values()]

    def _give_up(self) -> None:
        deadline = self._clock() - PATIENCE
        late = [
            key
            for key, each in self._open.items()
            if each.since < deadline and each.steps >= MIN_STEPS
        ]
        for key in late:
            self._counts["loads_given_up"] += 1
            logger.error("ecpool: no worker has loaded %s in %g seconds", key, PATIENCE)
            self._give_back(self._cache.close_unclaimed, [self._open.pop(key).load.id])
