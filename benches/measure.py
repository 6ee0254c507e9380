"""Timing: competitors take turns in one process, so that noise and drift hit all of them alike.

A *turn* is a callable that runs one batch and returns one value (seconds per operation, bytes per
second, ...); what it prepares before it looks at the clock costs nothing. Values of one round
belong together, medians and quartiles are taken over rounds.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

Turn = Callable[[], float]

_WARM_UP = 2  # rounds that are not counted
# Before each turn: threads of the one before, such as OpenMP's, spin for a while once done.
_REST = 0.003  # seconds


@dataclass(frozen=True, slots=True)
class Effort:
    """How much of everything: ``rounds`` per comparison, ``batch`` seconds per turn.

    ``quick`` sections use smaller regions and fewer sizes as well.
    """

    rounds: int
    batch: float
    quick: bool


FULL = Effort(rounds=21, batch=0.02, quick=False)
QUICK = Effort(rounds=5, batch=0.004, quick=True)
SMOKE = Effort(rounds=1, batch=0.0002, quick=True)


@dataclass(frozen=True, slots=True)
class Sample:
    """Median and quartiles of the values that were measured."""

    median: float
    low: float
    high: float
    count: int


def summarise(values: Sequence[float]) -> Sample:
    """Median and quartiles; the quartiles of fewer than three values are their extremes."""
    ordered = sorted(values)
    if len(ordered) < 3:
        return Sample(statistics.median(ordered), ordered[0], ordered[-1], len(ordered))
    low, median, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return Sample(median, low, high, len(ordered))


def single(value: float) -> Sample:
    """A value that does not vary, such as a number of bytes."""
    return Sample(value, value, value, 1)


def take_turns(turns: Mapping[str, Turn], effort: Effort) -> dict[str, list[float]]:
    """The values of each turn, by its name; every round starts with another one."""
    names = list(turns)
    values: dict[str, list[float]] = {name: [] for name in names}
    warm_up = min(_WARM_UP, effort.rounds // 3)
    with _no_collector():
        for number in range(effort.rounds + warm_up):
            for name in rotated(names, number):
                time.sleep(_REST)
                value = turns[name]()
                if number >= warm_up:
                    values[name].append(value)
            gc.collect(0)
    return values


def rotated(names: Sequence[str], number: int) -> list[str]:
    """The names in the order of round ``number``."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def compare(turns: Mapping[str, Turn], effort: Effort) -> dict[str, Sample]:
    """`take_turns`, summarised."""
    return {name: summarise(each) for name, each in take_turns(turns, effort).items()}


def growth(values: Mapping[str, Sequence[float]], small: str, large: str) -> Sample:
    """How many times more the large case costs than the small one, round by round."""
    pairs = zip(values[large], values[small], strict=True)
    return summarise([more / less for more, less in pairs])


def repeat(function: Callable[[], object], effort: Effort) -> Turn:
    """A turn that calls ``function`` as often as fits into a batch; seconds per call."""
    count = batch_size(lambda n: _loop(function, n), effort)

    def turn() -> float:
        function()  # once for free: it wakes threads, and brings back what others have evicted
        return _loop(function, count) / count

    return turn


def batch_size(run: Callable[[int], float], effort: Effort, most: int = 1 << 16) -> int:
    """How many operations take about a batch; ``run(n)`` does n of them and returns seconds."""
    count = 1
    while count < most:
        # The quickest of several, so that neither a first time nor a neighbour is counted.
        seconds = min(run(count) for _ in range(3))
        if seconds >= effort.batch / 4:
            return max(1, min(most, int(count * effort.batch / seconds)))
        count *= 4
    return most


def _loop(function: Callable[[], object], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        function()
    return time.perf_counter() - started


@contextmanager
def _no_collector() -> Iterator[None]:
    """Python's cycle collector would stop whoever is on when it is due."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
