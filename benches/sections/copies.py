"""Saving and loading on CPU beside the two plain ways to copy the same bytes.

Destinations are alike: a save goes to blocks that were written before; a load goes to a new tensor
("fresh", what the connector does, made by the same call on all sides). `Region.read` alone
fills a tensor that was written before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from benches.measure import Effort, Sample, repeat, summarise, take_turns
from benches.report import Goal, Row
from ecpool import Region
from ecpool.transfer import LoadItem, SaveItem, TransferEngine

MEGABYTES = (0.1, 1.0, 4.0, 16.0, 64.0)
GOAL_FROM, GOAL = 1.0, Goal(ratio=0.95)
BLOCK_SIZE = 16_384

Extents = tuple[tuple[int, int], ...]
Copies = dict[str, Callable[[], object]]


def rows(effort: Effort) -> Iterator[Row]:
    sizes = MEGABYTES[:2] if effort.quick else MEGABYTES
    with pool(sizes[-1]) as (region, engine):
        for size in sizes:
            bench = _Item(region, engine, int(size * 1e6))
            yield from _whole(bench, size, effort)
            yield from _scattered(bench, size, effort)


@contextmanager
def pool(megabytes: float) -> Iterator[tuple[Region, TransferEngine]]:
    """A filled region with room for an item in every second block, and an engine for it."""
    capacity = int(2.2 * megabytes * 1e6) + 64 * BLOCK_SIZE
    with Region.open("ecpool-bench-copies", capacity=capacity, block_size=BLOCK_SIZE) as region:
        region.populate()
        engine = TransferEngine(region, torch.device("cpu"), on_done=lambda ids, ok: None)
        try:
            yield region, engine
        finally:
            engine.close()


class _Item:
    """Bytes to copy, and all the ways to do so."""

    def __init__(self, region: Region, engine: TransferEngine, nbytes: int) -> None:
        self.region, self.engine, self.nbytes = region, engine, nbytes
        self.shape = (nbytes,)
        count = -(-nbytes // BLOCK_SIZE)
        self.whole: Extents = ((0, count),)
        self.pieces: Extents = tuple((2 * number, 1) for number in range(count))
        self.tensor = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        self.warm = torch.zeros(nbytes, dtype=torch.uint8)
        data: torch.Tensor = torch.frombuffer(region, dtype=torch.uint8)
        self.blocks = data.narrow(0, 0, nbytes)

    def saves(self, extents: Extents) -> Copies:
        item = SaveItem("k", 1, extents, self.tensor)
        return {
            "ours": lambda: self.engine.save([item]),
            "memcpy": lambda: memmove(self.blocks, self.tensor),
            "copy_": lambda: self.blocks.copy_(self.tensor),
        }

    def fresh_loads(self, extents: Extents) -> Copies:
        item = LoadItem("k", 1, extents, self.shape, torch.uint8)
        return {
            "ours": lambda: self.engine.load([item]),
            "memcpy": lambda: memmove(self._new(), self.blocks),
            "copy_": lambda: self._new().copy_(self.blocks),
        }

    def native_reads(self, extents: Extents) -> Copies:
        return {
            "ours": lambda: self.region.read(extents, self.warm),
            "memcpy": lambda: memmove(self.warm, self.blocks),
            "copy_": lambda: self.warm.copy_(self.blocks),
        }

    def _new(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=torch.uint8, device="cpu")


def memmove(destination: torch.Tensor, source: torch.Tensor) -> None:
    """The C library's copy. ctypes lets other threads run meanwhile, as ours and torch's do."""
    ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.nbytes)


def _whole(item: _Item, megabytes: float, effort: Effort) -> Iterator[Row]:
    wanted = GOAL if megabytes >= GOAL_FROM else None
    ways = (
        ("save", item.saves),
        ("load, fresh", item.fresh_loads),
        ("Region.read, warm", item.native_reads),
    )
    for name, copies in ways:
        speeds = _speeds(item, copies(item.whole), effort)
        better = max(("memcpy", "copy_"), key=lambda peer: speeds[peer].median)
        for peer in ("memcpy", "copy_"):
            goal = wanted if peer == better else None
            yield _row(f"{megabytes:g} MB: {name}", speeds, peer, goal)


def _scattered(item: _Item, megabytes: float, effort: Effort) -> Iterator[Row]:
    pieces = len(item.pieces)
    for name, copies in (("save", item.saves), ("load, fresh", item.fresh_loads)):
        case = f"{megabytes:g} MB in {pieces:,} pieces: {name}"
        speeds = _speeds(item, copies(item.pieces), effort)
        yield _row(case, speeds, "memcpy", None)


def _speeds(item: _Item, copies: Copies, effort: Effort) -> dict[str, Sample]:
    """GB/s of each way."""
    values = take_turns({name: repeat(copy, effort) for name, copy in copies.items()}, effort)
    return {
        name: summarise([item.nbytes / seconds / 1e9 for seconds in each])
        for name, each in values.items()
    }


def _row(case: str, speeds: Mapping[str, Sample], peer: str, goal: Goal | None) -> Row:
    return Row("copies", case, "GB/s", speeds["ours"], peer, speeds[peer], goal)
