"""Several engines on one region: what they share, what they keep apart, and what stays."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model.fakes import BLOCK, Item, request, scheduler_output
from model.sharing import BLOCKS, PICTURES, READY, Engine, Host

from ecpool import EmbeddingCache, InvalidArgumentError, NoSpaceError, Pool
from ecpool.vllm.ranks import Place
from ecpool.vllm.scheduler import ECCPUScheduler
from ecpool.vllm.worker import ECCPUWorker


class Failing:
    """An object of which one method raises."""

    def __init__(self, inner: Any, method: str) -> None:
        self._inner = inner
        self._method = method

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            raise OSError("broken for a test")
        return getattr(self._inner, name)


@pytest.fixture
def host() -> Iterator[Host]:
    parent = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="ecpool-test-"))
    host = Host(parent / "pools")
    yield host
    host.stop_all()
    shutil.rmtree(parent)


class TestHits:
    def test_what_one_engine_encoded_another_loads(self, host: Host) -> None:
        one, two = host.engine(), host.engine()
        assert one.serve(*PICTURES) == ["a", "b"]
        assert two.serve(*PICTURES) == []
        assert two.made_by("a") == two.made_by("b") == {1.0}
        assert two.serve(Item("c")) == ["c"]
        assert one.serve(Item("c"), *PICTURES) == []

    def test_data_parallel_ranks_share(self, host: Host) -> None:
        ranks = [host.engine(index=index) for index in range(3)]
        assert ranks[0].serve(*PICTURES) == ["a", "b"]
        assert [rank.serve(*PICTURES) for rank in ranks] == [[], [], []]

    def test_a_producer_fills_what_a_consumer_uses(self, host: Host) -> None:
        producer, consumer = host.engine("ec_producer"), host.engine("ec_consumer")
        assert consumer.serve(Item("a", 2)) == ["a"]
        assert producer.serve(*PICTURES) == ["a", "b"]
        assert consumer.serve(*PICTURES) == []
        assert consumer.made_by("a") == {1.0}

    def test_a_pool_lives_as_long_as_an_engine(self, host: Host) -> None:
        one, two = host.engine(), host.engine()
        one.serve(*PICTURES)
        one.stop()
        assert two.serve(*PICTURES) == []
        two.stop()
        assert host.files() == []

    def test_pools_of_other_names_and_private_ones_are_apart(self, host: Host) -> None:
        one = host.engine()
        one.serve(*PICTURES)
        assert host.engine(pool="other").serve(*PICTURES) == ["a", "b"]
        assert host.engine(pool=None).serve(*PICTURES) == ["a", "b"]

    def test_what_one_engine_has_promised_another_cannot_evict(self, host: Host) -> None:
        one, two = host.engine(), host.engine()
        one.serve(Item("a", BLOCKS))
        made = request(Item("a", BLOCKS))
        two.scheduler.ensure_cache_available(made, 0)
        assert two.scheduler.has_cache_item("a")
        assert one.serve(Item("b", BLOCKS)) == ["b"]
        two.scheduler.update_state_after_alloc(made, 0)
        metadata = two.scheduler.build_connector_meta(scheduler_output())
        two.work(metadata, [])
        assert two.made_by("a") == {1.0}


class TestNamespaces:
    def test_salts_keep_tenants_apart(self, host: Host) -> None:
        one, two = host.engine(salt="blue"), host.engine(salt="green")
        one.serve(*PICTURES)
        assert two.serve(*PICTURES) == ["a", "b"]
        assert two.made_by("a") == {2.0}
        assert one.serve(*PICTURES) == []
        assert one.made_by("a") == {1.0}

    def test_an_engine_of_another_model_is_refused_and_told_why(self, host: Host) -> None:
        one = host.engine()
        other = host.config()
        other.model_config.model = "other/model"
        with pytest.raises(InvalidArgumentError) as caught:
            host.start(other)
        for words in ("'host'", "some/model", "other/model", "on_mismatch", "separate"):
            assert words in str(caught.value)
        assert one.serve(*PICTURES) == ["a", "b"]
        status = host.region().status()
        assert [each["role"] for each in status["clients"] if each["role"] != "tool"] == [
            "worker",
            "scheduler",
        ]

    def test_by_setting_both_are_in_one_region(self, host: Host) -> None:
        one = host.engine()
        config = host.config(on_mismatch="separate")
        config.model_config.model = "other/model"
        two = host.start(config)
        one.serve(*PICTURES)
        assert two.serve(*PICTURES) == ["a", "b"]
        with host.region() as region:
            found = {
                each["name"].split()[0]: each["blocks"] for each in region.status()["namespaces"]
            }
        assert found == {"some/model": 3, "other/model": 3}

    def test_of_two_that_come_at_once_one_stays(self, host: Host) -> None:
        config = host.config()
        config.model_config.model = "other/model"
        config.ec_transfer_config.engine_id = "engine-1"
        first = ECCPUWorker(config, place=Place(0, loads=True))
        try:
            with pytest.raises(InvalidArgumentError):
                host.engine()
            # The one that was there goes on to its scheduler.
            ECCPUScheduler(config).shutdown()
        finally:
            first.shutdown()
        host.engine().serve(*PICTURES)

    def test_what_an_engine_has_left_is_no_engine(self, host: Host) -> None:
        old = host.config(persist=True)
        old.model_config.model = "some/model-v1"
        engine = host.start(old)
        engine.serve(*PICTURES)
        engine.stop()
        new = host.engine(persist=True)
        assert new.serve(*PICTURES) == ["a", "b"]

    def test_other_programs_are_no_engines(self, host: Host) -> None:
        shape = {"block_size": BLOCK, "directory": host.directory}
        with Pool(BLOCKS * BLOCK, name="host", namespace="tensors", **shape) as pool:
            engine = host.engine()
            pool.put("a", torch.zeros(3))
            assert engine.serve(*PICTURES) == ["a", "b"]


class TestGeometry:
    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"capacity": 2 * BLOCKS * BLOCK}, ["64 KiB", "128 KiB", "capacity"]),
            ({"block_size": 2 * BLOCK}, ["block_size 4096", "8192"]),
            ({"slots": 99}, ["slots 64", "99"]),
            ({"persist": True}, ["shared", "persistent"]),
        ],
    )
    def test_what_differs_is_told(
        self, host: Host, settings: dict[str, Any], words: list[str]
    ) -> None:
        one = host.engine()
        with pytest.raises(InvalidArgumentError) as caught:
            host.engine(**settings)
        for word in ("'host'", *words):
            assert word in str(caught.value)
        assert one.serve(*PICTURES) == ["a", "b"]

    def test_a_pool_that_nobody_uses_can_be_removed_and_one_is_told_how(self, host: Host) -> None:
        host.engine(persist=True).stop()
        with pytest.raises(InvalidArgumentError, match="ecpool clean --pool host"):
            host.engine(persist=True, capacity=2 * BLOCKS * BLOCK)

    def test_a_directory_on_a_disk_is_refused(self, tmp_path: Path, host: Host) -> None:
        with pytest.raises(InvalidArgumentError, match="must lie on tmpfs"):
            host.engine(directory=str(tmp_path / "pools"))

    def test_a_pool_larger_than_the_machine_leaves_no_file(self, host: Host) -> None:
        with pytest.raises(NoSpaceError):
            host.engine(capacity=1 << 40, persist=True)
        assert host.files() == []


class TestSingleFlight:
    def begin(self, engine: Engine, *items: Item) -> Callable[[], None]:
        """An engine schedules a request; what is returned lets its worker do the step."""
        step = engine.schedule(self.admit(engine, *items))
        return lambda: engine.work(*step)

    def admit(self, engine: Engine, *items: Item) -> Any:
        made = request(*items)
        engine.scheduler.ensure_cache_available(made, 0)
        return made

    def test_the_second_engine_waits_and_then_loads(self, host: Host) -> None:
        one, two = host.engine(), host.engine()
        finish = self.begin(one, Item("a"))
        waiting = request(Item("a"))
        for _ in range(10):
            assert not two.scheduler.ensure_cache_available(waiting, 0)
            two.clock.pass_by(0.002)
        finish()
        assert two.scheduler.ensure_cache_available(waiting, 0)
        two.work(*two.schedule(waiting))
        assert two.made_by("a") == {1.0}
        assert two.scheduler.counts["waits"] == 1
        assert not two.scheduler.counts["waits_expired"]

    def test_after_the_limit_it_encodes_and_saves_nothing(self, host: Host) -> None:
        one, two = host.engine(), host.engine(single_flight_ms=20)
        finish = self.begin(one, Item("a"))
        waiting = request(Item("a"))
        assert not two.scheduler.ensure_cache_available(waiting, 0)
        two.clock.pass_by(0.02)
        assert two.scheduler.ensure_cache_available(waiting, 0)
        metadata, encoded = two.schedule(waiting)
        assert (metadata.saves, [item.key for item in encoded]) == ([], ["a"])
        two.work(metadata, encoded)
        finish()
        assert one.serve(Item("a")) == []

    def test_two_engines_that_wait_for_each_other_part_again(self, host: Host) -> None:
        one, two = host.engine(), host.engine()
        finish = [self.begin(one, Item("a")), self.begin(two, Item("b"))]
        mixed = [request(Item("b"), Item("a")), request(Item("a"), Item("b"))]
        pairs = list(zip((one, two), mixed, strict=True))
        assert not any(e.scheduler.ensure_cache_available(r, 0) for e, r in pairs)
        for engine in (one, two):
            engine.clock.pass_by(0.05)
        assert all(e.scheduler.ensure_cache_available(r, 0) for e, r in pairs)
        for each in finish:
            each()

    def test_an_engine_does_not_wait_for_itself(self, host: Host) -> None:
        one = host.engine()
        finish = self.begin(one, Item("a"))
        assert one.scheduler.ensure_cache_available(request(Item("a")), 0)
        finish()

    def test_others_go_on_meanwhile(self, host: Host) -> None:
        one, two = host.engine(), host.engine()
        finish = self.begin(one, Item("a"))
        assert not two.scheduler.ensure_cache_available(request(Item("a")), 0)
        assert two.serve(Item("b")) == ["b"]
        finish()

    @pytest.mark.parametrize("settings", [{"single_flight_ms": 0}, {"role": "ec_producer"}])
    def test_it_can_be_off(self, host: Host, settings: dict[str, Any]) -> None:
        one, two = host.engine(), host.engine(**settings)
        finish = self.begin(one, Item("a"))
        assert two.scheduler.ensure_cache_available(request(Item("a")), 0)
        finish()

    def test_what_a_dead_engine_was_writing_is_not_waited_for_long(self, host: Host) -> None:
        one, two = host.engine(), host.engine(single_flight_ms=60_000)
        self.begin(one, Item("a"))
        waiting = request(Item("a"))
        assert not two.scheduler.ensure_cache_available(waiting, 0)
        one.stop()
        two.clock.pass_by(0.01)
        assert two.scheduler.ensure_cache_available(waiting, 0)
        _, encoded = two.schedule(waiting)
        assert [item.key for item in encoded] == ["a"]

    def test_finished_requests_leave_nothing_behind(self, host: Host) -> None:
        one, two = host.engine(), host.engine()
        finish = self.begin(one, Item("a"))
        waiting = request(Item("a"))
        two.scheduler.ensure_cache_available(waiting, 0)
        two.scheduler.request_finished(waiting)
        assert two.scheduler._single_flight is not None
        assert len(two.scheduler._single_flight) == 0
        finish()


class TestPersistence:
    def test_the_next_engine_starts_warm(self, host: Host) -> None:
        one = host.engine(persist=True)
        one.serve(*PICTURES)
        one.stop()
        assert host.files()
        two = host.engine(persist=True)
        assert two.serve(*PICTURES) == []
        assert two.made_by("a") == {1.0}
        # Each was compared with its checksum, once.
        assert two.scheduler.counts["verified"] == 2
        assert two.serve(*PICTURES) == []
        assert two.scheduler.counts["verified"] == 2

    def test_nothing_is_compared_while_an_engine_has_been_there(self, host: Host) -> None:
        one, two = host.engine(persist=True), host.engine(persist=True)
        one.serve(*PICTURES)
        one.stop()
        three = host.engine(persist=True)
        assert three.serve(*PICTURES) == two.serve(*PICTURES) == []
        assert not three.scheduler.counts["verified"]

    def test_damaged_bytes_are_never_served(self, host: Host) -> None:
        one = host.engine(persist=True)
        one.serve(*PICTURES)
        one.stop()
        host.damage()
        two = host.engine(persist=True)
        assert two.serve(*PICTURES) == ["a", "b"]
        assert two.scheduler.counts["corrupted"] == 2
        assert two.made_by("a") == {2.0}
        assert two.serve(*PICTURES) == []
        assert two.scheduler._cache.check() == []

    @pytest.mark.parametrize("part", ["checksum", "confirm"])
    def test_a_comparison_that_fails_leaves_no_hold(self, host: Host, part: str) -> None:
        one = host.engine(persist=True)
        one.serve(*PICTURES)
        one.stop()
        two = host.engine(persist=True)
        scheduler = two.scheduler
        owner = "_region" if part == "checksum" else "_cache"
        whole = getattr(scheduler, owner)
        setattr(scheduler, owner, Failing(whole, part))
        made = request(*PICTURES)
        scheduler.ensure_cache_available(made, 0)
        for _ in range(20):
            assert not scheduler.has_cache_item("a")
            assert scheduler._cache.stats()["holds"] == 0
        assert scheduler.boundary.failures["lease"] == 20
        setattr(scheduler, owner, whole)
        assert two.serve(*PICTURES) == []
        assert two.made_by("a") == {1.0}

    def test_a_producer_stores_damaged_items_anew(self, host: Host) -> None:
        one = host.engine("ec_producer", persist=True)
        one.serve(*PICTURES)
        one.stop()
        host.damage()
        producer, consumer = host.engine("ec_producer", persist=True), host.engine(persist=True)
        producer.serve(*PICTURES)
        assert consumer.serve(*PICTURES) == []
        assert consumer.made_by("a") == {2.0}

    def test_without_checksums_bytes_are_believed(self, host: Host) -> None:
        one = host.engine(persist=True, checksum=False)
        one.serve(*PICTURES)
        one.stop()
        two = host.engine(persist=True, checksum=False)
        assert two.serve(*PICTURES) == []
        assert not two.scheduler.counts["verified"]

    def test_a_save_that_never_ended_is_dropped(self, host: Host) -> None:
        one = host.engine(persist=True)
        one.serve(Item("a"))
        made = request(Item("half", 4))
        one.scheduler.ensure_cache_available(made, 0)
        one.schedule(made)
        one.stop()
        two = host.engine(persist=True)
        assert two.serve(Item("a"), Item("half", 4)) == ["half"]
        assert two.scheduler._cache.stats()["holds"] == 0

    @pytest.mark.parametrize("kept", [0, 1, 100, 5000, 1 << 20])
    def test_a_file_that_is_cut_short_is_replaced(self, host: Host, kept: int) -> None:
        one = host.engine(persist=True)
        one.serve(*PICTURES)
        one.stop()
        (file,) = (each for each in host.files() if each.suffix == ".region")
        with file.open("r+b") as opened:
            opened.truncate(kept)
        two = host.engine(persist=True)
        assert two.serve(*PICTURES) == ["a", "b"]
        assert two.serve(*PICTURES) == []

    @pytest.mark.parametrize("start", [0, 4096, 8192, 1 << 16, 1 << 18])
    def test_a_file_with_noise_in_it_is_healed_or_replaced(self, host: Host, start: int) -> None:
        one = host.engine(persist=True)
        one.serve(*PICTURES)
        one.stop()
        (file,) = (each for each in host.files() if each.suffix == ".region")
        with file.open("r+b") as opened:
            opened.seek(start)
            opened.write(bytes(range(1, 256)) * 200)
        two = host.engine(persist=True)
        two.serve(*PICTURES)
        assert two.serve(*PICTURES) == []
        assert two.made_by("a") <= {1.0, 2.0}
        assert two.scheduler._cache.check() == []

    @pytest.mark.slow
    def test_all_killed_at_once_and_started_again(self, host: Host) -> None:
        victims = [start_victim(host.directory, number) for number in (1, 2)]
        for victim in victims:
            victim.kill()
        for victim in victims:
            victim.communicate(timeout=30)
        two = host.engine(persist=True)
        assert two.serve(*PICTURES) == []
        # What was being written when they died is encoded again.
        assert two.serve(Item("half", 2)) == ["half"]
        assert two.scheduler._cache.check() == []


def start_victim(directory: Path, number: int) -> subprocess.Popen[str]:
    """An engine in a process of its own, in the middle of a save."""
    victim = subprocess.Popen(
        [sys.executable, "-m", "model.sharing", str(directory), str(number)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert victim.stdout is not None
    for line in victim.stdout:  # vLLM's log is there too
        if READY in line:
            return victim
    raise AssertionError("the engine did not start")


def test_a_flush_from_outside_reaches_engines_that_run(host: Host) -> None:
    one, two = host.engine(), host.engine(salt="other")
    for engine in (one, two):
        engine.serve(*PICTURES)
    with host.region() as region:
        names = [each["name"] for each in region.status()["namespaces"]]
        mine = next(name for name in names if "+" not in name.split("\n")[0])
        assert region.flush(mine) == [(mine, 2)]
    assert two.serve(*PICTURES) == []
    assert one.serve(*PICTURES) == ["a", "b"]
    assert EmbeddingCache(region=host.region()).check() == []
