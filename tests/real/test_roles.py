"""Engines that only save or only load."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.engines import EngineProcess, ec_transfer
from support.requests import Picture, one_each, tokens_of

AGAIN = "once more: "
PICTURES = [Picture(seed) for seed in range(300, 312)]
REQUESTS = [*one_each(PICTURES), *one_each(PICTURES, before=AGAIN)]


@pytest.mark.scenario("a producer saves and never loads")
def test_a_producer_saves_and_never_loads(engine_of: Callable[..., EngineProcess]) -> None:
    # A producer may run the encoder alone: one token is all that every vLLM gives.
    cold = one_each(PICTURES, max_tokens=1)
    again = one_each(PICTURES, max_tokens=1, before=AGAIN)
    with engine_of(ec_transfer=ec_transfer("ec_producer")) as engine:
        with engine.counting() as first:
            engine.generate(cold)
        with engine.counting() as second:
            engine.generate(again)
        pool = engine.pool()
    assert first.items == second.items == len(PICTURES)
    assert pool.stats["ready"] == len(PICTURES)
    assert pool.counts["saves"] == pool.counts["not_saved_exists"] == len(PICTURES)
    assert not pool.counts.get("hits")
    assert pool.violations == []


@pytest.mark.scenario("a consumer encodes what the pool lacks")
def test_a_consumer_alone_encodes_and_saves_nothing(
    engine_of: Callable[..., EngineProcess], answers: Callable
) -> None:
    with engine_of(ec_transfer=ec_transfer("ec_consumer")) as engine:
        for before in ("", AGAIN):
            requests = one_each(PICTURES, before=before)
            with engine.counting() as encoded:
                outcomes = engine.generate(requests)
            assert tokens_of(outcomes) == answers(requests)
            assert encoded.items == len(PICTURES)
        pool = engine.pool()
    assert pool.stats["entries"] == 0
    assert pool.counts["misses"] == 2 * len(PICTURES)
