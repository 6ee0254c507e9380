"""The cycle of one item: room is made for it, it becomes ready, is pinned and unpinned."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benches.measure import Effort, Turn, batch_size, compare
from benches.peers import ROW_BYTES, new_keys, vllm_embedding_cache
from benches.report import Goal, Row
from ecpool import EmbeddingCache, Region

SIZES = (64, 256, 1_296, 4_096, 16_384)
GOAL_SIZE, GOAL = 1_296, Goal(ratio=100)
ITEMS = 4  # that the pool holds, so that every alloc evicts one
BLOCK_SIZE = 16_384


def rows(effort: Effort) -> Iterator[Row]:
    sizes = SIZES[::2] if effort.quick else SIZES
    for size in sizes:
        yield from _compare(size, effort)


def _compare(size: int, effort: Effort) -> Iterator[Row]:
    """One size: equal numbers of blocks, and equal bytes."""
    by_bytes = -(-size * ROW_BYTES // BLOCK_SIZE)
    name = f"ecpool-bench-cycle-{size}"
    with Region.open(name, capacity=ITEMS * by_bytes * BLOCK_SIZE, block_size=BLOCK_SIZE) as region:
        samples = compare(
            {
                "heap": cycles(EmbeddingCache(ITEMS * size), size, effort),
                "region": cycles(EmbeddingCache(region=region), by_bytes, effort),
                "vllm": cycles(vllm_embedding_cache(ITEMS * size), size, effort),
            },
            effort,
        )
    goal = GOAL if size == GOAL_SIZE else None
    peer = {"against": "vLLM's EmbeddingCache", "peer": samples["vllm"]}
    yield Row("cycle", f"{size:,} blocks", "s", samples["heap"], goal=goal, **peer)  # type: ignore[arg-type]
    yield Row(
        "cycle",
        f"{size:,} rows of {ROW_BYTES:,} B",
        "s",
        samples["region"],
        goal=goal,
        note=f"{by_bytes:,} blocks of 16 KiB in a region, against {size:,} of a row each",
        **peer,  # type: ignore[arg-type]
    )


def cycles(cache: Any, blocks: int, effort: Effort) -> Turn:
    """A turn of cycles with items of so many blocks; seconds per cycle."""
    count = batch_size(lambda n: run_cycles(cache, blocks, n), effort, most=1 << 14)
    return lambda: run_cycles(cache, blocks, count) / count


def run_cycles(cache: Any, blocks: int, count: int) -> float:
    keys = new_keys(count)
    alloc, mark_ready, pin, unpin = cache.alloc, cache.mark_ready, cache.pin, cache.unpin
    started = time.perf_counter()
    for key in keys:
        alloc(key, blocks)
        mark_ready(key)
        pin(key)
        unpin(key)
    return time.perf_counter() - started
