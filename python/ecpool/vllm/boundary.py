"""The boundary between the pool and the engine: a failure of the pool is never a failure of the
engine.

Whatever goes wrong inside becomes a neutral answer, a counter and a log line. Panics of the native
module are not Exceptions, so they are recognised by name. What ends a process on purpose passes.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from ecpool.vllm.log import RateLimit

T = TypeVar("T")
P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])

_INTERVAL = 10.0  # seconds between two log lines about the same call


def is_containable(error: BaseException) -> bool:
    """Whether this is a failure of something inside, rather than a wish to end the process."""
    if isinstance(error, Exception):
        return True
    # PyO3 makes its own class for panics, which cannot be imported.
    return any(
        each.__name__ == "PanicException" and each.__module__ == "pyo3_runtime"
        for each in type(error).__mro__
    )


class Boundary:
    """Calls things and survives them. Of two failures at once, a counter may miss one."""

    def __init__(
        self, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._limit = RateLimit(_INTERVAL, clock)
        self.failures: Counter[str] = Counter()

    def call(self, default: T, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What ``function`` returns, or ``default`` if it fails."""
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            self.contain(getattr(function, "__name__", "a call"), error)
            return default

    def contain(self, what: str, error: BaseException) -> None:
        """`failed`, for use in a handler; raises what is meant to end the process again."""
        if not is_containable(error):
            raise error
        self.failed(what, error)

    def failed(self, what: str, error: BaseException) -> None:
        """Count and log a failure that was survived."""
        what = what.lstrip("_")
        self.failures[what] += 1
        if self._limit.allows(what):
            self._logger.warning(
                "ecpool: %s failed and was left out; the engine goes on without it%s",
                what,
                self._limit.left_out(what),
                exc_info=error,
            )


def contained(default: Callable[[], Any]) -> Callable[[F], F]:
    """Make a method answer ``default()`` where it fails; its object has a `boundary`."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except BaseException as error:
                if not is_containable(error):
                    raise
                self.boundary.failed(method.__name__, error)
                return default()

        return cast(F, wrapper)

    return decorate
