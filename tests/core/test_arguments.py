"""What is not allowed is a ValueError that names the argument and its value; nothing stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core.helpers import begin, store

from ecpool import EmbeddingCache, InvalidArgumentError, Region, StepTracker

REGION_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"capacity": 0}, "capacity is 0"),
    ({"capacity": -1}, "capacity is -1"),
    ({"capacity": 4095}, "4095"),
    ({"block_size": 0}, "block_size is 0"),
    ({"block_size": 5000}, "block_size is 5000"),
    ({"block_size": 2048}, "block_size is 2048"),
    ({"block_size": -4096}, "block_size is -4096"),
    ({"slots": 0}, "slots is 0"),
    ({"slots": -2}, "slots is -2"),
    ({"slots": 1 << 40}, "slots"),
    ({"segment_size": 3 << 20}, "segment_size is 3145728"),
    ({"segment_size": 4096}, "segment_size is 4096"),
    ({"segment_size": -1}, "segment_size is -1"),
    ({"lifetime": "for ever"}, 'lifetime is "for ever"'),
    ({"lifetime": "private"}, "expected_clients is 0"),
    ({"lifetime": "private", "expected_clients": -1}, "expected_clients is -1"),
    ({"role": "king"}, 'role is "king"'),
    ({"rank": -1}, "rank is -1"),
    ({"name": ""}, "name"),
    ({"name": ".hidden"}, ".hidden"),
    ({"name": "a/b"}, "a/b"),
    ({"name": "../up"}, "../up"),
    ({"name": "x" * 101}, "name"),
    ({"name": "new\nline"}, "name"),
]


@pytest.mark.parametrize(("wrong", "words"), REGION_ARGUMENTS, ids=[w for _, w in REGION_ARGUMENTS])
def test_region(pools: Path, wrong: dict[str, Any], words: str) -> None:
    arguments = {"name": "pool", "capacity": 1 << 20, "block_size": 4096, "directory": str(pools)}
    arguments |= wrong
    with pytest.raises(InvalidArgumentError) as caught:
        Region.open(arguments.pop("name"), **arguments)
    assert words in str(caught.value)
    assert list(pools.glob("*")) == []


def test_a_directory_on_another_file_system_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="tmpfs"):
        Region.open("pool", capacity=1 << 20, directory="/proc/ecpool-test")


@pytest.mark.parametrize("types", [{"capacity": "4GiB"}, {"capacity": 1.5}, {"slots": "many"}])
def test_wrong_types_are_type_errors(pools: Path, types: dict[str, Any]) -> None:
    arguments = {"capacity": 1 << 20, "directory": str(pools)} | types
    with pytest.raises(TypeError):
        Region.open("pool", **arguments)
    assert list(pools.glob("*")) == []


Call = Callable[[EmbeddingCache], Any]
CACHE_ARGUMENTS: list[tuple[str, Call, str]] = [
    ("negative alloc", lambda c: c.alloc("k", -1), "n_blocks is -1"),
    ("unknown dtype", lambda c: c.lease("k", dtype="float7"), "bfloat16"),
    ("no rank", lambda c: c.begin_save("k", rows=1, row_bytes=1, ranks=0), "ranks is 0"),
    ("negative ranks", lambda c: c.begin_save("k", rows=1, row_bytes=1, ranks=-1), "ranks is -1"),
    ("too many ranks", lambda c: c.dispatch_loads([], ranks=1 << 64), "ranks is 18446744073709"),
    ("negative row", lambda c: c.begin_save("k", rows=1, row_bytes=-8), "row_bytes is -8"),
    ("nine dimensions", lambda c: c.claim_saves(0, [(1, (1,) * 9, "uint8")]), "9 dimensions"),
    ("negative size", lambda c: c.claim_saves(0, [(1, (1, -4), "uint8")]), "-4"),
    ("unknown dtype of a save", lambda c: c.claim_saves(0, [(1, (1,), "float7")]), "float7"),
    ("negative rank", lambda c: c.claim_loads(-1, [1]), "rank is -1"),
    ("negative rank of a save", lambda c: c.claim_saves(-1, []), "rank is -1"),
    ("negative rank done", lambda c: c.complete(-1, [1]), "rank is -1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "words"), [row[1:] for row in CACHE_ARGUMENTS], ids=[row[0] for row in CACHE_ARGUMENTS]
)
def test_cache(call: Call, words: str) -> None:
    cache = EmbeddingCache(4)
    with pytest.raises(InvalidArgumentError) as caught:
        call(cache)
    assert words in str(caught.value)
    assert cache.stats()["entries"] == 0


ID_CALLS: dict[str, Callable[[EmbeddingCache, Any], Any]] = {
    "end_leases": lambda c, ids: c.end_leases(ids),
    "dispatch_loads": lambda c, ids: c.dispatch_loads(ids, ranks=1),
    "claim_loads": lambda c, ids: c.claim_loads(0, ids),
    "claim_saves": lambda c, ids: c.claim_saves(0, [(i, (1, 1), "uint8") for i in ids]),
    "complete": lambda c, ids: c.complete(0, ids),
    "failed": lambda c, ids: c.complete(0, ids, ok=False),
    "withdraw": lambda c, ids: c.withdraw(ids),
    "close_unclaimed": lambda c, ids: c.close_unclaimed(ids),
    "unclaimed": lambda c, ids: c.unclaimed(ids),
    "finish_saves": lambda c, ids: c.finish_saves(ids),
    "finish_loads": lambda c, ids: c.finish_loads(ids),
}


@pytest.mark.parametrize("name", ID_CALLS)
@pytest.mark.parametrize("number", [0, 1, 5 << 32, (1 << 64) - 1])
def test_ids_that_nobody_handed_out_change_nothing(name: str, number: int) -> None:
    cache = EmbeddingCache(4)
    save = begin(cache, "k")
    assert save.id != number
    ID_CALLS[name](cache, [number])
    assert cache.check() == []
    assert cache.unclaimed([save.id]) == [save.id]


@pytest.mark.parametrize("name", ID_CALLS)
@pytest.mark.parametrize("number", [-1, 1 << 64])
def test_what_can_be_no_id_is_refused(name: str, number: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"an id is {number}"):
        ID_CALLS[name](EmbeddingCache(4), [number])


@pytest.mark.parametrize("name", [name for name in ID_CALLS if name != "claim_saves"])
def test_any_iterable_of_ids_is_read_once_and_wholly(name: str) -> None:
    """A generator can be gone through only once."""
    outcomes = []
    for kind in (list, tuple, set, iter):
        cache = EmbeddingCache(4)
        store(cache, "held")
        lease = cache.lease("held")
        assert lease is not None
        ids = [begin(cache, "new").id, lease.id]
        result = ID_CALLS[name](cache, kind(ids))
        ordered = sorted(result) if result is not None else None
        outcomes.append((ordered, cache.stats(), cache.counters()))
    assert all(outcome == outcomes[0] for outcome in outcomes)


@pytest.mark.parametrize("deadline", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_deadlines(deadline: float) -> None:
    with pytest.raises(InvalidArgumentError, match="deadline"):
        EmbeddingCache(4, deadline=deadline)


@pytest.mark.parametrize(
    "arguments",
    [{"num_blocks": -1}, {"num_blocks": 1 << 32}, {"num_blocks": 4, "block_size": 0}, {}],
)
def test_a_cache_needs_blocks_or_a_region(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        EmbeddingCache(**arguments)


def test_a_cache_has_blocks_or_a_region_and_not_both(open_region: Callable[..., Region]) -> None:
    with pytest.raises(InvalidArgumentError, match="not both"):
        EmbeddingCache(4, region=open_region())


@pytest.mark.parametrize("batches", [0, -1])
def test_a_tracker_needs_a_step(batches: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"max_concurrent_batches is {batches}"):
        StepTracker(batches)


@pytest.mark.parametrize(
    ("extents", "nbytes"),
    [([], 1), ([(0, 1)], 4097), ([(256, 1)], 1), ([(255, 2)], 1), ([(2**32 - 1, 2**32 - 1)], 1)],
)
def test_copies_stay_inside_the_data_and_the_extents(
    open_region: Callable[..., Region], extents: list[tuple[int, int]], nbytes: int
) -> None:
    region = open_region(capacity=256 * 4096)
    with pytest.raises(InvalidArgumentError):
        region.write(extents, bytes(nbytes))
    with pytest.raises(InvalidArgumentError):
        region.read(extents, bytearray(nbytes))
    assert bytes(memoryview(region)) == bytes(region.nbytes)


def test_a_copy_needs_a_contiguous_and_for_reading_a_writable_buffer(
    open_region: Callable[..., Region],
) -> None:
    region = open_region()
    with pytest.raises(InvalidArgumentError, match="contiguous"):
        region.write([(0, 1)], memoryview(bytes(8))[::2])
    with pytest.raises(InvalidArgumentError, match="read-only"):
        region.read([(0, 1)], bytes(8))
    with pytest.raises((TypeError, BufferError)):
        region.write([(0, 1)], "text")  # type: ignore[arg-type]
