"""Joining a region that other engines use, and saying clearly why that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ecpool.errors import EcpoolError, InvalidArgumentError
from ecpool.sizes import format_size
from ecpool.vllm.config import PoolConfig
from ecpool.vllm.identity import Identity, group_prefix

if TYPE_CHECKING:
    from ecpool import Region


def join(open_one: Callable[..., Region], config: PoolConfig, identity: Identity) -> Region:
    """Create or attach the shared region. ``open_one(lifetime=...)`` is `Region.open`.

    Raises InvalidArgumentError if it has another geometry or lifetime than asked for, or if an
    engine uses it whose encoder outputs are not interchangeable and ``on_mismatch`` is "error"; and
    what `Region.open` raises.
    """
    try:
        region = open_one(lifetime="persistent" if config.persist else "shared")
    except InvalidArgumentError as error:
        there = _what_is_there(config)
        if there is None:
            raise
        raise InvalidArgumentError(
            f"pool {config.pool!r} cannot be joined: {error} ({there}). All engines of a pool need "
            "the same capacity, block_size, slots and persist: change the settings, or give "
            "another name"
        ) from error
    if config.on_mismatch == "error":
        try:
            _check_others(region, config, identity)
        except BaseException:
            region.close()
            raise
    return region


def _what_is_there(config: PoolConfig) -> str | None:
    """Both sides in the words of the settings; None if there is no such pool."""
    from ecpool import Region
    from ecpool._native import scan_regions

    assert config.pool is not None
    try:
        found = {each["name"]: each for each in scan_regions(config.directory)}[config.pool]
        with Region.attach(config.pool, role="tool", directory=config.directory) as region:
            there = f"{format_size(region.nbytes)} in blocks of {format_size(region.block_size)}"
    except (EcpoolError, KeyError):
        return None
    asked = f"{format_size(config.capacity)} in blocks of {format_size(config.block_size)}"
    text = f"it has {there}, this engine asks for {asked}"
    if found["state"] == "idle":
        text += f"; nobody uses it now, and `ecpool clean --pool {config.pool}` removes it"
    return text


def _check_others(region: Region, config: PoolConfig, identity: Identity) -> None:
    """Refuse to be the second of two engines that are not interchangeable."""
    status = region.status()
    engines = [each for each in status["clients"] if each["live"] and each["group"].startswith("[")]
    mine = [each["group"].startswith(group_prefix(identity.kind)) for each in engines]
    # Of two that come at once one must stay: whoever attached first, then by place in the list.
    order = [(each["attached_at"], number) for number, each in enumerate(engines)]
    myself = min(
        place for place, each in zip(order, engines, strict=True) if _is_of(each, identity)
    )
    for place, other, is_mine in zip(order, engines, mine, strict=True):
        if not is_mine and place < myself:
            raise InvalidArgumentError(_not_interchangeable(status, other, config, identity))


def _is_of(client: dict[str, Any], identity: Identity) -> bool:
    """Whether the client is one of this engine's own. Of a group only its beginning is kept."""
    return bool(client["group"]) and identity.group.startswith(client["group"])


def _not_interchangeable(
    status: dict[str, Any], other: dict[str, Any], config: PoolConfig, identity: Identity
) -> str:
    kind = other["group"].split("]")[0]  # with its bracket
    titles = [each["name"].split("\n")[0] for each in status["namespaces"]]
    theirs = next((title for title in titles if kind in title), "another one")
    return (
        f"pool {config.pool!r} is in use by an engine of {theirs}, and this one is of "
        f"{identity.title}: their encoder outputs are not interchangeable (model, revision, dtype, "
        "quantization, overrides, adapters or vLLM's version differ). Make them alike, give "
        'another pool, or set "on_mismatch": "separate" to keep them apart in one region'
    )
