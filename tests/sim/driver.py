"""Runs of a simulated engine from a seed, and how to run one again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from sim.content import Violation
from sim.settings import Settings
from sim.simulation import Simulation

# How often what happens, relative to each other.
WEIGHTS: dict[str, float] = {
    "schedule": 30,
    "run_rank": 40,
    "take_output": 25,
    "device": 60,  # or as hasty as the settings say
    "arrive": 14,
    "grow": 2,
    "abort": 1.5,
    "neighbour": 2,
    "stall": 0.5,
    "go_on": 3,
    "raise_in_next_step": 0.15,
    "flush": 0.3,
    "long_pause": 0.2,
    "drain": 0.15,
    "new_weights": 0.05,
    "restart": 1.0,
}
WITH_NUMBER = {"run_rank", "device", "raise_in_next_step"}


class SimulationFailed(AssertionError):
    """A property did not hold. The message says which, and how to see it again."""


class Run:
    """One seed's simulation: performs events until so many steps have been scheduled."""

    def __init__(self, settings: Settings, **planted: Any) -> None:
        self.settings = settings
        self._rng = random.Random(f"driver {settings.seed}")
        self.simulation = Simulation(settings, **planted)
        self.events: list[str] = []
        # What the dead leave behind returns after seconds: such engines come to rest only at their
        # end.
        rests = {"drain", "new_weights"} if settings.restarts else set()
        self._names = [name for name in WEIGHTS if name not in rests]
        weights = {**WEIGHTS, "device": settings.haste}
        self._weights = [weights[name] for name in self._names]

    @property
    def steps(self) -> int:
        return self.simulation.counts["steps"]

    def to(self, steps: int) -> None:
        """Until this many steps, then to rest. Raises SimulationFailed."""
        self._guarded(self._events, steps)
        self._guarded(self.simulation.drain)

    def _events(self, steps: int) -> None:
        idle = 0
        while self.steps < steps:
            before = self.steps
            for name in self._rng.choices(self._names, self._weights, k=64):
                self._event(name)
                if self.steps >= steps:
                    break
            idle = 0 if self.steps > before else idle + 1
            if idle > 50:
                raise Violation("the engine makes no steps any more")

    def _event(self, name: str) -> None:
        method: Callable[..., None] = getattr(self.simulation, name)
        self.events.append(name)
        del self.events[:-40]
        if name in WITH_NUMBER:
            method(self._rng.randrange(self.settings.ranks))
        else:
            method()
        if name == "take_output" and self._rng.random() < 0.02:
            self._look()

    def _look(self) -> None:
        """A look at everything, now and then."""
        self.simulation.check_halves()
        if not self.simulation.stalled:
            self.simulation.pool.check()
        if len(self.simulation.scheduler.live()) >= 8:
            self.simulation.abort()

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except (Violation, Exception) as error:
            raise SimulationFailed(self._told(error)) from error

    def _told(self, error: BaseException) -> str:
        return (
            f"{type(error).__name__}: {error}\n"
            f"after {self.steps} steps; last events: {' '.join(self.events[-12:])}\n"
            f"settings: {self.settings.changed()}\n"
            f"again: python scripts/simulate.py --seed {self.settings.seed} --worlds 1"
            f" --steps {self.steps + 1}{self._options()}"
        )

    def _options(self) -> str:
        """What was set by hand; the rest is the seed's."""
        drawn, mine = Settings.draw(self.settings.seed).as_dict(), self.settings.as_dict()
        other = [f"{name}={value!r}" for name, value in mine.items() if value != drawn[name]]
        return "".join(f' --set "{each}"' for each in other)

    def close(self) -> None:
        self.simulation.close()


def simulate(settings: Settings, steps: int, **planted: Any) -> Simulation:
    """A whole run. Raises SimulationFailed."""
    run = Run(settings, **planted)
    try:
        run.to(steps)
    finally:
        run.close()
    return run.simulation
