"""A failure of any call into the pool, or of any copy, is never a failure of the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model.fakes import Item, request, scheduler_output
from model.rig import Rig, output
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from ecpool.vllm import ECPoolConnector
from ecpool.vllm import scheduler as scheduler_module
from ecpool.vllm import worker as worker_module
from ecpool.vllm.boundary import Boundary, is_containable

PanicException = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

FAILURES = [RuntimeError("injected"), MemoryError(), OSError(5, "io"), PanicException("injected")]

SCHEDULER_CALLS = [
    "lease",
    "end_leases",
    "dispatch_loads",
    "begin_save",
    "withdraw",
    "close_unclaimed",
    "unclaimed",
    "stats",
]
WORKER_CALLS = ["claim_loads", "claim_saves", "complete"]
TRACKER_CALLS = ["add", "step", "drain_all"]
ENGINE_CALLS = ["load", "save", "drain", "close"]


class Broken:
    """Wraps an object; one of its methods fails, each time or the first few times."""

    def __init__(self, inner: Any, method: str, error: BaseException, times: int = 10**9) -> None:
        self._inner = inner
        self._method = method
        self._error = error
        self.left = times

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name != self._method:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.left <= 0:
                return value(*args, **kwargs)
            self.left -= 1
            raise copy.copy(self._error)

        return call


class Loop:
    """Both connectors of an engine, called as vLLM calls them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.rig = Rig(blocks=8, **config)
        scheduler, worker = self.rig.engine.scheduler, self.rig.workers[0]
        monkeypatch.setattr(scheduler_module, "ECCPUScheduler", lambda config: scheduler)
        monkeypatch.setattr(worker_module, "ECCPUWorker", lambda config: worker)
        engine_config = self.rig.engine.config
        self.scheduler = ECPoolConnector(engine_config, ECConnectorRole.SCHEDULER)
        self.worker = ECPoolConnector(engine_config, ECConnectorRole.WORKER)
        self.cache: dict[str, torch.Tensor] = {}
        self.lost: list[str] = []

    def serve(self, *items: Item, tokens: int = 1, withdrawn: bool = False) -> None:
        """One request through one step, from an empty encoder cache."""
        self.cache.clear()
        made = request(*items)
        assert self.scheduler.ensure_cache_available(made, 0) is True
        hits = [self.scheduler.has_cache_item(item.key) for item in items]
        encode = [index for index, hit in enumerate(hits) if not hit]
        load = [index for index, hit in enumerate(hits) if hit]
        for index in encode + load:
            self.scheduler.update_state_after_alloc(made, index)
        scheduled = {} if withdrawn else {made.request_id: encode}
        metadata = self.scheduler.build_connector_meta(scheduler_output(scheduled, tokens=tokens))
        assert metadata is not None
        self.execute(metadata, {items[index].key: output(items[index]) for index in encode})
        self.lost += [items[index].key for index in load if items[index].key not in self.cache]
        assert self.scheduler.request_finished(made) == (False, None)
        self.scheduler.update_connector_output(None)
        assert self.scheduler.take_unavailable_requests() == set()
        assert self.scheduler.has_pending_push_work() is False

    def execute(self, metadata: Any, came: dict[str, torch.Tensor]) -> None:
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_save_caches(encoder_cache=self.cache)
        self.worker.start_load_caches(self.cache)
        for key, tensor in came.items():
            self.cache[key] = tensor
            self.worker.save_caches(encoder_cache=self.cache, mm_hash=key)
        assert self.worker.get_finished(set()) == (None, None)
        assert self.worker.build_connector_worker_meta() is None
        assert self.worker.get_ec_connector_stats() is None
        self.worker.clear_connector_metadata()

    def run(self, rounds: int = 3) -> None:
        """Hits, misses, items that do not fit, and withdrawn ones."""
        for _ in range(rounds):
            self.serve(Item("a", rows=2), Item("b", rows=2))
            self.serve(Item("c", rows=3), Item("a", rows=2))
            self.serve(Item("huge", rows=100), Item("b", rows=2))
            self.serve(Item("gone"), withdrawn=True)
            self.serve(Item("d"), tokens=0)

    def recover(self) -> None:
        for _ in range(10):
            self.serve()

    def is_healthy(self) -> bool:
        """Nothing is held, and what is encoded now is found afterwards."""
        self.recover()
        held = self.rig.cache.has_held_entries()
        self.serve(Item("fresh", rows=2))
        self.serve(Item("fresh", rows=2))
        return not held and self.rig.cache.contains("fresh") and not self.rig.cache.check()


def break_scheduler(loop: Loop, broken: Broken) -> None:
    scheduler = loop.rig.engine.scheduler
    scheduler._cache = broken
    scheduler._open_loads._cache = broken
    if scheduler._by_steps is not None:
        scheduler._by_steps._cache = broken


def break_worker(loop: Loop, broken: Broken) -> None:
    loop.rig.workers[0]._cache = broken


def break_engine(loop: Loop, broken: Broken) -> None:
    loop.rig.workers[0]._engine = broken


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("times", [1, 3, 10**9], ids=["once", "thrice", "always"])
class TestInjected:
    @pytest.mark.parametrize("method", SCHEDULER_CALLS)
    @pytest.mark.parametrize("completion", ["events", "steps"])
    def test_the_scheduler_goes_on(
        self,
        monkeypatch: pytest.MonkeyPatch,
        method: str,
        completion: str,
        error: BaseException,
        times: int,
    ) -> None:
        loop = Loop(monkeypatch, settings={"completion": completion})
        loop.run(1)
        broken = Broken(loop.rig.cache, method, error, times)
        break_scheduler(loop, broken)
        loop.run()
        broken.left = 0
        assert loop.is_healthy()
        assert loop.lost == []

    @pytest.mark.parametrize("method", ["finish_saves", "finish_loads"])
    def test_completion_by_steps_goes_on(
        self, monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException, times: int
    ) -> None:
        loop = Loop(monkeypatch, settings={"completion": "steps"})
        broken = Broken(loop.rig.cache, method, error, times)
        break_scheduler(loop, broken)
        loop.run()
        broken.left = 0
        assert loop.is_healthy()
        assert loop.lost == []

    @pytest.mark.parametrize("method", TRACKER_CALLS)
    @pytest.mark.parametrize("which", ["_saves", "_loads"])
    def test_the_clocks_go_on(
        self,
        monkeypatch: pytest.MonkeyPatch,
        method: str,
        which: str,
        error: BaseException,
        times: int,
    ) -> None:
        loop = Loop(monkeypatch, settings={"completion": "steps"})
        by_steps = loop.rig.engine.scheduler._by_steps
        broken = Broken(getattr(by_steps, which), method, error, times)
        setattr(by_steps, which, broken)
        loop.run()
        broken.left = 0
        assert loop.is_healthy()
        assert loop.lost == []

    @pytest.mark.parametrize("method", WORKER_CALLS)
    def test_the_worker_goes_on(
        self, monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException, times: int
    ) -> None:
        loop = Loop(monkeypatch)
        loop.run(1)
        broken = Broken(loop.rig.cache, method, error, times)
        break_worker(loop, broken)
        loop.run()
        assert loop.lost == []
        broken.left = 0
        loop.recover()
        loop.serve(Item("fresh"))
        loop.serve(Item("fresh"))
        assert loop.lost == []
        if method != "complete":  # words that are never told are repeated by nobody here
            assert loop.is_healthy()

    @pytest.mark.parametrize("method", ENGINE_CALLS)
    def test_copies_that_fail(
        self, monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException, times: int
    ) -> None:
        loop = Loop(monkeypatch)
        loop.run(1)
        broken = Broken(loop.rig.workers[0]._engine, method, error, times)
        break_engine(loop, broken)
        loop.run()
        # A promised load that fails cannot be a miss; nothing else is ever lost, and nothing is
        # made up.
        assert (loop.lost != []) == (method == "load")
        broken.left = 0
        assert loop.is_healthy()
        loop.worker.shutdown()

    def test_leaving_goes_on(
        self, monkeypatch: pytest.MonkeyPatch, error: BaseException, times: int
    ) -> None:
        loop = Loop(monkeypatch)
        scheduler, worker = loop.rig.engine.scheduler, loop.rig.workers[0]
        for half in (scheduler, worker):
            half._region = Broken(loop.rig.region, "close", error, times)
        break_engine(loop, Broken(worker._engine, "close", error, times))
        break_scheduler(loop, Broken(loop.rig.cache, "end_leases", error, times))
        loop.scheduler.shutdown()
        loop.worker.shutdown()
        assert scheduler.boundary.failures["call"] + worker.boundary.failures["call"] >= 3


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("method", "arguments", "neutral"),
    [
        ("ensure_cache_available", (None, 0), True),
        ("has_cache_item", ("x",), False),
        ("update_state_after_alloc", (None, 0), None),
        ("request_finished", (None,), (False, None)),
    ],
)
def test_every_method_of_the_scheduler_has_a_neutral_answer(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    arguments: tuple[Any, ...],
    neutral: Any,
    error: BaseException,
) -> None:
    loop = Loop(monkeypatch)
    loop.scheduler.connector_scheduler = Broken(loop.rig.engine.scheduler, method, error)
    assert getattr(loop.scheduler, method)(*arguments) == neutral
    loop.scheduler.connector_scheduler = Broken(
        loop.rig.engine.scheduler, "build_connector_meta", error
    )
    assert loop.scheduler.build_connector_meta(scheduler_output()).loads == []


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_process_passes(
    monkeypatch: pytest.MonkeyPatch, ending: type[BaseException]
) -> None:
    loop = Loop(monkeypatch)
    break_scheduler(loop, Broken(loop.rig.cache, "lease", ending()))
    made = request(Item("x"))
    loop.scheduler.ensure_cache_available(made, 0)
    with pytest.raises(ending):
        loop.scheduler.has_cache_item("x")
    loop.scheduler.connector_scheduler = Broken(
        loop.rig.engine.scheduler, "request_finished", ending()
    )
    with pytest.raises(ending):
        loop.scheduler.request_finished(made)


def test_other_exceptions_of_that_name_are_not_panics() -> None:
    assert is_containable(PanicException())
    assert not is_containable(type("PanicException", (BaseException,), {"__module__": "x"})())


def test_failures_are_counted_and_logged_now_and_then(pool_log: list[str]) -> None:
    import logging

    now = [0.0]
    boundary = Boundary(logging.getLogger("vllm.ecpool.test"), clock=lambda: now[0])

    def broken() -> int:
        raise RuntimeError("injected")

    for _ in range(100):
        assert boundary.call(7, broken) == 7
    assert boundary.failures["broken"] == 100
    assert len(pool_log) == 1
    now[0] = 60.0
    boundary.call(7, broken)
    assert len(pool_log) == 2
    assert "99 more" in pool_log[1]


def test_unknown_words_of_other_versions_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    calls: list[Callable[[], Any]] = [
        lambda: loop.scheduler.has_cache_item("x", later=1),
        lambda: loop.scheduler.ensure_cache_available(request(), 0, local_cache_hashes=set()),
        lambda: loop.scheduler.update_state_after_free(request(), 0, later=1),
        lambda: loop.scheduler.update_connector_output(SimpleNamespace(), later=1),
        lambda: loop.worker.start_load_caches({}, later=1),
        lambda: loop.worker.start_save_caches(later=1),
        lambda: loop.worker.register_caches({}, later=1),
        lambda: loop.worker.start_worker_services(),
    ]
    for call in calls:
        call()
