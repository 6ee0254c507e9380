"""The scheduler's decisions; the workers here only claim and complete."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from model.fakes import WIDTH, Engine, Item, engine_config, grow, request, scheduler_output

Make = Callable[..., Engine]


def free_blocks(engine: Engine) -> int:
    stats = engine.cache.stats()
    return stats["free_blocks"] + stats["evictable_blocks"]


class TestPromise:
    """What was promised in a step is in that step's metadata, whatever else happens in it."""

    @pytest.mark.parametrize("new_blocks", [1, 2, 4])
    @pytest.mark.parametrize("pooled", [1, 4])
    def test_a_promised_item_survives_a_new_one_that_wants_its_blocks(
        self, make_engine: Make, new_blocks: int, pooled: int
    ) -> None:
        engine = make_engine(4)
        old = [Item(f"x{n}", rows=4 // pooled) for n in range(pooled)]
        engine.store(*old)
        step = engine.step(request(Item("y", rows=new_blocks), *old))
        assert step.hits == [item.key for item in old]
        assert step.loads == step.hits
        assert step.encoded == ["y"]
        assert step.saves == []
        assert set(engine.work(step).values()) == {"claimed"}

    def test_blocks_of_what_was_not_promised_may_go(self, make_engine: Make) -> None:
        engine = make_engine(4)
        engine.store(Item("a", rows=2), Item("x", rows=2))
        step = engine.step(request(Item("y", rows=2), Item("x", rows=2)))
        assert (step.loads, step.saves) == (["x"], ["y"])
        assert not engine.cache.contains("a")

    def test_a_promise_lasts_over_another_request_of_the_step(self, make_engine: Make) -> None:
        engine = make_engine(4)
        engine.store(Item("x", rows=4))
        first, second = request(Item("x", rows=4)), request(Item("y", rows=4))
        step = engine.step(first, second)
        assert (step.loads, step.saves) == (["x"], [])

    def test_a_promise_that_comes_to_nothing_is_given_back(self, make_engine: Make) -> None:
        engine = make_engine(4)
        engine.store(Item("x", rows=4))
        waiting = request(Item("x", rows=4))
        for _ in range(3):
            step = engine.step(waiting, not_allocated=[waiting])
            assert step.loads == []
            assert free_blocks(engine) == 4
        assert engine.step(request(Item("y", rows=4))).saves == ["y"]

    def test_a_promise_that_comes_to_nothing_leaves_the_eviction_order(
        self, make_engine: Make
    ) -> None:
        engine = make_engine(4)
        engine.store(Item("old", rows=2))
        engine.store(Item("new", rows=2))
        asked = request(Item("old", rows=2))
        engine.step(asked, not_allocated=[asked])
        engine.step(request(Item("y", rows=2)))
        assert not engine.cache.contains("old")
        assert engine.cache.contains("new")

    def test_asking_again_in_a_step_changes_nothing(self, make_engine: Make) -> None:
        engine = make_engine()
        engine.store(Item("x"))
        one, two = request(Item("x")), request(Item("x"))
        engine.scheduler.ensure_cache_available(one, 0)
        assert all(engine.scheduler.has_cache_item("x") for _ in range(5))
        step = engine.step(one, two)
        assert step.loads == ["x"]
        assert engine.work(step) == {"x": "claimed"}
        assert not engine.cache.has_held_entries()

    def test_an_item_that_is_stored_after_the_answer_was_no_is_encoded(
        self, make_engine: Make
    ) -> None:
        engine = make_engine()
        first = request(Item("x"))
        saving = engine.step(first)
        second = request(Item("x"))
        engine.scheduler.ensure_cache_available(second, 0)
        assert not engine.scheduler.has_cache_item("x")
        engine.work(saving)
        engine.scheduler.update_state_after_alloc(second, 0)
        meta = engine.scheduler.build_connector_meta(scheduler_output({second.request_id: [0]}))
        assert (meta.loads, meta.saves) == ([], [])
        assert engine.step(request(Item("x"))).loads == ["x"]

    def test_a_request_is_served_by_what_the_step_loads_already(self, make_engine: Make) -> None:
        # The first request is preempted after its allocation and vLLM evicts the item again.
        engine = make_engine()
        engine.store(Item("x"))
        first, second = request(Item("x")), request(Item("x"))
        step = engine.step(first, second, preempted=[first], freed=["x"])
        assert step.hits == ["x", "x"]
        assert step.loads == ["x"]


class TestIdentity:
    """True is said only of an item that is what every live request expects."""

    @pytest.mark.parametrize(("stored", "wanted"), [(3, 5), (5, 3), (1, 2)])
    @pytest.mark.parametrize("role", ["ec_both", "ec_producer"])
    def test_other_rows_are_a_miss_and_the_old_entry_goes(
        self, make_engine: Make, stored: int, wanted: int, role: str
    ) -> None:
        engine = make_engine(role=role)
        engine.store(Item("uuid", rows=stored))
        step = engine.step(request(Item("uuid", rows=wanted)))
        assert step.hits == []
        assert step.saves == ["uuid"]
        assert sum(num for _, num in step.metadata.saves[0].extents) == wanted

    def test_an_entry_of_another_dtype_is_a_miss(self, make_engine: Make) -> None:
        engine = make_engine()
        step = engine.step(request(Item("x")))
        (save,) = step.metadata.saves
        engine.cache.claim_saves(0, [(save.id, (1, WIDTH), "int32")])
        engine.cache.complete(0, [save.id])
        assert engine.cache.contains("x")
        assert engine.step(request(Item("x"))).hits == []

    @pytest.mark.parametrize("other", [Item("u", rows=2), Item("u", modality="video")])
    def test_live_requests_that_disagree_get_nothing(self, make_engine: Make, other: Item) -> None:
        engine = make_engine()
        engine.store(Item("u"))
        one, two = request(Item("u")), request(other)
        for each in (one, two):
            engine.scheduler.ensure_cache_available(each, 0)
        step = engine.step(one, two)
        assert (step.hits, step.loads, step.saves) == ([], [], [])
        assert not engine.cache.contains("u")
        engine.finish(one)
        assert engine.step(two).saves == ["u"]

    def test_requests_agree_again_when_one_is_gone(self, make_engine: Make) -> None:
        engine = make_engine()
        one, two, three = request(Item("u")), request(Item("u")), request(Item("u", rows=2))
        for each in (one, two, three):
            engine.scheduler.ensure_cache_available(each, 0)
        engine.finish(one, three)
        engine.work(engine.step(two))
        assert engine.step(two).hits == ["u"]

    def test_an_item_that_no_request_is_known_to_have_is_a_miss(self, make_engine: Make) -> None:
        engine = make_engine()
        engine.store(Item("x"))
        assert not engine.scheduler.has_cache_item("x")

    def test_a_request_that_has_grown_is_known_though_vllm_does_not_say(
        self, make_engine: Make
    ) -> None:
        engine = make_engine()
        engine.store(Item("a"), Item("b", rows=2))
        session = request(Item("a"), resumable=True)
        engine.step(session)
        grow(session, Item("b", rows=3))
        assert not engine.scheduler.has_cache_item("b")
        grow(session, Item("a", rows=7))
        assert not engine.scheduler.has_cache_item("a")

    def test_fewer_embeddings_than_placeholders(self, make_engine: Make) -> None:
        engine = make_engine()
        item = Item("x", rows=6, length=10)
        step = engine.step(request(item))
        assert sum(num for _, num in step.metadata.saves[0].extents) == 6
        engine.work(step, shapes={"x": (6, WIDTH)})
        assert engine.step(request(item)).metadata.loads[0].shape == (6, WIDTH)

    def test_an_item_without_embeddings_is_left_out(self, make_engine: Make) -> None:
        engine = make_engine()
        step = engine.step(request(Item("x", rows=0, length=10)))
        assert (step.loads, step.saves) == ([], [])
        assert engine.scheduler.counts["not_saved_empty"] == 1

    def test_prompt_embeddings_are_left_out(self, make_engine: Make) -> None:
        engine = make_engine()
        step = engine.step(request(Item("p", modality="prompt_embeds"), Item("x")))
        assert step.saves == ["x"]

    def test_items_of_several_widths_in_one_request(self, make_engine: Make) -> None:
        engine = make_engine()
        items = (Item("picture", rows=2), Item("sound", rows=4, modality="audio"))
        shapes = {"picture": (2, 2 * WIDTH), "sound": (4, WIDTH // 2)}
        for _ in range(3):
            made = request(*items)
            step = engine.step(made)
            engine.work(step, shapes=shapes)
            engine.finish(made)
        assert {load.key: load.shape for load in step.metadata.loads} == shapes

    def test_a_modality_wider_than_guessed_is_saved_from_the_second_item_on(
        self, make_engine: Make
    ) -> None:
        engine = make_engine()
        outcomes = []
        for key in ("a", "b"):
            step = engine.step(request(Item(key, rows=2)))
            outcomes.append(engine.work(step, shapes={key: (2, 3 * WIDTH)})[key])
        assert outcomes == ["too_large", "claimed"]
        assert engine.cache.contains("b")

    def test_measured_widths_are_taken(self, make_engine: Make) -> None:
        engine = make_engine()
        engine.config.ec_transfer_config.mm_encoder_output_widths = {"image": 3 * WIDTH}
        step = engine.step(request(Item("a", rows=2)))
        assert engine.work(step, shapes={"a": (2, 3 * WIDTH)}) == {"a": "claimed"}


class TestSpace:
    @pytest.mark.parametrize("rows", [5, 6, 1000])
    def test_an_item_larger_than_the_pool_is_served_and_told_once(
        self, make_engine: Make, rows: int, pool_log: list[str]
    ) -> None:
        engine = make_engine(4)
        for number in range(3):
            step = engine.step(request(Item(f"x{number}", rows=rows)))
            assert step.encoded == [f"x{number}"]
            assert step.saves == []
        assert len([line for line in pool_log if "larger than the whole pool" in line]) == 1
        assert engine.scheduler.counts["not_saved_too_large"] == 3

    def test_when_everything_is_held_a_new_item_is_not_saved(self, make_engine: Make) -> None:
        engine = make_engine(4)
        holding = engine.step(request(Item("x", rows=4)))
        step = engine.step(request(Item("y", rows=1)))
        assert step.saves == []
        assert engine.scheduler.counts["not_saved_no_room"] == 1
        engine.work(holding)
        assert engine.step(request(Item("z", rows=1))).saves == ["z"]


class TestSaves:
    def test_a_save_that_vllm_does_not_encode_after_all_is_withdrawn(
        self, make_engine: Make
    ) -> None:
        engine = make_engine(4)
        made = request(Item("x", rows=4))
        step = engine.step(made, preempted=[made])
        assert step.saves == []
        assert free_blocks(engine) == 4
        assert engine.step(made).saves == ["x"]

    def test_a_save_stays_when_another_request_encodes_the_item(self, make_engine: Make) -> None:
        engine = make_engine()
        one, two = request(Item("x")), request(Item("x"))
        assert engine.step(one, two, preempted=[one]).saves == ["x"]

    @pytest.mark.parametrize("role", ["ec_both", "ec_consumer", "ec_producer"])
    def test_a_step_without_tokens_saves_nothing(self, make_engine: Make, role: str) -> None:
        engine = make_engine(role=role)
        made = request(Item("x"))
        step = engine.step(made, tokens=0)
        # A producer's workers see every step; what it encodes is saved.
        assert step.saves == (["x"] if role == "ec_producer" else [])

    @pytest.mark.parametrize("aborted", [True, False])
    def test_not_ready_before_the_worker_is_done(self, make_engine: Make, aborted: bool) -> None:
        engine = make_engine()
        made = request(Item("x"))
        saving = engine.step(made)
        if aborted:
            engine.finish(made)
        for _ in range(2):
            step = engine.step(finished=[made.request_id] if aborted else [])
            assert not engine.cache.contains("x")
        assert engine.work(saving) == {"x": "claimed"}
        assert engine.cache.contains("x")
        assert step.saves == []

    @pytest.mark.parametrize("batches", [1, 2, 4])
    def test_a_save_that_nobody_claims_is_given_up_when_its_step_must_be_over(
        self, make_engine: Make, batches: int
    ) -> None:
        engine = make_engine(4, batches=batches)
        saving = engine.step(request(Item("x", rows=4)))
        for _ in range(batches):
            engine.step()
            assert engine.cache.get("x") is not None
        engine.drain()
        assert engine.cache.get("x") is None
        assert free_blocks(engine) == 4
        assert engine.work(saving) == {"x": "refused"}

    @pytest.mark.parametrize("preemptions", [1, 3])
    def test_admitted_again_with_its_save_under_way(
        self, make_engine: Make, preemptions: int
    ) -> None:
        engine = make_engine(4, batches=4)
        made = request(Item("x", rows=4))
        saving = engine.step(made)
        for _ in range(preemptions):
            again = engine.step(made)
            assert (again.hits, again.loads, again.saves) == ([], [], [])
        assert engine.work(saving) == {"x": "claimed"}
        assert engine.step(made).loads == ["x"]

    def test_an_item_twice_in_one_request_is_saved_once(self, make_engine: Make) -> None:
        engine = make_engine()
        assert engine.step(request(Item("x"), Item("x"))).saves == ["x"]

    def test_a_failed_save_is_tried_again_with_the_next_request(self, make_engine: Make) -> None:
        engine = make_engine(4)
        (save,) = engine.step(request(Item("x", rows=4))).metadata.saves
        engine.cache.complete(0, [save.id], ok=False)
        assert free_blocks(engine) == 4
        assert engine.step(request(Item("x", rows=4))).saves == ["x"]


class TestLoads:
    @pytest.mark.parametrize("ranks", [2, 3, 8])
    def test_held_until_every_rank_is_done(self, make_engine: Make, ranks: int) -> None:
        engine = make_engine(4, tensor=ranks)
        engine.store(Item("x", rows=4))
        step = engine.step(request(Item("x", rows=4)))
        for rank in range(ranks):
            # While a rank is missing, the others may say what they want, twice.
            assert engine.cache.has_held_entries()
            assert engine.step(request(Item(f"y{rank}", rows=4))).saves == []
            engine.work(step, rank)
            engine.work(step, rank)
            engine.cache.complete(rank, [987654321])
        assert not engine.cache.has_held_entries()
        assert engine.step(request(Item("z", rows=4))).saves == ["z"]

    def test_ranks_of_later_stages_take_no_part(self, make_engine: Make) -> None:
        engine = make_engine(tensor=2, pipeline=2)
        engine.store(Item("x"))
        step = engine.step(request(Item("x")))
        assert engine.work(step, rank=2) == {"x": "refused"}
        assert [engine.work(step, rank)["x"] for rank in (0, 1)] == ["claimed", "claimed"]
        assert not engine.cache.has_held_entries()

    def test_told_again_until_every_rank_has_claimed(self, make_engine: Make) -> None:
        engine = make_engine(tensor=2)
        engine.store(Item("x"))
        made = request(Item("x"))
        steps = [engine.step(made, tokens=0)]
        steps.append(engine.step(tokens=0))
        assert engine.work(steps[0], 0) == {"x": "claimed"}
        steps.append(engine.step())
        assert engine.work(steps[-1], 0) == {"x": "repeated"}
        assert engine.work(steps[-1], 1) == {"x": "claimed"}
        assert [step.loads for step in steps] == [["x"]] * 3
        assert engine.step().loads == []

    @pytest.mark.parametrize("finished", [True, False])
    def test_told_again_after_its_request_is_gone(self, make_engine: Make, finished: bool) -> None:
        engine = make_engine()
        engine.store(Item("x"))
        made = request(Item("x"))
        engine.step(made, tokens=0, preempted=[made])
        if finished:
            engine.finish(made)
        assert engine.step(finished=[made.request_id]).loads == ["x"]

    def test_not_told_after_vllm_freed_the_key(self, make_engine: Make) -> None:
        engine = make_engine(4)
        engine.store(Item("x", rows=4))
        engine.step(request(Item("x", rows=4)), tokens=0)
        assert engine.step(freed=["x"]).loads == []
        engine.drain()
        assert not engine.cache.has_held_entries()
        assert free_blocks(engine) == 4

    @pytest.mark.parametrize("batches", [2, 3])
    def test_a_step_in_flight_still_loads_what_vllm_frees_in_a_later_one(
        self, make_engine: Make, batches: int
    ) -> None:
        # An aborted request's step runs all the same, and needs its items.
        engine = make_engine(batches=batches)
        engine.store(Item("x"))
        made = request(Item("x"))
        in_flight = engine.step(made)
        engine.finish(made)
        for _ in range(batches - 1):
            engine.step(freed=["x"], finished=[made.request_id])
        assert engine.work(in_flight) == {"x": "claimed"}

    def test_freed_and_loaded_anew_in_one_step(self, make_engine: Make) -> None:
        engine = make_engine()
        engine.store(Item("x"))
        first = engine.step(request(Item("x")), tokens=0)
        second = engine.step(request(Item("x")), freed=["x"])
        assert second.loads == ["x"]
        assert first.metadata.loads[0].id != second.metadata.loads[0].id
        engine.work(second)
        engine.drain()
        assert not engine.cache.has_held_entries()

    def test_loaded_anew_without_being_freed(self, make_engine: Make) -> None:
        engine = make_engine()
        engine.store(Item("x"))
        engine.step(request(Item("x")), tokens=0)
        step = engine.step(request(Item("x")))
        assert step.loads == ["x"]
        engine.work(step)
        engine.drain()
        assert not engine.cache.has_held_entries()

    def test_given_up_only_after_a_long_time_and_several_steps(self, make_engine: Make) -> None:
        engine = make_engine()
        engine.store(Item("x"))
        engine.step(request(Item("x")), tokens=0)
        engine.clock.pass_by(3600)  # an idle engine
        assert engine.step().loads == ["x"]
        engine.clock.pass_by(3600)
        for _ in range(2):
            assert engine.step().loads == ["x"]
        assert engine.step().loads == []
        engine.drain()
        assert not engine.cache.has_held_entries()
        assert engine.scheduler.counts["loads_given_up"] == 1

    def test_not_given_up_in_a_minute(self, make_engine: Make) -> None:
        engine = make_engine()
        engine.store(Item("x"))
        engine.step(request(Item("x")))
        for _ in range(100):
            engine.clock.pass_by(0.5)
            assert engine.step().loads == ["x"]


class TestRoles:
    def test_a_producer_saves_and_never_loads(self, make_engine: Make) -> None:
        engine = make_engine(role="ec_producer")
        engine.store(Item("x"))
        for _ in range(2):
            step = engine.step(request(Item("x")))
            assert (step.hits, step.loads, step.saves) == ([], [], [])

    def test_a_consumer_loads_and_never_saves(self, make_engine: Make) -> None:
        engine = make_engine(role="ec_consumer")
        assert engine.step(request(Item("x"))).saves == []
        put(engine, "x")
        assert engine.step(request(Item("x"))).loads == ["x"]

    def test_nothing_is_ever_delayed(self, make_engine: Make) -> None:
        engine = make_engine()
        made = request(Item("x"))
        engine.step(made)
        assert engine.scheduler.request_finished(made) == (False, None)
        assert engine.scheduler.has_pending_push_work() is False
        assert engine.scheduler.take_unavailable_requests() == set()


class TestPerRequestKeys:
    """Keys that vLLM makes from a request's number say nothing about content."""

    @pytest.mark.parametrize("key", ["renderer0-mm-1-image-0", "chatcmpl-17-image-12"])
    def test_are_neither_kept_nor_looked_up(
        self, make_engine: Make, key: str, pool_log: list[str]
    ) -> None:
        engine = without_content_keys(make_engine)
        assert "mm_processor_cache_gb" in pool_log[0]
        assert engine.step(request(Item(key))).saves == []
        put(engine, key)
        assert engine.step(request(Item(key))).hits == []

    def test_keys_of_clients_are_kept(self, make_engine: Make) -> None:
        engine = without_content_keys(make_engine)
        engine.store(Item("my-picture"))
        assert engine.step(request(Item("my-picture"))).hits == ["my-picture"]

    def test_no_warning_otherwise(self, make_engine: Make, pool_log: list[str]) -> None:
        make_engine()
        assert pool_log == []


class TestSteps:
    """Completion by steps: nobody waits for a worker's word."""

    @pytest.mark.parametrize("batches", [1, 2, 3])
    def test_a_save_is_ready_after_as_many_steps_as_are_in_flight(
        self, make_engine: Make, batches: int
    ) -> None:
        engine = make_engine(batches=batches, settings={"completion": "steps"})
        made = request(Item("x"))
        (save,) = engine.step(made).metadata.saves
        engine.cache.claim_saves(0, [(save.id, (1, WIDTH), "float32")])
        for _ in range(batches - 1):
            engine.step()
            assert not engine.cache.contains("x")
        engine.step()
        assert engine.cache.contains("x")

    def test_a_save_is_ready_when_its_request_is_finished(self, make_engine: Make) -> None:
        engine = make_engine(batches=4, settings={"completion": "steps"})
        made = request(Item("x"))
        (save,) = engine.step(made).metadata.saves
        engine.cache.claim_saves(0, [(save.id, (1, WIDTH), "float32")])
        engine.step(finished=[made.request_id])
        assert engine.cache.contains("x")

    def test_a_save_that_no_worker_saw_is_dropped(self, make_engine: Make) -> None:
        engine = make_engine(settings={"completion": "steps"})
        made = request(Item("x"))
        engine.step(made)
        engine.step(finished=[made.request_id])
        assert engine.cache.get("x") is None

    def test_a_load_ends_after_as_many_steps_as_are_in_flight(self, make_engine: Make) -> None:
        engine = make_engine(batches=2, settings={"completion": "steps"})
        (save,) = engine.step(request(Item("x"))).metadata.saves
        engine.cache.claim_saves(0, [(save.id, (1, WIDTH), "float32")])
        engine.drain()
        step = engine.step(request(Item("x")))
        engine.cache.claim_loads(0, [load.id for load in step.metadata.loads])
        engine.step()
        assert engine.cache.has_held_entries()
        engine.step()
        assert not engine.cache.has_held_entries()

    @pytest.mark.parametrize("finished", [True, False])
    def test_a_load_that_no_worker_saw_is_not_ended(
        self, make_engine: Make, finished: bool
    ) -> None:
        engine = make_engine(settings={"completion": "steps"})
        (save,) = engine.step(request(Item("x"))).metadata.saves
        engine.cache.claim_saves(0, [(save.id, (1, WIDTH), "float32")])
        engine.drain()
        made = request(Item("x"))
        engine.step(made, tokens=0)
        for _ in range(5):
            step = engine.step(tokens=0, finished=[made.request_id] if finished else [])
            assert step.loads == ["x"]
        assert engine.cache.claim_loads(0, [step.metadata.loads[0].id]) == ["claimed"]
        engine.drain()
        assert not engine.cache.has_held_entries()


class TestEnd:
    @pytest.mark.parametrize("completion", ["events", "steps"])
    def test_shutdown_gives_back_what_a_step_began(
        self, make_engine: Make, completion: str
    ) -> None:
        engine = make_engine(settings={"completion": completion})
        engine.store(Item("x")) if completion == "events" else None
        one, two = request(Item("x")), request(Item("y"))
        for each in (one, two):
            engine.scheduler.ensure_cache_available(each, 0)
            engine.scheduler.has_cache_item(each.mm_features[0].identifier)
        engine.scheduler.update_state_after_alloc(two, 0)
        for _ in range(2):
            engine.scheduler.shutdown()
        assert not engine.cache.has_held_entries()

    def test_calls_after_shutdown_are_harmless(self, make_engine: Make) -> None:
        engine = make_engine()
        engine.store(Item("x"))
        engine.scheduler.shutdown()
        step = engine.step(request(Item("x"), Item("y")))
        assert (step.hits, step.loads, step.saves) == ([], [], [])

    def test_nothing_is_left_of_requests(self, make_engine: Make) -> None:
        engine = make_engine(4)
        for number in range(50):
            made = request(Item(f"k{number % 7}", rows=1 + number % 5), Item(f"l{number % 3}"))
            engine.work(engine.step(made, freed=[f"k{number % 5}"]))
            engine.finish(made)
        engine.drain()
        assert len(engine.scheduler._expectations) == 0
        assert not engine.scheduler._expectations._by_identifier
        assert not engine.cache.has_held_entries()
        assert free_blocks(engine) == 4
        assert engine.cache.check() == []


def test_every_order_of_two_requests_with_a_pooled_and_a_new_item(make_engine: Make) -> None:
    """In whatever order they come, what is promised is loaded, and nothing stays held."""
    items = [Item("pooled", rows=3), Item("new", rows=3)]
    for one in itertools.permutations(items):
        for two in itertools.permutations(items):
            engine = make_engine(4)
            engine.store(items[0])
            step = engine.step(request(*one), request(*two))
            assert step.loads == ["pooled"]
            engine.work(step)
            engine.drain()
            assert not engine.cache.has_held_entries()


def put(engine: Engine, key: str, rows: int = 1) -> None:
    """Store an item behind the scheduler's back."""
    transfer = engine.cache.begin_save(key, rows=rows, row_bytes=4 * WIDTH)
    engine.cache.claim_saves(0, [(transfer.id, (rows, WIDTH), "float32")])
    engine.cache.complete(0, [transfer.id])


def without_content_keys(make_engine: Make) -> Engine:
    model = engine_config().model_config
    model.multimodal_config = SimpleNamespace(mm_processor_cache_gb=0)
    return make_engine(
        model_config=model, cache_config=SimpleNamespace(enable_prefix_caching=False)
    )
