"""Opening the region of an engine, from whichever of its processes comes first."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Literal

from ecpool.sizes import format_size
from ecpool.vllm.config import PoolConfig, world_size
from ecpool.vllm.identity import Identity
from ecpool.vllm.log import get_logger

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
    """Create or attach this engine's private region, as one more client of it.

    Workers come before their scheduler, so nobody waits for anybody. Raises what `Region.open`
    raises.
    """
    from ecpool import Region

    region = Region.open(
        identity.region,
        capacity=config.capacity,
        block_size=config.block_size,
        slots=config.slots,
        lifetime="private",
        role=role,
        group=identity.group,
        rank=rank,
        expected_clients=world_size(vllm_config.parallel_config) + 1,
        directory=config.directory,
        progress=Progress(),
    )
    if region.created:
        logger.info(
            "ecpool: a pool of %s (%d blocks of %s) is at %s",
            format_size(region.nbytes),
            region.num_blocks,
            format_size(region.block_size),
            region.path,
        )
        _fill(region, config)
    return region


def open_cache(region: Region, config: PoolConfig, identity: Identity) -> EmbeddingCache:
    """This client's view of the entries that its encoder may use."""
    from ecpool import EmbeddingCache

    return EmbeddingCache(region=region, namespace=identity.namespace, deadline=config.deadline)


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
