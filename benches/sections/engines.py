"""Latency inside real vLLM on the CPU: one request at a time, one picture each, one token.

Each engine answers for the same pictures three times. The first time all are encoded; later
vLLM's own encoder cache has lost them, since it holds four, and its prefix cache is off. The
engines of a model run side by side and take turns, picture by picture, in an order that rotates:
one after the other, what the machine did meanwhile weighed more than the connectors.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benches.measure import Effort, rotated, summarise
from benches.report import Row

if TYPE_CHECKING:
    from support.engines import EngineProcess
    from support.requests import Request
    from support.tiny_model import ModelSpec

PICTURES = 24
WARM_UP = 3  # pictures that are not counted
REST = 0.05  # seconds before each request, for the threads of the engine before to come to rest

OURS, BARE, EXAMPLE = "ecpool", "no connector", "ECExampleConnector"


@dataclass(slots=True)
class Latencies:
    """Seconds per request: the first time a picture comes, and when it comes again."""

    first: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)


def rows(effort: Effort) -> Iterator[Row]:
    from support.tiny_model import DEMO, TINY

    for spec, title in ((TINY, "tiny model"), (DEMO, "larger encoder")):
        yield from _model(spec, title, effort)


def _model(spec: ModelSpec, title: str, effort: Effort) -> Iterator[Row]:
    from support.engines import EngineConfig, EngineProcess, ec_transfer
    from support.tiny_model import build

    model = build(spec)
    with tempfile.TemporaryDirectory(prefix="ecpool-bench-") as text, ExitStack() as stack:
        directory = Path(text)
        transfers = {
            OURS: ec_transfer(capacity="64MiB"),
            BARE: None,
            EXAMPLE: _example(directory / "store"),
        }
        engines = {
            name: EngineProcess(EngineConfig(model, ec_transfer=transfer), directory / name)
            for name, transfer in transfers.items()
        }
        starters = ThreadPoolExecutor(2)  # a start keeps one core busy for half a minute
        stack.callback(starters.shutdown, cancel_futures=True)
        list(starters.map(stack.enter_context, engines.values()))
        latencies = _measure(engines, effort)
    yield from _rows(f"{title}: same picture again, pool hit", latencies, "again")
    yield from _rows(f"{title}: new picture, encoded and saved", latencies, "first")


def _example(store: Path) -> dict[str, Any]:
    return {
        "ec_connector": "ECExampleConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"shared_storage_path": str(store)},
    }


def _rows(title: str, latencies: Mapping[str, Latencies], which: str) -> Iterator[Row]:
    samples = {name: summarise(getattr(each, which)) for name, each in latencies.items()}
    for other in (BARE, EXAMPLE):
        yield Row("engines", title, "s", samples[OURS], other, samples[other])


def _measure(engines: Mapping[str, EngineProcess], effort: Effort) -> dict[str, Latencies]:
    from support.requests import Picture, one_each

    pictures = [Picture(seed) for seed in range(WARM_UP + (6 if effort.quick else PICTURES))]
    requests = one_each(pictures, max_tokens=1)
    latencies = {name: Latencies() for name in engines}
    for name, seconds in _turns(engines, requests):
        latencies[name].first.append(seconds)
    for _ in range(2):
        for name, seconds in _turns(engines, requests):
            latencies[name].again.append(seconds)
    return latencies


def _turns(
    engines: Mapping[str, EngineProcess], requests: Sequence[Request]
) -> Iterator[tuple[str, float]]:
    """Who answered, and in how many seconds; every request begins with another engine."""
    for number, request in enumerate(requests):
        for name in rotated(list(engines), number):
            time.sleep(REST)
            seconds = engines[name].generate([request])[0].seconds
            if number >= WARM_UP:
                yield name, seconds
