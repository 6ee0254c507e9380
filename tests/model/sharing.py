"""Engines that join one region by their settings, each with its own scheduler and worker.

python -m model.sharing DIRECTORY NUMBER    one that stores items, begins another, and waits

"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from ecpool import Region
from ecpool.vllm.ranks import Place
from ecpool.vllm.scheduler import ECCPUScheduler
from ecpool.vllm.worker import ECCPUWorker
from model.fakes import BLOCK, WIDTH, Clock, Item, engine_config, request, scheduler_output

BLOCKS = 16
PICTURES = (Item("a", 2), Item("b"))
READY = "stored, and writing"


class Engine:
    """A worker, which comes first, and a scheduler, driven in vLLM's order; its encoder fills an
    item with the engine's number."""

    def __init__(self, number: int, config: Any) -> None:
        self.number = number
        self.clock = Clock()
        config.ec_transfer_config.engine_id = f"engine-{number}"
        self.worker = ECCPUWorker(config, place=Place(0, loads=True))
        try:
            self.scheduler = ECCPUScheduler(config, clock=self.clock)
        except BaseException:
            self.worker.shutdown()
            raise
        self.encoder_cache: dict[str, torch.Tensor] = {}

    def schedule(self, made: Any) -> tuple[Any, list[Item]]:
        """One `schedule()` with this request: metadata, and what is to be encoded."""
        encode, load = [], []
        for index, feature in enumerate(made.mm_features):
            hit = self.scheduler.has_cache_item(feature.identifier)
            (load if hit else encode).append(index)
        for index in encode + load:
            self.scheduler.update_state_after_alloc(made, index)
        metadata = self.scheduler.build_connector_meta(scheduler_output({made.request_id: encode}))
        features = [made.mm_features[index] for index in encode]
        return metadata, [Item(each.identifier, each.mm_position.length) for each in features]

    def work(self, metadata: Any, encoded: list[Item]) -> None:
        self.worker.bind(metadata)
        self.worker.start_load_caches(self.encoder_cache)
        for item in encoded:
            self.encoder_cache[item.key] = torch.full((item.rows, WIDTH), float(self.number))
            self.worker.save_caches(self.encoder_cache, item.key)
        self.worker.get_finished()
        self.worker.clear()

    def serve(self, *items: Item) -> list[str]:
        """Serve a request; the keys that were encoded for it."""
        made = request(*items)
        assert self.scheduler.ensure_cache_available(made, 0)
        self.encoder_cache.clear()
        metadata, encoded = self.schedule(made)
        self.work(metadata, encoded)
        self.scheduler.request_finished(made)
        assert set(self.encoder_cache) == {item.key for item in items}
        return [item.key for item in encoded]

    def made_by(self, key: str) -> set[float]:
        """The numbers of the engines that made an item in this one's encoder cache."""
        return set(self.encoder_cache[key].unique().tolist())

    def stop(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


class Host:
    """A directory for pools, and the engines that use them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._engines: list[Engine] = []

    def engine(self, role: str = "ec_both", *, index: int = 0, **settings: Any) -> Engine:
        given = {"pool": "host", "directory": str(self.directory), "deadline_ms": 2000, **settings}
        config = engine_config(
            role, settings=given, capacity=settings.pop("capacity", BLOCKS * BLOCK), index=index
        )
        return self.start(config)

    def start(self, config: Any) -> Engine:
        engine = Engine(len(self._engines) + 1, config)
        self._engines.append(engine)
        return engine

    def config(self, **settings: Any) -> Any:
        given = {"pool": "host", "directory": str(self.directory), **settings}
        return engine_config(settings=given)

    def stop_all(self) -> None:
        for engine in self._engines:
            engine.stop()

    def region(self) -> Region:
        return Region.attach("host", directory=str(self.directory))

    def damage(self) -> None:
        """Another byte at every block's beginning."""
        with self.region() as region:
            view = memoryview(region)
            for start in range(0, region.nbytes, region.block_size):
                view[start] ^= 0xFF
            view.release()

    def files(self) -> list[Path]:
        return sorted(self.directory.glob("*")) if self.directory.exists() else []


def wait_for_death(directory: Path, number: int) -> None:
    """What the program does: at the end a save is claimed, as if its copy were under way."""
    engine = Engine(number, Host(directory).config(persist=True, deadline_ms=2000))
    engine.serve(*PICTURES)
    made = request(Item("half", 2))
    engine.scheduler.ensure_cache_available(made, 0)
    metadata, _ = engine.schedule(made)
    saves = [(save.id, (2, WIDTH), "float32") for save in metadata.saves]
    engine.worker._cache.claim_saves(0, saves)
    print(READY, flush=True)
    time.sleep(60)


if __name__ == "__main__":
    wait_for_death(Path(sys.argv[1]), int(sys.argv[2]))
