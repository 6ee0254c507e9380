"""What is wrong with an engine's settings is said when it starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.engines import EngineError, EngineProcess, ec_transfer, pool_files
from support.requests import Picture, Request, one_each, tokens_of, without_uuids

AGAIN = "once more: "
PICTURES = one_each(Picture(seed) for seed in range(600, 612))
# A client names two pictures alike.
SMALL, LARGE = Picture(620, 4, 8, uuid="the same"), Picture(621, 8, 8, uuid="the same")
MISNAMED = Request((LARGE,), before=AGAIN)
REQUESTS = [*PICTURES, without_uuids(MISNAMED)]


@pytest.mark.scenario("a pool that cannot be is refused at start")
def test_a_pool_larger_than_the_machine_is_refused(
    engine_of: Callable[..., EngineProcess],
) -> None:
    settings = ec_transfer(capacity="1TiB")
    with (
        pytest.raises(EngineError, match="NoSpaceError") as error,
        engine_of(ec_transfer=settings),
    ):
        pass
    assert "1.0 TiB" in str(error.value)
    assert "leaves only" in str(error.value)
    assert pool_files(settings) == []


@pytest.mark.scenario("keys that can never hit are warned about")
def test_keys_of_single_requests_are_warned_about_and_not_kept(
    engine_of: Callable[..., EngineProcess], answers: Callable
) -> None:
    with engine_of(
        ec_transfer=ec_transfer(), prefix_caching=False, extra={"mm_processor_cache_gb": 0}
    ) as engine:
        outcomes = engine.generate(PICTURES)
        assert engine.pool().stats["entries"] == 0
        assert "--mm-processor-cache-gb" in engine.log_text()
    assert tokens_of(outcomes) == answers(PICTURES)


@pytest.mark.scenario("one key, another picture: never wrong bytes")
def test_a_uuid_that_comes_back_with_another_size_is_encoded_again(
    engine_of: Callable[..., EngineProcess], answers: Callable
) -> None:
    with engine_of(
        ec_transfer=ec_transfer(), prefix_caching=True, extra={"mm_processor_cache_gb": 0}
    ) as engine:
        engine.generate(one_each([SMALL]))
        engine.generate(PICTURES)  # out of vLLM's own cache
        with engine.counting() as encoded:
            outcomes = engine.generate([MISNAMED])
        assert engine.pool().violations == []
    assert tokens_of(outcomes) == answers([MISNAMED])
    assert encoded.items == 1
