"""What a scheduler tells its workers in each step: transfers, as plain tuples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

Extents = tuple[tuple[int, int], ...]

# `Load` and `Save` as they travel.
PlainLoad = tuple[str, int, Extents, tuple[int, ...], str]
PlainSave = tuple[str, int, Extents]


class Load(NamedTuple):
    """Bytes to bring from the region into the encoder cache.

    ``extents`` are (first block, number of blocks) in the item's order, ``shape`` is (rows,
    columns) and ``dtype`` is torch's name of the element type without ``torch.``.
    """

    key: str
    id: int
    extents: Extents
    shape: tuple[int, ...]
    dtype: str


class Save(NamedTuple):
    """An encoder output to bring into the region; its shape is known only once it exists."""

    key: str
    id: int
    extents: Extents


class ECPoolMetadata(ECConnectorMetadata):
    """One step's transfers, pickled from the scheduler to every worker.

    Items travel as plain tuples in the order of `Load` and `Save`, and several items share what is
    equal, so that an item of one extent takes at most 64 bytes beside its key.
    """

    __slots__ = ("_loads", "_saves")

    def __init__(self, loads: Iterable[PlainLoad] = (), saves: Iterable[PlainSave] = ()) -> None:
        self._loads: list[PlainLoad] = [(*each,) for each in loads]
        self._saves: list[PlainSave] = [(*each,) for each in saves]

    @classmethod
    def of_plain(cls, loads: list[PlainLoad], saves: list[PlainSave]) -> ECPoolMetadata:
        """Metadata that takes these lists over, whose items must be plain tuples."""
        metadata = cls.__new__(cls)
        metadata._loads, metadata._saves = loads, saves
        return metadata

    @property
    def loads(self) -> list[Load]:
        return [Load._make(each) for each in self._loads]

    @property
    def saves(self) -> list[Save]:
        return [Save._make(each) for each in self._saves]

    def __reduce__(self) -> tuple[object, ...]:
        return (_restore, (self._loads, self._saves))

    def __repr__(self) -> str:
        return f"ECPoolMetadata(loads={self.loads!r}, saves={self.saves!r})"


def _restore(loads: list[PlainLoad], saves: list[PlainSave]) -> ECPoolMetadata:
    # A function of the module takes fewer bytes than a method.
    return ECPoolMetadata.of_plain(loads, saves)
