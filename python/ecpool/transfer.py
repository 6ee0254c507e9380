"""Copies between torch tensors and a region's data area.

A `TransferEngine` serves one device. On CPU a copy is done when the call returns. On a device each
call submits one batch of asynchronous copies on a side stream, ordered against the caller's current
stream by events, and a small thread reports the batch once its end event has fired.

Ordering on a device, with *compute* the calling thread's current stream and *side* the batch's
stream:

- save: side waits for all that compute holds at the call, then copies. The sources are recorded on
  side, so a caller may drop them at once; it must not write into them before their ids are
  reported, unless on a stream that waits for that.
- load: destinations are allocated on compute, since that is where they are used, freed and used
  again; memory of a stream of its own would be lost to everything else. Such memory may have been
  freed a moment ago with reads still queued on compute, so side waits for compute before it writes.
  Then compute waits for side, so the tensors can be used on compute as soon as the call returns.

Runs of neighbouring blocks are copied as one piece, never across a segment of the region: a segment
is the unit of registration, and a device refuses a copy over two registrations. Pieces are
submitted one by one, so no batch can be too large for a driver. An item is nearly always one run,
as the allocator hands out whole runs first, which is why no table of addresses is built here.
"""

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch

from ecpool._completion import Batch, Completer, Lane, Lanes, LimitedLog, OnDone, Reporter
from ecpool._host_copies import HostCopies
from ecpool._transfer_items import (
    Extents,
    HostRegion,
    LoadItem,
    SaveItem,
    TransferError,
    dtype_of,
    flat_bytes,
    plain,
)
from ecpool.accelerator import Accelerator, HostRegistration, Stream, TorchAccelerator
from ecpool.errors import ClosedError, InvalidArgumentError

__all__ = ["HostRegion", "LoadItem", "SaveItem", "TransferEngine", "TransferError", "dtype_of"]

_CLOSE_TIMEOUT = 60.0  # seconds that closing waits for copies under way


class TransferEngine:
    """Copies items between one region and one device. Thread-safe.

    ``on_done(ids, ok)`` is told of every submitted id exactly once: inline where the copy is done
    when the call returns, otherwise from the engine's own thread. It should be quick and must not
    call the engine's `drain` or `close`. What it raises is logged.

    A process forked from the one that made the engine gets ClosedError from every call but `close`.
    """

    def __init__(
        self,
        region: HostRegion,
        device: torch.device,
        *,
        on_done: OnDone,
        accelerator: Accelerator | None = None,
    ) -> None:
        self._pid = os.getpid()
        log = LimitedLog()
        reporter = Reporter(on_done, log)
        self._host = HostCopies(region, reporter, log)
        self._device_copies: _DeviceCopies | None = None
        if accelerator is None and device.type != "cpu":
            accelerator = TorchAccelerator(device)
        if accelerator is not None:
            self._device_copies = _DeviceCopies(accelerator, region, reporter, log)
        self._closed = False
        self.device = device if accelerator is None else accelerator.device
        # Also runs when the engine is dropped unclosed, and before the interpreter ends.
        self._release = weakref.finalize(self, _release, self._pid, self._device_copies)

    def register(self) -> int:
        """Pin the region's memory for the device, segment by segment; returns the bytes pinned.

        Reads every page once, which takes seconds for tens of GiB. Where the driver refuses, one
        warning is logged and copies are slower. 0 on CPU and on devices that do not pin.
        """
        self._check_open()
        copies = self._device_copies
        return 0 if copies is None else copies.register()

    def load(self, items: Sequence[LoadItem]) -> dict[str, torch.Tensor]:
        """Copy items into new tensors on the engine's device, as one batch.

        The tensors may be used on the calling thread's current stream at once. Raises TransferError
        if some items failed, after reporting those as not ok; its ``loaded`` has the others.
        On CPU, tensors of 32 MiB or more lie in mappings of their own, which cannot be resized.
        """
        self._check_open()
        if not items:
            return {}
        copies = self._device_copies
        return self._host.load(items) if copies is None else copies.load(items)

    def save(self, items: Sequence[SaveItem]) -> None:
        """Copy tensors into the region, as one batch, after the current stream's work so far.

        An item that cannot be copied is reported as not ok and logged (at most once a minute); it
        never raises. Tensors of another device than the engine's are copied before the call
        returns.
        """
        self._check_open()
        copies = self._device_copies
        if copies is None:
            self._host.save(items)
            return
        local = [item for item in items if copies.owns(item.tensor)]
        if len(local) < len(items):
            self._host.save([item for item in items if not copies.owns(item.tensor)])
        if local:
            copies.save(local)

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until everything submitted is reported; False if ``timeout`` seconds pass first."""
        self._check_fork()
        copies = self._device_copies
        return copies is None or copies.drain(timeout)

    def close(self) -> None:
        """Wait up to a minute for copies under way, then unregister the memory. Idempotent.

        Memory that a device may still be writing to is left registered, and mapped. In the engine's
        own thread, where the garbage collector may end an engine, nothing is waited for: that
        thread unregisters the memory after the last copy.
        """
        self._closed = True
        self._release()
        # With it goes the view that keeps the region mapped.
        self._device_copies = None

    def _check_open(self) -> None:
        if self._closed or os.getpid() != self._pid:
            self._check_fork()
            raise ClosedError("this transfer engine is closed")

    def _check_fork(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                "this transfer engine belongs to the process that this one forked from"
            )


# What could not be unregistered when its engine ended: a device may write to it still, and
# unmapping it would hand the addresses to somebody else.
_stuck: list[object] = []


def _release(pid: int, copies: "_DeviceCopies | None") -> None:
    if copies is None or os.getpid() != pid:
        return
    if not copies.close(_CLOSE_TIMEOUT):
        _stuck.append(copies)


class _DeviceCopies:
    """Copies on side streams of one accelerator."""

    def __init__(
        self, accelerator: Accelerator, region: HostRegion, reporter: Reporter, log: LimitedLog
    ) -> None:
        self._accelerator = accelerator
        self._reporter = reporter
        self._log = log
        self._lanes = Lanes(accelerator)
        self._completer = Completer(accelerator, self._lanes, reporter, log)
        self._memory = _HostMemory(region)
        self._registration = HostRegistration(accelerator, region.data_ptr, region.segments())

    def owns(self, tensor: torch.Tensor) -> bool:
        return self._accelerator.owns(tensor)

    def register(self) -> int:
        if not self._accelerator.registers_host_memory:
            return 0
        return self._registration.register()

    def drain(self, timeout: float | None) -> bool:
        return self._completer.drain(timeout)

    def close(self, timeout: float) -> bool:
        return self._completer.stop(timeout, self._unregister)

    def _unregister(self) -> None:
        # A method of this object, so that the memory stays mapped until it has run.
        self._registration.release()

    def save(self, items: Sequence[SaveItem]) -> None:
        outcome = _Outcome(items)
        # A save that failed half-way is reported with its batch: until then the device writes its
        # blocks.
        self._run(outcome, self._queue_saves, late=outcome.failed_ids)
        _log_failed_saves(outcome, self._log)

    def load(self, items: Sequence[LoadItem]) -> dict[str, torch.Tensor]:
        outcome = _Outcome(items)
        # A load that failed only read its blocks, so its report need not wait for the device.
        if self._run(outcome, self._queue_loads, late=list):
            self._reporter.report(outcome.failed_ids(), False)
        return _loaded(outcome, self._accelerator.device)

    def _run(
        self,
        outcome: "_Outcome[_Item]",
        queue: Callable[["_Outcome[_Item]", Lane], None],
        late: Callable[[], list[int]],
    ) -> bool:
        """Queue one batch and see to it that each id is reported, whatever happens here.

        True if the batch is on its way: its good ids and those that ``late`` gives are then
        reported when its end event fires. Otherwise every id was reported as failed.
        """
        try:
            self._completer.admit()
        except ClosedError:
            raise
        except Exception as error:
            return self._give_up(outcome, error)
        lane: Lane | None = None
        submitted = False
        try:
            lane = self._lanes.acquire()
            queue(outcome, lane)
            self._completer.submit(Batch(lane, outcome.good_ids(), late()))
            submitted = True
        except Exception as error:
            outcome.fail(error)
        finally:
            if not submitted:
                self._settle(lane)
                self._give_up(outcome, RuntimeError("interrupted"))
                self._completer.retire()
        return submitted

    def _give_up(self, outcome: "_Outcome[_Item]", error: Exception) -> bool:
        outcome.fail(error)
        self._reporter.report(outcome.failed_ids(), False)
        return False

    def _settle(self, lane: Lane | None) -> None:
        """Wait for what a failed batch had queued: after this its blocks are used again."""
        if lane is None:
            return
        try:
            lane.stream.synchronize()
        except Exception as error:
            self._log.warning("a stream that failed could not be waited for", error)

    def _queue_saves(self, outcome: "_Outcome[SaveItem]", lane: Lane) -> None:
        lane.start.record(self._accelerator.current_stream())
        lane.stream.wait_event(lane.start)
        with self._accelerator.use(lane.stream):
            outcome.attempt(lambda item: self._queue_save(item, lane.stream))
            lane.end.record(lane.stream)

    def _queue_save(self, item: SaveItem, side: Stream) -> None:
        self._accelerator.record_stream(item.tensor, side)
        tensor = plain(item.tensor)
        if not tensor.is_contiguous():
            # Memory of the side stream, so that using it again waits for the copy by itself.
            packed = self._accelerator.empty(tensor.shape, tensor.dtype)
            self._accelerator.copy(packed, tensor)
            tensor = packed
        for host, piece in self._memory.pieces(item.extents, flat_bytes(tensor)):
            self._accelerator.copy(host, piece)

    def _queue_loads(self, outcome: "_Outcome[LoadItem]", lane: Lane) -> None:
        compute = self._accelerator.current_stream()
        outcome.attempt(lambda item: self._allocate(item, outcome.tensors, lane.stream))
        # After the allocations: what is queued on compute at this point may still use their memory.
        lane.start.record(compute)
        lane.stream.wait_event(lane.start)
        with self._accelerator.use(lane.stream):
            outcome.attempt(lambda item: self._queue_load(item, outcome.tensors[item.id]))
            lane.end.record(lane.stream)
        compute.wait_event(lane.end)

    def _allocate(self, item: LoadItem, tensors: dict[int, torch.Tensor], side: Stream) -> None:
        tensor = self._accelerator.empty(item.shape, item.dtype)
        # For a batch that fails before compute was made to wait for it.
        self._accelerator.record_stream(tensor, side)
        tensors[item.id] = tensor

    def _queue_load(self, item: LoadItem, tensor: torch.Tensor) -> None:
        for host, piece in self._memory.pieces(item.extents, flat_bytes(tensor)):
            self._accelerator.copy(piece, host)


_Item = TypeVar("_Item", LoadItem, SaveItem)


class _Outcome(Generic[_Item]):
    """What has become of a batch's items so far."""

    __slots__ = ("_items", "errors", "tensors")

    def __init__(self, items: Sequence[_Item]) -> None:
        self._items: Sequence[_Item] = items
        self.errors: dict[int, BaseException] = {}
        self.tensors: dict[int, torch.Tensor] = {}

    def attempt(self, step: Callable[[_Item], None]) -> None:
        """Do one step for every item that has not failed yet.

        An interrupt fails the items that the step has not done, and goes on up.
        """
        items = self.good()
        for place, item in enumerate(items):
            try:
                step(item)
            except (KeyboardInterrupt, SystemExit) as interrupt:
                self.errors.update((left.id, interrupt) for left in items[place:])
                raise
            except BaseException as error:  # a panic of the native module is no Exception
                self.errors[item.id] = error

    def fail(self, error: BaseException) -> None:
        """All that was good until now has failed for this reason."""
        self.errors.update((item.id, error) for item in self.good())

    def good(self) -> Sequence[_Item]:
        if not self.errors:
            return self._items
        return [item for item in self._items if item.id not in self.errors]

    def good_ids(self) -> list[int]:
        return [item.id for item in self.good()]

    def failed(self) -> list[_Item]:
        return [item for item in self._items if item.id in self.errors]

    def failed_ids(self) -> list[int]:
        return [item.id for item in self.failed()]


def _loaded(outcome: _Outcome[LoadItem], device: object) -> dict[str, torch.Tensor]:
    loaded = {item.key: outcome.tensors[item.id] for item in outcome.good()}
    if outcome.errors:
        failed = {item.key: outcome.errors[item.id] for item in outcome.failed()}
        raise TransferError(failed, loaded, device)
    return loaded


def _log_failed_saves(outcome: _Outcome[SaveItem], log: LimitedLog) -> None:
    for item in outcome.failed():
        log.warning(f"{item.key!r} could not be saved", outcome.errors[item.id])


class _HostMemory:
    """The region's data area as one tensor of bytes, and where an item's bytes lie in it."""

    def __init__(self, region: HostRegion) -> None:
        # A tensor made in inference mode could not be written to outside it later.
        with torch.inference_mode(False):
            self._bytes = torch.frombuffer(region, dtype=torch.uint8)
        self._block_size = region.block_size
        self._segment_starts = {offset // region.block_size for offset, _ in region.segments()}

    def pieces(
        self, extents: Extents, item: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of equally long slices, region and item, that cover the whole flat byte tensor."""
        nbytes = item.numel()
        capacity = sum(count for _, count in extents) * self._block_size
        if nbytes > capacity:
            raise InvalidArgumentError(
                f"{nbytes} bytes do not fit into extents of {capacity} bytes"
            )
        done = 0
        for first, count in self._runs(extents):
            length = min(count * self._block_size, nbytes - done)
            if length == 0:
                break
            start = first * self._block_size
            yield self._bytes.narrow(0, start, length), item.narrow(0, done, length)
            done += length

    def _runs(self, extents: Extents) -> Iterator[tuple[int, int]]:
        """The extents with neighbours joined, except across the start of a segment."""
        start = count = 0
        for first, length in extents:
            if count and first == start + count and first not in self._segment_starts:
                count += length
                continue
            if count:
                yield start, count
            start, count = first, length
        if count:
            yield start, count
