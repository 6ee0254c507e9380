"""`EmbeddingCache` as vLLM 0.26 has it, and what ours does besides, on the heap and on a region."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core.helpers import ROW, begin, claim, fill, is_whole, store

from ecpool import EmbeddingCache, EntryStateError, KeyNotFoundError, Region

Make = Callable[[int], EmbeddingCache]


def test_an_entry_from_alloc_to_unpin(make_cache: Make) -> None:
    cache = make_cache(4)
    assert cache.get("a") is None
    entry = cache.alloc("a", 3)
    assert entry is not None
    assert len(set(entry.block_ids)) == 3
    assert (entry.ready, entry.evictable) == (False, False)
    assert cache.get("a") == entry
    assert hash(cache.get("a")) == hash(entry)
    cache.mark_ready("a")
    assert (entry.ready, entry.evictable) == (True, True)
    cache.pin("a")
    cache.pin("a")
    assert (entry.ready, entry.evictable) == (True, False)
    cache.unpin("a")
    assert entry.evictable is False
    cache.unpin("a")
    assert entry.evictable is True
    assert is_whole(cache)


def test_blocks_are_handed_out_once(make_cache: Make) -> None:
    cache = make_cache(16)
    entries = [cache.alloc(str(n), n) for n in range(1, 6)]
    used = [block for entry in entries if entry for block in entry.block_ids]
    assert sorted(used) == sorted(set(used))
    assert set(used) <= set(range(16))
    assert len(used) == 15
    for entry in entries:
        assert entry is not None
        assert sum(length for _, length in entry.extents) == len(entry.block_ids)


def test_the_oldest_ready_entry_goes_first(make_cache: Make) -> None:
    cache = make_cache(3)
    fill(cache, ["a", "b", "c"])
    first = cache.get("a")
    assert first is not None
    assert cache.alloc("d", 1) is not None
    assert [cache.contains(key) for key in "abcd"] == [False, True, True, False]
    assert (first.ready, first.evictable) == (False, False)


def test_the_order_is_that_of_becoming_evictable(make_cache: Make) -> None:
    cache = make_cache(3)
    for key in "abc":
        assert cache.alloc(key, 1)
    for key in "cab":
        cache.mark_ready(key)
    cache.pin("c")
    cache.unpin("c")  # a hit puts it at the end
    evicted = []
    for new in "xyz":
        before = {key for key in "abc" if cache.get(key)}
        assert cache.alloc(new, 1)
        evicted += sorted(before - {key for key in "abc" if cache.get(key)})
    assert evicted == ["a", "b", "c"]


def test_what_is_pinned_written_or_leased_stays(make_cache: Make) -> None:
    cache = make_cache(4)
    fill(cache, ["pinned", "leased", "free"])
    cache.pin("pinned")
    lease = cache.lease("leased")
    assert lease is not None
    assert cache.alloc("written", 1)
    assert cache.alloc("too much", 2) is None
    assert cache.contains("free"), "an alloc that fails evicts nothing"
    assert cache.alloc("fits", 1)
    assert cache.alloc("no more", 1) is None
    cache.end_leases([lease.id])
    assert cache.alloc("now", 1)


def test_a_key_evicted_and_stored_again_is_another_entry(make_cache: Make) -> None:
    cache = make_cache(1)
    fill(cache, ["a"])
    old = cache.get("a")
    fill(cache, ["b"])
    fill(cache, ["a"])
    new = cache.get("a")
    assert old is not None
    assert new is not None
    assert old != new
    assert (old.ready, new.ready) == (False, True)


def test_no_blocks_at_all(make_cache: Make) -> None:
    cache = make_cache(2)
    entry = cache.alloc("none", 0)
    assert entry is not None
    assert (entry.block_ids, entry.extents) == ((), ())
    cache.mark_ready("none")
    assert entry.ready
    assert cache.stats()["free_blocks"] == 2
    fill(cache, ["a", "b"])
    assert cache.contains("none"), "nothing is gained by evicting it"
    assert is_whole(cache)


def test_a_cache_without_blocks() -> None:
    cache = EmbeddingCache(0)
    assert cache.alloc("a", 0) is not None
    assert cache.begin_save("b", rows=1, row_bytes=1) == "too_large"
    assert cache.check() == []


def test_slots_are_evicted_for_as_blocks_are(open_region: Callable[..., Region]) -> None:
    cache = EmbeddingCache(region=open_region(slots=2))
    fill(cache, ["a", "b", "c"])
    assert [cache.contains(key) for key in "abc"] == [False, True, True]
    cache.pin("b")
    cache.pin("c")
    assert cache.alloc("d", 1) is None
    assert cache.begin_save("d", rows=1, row_bytes=1) == "no_room"


def test_two_keys_equal_in_their_first_kilobyte(make_cache: Make) -> None:
    cache = make_cache(4)
    stem = "k" * 1024
    store(cache, stem + "1", rows=1)
    assert cache.lease(stem + "2") is None
    assert not cache.contains(stem)
    store(cache, stem + "2", rows=2)
    one, two = cache.lease(stem + "1"), cache.lease(stem + "2")
    assert one is not None
    assert two is not None
    assert (one.shape, two.shape) == ((1, ROW), (2, ROW))


@pytest.mark.parametrize("key", ["", "\0", "ключ", "🖼" * 100, "k" * 100_000])
def test_any_text_is_a_key(make_cache: Make, key: str) -> None:
    cache = make_cache(2)
    store(cache, key)
    assert not cache.contains(key + "x")
    assert cache.lease(key) is not None


def test_namespaces_have_nothing_in_common(open_region: Callable[..., Region]) -> None:
    region = open_region()
    caches = [EmbeddingCache(region=region, namespace=text) for text in ("", "a", "b" * 5000)]
    for rows, cache in enumerate(caches, 1):
        assert not cache.contains("k")
        store(cache, "k", rows)
    leases = [cache.lease("k") for cache in caches]
    assert [lease.shape[0] for lease in leases if lease] == [1, 2, 3]
    assert caches[1].flush() == 1
    assert [cache.contains("k") for cache in caches] == [True, False, True]
    again = EmbeddingCache(region=region, namespace="b" * 5000)
    assert again.contains("k")


def test_flush_while_everything_is_held(make_cache: Make) -> None:
    cache = make_cache(8)
    fill(cache, ["plain", "pinned", "leased", "loading"])
    cache.pin("pinned")
    lease, load = cache.lease("leased"), cache.lease("loading")
    assert lease is not None
    assert load is not None
    cache.dispatch_loads([load.id], ranks=1)
    save = begin(cache, "saving")
    assert claim(cache, save) == "claimed"
    assert cache.alloc("allocated", 1)
    assert cache.alloc("given up", 1)

    assert cache.flush() == 7
    for key in ("plain", "pinned", "leased", "loading", "saving", "allocated", "given up"):
        assert not cache.contains(key)
        assert cache.lease(key) is None
    assert (cache.stats()["free_blocks"], cache.stats()["doomed"]) == (2, 6)
    fill(cache, ["pinned", "new"])  # the same key again, beside the one that is only held

    cache.unpin("pinned")
    cache.end_leases([lease.id])
    assert cache.claim_loads(0, [load.id]) == ["claimed"]
    cache.complete(0, [load.id, save.id])
    cache.mark_ready("allocated")
    cache.discard("given up")
    assert cache.stats()["doomed"] == 0
    found = [key for key in ("pinned", "new", "saving", "allocated") if cache.contains(key)]
    assert found == ["pinned", "new"]
    assert is_whole(cache)


def test_a_flush_twice_and_of_nothing(make_cache: Make) -> None:
    cache = make_cache(2)
    assert cache.flush() == 0
    fill(cache, ["a"])
    assert (cache.flush(), cache.flush()) == (1, 0)
    assert cache.stats()["free_blocks"] == 2


def test_a_save_from_begin_to_lease(make_cache: Make) -> None:
    cache = make_cache(4)
    save = begin(cache, "k", rows=3)
    assert (save.num_blocks, save.shape, save.dtype, save.nbytes) == (3, (), "", 0)
    assert cache.begin_save("k", rows=3, row_bytes=ROW) == "exists"
    assert cache.lease("k") is None
    assert cache.has_held_entries()
    assert cache.claim_saves(0, [(save.id, (3, ROW // 2), "bfloat16")]) == ["claimed"]
    assert cache.claim_saves(0, [(save.id, (3, ROW // 2), "bfloat16")]) == ["repeated"]
    cache.complete(0, [save.id])
    lease = cache.lease("k", rows=3, dtype="bfloat16")
    assert lease is not None
    assert lease.extents == save.extents
    assert (lease.shape, lease.dtype, lease.nbytes) == ((3, ROW // 2), "bfloat16", 3 * ROW)
    assert cache.claim_saves(0, [(save.id, (3, ROW // 2), "bfloat16")]) == ["refused"]


@pytest.mark.parametrize(
    ("expected", "is_there"),
    [
        ({}, True),
        ({"rows": 2}, True),
        ({"dtype": "uint8"}, True),
        ({"rows": 2, "dtype": "uint8"}, True),
        ({"rows": 3}, False),
        ({"rows": 0}, False),
        ({"dtype": "int8"}, False),
    ],
)
def test_an_entry_of_another_shape_or_type_goes(
    make_cache: Make, expected: dict[str, object], is_there: bool
) -> None:
    cache = make_cache(4)
    store(cache, "k", rows=2)
    lease = cache.lease("k", **expected)  # type: ignore[arg-type]
    assert (lease is not None) == is_there == cache.contains("k")
    assert cache.counters()["mismatches"] == (0 if is_there else 1)
    if lease is not None:
        cache.end_leases([lease.id])
    assert is_whole(cache)


def test_a_promise_survives_a_request_that_expects_something_else(make_cache: Make) -> None:
    cache = make_cache(4)
    store(cache, "k", rows=2)
    promised = cache.lease("k", rows=2)
    assert promised is not None
    assert cache.lease("k", rows=3) is None
    assert cache.alloc("other", 4) is None, "the promised blocks are nobody else's"
    assert cache.claim_loads(0, [promised.id]) == ["claimed"]
    cache.dispatch_loads([promised.id], ranks=1)
    cache.complete(0, [promised.id])
    assert is_whole(cache)
    assert cache.stats()["free_blocks"] == 4


def test_items_that_are_no_items(make_cache: Make) -> None:
    cache = make_cache(4)
    assert cache.begin_save("k", rows=0, row_bytes=ROW) == "empty"
    assert cache.begin_save("k", rows=-1, row_bytes=ROW) == "empty"
    assert cache.begin_save("k", rows=3, row_bytes=0) == "empty"
    assert cache.begin_save("k", rows=5, row_bytes=ROW) == "too_large"
    assert cache.begin_save("k", rows=1 << 62, row_bytes=1 << 62) == "too_large"
    assert begin(cache, "x", rows=3)
    assert cache.begin_save("k", rows=2, row_bytes=ROW) == "no_room"
    counters = cache.counters()
    skipped = [counters[f"skipped_{why}"] for why in ("empty", "too_large", "no_room")]
    assert skipped == [3, 2, 1]


def test_every_way_out_of_a_save(make_cache: Make) -> None:
    cache = make_cache(8)
    saves = {
        key: begin(cache, key) for key in ("withdrawn", "closed", "failed", "large", "claimed")
    }
    cache.withdraw([saves["withdrawn"].id])
    assert cache.close_unclaimed([saves["closed"].id]) == []
    assert claim(cache, saves["closed"]) == "refused"
    assert claim(cache, saves["failed"]) == "claimed"
    cache.complete(0, [saves["failed"].id], ok=False)
    assert claim(cache, saves["large"], rows=2) == "too_large"
    assert [key for key in saves if cache.get(key)] == ["claimed"]
    assert claim(cache, saves["claimed"]) == "claimed"
    cache.withdraw([saves["claimed"].id])
    cache.complete(0, [saves["claimed"].id])
    assert cache.contains("claimed"), "only a save that nobody can know of is withdrawn"
    assert is_whole(cache)


def test_a_load_ends_with_its_last_rank(make_cache: Make) -> None:
    cache = make_cache(1)
    store(cache, "k")
    lease = cache.lease("k")
    assert lease is not None
    cache.dispatch_loads([lease.id], ranks=0b101)
    assert cache.unclaimed([lease.id]) == [lease.id]
    assert cache.claim_loads(1, [lease.id]) == ["refused"]
    for rank in (0, 2):
        assert cache.claim_loads(rank, [lease.id]) == ["claimed"]
    assert cache.unclaimed([lease.id]) == []
    for rank in (0, 0, 1):
        cache.complete(rank, [lease.id])
    assert cache.alloc("other", 1) is None, "rank 2 still reads"
    cache.complete(2, [lease.id], ok=False)
    assert cache.alloc("other", 1) is not None


def test_row_sizes_are_learned_per_modality(make_cache: Make) -> None:
    cache = make_cache(16)
    guess = {"rows": 2, "row_bytes": ROW, "modality": "image"}
    save = cache.begin_save("a", **guess)  # type: ignore[arg-type]
    assert not isinstance(save, str)
    assert cache.claim_saves(0, [(save.id, (2, 3 * ROW), "uint8")]) == ["too_large"]
    better = cache.begin_save("a", **guess)  # type: ignore[arg-type]
    other = cache.begin_save("b", **(guess | {"modality": "audio"}))  # type: ignore[arg-type]
    assert not isinstance(better, str)
    assert not isinstance(other, str)
    assert (better.num_blocks, other.num_blocks) == (6, 2)


def test_completion_by_steps_needs_no_word_from_workers(make_cache: Make) -> None:
    cache = make_cache(2)
    save = begin(cache, "k")
    assert claim(cache, save) == "claimed"
    cache.finish_saves([save.id])
    lease = cache.lease("k")
    assert lease is not None
    cache.dispatch_loads([lease.id], ranks=1)
    cache.finish_loads([lease.id])
    cache.complete(0, [save.id, lease.id])
    assert cache.contains("k")
    assert is_whole(cache)


def test_ids_never_repeat(make_cache: Make) -> None:
    cache = make_cache(1)
    seen = set()
    for _ in range(200):
        save = begin(cache, "k")
        seen.add(save.id)
        cache.withdraw([save.id])
    assert len(seen) == 200
    assert min(seen) > 0


def test_counters_and_stats_have_the_names_that_tools_know(make_cache: Make) -> None:
    cache = make_cache(2)
    store(cache, "k")
    cache.lease("k")
    cache.lease("missing")
    counters = cache.counters()
    assert (counters["hits"], counters["misses"], counters["hit_bytes"]) == (1, 1, ROW)
    assert (counters["saves"], counters["saved_bytes"], counters["saves_completed"]) == (1, ROW, 1)
    assert {
        "num_blocks",
        "free_blocks",
        "evictable_blocks",
        "holds",
        "orphaned",
    } <= cache.stats().keys()


def test_errors_leave_everything_as_it_was(make_cache: Make) -> None:
    cache = make_cache(2)
    fill(cache, ["a"])
    before = cache.stats()
    for call in (cache.unpin, cache.mark_ready, cache.discard):
        with pytest.raises(EntryStateError):
            call("a")
    for call in (cache.pin, cache.unpin, cache.mark_ready, cache.discard):
        with pytest.raises(KeyNotFoundError):
            call("b")
    assert cache.stats() == before
    assert cache.check() == []
