"""One engine that saves and loads: what was encoded once is never encoded again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.engines import EngineProcess, ec_transfer
from support.requests import Picture, Request, one_each, tokens_of

pytestmark = pytest.mark.scenario("repeats come from the pool")

AGAIN = "once more: "
MANY = [Picture(seed) for seed in range(24)]
SIZES = [Picture(100, 2, 2), Picture(101, 3, 5), Picture(102, 16, 16), Picture(103, 1, 7)]
POOLED, NEW, NEWER = Picture(110), Picture(111), Picture(112)
TWICE = Picture(120)
# As many as vLLM's own encoder cache can hold, so that nothing else is left in it.
FILLERS = one_each(Picture(seed, 16, 16) for seed in (900, 901, 902, 903))

MIXED = Request((NEW, POOLED, NEWER), before=AGAIN)
DOUBLE = Request((TWICE, TWICE))
REQUESTS = [
    *one_each(MANY),
    *one_each(MANY, before=AGAIN),
    *one_each(SIZES),
    *one_each(SIZES, before=AGAIN),
    *one_each([POOLED]),
    *FILLERS,
    MIXED,
    DOUBLE,
    Request(text="how many shapes are there?"),
]


@pytest.fixture(scope="module", params=[False, True], ids=["no-prefix-caching", "prefix-caching"])
def engine(
    request: pytest.FixtureRequest, engine_of: Callable[..., EngineProcess]
) -> Iterator[EngineProcess]:
    with engine_of(ec_transfer=ec_transfer(), prefix_caching=request.param) as engine:
        yield engine


def test_repeats_are_not_encoded(engine: EngineProcess, answers: Callable) -> None:
    with engine.counting() as first:
        cold = engine.generate(one_each(MANY))
    with engine.counting() as second:
        warm = engine.generate(one_each(MANY, before=AGAIN))
    assert tokens_of(cold) == answers(one_each(MANY))
    assert tokens_of(warm) == answers(one_each(MANY, before=AGAIN))
    assert (first.items, second.items) == (len(MANY), 0)


def test_pictures_of_several_sizes(engine: EngineProcess, answers: Callable) -> None:
    engine.generate(one_each(SIZES))
    engine.generate(FILLERS)
    with engine.counting() as again:
        warm = engine.generate(one_each(SIZES, before=AGAIN))
    assert tokens_of(warm) == answers(one_each(SIZES, before=AGAIN))
    assert again.items == 0


def test_new_and_pooled_pictures_in_one_prompt(engine: EngineProcess, answers: Callable) -> None:
    engine.generate(one_each([POOLED]))
    engine.generate(FILLERS)
    with engine.counting() as mixed:
        outcomes = engine.generate([MIXED])
    assert tokens_of(outcomes) == answers([MIXED])
    assert mixed.items == 2


def test_one_picture_twice_in_a_prompt(engine: EngineProcess, answers: Callable) -> None:
    with engine.counting() as double:
        outcomes = engine.generate([DOUBLE])
    assert tokens_of(outcomes) == answers([DOUBLE])
    assert double.items == 1


def test_text_alone(engine: EngineProcess, answers: Callable) -> None:
    text = [Request(text="how many shapes are there?")]
    with engine.counting() as none:
        outcomes = engine.generate(text)
    assert tokens_of(outcomes) == answers(text)
    assert none.items == 0
