"""Copies on CPU, done by the time that the call returns."""

import math
import mmap
from collections.abc import Sequence

import torch

from ecpool._completion import LimitedLog, Reporter
from ecpool._transfer_items import (
    Extents,
    HostRegion,
    LoadItem,
    SaveItem,
    TransferError,
    flat_bytes,
    plain,
)

# Through it the native module finds a tensor's memory without any object being made.
_HAS_TABLE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
_CPU = torch.device("cpu")
# The C library maps from here on anyway, and below keeps memory that has pages from earlier use.
_MAP_FROM = 32 << 20  # bytes


class HostCopies:
    """Copies by the calling thread, one native call per item.

    torch's own copy would be faster where cores are idle: it uses all its threads. It is not used,
    since it never returns in a child of a process that has used those threads, and waits for
    threads that get no core on a host whose cores are busy.

    These are plain loops for a reason: a copy of megabytes evicts all else from the core's caches,
    so each function and object that is needed between two copies has to be fetched from memory.
    """

    def __init__(self, region: HostRegion, reporter: Reporter, log: LimitedLog) -> None:
        self._region = region
        self._reporter = reporter
        self._log = log

    def load(self, items: Sequence[LoadItem]) -> dict[str, torch.Tensor]:
        loaded: dict[str, torch.Tensor] = {}
        done: list[int] = []
        errors: dict[int, BaseException] = {}
        try:
            for item in items:
                try:
                    tensor = torch.empty(item.shape, dtype=item.dtype, device=_CPU)
                    if tensor.nbytes >= _MAP_FROM and type(tensor) is torch.Tensor:
                        del tensor  # its address range, where those are scarce
                        tensor = _on_huge_pages(item.shape, item.dtype)
                    self._region.read(item.extents, tensor if _HAS_TABLE else _lend(tensor))
                    loaded[item.key] = tensor
                    done.append(item.id)
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # a panic of the native module is no Exception
                    errors[item.id] = error
        finally:
            self._reporter.report(done, True)
            if len(done) < len(items):
                self._report_failed(items, done)
        if errors:
            failed = {item.key: errors[item.id] for item in items if item.id in errors}
            raise TransferError(failed, loaded, _CPU)
        return loaded

    def save(self, items: Sequence[SaveItem]) -> None:
        done: list[int] = []
        try:
            for item in items:
                try:
                    self._write(item.extents, item.tensor)
                    done.append(item.id)
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # a panic of the native module is no Exception
                    self._log.warning(f"{item.key!r} could not be saved", error)
        finally:
            self._reporter.report(done, True)
            if len(done) < len(items):
                self._report_failed(items, done)

    def _write(self, extents: Extents, tensor: torch.Tensor) -> None:
        # The memory of a derived type need not say its values. Of torch's own, the region refuses
        # what is elsewhere or not as it lies there: asking first would cost each item 1 µs.
        if type(tensor) is torch.Tensor:
            try:
                self._region.write(extents, tensor)
                return
            except Exception:
                pass
        self._region.write(extents, _lend(plain(tensor).cpu().contiguous()))

    def _report_failed(
        self, items: Sequence[LoadItem] | Sequence[SaveItem], done: Sequence[int]
    ) -> None:
        good = set(done)
        self._reporter.report([item.id for item in items if item.id not in good], False)


def _on_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor in memory that comes by huge pages where it can.

    To fill fresh memory page by page, the kernel interrupts a copy every 4 KiB, which costs several
    times what the copy does.
    """
    try:
        nbytes = math.prod(shape) * dtype.itemsize
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # no address range of its own, or a kernel without huge pages
        return torch.empty(shape, dtype=dtype, device=_CPU)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    # Not by views, which autograd treats differently.
    return torch.empty(0, dtype=dtype, device=_CPU).set_(storage, 0, shape, ())


def _lend(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous CPU tensor as the region's calls can take it."""
    # An older torch is asked by way of Python, where it refuses gradients and some element types.
    return tensor if _HAS_TABLE else flat_bytes(tensor.detach())
