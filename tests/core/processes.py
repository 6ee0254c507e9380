"""Another process on the same region, driven line by line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

TESTS = Path(__file__).parents[1]

# What a child knows before its own lines run.
PRELUDE = """
import os, sys, time
from ecpool import ClosedError, EmbeddingCache, Region
def say(*what): print(*what, flush=True)
def listen(): return sys.stdin.readline().strip()
directory = sys.argv[1]
def open_region(name="pool", **settings):
    settings = {"capacity": 1 << 20, "block_size": 4096, "directory": directory} | settings
    return Region.open(name, **settings)
"""


class Child:
    """A Python process that runs `code` after `PRELUDE`; it says lines and listens to lines."""

    def __init__(self, directory: Path, code: str) -> None:
        path = os.pathsep.join([str(TESTS), str(TESTS.parent / "python")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait()}"
        return line.strip()

    def tell(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        while _state(self.process.pid) not in ("T", "t"):
            time.sleep(0.001)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """The exit status of a child that ends by itself."""
        return self.process.wait(timeout=60)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@contextmanager
def stopped_under_the_lock(directory: Path, name: str = "pool") -> Iterator[Child]:
    """A child that was stopped while it held the region's lock.

    It checks the whole index over and over, which holds the lock nearly all the time; whether the
    stop hit it inside is seen by trying, from a client of its own.
    """
    from ecpool import EmbeddingCache, Region

    code = f"region = Region.attach({name!r}, directory=directory)\n"
    code += "say('ready')\nwhile True: region.check()"
    with Child(directory, code) as child, Region.attach(name, directory=str(directory)) as prober:
        assert child.hear() == "ready"
        probe = EmbeddingCache(region=prober, namespace="probe", deadline=0.005)
        for _ in range(200):
            child.stop()
            before = prober.counters()["lock_timeouts"]
            probe.contains("k")
            if prober.counters()["lock_timeouts"] > before:
                break
            child.go_on()
            time.sleep(0.003)
        else:
            raise AssertionError("the child was never stopped under the lock")
        try:
            yield child
        finally:
            child.kill()
