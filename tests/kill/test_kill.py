"""Some dozens of kills of each kind; `scripts/kill.py` does thousands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "kill.py"


def run(*arguments: str, timeout: float = 100) -> str:
    """The script's output; it forks, so it runs in a process without torch and without threads."""
    command = [sys.executable, str(SCRIPT), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_an_engine_that_dies_in_every_way() -> None:
    output = run("--kills", "60")
    assert [line.split(":")[0] for line in output.splitlines() if " kills in " in line] == [
        "persistent", "shared", "private",
    ]  # fmt: skip
    for counter in ("loads_completed", "saves_completed", "evictions"):
        assert counter in output, "nothing was done"


def test_four_clients_of_one_pool() -> None:
    output = run("--kills", "50", "--clients", "4")
    assert "loads_completed" in output
    assert "dead_clients" in output


@pytest.mark.timeout(900)
def test_deaths_between_any_two_stores_under_the_lock() -> None:
    if shutil.which("cargo") is None:
        pytest.skip("needs cargo, to build the module that can kill itself")
    output = run(
        "--kills", "80", "--engines", "2", "--clients", "1", "--lifetime", "persistent",
        "--crash-points", timeout=850,
    )  # fmt: skip
    assert "rebuilds" in output
    assert "(0 at crash points)" not in output


# Each plants one fault in the processes; the harness must see it.
PLANTS = {
    "wrong bytes": (
        """
def write(self, job):
    self._region.write(job.extents, bytes(job.item.nbytes))
engine.Worker._write = write
""",
        "wrong bytes of",
    ),
    "a load without a lease": (
        """
original = engine.Scheduler._schedule_item
def forget(self, step, item):
    original(self, step, item)
    self._cache.end_leases([job.id for job in step.loads])
engine.Scheduler._schedule_item = forget
""",
        "the promised load of",
    ),
    "a process that hangs": (
        """
engine.Worker._copy = lambda self, step: time.sleep(600)
harness._STUCK_AFTER = 1.0
harness.Harness._time_of_next_kill = lambda self: time.monotonic() + 5
""",
        "is stuck after",
    ),
    "an exception": (
        "client.PoolClient._pin = lambda self, item: 1 / 0",
        "ZeroDivisionError",
    ),
    "a hold that is never taken back": (
        """
original = audit._audit_content
def with_a_hold(region, outcome):
    world.open_cache(region, "model-a").begin_save("k", rows=1, row_bytes=1)
    original(region, outcome)
audit._audit_content = with_a_hold
""",
        "holds: 1, but should be 0",
    ),
}

RUN_PLANTED = """
import time
from pathlib import Path
from kill import audit, client, engine, harness, world
{plant}
settings = world.Settings(directory=Path({directory!r}), kills=20, seed=7, engines=1, clients=1)
print(harness.Harness(settings).run().failures)
"""


@pytest.mark.parametrize("plant", PLANTS)
def test_the_harness_sees_what_is_wrong(plant: str) -> None:
    code, words = PLANTS[plant]
    directory = f"/dev/shm/ecpool-planted-{os.getpid()}"
    path = os.pathsep.join(str(ROOT / part) for part in ("tests", "python"))
    try:
        ended = subprocess.run(
            [sys.executable, "-c", RUN_PLANTED.format(plant=code, directory=directory)],
            env=os.environ | {"PYTHONPATH": path}, check=False,
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    assert words in ended.stdout, ended.stdout + ended.stderr
