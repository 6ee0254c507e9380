"""Regions in a directory of their own, for tests of the native classes without torch."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ecpool import EmbeddingCache, Region

MIB = 1 << 20


@pytest.fixture
def pools() -> Iterator[Path]:
    """A directory on tmpfs that does not exist yet, as a user's own does not at first."""
    parent = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="ecpool-test-"))
    yield parent / "pools"
    shutil.rmtree(parent)


@pytest.fixture
def open_region(pools: Path) -> Iterator[Callable[..., Region]]:
    """`Region.open` with small defaults; what it opened is closed after the test."""
    opened: list[Region] = []

    def open_one(name: str = "pool", **settings: Any) -> Region:
        defaults = {"capacity": MIB, "block_size": 4096, "directory": str(pools)}
        opened.append(Region.open(name, **(defaults | settings)))
        return opened[-1]

    yield open_one
    for region in opened:
        region.close()


@pytest.fixture(params=["heap", "region"])
def make_cache(
    request: pytest.FixtureRequest, open_region: Callable[..., Region]
) -> Callable[[int], EmbeddingCache]:
    """An empty cache of so many blocks of 4 KiB, on the heap and in a region."""

    def make(num_blocks: int) -> EmbeddingCache:
        if request.param == "heap":
            return EmbeddingCache(num_blocks, block_size=4096)
        return EmbeddingCache(region=open_region(capacity=num_blocks * 4096))

    return make
