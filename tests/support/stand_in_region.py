"""A region without the native module: the same surface over ordinary memory, for transfer tests."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from support.memory import bytes_of

Extents = Sequence[tuple[int, int]]


class StandInRegion(bytearray):
    """Blocks of `block_size` bytes; `segment_blocks` of them make a segment."""

    num_blocks: int
    block_size: int
    nbytes: int
    data_ptr: int
    calls: int
    _segment: int

    def __new__(cls, num_blocks: int, block_size: int, segment_blocks: int = 0) -> StandInRegion:
        region = super().__new__(cls)
        bytearray.__init__(region, num_blocks * block_size)
        region.num_blocks = num_blocks
        region.block_size = block_size
        region.nbytes = num_blocks * block_size
        region._segment = (segment_blocks or num_blocks) * block_size
        region.data_ptr = ctypes.addressof(ctypes.c_char.from_buffer(region))
        region.calls = 0
        return region

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def segments(self) -> list[tuple[int, int]]:
        starts = range(0, self.nbytes, self._segment)
        return [(start, min(self._segment, self.nbytes - start)) for start in starts]

    def write(self, extents: Extents, source: Any) -> None:
        self.calls += 1
        view = bytes_of(source)
        for mine, theirs in self._slices(extents, len(view)):
            self[mine] = view[theirs]

    def read(self, extents: Extents, destination: Any) -> None:
        self.calls += 1
        view = bytes_of(destination)
        for mine, theirs in self._slices(extents, len(view)):
            view[theirs] = self[mine]

    def item(self, extents: Extents, nbytes: int) -> bytes:
        """What the blocks hold of an item of this many bytes."""
        return b"".join(self[mine] for mine, _ in self._slices(extents, nbytes))

    def _slices(self, extents: Extents, nbytes: int) -> Iterator[tuple[slice, slice]]:
        if nbytes > sum(count for _, count in extents) * self.block_size:
            raise ValueError("the buffer is larger than the extents")
        done = 0
        for first, count in extents:
            length = min(count * self.block_size, nbytes - done)
            start = first * self.block_size
            if start + length > self.nbytes:
                raise ValueError("an extent ends behind the region")
            yield slice(start, start + length), slice(done, done + length)
            done += length
