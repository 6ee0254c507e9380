"""Files with bytes that nobody wrote on purpose: an error or a usable pool, and never a hang."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from core.helpers import ROW, store

from ecpool import EcpoolError, EmbeddingCache, Region, RegionFormatError

CASES = 120
# Header, shared words and index of a region as small as the one below.
REACH = 200_000


@pytest.fixture
def sound(open_region: Callable[..., Region]) -> tuple[Path, bytes]:
    """A persistent region's file with some entries, and its bytes."""
    with open_region(capacity=24 * ROW, slots=6, lifetime="persistent") as region:
        cache = EmbeddingCache(region=region)
        for key, rows in (("a", 3), ("b", 9), ("c", 1)):
            store(cache, key, rows)
        path = Path(region.path)
    return path, path.read_bytes()


def _use(region: Region) -> None:
    cache = EmbeddingCache(region=region, deadline=1)
    for key in "abcd":
        lease = cache.lease(key)
        if lease is not None:
            for first, count in lease.extents:
                assert first in range(region.num_blocks)
                assert count in range(1, region.num_blocks - first + 1)
            cache.dispatch_loads([lease.id], ranks=1)
            cache.claim_loads(0, [lease.id])
            cache.complete(0, [lease.id])
        cache.begin_save(key, rows=2, row_bytes=ROW)
        cache.contains(key)
    for owner in (cache.stats, cache.check, region.status, region.reclaim, region.counters):
        owner()
    cache.flush()


def _damaged(rng: random.Random, sound: bytes) -> bytes:
    damaged = bytearray(sound)
    for _ in range(rng.choice([1, 1, 3, 30])):
        at = rng.randrange(rng.choice([256, 8192 + 4096, REACH]))
        at -= at % 4
        word = rng.choice(
            [rng.randrange(8), rng.getrandbits(32), 2**32 - 1, 1 << rng.randrange(32)]
        )
        damaged[at : at + 4] = word.to_bytes(4, "little")
    if rng.random() < 0.1:
        del damaged[rng.randrange(len(damaged)) :]
    return bytes(damaged)


def test_changed_words(sound: tuple[Path, bytes], pools: Path) -> None:
    path, content = sound
    attached = refused = 0
    for seed in range(CASES):
        path.write_bytes(_damaged(random.Random(seed), content))
        begun = time.monotonic()
        try:
            with Region.attach("pool", directory=str(pools)) as region:
                attached += 1
                try:
                    _use(region)
                except EcpoolError as error:
                    pytest.fail(f"seed {seed}: an attached pool cannot be used: {error!r}")
        except RegionFormatError:
            refused += 1
        assert time.monotonic() - begun < 20, f"seed {seed}"
    assert attached > CASES / 4
    assert refused > 5


def test_random_bytes(sound: tuple[Path, bytes], pools: Path) -> None:
    path, content = sound
    for seed in range(20):
        path.write_bytes(random.Random(seed).randbytes(len(content) // (1 + seed % 3)))
        with pytest.raises(RegionFormatError):
            Region.attach("pool", directory=str(pools))
    # A sound header before a random index: everything is dropped, and the pool goes on.
    for seed in range(20):
        path.write_bytes(
            content[:16384] + random.Random(seed).randbytes(REACH) + content[16384 + REACH :]
        )
        with Region.attach("pool", directory=str(pools)) as region:
            _use(region)
            _use(region)
