"""A region from open to close: lifetimes, views, buffers, who is told what."""

from __future__ import annotations

import gc
import os
import stat
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from core.helpers import begin, claim, is_whole, store

from ecpool import (
    ClosedError,
    EmbeddingCache,
    InvalidArgumentError,
    Region,
    RegionError,
    RegionFormatError,
)

Open = Callable[..., Region]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*"))


def test_its_numbers_agree(open_region: Open) -> None:
    region = open_region(capacity=5 << 20, block_size=8192, slots=77, segment_size=2 << 20)
    assert (region.name, region.created, region.closed) == ("pool", True, False)
    assert region.num_blocks == 640
    assert region.num_slots == 77
    assert region.nbytes == 640 * 8192 == sum(length for _, length in region.segments())
    assert region.segments() == [(0, 2 << 20), (2 << 20, 2 << 20), (4 << 20, 1 << 20)]
    assert region.file_nbytes == os.stat(region.path).st_size
    assert region.data_ptr % (2 << 20) == 0
    assert "pool" in repr(region)
    assert "640" in repr(region)


def test_only_its_user_can_use_the_files(open_region: Open, pools: Path) -> None:
    open_region()
    assert stat.S_IMODE(pools.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in pools.iterdir()} == {0o600}


@pytest.mark.parametrize("lifetime", ["shared", "persistent", "private"])
def test_when_the_file_goes(open_region: Open, pools: Path, lifetime: str) -> None:
    expected = {"expected_clients": 2} if lifetime == "private" else {}
    first = open_region(lifetime=lifetime, **expected)
    assert names(pools) != []
    second = open_region(lifetime=lifetime, **expected)
    assert second.created is False
    assert (names(pools) == []) == (lifetime == "private")
    first.close()
    assert (names(pools) == []) == (lifetime == "private")
    second.close()
    assert (names(pools) == []) == (lifetime != "persistent")


def test_a_private_region_of_one_client_has_no_name_at_once(open_region: Open, pools: Path) -> None:
    region = open_region(lifetime="private", expected_clients=1)
    assert names(pools) == []
    store(EmbeddingCache(region=region), "k")
    with pytest.raises(RegionError):
        Region.attach("pool", directory=str(pools))


def test_what_is_persistent_is_served_to_the_next(open_region: Open) -> None:
    with open_region(lifetime="persistent") as region:
        cache = EmbeddingCache(region=region)
        save = begin(cache, "k", rows=2)
        assert claim(cache, save, rows=2) == "claimed"
        region.write(save.extents, b"e" * 8192)
        cache.complete(0, [save.id])
        begin(cache, "unfinished")
    with open_region(lifetime="persistent") as region:
        assert region.created is False
        cache = EmbeddingCache(region=region)
        lease = cache.lease("k", rows=2, dtype="uint8")
        assert lease is not None
        assert cache.lease("unfinished") is None
        found = bytearray(lease.nbytes)
        region.read(lease.extents, found)
        assert found == b"e" * 8192


def test_attach_takes_whatever_is_there(open_region: Open, pools: Path) -> None:
    region = open_region(capacity=3 << 20)
    with Region.attach("pool", directory=str(pools)) as tool:
        assert (tool.nbytes, tool.created) == (3 << 20, False)
        assert tool.client != region.client
        roles = [client["role"] for client in region.status()["clients"]]
        assert sorted(roles) == ["pool", "tool"]
    assert [client["role"] for client in region.status()["clients"]] == ["pool"]


def test_two_clients_in_one_process_are_two(open_region: Open) -> None:
    one, other = open_region(role="scheduler", group="e"), open_region(role="worker", group="e")
    mine, theirs = EmbeddingCache(region=one), EmbeddingCache(region=other)
    store(mine, "k")
    theirs.pin("k")
    with pytest.raises(Exception, match="not pinned by this client"):
        mine.unpin("k")
    memoryview(one)[:4] = b"same"
    assert bytes(memoryview(other)[:4]) == b"same"
    other.close()
    assert is_whole(mine)


CALLS: dict[str, Callable[[Region, EmbeddingCache], object]] = {
    "populate": lambda r, c: r.populate(),
    "collapse_huge_pages": lambda r, c: r.collapse_huge_pages(),
    "write": lambda r, c: r.write([(0, 1)], b"x"),
    "read": lambda r, c: r.read([(0, 1)], bytearray(1)),
    "checksum": lambda r, c: r.checksum([(0, 1)], 1),
    "status": lambda r, c: r.status(),
    "check": lambda r, c: r.check(),
    "reclaim": lambda r, c: r.reclaim(),
    "new cache": lambda r, c: EmbeddingCache(region=r),
    "get": lambda r, c: c.get("k"),
    "alloc": lambda r, c: c.alloc("k", 1),
    "mark_ready": lambda r, c: c.mark_ready("k"),
    "pin": lambda r, c: c.pin("k"),
    "unpin": lambda r, c: c.unpin("k"),
    "discard": lambda r, c: c.discard("k"),
    "contains": lambda r, c: c.contains("k"),
    "has_held_entries": lambda r, c: c.has_held_entries(),
    "lease": lambda r, c: c.lease("k"),
    "end_leases": lambda r, c: c.end_leases([1]),
    "dispatch_loads": lambda r, c: c.dispatch_loads([1], ranks=1),
    "begin_save": lambda r, c: c.begin_save("k", rows=1, row_bytes=1),
    "claim_loads": lambda r, c: c.claim_loads(0, [1]),
    "claim_saves": lambda r, c: c.claim_saves(0, [(1, (1,), "uint8")]),
    "complete": lambda r, c: c.complete(0, [1]),
    "set_checksums": lambda r, c: c.set_checksums([(1, 1)]),
    "confirm": lambda r, c: c.confirm(1, fits=True),
    "is_written_elsewhere": lambda r, c: c.is_written_elsewhere("k"),
    "withdraw": lambda r, c: c.withdraw([1]),
    "close_unclaimed": lambda r, c: c.close_unclaimed([1]),
    "unclaimed": lambda r, c: c.unclaimed([1]),
    "finish_saves": lambda r, c: c.finish_saves([1]),
    "finish_loads": lambda r, c: c.finish_loads([1]),
    "flush": lambda r, c: c.flush(),
    "stats": lambda r, c: c.stats(),
    "cache check": lambda r, c: c.check(),
}
# What needs neither the region's lock nor its data.
STILL_ALLOWED = {"counters", "close", "segments"}


def test_the_table_of_calls_is_complete() -> None:
    public = {
        name
        for owner in (Region, EmbeddingCache)
        for name, member in vars(owner).items()
        if not name.startswith("_") and callable(member) and name not in ("open", "attach")
    }
    assert public - STILL_ALLOWED <= CALLS.keys()


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_region_says_so_and_closing_again_is_harmless(
    open_region: Open, call: str
) -> None:
    region = open_region()
    cache = EmbeddingCache(region=region)
    region.close()
    region.close()
    assert region.closed
    with pytest.raises(ClosedError, match="closed"):
        CALLS[call](region, cache)
    assert region.nbytes == 1 << 20
    assert region.segments()
    assert region.counters()


def test_an_entry_of_a_closed_region_says_so(open_region: Open) -> None:
    region = open_region()
    entry = EmbeddingCache(region=region).alloc("k", 2)
    assert entry is not None
    region.close()
    assert len(entry.block_ids) == 2
    with pytest.raises(ClosedError):
        _ = entry.ready


def test_a_view_keeps_the_mapping(open_region: Open) -> None:
    region = Region.open(
        "viewed", capacity=1 << 20, block_size=4096, directory=open_region().path.rsplit("/", 1)[0]
    )
    view = memoryview(region)
    view[:5] = b"hello"
    region.close()
    gone = weakref.ref(region)
    del region
    gc.collect()
    assert gone() is not None, "the view keeps its owner"
    assert bytes(view[:5]) == b"hello"
    view[-1] = 7
    assert view[-1] == 7
    view.release()
    gc.collect()
    assert gone() is None


def test_its_buffer_is_the_data(open_region: Open) -> None:
    region = open_region()
    view = memoryview(region)
    assert (view.nbytes, view.format, view.readonly, view.ndim) == (region.nbytes, "B", False, 1)
    region.write([(3, 1), (1, 1)], bytes(range(256)) * 20)
    assert bytes(view[3 * 4096 : 4 * 4096]) == bytes(range(256)) * 16
    assert bytes(view[4096 : 4096 + 1024]) == bytes(range(256)) * 4
    assert bytes(view[4096 + 1024 : 2 * 4096]) == bytes(3072)
    out = bytearray(5120)
    region.read([(3, 1), (1, 1)], out)
    assert out == bytes(range(256)) * 20


def test_a_region_without_a_name_left_is_closed_when_forgotten(pools: Path) -> None:
    Region.open("pool", capacity=1 << 20, block_size=4096, directory=str(pools))
    gc.collect()
    assert names(pools) == []


def test_a_context_closes_also_in_an_exception(open_region: Open) -> None:
    with pytest.raises(RuntimeError, match="mine"), open_region() as region:
        raise RuntimeError("mine")
    assert region.closed


def test_what_progress_raises_ends_the_call_and_leaves_nothing(pools: Path) -> None:
    def stop(phase: str, done: int, total: int) -> None:
        raise LookupError(phase)

    with pytest.raises(LookupError, match="reserving"):
        Region.open("pool", capacity=1 << 20, block_size=4096, directory=str(pools), progress=stop)
    assert names(pools) == []


def test_progress_is_told(open_region: Open) -> None:
    heard: list[tuple[str, int, int]] = []
    region = open_region(progress=lambda *args: heard.append(args))
    assert region.populate(progress=lambda *args: heard.append(args)) >= region.nbytes
    phases = [phase for phase, _, _ in heard]
    assert "reserving" in phases
    assert "populating" in phases
    assert all(0 <= done <= total for phase, done, total in heard if phase != "waiting")
    assert bytes(memoryview(region)) == bytes(region.nbytes)


def _bad_files() -> dict[str, bytes]:
    return {
        "empty": b"",
        "short": b"ecpool\0\x01" + bytes(50),
        "zeros": bytes(8192),
        "rubbish": bytes(range(256)) * 64,
        "text": b"hello world\n" * 1000,
    }


@pytest.mark.parametrize("kind", _bad_files())
def test_what_is_no_region_is_refused_by_attach_and_replaced_by_open(
    open_region: Open, pools: Path, kind: str
) -> None:
    with open_region() as region:
        path = Path(region.path)
    pools.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(_bad_files()[kind])
    path.chmod(0o600)
    with pytest.raises(RegionFormatError, match="not a usable ecpool region"):
        Region.attach("pool", directory=str(pools))
    region = open_region()
    assert region.created
    assert EmbeddingCache(region=region).check() == []


def test_a_file_that_others_may_use_is_refused(open_region: Open, pools: Path) -> None:
    with open_region(lifetime="persistent") as region:
        path = Path(region.path)
    path.chmod(0o666)
    with pytest.raises(RegionError, match="others may use it"):
        open_region(lifetime="persistent")


def test_a_link_is_not_followed(open_region: Open, pools: Path, tmp_path: Path) -> None:
    with open_region() as region:
        path = Path(region.path)
    pools.mkdir(mode=0o700, exist_ok=True)
    (tmp_path / "victim").write_bytes(b"precious")
    path.symlink_to(tmp_path / "victim")
    with pytest.raises(RegionError, match="symbolic link"):
        open_region()
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_a_region_in_use_is_not_taken_for_another_lifetime(open_region: Open) -> None:
    open_region()
    with pytest.raises(InvalidArgumentError, match=r"shared.*persistent"):
        open_region(lifetime="persistent")
