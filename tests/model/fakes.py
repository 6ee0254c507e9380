"""vLLM's side of the connector, driven by hand: its configuration, its requests, its steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from ecpool.vllm.metadata import ECPoolMetadata
from ecpool.vllm.scheduler import ECCPUScheduler
from model import native_model

BLOCK = 4096
WIDTH = 1024  # columns of the fake model's float32 embeddings, so that one row is one block


def engine_config(
    role: str = "ec_both",
    *,
    settings: Mapping[str, Any] | None = None,
    capacity: int = 16 * BLOCK,
    tensor: int = 1,
    context: int = 1,
    pipeline: int = 1,
    index: int = 0,
    batches: int = 1,
    dtype: torch.dtype = torch.float32,
    width: int = WIDTH,
    **more: Any,
) -> SimpleNamespace:
    """What the connector reads of a `VllmConfig`; ``more`` replaces whole parts by name."""
    given = {"capacity": capacity, "block_size": BLOCK, "populate": False}
    transfer = SimpleNamespace(
        ec_connector="ECPoolConnector",
        ec_role=role,
        is_ec_producer=role in ("ec_producer", "ec_both"),
        is_ec_consumer=role in ("ec_consumer", "ec_both"),
        engine_id="engine",
        ec_connector_extra_config={**given, **(settings or {})},
        mm_encoder_output_widths={},
    )
    model = SimpleNamespace(
        model="some/model",
        revision=None,
        dtype=dtype,
        quantization=None,
        hf_overrides={},
        hf_config=SimpleNamespace(),
        seed=0,
        is_encoder_decoder=False,
        multimodal_config=SimpleNamespace(mm_processor_cache_gb=4),
        get_inputs_embeds_size=lambda: width,
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=tensor,
        prefill_context_parallel_size=context,
        pipeline_parallel_size=pipeline,
        data_parallel_index=index,
        data_parallel_rank=0,
        distributed_executor_backend="mp",
        nnodes_within_dp=1,
        placement_group=None,
        rank=0,
    )
    return SimpleNamespace(
        **{
            "ec_transfer_config": transfer,
            "model_config": model,
            "parallel_config": parallel,
            "cache_config": SimpleNamespace(enable_prefix_caching=True),
            "load_config": SimpleNamespace(load_format="auto"),
            "lora_config": None,
            "instance_id": "abcde",
            "max_concurrent_batches": batches,
            **more,
        }
    )


_request_numbers = itertools.count()


@dataclass(frozen=True)
class Item:
    """A multimodal item; ``length`` counts its placeholder tokens, by default its rows."""

    key: str
    rows: int = 1
    modality: str = "image"
    length: int | None = None


def request(*items: Item, request_id: str | None = None, resumable: bool = False) -> Any:
    """A request with these items, one behind the other in its prompt."""
    if request_id is None:
        request_id = f"request-{next(_request_numbers)}"
    made = SimpleNamespace(request_id=request_id, mm_features=[], resumable=resumable)
    grow(made, *items)
    return made


def grow(made: Any, *items: Item) -> None:
    """Add items to a request, as a streaming session does."""
    for item in items:
        length = item.rows if item.length is None else item.length
        is_embed = None
        if length != item.rows:
            is_embed = torch.zeros(length, dtype=torch.bool)
            is_embed[: item.rows] = True
        made.mm_features.append(
            MultiModalFeatureSpec(
                data=None,
                modality=item.modality,
                identifier=item.key,
                mm_position=PlaceholderRange(offset=0, length=length, is_embed=is_embed),
            )
        )


def scheduler_output(
    scheduled: Mapping[str, Sequence[int]] | None = None,
    *,
    tokens: int = 1,
    freed: Iterable[str] = (),
    finished: Iterable[str] = (),
) -> SimpleNamespace:
    """What the connector reads of a `SchedulerOutput`."""
    return SimpleNamespace(
        scheduled_encoder_inputs={key: list(each) for key, each in (scheduled or {}).items()},
        total_num_scheduled_tokens=tokens,
        free_encoder_mm_hashes=list(freed),
        finished_req_ids=set(finished),
    )


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Step:
    """What one step decided."""

    metadata: ECPoolMetadata
    hits: list[str] = field(default_factory=list)
    encoded: list[str] = field(default_factory=list)

    @property
    def loads(self) -> list[str]:
        return [load.key for load in self.metadata.loads]

    @property
    def saves(self) -> list[str]:
        return [save.key for save in self.metadata.saves]


class Engine:
    """Drives one scheduler as vLLM does, and plays workers that copy nothing: they claim and
    complete.

    ``cache`` is the native cache or its model. vLLM's own encoder cache is left out: every item of
    every request is asked for, unless a test says otherwise.
    """

    def __init__(
        self, cache: Any, *, tracker: Any = native_model.StepTracker, **config: Any
    ) -> None:
        self.clock = Clock()
        self.cache = cache
        self.config = engine_config(**config)
        self.scheduler = ECCPUScheduler(
            self.config, cache=cache, step_tracker=tracker, clock=self.clock
        )

    def step(
        self,
        *requests: Any,
        not_allocated: Iterable[Any] = (),
        preempted: Iterable[Any] = (),
        tokens: int = 1,
        freed: Iterable[str] = (),
        finished: Iterable[str] = (),
    ) -> Step:
        """One `schedule()`: ask for every item, allocate, build the metadata.

        not_allocated: requests that get no KV blocks after being asked about. preempted: requests
        that lose their place after allocation, in the same step.
        """
        hits: list[str] = []
        encoded: list[str] = []
        scheduled: dict[str, list[int]] = {}
        for each in requests:
            assert self.scheduler.ensure_cache_available(each, 0)
            load, encode = self.ask(each)
            if each in list(not_allocated):
                continue
            scheduled[each.request_id] = encode
            for index in encode + load:
                self.scheduler.update_state_after_alloc(each, index)
            hits += [each.mm_features[index].identifier for index in load]
            encoded += [each.mm_features[index].identifier for index in encode]
        for each in preempted:
            scheduled.pop(each.request_id)
        output = scheduler_output(scheduled, tokens=tokens, freed=freed, finished=finished)
        return Step(self.scheduler.build_connector_meta(output), hits, encoded)

    def ask(self, each: Any) -> tuple[list[int], list[int]]:
        """Indices of a request's items that are to be loaded, and to be encoded."""
        load: list[int] = []
        encode: list[int] = []
        seen: set[str] = set()
        for index, feature in enumerate(each.mm_features):
            if feature.identifier in seen:
                continue
            seen.add(feature.identifier)
            answer = self.scheduler.has_cache_item(feature.identifier)
            (load if answer else encode).append(index)
        return load, encode

    def finish(self, *requests: Any) -> None:
        for each in requests:
            assert self.scheduler.request_finished(each) == (False, None)

    def work(
        self, step: Step, rank: int = 0, *, shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> dict[str, str]:
        """Let a rank claim and complete what a step names; what was claimed with which outcome."""
        loads, saves = step.metadata.loads, step.metadata.saves if rank == 0 else []
        outcomes = dict(
            zip(
                [load.key for load in loads],
                self.cache.claim_loads(rank, [load.id for load in loads]),
                strict=True,
            )
        )
        for save in saves:
            blocks = sum(num for _, num in save.extents)
            shape = (shapes or {}).get(save.key, (blocks, WIDTH))
            outcomes[save.key] = self.cache.claim_saves(rank, [(save.id, shape, "float32")])[0]
        self.cache.complete(rank, [each.id for each in loads] + [each.id for each in saves])
        return outcomes

    def store(self, *items: Item) -> None:
        """Put items into the pool by serving a request with them."""
        made = request(*items)
        shapes = {item.key: (item.rows, WIDTH) for item in items}
        outcomes = self.work(self.step(made), shapes=shapes)
        assert set(outcomes.values()) == {"claimed"}
        self.finish(made)
        for item in items:
            assert self.cache.contains(item.key)

    def drain(self, steps: int = 8) -> None:
        """Empty steps, until all that was left behind has been given back."""
        for _ in range(steps):
            self.step()
