"""Loggers that vLLM's own configuration shows, and lines that do not repeat too often."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable


def get_logger(part: str) -> logging.Logger:
    """A logger below vLLM's root logger, so that its handlers, level and format apply."""
    return logging.getLogger(f"vllm.ecpool.{part}")


class RateLimit:
    """Lets one line of each kind through per interval (seconds), and counts the rest."""

    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._clock = clock
        self._next: dict[Hashable, float] = {}
        self._left_out: dict[Hashable, int] = {}

    def allows(self, kind: Hashable) -> bool:
        now = self._clock()
        if now < self._next.get(kind, now):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        self._next[kind] = now + self._interval
        return True

    def left_out(self, kind: Hashable) -> str:
        """A remark on the lines left out since the last one allowed; empty if there were none."""
        count = self._left_out.pop(kind, 0)
        return f" ({count} more like this since the last such line)" if count else ""
