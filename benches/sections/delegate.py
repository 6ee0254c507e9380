"""A whole step of the scheduler's half: 8 items are asked about, 4 are loaded and 4 saved.

Both schedulers get the same requests, in the order in which vLLM calls them, and the word of their
workers that all was copied. Only the scheduler's calls are timed; in the rows with workers, also
what the index has to do for a worker's claims and completions (ours) or reports (vLLM's, where
they are a call of the scheduler, and so in both rows).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from benches.measure import Effort, Turn, compare
from benches.peers import ROW_BYTES, WIDTH, new_keys, vllm_scheduler
from benches.report import Goal, Row

HITS, SAVES = 4, 4
SIZES = (256, 1_296, 4_096, 16_384)
GOAL_SIZE, GOAL = 1_296, Goal(ratio=20)
BLOCK_SIZE = 16_384
ITEMS = 24  # that the pool holds


def rows(effort: Effort) -> Iterator[Row]:
    for size in (GOAL_SIZE,) if effort.quick else SIZES:
        yield from _compare(size, effort)


def _compare(size: int, effort: Effort) -> Iterator[Row]:
    with engines(size) as (ours, theirs):
        samples = compare(
            {
                "ours": _steps(ours, size, effort, spread=True),
                "ours, one request": _steps(ours, size, effort, spread=False),
                "ours and worker": _steps(ours, size, effort, spread=True, with_worker=True),
                "vllm": _steps(theirs, size, effort, spread=True),
                "vllm, one request": _steps(theirs, size, effort, spread=False),
            },
            effort,
        )
    goal = GOAL if size == GOAL_SIZE else None
    cases = (
        ("8 requests of one item", "ours", "vllm"),
        ("one request of 8 items", "ours, one request", "vllm, one request"),
        ("8 requests, with workers", "ours and worker", "vllm"),
    )
    for case, mine, other in cases:
        title = f"{size:,} rows: {case}"
        peer = "vLLM's ECCPUScheduler"
        wanted = goal if mine != "ours and worker" else None
        yield Row("delegate", title, "s", samples[mine], peer, samples[other], wanted)


@dataclass
class Side:
    """A scheduler, and what its workers would tell. The functions return seconds."""

    scheduler: Any
    report: Callable[[Any], float]  # workers' word, where it is a call of the scheduler
    work: Callable[[Any], float]  # workers' word, where it is not
    hot: list[str]


@contextmanager
def engines(size: int) -> Iterator[tuple[Side, Side]]:
    """Our scheduler and vLLM's over pools of equal size; items have so many rows."""
    from ecpool import EmbeddingCache, Region
    from ecpool.vllm.scheduler import ECCPUScheduler

    capacity = ITEMS * size * ROW_BYTES
    name = f"ecpool-bench-delegate-{size}"
    with Region.open(name, capacity=capacity, block_size=BLOCK_SIZE, role="scheduler") as region:
        cache = EmbeddingCache(region=region)
        scheduler = ECCPUScheduler(_config(capacity), cache=cache)
        theirs = vllm_scheduler(_config(capacity))
        try:
            sides = (_our_side(scheduler, cache, size), _their_side(theirs))
            for side in sides:
                _store(side, size)
            yield sides
        finally:
            theirs.shutdown()
            scheduler.shutdown()


def _config(capacity: int) -> Any:
    """What either scheduler reads of vLLM's configuration."""
    from model.fakes import engine_config

    settings = {"block_size": BLOCK_SIZE, "log_interval": 0}
    config = engine_config(capacity=capacity, settings=settings, width=WIDTH, dtype=torch.bfloat16)
    config.instance_id = f"bench{new_keys(1)[0][-8:]}"
    transfer = config.ec_transfer_config
    transfer.mm_encoder_output_widths = {"image": WIDTH}
    extra = transfer.ec_connector_extra_config
    transfer.get_from_extra_config = lambda name, default: extra.get(name, default)
    theirs = {"ec_cpu_bytes": capacity}
    transfer.ec_connector_extra_config = extra | theirs
    return config


def _our_side(scheduler: Any, cache: Any, size: int) -> Side:
    def work(metadata: Any) -> float:
        """One worker: claims before it copies, completes after."""
        loads, saves = metadata.loads, metadata.saves
        shape = (size, WIDTH)
        started = time.perf_counter()
        cache.claim_loads(0, [each.id for each in loads])
        cache.claim_saves(0, [(each.id, shape, "bfloat16") for each in saves])
        cache.complete(0, [each.id for each in loads])
        cache.complete(0, [each.id for each in saves])
        return time.perf_counter() - started

    def report(_: Any) -> float:
        output = SimpleNamespace(ec_connector_worker_meta=None)
        started = time.perf_counter()
        scheduler.update_connector_output(output)
        return time.perf_counter() - started

    return Side(scheduler, report, work, [])


def _their_side(scheduler: Any) -> Side:
    from vllm.distributed.ec_transfer.ec_connector.cpu.common import ECCPUWorkerMetadata

    def report(metadata: Any) -> float:
        loads = [transfer for transfer, *_ in metadata.loads.values()]
        told = ECCPUWorkerMetadata(list(metadata.saves), loads)
        output = SimpleNamespace(ec_connector_worker_meta=told)
        started = time.perf_counter()
        scheduler.update_connector_output(output)
        return time.perf_counter() - started

    return Side(scheduler, report, lambda _: 0.0, [])


def _store(side: Side, size: int) -> None:
    """Put the items into the pool that every later step finds there, and fill the rest."""
    side.hot = new_keys(HITS)
    step(side, [side.hot], size)
    for _ in range(ITEMS // SAVES + 1):
        step(side, [[*side.hot, *new_keys(SAVES)]], size)


def _steps(
    side: Side, size: int, effort: Effort, *, spread: bool, with_worker: bool = False
) -> Turn:
    count = 1 if effort.rounds < 2 else 10 if effort.quick else 40

    def turn() -> float:
        total = 0.0
        for _ in range(count):
            keys = [*side.hot, *new_keys(SAVES)]
            groups = [[key] for key in keys] if spread else [keys]
            scheduler, worker = step(side, groups, size)
            total += scheduler + (worker if with_worker else 0.0)
        return total / count

    return turn


def step(side: Side, groups: list[list[str]], size: int) -> tuple[float, float]:
    """One step with a request per group of keys; seconds of the scheduler and of its workers."""
    from model.fakes import Item, request, scheduler_output

    requests = [request(*(Item(key, size) for key in keys)) for keys in groups]
    scheduler = side.scheduler
    started = time.perf_counter()
    encode: dict[str, list[int]] = {}
    load: dict[str, list[int]] = {}
    for each in requests:
        scheduler.ensure_cache_available(each, 0)
        for index, feature in enumerate(each.mm_features):
            found = scheduler.has_cache_item(feature.identifier)
            (load if found else encode).setdefault(each.request_id, []).append(index)
    for each in requests:
        for places in (encode, load):
            for index in places.get(each.request_id, ()):
                scheduler.update_state_after_alloc(each, index)
    seconds = time.perf_counter() - started
    output = scheduler_output(encode)
    started = time.perf_counter()
    metadata = scheduler.build_connector_meta(output)
    seconds += time.perf_counter() - started
    worker = side.work(metadata)
    seconds += side.report(metadata)
    started = time.perf_counter()
    for each in requests:
        scheduler.request_finished(each)
    return seconds + time.perf_counter() - started, worker
