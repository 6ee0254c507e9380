"""Who waits for whom, and for how long: by a clock that passes only when told."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model.fakes import Clock

from ecpool.errors import PoolBusyError
from ecpool.vllm.single_flight import BLIND_FOR, LOOK_EVERY, MOST_ITEMS, SingleFlight

LIMIT = 0.05
LENGTH = 10


class Elsewhere:
    """What other engines are writing, and how often one has looked."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.looks = 0
        self.broken = False

    def __call__(self, key: str) -> bool:
        self.looks += 1
        if self.broken:
            raise TimeoutError
        return key in self.keys


class World:
    def __init__(self) -> None:
        self.clock = Clock()
        self.elsewhere = Elsewhere()
        self.counts: Counter[str] = Counter()
        self.flight = SingleFlight(self.elsewhere, LIMIT, self.clock, self.counts)

    def asks(self, request: Any, computed: int = 0) -> bool:
        return self.flight.lets_go(request, computed)


def request(*keys: str, name: str = "r") -> Any:
    features = [
        SimpleNamespace(
            identifier=key,
            mm_position=SimpleNamespace(offset=number * LENGTH, length=LENGTH),
        )
        for number, key in enumerate(keys)
    ]
    return SimpleNamespace(request_id=name, mm_features=features)


@pytest.fixture
def world() -> World:
    return World()


def test_nothing_is_waited_for_that_nobody_writes(world: World) -> None:
    assert world.asks(request())
    assert world.asks(request("a", "b"))
    assert not world.counts


def test_a_request_goes_on_when_the_other_is_done(world: World) -> None:
    world.elsewhere.keys.add("a")
    waiting = request("a")
    assert not world.asks(waiting)
    world.clock.pass_by(LIMIT / 2)
    world.elsewhere.keys.clear()
    assert world.asks(waiting)
    assert world.counts == {"waits": 1}


def test_the_limit_is_of_the_wall_clock(world: World) -> None:
    world.elsewhere.keys.add("a")
    waiting = request("a")
    assert not world.asks(waiting)
    # However seldom it is asked about.
    world.clock.pass_by(LIMIT)
    assert world.asks(waiting)
    assert world.counts == {"waits": 1, "waits_expired": 1}


@pytest.mark.parametrize("pause", [0.0, LOOK_EVERY / 20, 0.003, 1.0])
def test_it_never_waits_longer_however_often_it_is_asked(world: World, pause: float) -> None:
    world.elsewhere.keys.add("a")
    waiting = request("a")
    begun = world.clock.now
    while not world.asks(waiting):
        world.clock.pass_by(max(pause, 1e-6))
    assert world.clock.now - begun <= LIMIT + LOOK_EVERY + pause
    assert world.asks(waiting)


def test_an_item_is_waited_for_once(world: World) -> None:
    world.elsewhere.keys.add("a")
    waiting = request("a")
    assert not world.asks(waiting)
    world.elsewhere.keys.clear()
    world.clock.pass_by(LOOK_EVERY)
    assert world.asks(waiting)
    world.elsewhere.keys.add("a")  # evicted, and written again by somebody else
    world.clock.pass_by(LOOK_EVERY)
    assert world.asks(waiting)


def test_items_are_waited_for_side_by_side(world: World) -> None:
    world.elsewhere.keys |= {"a", "b", "c"}
    waiting = request("a", "b", "c", "d")
    assert not world.asks(waiting)
    world.clock.pass_by(LIMIT)
    assert world.asks(waiting)
    assert world.counts["waits"] == 3


def test_each_request_has_its_own_time(world: World) -> None:
    world.elsewhere.keys.add("a")
    first, second = request("a", name="1"), request("a", name="2")
    assert not world.asks(first)
    world.clock.pass_by(LIMIT / 2)
    assert not world.asks(second)
    world.clock.pass_by(LIMIT / 2)
    assert world.asks(first)
    assert not world.asks(second)


def test_items_behind_the_computed_tokens_are_not_waited_for(world: World) -> None:
    world.elsewhere.keys.add("a")
    assert not world.asks(request("a", "b", name="1"), LENGTH - 1)
    assert world.asks(request("a", "b", name="2"), LENGTH)
    assert world.asks(request("a", "b", name="3"), 5 * LENGTH)


def test_a_request_that_was_preempted_needs_its_items_again(world: World) -> None:
    preempted = request("a", "b")
    assert world.asks(preempted, 2 * LENGTH)
    world.elsewhere.keys.add("a")
    assert not world.asks(preempted, 0)


def test_what_has_its_place_already_is_not_waited_for(world: World) -> None:
    running = request("a", "b")
    world.asks(running)
    world.flight.settle("r", "a")
    world.elsewhere.keys.add("a")
    world.clock.pass_by(LOOK_EVERY)
    assert world.asks(running)
    world.flight.settle("unknown", "a")


def test_a_poll_is_no_look(world: World) -> None:
    world.elsewhere.keys.add("a")
    waiting, going = request("a", name="1"), request("b", name="2")
    for _ in range(1000):
        assert not world.asks(waiting)
        assert world.asks(going)
        world.clock.pass_by(LOOK_EVERY / 200)
    assert world.elsewhere.looks <= 2 * 7


def test_a_decoding_request_costs_no_look(world: World) -> None:
    long = request(*(f"k{n}" for n in range(1000)))
    for computed in range(1000 * LENGTH, 1000 * LENGTH + 100):
        world.clock.pass_by(1.0)
        assert world.asks(long, computed)
    assert world.elsewhere.looks == 0


def test_a_look_is_about_a_bounded_number_of_items(world: World) -> None:
    long = request(*(f"k{n}" for n in range(1000)))
    world.elsewhere.keys.add("k999")
    assert world.asks(long)
    assert world.elsewhere.looks == MOST_ITEMS


def test_a_look_that_fails_is_not_made_again_at_once(world: World) -> None:
    world.elsewhere.broken = True
    with pytest.raises(TimeoutError):
        world.asks(request("a", name="0"))
    for number in range(1, 50):
        assert world.asks(request("a", name=f"{number}"))
    assert world.elsewhere.looks == 1
    world.elsewhere.broken = False
    world.elsewhere.keys.add("a")
    world.clock.pass_by(BLIND_FOR)
    assert not world.asks(request("a", name="later"))


def test_a_busy_lock_costs_one_look_and_holds_nobody_back(world: World) -> None:
    elsewhere = world.elsewhere
    elsewhere.keys |= {f"{number}-{item}" for number in range(64) for item in range(4)}
    waits_for_the_lock = 0.02

    def busy(key: str) -> bool:
        elsewhere.looks += 1
        world.clock.pass_by(waits_for_the_lock)
        raise PoolBusyError

    flight = SingleFlight(busy, LIMIT, world.clock, world.counts)
    requests = [
        request(*(f"{number}-{item}" for item in range(4)), name=f"{number}")
        for number in range(64)
    ]
    began = world.clock.now
    for _ in range(10):
        assert all(flight.lets_go(each, 0) for each in requests)
    assert elsewhere.looks == 1
    assert world.clock.now - began == pytest.approx(waits_for_the_lock)
    assert not world.counts
    # The pause counts from when the look was over.
    world.clock.pass_by(BLIND_FOR - 0.001)
    assert flight.lets_go(requests[1], 0)
    assert elsewhere.looks == 1
    world.clock.pass_by(0.002)
    assert flight.lets_go(requests[1], 0)
    assert elsewhere.looks == 2


def test_a_look_stops_where_the_lock_is_not_had(world: World) -> None:
    looks: list[str] = []

    def half(key: str) -> bool:
        looks.append(key)
        if key == "b":
            raise PoolBusyError
        return True

    flight = SingleFlight(half, LIMIT, world.clock, world.counts)
    assert flight.lets_go(request("a", "b", "c"), 0)
    assert looks == ["a", "b"]


def test_a_finished_request_is_forgotten(world: World) -> None:
    world.elsewhere.keys.add("a")
    assert not world.asks(request("a"))
    world.flight.forget("r")
    world.flight.forget("r")
    assert len(world.flight) == 0
    # One of the same name is another one.
    assert not world.asks(request("a"))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "begin", "end", "pass"]),
            st.integers(0, 3),
            st.floats(0.0, 0.02),
        ),
        max_size=200,
    )
)
def test_no_request_is_held_longer_than_all_its_items_together(
    steps: list[tuple[str, int, float]],
) -> None:
    world = World()
    keys = [f"k{n}" for n in range(4)]
    requests = [request(*keys[n:], *keys[:n], name=f"{n}") for n in range(4)]
    held: set[int] = set()
    waited = [0.0] * 4

    def ask(number: int) -> None:
        (held.discard if world.asks(requests[number]) else held.add)(number)

    for action, number, seconds in steps:
        if action == "begin":
            world.elsewhere.keys.add(keys[number])
        elif action == "end":
            world.elsewhere.keys.discard(keys[number])
        elif action == "ask":
            ask(number)
        else:
            world.clock.pass_by(seconds)
            for each in list(held):
                waited[each] += seconds
                ask(each)
    assert max(waited) <= 4 * (LIMIT + 0.02 + LOOK_EVERY)
    # However things stand, and asked only now and then, every one goes.
    for number in range(4):
        for _ in range(6):
            world.clock.pass_by(LIMIT)
            if world.asks(requests[number]):
                break
        else:
            pytest.fail("held for ever")
