"""A device without a device: streams, events and a caching allocator, run as perversely as allowed.

Nothing that is queued runs until a seeded scheduler picks it. The scheduler may run any stream's
next piece of work as soon as the events it waits for have fired, so a copy is as late, or as early,
as the submitted order allows. Freed memory is handed out again at once, the last freed first,
exactly under the rules of torch's caching allocator: to the stream that it was allocated on without
any waiting, and only after the streams that were recorded on it have come to the point where they
were at the free.

Device memory is a slice of one arena, seen as CPU tensors. Queued work holds addresses, never
tensors, so it keeps no memory alive, and work that runs too late sees what lies there by then.

`Fault` plants the mistakes that the tests must be able to see.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

import torch

from ecpool.accelerator import HostRegistrationError

ALIGNMENT = 512


class Fault(Enum):
    SIDE_DOES_NOT_WAIT = auto()  # a copy starts before what compute holds is done
    COMPUTE_DOES_NOT_WAIT = auto()  # a loaded tensor is used before it is there
    EVENTS_SHARED = auto()  # an event serves a second batch while the first is under way
    NOT_RECORDED = auto()  # record_stream does nothing
    REPORTED_EARLY = auto()  # waiting for an event returns at once


class Order(Enum):
    """Which of the streams that can go on does."""

    RANDOM = auto()
    NEEDED = auto()  # only what somebody waits for
    COMPUTE_FIRST = auto()
    SIDE_FIRST = auto()


class SimulationError(AssertionError):
    """The code under test did something that a device would refuse, or never finish."""


@dataclass
class Work:
    """A piece of a stream: something to run, a mark to set, or a mark to wait for."""

    run: Callable[[], object] | None = None
    waits_for: Mark | None = None
    sets: Mark | None = None


@dataclass(eq=False)
class Mark:
    stream: SimStream
    fired: bool = False


@dataclass(eq=False)
class SimStream:
    sim: SimAccelerator
    legacy_default: bool = False
    is_compute: bool = False
    work: deque[Work] = field(default_factory=deque)

    def wait_event(self, event: SimEvent) -> None:
        fault = Fault.COMPUTE_DOES_NOT_WAIT if self.is_compute else Fault.SIDE_DOES_NOT_WAIT
        if event.mark is not None and fault not in self.sim.faults:
            self.sim.enqueue(self, Work(waits_for=event.mark))

    def synchronize(self) -> None:
        self.sim.run_until(self.mark())

    def mark(self) -> Mark:
        mark = Mark(self)
        self.work.append(Work(sets=mark))
        return mark


class SimEvent:
    """As on a real device, waiting means the newest mark at the time of the call."""

    def __init__(self, sim: SimAccelerator) -> None:
        self._sim = sim
        self.mark: Mark | None = None

    def record(self, stream: SimStream) -> None:
        self._sim.raise_if_broken("record")
        with self._sim.lock:
            self.mark = stream.mark()
        self._sim.tick()

    def query(self) -> bool:
        early = Fault.REPORTED_EARLY in self._sim.faults
        return self.mark is None or self.mark.fired or early

    def synchronize(self) -> None:
        self._sim.raise_if_broken("synchronize")
        if not self.query():
            assert self.mark is not None
            self._sim.run_until(self.mark)


@dataclass(eq=False)
class Allocation:
    address: int
    nbytes: int
    stream: SimStream
    recorded: set[SimStream] = field(default_factory=set)


class SimAccelerator:
    """The `ecpool.accelerator.Accelerator` of the tests."""

    device = torch.device("cpu")
    registers_host_memory = True

    def __init__(
        self,
        seed: int = 0,
        *,
        order: Order = Order.RANDOM,
        faults: Sequence[Fault] = (),
        arena: int = 1 << 20,
        torn: bool = True,
    ) -> None:
        self.random = random.Random(seed)
        self.order = order
        self.faults = frozenset(faults)
        self.torn = torn
        self.broken: dict[str, int] = {}
        self.lock = threading.RLock()
        self.registered: dict[int, int] = {}
        self.refuse_registration_after = 1 << 62
        self.streams: list[SimStream] = []
        self.legacy = self._stream(legacy_default=True)
        self.compute = self._stream(is_compute=True)
        self._current = threading.local()
        self._arena = (ctypes.c_ubyte * arena)()
        self._base = ctypes.addressof(self._arena)
        self._bytes = torch.frombuffer(self._arena, dtype=torch.uint8)
        self._top = 0
        self._live: dict[int, Allocation] = {}
        self._free: list[Allocation] = []
        self._freed_with_marks: list[tuple[Allocation, list[Mark]]] = []
        self._shared_event = SimEvent(self)

    # What the transfer code calls

    def owns(self, tensor: torch.Tensor) -> bool:
        if tensor.layout != torch.strided:
            return False
        return self._base <= tensor.data_ptr() < self._base + len(self._arena)

    def current_stream(self) -> SimStream:
        return getattr(self._current, "stream", self.compute)

    def new_stream(self) -> SimStream:
        self.raise_if_broken("new_stream")
        return self._stream()

    def new_event(self) -> SimEvent:
        return self._shared_event if Fault.EVENTS_SHARED in self.faults else SimEvent(self)

    @contextlib.contextmanager
    def use(self, stream: SimStream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.raise_if_broken("empty")
        nbytes = torch.empty(tuple(shape), dtype=dtype, device="meta").nbytes
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return self._allocate(nbytes).view(dtype).reshape(tuple(shape))

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.raise_if_broken("copy")
        stream = self.current_stream()
        if stream.legacy_default:
            raise SimulationError("a copy on the legacy default stream")
        assert destination.shape == source.shape
        assert destination.dtype == source.dtype
        for to, come in self._torn(self._raw(destination), self._raw(source)):
            self.enqueue(stream, Work(run=partial(to.copy_, come)))

    def record_stream(self, tensor: torch.Tensor, stream: SimStream) -> None:
        address = tensor.untyped_storage().data_ptr()
        with self.lock:
            if Fault.NOT_RECORDED not in self.faults and address in self._live:
                self._live[address].recorded.add(stream)

    def register_host(self, address: int, nbytes: int) -> bool:
        if sum(self.registered.values()) + nbytes > self.refuse_registration_after:
            raise HostRegistrationError("error 2: out of memory")
        self.registered[address] = nbytes
        return True

    def unregister_host(self, address: int) -> None:
        self.registered.pop(address)

    def enter_waiting_thread(self) -> None:
        pass

    # What tests call

    def launch(self, kernel: Callable[..., object], *tensors: torch.Tensor) -> None:
        """Queue `kernel(*tensors)` on the current stream; it keeps no tensor alive."""
        raw = [self._raw(tensor) for tensor in tensors]
        self.enqueue(self.current_stream(), Work(run=lambda: kernel(*raw)))

    def tick(self) -> None:
        """Time passes: the device may or may not get something done."""
        with self.lock:
            if self.order is Order.NEEDED:
                return
            if self.order is Order.RANDOM:
                for _ in range(self.random.choice((0, 0, 1, 3, 8))):
                    self._step()
                return
            while self._step(only_favoured=True):
                pass

    def run_until(self, mark: Mark) -> None:
        with self.lock:
            while not mark.fired:
                if not (self._step_towards(mark) if self.order is Order.NEEDED else self._step()):
                    raise SimulationError("the device waits for something that was never queued")

    def progress(self) -> None:
        """Get one piece of work done, of any stream that the order prefers."""
        with self.lock:
            self._step()

    def run_all(self) -> None:
        """Do all that is queued."""
        with self.lock:
            while self._step():
                pass
            if any(stream.work for stream in self.streams):
                raise SimulationError("work is left that can never run")

    def break_after(self, call: str, calls: int) -> None:
        """Make each call of this kind fail after so many good ones."""
        self.broken[call] = calls

    def raise_if_broken(self, call: str) -> None:
        if call in self.broken:
            if self.broken[call] == 0:
                raise RuntimeError(f"device error in {call}")
            self.broken[call] -= 1

    def enqueue(self, stream: SimStream, work: Work) -> None:
        with self.lock:
            stream.work.append(work)
        self.tick()

    # The scheduler

    def _stream(self, *, legacy_default: bool = False, is_compute: bool = False) -> SimStream:
        stream = SimStream(self, legacy_default, is_compute)
        self.streams.append(stream)
        return stream

    def _step(self, *, only_favoured: bool = False) -> bool:
        ready = [stream for stream in self.streams if self._can_go_on(stream)]
        wants_compute = self.order is Order.COMPUTE_FIRST
        favoured = [stream for stream in ready if stream.is_compute == wants_compute]
        if self.order is not Order.RANDOM and (favoured or only_favoured):
            ready = favoured
        if not ready:
            return False
        self._advance(self.random.choice(ready))
        return True

    def _step_towards(self, mark: Mark) -> bool:
        stream = mark.stream
        seen = set()
        while stream.work and not self._can_go_on(stream) and stream not in seen:
            seen.add(stream)
            blocker = stream.work[0].waits_for
            assert blocker is not None
            stream = blocker.stream
        if not self._can_go_on(stream):
            return False
        self._advance(stream)
        return True

    def _can_go_on(self, stream: SimStream) -> bool:
        if not stream.work:
            return False
        blocker = stream.work[0].waits_for
        return blocker is None or blocker.fired

    def _advance(self, stream: SimStream) -> None:
        work = stream.work.popleft()
        if work.run is not None:
            work.run()
        if work.sets is not None:
            work.sets.fired = True

    # Memory

    def _allocate(self, nbytes: int) -> torch.Tensor:
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        with self.lock:
            self._collect_freed()
            allocation = self._reuse(size) or self._extend(size)
            self._live[allocation.address] = allocation
        owner = (ctypes.c_ubyte * nbytes).from_buffer(self._arena, allocation.address - self._base)
        weakref.finalize(owner, self._release, allocation).atexit = False
        return torch.frombuffer(owner, dtype=torch.uint8)

    def _reuse(self, size: int) -> Allocation | None:
        stream = self.current_stream()
        for index in range(len(self._free) - 1, -1, -1):
            if self._free[index].nbytes == size and self._free[index].stream is stream:
                return self._free.pop(index)
        return None

    def _extend(self, size: int) -> Allocation:
        if self._top + size > len(self._arena):
            raise torch.OutOfMemoryError("the simulated device is full")
        self._top += size
        return Allocation(self._base + self._top - size, size, self.current_stream())

    def _release(self, allocation: Allocation) -> None:
        with self.lock:
            del self._live[allocation.address]
            others = allocation.recorded - {allocation.stream}
            marks = [stream.mark() for stream in self.streams if stream in others]
            fresh = Allocation(allocation.address, allocation.nbytes, allocation.stream)
            self._freed_with_marks.append((fresh, marks))
            self._collect_freed()

    def _collect_freed(self) -> None:
        waiting = []
        for allocation, marks in self._freed_with_marks:
            if all(mark.fired for mark in marks):
                self._free.append(allocation)
            else:
                waiting.append((allocation, marks))
        self._freed_with_marks = waiting

    def _raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes, shape and strides, without a share in the memory's life."""
        if tensor.numel() == 0 or not self.owns(tensor):
            return tensor
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr() - self._base
        span = self._bytes[start : start + (last + 1) * tensor.element_size()]
        return span.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def _torn(
        self, destination: torch.Tensor, source: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """One copy in two pieces, since on a device others can see half of it."""
        if destination.ndim != 1 or destination.numel() < 2 or not self.torn:
            return [(destination, source)]
        cut = self.random.randrange(1, destination.numel())
        return [(destination[:cut], source[:cut]), (destination[cut:], source[cut:])]
