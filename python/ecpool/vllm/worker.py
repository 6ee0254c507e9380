"""The worker's half of the connector: brings bytes between the region and vLLM's encoder cache.

In each step it claims the transfers that the metadata names, in one call for the loads and one for
the saves, before it touches a byte; a claim that is refused is not copied. The transfer engine
completes them when the copies are done.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ecpool.transfer import LoadItem, SaveItem, TransferEngine, TransferError, dtype_of
from ecpool.vllm.boundary import Boundary, is_containable
from ecpool.vllm.config import PoolConfig, pool_config
from ecpool.vllm.giveback import Settler
from ecpool.vllm.identity import dtype_name, identify
from ecpool.vllm.log import RateLimit, get_logger
from ecpool.vllm.metadata import ECPoolMetadata, Extents, Load, Save
from ecpool.vllm.ranks import Place, place_of_worker
from ecpool.vllm.scheduler import SAVE_RANK

if TYPE_CHECKING:
    from ecpool import EmbeddingCache, Region

logger = get_logger("worker")

EncoderCache = MutableMapping[str, torch.Tensor]

DRAIN_TIMEOUT = 10.0  # seconds that closing, or a failed submission, waits for copies under way
_LOG_INTERVAL = 10.0


class ECCPUWorker:
    """One rank's copies. Called by vLLM's model runner, from one thread; completions come from
    another.

    ``vllm_config`` is vLLM's. ``cache``, ``region``, ``engine`` and ``place`` replace what the
    configuration describes; tests hand them in. Raises InvalidArgumentError for wrong settings and
    what `ecpool.Region.open` raises; later on nothing raises.
    """

    def __init__(
        self,
        vllm_config: Any,
        *,
        cache: EmbeddingCache | None = None,
        region: Region | None = None,
        engine: TransferEngine | None = None,
        place: Place | None = None,
    ) -> None:
        self._config: PoolConfig = pool_config(vllm_config)
        self.boundary = Boundary(logger)
        self._place = place_of_worker(vllm_config) if place is None else place
        self._saves_here = self._place.rank == SAVE_RANK
        self._dtype = dtype_name(vllm_config.model_config.dtype)
        self._region = region
        self._cache = self._open(vllm_config) if cache is None else cache
        self._engine = self._make_engine() if engine is None else engine
        self._settler = Settler(self._cache, self.boundary)
        self._log_limit = RateLimit(_LOG_INTERVAL)
        self.counts: Counter[str] = Counter()
        self._closed = False
        # Saves under way whose bytes get a checksum: their place and length.
        self._unsummed: dict[int, tuple[Extents, int]] = {}
        # Loads that this rank has begun and that the last metadata named.
        self._begun: set[int] = set()
        # This step.
        self._loads: list[Load] = []
        self._announced: dict[str, Save] = {}
        self._outputs: dict[str, torch.Tensor] = {}
        self._encoder_cache: EncoderCache = {}

    def _open(self, vllm_config: Any) -> EmbeddingCache:
        from ecpool.vllm.attach import open_cache, open_region

        identity = identify(vllm_config, salt=self._config.salt, pool=self._config.pool)
        if self._region is None:
            self._region = open_region(
                self._config, identity, vllm_config, role="worker", rank=self._place.rank
            )
        return open_cache(self._region, self._config, identity)

    def _make_engine(self) -> TransferEngine:
        if self._region is None:
            raise ValueError("a worker that is given a cache needs the region or an engine as well")
        engine = TransferEngine(self._region, compute_device(), on_done=self._on_done)
        started = time.monotonic()
        pinned = engine.register()
        if pinned:
            logger.info(
                "ecpool: registered %d bytes with the device in %.1f s",
                pinned,
                time.monotonic() - started,
            )
        return engine

    # The step, in vLLM's order.

    def bind(self, metadata: ECPoolMetadata) -> None:
        """Take up a step's transfers."""
        self.clear()
        if self._closed:
            return
        self._settler.settle()
        loads = metadata.loads if self._place.loads else []
        # Metadata names a load until the scheduler sees that every rank has claimed it. Its blocks
        # are read once: afterwards they may be another item's.
        self._begun &= {each.id for each in loads}
        self._loads = [each for each in loads if each.id not in self._begun]
        self._announced = {each.key: each for each in metadata.saves} if self._saves_here else {}

    def start_save_caches(self, encoder_cache: EncoderCache | None) -> None:
        """Remember where the step's encoder outputs will be (vLLM 0.30+, producers)."""
        if encoder_cache is not None:
            self._encoder_cache = encoder_cache

    def start_load_caches(self, encoder_cache: EncoderCache) -> None:
        """Load what the metadata names; the tensors may be used on the current stream at once."""
        self._encoder_cache = encoder_cache
        loads, self._loads = self._loads, []
        claimed = self._claim_loads(loads, encoder_cache)
        if claimed:
            missing = {each.key: each for each in claimed if not _holds(encoder_cache, each)}
            wanted = {each.id for each in missing.values()}
            self._complete([each.id for each in claimed if each.id not in wanted], True)
            self._load(encoder_cache, list(missing.values()))

    def save_caches(self, encoder_cache: EncoderCache, mm_hash: str) -> None:
        """Remember an encoder output that was announced; it is copied at the step's end."""
        self._encoder_cache = encoder_cache
        if mm_hash in self._announced and mm_hash in encoder_cache:
            self._outputs[mm_hash] = encoder_cache[mm_hash]

    def get_finished(self) -> None:
        """Save the step's encoder outputs as one batch; give up what did not come."""
        announced, self._announced = self._announced, {}
        outputs, self._outputs = self._outputs, {}
        if not announced:
            return
        found: list[tuple[Save, torch.Tensor]] = []
        missing: list[int] = []
        for key, save in announced.items():
            # vLLM does not call `save_caches` for outputs that replace one of the same key.
            tensor = outputs.get(key, self._encoder_cache.get(key))
            if tensor is None or not self._is_keepable(tensor):
                missing.append(save.id)
            else:
                found.append((save, tensor))
        self.counts["saves_missing"] += len(missing)
        self._resolve(missing)
        if found:
            self._save(found)

    def clear(self) -> None:
        """The step is over. Saves that nobody asked about are given up."""
        left = [each.id for each in self._announced.values()]
        self._loads, self._announced, self._outputs, self._encoder_cache = [], {}, {}, {}
        self._resolve(left)
        self._settler.watch()

    # Loads.

    def _claim_loads(self, loads: list[Load], encoder_cache: EncoderCache) -> list[Load]:
        if not loads:
            return []
        ids = [each.id for each in loads]
        # If the claim itself fails, the promise stands: the entries are held until the scheduler
        # ends their loads. It is made again with the next metadata.
        outcomes: Sequence[str] = self.boundary.call(
            ["untold"] * len(ids), self._cache.claim_loads, self._place.rank, ids
        )
        told = list(zip(loads, outcomes, strict=True))
        self._begun.update(load.id for load, outcome in told if outcome != "untold")
        for load, outcome in told:
            if outcome == "refused" and not _holds(encoder_cache, load):
                why = "its transfer was closed before this worker could claim it"
                self._lost(load.key, why, None)
        return [load for load, outcome in told if outcome in ("claimed", "untold")]

    def _load(self, encoder_cache: EncoderCache, loads: list[Load]) -> None:
        items = [item for each in loads if (item := self._load_item(each)) is not None]
        if not items:
            return
        try:
            encoder_cache.update(self._engine.load(items))
            self.counts["loads"] += len(items)
        except TransferError as error:
            encoder_cache.update(error.loaded)
            self.counts["loads"] += len(error.loaded)
            for key, reason in error.failed.items():
                self._lost(key, "the copy failed", reason)
        except BaseException as error:
            if not is_containable(error):
                raise
            self._complete([each.id for each in items], False)
            for each in items:
                self._lost(each.key, "the copy failed", error)

    def _load_item(self, load: Load) -> LoadItem | None:
        dtype = dtype_of(load.dtype)
        if dtype is None:
            self._complete([load.id], False)
            self._lost(load.key, f"this torch knows no element type {load.dtype!r}", None)
            return None
        return LoadItem(load.key, load.id, load.extents, load.shape, dtype)

    def _lost(self, key: str, why: str, error: BaseException | None) -> None:
        """A promise is broken. vLLM fails by itself if this step needs the item."""
        self.counts["loads_lost"] += 1
        if self._log_limit.allows("lost"):
            logger.error(
                "ecpool: %s could not be loaded: %s. vLLM stops with an encoder cache miss "
                "if it needs it now%s",
                key,
                why,
                self._log_limit.left_out("lost"),
                exc_info=error,
            )

    # Saves.

    def _is_keepable(self, tensor: object) -> bool:
        if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
            return False
        found = dtype_name(tensor.dtype)
        if found != self._dtype:
            self.counts["saves_of_other_dtype"] += 1
            if self._log_limit.allows("dtype"):
                logger.warning(
                    "ecpool: an encoder output is %s but the model is %s; it is not kept",
                    found,
                    self._dtype,
                )
            return False
        return True

    def _save(self, found: list[tuple[Save, torch.Tensor]]) -> None:
        wanted = [
            (save.id, tuple(tensor.shape), dtype_name(tensor.dtype)) for save, tensor in found
        ]
        outcomes: Sequence[str] = self.boundary.call(
            ["failed"] * len(found), self._cache.claim_saves, self._place.rank, wanted
        )
        items: list[SaveItem] = []
        dropped: list[int] = []
        for (save, tensor), outcome in zip(found, outcomes, strict=True):
            if outcome == "claimed":
                items.append(SaveItem(save.key, save.id, save.extents, tensor))
            elif outcome != "repeated":
                self.counts[f"saves_{outcome}"] += 1
                dropped.append(save.id)
        self._resolve(dropped)
        if items:
            if self._config.checksum:
                self._unsummed.update({i.id: (i.extents, i.tensor.nbytes) for i in items})
            self._copy_out(items)

    def _copy_out(self, items: list[SaveItem]) -> None:
        try:
            self._engine.save(items)
            self.counts["saves"] += len(items)
        except BaseException as error:
            if not is_containable(error):
                raise
            self.boundary.failed("save", error)
            # Blocks go back only when no copy into them can still be under way. If that cannot be
            # made sure of, they stay with this process until its end.
            if self.boundary.call(False, self._engine.drain, DRAIN_TIMEOUT):
                self._resolve([each.id for each in items])

    # Completions.

    def _on_done(self, ids: list[int], ok: bool) -> None:
        found = [(each, self._unsummed.pop(each)) for each in ids if each in self._unsummed]
        if ok and found:
            self.boundary.call(None, self._note_checksums, found)
        self._complete(ids, ok)

    def _note_checksums(self, saves: list[tuple[int, tuple[Extents, int]]]) -> None:
        """Of the bytes as they lie in the region, before anybody is told that they are there."""
        if self._region is not None:
            checksum = self._region.checksum
            self._cache.set_checksums([(id, checksum(*place)) for id, place in saves])

    def _complete(self, ids: list[int], ok: bool) -> None:
        """Tell the index that copies are over. By steps, the scheduler says when they are done."""
        if ids and not (ok and self._config.completion == "steps"):
            self.boundary.call(None, self._tell, ids, ok)
            self._settler.watch()

    def _tell(self, ids: list[int], ok: bool) -> None:
        self._cache.complete(self._place.rank, ids, ok=ok)

    def _resolve(self, ids: list[int]) -> None:
        """These saves will not happen."""
        for each in ids:
            self._unsummed.pop(each, None)
        self._complete(ids, False)

    def shutdown(self) -> None:
        """Wait for the copies under way and leave the region. May be called again."""
        if self._closed:
            return
        self.clear()
        self._closed = True
        self.boundary.call(False, self._engine.drain, DRAIN_TIMEOUT)
        self.boundary.call(None, self._engine.close)
        self._settler.close()
        if self._region is not None:
            self.boundary.call(None, self._region.close)


def compute_device() -> torch.device:
    """The model runner's device, which vLLM has made current before it builds connectors."""
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    if kind in ("", "cpu"):
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def _holds(encoder_cache: EncoderCache, load: Load) -> bool:
    """Whether the encoder cache has this very item already."""
    tensor = encoder_cache.get(load.key)
    return (
        isinstance(tensor, torch.Tensor)
        and tuple(tensor.shape) == load.shape
        and dtype_name(tensor.dtype) == load.dtype
    )
