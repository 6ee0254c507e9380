"""One engine by hand: a scheduler and its workers, over a region or over the model of one."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import torch

from ecpool.transfer import TransferEngine
from ecpool.vllm.ranks import Place
from ecpool.vllm.worker import ECCPUWorker
from model import native_model
from model.fakes import BLOCK, WIDTH, Engine, Item, Step, request


class Rig:
    """All halves are clients of one region, with ``native`` of a real one."""

    def __init__(
        self,
        ranks: int = 1,
        later_stages: int = 0,
        blocks: int = 16,
        *,
        native: bool = False,
        **config: Any,
    ) -> None:
        total = ranks * (later_stages + 1)
        self.region, self.caches = _native(blocks, total) if native else _model(blocks, total)
        self.cache = self.caches[-1]
        self.engine = Engine(
            self.cache, tensor=ranks, pipeline=later_stages + 1, capacity=blocks * BLOCK, **config
        )
        self.encoder_caches: list[dict[str, torch.Tensor]] = [{} for _ in range(total)]
        self.workers = [self._worker(rank, loads=rank < ranks) for rank in range(total)]

    def _worker(self, rank: int, *, loads: bool) -> ECCPUWorker:
        copies = TransferEngine(
            self.region,
            torch.device("cpu"),
            on_done=lambda ids, ok: worker._on_done(ids, ok),
        )
        worker = ECCPUWorker(
            self.engine.config,
            cache=self.caches[rank],
            engine=copies,
            place=Place(rank, loads),
        )
        return worker

    def run(
        self, step: Step, rank: int = 0, *, came: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """A step of a rank, in the V1 runner's order. ``came``: what its encoder computes."""
        worker, cache = self.workers[rank], self.encoder_caches[rank]
        worker.bind(step.metadata)
        worker.start_load_caches(cache)
        for key, tensor in (came or {}).items():
            cache[key] = tensor
            worker.save_caches(cache, key)
        worker.get_finished()
        worker.clear()

    def serve(self, *items: Item) -> dict[str, torch.Tensor]:
        """Serve a request on every rank; what was encoded for it."""
        made = request(*items)
        step = self.engine.step(made)
        came = {item.key: output(item) for item in items if item.key in step.encoded}
        for rank in range(len(self.workers)):
            self.run(step, rank, came=came)
        self.engine.finish(made)
        return came


def _model(blocks: int, workers: int) -> tuple[Any, list[Any]]:
    region = native_model.Region(blocks, BLOCK)
    cache = native_model.EmbeddingCache(region=region)
    return region, [cache] * (workers + 1)


def _native(blocks: int, workers: int) -> tuple[Any, list[Any]]:
    from ecpool import EmbeddingCache, Region

    name = f"rig-{uuid.uuid4().hex}"
    regions = [
        Region.open(
            name,
            capacity=blocks * BLOCK,
            block_size=BLOCK,
            lifetime="private",
            group="rig",
            role="scheduler" if rank == workers else "worker",
            rank=rank,
            expected_clients=workers + 1,
        )
        for rank in range(workers + 1)
    ]
    caches = [EmbeddingCache(region=region, namespace="rig", deadline=5.0) for region in regions]
    return regions[-1], caches


def output(item: Item, columns: int = WIDTH, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What the fake encoder computes; never the same twice."""
    return torch.randn(item.rows, columns).to(dtype)
