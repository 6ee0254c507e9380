"""A device that writes on after its process is dead, as a real one may for a moment.

It is a forked process that has the mapping and nothing else: no liveness lock, no descriptor. It
writes rubbish into the blocks until a second after its owner's death, which lies well inside the
quarantine: if the blocks were given to anybody before, wrong bytes would be read there.
"""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ecpool import Region

WRITES_ON_FOR = 1.0


def begin_writing(region: Region, extents: tuple[tuple[int, int], ...]) -> None:
    """Starts a device for these blocks of the region; it ends by itself."""
    view, block_size = memoryview(region), region.block_size
    owner = os.getpid()
    if os.fork() != 0:
        return
    try:
        os.closerange(3, 256)
        _write_on(view, block_size, extents, owner)
    finally:
        os._exit(0)


def _write_on(
    view: memoryview, block_size: int, extents: tuple[tuple[int, int], ...], owner: int
) -> None:
    rng = random.Random(owner)
    ends_at: float | None = None
    while ends_at is None or time.monotonic() < ends_at:
        if ends_at is None and os.getppid() != owner:
            ends_at = time.monotonic() + WRITES_ON_FOR
        first, count = rng.choice(extents)
        place = (first + rng.randrange(count)) * block_size
        view[place : place + 256] = rng.randbytes(256)
        time.sleep(0.01)
