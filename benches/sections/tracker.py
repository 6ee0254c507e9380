"""The step tracker from Python: so many adds and a step.

vLLM adds keys one by one; ours can take all keys of a request in one call as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benches.measure import Effort, Turn, batch_size, compare
from benches.peers import new_keys, old_step_tracker
from benches.report import Goal, Row
from ecpool import StepTracker

BATCHES = 2  # that vLLM has in flight with async scheduling
GOAL = Goal(ratio=10)
PEER = "vLLM 0.26's StepTracker"


def rows(effort: Effort) -> Iterator[Row]:
    for adds in (8, 64):
        for finishing in (False, True):
            yield from _compare(adds, finishing, effort)


def _compare(adds: int, finishing: bool, effort: Effort) -> Iterator[Row]:
    """Keys of as many requests, and keys of one request."""
    theirs = old_step_tracker()
    many, one = _requests(adds), _requests(1) * adds
    samples = compare(
        {
            "ours": _steps(StepTracker(BATCHES), many, finishing, effort),
            "vllm": _steps(theirs(BATCHES), many, finishing, effort),
            "ours, one request": _steps(StepTracker(BATCHES), one, finishing, effort, at_once=True),
            "vllm, one request": _steps(theirs(BATCHES), one, finishing, effort),
        },
        effort,
    )
    way = "requests finish" if finishing else "expiry"
    title = f"{adds} adds + step, {way}"
    yield Row("tracker", title, "s", samples["ours"], PEER, samples["vllm"], GOAL)
    ours, peer = samples["ours, one request"], samples["vllm, one request"]
    yield Row("tracker", f"{title}: one call for one request", "s", ours, PEER, peer, GOAL)


def _requests(count: int) -> list[str]:
    return [f"chatcmpl-{each:032x}" for each in range(count)]


def _steps(
    tracker: Any, requests: list[str], finishing: bool, effort: Effort, *, at_once: bool = False
) -> Turn:
    keys = new_keys(len(requests))
    finished = set(requests) if finishing else set()

    def one_by_one(count: int) -> float:
        add, step = tracker.add, tracker.step
        started = time.perf_counter()
        for _ in range(count):
            for key, request in zip(keys, requests, strict=True):
                add(key, request)
            step(finished)
        return time.perf_counter() - started

    def all_at_once(count: int) -> float:
        add_many, step = tracker.add_many, tracker.step
        started = time.perf_counter()
        for _ in range(count):
            add_many(keys, requests[0])
            step(finished)
        return time.perf_counter() - started

    run = all_at_once if at_once else one_by_one
    number = batch_size(run, effort)
    return lambda: run(number) / number
