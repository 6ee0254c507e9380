"""One engine, the same pictures twice: what it did and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from support.engines import EngineConfig, EngineProcess, ec_transfer
from support.requests import Picture, Request, one_each
from support.tiny_model import REPOSITORY

LOGS = REPOSITORY / ".cache" / "demo"
SIDE = 12  # embedding rows on each side of a picture
ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Round:
    """All pictures once. `hits` and `loaded_bytes` are None where there is no pool."""

    encoder_runs: int
    hits: int | None
    loaded_bytes: int | None
    seconds: tuple[float, ...]  # of each request
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One engine's rounds."""

    title: str
    start_seconds: float
    rounds: tuple[Round, ...]


def measure(title: str, model: Path, pictures: int, *, pool: bool, console: Console) -> Run:
    """Start an engine, ask about every picture, twice. Raises EngineError when vLLM fails."""
    config = EngineConfig(
        model, ec_transfer=ec_transfer(capacity="256MiB") if pool else None, images_per_prompt=1
    )
    requests = one_each(Picture(seed, SIDE, SIDE) for seed in range(pictures))
    with _progress(console) as progress:
        starting = progress.add_task(f"{title}: vLLM starts", total=None)
        began = time.perf_counter()
        with EngineProcess(config, LOGS / title.replace(" ", "-")) as engine:
            start_seconds = time.perf_counter() - began
            progress.update(starting, total=1, completed=1)
            # A first request of any kind pays for one-time set-up.
            engine.generate(one_each([Picture(pictures, SIDE, SIDE)]))
            rounds = []
            for number in range(1, ROUNDS + 1):
                task = progress.add_task(f"{title}: round {number}", total=len(requests))
                rounds.append(_round(engine, requests, pool, partial(progress.advance, task)))
    return Run(title, start_seconds, tuple(rounds))


def _round(
    engine: EngineProcess, requests: Sequence[Request], pool: bool, advance: Callable[[], None]
) -> Round:
    before = engine.pool().counts if pool else {}
    seconds, tokens = [], []
    with engine.counting() as encoded:
        for request in requests:
            (outcome,) = engine.generate([request])
            seconds.append(outcome.seconds)
            tokens.append(outcome.tokens)
            advance()
    after = engine.pool().counts if pool else {}
    return Round(
        encoded.items,
        after.get("hits", 0) - before.get("hits", 0) if pool else None,
        after.get("loaded_bytes", 0) - before.get("loaded_bytes", 0) if pool else None,
        tuple(seconds),
        tuple(tokens),
    )


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
