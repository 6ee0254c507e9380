"""One line in the log, now and then, about what the pool has done."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from ecpool.sizes import format_size


class Summary:
    """Logs totals once per ``interval`` seconds (0: never), if something happened since."""

    def __init__(self, logger: logging.Logger, interval: float, clock: Callable[[], float]) -> None:
        self._logger = logger
        self._interval = interval
        self._clock = clock
        self._next = clock() + interval
        self._last = (0, 0, 0)

    def tick(self, numbers: Callable[[], Mapping[str, int]]) -> None:
        """Called every step; asks for ``numbers`` only when a line is due."""
        if not self._interval:
            return
        now = self._clock()
        if now >= self._next:
            self._next = now + self._interval
            self._write(numbers())

    def last(self, numbers: Callable[[], Mapping[str, int]]) -> None:
        """The totals at the end."""
        if self._interval:
            self._write(numbers())

    def _write(self, numbers: Mapping[str, int]) -> None:
        activity = (numbers.get("hits", 0), numbers.get("misses", 0), numbers.get("saves", 0))
        if activity == self._last:
            return
        self._last = activity
        hits, misses, saves = activity
        asked = hits + misses
        self._logger.info(
            "ecpool: %d loaded from the pool (%s), %d encoded, hit rate %.0f%%, %d saved; "
            "%d of %d blocks free",
            hits,
            format_size(numbers.get("loaded_bytes", 0)),
            misses,
            100 * hits / asked if asked else 0,
            saves,
            numbers.get("free_blocks", 0),
            numbers.get("num_blocks", 0),
        )
