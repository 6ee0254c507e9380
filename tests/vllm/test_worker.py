"""The worker's copies, on the CPU, over the model of a region: every byte is compared."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from model.fakes import WIDTH, Item, engine_config, request
from model.rig import Rig, output

from ecpool.errors import PoolBusyError
from ecpool.vllm.boundary import Boundary
from ecpool.vllm.giveback import Settler
from ecpool.vllm.metadata import ECPoolMetadata
from ecpool.vllm.ranks import Place, place_of_worker

Make = Callable[..., Rig]

LOGGER = logging.getLogger("vllm.ecpool.test")


class Lagging:
    """Of a cache what a `Settler` uses; its lock is not free so many times."""

    def __init__(self, busy: int) -> None:
        self.busy = busy
        self.num_deferred = 0
        self.attempts = 0
        self.done = threading.Event()

    def unclaimed(self, ids: Sequence[int]) -> list[int]:
        self.attempts += 1
        if self.busy > 0:
            self.busy -= 1
            if self.busy % 2:
                raise PoolBusyError
        else:
            self.num_deferred = 0
            self.done.set()
        return list(ids)


def settlers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "ecpool-settler"]


class TestBytes:
    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_what_was_saved_is_loaded_on_every_rank(self, make_rig: Make, ranks: int) -> None:
        rig = make_rig(ranks)
        items = [Item("a", rows=3), Item("b", rows=2)]
        came = rig.serve(*items)
        for cache in rig.encoder_caches:
            cache.clear()
        assert rig.serve(*items) == {}
        for cache in rig.encoder_caches:
            for key, tensor in came.items():
                assert torch.equal(cache[key], tensor)
                assert cache[key].dtype == tensor.dtype
        assert not rig.cache.has_held_entries()

    def test_scattered_blocks(self, make_rig: Make) -> None:
        rig = make_rig(blocks=6)
        rig.serve(*(Item(f"k{number}") for number in range(6)))
        pins = ["k0", "k2", "k4"]
        for key in pins:
            rig.cache.pin(key)
        came = rig.serve(Item("wide", rows=3))
        entry = rig.cache.get("wide")
        assert entry is not None
        assert len(entry.extents) == 3
        rig.encoder_caches[0].clear()
        rig.serve(Item("wide", rows=3))
        assert torch.equal(rig.encoder_caches[0]["wide"], came["wide"])

    @pytest.mark.parametrize("layout", ["view", "transposed"])
    def test_outputs_that_are_parts_of_a_batch(self, make_rig: Make, layout: str) -> None:
        rig = make_rig()
        batch = torch.randn(8, WIDTH) if layout == "view" else torch.randn(WIDTH, 8).T
        step = rig.engine.step(request(Item("x", rows=2)))
        rig.run(step, came={"x": batch[3:5]})
        rig.encoder_caches[0].clear()
        rig.serve(Item("x", rows=2))
        assert torch.equal(rig.encoder_caches[0]["x"], batch[3:5])


class TestClaims:
    def test_only_one_rank_saves(self, make_rig: Make) -> None:
        rig = make_rig(ranks=2)
        item = Item("x")
        step = rig.engine.step(request(item))
        rig.run(step, 1, came={"x": output(item)})
        assert is_empty(rig)
        assert not rig.workers[1].counts  # it does not even ask
        came = output(item)
        rig.run(step, 0, came={"x": came})
        assert rig.cache.contains("x")

    def test_ranks_of_later_stages_copy_nothing(self, make_rig: Make, pool_log: list[str]) -> None:
        rig = make_rig(ranks=1, later_stages=1)
        rig.serve(Item("x"))
        for cache in rig.encoder_caches:
            cache.clear()
        step = rig.engine.step(request(Item("x")))
        rig.run(step, 1)
        assert rig.encoder_caches[1] == {}
        rig.run(step, 0)
        assert list(rig.encoder_caches[0]) == ["x"]
        assert not rig.cache.has_held_entries()
        assert pool_log == []

    def test_a_refused_save_is_not_copied(self, make_rig: Make) -> None:
        rig = make_rig()
        item = Item("x")
        step = rig.engine.step(request(item))
        rig.engine.drain()
        rig.run(step, came={"x": output(item)})
        assert is_empty(rig)
        assert rig.workers[0].counts["saves_refused"] == 1

    def test_an_output_larger_than_its_place_is_not_copied(self, make_rig: Make) -> None:
        rig = make_rig()
        item = Item("x", rows=2)
        step = rig.engine.step(request(item))
        rig.run(step, came={"x": output(item, columns=3 * WIDTH)})
        assert is_empty(rig)
        assert not rig.cache.has_held_entries()
        assert rig.serve(item) != {}

    def test_a_refused_load_is_told_and_nothing_made_up(
        self, make_rig: Make, pool_log: list[str]
    ) -> None:
        rig = make_rig()
        rig.serve(Item("x"))
        rig.encoder_caches[0].clear()
        step = rig.engine.step(request(Item("x")))
        rig.cache.close_unclaimed([load.id for load in step.metadata.loads])
        rig.run(step)
        assert rig.encoder_caches[0] == {}
        assert rig.workers[0].counts["loads_lost"] == 1
        assert any("x could not be loaded" in line for line in pool_log)

    def test_a_load_that_is_told_again_is_done_once(self, make_rig: Make) -> None:
        rig = make_rig(ranks=2)
        rig.serve(Item("x"))
        rig.encoder_caches[0].clear()
        first = rig.engine.step(request(Item("x")))
        rig.run(first, 0)
        loaded = rig.encoder_caches[0]["x"]
        rig.run(rig.engine.step(), 0)
        assert rig.encoder_caches[0]["x"] is loaded
        assert rig.workers[0].counts["loads"] == 1

    def test_what_the_encoder_cache_has_is_not_loaded_but_ended(self, make_rig: Make) -> None:
        rig = make_rig()
        came = rig.serve(Item("x"))
        rig.serve(Item("x"))
        assert rig.encoder_caches[0]["x"] is came["x"]
        assert rig.workers[0].counts["loads"] == 0
        assert not rig.cache.has_held_entries()

    def test_an_old_item_of_another_shape_is_replaced(self, make_rig: Make) -> None:
        rig = make_rig()
        came = rig.serve(Item("x", rows=3))
        rig.encoder_caches[0]["x"] = torch.zeros(1, WIDTH)
        rig.serve(Item("x", rows=3))
        assert torch.equal(rig.encoder_caches[0]["x"], came["x"])


class TestOutputsThatDoNotCome:
    def test_are_given_up_at_once(self, make_rig: Make) -> None:
        rig = make_rig(blocks=4)
        step = rig.engine.step(request(Item("x", rows=4)))
        rig.run(step)
        assert rig.cache.get("x") is None
        assert rig.engine.step(request(Item("y", rows=4))).saves == ["y"]

    def test_are_saved_from_the_encoder_cache_if_they_are_there(self, make_rig: Make) -> None:
        rig = make_rig()
        step = rig.engine.step(request(Item("x")))
        held = output(Item("x"))
        rig.encoder_caches[0]["x"] = held
        rig.run(step)
        assert rig.cache.contains("x")
        rig.encoder_caches[0].clear()
        rig.serve(Item("x"))
        assert torch.equal(rig.encoder_caches[0]["x"], held)

    def test_are_given_up_by_a_step_that_ends_early(self, make_rig: Make) -> None:
        rig = make_rig(blocks=4)
        step = rig.engine.step(request(Item("x", rows=4)))
        rig.workers[0].bind(step.metadata)
        rig.workers[0].clear()
        assert rig.cache.get("x") is None

    def test_are_given_up_by_the_next_step(self, make_rig: Make) -> None:
        rig = make_rig(blocks=4)
        step = rig.engine.step(request(Item("x", rows=4)))
        rig.workers[0].bind(step.metadata)
        rig.workers[0].bind(rig.engine.step().metadata)
        assert rig.cache.get("x") is None

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
    def test_of_another_dtype_are_told_and_not_kept(
        self, make_rig: Make, dtype: torch.dtype, pool_log: list[str]
    ) -> None:
        rig = make_rig()
        step = rig.engine.step(request(Item("x")))
        rig.run(step, came={"x": output(Item("x"), columns=16, dtype=dtype)})
        assert rig.cache.get("x") is None
        assert any("not kept" in line for line in pool_log)

    def test_empty_ones_are_not_kept(self, make_rig: Make) -> None:
        rig = make_rig()
        step = rig.engine.step(request(Item("x")))
        rig.run(step, came={"x": torch.empty(0, WIDTH)})
        assert rig.cache.get("x") is None


class TestCallsOutOfOrder:
    def test_nothing_bound(self, make_rig: Make) -> None:
        worker = make_rig().workers[0]
        worker.save_caches({"x": torch.zeros(1, WIDTH)}, "x")
        worker.start_save_caches(None)
        worker.start_load_caches({})
        worker.get_finished()
        worker.clear()

    def test_keys_that_were_not_announced_or_are_not_there(self, make_rig: Make) -> None:
        rig = make_rig()
        step = rig.engine.step(request(Item("x")))
        worker = rig.workers[0]
        worker.bind(step.metadata)
        worker.save_caches({}, "x")
        worker.save_caches({"other": torch.zeros(1, WIDTH)}, "other")
        worker.get_finished()
        assert is_empty(rig)
        assert rig.cache.get("x") is None

    def test_shutdown_may_be_called_again(self, make_rig: Make) -> None:
        rig = make_rig()
        step = rig.engine.step(request(Item("x")))
        rig.workers[0].bind(step.metadata)
        for _ in range(2):
            rig.workers[0].shutdown()
        assert rig.cache.get("x") is None
        rig.run(rig.engine.step(request(Item("y"))), came={"y": torch.zeros(1, WIDTH)})


class TestUnknownElementTypes:
    @pytest.mark.parametrize("dtype", ["", "float33", "nn"])
    def test_only_that_item_is_lost(self, make_rig: Make, dtype: str) -> None:
        rig = make_rig()
        items = [Item("a"), Item("b")]
        came = rig.serve(*items)
        rig.encoder_caches[0].clear()
        step = rig.engine.step(request(*items))
        loads = step.metadata.loads
        step.metadata = ECPoolMetadata([loads[0]._replace(dtype=dtype), loads[1]])
        rig.run(step)
        assert list(rig.encoder_caches[0]) == ["b"]
        assert torch.equal(rig.encoder_caches[0]["b"], came["b"])
        assert rig.workers[0].counts["loads_lost"] == 1
        assert rig.workers[0].counts["loads"] == 1
        assert not rig.cache.has_held_entries()


class TestPutOff:
    """What the cache puts off is done though no step follows."""

    def test_a_worker_that_is_given_nothing_more(self, make_rig: Make) -> None:
        rig = make_rig()
        worker = rig.workers[0]
        lagging = Lagging(busy=3)
        worker._settler = Settler(lagging, worker.boundary, after=0.001)
        lagging.num_deferred = 1
        rig.serve(Item("x"))
        assert lagging.done.wait(10)
        worker.shutdown()
        assert settlers() == []

    def test_a_scheduler_that_has_no_steps(self, make_rig: Make) -> None:
        rig = make_rig()
        scheduler = rig.engine.scheduler
        lagging = Lagging(busy=3)
        scheduler._settler = Settler(lagging, scheduler.boundary, after=0.001)
        lagging.num_deferred = 1
        rig.serve(Item("x"))
        assert lagging.done.wait(10)
        scheduler.shutdown()
        assert settlers() == []

    def test_nothing_is_begun_where_nothing_was_put_off(self) -> None:
        lagging = Lagging(busy=0)
        settler = Settler(lagging, Boundary(LOGGER), after=0.001)
        settler.settle()
        settler.watch()
        assert settlers() == []
        assert lagging.attempts == 0

    def test_one_thread_that_ends_and_begins_again(self) -> None:
        lagging = Lagging(busy=2)
        settler = Settler(lagging, Boundary(LOGGER), after=0.02)
        for round in (1, 2):
            lagging.num_deferred = round
            for _ in range(10):
                settler.watch()
            assert len(settlers()) == 1
            assert lagging.done.wait(10)
            for thread in settlers():
                thread.join(10)
            assert settlers() == []
            lagging.done.clear()
        settler.close()
        lagging.num_deferred = 3
        settler.watch()
        assert settlers() == []

    def test_it_ends_with_an_owner_that_was_dropped(self) -> None:
        lagging = Lagging(busy=10**9)
        settler = Settler(lagging, Boundary(LOGGER), after=0.001)
        lagging.num_deferred = 1
        settler.watch()
        (thread,) = settlers()
        del settler
        thread.join(10)
        assert not thread.is_alive()

    def test_closing_does_not_wait_for_the_next_try(self) -> None:
        lagging = Lagging(busy=0)
        settler = Settler(lagging, Boundary(LOGGER), after=1000.0)
        lagging.num_deferred = 1
        settler.watch()
        (thread,) = settlers()
        settler.close()
        assert not thread.is_alive()
        assert lagging.attempts == 0


class TestSteps:
    def test_the_worker_says_nothing_when_a_save_succeeds(self, make_rig: Make) -> None:
        rig = make_rig(settings={"completion": "steps"})
        rig.serve(Item("x"))
        assert not rig.cache.contains("x")
        rig.engine.drain()
        assert rig.cache.contains("x")

    def test_the_worker_says_when_a_save_does_not_come(self, make_rig: Make) -> None:
        rig = make_rig(settings={"completion": "steps"})
        rig.run(rig.engine.step(request(Item("x"))))
        assert rig.cache.get("x") is None


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(0, Place(0, True)), (3, Place(3, True)), (4, Place(4, False)), (9, Place(1, True))],
)
def test_places_without_process_groups(rank: int, expected: Place) -> None:
    config = engine_config(tensor=2, context=2, pipeline=2)
    config.parallel_config.rank = rank
    assert place_of_worker(config) == expected


def test_places_follow_the_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import parallel_state

    for name, index in (("get_tp_group", 1), ("get_pcp_group", 1), ("get_pp_group", 1)):
        group = SimpleNamespace(rank_in_group=index)
        monkeypatch.setattr(parallel_state, name, lambda group=group: group, raising=False)
    config = engine_config(tensor=2, context=2, pipeline=2)
    assert place_of_worker(config) == Place(1 * 4 + 1 * 2 + 1, False)


def is_empty(rig: Rig) -> bool:
    """Whether nothing was ever written to the region."""
    bytes_of_all = bytearray(rig.region.nbytes)
    rig.region.read(((0, rig.region.num_blocks),), bytes_of_all)
    return not any(bytes_of_all)
