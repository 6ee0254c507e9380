"""Creating regions, attaching to them, and filling their page tables.

vLLM's class creates and fills in one go, with one thread, so that is what "create and fill" is
compared with. Attaching maps the file and checks it; nobody fills.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benches.measure import Effort, Turn, compare, summarise, take_turns
from benches.peers import new_keys, vllm_region
from benches.report import Goal, Row
from benches.sparse import sparse_region, sparse_vllm_region
from ecpool import Region

BLOCKS = (10_000, 100_000, 1_000_000, 10_000_000)
BLOCK_SIZE = 4_096
ATTACH_GOAL = Goal(at_most=0.05)
MOST_BYTES = 5 << 30  # that a region of this section may take
FILL_BYTES = 1 << 30
GIB = 1 << 30
POPULATE_WRITE = 23  # the advice that vLLM's class gives; newer than Python's `mmap`
PEER = "vLLM's ECSharedRegion"


def rows(effort: Effort) -> Iterator[Row]:
    sizes = BLOCKS[:1] if effort.rounds < 2 else BLOCKS[:2] if effort.quick else BLOCKS
    few = Effort(min(effort.rounds, 5), effort.batch, effort.quick)
    for blocks in sizes:
        yield from _create(blocks, few)
        yield _attach(blocks, effort)
    yield from _fill(few)


# Creating.


def _create(blocks: int, effort: Effort) -> Iterator[Row]:
    titles = (f"{blocks:,} blocks: create", f"{blocks:,} blocks: create and fill")
    reason = _too_large(blocks * BLOCK_SIZE)
    if reason:
        yield from (Row("regions", title, "s", None, not_run=reason) for title in titles)
        return
    few = Effort(min(effort.rounds, 3), effort.batch, effort.quick) if blocks > 100_000 else effort
    samples = compare(
        {
            "create": lambda: _timed(lambda: _open(blocks)),
            "ours": lambda: _timed(lambda: _filled(_open(blocks), threads=0)),
            "vllm": lambda: _timed(lambda: vllm_region(_name(), blocks, BLOCK_SIZE)),
        },
        few,
    )
    note = "memory reserved, so it cannot run out later"
    yield Row("regions", titles[0], "s", samples["create"], note=note)
    yield Row("regions", titles[1], "s", samples["ours"], PEER, samples["vllm"])


def _too_large(nbytes: int) -> str:
    if nbytes <= MOST_BYTES:
        return ""
    return f"not run: needs {nbytes / GIB:.0f} GiB of shared memory"


def _name() -> str:
    return f"ecpool-bench-{new_keys(1)[0][-12:]}"


def _open(blocks: int, name: str = "") -> Region:
    return Region.open(name or _name(), capacity=blocks * BLOCK_SIZE, block_size=BLOCK_SIZE)


def _filled(region: Region, threads: int) -> Region:
    region.populate(threads=threads)
    return region


def _timed(make: Callable[[], Any]) -> float:
    """Seconds of making a region, which then goes."""
    started = time.perf_counter()
    made = make()
    seconds = time.perf_counter() - started
    _leave(made)
    return seconds


def _leave(region: Any) -> None:
    (region.close if isinstance(region, Region) else region.cleanup)()


# Attaching.


def _attach(blocks: int, effort: Effort) -> Row:
    """Attaching takes no memory, so files without any behind them show what it costs."""
    name = _name()
    too_large = _too_large(blocks * BLOCK_SIZE)
    with contextlib.ExitStack() as stack:
        stack.enter_context(sparse_vllm_region(name, blocks, BLOCK_SIZE))
        if too_large:
            stack.enter_context(sparse_region(name, blocks, BLOCK_SIZE))
        else:
            stack.callback(_open(blocks, name=name).close)
        samples = compare(
            {
                "ours": lambda: _timed(lambda: Region.attach(name)),
                "vllm": lambda: _timed(lambda: vllm_region(name, blocks, BLOCK_SIZE)),
            },
            effort,
        )
    title = f"{blocks:,} blocks: attach"
    note = "a file of that length without memory behind it" if too_large else ""
    return Row("regions", title, "s", samples["ours"], PEER, samples["vllm"], ATTACH_GOAL, note)


# Filling.


def _fill(effort: Effort) -> Iterator[Row]:
    nbytes = FILL_BYTES // 32 if effort.quick else FILL_BYTES
    speeds = {
        name: summarise([nbytes / GIB / seconds for seconds in each])
        for name, each in take_turns(_fill_turns(nbytes), effort).items()
    }
    size = f"{nbytes / GIB:g} GiB"
    for threads in (1, 2):
        case = f"fill {size}, reserved: {threads} thread{'s' * (threads > 1)}"
        ours = speeds[f"populate {threads}"]
        yield Row("regions", case, "GiB/s", ours, "one madvise, also reserved", speeds["madvise"])
    for threads in (1, 2):
        case = f"reserve and fill {size}: {threads} thread{'s' * (threads > 1)}"
        yield Row("regions", case, "GiB/s", speeds[f"create {threads}"], PEER, speeds["vllm"])


def _fill_turns(nbytes: int) -> dict[str, Turn]:
    blocks = nbytes // BLOCK_SIZE

    def populate(threads: int) -> float:
        region = _open(blocks)
        seconds = _clock(lambda: region.populate(threads=threads))
        region.close()
        return seconds

    return {
        "populate 1": lambda: populate(1),
        "populate 2": lambda: populate(2),
        "madvise": lambda: _madvise(nbytes),
        "create 1": lambda: _timed(lambda: _filled(_open(blocks), threads=1)),
        "create 2": lambda: _timed(lambda: _filled(_open(blocks), threads=2)),
        "vllm": lambda: _timed(lambda: vllm_region(_name(), blocks, BLOCK_SIZE)),
    }


def _madvise(nbytes: int) -> float:
    """Seconds of vLLM's way of filling, on memory that is reserved as ours is."""
    path = Path("/dev/shm") / _name()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        with contextlib.closing(mmap.mmap(descriptor, nbytes)) as area:
            return _clock(lambda: area.madvise(POPULATE_WRITE, 0, nbytes))
    finally:
        os.close(descriptor)
        path.unlink()


def _clock(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
