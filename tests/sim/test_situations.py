"""Situations that ended badly elsewhere, each as a short story of a simulated engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sim.content import Variant
from sim.requests import Request, Turn
from sim.scheduler import Step
from sim.settings import HAS_V2, Settings
from sim.simulation import Simulation

RUNNERS = ["v1", "v2"] if HAS_V2 else ["v1"]

CALM: dict[str, Any] = {
    "blocks": 16,
    "encoder_cache": 16,
    "raises": False,
    "flushes": True,
    "failing_copies": False,
    "neighbours": False,
    "kv_trouble": 0.0,
}
A, B, C = Variant("a", 3), Variant("b", 2), Variant("c", 4)


class Story(Simulation):
    """An engine with a few words for what happens to it."""

    def ask(self, *items: Variant, gap: int = 0, answer: int = 1, priority: int = 0) -> Request:
        """A request with these items, behind so much text."""
        self._request_number += 1
        request = Request(f"request-{self._request_number}", priority=priority)
        request.extend(Turn((), (), tail=gap))
        request.extend(Turn(items, (0,) * len(items), tail=1, answer=answer))
        self.scheduler.add(request)
        return request

    def step(self) -> Step:
        self.schedule()
        step: Step = self._in_flight[-1]
        return step

    def work(self) -> None:
        """Every rank runs what it has; devices stay behind."""
        self._settle()

    def copy(self) -> None:
        """Devices get done with everything, reports included."""
        for rank in self.ranks:
            rank.device.finish()

    def serve(self, *items: Variant) -> Step:
        """A whole request, to its end."""
        self.ask(*items)
        step = self.step()
        self.work()
        self.copy()
        while self.scheduler.has_requests():
            self.step()
            self.work()
        return step

    def forget(self) -> None:
        """vLLM's own encoder cache is emptied, so that only the pool has anything."""
        self._clear_encoder_caches()

    def loads(self, step: Step) -> list[str]:
        return [load.key for load in step.output.ec_connector_metadata.loads]

    def saves(self, step: Step) -> list[str]:
        return [save.key for save in step.output.ec_connector_metadata.saves]


@pytest.fixture
def story() -> Iterator[Callable[..., Story]]:
    stories: list[Story] = []

    def tell(**changed: Any) -> Story:
        stories.append(Story(Settings(**{**CALM, **changed}).consistent()))
        return stories[-1]

    yield tell
    for each in stories:
        each.drain()
        each.close()


Tell = Callable[..., Story]


@pytest.mark.parametrize("runner", RUNNERS)
def test_sleep_with_a_save_under_way(story: Tell, runner: str) -> None:
    """vLLM waits for its device before it gives memory back; the report may come after that."""
    engine = story(runner=runner)
    engine.ask(A)
    engine.step()
    engine.work()
    for rank in engine.ranks:
        device = rank.device
        device.finish_compute(device.mark)
        while device._copies:
            device._do_copy()
    engine.forget()  # asleep
    assert engine.pool.neighbour.stats()["writing"] == 1
    engine.copy()  # awake
    engine.serve()
    assert engine.loads(engine.serve(A)) == ["a"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_new_weights_and_a_flush(story: Tell, runner: str) -> None:
    """What the old weights made is not found again; what is held goes when it is let go."""
    engine = story(runner=runner)
    engine.serve(A, B)
    engine.forget()
    assert engine.loads(engine.serve(A)) == ["a"]
    engine.new_weights()
    step = engine.serve(A, B)
    assert engine.loads(step) == []
    assert engine.saves(step) == ["a", "b"]
    engine.forget()
    assert engine.loads(engine.serve(A, B)) == ["a", "b"]


def test_a_flush_between_promise_and_load(story: Tell) -> None:
    """A promise is kept: the entry is unfindable, and its bytes stay until they are read."""
    engine = story()
    engine.serve(A)
    engine.forget()
    engine.ask(A)
    step = engine.step()
    engine.flush()
    assert engine.loads(step) == ["a"]
    assert not engine.pool.neighbour.contains("a")
    assert engine.pool.neighbour.stats()["doomed"] == 1
    engine.work()
    engine.copy()
    assert engine.pool.neighbour.stats()["doomed"] == 0


@pytest.mark.parametrize("runner", RUNNERS)
def test_evicted_and_wanted_again_in_one_pass(story: Tell, runner: str) -> None:
    """The list of freed keys leaves out what is taken again, and a V2 runner encodes it not."""
    engine = story(runner=runner, encoder_cache=9)
    engine.serve(A)
    engine.serve(B)
    engine.flush()
    engine.ask(Variant("big", 5))
    engine.ask(A)
    step = engine.step()
    assert "a" not in step.freed
    assert engine.saves(step) == ["big", "a"]
    engine.work()
    engine.copy()
    assert engine.pool.neighbour.contains("a")
    assert engine.pool.neighbour.stats()["writing"] == 0


def test_an_item_taken_back_after_its_allocation(story: Tell) -> None:
    """A more urgent request takes the place of one that was planned in the same pass."""
    engine = story(priority=True, kv_tokens=14, chunk=4, token_budget=12)
    engine.ask(C, gap=4, priority=2)
    engine.ask(gap=12)
    engine.step()
    engine.work()
    step = engine.step()
    assert step.not_encoded == {"c"}  # it was allocated, and nobody said that this is over
    assert engine.saves(step) == []
    stats = engine.pool.neighbour.stats()
    assert (stats["writing"], stats["free_blocks"]) == (0, stats["num_blocks"])


def test_a_request_that_ends_before_its_copy(story: Tell) -> None:
    """Not ready when the request is aborted, but when the worker has said so."""
    engine = story(batches=2)
    request = engine.ask(A)
    engine.step()
    engine.scheduler.finish(request)
    engine.step()
    assert not engine.pool.neighbour.contains("a")
    engine.work()
    assert not engine.pool.neighbour.contains("a")
    engine.copy()
    assert engine.pool.neighbour.contains("a")


def test_one_rank_is_done_and_another_still_copies(story: Tell) -> None:
    engine = story(blocks=4, ranks=2)
    engine.serve(A)
    engine.forget()
    engine.ask(A)
    engine.step()
    engine.run_rank(0)
    engine.ranks[0].device.finish()
    engine.run_rank(1)
    for variant in (B, C):
        engine.pool.neighbour_saves(variant, engine.content)
    assert not engine.pool.neighbour.contains("c")  # has no room while rank 1 reads
    engine.work()
    engine.copy()
    engine.pool.neighbour_saves(C, engine.content)
    assert engine.pool.neighbour.contains("c")


class TestStalledLock:
    """A holder of the lock has stopped, but lives: nobody may take the lock from it."""

    def test_what_workers_gave_back_is_given_back_with_a_later_step(self, story: Tell) -> None:
        """Also by a worker that is given nothing to copy any more."""
        engine = story()
        engine.ask(A)
        engine.step()
        engine.work()
        engine.stall()
        engine.copy()
        engine.go_on()
        assert engine.pool.neighbour.stats()["writing"] == 1
        engine.serve()
        assert engine.pool.neighbour.contains("a")

    def test_what_the_scheduler_gave_back_is_given_back_with_a_later_step(
        self, story: Tell
    ) -> None:
        engine = story()
        engine.serve(A)
        for _ in range(4):  # until it has nothing to say about that save any more
            engine.serve()
        engine.forget()
        request = engine.ask(A)
        assert engine.scheduler.connector.ensure_cache_available(request, 0)
        assert engine.scheduler.connector.has_cache_item("a")
        engine.scheduler.finish(request)
        engine.stall()
        engine.step()  # ends the lease, later
        engine.go_on()
        assert engine.pool.neighbour.stats()["holds"] == 1
        engine.work()
        engine.serve()
        assert engine.pool.neighbour.stats()["holds"] == 0

    def test_a_save_by_steps_that_was_claimed_is_ready_in_the_end(self, story: Tell) -> None:
        """Whether it was claimed cannot be asked when its time has come."""
        engine = story(completion="steps")
        engine.ask(A, answer=8)
        engine.step()
        engine.work()
        engine.stall()
        for _ in range(3):
            engine.step()
            engine.work()
        engine.go_on()
        for _ in range(4):
            engine.step()
            engine.work()
        assert engine.pool.neighbour.contains("a")

    def test_a_load_is_read_once_however_often_it_is_named(self, story: Tell) -> None:
        engine = story(batches=2, ranks=1)
        engine.serve(A)
        engine.forget()
        engine.ask(A, answer=4)
        engine.step()
        engine.stall()
        second = engine.step()
        assert engine.loads(second) == ["a"]
        engine.work()
        engine.copy()
        engine.go_on()
        engine.serve()
        worker = engine.halves[1]
        assert (worker.counts["loads"], worker.counts["loads_lost"]) == (1, 0)

    def test_blocks_are_not_read_again_when_they_are_anothers(self, story: Tell) -> None:
        """Though nobody can say so: the claim cannot be made, and vLLM's cache was emptied."""
        engine = story(batches=2, ranks=1, blocks=4)
        engine.serve(A)
        engine.forget()
        engine.ask(A, answer=4)
        engine.step()
        assert engine.loads(engine.step()) == ["a"]
        engine.run_rank(0)
        engine.copy()
        engine.forget()
        engine.pool.neighbour_saves(C, engine.content)  # in the same blocks
        engine.ranks[0].trusts = False
        engine.stall()
        engine.run_rank(0)
        engine.copy()
        engine.forget()
        engine.go_on()

    def test_blocks_are_not_anothers_while_a_rank_reads_whose_claim_was_put_off(
        self, story: Tell
    ) -> None:
        """The item was freed meanwhile, and the scheduler has the lock before that rank has it."""
        engine = story(ranks=1, blocks=4, encoder_cache=4)
        engine.serve(A)
        engine.forget()
        engine.ask(A)
        assert engine.loads(engine.step()) == ["a"]
        engine.stall()
        engine.work()
        engine.ask(C)
        assert engine.step().freed == ["a"]
        engine.work()
        for _ in range(6):
            engine.ask()
            engine.step()
            engine.work()
        engine.go_on()
        engine.forget()
        engine.ask(C)
        assert engine.saves(engine.step()) == []
        engine.work()
        engine.copy()
        engine.forget()
        engine.serve()
        engine.ask(C)
        assert engine.saves(engine.step()) == ["c"]

    def test_requests_are_served_meanwhile(self, story: Tell) -> None:
        engine = story()
        engine.serve(A)
        engine.forget()
        engine.stall()
        step = engine.serve(A, B)
        assert [each.key for each in step.encoded()] == ["a", "b"]
        assert engine.loads(step) == engine.saves(step) == []
        engine.go_on()


def test_a_load_that_two_steps_in_flight_name_is_not_told_as_lost(
    story: Tell, caplog: pytest.LogCaptureFixture
) -> None:
    """The second step was made before the first had run: by then the load is over."""
    engine = story(batches=2)
    engine.serve(A)
    engine.forget()
    engine.ask(A, answer=4)
    engine.step()
    second = engine.step()
    assert engine.loads(second) == ["a"]
    for number in range(2):
        engine.run_rank(number)
    engine.copy()
    engine.work()
    assert "could not be loaded" not in caplog.text
    engine.check_halves()
