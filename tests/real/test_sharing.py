"""Several real engines on one pool, at the same time and one after the other."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ecpool._native import Region, remove_region, scan_regions
from ecpool.errors import EcpoolError
from support.engines import EngineError, EngineProcess, ServerProcess, ec_transfer
from support.requests import Picture, one_each, tokens_of

AGAIN = "once more: "
PICTURES = [Picture(seed) for seed in range(700, 712)]
LATER = [Picture(seed) for seed in range(720, 724)]
HALF_SAVED = Picture(730)
AWAITED = Picture(740)
FILLERS = one_each(Picture(seed, 16, 16) for seed in (750, 751, 752, 753))
REQUESTS = [
    *one_each(PICTURES),
    *one_each(PICTURES, before=AGAIN),
    *one_each(LATER),
    *one_each([HALF_SAVED, AWAITED]),
    *FILLERS,
]


class SharedPool:
    """A pool of a name that nobody else has; `settings(...)` makes an engine one of its users."""

    def __init__(self) -> None:
        self.name = f"test-{secrets.token_hex(6)}"

    def settings(self, role: str = "ec_both", **more: Any) -> dict[str, Any]:
        return ec_transfer(role, pool=self.name, **more)

    def found(self) -> list[dict[str, Any]]:
        return [each for each in scan_regions() if each["name"] == self.name]

    def status(self) -> dict[str, Any]:
        with Region.attach(self.name, role="tool") as region:
            return {**region.status(), "violations": region.check(), **region.counters()}


@pytest.fixture
def pool() -> Iterator[SharedPool]:
    pool = SharedPool()
    yield pool
    with suppress(EcpoolError):
        remove_region(pool.name)


@pytest.mark.scenario("two engines share a pool, one dies, and it comes back warm")
def test_two_engines_share_a_pool_that_outlives_them(
    engine_of: Callable[..., EngineProcess], answers: Callable, pool: SharedPool, tmp_path: Path
) -> None:
    # One test, since each engine takes long to start.
    transfer = pool.settings(persist=True)
    with engine_of(ec_transfer=transfer) as two:
        with engine_of(ec_transfer=pool.settings(persist=True)) as one:
            the_second_engine_encodes_nothing(one, two, answers)
            one_waits_for_the_other(one, two, answers)
            one_dies_in_a_save(one, two, answers, pool, tmp_path)
        two.kill()
    assert [each["state"] for each in pool.found()] == ["idle"]
    with engine_of(ec_transfer=pool.settings(persist=True)) as again:
        starts_warm(again, answers, pool)


def the_second_engine_encodes_nothing(
    one: EngineProcess, two: EngineProcess, answers: Callable
) -> None:
    with one.counting() as first:
        outcomes = one.generate(one_each(PICTURES))
    assert tokens_of(outcomes) == answers(one_each(PICTURES))
    assert first.items == len(PICTURES)
    with two.counting() as second:
        outcomes = two.generate(one_each(PICTURES))
    assert tokens_of(outcomes) == answers(one_each(PICTURES))
    assert second.items == 0
    with two.counting(), one.counting() as back:
        two.generate(one_each(LATER))
        outcomes = one.generate(one_each(LATER))
    assert tokens_of(outcomes) == answers(one_each(LATER))
    assert back.items == 0


def one_waits_for_the_other(one: EngineProcess, two: EngineProcess, answers: Callable) -> None:
    """The same picture, given to both at one time: nobody hangs, and both are right."""
    wanted = one_each([AWAITED])
    outcomes: dict[str, Any] = {}
    with one.counting() as first, two.counting() as second:
        threads = [
            threading.Thread(
                target=lambda n=name, e=engine: outcomes.update({n: e.generate(wanted)})
            )
            for name, engine in (("one", one), ("two", two))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert tokens_of(outcomes["one"]) == tokens_of(outcomes["two"]) == answers(wanted)
    assert 1 <= first.items + second.items <= 2


def one_dies_in_a_save(
    one: EngineProcess, two: EngineProcess, answers: Callable, pool: SharedPool, tmp_path: Path
) -> None:
    flag = tmp_path / "half-saved"
    one.call("stop_in_next_save", str(flag))
    wanted = one_each([HALF_SAVED])

    def ask_in_vain() -> None:
        with suppress(EngineError):
            one.generate(wanted)

    asking = threading.Thread(target=ask_in_vain)
    asking.start()
    deadline = time.monotonic() + 60
    while not flag.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert pool.status()["writing"] == 1
    # While the writer lives it is waited for, but not for long.
    before = two.pool().counts
    with two.counting() as encoded:
        outcomes = two.generate(wanted)
    after = two.pool().counts
    assert tokens_of(outcomes) == answers(wanted)
    assert encoded.items == 1, "half an item is not read"
    for name in ("waits", "waits_expired", "not_saved_exists"):
        assert after[name] == before.get(name, 0) + 1
    one.kill()
    asking.join()
    two.generate(FILLERS)
    with two.counting() as encoded:
        outcomes = two.generate(wanted)
    assert tokens_of(outcomes) == answers(wanted)
    assert encoded.items == 1, "nor is what a dead engine has left"
    two.generate(FILLERS)
    with two.counting() as encoded:
        outcomes = two.generate(one_each(PICTURES))
    assert tokens_of(outcomes) == answers(one_each(PICTURES))
    assert encoded.items == 0


def starts_warm(again: EngineProcess, answers: Callable, pool: SharedPool) -> None:
    wanted = [*one_each(PICTURES), *one_each([HALF_SAVED]), *one_each(LATER)]
    with again.counting() as encoded:
        outcomes = again.generate(wanted)
    assert tokens_of(outcomes) == answers(wanted)
    assert encoded.items == 0
    report = again.pool()
    assert report.violations == []
    assert report.counts["verified"] == len(wanted)
    time.sleep(2.5)
    with Region.attach(pool.name, role="tool") as region:
        region.reclaim()
    status = pool.status()
    assert status["writing"] == status["orphaned"] == status["holds"] == 0
    with Region.attach(pool.name, role="tool") as region:
        assert region.flush()
    with again.counting() as encoded:
        outcomes = again.generate(one_each(PICTURES, before=AGAIN))
    assert tokens_of(outcomes) == answers(one_each(PICTURES, before=AGAIN))
    # vLLM's own encoder cache is not the pool's to flush.
    assert encoded.items >= len(PICTURES) - len(LATER)


@pytest.mark.scenario("a producer beside a consumer")
def test_a_producer_fills_what_a_consumer_uses(
    engine_of: Callable[..., EngineProcess], answers: Callable, pool: SharedPool
) -> None:
    with (
        engine_of(ec_transfer=pool.settings("ec_producer")) as producer,
        engine_of(ec_transfer=pool.settings("ec_consumer")) as consumer,
    ):
        # A producer may run the encoder alone: one token is all that every vLLM gives.
        with producer.counting() as first:
            producer.generate(one_each(PICTURES, max_tokens=1))
        with consumer.counting() as second:
            outcomes = consumer.generate(one_each(PICTURES))
        assert tokens_of(outcomes) == answers(one_each(PICTURES))
        assert (first.items, second.items) == (len(PICTURES), 0)
        assert consumer.pool().counts["hits"] == len(PICTURES)
        assert consumer.pool().violations == []


@pytest.mark.scenario("data parallel 2, one pool")
def test_data_parallel_ranks_share(
    server_of: Callable[..., ServerProcess], answers: Callable, pool: SharedPool
) -> None:
    with server_of(ec_transfer=pool.settings(), data_parallel=2) as server:
        since = len(server.encoder_runs())
        with server.counting() as first:
            cold = [server.chat(each, data_parallel_rank=0) for each in one_each(PICTURES)]
        with server.counting() as second:
            warm = [server.chat(each, data_parallel_rank=1) for each in one_each(PICTURES)]
        processes = {run.pid for run in server.encoder_runs()[since:]}
        status = server.terminate()
    assert status in (0, -signal.SIGTERM)
    assert tokens_of(cold) == tokens_of(warm) == answers(one_each(PICTURES))
    assert (first.items, second.items) == (len(PICTURES), 0)
    assert len(processes) == 1
    # Engines that were killed on the way out leave a name that the next start, or a tool, removes.
    assert all(each["state"] == "dead" for each in pool.found())


@pytest.mark.scenario("an engine of another model is refused")
def test_engines_that_are_not_interchangeable_are_refused(
    engine_of: Callable[..., EngineProcess], pool: SharedPool
) -> None:
    # Another program says that it is an engine of another kind.
    group = "[00000000] another-engine"
    other = Region.open(
        pool.name, capacity=4 << 20, lifetime="shared", role="scheduler", group=group
    )
    with (
        other,
        pytest.raises(EngineError, match="not interchangeable") as error,
        engine_of(ec_transfer=pool.settings()),
    ):
        pass
    assert pool.name in str(error.value)
