"""The engine's steps with everything that happens to it, from seeds and from hypothesis."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings, strategies
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from sim.content import Violation
from sim.driver import SimulationFailed, simulate
from sim.settings import HAS_V2, Settings
from sim.simulation import Simulation, numbers

RUNNERS = ["v1", "v2"] if HAS_V2 else ["v1"]

# What the runs below must have gone through, or they show little.
SEEN = [
    "announced loads",
    "announced saves",
    "repeated loads",
    "empty steps",
    "preempted",
    "no_kv",
    "aborted",
    "mismatched",
    "conflicts",
    "stalls",
    "flushes",
    "new weights",
    "steps that raised",
    "withdrawn",
    "saves_withdrawn",
    "saves_missing",
    "saves_of_other_dtype",
    "saves_too_large",
    "not_saved_busy",
    "not_saved_exists",
    "not_saved_no_room",
    "not_saved_too_large",
    "pool evictions",
    "pool mismatches",
    "pool saves_dropped",
    "pool deferred",
    "pool copies_failed",
]


def test_seeds() -> None:
    """Both runners, all roles, both ways of completion, one to three ranks, one or two batches."""
    total: Counter[str] = Counter()
    for runner in RUNNERS:
        for seed in range(14):
            total.update(numbers(simulate(Settings.draw(seed, runner=runner), 150)))
    assert total["steps"] >= len(RUNNERS) * 14 * 150
    unseen = [name for name in SEEN if not total[name]]
    assert not unseen, f"these runs go through nothing of {unseen}"


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("role", ["ec_both", "ec_producer", "ec_consumer"])
def test_roles(runner: str, role: str) -> None:
    """A producer is never promised anything; a consumer announces no save."""
    simulation = simulate(Settings.draw(77, runner=runner, role=role, neighbours=True), 150)
    seen = numbers(simulation)
    assert bool(seen.get("announced loads")) == (role != "ec_producer")
    assert bool(seen.get("announced saves")) == (role != "ec_consumer")


def test_a_run_is_the_same_again() -> None:
    """Without which a seed would be worth nothing."""
    told = [numbers(simulate(Settings.draw(5, copies="late", stalls=False), 120)) for _ in range(2)]
    assert told[0] == told[1]


def test_a_failure_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise Violation("made up")

    monkeypatch.setattr(Simulation, "arrive", fail)
    with pytest.raises(SimulationFailed, match=r"simulate\.py --seed 9 .*--steps \d+"):
        simulate(Settings.draw(9), 20)


class Engine(RuleBasedStateMachine):
    """Hypothesis chooses the settings and the order of events, and makes what fails short."""

    simulation: Simulation | None = None

    @initialize(seed=strategies.integers(0, 2**16), runner=strategies.sampled_from(RUNNERS))
    def begin(self, seed: int, runner: str) -> None:
        self.simulation = Simulation(Settings.draw(seed, runner=runner, copies="late"))

    def do(self, name: str, *args: int) -> None:
        assert self.simulation is not None
        try:
            getattr(self.simulation, name)(*args)
        except Violation as violation:
            raise AssertionError(f"{name}: {violation}") from violation

    @rule(
        events=strategies.lists(
            strategies.sampled_from(
                [
                    "arrive",
                    "arrive",
                    "grow",
                    "abort",
                    "schedule",
                    "schedule",
                    "take_output",
                    "neighbour",
                    "stall",
                    "go_on",
                    "flush",
                    "long_pause",
                ]
            ),
            min_size=1,
            max_size=6,
        )
    )
    def happens(self, events: list[str]) -> None:
        for name in events:
            self.do(name)

    @rule(rank=strategies.integers(0, 2))
    def a_rank_runs(self, rank: int) -> None:
        self.do("run_rank", rank)

    @rule(rank=strategies.integers(0, 2), times=strategies.integers(1, 8))
    def a_device_goes_on(self, rank: int, times: int) -> None:
        for _ in range(times):
            self.do("device", rank)

    @rule(rank=strategies.integers(0, 2))
    def a_step_will_raise(self, rank: int) -> None:
        self.do("raise_in_next_step", rank)

    @rule()
    def comes_to_rest(self) -> None:
        self.do("drain")

    @invariant()
    def nothing_failed_inside(self) -> None:
        if self.simulation is not None:
            self.do("check_halves")

    def teardown(self) -> None:
        if self.simulation is None:
            return
        try:
            self.do("drain")
        finally:
            self.simulation.close()


def test_any_order_of_events() -> None:
    run_state_machine_as_test(
        Engine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
