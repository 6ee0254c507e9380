"""Copies on CPU, done by the time that the call returns."""

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
from ecpool.errors import ClosedError

# Through it the native module finds a tensor's memory without any object being made.
_HAS_TABLE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
_CPU = torch.device("cpu")
_STRIDED = torch.strided

# Below, waking another thread costs more than its help gives.
_SHARED_FROM = 1_000_000  # bytes


class HostCopies:
    """Copies by the calling thread: small or scattered items by one native call each.

    An item of a megabyte or more in one extent is copied by torch, with the threads that the
    model's own operations use: one thread alone does not get all that the memory gives.

    These are plain loops for a reason: a copy of megabytes evicts all else from the core's caches,
    so each function and object that is needed between two copies has to be fetched from memory.
    """

    def __init__(self, region: HostRegion, reporter: Reporter, log: LimitedLog) -> None:
        self._region = region
        self._reporter = reporter
        self._log = log
        self._block_size = region.block_size
        self._views: dict[torch.dtype, torch.Tensor] = {}

    def load(self, items: Sequence[LoadItem]) -> dict[str, torch.Tensor]:
        loaded: dict[str, torch.Tensor] = {}
        done: list[int] = []
        errors: dict[int, BaseException] = {}
        try:
            for item in items:
                try:
                    tensor = torch.empty(item.shape, dtype=item.dtype, device=_CPU)
                    if tensor.nbytes >= _SHARED_FROM and self._is_one_run(item.extents, tensor):
                        tensor.copy_(self._blocks(item.extents, tensor))
                    else:
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
                    tensor = item.tensor
                    if (
                        not (tensor.is_cpu and tensor.layout is _STRIDED and tensor.is_contiguous())
                        or tensor.is_neg()
                        or tensor.is_conj()
                        or tensor.requires_grad  # the region's bytes are part of nobody's graph
                    ):
                        tensor = plain(tensor).cpu().contiguous()
                    if tensor.nbytes >= _SHARED_FROM and self._is_one_run(item.extents, tensor):
                        self._blocks(item.extents, tensor).copy_(tensor)
                    else:
                        self._region.write(item.extents, tensor if _HAS_TABLE else _lend(tensor))
                    done.append(item.id)
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # a panic of the native module is no Exception
                    self._log.warning(f"{item.key!r} could not be saved", error)
        finally:
            self._reporter.report(done, True)
            if len(done) < len(items):
                self._report_failed(items, done)

    def close(self) -> None:
        """Let go of the region's memory."""
        self._views.clear()

    def _is_one_run(self, extents: Extents, tensor: torch.Tensor) -> bool:
        """Whether the tensor fits into a single extent; what does not fit is the native call's to
        refuse.
        """
        return len(extents) == 1 and tensor.nbytes <= extents[0][1] * self._block_size

    def _blocks(self, extents: Extents, tensor: torch.Tensor) -> torch.Tensor:
        """The first bytes of the extent as a tensor like this one, which is contiguous.

        torch refuses what is not in the region. A closed region may have given the blocks away.
        """
        if self._region.closed:
            raise ClosedError("the region was closed")
        dtype = tensor.dtype
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = self._view(dtype)
        begin = extents[0][0] * self._block_size // tensor.itemsize
        return view.as_strided(tensor.shape, tensor.stride(), begin)

    def _view(self, dtype: torch.dtype) -> torch.Tensor:
        # A tensor made in inference mode could not be written to outside it later.
        with torch.inference_mode(False):
            return torch.frombuffer(self._region, dtype=torch.uint8).view(dtype)

    def _report_failed(
        self, items: Sequence[LoadItem] | Sequence[SaveItem], done: Sequence[int]
    ) -> None:
        good = set(done)
        self._reporter.report([item.id for item in items if item.id not in good], False)


def _lend(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous CPU tensor as the region's calls can take it."""
    # An older torch is asked by way of Python, where it refuses gradients and some element types.
    return tensor if _HAS_TABLE else flat_bytes(tensor.detach())
