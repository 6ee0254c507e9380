"""`StepTracker` returns what vLLM 0.26 documents for the class of this name, in that order."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from ecpool import StepTracker


class Expected:
    """The documented behaviour in the plainest words: a list of what waits, oldest first."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._waiting: list[tuple[int, str, str]] = []  # (steps seen, request, key)

    def add(self, key: str, request: str) -> None:
        self._waiting.append((0, request, key))

    def step(self, finished: Iterable[str]) -> list[str]:
        due = []
        for request in finished:
            due += [key for _, owner, key in self._waiting if owner == request]
            self._waiting = [entry for entry in self._waiting if entry[1] != request]
        due += [key for age, _, key in self._waiting if age == self._steps]
        self._waiting = [
            (age + 1, owner, key) for age, owner, key in self._waiting if age < self._steps
        ]
        return due

    def drain_all(self) -> list[str]:
        ages = sorted({age for age, _, _ in self._waiting})
        due = [key for wanted in ages for age, _, key in self._waiting if age == wanted]
        self._waiting = []
        return due

    def __len__(self) -> int:
        return len(self._waiting)


REQUESTS = st.sampled_from(["r1", "r2", "r3", "r4"])
KEYS = st.sampled_from(["a", "b", "c"])
ACTIONS = st.one_of(
    st.tuples(st.just("add"), KEYS, REQUESTS),
    st.tuples(st.just("step"), st.lists(REQUESTS, max_size=3)),
    st.tuples(st.just("drain")),
)


@given(steps=st.integers(1, 5), actions=st.lists(ACTIONS, max_size=60))
def test_it_returns_what_is_expected(steps: int, actions: list[tuple]) -> None:  # type: ignore[type-arg]
    tracker, expected = StepTracker(steps), Expected(steps)
    added = returned = 0
    for name, *arguments in actions:
        if name == "add":
            tracker.add(*arguments)
            expected.add(*arguments)
            added += 1
        elif name == "step":
            due = tracker.step(arguments[0])
            assert due == expected.step(arguments[0])
            returned += len(due)
        else:
            due = tracker.drain_all()
            assert due == expected.drain_all()
            returned += len(due)
        assert len(tracker) == len(expected)
    assert returned + len(tracker.drain_all()) == added, "each add comes back exactly once"


def test_any_iterable_of_requests() -> None:
    for finished in ({"r"}, ["r"], ("r",), iter(["r"]), {"r": 1}.keys()):
        tracker = StepTracker(2)
        tracker.add("k", "r")
        assert tracker.step(finished) == ["k"]


def test_a_million_adds_are_no_burden() -> None:
    tracker = StepTracker(2)
    for step in range(100):
        for number in range(1000):
            tracker.add(f"k{number}", f"r{step}")
        tracker.step([])
    assert len(tracker) == 2000
    assert "2000" in repr(tracker)
