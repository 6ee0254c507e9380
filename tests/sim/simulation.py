"""One simulated engine with its pool, and everything that can happen to it, one thing at a time."""

from __future__ import annotations

import pickle
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from model.fakes import Clock, engine_config
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

import ecpool.vllm.scheduler as scheduler_module
import ecpool.vllm.worker as worker_module
from ecpool.transfer import TransferEngine
from ecpool.vllm import ECPoolConnector
from ecpool.vllm.ranks import Place
from sim.content import Content, Violation, catalogue
from sim.copies import Custody, Device, LateEngine
from sim.pool import AFTERLIFE, BLOCK, Pool
from sim.rank import Rank, StepError
from sim.requests import Request, Turn
from sim.scheduler import SimScheduler, Step
from sim.settings import Settings

OnDone = Callable[[list[int], bool], None]

MAX_LIVE = 8
IDLE_STEPS = 12  # steps after which an engine without requests must have given everything back


class Simulation:
    """Every public method is one event. The arguments let tests plant faults.

    ``scheduler_class`` and ``worker_class`` are the connector's halves, ``wrap_cache(cache, name)``
    gives what the named process ("scheduler", "rank 0") has in the cache's place, ``at_death`` is
    called before an engine ends.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        scheduler_class: type[Any] = scheduler_module.ECCPUScheduler,
        worker_class: type[Any] = worker_module.ECCPUWorker,
        wrap_cache: Callable[[Any, str], Any] = lambda cache, name: cache,
        at_death: Callable[[Simulation], None] = lambda simulation: None,
    ) -> None:
        self.settings = settings
        self.rng = random.Random(f"simulation {settings.seed}")
        self.content = Content()
        self.custody = Custody()
        self.clock = Clock()
        self.variants = catalogue(self.rng, settings.keys)
        self.pool = Pool(settings)
        self.counts: Counter[str] = Counter()
        self.engines: list[LateEngine] = []
        self._classes = scheduler_class, worker_class
        self._wrap = wrap_cache
        self._at_death = at_death
        self._config = engine_config(
            settings.role,
            settings={"completion": settings.completion, "log_interval": 0},
            capacity=settings.blocks * BLOCK,
            tensor=settings.ranks,
            batches=settings.batches,
        )
        self._request_number = 0
        self.stalled = False
        self._outliving: list[Device] = []
        self._start()

    def _start(self) -> None:
        """An engine begins, with empty hands."""
        half = self._classes[0](
            self._config,
            cache=self._wrap(self.pool.scheduler, "scheduler"),
            region=self.pool.scheduler_region,
            clock=self.clock,
        )
        self.halves: list[Any] = [half]
        connector = self._connector(ECConnectorRole.SCHEDULER, half)
        self.scheduler = SimScheduler(self.settings, connector, self.rng)
        self.engines = []
        self.ranks = [self._rank(number) for number in range(self.settings.ranks)]
        self._todo: list[deque[Step]] = [deque() for _ in self.ranks]
        self._in_flight: deque[Step] = deque()
        self._broken = False

    def _connector(self, role: ECConnectorRole, half: Any) -> Any:
        """vLLM's connector object with this half in it."""
        half._settler.close()  # its thread would act by the real clock
        name = "ECCPUScheduler" if role == ECConnectorRole.SCHEDULER else "ECCPUWorker"
        module = scheduler_module if role == ECConnectorRole.SCHEDULER else worker_module
        with patch.object(module, name, lambda config: half):
            return ECPoolConnector(self._config, role)

    def _rank(self, number: int) -> Rank:
        device = Device(self.rng)

        def on_done(ids: list[int], ok: bool) -> None:
            half._on_done(ids, ok)

        half = self._classes[1](
            self._config,
            cache=self._wrap(self.pool.caches[number], f"rank {number}"),
            region=self.pool.regions[number],
            engine=self._copies(number, device, on_done),
            place=Place(number, True),
        )
        self.halves.append(half)
        connector = self._connector(ECConnectorRole.WORKER, half)
        return Rank(number, self.settings, connector, device, self.content, self.rng)

    def _copies(self, number: int, device: Device, on_done: OnDone) -> Any:
        region = self.pool.regions[number]
        if self.settings.copies == "real":
            return TransferEngine(region, torch.device("cpu"), on_done=on_done)
        engine = LateEngine(
            region,
            device,
            self.content,
            self.custody,
            self.rng,
            on_done=on_done,
            name=f"rank {number}",
            failing=self.settings.failing_copies,
        )
        self.engines.append(engine)
        return engine

    # Requests.

    def arrive(self) -> None:
        """A request with some items of the catalogue, or with none."""
        if len(self.scheduler.live()) >= MAX_LIVE:
            return
        self._request_number += 1
        rng = self.rng
        request = Request(
            f"request-{self._request_number}",
            priority=rng.randrange(3),
            resumable=rng.random() < 0.15,
            with_data=self.settings.is_gathered or rng.random() < 0.95,
        )
        turn = self._turn()
        # A stream that begins with text alone is a stranger to the connector of a vLLM that asks
        # only
        # about new requests: another request's item of the same name would be promised to it.
        request.resumable &= self.settings.asks_running or bool(turn.items)
        request.extend(turn)
        self.scheduler.add(request)

    def _turn(self) -> Turn:
        rng = self.rng
        number = rng.choice([0, 1, 1, 2, self.settings.items])
        items = [rng.choice(self.variants) for _ in range(number)]
        if items and rng.random() < 0.2:
            items.append(items[0])
        gaps = tuple(rng.randrange(4) for _ in items)
        return Turn(tuple(items), gaps, tail=rng.randrange(1, 6), answer=rng.randrange(1, 4))

    def grow(self) -> None:
        """More input for a streaming request."""
        streams = [each for each in self.scheduler.live() if each.resumable]
        if streams:
            self.scheduler.grow(self.rng.choice(streams), self._turn())

    def abort(self) -> None:
        """A client goes away."""
        live = self.scheduler.live()
        if live:
            self.scheduler.finish(self.rng.choice(live))
            self.counts["aborted"] += 1

    # Steps.

    def can_schedule(self) -> bool:
        return len(self._in_flight) < self.settings.batches and self.scheduler.has_requests()

    def schedule(self) -> None:
        """vLLM's scheduler makes a step; the workers have it, but have not run it."""
        if not self.can_schedule():
            return
        self.clock.pass_by(self.rng.choice([0.001, 0.02, 0.02, 2.0]))
        step = self.scheduler.schedule()
        self.counts["steps"] += 1
        self.counts["empty steps"] += step.tokens == 0
        self._check_metadata(step)
        packed = pickle.dumps(step.output.ec_connector_metadata)
        step.output.ec_connector_metadata = pickle.loads(packed)
        self._in_flight.append(step)
        for todo in self._todo:
            todo.append(step)

    def _check_metadata(self, step: Step) -> None:
        metadata = step.output.ec_connector_metadata
        loads = {load.key: load for load in metadata.loads}
        for variant in step.promised:
            load = loads.get(variant.key)
            if load is None:
                raise Violation(f"{variant} was promised in step {step.number} and is not loaded")
            if tuple(load.shape) != variant.shape or load.dtype != "float32":
                raise Violation(f"{variant} was promised, {load} is loaded")
        encoded = {
            step.requests[name].items[index].key
            for name, indices in step.encode.items()
            for index in indices
        }
        for save in metadata.saves:
            if save.key not in encoded:
                raise Violation(f"{save} is saved in step {step.number} and not encoded")
        self.counts["announced loads"] += len(loads)
        self.counts["repeated loads"] += len(loads) - len(step.promised)
        self.counts["announced saves"] += len(metadata.saves)

    def run_rank(self, number: int) -> None:
        """A worker runs the next step that it has."""
        todo = self._todo[number % len(self.ranks)]
        if not todo:
            return
        rank = self.ranks[number % len(self.ranks)]
        try:
            rank.run(todo.popleft())
        except StepError:
            self.counts["steps that raised"] += 1
            rank.trusts = False
            self._broken = True

    def take_output(self) -> None:
        """The engine waits for the oldest step and takes its output."""
        if not self._in_flight:
            return
        step = self._in_flight[0]
        for number in range(len(self.ranks)):
            if number == 0 or step.tokens or self.rng.random() < 0.5:
                self._run_until(number, step)
        self._in_flight.popleft()
        self.scheduler.take_output(step)
        if self._broken:
            self._recover()

    def _run_until(self, number: int, step: Step) -> None:
        while self._todo[number] and self._todo[number][0].number <= step.number:
            self.run_rank(number)
        mark = self.ranks[number].marks.pop(step.number, None)
        if mark is not None and step.tokens:
            self.ranks[number].device.finish_compute(mark)

    def device(self, number: int) -> None:
        """A rank's device does one thing that it may do next; so does that of an engine that is
        gone.
        """
        self.ranks[number % len(self.ranks)].device.advance()
        for device in self._outliving:
            if self.pool.is_after_death(AFTERLIFE):
                device.stop()
            else:
                device.advance()
        self._outliving = [each for each in self._outliving if not each.idle()]

    # Trouble.

    def raise_in_next_step(self, number: int) -> None:
        if self.settings.raises:
            where = self.rng.choice(["encoder", "model"])
            self.ranks[number % len(self.ranks)].raise_next = where

    def _recover(self) -> None:
        """After a step that raised, the engine gives up its requests and caches, and goes on."""
        self._settle()
        for request in self.scheduler.live():
            self.scheduler.finish(request)
        self._clear_encoder_caches()
        self._broken = False

    def _clear_encoder_caches(self) -> None:
        self.scheduler.reset_encoder_cache()
        for rank in self.ranks:
            rank.cache.clear()
            rank.trusts = True
            rank.raise_next = None

    def _settle(self) -> None:
        """Everything that was scheduled is run, and its output taken."""
        while self._in_flight:
            step = self._in_flight.popleft()
            for number in range(len(self.ranks)):
                self._run_until(number, step)
            self.scheduler.take_output(step)
        for number, todo in enumerate(self._todo):
            while todo:
                self.run_rank(number)

    def stall(self) -> None:
        """A client stops while it holds the pool's lock."""
        if self.settings.stalls and not self.stalled:
            self.stalled = True
            self.counts["stalls"] += 1
            self.pool.stall()

    def go_on(self) -> None:
        if self.stalled:
            self.stalled = False
            self.pool.go_on()

    def neighbour(self) -> None:
        """Another engine saves an item of this namespace."""
        plain = [each for each in self.variants if each.rows and each.modality != "prompt_embeds"]
        plain = [each for each in plain if each.dtype == torch.float32]
        if self.settings.neighbours and not self.stalled and plain:
            self.pool.neighbour_saves(self.rng.choice(plain), self.content)

    def flush(self) -> None:
        """Somebody flushes the pool, for no reason that this engine knows of."""
        if self.settings.flushes and not self.stalled:
            self.pool.flush()
            self.counts["flushes"] += 1

    def restart(self) -> None:
        """All processes of the engine end as they are; another engine begins on the same pool."""
        if not self.settings.restarts or self.stalled:
            return
        self.counts["restarts"] += 1
        self._at_death(self)
        self.pool.end_engine(self.rng)
        for engine in self.engines:
            engine.outlive(self.pool.neighbour_region)
        self._outliving += [rank.device for rank in self.ranks]
        self.pool.start_engine()
        self._start()

    def long_pause(self) -> None:
        """Nothing is scheduled for longer than anybody's patience; devices get done with what they
        have.
        """
        for rank in self.ranks:
            rank.device.finish()
        self.clock.pass_by(100.0)

    # Rest.

    def drain(self) -> None:
        """All requests end and the engine takes its last steps; then nothing may be left behind."""
        self.go_on()
        for request in self.scheduler.live():
            self.scheduler.finish(request)
        self._steps_without_requests()
        self._one_with_tokens()
        for rank in self.ranks:
            rank.device.finish()
        self._steps_without_requests()
        self._check_at_rest()
        self.counts["drains"] += 1

    def _steps_without_requests(self) -> None:
        for _ in range(IDLE_STEPS):
            if not self.scheduler.has_requests():
                break
            self.schedule()
            self.take_output()
        self._settle()
        if self._broken:
            self._recover()

    def _one_with_tokens(self) -> None:
        """A few requests of text:

        workers that vLLM skips in steps without tokens take up what waits for them.
        """
        for _ in range(IDLE_STEPS):
            self._request_number += 1
            request = Request(f"request-{self._request_number}")
            request.extend(Turn((), (), tail=1, answer=1))
            self.scheduler.add(request)
            self.schedule()
            self.take_output()
            self._settle()

    def _check_at_rest(self) -> None:
        for device in self._outliving:
            device.stop()
        self._outliving = []
        self.pool.wait_for_the_dead()
        if self.custody.busy():
            raise Violation("a device is at work still")
        self.pool.check_at_rest()
        self.pool.check_contents(self.variants, self.content)
        self.check_halves()

    def check_halves(self) -> None:
        """No call has failed inside, no promise was broken."""
        for half in self.halves:
            failures = dict(half.boundary.failures)
            if self.settings.failing_copies:
                failures.pop("save", None)
            if failures:
                raise Violation(f"calls failed inside: {failures}")
            # Claims that a stalled lock keeps from being told look as if nobody had come.
            broken = ["loads_lost"] if self.counts["stalls"] else ["loads_lost", "loads_given_up"]
            for name in broken:
                if half.counts[name]:
                    raise Violation(f"{name}: {half.counts[name]}")

    def new_weights(self) -> None:
        """The encoder's weights change while the engine is at rest; then the pool is flushed, as
        the documentation says.
        """
        if not self.settings.flushes:
            return
        self.drain()
        self._clear_encoder_caches()
        self.content.new_weights()
        self.pool.flush()
        self.counts["new weights"] += 1

    def close(self) -> None:
        self.go_on()
        self.pool.close()


def numbers(simulation: Simulation) -> dict[str, int]:
    """What has happened so far, by name."""
    told: Counter[str] = Counter(simulation.counts)
    told.update(simulation.scheduler.counts)
    for half in simulation.halves:
        told.update(half.counts)
    native = simulation.pool.scheduler.counters()
    for cache in simulation.pool.caches:
        for name, count in cache.counters().items():
            native[name] = native.get(name, 0) + count
    told.update({f"pool {name}": count for name, count in native.items()})
    return dict(told)
