"""A scheduler that dies while a real worker of its engine is in the middle of a copy."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ecpool._native import EmbeddingCache, Region, remove_region
from ecpool.errors import EcpoolError
from support.engines import EngineError, EngineProcess, ec_transfer
from support.requests import Picture, one_each

HELD = one_each([Picture(800)])


@pytest.mark.scenario("a scheduler dies while its worker copies")
def test_blocks_of_a_dead_scheduler_are_nobodys_while_its_worker_copies(
    engine_of: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    name, flag = f"test-{secrets.token_hex(6)}", tmp_path / "held"
    settings = ec_transfer(pool=name, persist=True)
    more = {"extra": {"distributed_executor_backend": "mp"}, "in_process": False}
    try:
        with engine_of(ec_transfer=settings, **more) as engine:
            (worker,) = engine.call("hold_next_save", str(flag))
            asking = threading.Thread(target=ask_in_vain, args=(engine,))
            asking.start()
            wait_for(flag.exists, 60)
            with Region.attach(name, role="tool") as region:
                os.kill(scheduler_of(region), signal.SIGKILL)
                nobody_gets_the_blocks(region, worker)
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
                everything_comes_back(region)
            engine.kill()
            asking.join()
    finally:
        with suppress(EcpoolError):
            remove_region(name)


def ask_in_vain(engine: EngineProcess) -> None:
    with suppress(EngineError):
        engine.generate(HELD)


def scheduler_of(region: Region) -> int:
    (client,) = [each for each in region.status()["clients"] if each["role"] == "scheduler"]
    return int(client["pid"])


def nobody_gets_the_blocks(region: Region, worker: int) -> None:
    """As long as the worker lives, however often somebody looks for room."""
    wait_for(lambda: orphaned(region) == 1, 30)
    cache = EmbeddingCache(region=region, namespace="another engine")
    until = time.monotonic() + 3
    while time.monotonic() < until:
        os.kill(worker, 0)
        region.reclaim()
        assert cache.alloc("everything", cache.num_blocks) is None
        assert orphaned(region) == 1
        time.sleep(0.1)


def everything_comes_back(region: Region) -> None:
    """Once the worker is gone too, and a device could no longer write either."""
    wait_for(lambda: orphaned(region) == 0, 30)
    status = region.status()
    assert status["writing"] == status["doomed"] == status["holds"] == 0
    assert region.check() == []


def orphaned(region: Region) -> int:
    region.reclaim()
    return int(region.status()["orphaned"])


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
