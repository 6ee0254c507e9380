"""What the simulator is worth:

it finds each planted fault soon, and the same seeds are clean without.
"""

from __future__ import annotations

import re
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

# What is planted, and words of what the simulator says to it.
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "a missing lease": ({"scheduler_class": UnheldPromise}, "was promised .* and is not loaded"),
    "a load ended by the first rank": (
        {"wrap_cache": in_workers(EndedByTheFirst)},
        "while it is being read|encoder cache miss|wrong bytes",
    ),
    "a save ready before its completion": (
        {"wrap_cache": in_workers(ReadyTooSoon)},
        "is given to .* while .* writes it|wrong bytes",
    ),
    "a transfer never resolved": (
        {"wrap_cache": in_workers(NeverResolved)},
        "something was left behind",
    ),
}
DEATHS: dict[str, Any] = {"restarts": True, "stalls": False, "raises": False, "haste": 15.0}


def settings_of(seed: int, **more: Any) -> Settings:
    return Settings.draw(seed, **{**CROWDED, **more})


@pytest.mark.parametrize("fault", FAULTS)
def test_is_found(fault: str) -> None:
    planted, words = FAULTS[fault]
    found = [seed for seed in SEEDS if is_found(words, settings_of(seed), **planted)]
    assert len(found) > len(SEEDS) // 2, f"{fault} is seen by {found} of {SEEDS}"


def test_is_found_in_what_the_dead_leave_behind() -> None:
    """Blocks of an orphaned entry that are used again at once."""
    words = "is given to .* while .* writes it|wrong bytes"
    settings = [settings_of(seed, **DEATHS) for seed in SEEDS]
    assert any(is_found(words, each, at_death=reuse_orphans) for each in settings)


def is_found(words: str, settings: Settings, **planted: Any) -> bool:
    """Whether the run fails, and for the right reason."""
    try:
        simulate(settings, STEPS, **planted)
    except SimulationFailed as failure:
        told = str(failure)
    else:
        return False
    assert re.search(words, told), told
    return True


def test_the_same_seeds_are_clean_without() -> None:
    for seed in SEEDS:
        simulate(settings_of(seed), STEPS)


def test_the_dead_leave_nothing_behind() -> None:
    """Engines end in the middle of everything while their devices go on for a moment."""
    simulation = simulate(settings_of(3, **DEATHS), 400)
    assert simulation.counts["restarts"] > 0
