"""Opening the region of an engine, from whichever of its processes comes first."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ecpool.errors import PoolBusyError
from ecpool.sizes import format_size
from ecpool.vllm.config import PoolConfig, world_size
from ecpool.vllm.identity import Identity
from ecpool.vllm.log import get_logger
from ecpool.vllm.share import join

if TYPE_CHECKING:
    from ecpool import EmbeddingCache, Region

logger = get_logger("region")


def open_region(
    config: PoolConfig,
    identity: Identity,
    vllm_config: Any,
    *,
    role: Literal["scheduler", "worker"],
    rank: int = 0,
) -> Region:
    """Create or attach this engine's region, as one more client of it.

    Workers come before their scheduler, so nobody waits for anybody. Raises InvalidArgumentError
    for a shared region that is in use and does not fit, and what `Region.open` raises.
    """
    from ecpool import Region

    open_one = partial(
        Region.open,
        identity.region,
        capacity=config.capacity,
        block_size=config.block_size,
        slots=config.slots,
        role=role,
        group=identity.group,
        rank=rank,
        directory=config.directory,
        progress=Progress(),
    )
    if config.pool is None:
        expected = world_size(vllm_config.parallel_config) + 1
        region = open_one(lifetime="private", expected_clients=expected)
    else:
        region = join(open_one, config, identity)
    if region.created:
        logger.info(
            "ecpool: a pool of %s (%d blocks of %s) is at %s",
            format_size(region.nbytes),
            region.num_blocks,
            format_size(region.block_size),
            region.path,
        )
        _fill(region, config)
    elif config.pool is not None:
        logger.info("ecpool: joined pool %s, which holds %s", config.pool, _in_words(region))
    return region


def _in_words(region: Region) -> str:
    status = region.status()
    return f"{status['ready']} items from earlier, {status['free_blocks']} blocks are free"


def open_cache(region: Region, config: PoolConfig, identity: Identity) -> EmbeddingCache:
    """This client's view of the entries that its encoder may use."""
    from ecpool import EmbeddingCache

    cache = EmbeddingCache(region=region, namespace=identity.namespace, deadline=config.deadline)
    if config.pool is not None:
        # Any call makes the namespace known, so that tools and other engines see what this one is.
        with contextlib.suppress(PoolBusyError):
            cache.contains("")
    return cache


def _fill(region: Region, config: PoolConfig) -> None:
    if config.populate == "background":
        threading.Thread(
            target=_fill_quietly, args=(region, config), name="ecpool-populate", daemon=True
        ).start()
    else:
        _fill_now(region, config)


def _fill_quietly(region: Region, config: PoolConfig) -> None:
    try:
        _fill_now(region, config)
    except Exception as error:
        # Pages that were not touched now are touched when they are first used.
        logger.warning("ecpool: the pool's memory was not filled in advance: %s", error)


def _fill_now(region: Region, config: PoolConfig) -> None:
    if config.populate:
        region.populate(progress=Progress())
    if config.huge_pages:
        region.collapse_huge_pages(progress=Progress())


class Progress:
    """Logs how far a long wait has come, every few seconds; short ones stay silent."""

    def __init__(self, interval: float = 5.0) -> None:
        self._interval = interval
        self._next = time.monotonic() + interval

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._interval
        if total > 0:
            logger.info("ecpool: %s: %d%%", phase, 100 * done // total)
        else:
            logger.info("ecpool: %s ...", phase)
