"""Fixtures for tests that run real vLLM engines on the CPU.

Engines are slow to start and hungry: a module starts one and its tests share it, and no two live at
once except where the scenario is about several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from support import tiny_model
from support.engines import EngineConfig, EngineProcess, ServerProcess
from support.requests import Request, tokens_of, without_uuids

ENGINE_TIMEOUT = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.real)
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT))
            if scenario := item.get_closest_marker("scenario"):
                item.user_properties.append(("scenario", scenario.args[0]))


@pytest.fixture(scope="session")
def model() -> Path:
    return tiny_model.build()


@pytest.fixture(scope="session")
def answers(
    model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Answers:
    """The tokens that vLLM gives without any connector: `answers(requests)`, in their order.

    One engine answers all that the collected modules list in REQUESTS, and runs only as long as
    that takes.
    """
    modules = {item.module for item in request.session.items if isinstance(item, pytest.Function)}
    listed = [each for module in modules for each in getattr(module, "REQUESTS", [])]
    config = EngineConfig(model)
    with EngineProcess(config, tmp_path_factory.mktemp("reference")) as engine:
        outcomes = engine.generate(listed)
    return Answers(dict(zip(listed, tokens_of(outcomes), strict=True)))


class Answers:
    """Looks up what a request must be answered with."""

    def __init__(self, known: dict[Request, tuple[int, ...]]) -> None:
        self._known = known

    def __call__(self, requests: Iterable[Request]) -> list[tuple[int, ...]]:
        # A KeyError here: the module does not list this request in REQUESTS.
        return [self._known[without_uuids(request)] for request in requests]


@pytest.fixture(scope="session")
def engine_of(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., EngineProcess]:
    """An engine with these settings of `EngineConfig`, not started yet: `with engine_of(...) as
    engine:`.
    """

    def make(**settings: Any) -> EngineProcess:
        return EngineProcess(EngineConfig(model, **settings), tmp_path_factory.mktemp("engine"))

    return make


@pytest.fixture(scope="session")
def server_of(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., ServerProcess]:
    """A server with these settings of `EngineConfig`, not started yet: `with server_of(...) as
    server:`.
    """

    def make(**settings: Any) -> ServerProcess:
        config = EngineConfig(model, in_process=False, **settings)
        return ServerProcess(config, tmp_path_factory.mktemp("server"))

    return make
