"""Latency inside real vLLM on the CPU: one request at a time, one picture each, one token.

Each engine answers for the same pictures twice. The first time all are encoded; the second time
vLLM's own encoder cache has lost them, since it holds four, and its prefix cache is off. Engines
run one after the other, so their figures are not interleaved; each is started on its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benches.measure import Effort, Sample, summarise
from benches.report import Row

if TYPE_CHECKING:
    from support.tiny_model import ModelSpec

PICTURES = 24
WARM_UP = 3  # pictures that are not counted


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds per request: the first time a picture comes, and when it comes again."""

    first: Sample
    again: Sample


def rows(effort: Effort) -> Iterator[Row]:
    from support.tiny_model import DEMO, TINY

    for spec, title in ((TINY, "tiny model"), (DEMO, "larger encoder")):
        yield from _model(spec, title, effort)


def _model(spec: ModelSpec, title: str, effort: Effort) -> Iterator[Row]:
    from support.engines import ec_transfer
    from support.tiny_model import build

    model = build(spec)
    with tempfile.TemporaryDirectory(prefix="ecpool-bench-") as text:
        directory = Path(text)
        pool = _measure(model, directory / "pool", ec_transfer(capacity="64MiB"), effort)
        bare = _measure(model, directory / "bare", None, effort)
        example = _measure(model, directory / "example", _example(directory / "store"), effort)
    again = f"{title}: same picture again"
    yield Row("engines", f"{again}, pool hit", "s", pool.again, "no connector", bare.again)
    yield Row("engines", f"{again}, pool hit", "s", pool.again, "ECExampleConnector", example.again)
    first = f"{title}: new picture, encoded and saved"
    yield Row("engines", first, "s", pool.first, "no connector", bare.first)
    yield Row("engines", first, "s", pool.first, "ECExampleConnector", example.first)


def _example(store: Path) -> dict[str, Any]:
    return {
        "ec_connector": "ECExampleConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"shared_storage_path": str(store)},
    }


def _measure(
    model: Path, directory: Path, transfer: dict[str, Any] | None, effort: Effort
) -> Latencies:
    from support.engines import EngineConfig, EngineProcess
    from support.requests import Picture, one_each

    count = 6 if effort.quick else PICTURES
    pictures = [Picture(seed) for seed in range(WARM_UP + count)]
    requests = one_each(pictures, max_tokens=1)
    with EngineProcess(EngineConfig(model, ec_transfer=transfer), directory) as engine:
        rounds = [[engine.generate([each])[0].seconds for each in requests] for _ in range(3)]
    again = rounds[1][WARM_UP:] + rounds[2][WARM_UP:]
    return Latencies(summarise(rounds[0][WARM_UP:]), summarise(again))
