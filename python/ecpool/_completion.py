"""Waiting for queued copies, and telling their owner."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ecpool.accelerator import Accelerator, Event, Stream
from ecpool.errors import ClosedError

logger = logging.getLogger(__name__)

OnDone = Callable[[list[int], bool], None]

_LOG_INTERVAL = 60.0  # seconds


class LimitedLog:
    """At most one warning a minute; the next one tells how many were left out. Thread-safe."""

    def __init__(self, interval: float = _LOG_INTERVAL) -> None:
        self._interval = interval
        self._lock = threading.Lock()
        self._next = 0.0
        self._left_out = 0

    def warning(self, message: str, error: BaseException) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                self._left_out += 1
                return
            self._next = now + self._interval
            left_out, self._left_out = self._left_out, 0
        more = f" ({left_out} similar messages left out)" if left_out else ""
        logger.warning("ecpool: %s: %s: %s%s", message, type(error).__name__, error, more)


class Reporter:
    """Calls ``on_done`` and survives whatever it does. Thread-safe if ``on_done`` is."""

    def __init__(self, on_done: OnDone, log: LimitedLog) -> None:
        self._on_done = on_done
        self._log = log

    def report(self, ids: Sequence[int], ok: bool) -> None:
        if not ids:
            return
        try:
            self._on_done(list(ids), ok)
        except BaseException as error:  # a panic of the native module is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            self._log.warning("the report of finished copies failed", error)


@dataclass(frozen=True, slots=True)
class Lane:
    """A stream for one batch of copies with the two events that bracket it."""

    stream: Stream
    start: Event
    end: Event


class Lanes:
    """Lanes at rest. One is given back only once its end event has fired. Thread-safe."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._lock = threading.Lock()
        self._resting: list[Lane] = []

    def acquire(self) -> Lane:
        with self._lock:
            if self._resting:
                return self._resting.pop()
        new = self._accelerator
        return Lane(stream=new.new_stream(), start=new.new_event(), end=new.new_event())

    def release(self, lane: Lane) -> None:
        with self._lock:
            self._resting.append(lane)


@dataclass(frozen=True, slots=True)
class Batch:
    """Copies queued on one lane: ids to report as copied and as failed once its end event fired."""

    lane: Lane
    done: Sequence[int]
    failed: Sequence[int] = ()


class Completer:
    """A small thread that waits for batches in the order of their submission and reports each once.

    A batch counts as pending from `admit` until it was reported (`submit`) or given up (`retire`).
    Every method may be called from any thread. In the completer's own, where the garbage collector
    may run somebody's finalizer, `drain` and `stop` do not wait.
    """

    def __init__(
        self, accelerator: Accelerator, lanes: Lanes, reporter: Reporter, log: LimitedLog
    ) -> None:
        self._accelerator = accelerator
        self._lanes = lanes
        self._reporter = reporter
        self._log = log
        self._queue: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending = 0
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._finally: Callable[[], None] | None = None

    def admit(self) -> None:
        """Announce a batch. ClosedError after `stop`, RuntimeError if no thread can start."""
        with self._changed:
            if self._stopped:
                raise ClosedError("this transfer engine is closed")
            self._start_thread()
            self._pending += 1

    def retire(self) -> None:
        """Take an announced batch out of the count: it was reported, or never submitted."""
        with self._changed:
            self._pending -= 1
            self._changed.notify_all()
            self._end_if_handed_over()

    def submit(self, batch: Batch) -> None:
        """Hand over an announced batch whose end event is recorded."""
        self._queue.put(batch)

    def drain(self, timeout: float | None) -> bool:
        """Wait until no batch is pending. False if some still are after ``timeout`` seconds."""
        with self._changed:
            if self._thread is threading.current_thread():
                return self._pending == 0
            return self._changed.wait_for(lambda: self._pending == 0, timeout)

    def stop(self, timeout: float | None, release: Callable[[], None]) -> bool:
        """Admit nothing more, drain, end the thread, then call ``release``.

        False, and nothing is released, if copies are still under way when the time is over. In the
        completer's own thread this returns True at once, and the thread does the rest when it is
        done with the pending batches.
        """
        with self._changed:
            self._stopped = True
            if self._thread is threading.current_thread():
                self._finally = release
                self._end_if_handed_over()
                return True
        drained = self.drain(timeout)
        thread = self._thread
        if thread is not None:
            self._queue.put(None)
            if drained:
                thread.join(timeout)
        if drained:
            release()
        return drained

    def _end_if_handed_over(self) -> None:
        if self._finally is not None and self._pending == 0:
            self._queue.put(None)

    def _start_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="ecpool-copies", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        try:
            self._accelerator.enter_waiting_thread()
        except Exception as error:
            self._log.warning("the thread that waits for copies could not be set up", error)
        while (batch := self._queue.get()) is not None:
            self.finish(batch)
            del batch  # not kept alive while waiting for the next one
        release, self._finally = self._finally, None
        if release is not None:
            self._release(release)

    def _release(self, release: Callable[[], None]) -> None:
        try:
            release()
        except Exception as error:
            self._log.warning("the memory of copies could not be let go", error)

    def finish(self, batch: Batch) -> None:
        """Wait for one batch, report it, and rest its lane."""
        try:
            self._finish(batch)
        except BaseException as error:  # this thread must outlive everything
            self._log.warning("finishing a batch of copies failed", error)
        finally:
            self.retire()

    def _finish(self, batch: Batch) -> None:
        try:
            batch.lane.end.synchronize()
        except Exception as error:
            # The lane is not used again: nobody knows what its events say now.
            self._log.warning("a batch of copies failed on the device", error)
            self._reporter.report([*batch.done, *batch.failed], False)
            return
        self._lanes.release(batch.lane)
        self._reporter.report(batch.done, True)
        self._reporter.report(batch.failed, False)
