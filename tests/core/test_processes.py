"""Real processes: forks, deaths, and a holder of the lock that is stopped and not dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from core.helpers import ROW, begin, claim, fill, is_whole, store
from core.processes import Child, stopped_under_the_lock

from ecpool import EmbeddingCache, PoolBusyError, Region

Open = Callable[..., Region]

FORK = """
from core.test_region import CALLS
region = open_region(group="parent")
cache = EmbeddingCache(region=region)
cache.alloc("k", 1)
entry = cache.get("k")
view = memoryview(region)
pid = os.fork()
if pid == 0:
    wrong = []
    for name, call in CALLS.items():
        try:
            call(region, cache)
        except ClosedError as error:
            if "fork" not in str(error):
                wrong.append((name, str(error)))
        else:
            wrong.append(name)
    for attribute in ("ready", "evictable"):
        try:
            getattr(entry, attribute)
            wrong.append(attribute)
        except ClosedError:
            pass
    if not region.closed:
        wrong.append("closed")
    # Allowed, because they touch nothing that is shared with the parent's place.
    _ = (region.nbytes, region.segments(), region.name, entry.block_ids, view[0])
    region.close()
    del view
    if wrong:
        print(wrong, file=sys.stderr)
    sys.exit(1 if wrong else 0)  # an orderly end, with every destructor
_, status = os.waitpid(pid, 0)
say(status)
cache.mark_ready("k")
say(cache.contains("k"))
listen()
"""


def test_a_forked_child_is_refused_everything_and_leaves_without_harm(
    open_region: Open, pools: Path
) -> None:
    with Child(pools, FORK) as parent:
        assert parent.hear() == "0"
        assert parent.hear() == "True"
        other = open_region()
        assert other.created is False, "the file is still there"
        assert other.reclaim()["died"] == 0, "the parent still counts as alive"
        assert [c["group"] for c in other.status()["clients"] if c["group"]] == ["parent"]
        parent.tell()
        assert parent.end() == 0
        assert len(other.status()["clients"]) == 1


def test_a_child_that_lives_on_does_not_keep_its_dead_parent_alive(
    open_region: Open, pools: Path
) -> None:
    code = """
region = open_region()
cache = EmbeddingCache(region=region)
cache.alloc("k", 1)
cache.mark_ready("k")
cache.pin("k")
if os.fork() == 0:
    listen()
    os._exit(0)
say("forked")
time.sleep(600)
"""
    watcher = open_region()
    with Child(pools, code) as parent:
        assert parent.hear() == "forked"
        assert watcher.status()["holds"] == 1
        parent.process.kill()
        deadline = time.monotonic() + 10
        while watcher.reclaim()["died"] == 0:
            assert time.monotonic() < deadline, "its child keeps it alive"
            time.sleep(0.01)
    assert watcher.status()["holds"] == 0


def test_a_forked_child_can_open_the_region_anew(open_region: Open, pools: Path) -> None:
    code = """
region = open_region()
cache = EmbeddingCache(region=region)
pid = os.fork()
if pid == 0:
    with open_region() as mine:
        own = EmbeddingCache(region=mine)
        own.alloc("k", 1)
        own.mark_ready("k")
    sys.exit(0)
_, status = os.waitpid(pid, 0)
say(status, cache.contains("k"), cache.check())
"""
    with Child(pools, code) as child:
        assert child.hear() == "0 True []"
        assert child.end() == 0


KILLED = """
region = open_region(group="engine")
cache = EmbeddingCache(region=region)
cache.lease("leased"); cache.pin("pinned")
cache.alloc("allocated", 1)
cache.begin_save("announced", rows=1, row_bytes=4096)
say("holding")
time.sleep(600)
"""


def test_what_a_killed_client_held_comes_back(open_region: Open, pools: Path) -> None:
    region = open_region(capacity=4 * ROW)
    cache = EmbeddingCache(region=region)
    store(cache, "leased")
    store(cache, "pinned")
    with Child(pools, KILLED.replace("open_region(", "open_region(capacity=4 * 4096, ")) as child:
        assert child.hear() == "holding"
        assert cache.alloc("no room", 1) is None
        child.kill()
    # At once what nobody else can be using: leases, pins, saves that nobody has claimed.
    time.sleep(0.15)
    assert cache.alloc("now", 3) is not None
    assert cache.stats()["orphaned"] == 1, "it may still be written to"
    assert cache.alloc("more", 1) is None
    deadline = time.monotonic() + 30
    while cache.alloc("more", 1) is None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    cache.discard("now")
    cache.discard("more")
    assert is_whole(cache)
    assert cache.stats()["free_blocks"] == 4


def test_a_stopped_holder_costs_misses_and_nothing_that_is_given_back(
    open_region: Open, pools: Path
) -> None:
    region = open_region(slots=60_000)
    cache = EmbeddingCache(region=region)
    store(cache, "ready")
    lease, load = cache.lease("ready"), cache.lease("ready")
    save, unclaimed, dropped = (
        begin(cache, "save"),
        begin(cache, "unclaimed"),
        begin(cache, "dropped"),
    )
    assert lease is not None
    assert load is not None
    assert claim(cache, save) == "claimed"
    fill(cache, ["pinned"])
    cache.pin("pinned")
    cache.alloc("filled", 1)
    cache.alloc("given up", 1)
    with stopped_under_the_lock(pools) as child:
        before = cache.counters()
        begun = time.monotonic()
        assert cache.lease("ready") is None
        assert cache.contains("ready") is False
        assert cache.begin_save("new", rows=1, row_bytes=ROW) == "busy"
        assert cache.claim_saves(0, [(unclaimed.id, (1, ROW), "uint8")]) == ["busy"]
        assert cache.unclaimed([save.id, unclaimed.id]) == [save.id, unclaimed.id]
        for call in (
            lambda: cache.get("ready"),
            lambda: cache.alloc("new", 1),
            lambda: cache.pin("ready"),
        ):
            with pytest.raises(PoolBusyError, match="not free within"):
                call()
        # What gives back, and what a promise needs: never refused, never lost.
        cache.dispatch_loads([load.id], ranks=1)
        assert cache.claim_loads(0, [load.id]) == ["claimed"]
        cache.complete(0, [load.id, save.id])
        cache.end_leases([lease.id])
        cache.withdraw([dropped.id])
        cache.unpin("pinned")
        cache.mark_ready("filled")
        cache.discard("given up")
        elapsed = time.monotonic() - begun
        after = cache.counters()
        assert after["deferred"] - before["deferred"] == 9
        assert after["lock_timeouts"] > before["lock_timeouts"]
        # The first waits its 20 ms, the others hardly at all while the holder is stuck.
        assert elapsed < 5, elapsed
        child.go_on()
        child.kill()
    assert cache.contains("ready")
    assert [key for key in ("save", "filled") if not cache.contains(key)] == []
    assert cache.get("given up") is None
    assert cache.get("dropped") is None
    assert cache.close_unclaimed([unclaimed.id]) == []
    assert cache.counters()["loads_completed"] == before["loads_completed"] + 1
    assert is_whole(cache)


def test_other_threads_run_while_one_waits_for_the_lock(open_region: Open, pools: Path) -> None:
    region = open_region(slots=60_000)
    patient = EmbeddingCache(region=region, deadline=1.0)
    with stopped_under_the_lock(pools):
        done = threading.Event()

        def wait() -> None:
            with pytest.raises(PoolBusyError):
                patient.get("k")
            done.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        turns = 0
        while not done.is_set():
            turns += 1
            time.sleep(0)
        waiter.join()
    assert turns > 1000, f"only {turns} turns within a second: the waiter kept the interpreter"


def test_a_holder_that_is_killed_delays_nobody(open_region: Open, pools: Path) -> None:
    region = open_region(slots=60_000)
    cache = EmbeddingCache(region=region)
    store(cache, "k")
    with stopped_under_the_lock(pools) as child:
        assert not cache.contains("k")
        child.kill()
        begun = time.monotonic()
        assert cache.contains("k"), "taken over from the dead"
        assert time.monotonic() - begun < 2
    assert cache.counters()["rebuilds"] == 1
    assert is_whole(cache)


def test_a_region_opened_while_its_lock_is_stuck_says_so(open_region: Open, pools: Path) -> None:
    open_region(slots=60_000)
    with stopped_under_the_lock(pools):
        begun = time.monotonic()
        with pytest.raises(PoolBusyError):
            Region.attach("pool", directory=str(pools))
        assert time.monotonic() - begun < 20
