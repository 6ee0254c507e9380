"""Starts the processes, kills them, starts them anew, and looks at what they left behind."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kill.audit import Audit, audit
from kill.channel import Channel, pair
from kill.client import run_client
from kill.engine import Place, run_scheduler, run_worker
from kill.world import NAMESPACES, Probe, Pulse, Settings

_PLACES = 128
_STUCK_AFTER = 20.0
_PR_SET_CHILD_SUBREAPER = 36
Log = Callable[[str], None]


@dataclass(slots=True)
class Process:
    """One child. `hanging`: it waits to be killed while its device writes on."""

    pid: int
    title: str
    place: int
    beats: int = -1
    beat_at: float = field(default_factory=time.monotonic)
    hanging: bool = False

    @property
    def is_scheduler(self) -> bool:
        return self.title.startswith("scheduler")


@dataclass(slots=True)
class Group:
    """An engine, or a client on its own: what dies together sooner or later, and starts anew."""

    number: int
    kind: str
    incarnation: int = 0
    processes: dict[int, Process] = field(default_factory=dict)
    winding_down: bool = False

    @property
    def name(self) -> str:
        """Another one in each life, as a real engine's is."""
        return f"{self.kind}-{self.number}-{self.incarnation}"


@dataclass(slots=True)
class Report:
    """What a run saw. injected: kills at crash points. `failures` is empty when all is well."""

    seed: int
    kills: int = 0
    injected: int = 0
    orderly: int = 0
    starts: int = 0
    stops: int = 0
    hung_devices: int = 0
    longest_call: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, outcome: Audit) -> None:
        self.failures += outcome.failures
        self.counters = outcome.counters or self.counters


class Harness:
    """One run. Forks from the process it lives in, which must have no other thread."""

    def __init__(self, settings: Settings, log: Log = lambda _: None) -> None:
        self._settings, self._log = settings, log
        self._rng = random.Random(settings.seed)
        self._pulse = Pulse(_PLACES)
        self._free_places = list(range(_PLACES))
        self._reports, self._report_end = pair()
        self._by_pid: dict[int, Group] = {}
        self._victims: set[int] = set()
        self._groups = [Group(n, "engine") for n in range(settings.engines)]
        self._groups += [Group(n, "client") for n in range(settings.clients)]
        self._private_names: list[str] = []
        self.report = Report(settings.seed)

    def run(self) -> Report:
        _adopt_orphans()
        try:
            while self.report.kills < self._settings.kills and not self.report.failures:
                self._run_batch()
                self.report.add(audit(self._settings, self._region_names()))
                report = self.report
                self._log(
                    f"{report.kills} kills, {report.starts} starts, {report.failures or 'all well'}"
                )
        finally:
            self._kill_all()
        return self.report

    def _region_names(self) -> list[str]:
        names, self._private_names = self._private_names, []
        return names if self._settings.lifetime == "private" else [self._settings.name]

    # One batch.

    def _run_batch(self) -> None:
        until = min(self.report.kills + self._settings.batch, self._settings.kills)
        next_kill = self._time_of_next_kill()
        while self.report.kills < until and not self.report.failures:
            self._reap()
            self._hear_reports()
            for group in self._groups:
                if not group.processes:
                    self._start(group)
            if time.monotonic() >= next_kill:
                self._kill_one()
                next_kill = self._time_of_next_kill()
            self._look_for_stuck()
            time.sleep(0.0003)
        self._end_all()

    def _time_of_next_kill(self) -> float:
        """Mostly within milliseconds, so that starting and leaving are hit too; at times later."""
        mean = self._rng.choice([0.002, 0.005, 0.015, 0.05])
        return time.monotonic() + self._rng.expovariate(1 / mean)

    def _kill_one(self) -> None:
        running = [p for group in self._groups for p in group.processes.values()]
        hanging = [p for p in running if p.hanging]
        if not running:
            return
        victim = self._rng.choice(hanging or running)
        if self._rng.random() < self._settings.stops:
            os.kill(victim.pid, signal.SIGSTOP)
            self.report.stops += 1
            time.sleep(self._rng.choice([0.002, 0.03, 0.1]))
            if self._rng.random() < 0.5:
                os.kill(victim.pid, signal.SIGCONT)
                return
        self._kill(victim)

    def _end_all(self) -> None:
        """Ends the batch: some are killed, the others asked to leave."""
        deadline = time.monotonic() + _STUCK_AFTER
        for process in self._all_processes():
            if process.hanging or self._rng.random() < 0.3:
                self._kill(process)
            elif process.title.startswith(("scheduler", "client")):
                os.kill(process.pid, signal.SIGTERM)
        while self._by_pid and time.monotonic() < deadline:
            self._reap()
            self._hear_reports()
            for process in self._all_processes():
                if process.hanging:
                    self._kill(process)
            time.sleep(0.0005)
        for process in self._all_processes():
            self.report.failures.append(f"{process.title} did not leave within {_STUCK_AFTER} s")
        self._kill_all()

    def _all_processes(self) -> Iterator[Process]:
        for group in self._groups:
            yield from list(group.processes.values())

    def _kill_all(self) -> None:
        while self._by_pid:
            for process in self._all_processes():
                self._kill(process)
            self._reap()
            time.sleep(0.001)

    # Ends of processes.

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            group = self._by_pid.pop(pid, None)
            if group is not None:
                self._ended(group, group.processes.pop(pid), status)
            self._victims.discard(pid)  # the number can come again

    def _ended(self, group: Group, process: Process, status: int) -> None:
        report = self.report
        report.longest_call = max(report.longest_call, self._pulse.read(process.place)[1])
        self._free_places.append(process.place)
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if ended_by == signal.SIGKILL:
            report.kills += 1
            report.injected += process.pid not in self._victims
        elif status == 0 or ended_by == signal.SIGTERM:  # told to leave before it could listen
            report.orderly += 1
        else:
            report.failures.append(f"{process.title} ended with status {status:#x}")
        if group.processes and not group.winding_down:
            # The rest of an engine goes too: at once by SIGKILL, or by itself when it notices.
            group.winding_down = True
            for other in list(group.processes.values()):
                if other.hanging or self._rng.random() < 0.4:
                    self._kill(other)

    def _kill(self, process: Process) -> None:
        self._victims.add(process.pid)
        os.kill(process.pid, signal.SIGKILL)

    def _hear_reports(self) -> None:
        while True:
            try:
                kind, what = self._reports.receive(timeout=0)
            except (TimeoutError, BlockingIOError):
                return
            if kind == "hanging":
                self.report.hung_devices += 1
                group = self._by_pid.get(what)
                if group is not None:
                    group.processes[what].hanging = True
            elif kind == "suspect":
                self._judge(*what)
            else:
                self.report.failures.append(f"{kind}: {what}")

    def _judge(self, engine: str, what: str) -> None:
        """A worker met what is right only if its scheduler had died. Nobody is killed meanwhile."""
        group = next((group for group in self._groups if group.name == engine), None)
        schedulers = (
            [p for p in group.processes.values() if p.title.startswith("scheduler")]
            if group
            else []
        )
        time.sleep(0.02)  # what a dying process takes from freeing its lock to being seen dead
        if any(_is_alive(scheduler.pid) for scheduler in schedulers):
            self.report.failures.append(f"wrong: {what}, and the scheduler of {engine} lives")

    def _look_for_stuck(self) -> None:
        now = time.monotonic()
        for process in self._all_processes():
            beats, _ = self._pulse.read(process.place)
            if beats != process.beats or process.hanging:
                process.beats, process.beat_at = beats, now
            elif now - process.beat_at > _STUCK_AFTER:
                self.report.failures.append(f"{process.title} is stuck after {beats} calls")

    # Starts.

    def _start(self, group: Group) -> None:
        group.incarnation += 1
        group.winding_down = False
        name = group.name
        namespace = self._rng.choice(NAMESPACES)
        if group.kind == "client":
            place = Place(name, self._settings.name, namespace, 1)
            self._fork(
                group, f"client of {name}", [], run_client, self._settings, place, self._report_end
            )
            return
        workers = self._settings.workers
        region = self._settings.name
        if self._settings.lifetime == "private":
            region = f"private-{name}"
            self._private_names.append(region)
        place = Place(name, region, namespace, workers + 1)
        self._start_engine(group, place, workers)

    def _start_engine(self, group: Group, place: Place, workers: int) -> None:
        pairs = [pair() for _ in range(workers)]
        ours = [end for ends in pairs for end in ends]
        starts: list[Callable[[], None]] = []
        for rank, (_, theirs) in enumerate(pairs):
            starts.append(
                lambda rank=rank, theirs=theirs: self._fork(  # type: ignore[misc]
                    group, f"worker {rank} of {place.group}",
                    [end for end in ours if end is not theirs],
                    run_worker, self._settings, place, rank, theirs, self._report_end,
                )
            )  # fmt: skip
        schedulers = [own for own, _ in pairs]
        starts.append(
            lambda: self._fork(
                group, f"scheduler of {place.group}", [theirs for _, theirs in pairs],
                run_scheduler, self._settings, place, schedulers,
            )
        )  # fmt: skip
        # Workers mostly come first, but nothing may depend on it.
        if self._rng.random() < 0.3:
            self._rng.shuffle(starts)
        for start in starts:
            start()
        for end in ours:
            end.close()

    def _fork(
        self,
        group: Group,
        title: str,
        not_its: list[Channel],
        run: Callable[..., None],
        *arguments: object,
    ) -> None:
        place = self._free_places.pop(0)
        self._pulse.clear(place)
        seed = self._rng.getrandbits(64)
        pid = os.fork()
        if pid == 0:
            self._be_child(title, not_its, run, arguments, place, seed)
        self.report.starts += 1
        group.processes[pid] = Process(pid, title, place)
        self._by_pid[pid] = group

    def _be_child(
        self,
        title: str,
        not_its: list[Channel],
        run: Callable[..., None],
        arguments: tuple[object, ...],
        place: int,
        seed: int,
    ) -> None:
        """Never returns."""
        status = 1
        try:
            self._reports.close()
            for end in not_its:
                end.close()
            rng = random.Random(seed)
            probe = Probe(rng, self._pulse, place, self._settings.crash_points)
            run(*arguments, probe, rng)
            status = 0
        except BaseException:
            self._report_end.send(("raised", f"{title}: {traceback.format_exc()}"))
        finally:
            sys.stderr.flush()
            os._exit(status)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def _adopt_orphans() -> None:
    """Makes grandchildren ours when their parent is killed, so that none stays as a zombie."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
