"""What must be true when every process is gone: nothing leaked, nothing lies, no file stays."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kill.engine import read_all
from kill.world import ITEMS, NAMESPACES, QUARANTINE_SECONDS, Settings, open_cache, open_region

if TYPE_CHECKING:
    from ecpool import Region


@dataclass(slots=True)
class Audit:
    """What was found; `counters` are those that the region kept over all its clients."""

    failures: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)


def audit(settings: Settings, names: list[str]) -> Audit:
    """Looks at what a batch left behind. Nobody else is attached."""
    outcome = Audit()
    if settings.lifetime == "private":
        _audit_files_of_private(settings, names, outcome)
    else:
        for name in names:
            _audit_region(settings, name, outcome)
    return outcome


def _audit_region(settings: Settings, name: str, outcome: Audit) -> None:
    with open_region(settings, name, "pool", "auditor") as region:
        if settings.lifetime == "shared" and not region.created:
            outcome.failures.append("a shared region outlived all its clients as more than a file")
        region.reclaim()
        _expect(outcome, "after the first reclaim", region.check(), [])
        time.sleep(QUARANTINE_SECONDS + 0.05)
        region.reclaim()
        _audit_content(region, outcome)
        outcome.counters = region.counters()
    if settings.lifetime == "shared":
        left = [path.name for path in settings.directory.glob("*")]
        _expect(outcome, "files after the last one left", left, [])


def _audit_content(region: Region, outcome: Audit) -> None:
    status = region.status()
    _expect(outcome, "violations", region.check(), [])
    for what in ("writing", "doomed", "orphaned", "holds"):
        _expect(outcome, what, status[what], 0)
    _expect(
        outcome, "blocks that are free or evictable",
        status["free_blocks"] + status["evictable_blocks"], status["num_blocks"],
    )  # fmt: skip
    _expect(outcome, "clients", [c["group"] for c in status["clients"]], ["auditor"])
    for namespace in NAMESPACES:
        cache = open_cache(region, namespace)
        wrong = [read_all(region, cache, namespace, item) for item in ITEMS]
        outcome.failures += [text for text in wrong if text is not None]
    _audit_flush(region, outcome)


def _audit_flush(region: Region, outcome: Audit) -> None:
    """One namespace is flushed, so that every batch meets both old entries and room."""
    cache = open_cache(region, NAMESPACES[0])
    cache.flush()
    _expect(outcome, "violations after a flush", region.check(), [])
    stats = cache.stats()
    kept = sum(row["blocks"] for row in region.status()["namespaces"])
    _expect(outcome, "free blocks after a flush", stats["free_blocks"], stats["num_blocks"] - kept)


def _audit_files_of_private(settings: Settings, names: list[str], outcome: Audit) -> None:
    """An engine killed before all its processes attached leaves a file, until any next start."""
    open_region(settings, "next", "scheduler", "next", expected=1).close()
    left = sorted(path.name for path in settings.directory.glob("*"))
    _expect(outcome, f"files left over by {len(names)} engines", left, [])


def _expect(outcome: Audit, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        outcome.failures.append(f"{what}: {found!r}, but should be {wanted!r}")
