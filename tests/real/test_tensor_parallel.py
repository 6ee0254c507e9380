"""Tensor parallel 2: one rank saves, both ranks load."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.engines import EngineProcess, ec_transfer, pool_files
from support.requests import Picture, one_each, tokens_of

AGAIN = "once more: "
PICTURES = [Picture(seed) for seed in range(400, 416)]
REQUESTS = [*one_each(PICTURES), *one_each(PICTURES, before=AGAIN)]


@pytest.mark.scenario("tensor parallel 2")
def test_both_ranks_load_what_one_saved(
    engine_of: Callable[..., EngineProcess], answers: Callable
) -> None:
    settings = ec_transfer()
    with engine_of(ec_transfer=settings, in_process=False, tensor_parallel=2) as engine:
        with engine.counting(rank=0) as cold_rank_0, engine.counting(rank=1) as cold_rank_1:
            cold = engine.generate(one_each(PICTURES))
        with engine.counting(rank=0) as warm_rank_0, engine.counting(rank=1) as warm_rank_1:
            warm = engine.generate(one_each(PICTURES, before=AGAIN))
        # Its name is gone as soon as all have attached, so a SIGKILL leaves nothing either.
        assert settings["engine_id"] in engine.log_text(), "the name that the pool had"
        assert pool_files(settings) == []
        engine.kill()
    assert pool_files(settings) == []
    assert (cold_rank_0.items, cold_rank_1.items) == (len(PICTURES), len(PICTURES))
    assert (warm_rank_0.items, warm_rank_1.items) == (0, 0)
    assert tokens_of(cold) == answers(one_each(PICTURES))
    assert tokens_of(warm) == answers(one_each(PICTURES, before=AGAIN))
