"""A pool that is too small: promises are kept, large items are left out, and every answer stays
right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from support.engines import EngineProcess, ec_transfer
from support.requests import Picture, Request, one_each, tokens_of
from support.tiny_model import TINY

pytestmark = pytest.mark.scenario("a full pool keeps its promises")

AGAIN = "once more: "
BLOCK = 16384
BLOCKS = 4
HALF = [Picture(seed, 8, 16) for seed in (200, 201, 202, 203)]  # each fills the whole pool
SMALL = [Picture(seed) for seed in range(210, 216)]  # two fill it
LARGE = [Picture(seed, 16, 16) for seed in (220, 221, 222)]  # twice the pool
NEW_THEN_POOLED = Request((HALF[1], HALF[0]), before=AGAIN)
POOLED_THEN_NEW = Request((HALF[2], HALF[3]), before=AGAIN)
CHURN = one_each(SMALL) + [Request((a, b), before=AGAIN) for a, b in pairwise(SMALL)]

REQUESTS = [
    *one_each(HALF),
    *one_each(HALF, before=AGAIN),
    *one_each(LARGE),
    *one_each(LARGE, before=AGAIN),
    *CHURN,
    NEW_THEN_POOLED,
    POOLED_THEN_NEW,
]


@pytest.fixture(scope="module", params=["events", "steps"])
def engine(
    request: pytest.FixtureRequest, engine_of: Callable[..., EngineProcess]
) -> Iterator[EngineProcess]:
    settings = ec_transfer(capacity=BLOCKS * BLOCK, block_size=BLOCK, completion=request.param)
    with engine_of(ec_transfer=settings) as engine:
        yield engine


def fill_with(engine: EngineProcess, picture: Picture) -> None:
    """Leave this picture alone in the pool, and not in vLLM's own encoder cache."""
    engine.generate(one_each([picture]))
    # These are larger than the pool, so they displace nothing there.
    engine.generate(one_each(LARGE))
    assert picture.rows * TINY.row_bytes == BLOCKS * BLOCK
    assert engine.pool().stats["free_blocks"] == 0


@pytest.mark.parametrize(
    ("pooled", "mixed"),
    [(HALF[0], NEW_THEN_POOLED), (HALF[2], POOLED_THEN_NEW)],
    ids=["new-then-pooled", "pooled-then-new"],
)
def test_a_promise_outlives_an_allocation_in_a_full_pool(
    engine: EngineProcess, answers: Callable, pooled: Picture, mixed: Request
) -> None:
    fill_with(engine, pooled)
    with engine.counting() as encoded:
        outcomes = engine.generate([mixed])
    assert tokens_of(outcomes) == answers([mixed])
    assert encoded.items == 1, "only the new picture is encoded"
    assert engine.pool().violations == []


def test_an_item_larger_than_the_pool_is_served_and_not_kept(
    engine: EngineProcess, answers: Callable
) -> None:
    for before in ("", AGAIN):
        requests = one_each(LARGE, before=before)
        with engine.counting() as encoded:
            outcomes = engine.generate(requests)
        assert tokens_of(outcomes) == answers(requests)
        # What vLLM's own cache still holds is not encoded either.
        assert encoded.items >= 1
    pool = engine.pool()
    assert pool.counts["not_saved_too_large"] >= len(LARGE)
    assert engine.log_text().count("larger than the whole pool") == 1


def test_answers_stay_right_while_entries_come_and_go(
    engine: EngineProcess, answers: Callable
) -> None:
    for _ in range(3):
        assert tokens_of(engine.generate(CHURN)) == answers(CHURN)
    pool = engine.pool()
    assert pool.violations == []
    assert pool.stats["writing"] == pool.stats["doomed"] == pool.stats["holds"] == 0
    assert pool.stats["free_blocks"] + pool.stats["evictable_blocks"] == BLOCKS
