"""What a scheduler tells its workers in each step: transfers, as plain tuples."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

Extents = tuple[tuple[int, int], ...]


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

    def __init__(self, loads: list[Load] | None = None, saves: list[Save] | None = None) -> None:
        self._loads: list[tuple[Any, ...]] = [tuple(each) for each in loads or ()]
        self._saves: list[tuple[Any, ...]] = [tuple(each) for each in saves or ()]

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


def _restore(loads: list[tuple[Any, ...]], saves: list[tuple[Any, ...]]) -> ECPoolMetadata:
    metadata = ECPoolMetadata()
    metadata._loads, metadata._saves = loads, saves
    return metadata
