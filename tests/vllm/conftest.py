"""Skips this directory where vLLM is not installed; offers native classes and models alike."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


@pytest.fixture(params=["model", "native"])
def make_engine(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Makes a `fakes.Engine` with a pool of so many blocks: the native cache or its model."""
    from model import fakes, native_model

    if request.param == "native":
        from ecpool import EmbeddingCache, StepTracker

        kinds: tuple[Any, Any] = (EmbeddingCache, StepTracker)
    else:
        kinds = (native_model.EmbeddingCache, native_model.StepTracker)

    def make(blocks: int = 16, **config: Any) -> fakes.Engine:
        cache = kinds[0](blocks, block_size=fakes.BLOCK)
        return fakes.Engine(cache, tracker=kinds[1], capacity=blocks * fakes.BLOCK, **config)

    return make


@pytest.fixture(params=["model", "native"])
def make_rig(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Makes a `rig.Rig`, over a real region or the model of one."""
    from model.rig import Rig

    return functools.partial(Rig, native=request.param == "native")


@pytest.fixture
def pool_log() -> Iterator[list[str]]:
    """What ecpool logs. vLLM's loggers may not pass records on to the root, where pytest looks."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.ecpool")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)
