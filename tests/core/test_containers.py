"""Clients in pid namespaces of their own, as in containers that share /dev/shm: their numbers
repeat, and nobody outside can ask the kernel about them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ecpool import EmbeddingCache, Region

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child"]
QUARANTINE = 2.0

CONTAINED = """
import os, sys, time
from ecpool import EmbeddingCache, Region
directory, role, group, key = sys.argv[1:]
region = Region.open("pool", capacity=1 << 20, block_size=4096, directory=directory,
                     role=role, group=group)
cache = EmbeddingCache(region=region)
if key:
    save = cache.begin_save(key, rows=4, row_bytes=4096)
    assert cache.claim_saves(0, [(save.id, (4, 4096), "uint8")]) == ["claimed"]
print(os.getpid(), flush=True)
time.sleep(60)
"""


def _can_unshare() -> bool:
    try:
        return subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


pytestmark = pytest.mark.skipif(not _can_unshare(), reason="pid namespaces cannot be made here")

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(pools: Path) -> Iterator[Start]:
    """Starts a client in a pid namespace of its own, in which it is number 1."""
    with ExitStack() as stack:

        def start_one(role: str, group: str, key: str = "") -> subprocess.Popen[str]:
            command = [*UNSHARE, sys.executable, "-c", CONTAINED, str(pools), role, group, key]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "1\n"
            return process

        yield start_one


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    time.sleep(0.05)  # the namespace's end follows that of the process that made it


def test_the_living_are_not_taken_for_dead_nor_the_dead_for_living(
    open_region: Callable[..., Region], start: Start
) -> None:
    region = open_region("pool")
    cache = EmbeddingCache(region=region)
    one, _two = start("pool", "", "a"), start("pool", "", "b")
    assert sorted(c["pid"] for c in region.status()["clients"] if c["pid"] == 1) == [1, 1]
    assert region.reclaim()["died"] == 0
    assert cache.is_written_elsewhere("a")
    assert cache.is_written_elsewhere("b")
    kill(one)
    assert region.reclaim()["died"] == 1
    assert not cache.is_written_elsewhere("a")
    assert cache.is_written_elsewhere("b")
    time.sleep(QUARANTINE + 0.1)
    region.reclaim()
    status = region.status()
    assert (status["writing"], status["orphaned"]) == (1, 0)
    assert status["num_blocks"] - status["free_blocks"] == 4
    assert region.check() == []


def test_what_a_dead_scheduler_was_writing_waits_for_its_worker_in_another_container(
    open_region: Callable[..., Region], start: Start
) -> None:
    region = open_region("pool")
    worker = start("worker", "engine")
    kill(start("scheduler", "engine", "a"))
    assert region.reclaim()["died"] == 1
    time.sleep(QUARANTINE + 0.1)
    assert region.reclaim()["waiting"] == 1
    assert region.status()["orphaned"] == 1, "the worker may still write"
    kill(worker)
    region.reclaim()
    assert region.status()["orphaned"] == 1, "its device may still write"
    time.sleep(QUARANTINE + 0.1)
    region.reclaim()
    status = region.status()
    assert (status["orphaned"], status["holds"]) == (0, 0)
    assert status["free_blocks"] == status["num_blocks"]
