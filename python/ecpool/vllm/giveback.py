"""Calls that give something back to the pool, and that must therefore not be lost."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ecpool.errors import PoolBusyError
from ecpool.vllm.boundary import Boundary

if TYPE_CHECKING:
    from ecpool import EmbeddingCache

ATTEMPTS = 1000
SETTLE_AFTER = 0.05  # seconds after which an idle engine does what was put off
_JOIN_TIMEOUT = 1.0  # seconds; more than a call waits for the pool's lock


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
        if not ids:
            return
        try:
            function(ids)
        except BaseException as error:
            self._failed(_Owed(function, ids), error)

    @property
    def owes(self) -> bool:
        """Whether there are calls to be made again."""
        return bool(self._owed)

    def retry(self) -> None:
        """Make the calls that failed before."""
        owed, self._owed = self._owed, []
        for each in owed:
            try:
                each.function(each.ids)
            except BaseException as error:
                self._failed(each, error)

    def _failed(self, call: _Owed, error: BaseException) -> None:
        self._boundary.contain(getattr(call.function, "__name__", "a call"), error)
        call.attempts += 1
        if call.attempts < ATTEMPTS:
            self._owed.append(call)


class Settler:
    """Does later what the native cache put off because its lock was not free.

    The cache does so itself with its next call, but there may be no such call: a worker that is
    given nothing to copy makes none, and an idle engine has no steps at all. So it is done with the
    next step, or by a thread that lives only while something is put off. Where nothing was put off
    this takes no lock. Thread-safe.
    """

    def __init__(
        self, cache: EmbeddingCache, boundary: Boundary, *, after: float = SETTLE_AFTER
    ) -> None:
        self._cache = cache
        self._boundary = boundary
        self._alarm = _Alarm(after)
        # Also before the interpreter ends: no thread may be in the native module then.
        self._stop = weakref.finalize(self, self._alarm.stop)

    def settle(self) -> None:
        """Once in every step."""
        if self._cache.num_deferred:
            self._boundary.call(False, self._settle)

    def watch(self) -> None:
        """After calls that may have put something off and that none may follow."""
        if self._cache.num_deferred:
            self._boundary.call(None, self._watch)

    def close(self) -> None:
        """Nothing is done any more. Waits for the thread, unless called in it."""
        self._stop()

    def _watch(self) -> None:
        this = weakref.ref(self)

        def again() -> bool:
            settler = this()
            return settler is not None and settler._boundary.call(False, settler._settle)

        self._alarm.arm(again)

    def _settle(self) -> bool:
        """Whether something is still put off."""
        with contextlib.suppress(PoolBusyError):
            self._cache.unclaimed(())  # any call that gets the lock does what was put off first
        return self._cache.num_deferred > 0


class _Alarm:
    """Calls a function every ``after`` seconds until it answers False, in a thread of which there
    is one at most."""

    def __init__(self, after: float) -> None:
        self._after = after
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._armed_again = False

    def arm(self, again: Callable[[], bool]) -> None:
        """Begin, unless it has begun. Raises RuntimeError if no thread can start."""
        with self._lock:
            if self._over.is_set():
                return
            if self._thread is not None:
                self._armed_again = True
                return
            thread = threading.Thread(
                target=self._run, args=(again,), name="ecpool-settler", daemon=True
            )
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """For good. Takes no lock, since the garbage collector may call it anywhere."""
        self._over.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT)

    def _run(self, again: Callable[[], bool]) -> None:
        while not self._over.wait(self._after):
            goes_on = again()
            with self._lock:
                if not (goes_on or self._armed_again):
                    self._thread = None
                    return
                self._armed_again = False
