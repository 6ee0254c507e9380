"""One pool, many processes: what an operation costs alone, and how many are done by all together.

A private pool and a shared one that others are attached to take turns in one process; then 1, 2, 4
and 8 processes work on one pool as fast as they can. Where there are fewer cores than processes,
the lock's holder is often not running, and the others must wait for it.

    python -m benches.sections.sharing NAME OPERATION NUMBER    one of the processes
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from benches import ROOT
from benches.measure import Effort, Sample, Turn, compare, repeat, summarise
from benches.report import Goal, Row
from ecpool import EmbeddingCache, PoolBusyError, Region

PROCESSES = (1, 2, 4, 8)
UNCONTENDED = Goal(ratio=1 / 1.2)
ENTRIES = 512  # that are there, and looked up
BLOCKS = 4  # of an entry
BLOCK_SIZE = 16_384
CAPACITY = 2 * ENTRIES * BLOCKS * BLOCK_SIZE
BURST = 64  # operations between two looks at the clock

Operation = Callable[[], object]


def rows(effort: Effort) -> Iterator[Row]:
    yield from _alone(effort)
    yield from _together(effort)


def open_pool(name: str, **settings: object) -> Region:
    return Region.open(name, capacity=CAPACITY, block_size=BLOCK_SIZE, **settings)  # type: ignore[arg-type]


def fill(cache: EmbeddingCache) -> None:
    """Nothing but the entries that are looked up, whatever was there before."""
    cache.flush()
    for number in range(ENTRIES):
        cache.alloc(f"shared-{number}", BLOCKS)
        cache.mark_ready(f"shared-{number}")


def hits(cache: EmbeddingCache, mark: str) -> Operation:
    """A promise of an entry that is there, and its end."""
    keys = [f"shared-{number}" for number in range(ENTRIES)]
    place = 0

    def hit() -> None:
        nonlocal place
        place = (place + 1) % ENTRIES
        lease = cache.lease(keys[place])
        if lease is not None:
            cache.end_leases((lease.id,))

    return hit


def saves(cache: EmbeddingCache, mark: str) -> Operation:
    """Room for a new entry, its claim and its completion; what is oldest goes."""
    number = 0
    shape = (BLOCKS, BLOCK_SIZE)

    def save() -> None:
        nonlocal number
        number += 1
        begun = cache.begin_save(f"{mark}-{number}", rows=BLOCKS, row_bytes=BLOCK_SIZE)
        if not isinstance(begun, str):
            cache.claim_saves(0, ((begun.id, shape, "uint8"),))
            cache.complete(0, (begun.id,))

    return save


OPERATIONS = {"hit: lease + end_leases": hits, "save: begin + claim + complete": saves}


# Alone.


def _alone(effort: Effort) -> Iterator[Row]:
    private = open_pool(_name("private"), lifetime="private", expected_clients=1)
    shared = open_pool(_name("shared"), lifetime="shared")
    with ExitStack() as stack:
        for region in (private, shared):
            stack.enter_context(region)
        for _ in range(3):  # others that are attached and do nothing
            stack.enter_context(open_pool(shared.name, lifetime="shared"))
        for title, make in OPERATIONS.items():
            samples = compare(
                {"shared": _turn(shared, make, effort), "private": _turn(private, make, effort)},
                effort,
            )
            yield Row(
                "sharing",
                f"alone: {title}",
                "s",
                samples["shared"],
                "a private pool",
                samples["private"],
                UNCONTENDED,
            )


def _turn(region: Region, make: Callable[[EmbeddingCache, str], Operation], effort: Effort) -> Turn:
    cache = EmbeddingCache(region=region)
    fill(cache)
    return repeat(make(cache, "alone"), effort)


# Together.


def _together(effort: Effort) -> Iterator[Row]:
    seconds = max(0.05, effort.batch * 10)
    rounds = max(1, effort.rounds // 4)
    for title in OPERATIONS:
        alone: Sample | None = None
        for count in PROCESSES[:2] if effort.rounds < 2 else PROCESSES:
            rates, missed = _rates(title, count, rounds, seconds)
            yield Row(
                "sharing",
                f"{count} processes: {title}" if count > 1 else f"1 process: {title}",
                "k op/s",
                rates,
                "1 process" if alone else "",
                alone,
                note=f"{missed:.3%} of all gave up at the lock's deadline",
            )
            alone = alone or rates


def _rates(title: str, count: int, rounds: int, seconds: float) -> tuple[Sample, float]:
    """Thousands of operations per second, of all processes together; the share that missed."""
    done = missed = 0
    rates = []
    with (
        open_pool(_name("many"), lifetime="shared") as region,
        hammers(region.name, title, count) as run,
    ):
        for _ in range(rounds):
            fill(EmbeddingCache(region=region))
            results = run(seconds)
            rates.append(sum(each / took for each, _, took in results) / 1e3)
            done += sum(each for each, _, _ in results)
            missed += sum(each for _, each, _ in results)
    return summarise(rates), missed / max(1, done)


Result = tuple[int, int, float]  # operations done, of those missed, seconds


@contextmanager
def hammers(name: str, title: str, count: int) -> Iterator[Callable[[float], list[Result]]]:
    """Processes at the ready; each call lets all work for so long and returns their results."""
    command = [sys.executable, "-m", "benches.sections.sharing", name, title]
    processes = [
        subprocess.Popen(
            [*command, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for number in range(count)
    ]

    def read(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline()

    def run(seconds: float) -> list[Result]:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        answers = [read(process).split() for process in processes]
        return [(int(done), int(missed), float(took)) for done, missed, took in answers]

    try:
        for process in processes:
            if read(process) != "ready\n":
                raise RuntimeError("one of the processes did not start")
        yield run
    finally:
        for process in processes:
            process.communicate(timeout=60)  # closes its input, which ends it


def _work(name: str, title: str, mark: str) -> None:
    """One of the processes: each line of input is how long to work."""
    with Region.attach(name, role="pool") as region:
        cache = EmbeddingCache(region=region)
        operation = OPERATIONS[title](cache, mark)
        print("ready", flush=True)
        for line in sys.stdin:
            print(*_hammer(operation, float(line)), flush=True)


def _hammer(operation: Operation, seconds: float) -> Result:
    done = missed = 0
    begun = time.perf_counter()
    while (took := time.perf_counter() - begun) < seconds:
        for _ in range(BURST):
            try:
                operation()
            except PoolBusyError:
                missed += 1
        done += BURST
    return done, missed, took


def _name(kind: str) -> str:
    return f"ecpool-bench-{kind}-{os.getpid()}"


if __name__ == "__main__":
    _work(*sys.argv[1:])
