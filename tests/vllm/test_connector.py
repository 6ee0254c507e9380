"""The connector as vLLM builds it: over real regions, in one process and in several."""

from __future__ import annotations

import multiprocessing
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model.fakes import BLOCK, WIDTH, Item, engine_config, request, scheduler_output
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from ecpool.errors import InvalidArgumentError
from ecpool.vllm import ECPoolConnector

SCHEDULER, WORKER = ECConnectorRole.SCHEDULER, ECConnectorRole.WORKER
TIMEOUT = 60.0


@pytest.fixture
def directory() -> Iterator[Path]:
    """A place of its own in shared memory; the last to leave a region removes it."""
    path = Path("/dev/shm") / f"ecpool-test-{uuid.uuid4().hex}"
    yield path
    shutil.rmtree(path, ignore_errors=True)


def region_files(directory: Path) -> list[Path]:
    """What holds memory: everything but the empty files that locks are taken on."""
    return [
        path for path in directory.rglob("*") if path.is_file() and path.stat().st_size >= BLOCK
    ]


def config_of(directory: Path, **more: Any) -> SimpleNamespace:
    settings = {"directory": str(directory), **more.pop("settings", {})}
    return engine_config(settings=settings, **more)


class Uniproc:
    """Both halves of an engine in one process and thread, as with vLLM's uniproc executor."""

    def __init__(self, config: SimpleNamespace) -> None:
        self.worker = ECPoolConnector(config, WORKER)
        self.scheduler = ECPoolConnector(config, SCHEDULER)
        self.cache: dict[str, torch.Tensor] = {}

    def serve(self, *items: Item) -> list[str]:
        """Serve a request; the keys that were encoded for it."""
        made = request(*items)
        metadata, encoded = schedule(self.scheduler, made)
        came = {item.key: embedding(item) for item in items if item.key in encoded}
        execute(self.worker, metadata, self.cache, came)
        self.scheduler.request_finished(made)
        return encoded

    def shutdown(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


def schedule(scheduler: ECPoolConnector, made: Any) -> tuple[Any, list[str]]:
    scheduler.ensure_cache_available(made, 0)
    keys = [feature.identifier for feature in made.mm_features]
    hits = [scheduler.has_cache_item(key) for key in keys]
    encode = [index for index, hit in enumerate(hits) if not hit]
    for index in encode + [index for index, hit in enumerate(hits) if hit]:
        scheduler.update_state_after_alloc(made, index)
    metadata = scheduler.build_connector_meta(scheduler_output({made.request_id: encode}))
    return metadata, [keys[index] for index in encode]


def execute(
    worker: ECPoolConnector,
    metadata: Any,
    cache: dict[str, torch.Tensor],
    came: dict[str, torch.Tensor],
) -> None:
    worker.bind_connector_metadata(metadata)
    worker.start_save_caches(encoder_cache=cache)
    worker.start_load_caches(cache)
    for key, tensor in came.items():
        cache[key] = tensor
        worker.save_caches(encoder_cache=cache, mm_hash=key)
    worker.get_finished(set())
    worker.clear_connector_metadata()


def embedding(item: Item) -> torch.Tensor:
    """The same for the same key in every process."""
    generator = torch.Generator().manual_seed(sum(item.key.encode()))
    return torch.randn(item.rows, WIDTH, generator=generator)


class TestOneProcess:
    @pytest.mark.parametrize("completion", ["events", "steps"])
    @pytest.mark.parametrize("populate", [True, False, "background"])
    def test_encoded_once_and_loaded_after(
        self, directory: Path, completion: str, populate: bool | str
    ) -> None:
        settings = {"completion": completion, "populate": populate}
        engine = Uniproc(config_of(directory, settings=settings))
        items = [Item("a", rows=3), Item("b", rows=2)]
        assert engine.serve(*items) == ["a", "b"]
        engine.serve()
        engine.cache.clear()
        assert engine.serve(*items) == []
        for item in items:
            assert torch.equal(engine.cache[item.key], embedding(item))
        engine.shutdown()

    def test_the_file_is_gone_once_all_have_come(self, directory: Path) -> None:
        config = config_of(directory)
        worker = ECPoolConnector(config, WORKER)
        assert len(region_files(directory)) == 1
        scheduler = ECPoolConnector(config, SCHEDULER)
        assert region_files(directory) == []
        for half in (scheduler, worker, scheduler):
            half.shutdown()

    @pytest.mark.parametrize("first", [SCHEDULER, WORKER])
    def test_nobody_waits_for_the_other(self, directory: Path, first: ECConnectorRole) -> None:
        """Either half may come first, in the one thread that there is."""
        config = config_of(directory)
        halves: list[ECPoolConnector] = []

        def build() -> None:
            second = WORKER if first == SCHEDULER else SCHEDULER
            halves.extend(ECPoolConnector(config, role) for role in (first, second))

        thread = threading.Thread(target=build, daemon=True)
        thread.start()
        thread.join(TIMEOUT)
        assert len(halves) == 2
        for half in halves:
            half.shutdown()

    def test_engines_of_one_instance_share_nothing(self, directory: Path) -> None:
        engines = [Uniproc(config_of(directory, index=index)) for index in range(2)]
        assert engines[0].serve(Item("x")) == ["x"]
        assert engines[1].serve(Item("x")) == ["x"]
        assert engines[0].serve(Item("x")) == []
        for engine in engines:
            engine.shutdown()

    def test_methods_of_the_other_half_are_neutral(self, directory: Path) -> None:
        config = config_of(directory)
        worker, scheduler = ECPoolConnector(config, WORKER), ECPoolConnector(config, SCHEDULER)
        made = request(Item("x"))
        assert worker.has_cache_item("x") is False
        assert worker.ensure_cache_available(made, 0) is True
        assert worker.request_finished(made) == (False, None)
        assert worker.build_connector_meta(scheduler_output()).saves == []
        worker.update_state_after_alloc(made, 0)
        scheduler.save_caches({}, "x")
        scheduler.start_load_caches({})
        assert scheduler.get_finished(set()) == (None, None)
        for half in (worker, scheduler):
            half.shutdown()

    def test_a_summary_is_logged(self, directory: Path, pool_log: list[str]) -> None:
        engine = Uniproc(config_of(directory))
        engine.serve(Item("x"))
        engine.serve(Item("x"))
        engine.shutdown()
        (line,) = [line for line in pool_log if "hit rate" in line]
        assert "1 loaded" in line
        assert "1 encoded" in line

    def test_a_pool_that_the_host_cannot_hold_is_an_error(self, directory: Path) -> None:
        with pytest.raises(OSError, match=r"GiB|TiB|bytes"):
            ECPoolConnector(config_of(directory, capacity=1 << 40), WORKER)
        assert region_files(directory) == []

    @pytest.mark.parametrize("capacity", [None, "4 gigs", -1, 100])
    def test_a_wrong_size_leaves_no_file(self, directory: Path, capacity: object) -> None:
        config = config_of(directory, settings={"capacity": capacity})
        for role in (WORKER, SCHEDULER):
            with pytest.raises(InvalidArgumentError, match="capacity"):
                ECPoolConnector(config, role)
        assert list(directory.rglob("*")) == []


def _rank(directory: Path, rank: int, ranks: int, pipe: Any) -> None:
    """A worker process: executes what it is sent, and answers with what it has loaded."""
    config = config_of(directory, tensor=ranks)
    config.parallel_config.rank = rank
    worker = ECPoolConnector(config, WORKER)
    cache: dict[str, torch.Tensor] = {}
    pipe.send("here")
    while (word := pipe.recv()) is not None:
        metadata, items = word
        before = set(cache)
        execute(worker, metadata, cache, {item.key: embedding(item) for item in items})
        new = set(cache) - before - {item.key for item in items}
        wrong = [key for key in new if not torch.equal(cache[key], embedding(Item(key, rows=2)))]
        pipe.send((sorted(new), wrong))
        cache.clear()
    worker.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2])
def test_ranks_in_processes_of_their_own(directory: Path, ranks: int) -> None:
    # One clean process imports vLLM for all of them.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ecpool.vllm.connector", "ecpool.vllm.worker", "model.fakes"])
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(directory, rank, ranks, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        assert pipe.poll(TIMEOUT)
        pipe.recv()
    scheduler = ECPoolConnector(config_of(directory, tensor=ranks), SCHEDULER)
    assert region_files(directory) == []
    items = [Item("a", rows=2), Item("b", rows=2)]
    answers = []
    for _ in range(3):
        made = request(*items)
        metadata, encoded = schedule(scheduler, made)
        for pipe in pipes:
            pipe.send((metadata, [item for item in items if item.key in encoded]))
        for pipe in pipes:
            assert pipe.poll(TIMEOUT)
            answers.append(pipe.recv())
        scheduler.request_finished(made)
    assert answers == [([], [])] * ranks + [(["a", "b"], [])] * 2 * ranks
    assert scheduler.connector_scheduler is not None
    assert not scheduler.connector_scheduler._cache.has_held_entries()
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join(TIMEOUT)
        assert process.exitcode == 0
    scheduler.shutdown()
