"""Short ways to say what many tests do."""

from __future__ import annotations

from collections.abc import Sequence

from ecpool import EmbeddingCache, Transfer

ROW = 4096
DTYPE = "uint8"


def begin(cache: EmbeddingCache, key: str, rows: int = 1, ranks: int = 1) -> Transfer:
    """A save that must begin."""
    save = cache.begin_save(key, rows=rows, row_bytes=ROW, ranks=ranks)
    assert not isinstance(save, str), save
    return save


def claim(cache: EmbeddingCache, save: Transfer, rows: int = 1, rank: int = 0) -> str:
    return cache.claim_saves(rank, [(save.id, (rows, ROW), DTYPE)])[0]


def store(cache: EmbeddingCache, key: str, rows: int = 1) -> Transfer:
    """A ready entry of `rows` rows of one block each."""
    save = begin(cache, key, rows)
    assert claim(cache, save, rows) == "claimed"
    cache.complete(0, [save.id])
    assert cache.contains(key)
    return save


def fill(cache: EmbeddingCache, keys: Sequence[str]) -> None:
    """Ready entries of one block each, without a shape, oldest first."""
    for key in keys:
        assert cache.alloc(key, 1) is not None
        cache.mark_ready(key)


def is_whole(cache: EmbeddingCache) -> bool:
    """Whether nothing is wrong and every block is free or could be."""
    stats = cache.stats()
    reachable = stats["free_blocks"] + stats["evictable_blocks"]
    return cache.check() == [] and reachable == stats["num_blocks"] and stats["holds"] == 0
