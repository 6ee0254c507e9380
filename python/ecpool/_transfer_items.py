"""What the transfer engine is given, and what it answers with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from ecpool.errors import EcpoolError, InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Buffer

Extents = Sequence[tuple[int, int]]


class HostRegion(Protocol):
    """What is needed of `ecpool.Region`; its buffer is the data area.

    `write` and `read` refuse a tensor whose values are not in the host's memory as they are: on
    another device, with gaps, conjugated or negated on the way, or in need of a gradient.
    """

    @property
    def block_size(self) -> int: ...

    @property
    def data_ptr(self) -> int: ...

    def segments(self) -> Sequence[tuple[int, int]]: ...

    def write(self, extents: Extents, source: "Buffer | torch.Tensor") -> None: ...

    def read(self, extents: Extents, destination: "Buffer | torch.Tensor") -> None: ...

    def __buffer__(self, flags: int, /) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class LoadItem:
    """Bytes to bring from the region into a new tensor of this shape and dtype."""

    key: str
    id: int
    extents: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class SaveItem:
    """A tensor to copy into the region: any strided layout and dtype, on any device."""

    key: str
    id: int
    extents: tuple[tuple[int, int], ...]
    tensor: torch.Tensor


def dtype_of(name: str) -> torch.dtype | None:
    """The element type of this name without ``torch.``; None if this torch has none such."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


class TransferError(EcpoolError, RuntimeError):
    """Some loads of a batch failed.

    ``failed`` maps each key that failed to its reason, ``loaded`` each other key of the batch to
    its tensor, which is as good as if the call had returned it.
    """

    def __init__(
        self,
        failed: Mapping[str, BaseException],
        loaded: Mapping[str, torch.Tensor],
        device: object,
    ) -> None:
        self.failed = dict(failed)
        self.loaded = dict(loaded)
        key, reason = next(iter(self.failed.items()))
        total = len(self.failed) + len(self.loaded)
        super().__init__(
            f"{len(self.failed)} of {total} loads to {device} failed, "
            f"first {key!r}: {type(reason).__name__}: {reason}"
        )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without autograd and lazy views; InvalidArgumentError unless it is strided."""
    if tensor.layout != torch.strided:
        raise InvalidArgumentError(
            f"a tensor of layout {tensor.layout} cannot be stored, only strided"
        )
    return tensor.detach().resolve_conj().resolve_neg()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a flat uint8 tensor that shares it."""
    return tensor.reshape(-1).view(torch.uint8)
