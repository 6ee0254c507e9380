"""Driven by what vLLM's own runners use: V1's mixin, and V2's `ActiveECConnector`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model.fakes import Item, Step, request
from model.rig import Rig, output
from vllm.distributed.ec_transfer import ec_transfer_state
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.v1.worker.ec_connector_model_runner_mixin import ECConnectorModelRunnerMixin

from ecpool.vllm import ECPoolConnector
from ecpool.vllm import worker as worker_module

RunStep = Callable[[Step, Mapping[str, torch.Tensor]], None]

HAS_V2 = importlib.util.find_spec("vllm.v1.worker.gpu.ec_connector") is not None

RUNNERS = [
    "v1",
    pytest.param(
        "v2", marks=pytest.mark.skipif(not HAS_V2, reason="this vLLM has no V2 connector")
    ),
]


class Runner:
    """One rank whose connector is called by vLLM's code."""

    def __init__(self, kind: str, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kind = kind
        self.rig = rig
        self.cache: dict[str, torch.Tensor] = {}
        monkeypatch.setattr(worker_module, "ECCPUWorker", lambda config: rig.workers[0])
        self.connector = ECPoolConnector(rig.engine.config, ECConnectorRole.WORKER)
        monkeypatch.setattr(ec_transfer_state, "_EC_CONNECTOR_AGENT", self.connector)

    def run(
        self,
        step: Step,
        came: Mapping[str, torch.Tensor] | None = None,
        *,
        freed: tuple[str, ...] = (),
        error: Exception | None = None,
    ) -> None:
        for key in freed:
            self.cache.pop(key, None)
        output = SimpleNamespace(ec_connector_metadata=step.metadata, finished_req_ids=set())
        with self._step(output):
            for key, tensor in (came or {}).items():
                self.cache[key] = tensor
                if self.kind == "v1":
                    ECConnectorModelRunnerMixin.maybe_save_ec_to_connector(self.cache, key)
            if error is not None:
                raise error

    @contextmanager
    def _step(self, output: Any) -> Iterator[None]:
        if self.kind == "v1":
            entered = ECConnectorModelRunnerMixin.maybe_get_ec_connector_output(
                output, encoder_cache=self.cache
            )
        else:
            from vllm.v1.worker.gpu.ec_connector import ActiveECConnector

            entered = ActiveECConnector(self.rig.engine.config, self.cache).maybe_get_output(output)
        with entered as told:
            yield
        assert told is not None
        assert (told.finished_sending, told.finished_recving) == (None, None)


@pytest.fixture(params=RUNNERS)
def make_runner(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Runner]:
    def make(**config: Any) -> Runner:
        return Runner(request.param, Rig(**config), monkeypatch)

    return make


Make = Callable[..., Runner]


def test_encoded_once_and_loaded_after(make_runner: Make) -> None:
    runner = make_runner()
    items = [Item("a", rows=2), Item("b")]
    came = {item.key: output(item) for item in items}
    runner.run(runner.rig.engine.step(request(*items)), came)
    step = runner.rig.engine.step(request(*items), freed=["a", "b"])
    assert step.loads == ["a", "b"]
    runner.run(step, freed=("a", "b"))
    for key, tensor in came.items():
        assert torch.equal(runner.cache[key], tensor)
    assert not runner.rig.cache.has_held_entries()


@pytest.mark.parametrize("role", ["ec_both", "ec_producer"])
def test_encoded_again_while_the_runner_still_has_it(make_runner: Make, role: str) -> None:
    """Evicted and encoded again in one step: vLLM's list of freed keys does not name it."""
    runner = make_runner(role=role)
    item = Item("x")
    runner.cache["x"] = output(item)
    computed = output(item)
    runner.run(runner.rig.engine.step(request(item)), {"x": computed})
    # Saved late, or given up: but resolved by the end of the step.
    assert not runner.rig.cache.has_held_entries()
    if role == "ec_both":
        assert runner.rig.cache.contains("x")
        runner.cache.clear()
        runner.run(runner.rig.engine.step(request(item)))
        assert torch.equal(runner.cache["x"], computed)


def test_an_announced_item_that_never_comes(make_runner: Make) -> None:
    runner = make_runner(blocks=4)
    runner.run(runner.rig.engine.step(request(Item("x", rows=4))))
    assert not runner.rig.cache.has_held_entries()
    assert runner.rig.cache.stats()["free_blocks"] == 4


def test_a_step_that_raises_resolves_its_saves(make_runner: Make) -> None:
    runner = make_runner()
    items = [Item("came"), Item("did not")]
    step = runner.rig.engine.step(request(*items))
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.run(step, {"came": output(items[0])}, error=RuntimeError("out of memory"))
    assert not runner.rig.cache.has_held_entries()
    assert runner.rig.engine.step(request(items[1])).saves == ["did not"]
    assert runner.connector._connector_metadata is None


def test_a_load_of_a_step_without_tokens(make_runner: Make) -> None:
    runner = make_runner()
    item = Item("x")
    computed = output(item)
    runner.run(runner.rig.engine.step(request(item)), {"x": computed})
    runner.cache.clear()
    made = request(item)
    step = runner.rig.engine.step(made, tokens=0, preempted=[made])
    if runner.kind == "v2":  # V1 consumers do not call their connector in such a step
        runner.run(step)
    runner.run(runner.rig.engine.step())
    assert torch.equal(runner.cache["x"], computed)
    assert runner.rig.engine.step().loads == []


def test_roles_that_only_consume_save_nothing(make_runner: Make) -> None:
    runner = make_runner(role="ec_consumer")
    item = Item("x")
    runner.run(runner.rig.engine.step(request(item)), {"x": output(item)})
    assert not runner.rig.region.blocks


def test_saving_with_nothing_bound_is_survived(make_runner: Make) -> None:
    runner = make_runner()
    runner.connector.save_caches(encoder_cache={"x": torch.zeros(1)}, mm_hash="x", later="word")
    assert not runner.rig.region.blocks


def test_metadata_of_another_connector_is_survived(make_runner: Make) -> None:
    runner = make_runner()
    runner.run(SimpleNamespace(metadata=SimpleNamespace()))  # type: ignore[arg-type]
    assert not runner.connector.boundary.failures
