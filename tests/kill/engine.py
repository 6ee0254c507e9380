"""An engine's scheduler and workers, which drive the pool as the connector does and are killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ecpool import PoolBusyError
from kill.channel import Channel
from kill.device import begin_writing
from kill.world import (
    CONTENT,
    DTYPE,
    ROW_BYTES,
    Item,
    Probe,
    Settings,
    open_cache,
    open_region,
    some_item,
)

if TYPE_CHECKING:
    from ecpool import EmbeddingCache, Region

STEPS_IN_FLIGHT = 2
STEPS_UNTIL_CLOSED = 6


@dataclass(frozen=True, slots=True)
class Job:
    """One load or save, as a step's metadata names it."""

    id: int
    extents: tuple[tuple[int, int], ...]
    item: Item


@dataclass(slots=True)
class Step:
    """A step's metadata: what each rank copies."""

    number: int
    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Place:
    """Who a process is: its group, the region's name, and how many clients a private one has."""

    group: str
    region: str
    namespace: str
    expected: int


class Scheduler:
    """Promises, allocates, dispatches; the steps' output is all that it hears of its workers."""

    def __init__(
        self,
        settings: Settings,
        place: Place,
        workers: list[Channel],
        probe: Probe,
        rng: random.Random,
    ) -> None:
        self._workers, self._probe, self._rng = workers, probe, rng
        self._stopping = False
        signal.signal(signal.SIGTERM, self._stop)
        self._region = open_region(
            settings, place.region, "scheduler", place.group, expected=place.expected
        )
        self._cache = open_cache(self._region, place.namespace)
        self._all_ranks = (1 << len(workers)) - 1
        self._announced: deque[tuple[int, list[int]]] = deque()

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def run(self) -> None:
        """Steps until told to stop or until a worker is gone, as an engine does."""
        sent = done = 0
        while not self._stopping:
            step = self._schedule(sent)
            reached = [
                worker.send(step) for worker in self._workers
            ]  # every one, also after a failure
            if not all(reached):
                break
            sent += 1
            if sent - done > STEPS_IN_FLIGHT:
                if not self._await_output():
                    break
                done += 1
        self._leave()

    def _await_output(self) -> bool:
        for worker in self._workers:
            while True:
                self._probe.beat()
                try:
                    if worker.receive(timeout=0.5) is None:
                        return False
                    break
                except TimeoutError:
                    # A worker that is stopped, or whose device hangs: an engine waits too.
                    if self._stopping:
                        return False
        return True

    def _leave(self) -> None:
        if self._rng.random() < 0.7:
            self._region.close()

    def _schedule(self, number: int) -> Step:
        step = Step(number)
        for _ in range(self._rng.randint(1, 4)):
            self._schedule_item(step, some_item(self._rng))
        self._probe(
            self._cache.dispatch_loads, [job.id for job in step.loads], ranks=self._all_ranks
        )
        self._announced.append((number, [job.id for job in step.saves]))
        self._close_old(number)
        self._do_something_rare()
        return step

    def _schedule_item(self, step: Step, item: Item) -> None:
        cache, probe, rng = self._cache, self._probe, self._rng
        # Now and then a request that expects other rows: the entry must go, not be served.
        rows = item.rows if rng.random() < 0.99 else item.rows + 1
        lease = probe(cache.lease, item.key, rows=rows, dtype=DTYPE)
        if lease is not None:
            if rng.random() < 0.1:
                probe(cache.end_leases, [lease.id])
            else:
                step.loads.append(Job(lease.id, lease.extents, item))
            return
        ranks = self._all_ranks if rng.random() < 0.1 else 1
        save = probe(
            cache.begin_save, item.key, rows=item.rows, row_bytes=ROW_BYTES, modality="image",
            ranks=ranks,
        )  # fmt: skip
        if isinstance(save, str):
            return
        if rng.random() < 0.05:
            probe(cache.withdraw, [save.id])
        elif rng.random() < 0.97:  # else it is forgotten, and closed as unclaimed later
            step.saves.append(Job(save.id, save.extents, item))
        else:
            self._announced.append((step.number, [save.id]))

    def _close_old(self, number: int) -> None:
        while self._announced and self._announced[0][0] <= number - STEPS_UNTIL_CLOSED:
            _, ids = self._announced.popleft()
            unclaimed = self._probe(self._cache.unclaimed, ids)
            self._probe(self._cache.close_unclaimed, unclaimed)

    def _do_something_rare(self) -> None:
        if self._rng.random() < 0.002:
            try:
                self._probe(self._cache.flush)
            except PoolBusyError:
                return


class Worker:
    """Claims, copies, verifies, completes: some copies at once, some only steps later."""

    def __init__(
        self,
        settings: Settings,
        place: Place,
        rank: int,
        scheduler: Channel,
        reports: Channel,
        probe: Probe,
        rng: random.Random,
    ) -> None:
        self._scheduler, self._reports = scheduler, reports
        self._rank, self._probe, self._rng = rank, probe, rng
        self._namespace, self._group = place.namespace, place.group
        self._region = open_region(
            settings, place.region, "worker", place.group, rank=rank, expected=place.expected
        )
        self._cache = open_cache(self._region, place.namespace)
        self._held_back: list[int] = []
        self._buffer = bytearray()

    def run(self) -> None:
        while True:
            try:
                step = self._scheduler.receive(timeout=0.5)
            except TimeoutError:
                self._probe.beat()
                continue
            if step is None:
                break
            self._copy(step)
            if not self._scheduler.send(step.number):
                break
        self._complete_held_back()
        if self._rng.random() < 0.7:
            self._region.close()

    def _copy(self, step: Step) -> None:
        done = self._load(step.loads) + self._save(step.saves)
        if self._rng.random() < 0.3:
            self._held_back += done
        else:
            self._probe(self._cache.complete, self._rank, done)
        if self._rng.random() < 0.3:
            self._complete_held_back()

    def _complete_held_back(self) -> None:
        done, self._held_back = self._held_back, []
        self._probe(self._cache.complete, self._rank, done)

    def _load(self, loads: list[Job]) -> list[int]:
        outcomes = self._probe(self._cache.claim_loads, self._rank, [job.id for job in loads])
        done = []
        for job, outcome in zip(loads, outcomes, strict=True):
            if outcome == "refused":
                self._suspect(f"the promised load of {job.item} was refused")
            else:
                self._verify(job)
                done.append(job.id)
        return done

    def _verify(self, job: Job) -> None:
        del self._buffer[:]
        self._buffer.extend(bytes(job.item.nbytes))
        self._probe(self._region.read, job.extents, self._buffer)
        if self._buffer == CONTENT[self._namespace, job.item.key]:
            return
        if self._probe(self._cache.claim_loads, self._rank, [job.id]) == ["refused"]:
            # The lock was busy when the load was dispatched and claimed, and then the one who had
            # promised it died: its engine is gone, and nobody will see what was read.
            self._suspect(f"wrong bytes of {job.item} were loaded")
        else:
            self._reports.send(("wrong", f"wrong bytes of {job.item} under load {job.id}"))

    def _suspect(self, what: str) -> None:
        """Something that may only happen to an engine whose scheduler is dead."""
        self._reports.send(("suspect", (self._group, what)))

    def _save(self, saves: list[Job]) -> list[int]:
        mine = [job for job in saves if self._rank == 0 or self._rng.random() < 0.9]
        # Now and then an item turns out larger than announced: it must not be copied.
        claims = [(job.id, (self._true_rows(job.item), ROW_BYTES), DTYPE) for job in mine]
        outcomes = self._probe(self._cache.claim_saves, self._rank, claims)
        done = []
        for job, outcome, (_, shape, _) in zip(mine, outcomes, claims, strict=True):
            if outcome == "claimed":
                if shape[0] != job.item.rows or self._rng.random() < 0.02:
                    self._probe(self._cache.complete, self._rank, [job.id], ok=False)
                    continue
                self._write(job)
                done.append(job.id)
        return done

    def _true_rows(self, item: Item) -> int:
        return item.rows if self._rng.random() < 0.98 else item.rows + self._rng.randint(1, 4)

    def _write(self, job: Job) -> None:
        if self._rng.random() < 0.003:
            self._hang(job)
        self._probe(self._region.write, job.extents, CONTENT[self._namespace, job.item.key])

    def _hang(self, job: Job) -> None:
        """A device goes on writing while its process never gets to say that the copy is over."""
        begin_writing(self._region, job.extents)
        self._reports.send(("hanging", os.getpid()))
        while True:
            time.sleep(60)


def run_scheduler(*args: Any) -> None:
    Scheduler(*args).run()


def run_worker(*args: Any) -> None:
    Worker(*args).run()


def read_all(region: Region, cache: EmbeddingCache, namespace: str, item: Item) -> str | None:
    """What is wrong with the entry of this item, if it is there."""
    lease = cache.lease(item.key, rows=item.rows, dtype=DTYPE)
    if lease is None:
        return None
    buffer = bytearray(lease.nbytes)
    region.read(lease.extents, buffer)
    cache.end_leases([lease.id])
    if buffer == CONTENT[namespace, item.key]:
        return None
    return f"{namespace}: wrong bytes of {item} at {lease.extents}"
