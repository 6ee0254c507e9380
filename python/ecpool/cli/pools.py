"""What is known of a user's pools, and what can be done to them; free of any output."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ecpool._native import (
    LAYOUT_VERSION,
    EmbeddingCache,
    Region,
    remove_dead_regions,
    remove_region,
    scan_regions,
)
from ecpool.errors import EcpoolError, InvalidArgumentError, RegionError

# Blocks of the dead are taken back this long after their engine's last process has gone.
QUARANTINE = 2.0
_MARGIN = 0.2


@dataclass(frozen=True, slots=True)
class Contents:
    """What lies in a pool, in blocks of ``block_size`` bytes.

    clients and namespaces are as `Region.status` tells them, without this program itself; counters
    are those of all clients that ever were, and sums the rest of `Region.status`.
    """

    block_size: int
    sums: dict[str, int]
    clients: list[dict[str, Any]]
    namespaces: list[dict[str, Any]]
    counters: dict[str, int]

    @property
    def capacity(self) -> int:
        """Bytes of data."""
        return self.sums["num_blocks"] * self.block_size

    @property
    def used(self) -> int:
        """Bytes in blocks that belong to entries."""
        return (self.sums["num_blocks"] - self.sums["free_blocks"]) * self.block_size


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool that was found. ``contents`` is None where it cannot be looked into; ``problem`` then
    says why."""

    name: str
    state: str
    lifetime: str | None
    layout: int
    path: str
    bytes: int
    contents: Contents | None
    problem: str | None

    def as_json(self) -> dict[str, Any]:
        """Plain values, for machines."""
        return asdict(self)


def find_pools(directory: str | None) -> list[Pool]:
    """Every pool in the directory (default: the user's own), looked into where that can be."""
    return [_look_into(found, directory) for found in scan_regions(directory)]


def find_pool(name: str, directory: str | None) -> Pool:
    """The pool of this name. Raises RegionError, naming those that there are."""
    found = scan_regions(directory)
    for each in found:
        if each["name"] == name:
            return _look_into(each, directory)
    raise _no_such_pool(name, [each["name"] for each in found])


def _no_such_pool(name: str, names: list[str]) -> RegionError:
    known = f"there are: {', '.join(sorted(names))}" if names else "there is none at all"
    return RegionError(f"no pool is called {name!r} ({known})")


def _look_into(found: dict[str, Any], directory: str | None) -> Pool:
    contents, problem = None, _why_closed(found)
    if problem is None:
        try:
            contents = _contents(found["name"], directory)
        except EcpoolError as error:
            problem = str(error)
    return Pool(
        name=found["name"],
        state=found["state"],
        lifetime=found["lifetime"],
        layout=found["layout"],
        path=found["path"],
        bytes=found["bytes"],
        contents=contents,
        problem=problem,
    )


def _why_closed(found: dict[str, Any]) -> str | None:
    if found["layout"] != LAYOUT_VERSION:
        return f"made by another version of ecpool (layout {found['layout']}, not {LAYOUT_VERSION})"
    if found["state"] == "busy":
        return "somebody is creating, joining or leaving it at this moment"
    if found["state"] == "dead":
        return "its users are dead; `ecpool clean` or the next engine removes it"
    return None


def _contents(name: str, directory: str | None) -> Contents:
    with Region.attach(name, role="tool", directory=directory) as region:
        status = region.status()
        clients = [each for each in status.pop("clients") if each["place"] != region.client]
        return Contents(
            block_size=region.block_size,
            clients=clients,
            namespaces=status.pop("namespaces"),
            sums=status,
            counters=region.counters(),
        )


@dataclass(slots=True)
class Reclaimed:
    """dead: clients that were found dead. waiting: the dead of which something must stay, since
    their engine's other processes may still write it."""

    dead: int = 0
    waiting: int = 0


@dataclass(slots=True)
class Cleaned:
    """removed: names of pools whose files went, or would go. reclaimed: what dead clients had left
    in the others. problems: what could not be done, and why."""

    removed: list[str] = field(default_factory=list)
    reclaimed: dict[str, Reclaimed] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def clean(
    directory: str | None, *, dry_run: bool, sleep: Callable[[float], object] = time.sleep
) -> Cleaned:
    """Remove pools whose users are all dead, and take back what dead clients left in the others.

    Persistent pools stay. Waits for the quarantine once where something is in it. A dry run
    attaches to nothing, so it tells only what would be removed.
    """
    cleaned = Cleaned()
    if dry_run:
        cleaned.removed = [each["name"] for each in scan_regions(directory) if _is_dead(each)]
        return cleaned
    cleaned.removed = remove_dead_regions(directory)
    names = [each["name"] for each in scan_regions(directory) if _why_closed(each) is None]
    for name in names:
        _reclaim(name, directory, cleaned)
    waiting = [name for name, done in cleaned.reclaimed.items() if done.waiting]
    if waiting:
        sleep(QUARANTINE + _MARGIN)
        for name in waiting:
            _reclaim(name, directory, cleaned)
    return cleaned


def _is_dead(found: dict[str, Any]) -> bool:
    return bool(found["state"] == "dead" and found["lifetime"] != "persistent")


def _reclaim(name: str, directory: str | None, cleaned: Cleaned) -> None:
    reclaimed = cleaned.reclaimed.setdefault(name, Reclaimed())
    try:
        with Region.attach(name, role="tool", directory=directory) as region:
            reclaimed.waiting = region.reclaim()["waiting"]
            # Attaching reclaims as well, and this client has counted both.
            reclaimed.dead += EmbeddingCache(region=region).counters()["dead_clients"]
    except EcpoolError as error:
        cleaned.problems[name] = str(error)


def remove(name: str, directory: str | None, *, dry_run: bool) -> None:
    """Remove one pool that nobody uses, persistent or not.

    Raises RegionError if there is none of this name, InvalidArgumentError if somebody uses it.
    """
    found = [each for each in scan_regions(directory) if each["name"] == name]
    if not found:
        raise _no_such_pool(name, [each["name"] for each in scan_regions(directory)])
    for each in found:
        if each["state"] in ("alive", "busy"):
            users = f"{each['clients']} clients use it" if each["clients"] else "it is in use"
            raise InvalidArgumentError(
                f"pool {name!r} cannot be removed: {users}; end the engines first"
            )
    if not dry_run:
        remove_region(name, directory)


def flush(
    name: str, directory: str | None, *, namespace: str | None, dry_run: bool = False
) -> list[tuple[str, int]]:
    """Make what a pool's namespaces hold unfindable, in all processes at once.

    namespace: the beginning of their names, or the eight characters in brackets at the end of an
    engine's; None for all. Returns (name, entries dropped) of each, for a dry run the entries that
    there are. Raises RegionError for an unknown pool, InvalidArgumentError where no namespace fits.
    """
    pool = find_pool(name, directory)
    if pool.contents is None:
        raise RegionError(f"pool {name!r} cannot be flushed: {pool.problem}")
    entries = {each["name"]: each["entries"] for each in pool.contents.namespaces}
    chosen = [each for each in entries if namespace is None or _fits(each, namespace)]
    if not chosen and namespace is not None:
        known = ", ".join(repr(title(each)) for each in entries) or "none yet"
        raise InvalidArgumentError(
            f"no namespace of pool {name!r} begins with {namespace!r} (there are: {known})"
        )
    if dry_run:
        return [(each, entries[each]) for each in chosen]
    with Region.attach(name, role="tool", directory=directory) as region:
        if namespace is None:
            return region.flush()
        return [flushed for each in chosen for flushed in region.flush(each)]


def _fits(name: str, wanted: str) -> bool:
    if not wanted:
        return not name
    return name.startswith(wanted) or title(name).endswith(f"[{wanted}]")


def title(namespace: str) -> str:
    """The readable part of a namespace's name."""
    return namespace.split("\n", 1)[0]
