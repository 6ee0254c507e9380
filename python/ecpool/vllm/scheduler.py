"""The scheduler's half of the connector: decides what is loaded, encoded and saved. It never
touches a byte.

A step runs through it as vLLM makes the step: questions (`has_cache_item`), which it answers with a
lease, allocations (`update_state_after_alloc`), which turn leases into loads and the rest into
saves, and at the end the metadata, which ends the leases that came to nothing and withdraws the
saves whose item is not encoded after all.

A load stays in every metadata until all ranks have claimed it: vLLM believes it done once it was
announced, but some of its model runners skip the connector in steps without tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ecpool.vllm import widths
from ecpool.vllm.boundary import Boundary
from ecpool.vllm.by_steps import CompletionBySteps
from ecpool.vllm.config import (
    PER_REQUEST_ADVICE,
    PoolConfig,
    first_stage_ranks,
    keys_are_per_request,
    pool_config,
)
from ecpool.vllm.expectations import (
    PROMPT_EMBEDS,
    Expectations,
    Expected,
    is_per_request,
)
from ecpool.vllm.giveback import GiveBack, Settler
from ecpool.vllm.identity import dtype_name, identify
from ecpool.vllm.last_calls import LastCalls
from ecpool.vllm.loads import OpenLoads
from ecpool.vllm.log import get_logger
from ecpool.vllm.metadata import ECPoolMetadata
from ecpool.vllm.single_flight import SingleFlight
from ecpool.vllm.summary import Summary

if TYPE_CHECKING:
    from ecpool import EmbeddingCache, Region, StepTracker, Transfer

logger = get_logger("scheduler")

SAVE_RANK = 0  # every rank computes the same encoder output, so one writes it
SPARE_STEPS = 2  # beyond the steps that vLLM may have in flight


@dataclass(slots=True)
class _PendingSave:
    """A save of this step: where vLLM means to encode its item, as (request, index of the item)."""

    transfer: Transfer
    places: list[tuple[str, int]] = field(default_factory=list)


class ECCPUScheduler:
    """One engine's decisions about its pool. Called by vLLM's scheduler, from one thread.

    ``vllm_config`` is vLLM's. ``cache`` and ``region`` replace what the configuration describes,
    ``clock`` (seconds) and ``step_tracker`` (the class) what the system has; tests hand them in.
    Raises InvalidArgumentError for wrong settings and what `ecpool.Region.open` raises; later on
    nothing raises.
    """

    def __init__(
        self,
        vllm_config: Any,
        *,
        cache: EmbeddingCache | None = None,
        region: Region | None = None,
        clock: Callable[[], float] = time.monotonic,
        step_tracker: type[StepTracker] | None = None,
    ) -> None:
        self._vllm_config = vllm_config
        self._config: PoolConfig = pool_config(vllm_config)
        self._clock = clock
        self.boundary = Boundary(logger, clock=clock)
        self._is_producer = bool(vllm_config.ec_transfer_config.is_ec_producer)
        self._is_consumer = bool(vllm_config.ec_transfer_config.is_ec_consumer)
        self._dtype = dtype_name(vllm_config.model_config.dtype)
        self._load_ranks = (1 << first_stage_ranks(vllm_config.parallel_config)) - 1
        self._per_request_keys = keys_are_per_request(vllm_config)
        if self._per_request_keys:
            logger.warning(PER_REQUEST_ADVICE)
        self._region = region
        self._cache = self._open(region) if cache is None else cache
        self._expectations = Expectations()
        self._closed = False
        self._told: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._summary = Summary(logger, self._config.log_interval, clock)
        self._give_back = GiveBack(self.boundary)
        self._settler = Settler(self._cache, self.boundary)
        batches = max(1, int(getattr(vllm_config, "max_concurrent_batches", 1)))
        self._last_calls = LastCalls(batches + SPARE_STEPS)
        self._by_steps = self._make_by_steps(step_tracker, batches)
        self._open_loads = OpenLoads(
            self._cache, self.boundary, self._last_calls.add, clock, self.counts
        )
        self._single_flight = self._make_single_flight()
        # This step.
        self._answers: dict[str, bool] = {}
        self._leases: dict[str, Transfer] = {}
        self._new_loads: dict[str, Transfer] = {}
        self._new_saves: dict[str, _PendingSave] = {}
        # By modality: what a row takes, as far as that is known without having seen one.
        self._row_bytes: dict[str, int] = {}

    def _open(self, region: Region | None) -> EmbeddingCache:
        from ecpool.vllm.attach import open_cache, open_region

        identity = identify(self._vllm_config, salt=self._config.salt, pool=self._config.pool)
        if region is None:
            region = open_region(self._config, identity, self._vllm_config, role="scheduler")
            self._region = region
        return open_cache(region, self._config, identity)

    def _make_by_steps(
        self, step_tracker: type[StepTracker] | None, batches: int
    ) -> CompletionBySteps | None:
        if self._config.completion != "steps":
            return None
        if step_tracker is None:
            from ecpool import StepTracker

            step_tracker = StepTracker
        return CompletionBySteps(self._cache, self.boundary, self._give_back, step_tracker, batches)

    def _make_single_flight(self) -> SingleFlight | None:
        """None where nothing is waited for: alone in a pool, or not allowed to load."""
        if self._config.single_flight <= 0 or not self._is_consumer:
            return None
        return SingleFlight(
            self._cache.is_written_elsewhere, self._config.single_flight, self._clock, self.counts
        )

    # What vLLM asks.

    def ensure_cache_available(self, request: Any, num_computed_tokens: int = 0) -> bool:
        """Note what the request expects. False only for a moment, while another engine encodes an
        item that the request still needs: what the pool lacks is encoded here."""
        self._expectations.note(request)
        if self._single_flight is None or self._closed:
            return True
        return self.boundary.call(True, self._single_flight.lets_go, request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the item can be loaded in this step; True is a promise, kept until the step's
        metadata.

        Asking again, in this step or another, is harmless.
        """
        if not self._is_consumer or self._closed:
            return False
        if self._expectations.may_grow:
            self._expectations.note_growth()
        self._answers[identifier] = False  # what vLLM is told if the next line raises
        answer = self._answers[identifier] = self._promise(identifier)
        return answer

    def _promise(self, key: str) -> bool:
        expected = self._expectations.of(key)
        if expected is None:
            self._settle_conflict(key)
            return False
        if key in self._leases or key in self._new_loads:
            return True
        if expected[1] <= 0 or (self._per_request_keys and is_per_request(key, expected[0])):
            return False
        lease = self._lease(key, expected)
        if lease is None:
            return False
        self._leases[key] = lease
        return True

    def _settle_conflict(self, key: str) -> None:
        """Where requests disagree nobody can tell whose content was stored: it goes."""
        if self._expectations.disagree(key):
            self.counts["conflicts"] += 1
            # Nothing has 0 rows, so this finds a mismatch.
            self._lease(key, ("", 0))

    def _lease(self, key: str, expected: Expected) -> Transfer | None:
        """None as well where the pool fails."""
        modality, rows = expected
        try:
            lease = self._cache.lease(key, rows=rows, dtype=self._dtype, modality=modality)
            if lease is None or lease.unverified is None or self._verify(lease):
                return lease
        except BaseException as error:
            self.boundary.contain("lease", error)
        return None

    def _verify(self, lease: Transfer) -> bool:
        """Whether bytes are as they were stored, before a time in which nobody had the pool."""
        try:
            region = self._region
            fits = (
                region is not None
                and region.checksum(lease.extents, lease.nbytes) == lease.unverified
            )
            self._cache.confirm(lease.id, fits=fits)
        except BaseException:
            # vLLM asks again in the next step: each time a lease would be left.
            self._give_back(self._cache.end_leases, [lease.id])
            raise
        self.counts["verified" if fits else "corrupted"] += 1
        return fits

    # What vLLM decided.

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """The item gets a place in vLLM's encoder cache: load what was promised, save the rest."""
        feature = request.mm_features[index]
        if feature.modality == PROMPT_EMBEDS or self._closed:
            return
        self._expectations.note(request)
        key = feature.identifier
        if self._single_flight is not None:
            self._single_flight.settle(request.request_id, key)
        if self._answers.get(key):
            self._load(key, request.request_id)
            return
        if self._is_consumer:
            self.counts["misses"] += 1
        if self._is_producer:
            self._save(key, (request.request_id, index))

    def _load(self, key: str, request_id: str) -> None:
        lease = self._leases.pop(key, None)
        if lease is None:
            return  # announced in this step already
        self._new_loads[key] = lease
        self.counts["hits"] += 1
        self.counts["loaded_bytes"] += lease.nbytes
        if self._by_steps is not None:
            self._by_steps.begin_load(lease.id, request_id)

    def _save(self, key: str, place: tuple[str, int]) -> None:
        pending = self._new_saves.get(key)
        if pending is not None:
            pending.places.append(place)
            return
        expected = self._expectations.of(key)
        if expected is None or (self._per_request_keys and is_per_request(key, expected[0])):
            self.counts["not_kept"] += 1
            return
        begun = self._begin_save(key, expected)
        if isinstance(begun, str):
            self._not_saved(key, expected, begun)
            return
        self._new_saves[key] = _PendingSave(begun, [place])
        if self._by_steps is not None:
            self._by_steps.begin_save(begun.id, place[0])

    def _begin_save(self, key: str, expected: Expected) -> Transfer | str:
        """The save, or why there is none."""
        try:
            begun = self._allocate(key, expected)
            if begun == "exists" and not self._is_consumer and not self._matches(key, expected):
                begun = self._allocate(key, expected)
            return begun
        except BaseException as error:
            self.boundary.contain("begin_save", error)
            return "failed"

    def _allocate(self, key: str, expected: Expected) -> Transfer | str:
        modality, rows = expected
        row_bytes = self._row_bytes.get(modality)
        if row_bytes is None:
            row_bytes = widths.row_bytes(self._vllm_config, modality)
            self._row_bytes[modality] = row_bytes
        return self._cache.begin_save(
            key, rows=rows, row_bytes=row_bytes, modality=modality, ranks=1 << SAVE_RANK
        )

    def _matches(self, key: str, expected: Expected) -> bool:
        """Whether what is stored is right, where no question of a consumer has settled that."""
        lease = self._lease(key, expected)
        if lease is not None:
            self._cache.end_leases([lease.id])
        return lease is not None or self._cache.get(key) is not None

    def _not_saved(self, key: str, expected: Expected, reason: str) -> None:
        self.counts[f"not_saved_{reason}"] += 1
        if reason == "too_large" and reason not in self._told:
            self._told.add(reason)
            logger.warning(
                "ecpool: an item of %d rows (%s, key %s) is larger than the whole pool of %d bytes "
                "and is not kept; raise capacity to keep such items. Later ones are only counted",
                expected[1],
                expected[0],
                key,
                self._config.capacity,
            )

    # The end of a step.

    def build_connector_meta(self, scheduler_output: Any) -> ECPoolMetadata:
        """The step's transfers. Ends the step: what was promised and not used is given back."""
        # Each part by itself, so that none takes a promised load down with it.
        part = self.boundary.call
        self._settler.settle()
        if self._give_back.owes:
            part(None, self._give_back.retry)
        if self._leases:
            part(None, self._end_unused_leases)
        if self._new_saves and scheduler_output is not None:
            part(None, self._withdraw_saves, scheduler_output)
        part(None, self._renew_loads, scheduler_output)
        part(None, self._tick, scheduler_output)
        loads = self._open_loads.announce(with_tokens=_num_tokens(scheduler_output) > 0)
        saves = [(key, *save.transfer.as_save) for key, save in self._new_saves.items()]
        self.counts["saves"] += len(saves)
        self._end_step()
        part(None, self._summary.tick, self._summary_numbers)
        self._settler.watch()
        return ECPoolMetadata.of_plain(loads, saves)

    def _end_step(self) -> None:
        self._answers.clear()
        self._leases.clear()
        self._new_loads.clear()
        self._new_saves.clear()

    def _end_unused_leases(self) -> None:
        self._give_back(self._cache.end_leases, [each.id for each in self._leases.values()])
        self._leases.clear()

    def _withdraw_saves(self, scheduler_output: Any) -> None:
        """Take back the saves of items that vLLM does not encode in this step after all."""
        scheduled = scheduler_output.scheduled_encoder_inputs
        if self._is_consumer and not _num_tokens(scheduler_output):
            scheduled = {}  # a step that workers may skip
        gone = []
        for key, save in self._new_saves.items():
            for request_id, index in save.places:
                if index in scheduled.get(request_id, ()):
                    break
            else:
                gone.append(key)
        if gone:
            self.counts["saves_withdrawn"] += len(gone)
            self._give_back(
                self._cache.withdraw, [self._new_saves.pop(key).transfer.id for key in gone]
            )

    def _renew_loads(self, scheduler_output: Any) -> None:
        """Bring the announced loads up to date.

        A key that is freed and loaded in one step is loaded: workers free first, and only what was
        announced before is left out.
        """
        self._open_loads.forget(getattr(scheduler_output, "free_encoder_mm_hashes", None) or ())
        self._open_loads.refresh()
        if self._new_loads:
            self._open_loads.add(self._new_loads)
            self._give_back(self._dispatch, [lease.id for lease in self._new_loads.values()])

    def _dispatch(self, ids: list[int]) -> None:
        self._cache.dispatch_loads(ids, ranks=self._load_ranks)

    def _tick(self, scheduler_output: Any) -> None:
        """One step on the clocks."""
        for save in self._new_saves.values():
            self._last_calls.add(save.transfer.id)
        self._give_back(self._close_unclaimed, self._last_calls.step())
        if self._by_steps is not None:
            self._by_steps.step(getattr(scheduler_output, "finished_req_ids", None) or ())

    def _close_unclaimed(self, ids: list[int]) -> None:
        """What stays open is looked at again: a rank may not yet have been able to claim it."""
        for each in self._cache.close_unclaimed(ids):
            self._last_calls.add(each)

    # The rest of vLLM's interface.

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """The request is gone. Its blocks are never kept: transfers do not need the request."""
        self._expectations.forget(request.request_id)
        if self._single_flight is not None:
            self._single_flight.forget(request.request_id)
        return False, None

    def update_connector_output(self, connector_output: Any) -> None:
        """Workers tell the index themselves; nothing is to be learned here."""

    def take_unavailable_requests(self) -> set[str]:
        """Requests that can never run: none, since what the pool lacks is encoded."""
        return set()

    def has_pending_push_work(self) -> bool:
        """Never: copies need no further steps, and True would keep the engine spinning."""
        return False

    def shutdown(self) -> None:
        """Give everything back and leave the region. May be called again, or not at all."""
        if self._closed:
            return
        self._closed = True
        self._end_unused_leases()
        saves = [each.transfer.id for each in self._new_saves.values()]
        self._give_back(self._cache.withdraw, saves)
        loads = [lease.id for lease in self._new_loads.values()]
        self._give_back(self._cache.end_leases, loads)
        if self._by_steps is not None:
            self._by_steps.end_loads()
        self._end_step()
        self._summary.last(self._summary_numbers)
        self._settler.close()
        if self._region is not None:
            self.boundary.call(None, self._region.close)

    def _summary_numbers(self) -> dict[str, int]:
        return {**self.counts, **self.boundary.call({}, self._cache.stats)}


def _num_tokens(scheduler_output: Any) -> int:
    return int(getattr(scheduler_output, "total_num_scheduled_tokens", 0) or 0)
