"""What ecpool writes into vLLM's log, and how often."""

from __future__ import annotations

import logging

import pytest
from model.fakes import Clock

from ecpool.vllm import attach
from ecpool.vllm.log import RateLimit
from ecpool.vllm.summary import Summary

LOGGER = logging.getLogger("vllm.ecpool.test")


def test_one_line_of_each_kind_per_interval() -> None:
    clock = Clock()
    limit = RateLimit(10.0, clock)
    assert [limit.allows(kind) for kind in ("a", "a", "b", "a")] == [True, False, True, False]
    clock.pass_by(10.0)
    assert limit.allows("a")
    assert "2 more" in limit.left_out("a")
    assert limit.left_out("a") == ""


@pytest.mark.parametrize(("interval", "lines"), [(10.0, 2), (0.0, 0)])
def test_a_summary_now_and_then_when_something_happened(
    interval: float, lines: int, pool_log: list[str]
) -> None:
    clock = Clock()
    summary = Summary(LOGGER, interval, clock)
    numbers = {"hits": 3, "misses": 1, "saves": 1, "loaded_bytes": 2048}
    for _ in range(50):
        clock.pass_by(1.0)
        summary.tick(lambda: numbers)
    numbers = {**numbers, "hits": 9}
    summary.last(lambda: numbers)
    summary.last(lambda: numbers)
    assert len(pool_log) == lines
    if lines:
        assert "3 loaded" in pool_log[0]
        assert "75%" in pool_log[0]
        assert "2 KiB" in pool_log[0]


def test_progress_of_long_waits_only(pool_log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(attach.time, "monotonic", clock)
    progress = attach.Progress(5.0)
    for done in range(10):
        progress("populate", done, 10)
    assert pool_log == []
    clock.pass_by(5.0)
    progress("populate", 5, 10)
    progress("populate", 6, 10)
    clock.pass_by(5.0)
    progress("wait", 0, 0)
    assert len(pool_log) == 2
    assert "50%" in pool_log[0]
