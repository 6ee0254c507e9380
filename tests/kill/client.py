"""A process that uses the pool by itself, as `ecpool.Pool` does: both halves of a transfer."""

from __future__ import annotations

import random
import signal

from ecpool import EntryStateError, KeyNotFoundError, PoolBusyError
from kill.channel import Channel
from kill.engine import Place
from kill.world import (
    CONTENT,
    DTYPE,
    ROW_BYTES,
    Item,
    Probe,
    Settings,
    open_cache,
    open_region,
    some_item,
)


class PoolClient:
    """Puts and gets, pins, allocates by blocks, flushes; verifies every byte that it gets."""

    def __init__(
        self, settings: Settings, place: Place, reports: Channel, probe: Probe, rng: random.Random
    ) -> None:
        self._reports, self._probe, self._rng = reports, probe, rng
        self._stopping = False
        signal.signal(signal.SIGTERM, self._stop)
        self._namespace = place.namespace
        self._region = open_region(settings, place.region, "pool", place.group)
        self._cache = open_cache(self._region, place.namespace)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def run(self) -> None:
        actions = [self._put_or_get, self._pin, self._alloc, self._flush]
        while not self._stopping:
            action = self._rng.choices(actions, weights=[100, 20, 20, 0.2])[0]
            try:
                action(some_item(self._rng))
            except PoolBusyError:
                continue
            except (KeyNotFoundError, EntryStateError):
                # Another client flushed, or writes the same key: expected among several.
                continue
        if self._rng.random() < 0.7:
            self._region.close()

    def _put_or_get(self, item: Item) -> None:
        cache, probe = self._cache, self._probe
        lease = probe(cache.lease, item.key, rows=item.rows, dtype=DTYPE)
        if lease is not None:
            probe(cache.dispatch_loads, [lease.id], ranks=1)
            if probe(cache.claim_loads, 0, [lease.id]) == ["refused"]:
                self._reports.send(("wrong", f"the promised load of {item} was refused"))
                return
            self._verify(item, lease.extents)
            probe(cache.complete, 0, [lease.id])
            return
        save = probe(
            cache.begin_save, item.key, rows=item.rows, row_bytes=ROW_BYTES, modality="image"
        )
        if isinstance(save, str):
            return
        claim = (save.id, (item.rows, ROW_BYTES), DTYPE)
        if probe(cache.claim_saves, 0, [claim]) != ["claimed"]:
            probe(cache.withdraw, [save.id])
            return
        probe(self._region.write, save.extents, CONTENT[self._namespace, item.key])
        probe(cache.complete, 0, [save.id], ok=self._rng.random() < 0.98)

    def _verify(self, item: Item, extents: tuple[tuple[int, int], ...]) -> None:
        if self._read(item, extents) != CONTENT[self._namespace, item.key]:
            self._reports.send(("wrong", f"wrong bytes of {item}"))

    def _read(self, item: Item, extents: tuple[tuple[int, int], ...]) -> bytearray:
        buffer = bytearray(item.nbytes)
        self._probe(self._region.read, extents, buffer)
        return buffer

    def _pin(self, item: Item) -> None:
        self._probe(self._cache.pin, item.key)
        entry = self._probe(self._cache.get, item.key)
        if entry is not None and entry.ready:
            found = self._read(item, entry.extents)
            # Unless somebody flushed in between, which leaves the pinned one in place, unfindable.
            if found != CONTENT[self._namespace, item.key] and self._cache.get(item.key) == entry:
                self._reports.send(("wrong", f"wrong bytes of {item} under a pin"))
        self._probe(self._cache.unpin, item.key)

    def _alloc(self, item: Item) -> None:
        # Keys of their own: these entries have no shape, and no bytes that anybody expects.
        key = f"blocks-{item.key}"
        if self._probe(self._cache.alloc, key, self._rng.randint(0, 8)) is None:
            return
        give_up = self._rng.random() < 0.3
        self._probe(self._cache.discard if give_up else self._cache.mark_ready, key)

    def _flush(self, item: Item) -> None:
        self._probe(self._cache.flush)


def run_client(
    settings: Settings, place: Place, reports: Channel, probe: Probe, rng: random.Random
) -> None:
    PoolClient(settings, place, reports, probe, rng).run()
