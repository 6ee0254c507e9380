"""Regions larger than this machine's memory, to attach to.

The files are as long as such regions' are, but have no memory behind them, which attaching does
not need. Ours is made from the header of a small region by giving it other numbers and the
checksum that belongs to them. The libraries never make such a file: using one ends in SIGBUS.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import blake3

from ecpool import Region
from ecpool.errors import RegionFormatError

# The header: magic, layout, lifetime, block size, segment size, seed, blocks, slots, holds,
# expected clients, file length. A checksum of eight bytes follows.
_HEADER = struct.Struct("=8sIIQQQIIIIQ")
_CHECK = 8
_MOST_SLOTS = 1 << 20
_SPARE_HOLDS = 1024


@contextmanager
def sparse_region(name: str, blocks: int, block_size: int) -> Iterator[None]:
    """Makes a region of so many blocks of this name, that can be attached to but not used."""
    small = Region.open(name, capacity=block_size, block_size=block_size, lifetime="persistent")
    path = Path(small.path)
    small.close()
    try:
        _write(path, blocks, length=blocks * block_size)
        # Only the library knows how much its books take: it says so when the length is wrong.
        _write(path, blocks, length=_asked_length(name))
        yield
    finally:
        path.unlink(missing_ok=True)
        path.with_suffix(".lock").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def _write(path: Path, blocks: int, length: int) -> None:
    with path.open("r+b") as file:
        fields = list(_HEADER.unpack(file.read(_HEADER.size)))
        slots = min(blocks // 4, _MOST_SLOTS)
        fields[6:9] = blocks, slots, slots + _SPARE_HOLDS
        fields[10] = length
        header = _HEADER.pack(*fields)
        file.truncate(length)
        file.seek(0)
        file.write(header + blake3.blake3(header).digest()[:_CHECK])


def _asked_length(name: str) -> int:
    try:
        Region.attach(name).close()
    except RegionFormatError as error:
        found = re.search(r"asks for (\d+)", str(error))
        if found is None:
            raise
        return int(found[1])
    raise AssertionError("a region of the wrong length was accepted")


@contextmanager
def sparse_vllm_region(name: str, blocks: int, block_size: int) -> Iterator[None]:
    """Makes the file that vLLM's class of this engine id attaches to."""
    path = Path(f"/dev/shm/vllm_ec_{name}.mmap")
    path.touch(mode=0o600, exist_ok=False)
    try:
        with path.open("r+b") as file:
            file.truncate(blocks * block_size)
        yield
    finally:
        path.unlink()
