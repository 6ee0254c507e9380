"""What the simulator is worth:

it finds each planted fault soon, and the same seeds are clean without.
"""

from __future__ import annotations

from typing import Any

import pytest

from sim.driver import SimulationFailed, simulate
from sim.faults import (
    EndedByTheFirst,
    NeverResolved,
    ReadyTooSoon,
    UnheldPromise,
    in_workers,
    reuse_orphans,
)
from sim.settings import Settings

STEPS, SEEDS = 250, range(6)

# A pool that is always full, and copies that take their time.
CROWDED: dict[str, Any] = {
    "role": "ec_both",
    "completion": "events",
    "copies": "late",
    "ranks": 2,
    "blocks": 14,
    "encoder_cache": 8,
    "keys": 10,
    "flushes": False,
    "failing_copies": False,
}

FAULTS = {
    "a missing lease": {"scheduler_class": UnheldPromise},
    "a load ended by the first rank": {"wrap_cache": in_workers(EndedByTheFirst)},
    "a save ready before its completion": {"wrap_cache": in_workers(ReadyTooSoon)},
    "a transfer never resolved": {"wrap_cache": in_workers(NeverResolved)},
}
ORPHANS = "blocks of an orphaned entry reused at once"


def settings_of(seed: int, **more: Any) -> Settings:
    return Settings.draw(seed, **{**CROWDED, **more})


@pytest.mark.parametrize("fault", FAULTS)
def test_is_found(fault: str) -> None:
    found = [seed for seed in SEEDS if is_found(settings_of(seed), **FAULTS[fault])]
    assert found, f"no seed of {SEEDS} shows {fault} within {STEPS} steps"


def test_is_found_in_what_the_dead_leave_behind() -> None:
    settings = [settings_of(seed, restarts=True, stalls=False, raises=False) for seed in SEEDS]
    assert any(is_found(each, at_death=reuse_orphans) for each in settings), ORPHANS


def is_found(settings: Settings, **planted: Any) -> bool:
    try:
        simulate(settings, STEPS, **planted)
    except SimulationFailed:
        return True
    return False


def test_the_same_seeds_are_clean_without() -> None:
    for seed in SEEDS:
        simulate(settings_of(seed), STEPS)


def test_the_dead_leave_nothing_behind() -> None:
    """Engines end in the middle of everything while their devices go on for a moment."""
    simulation = simulate(settings_of(3, restarts=True, stalls=False, raises=False), 400)
    assert simulation.counts["restarts"] > 0
