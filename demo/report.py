"""The demo's table, and what must be true of it."""

from __future__ import annotations

from statistics import median

from rich.console import Console
from rich.table import Table

from demo.measure import Round, Run
from ecpool.sizes import format_size

ROUND_NAMES = ("first time", "again")


def show(console: Console, without: Run, pooled: Run) -> None:
    """Print the table and a sentence that says what it means."""
    pictures = len(without.rounds[0].tokens)
    table = Table(title=f"{pictures} pictures, each asked about twice", title_style="bold")
    table.add_column("pool", no_wrap=True)
    table.add_column("round", no_wrap=True)
    for name in ("encoder runs", "hits", "loaded", "latency"):
        table.add_column(name, justify="right")
    table.add_column("tokens identical", justify="center")
    for run in (without, pooled):
        for name, now, plain in zip(ROUND_NAMES, run.rounds, without.rounds, strict=True):
            table.add_row(run.title, name, *_cells(run, now, plain))
        table.add_section()
    console.print(table)
    console.print(_sentence(without, pooled), highlight=False)


def problems(without: Run, pooled: Run) -> list[str]:
    """What differs from the promise: every picture encoded once, and the same tokens as ever."""
    found = []
    pictures = len(without.rounds[0].tokens)
    first, again = pooled.rounds
    if first.encoder_runs != pictures:
        found.append(f"the first round ran the encoder {first.encoder_runs} times, not {pictures}")
    if again.encoder_runs != 0 or again.hits != pictures:
        found.append(f"the second round ran the encoder {again.encoder_runs} times, not 0")
    for name, now, plain in zip(ROUND_NAMES, pooled.rounds, without.rounds, strict=True):
        if now.tokens != plain.tokens:
            found.append(f"tokens differ from those without the pool ({name})")
    return found


def _cells(run: Run, now: Round, plain: Round) -> list[str]:
    if now.hits is None or now.loaded_bytes is None:
        pool_cells, same = ["–", "–"], "–"
    else:
        pool_cells = [str(now.hits), format_size(now.loaded_bytes)]
        same = "[green]yes[/]" if now.tokens == plain.tokens else "[bold red]no[/]"
    runs = f"[bold green]{now.encoder_runs}[/]" if now.encoder_runs == 0 else str(now.encoder_runs)
    return [runs, *pool_cells, f"{_latency(now) * 1e3:.0f} ms", same]


def _latency(now: Round) -> float:
    return median(now.seconds)


def _sentence(without: Run, pooled: Run) -> str:
    faster = _latency(without.rounds[1]) / _latency(pooled.rounds[1])
    return (
        f"A picture that the pool holds is answered {faster:.1f} times as fast as without it. "
        "Latency is the median of whole requests, one at a time. vLLM's own encoder cache has "
        "room for three of these pictures and prefix caching is off here, so a repeat needs its "
        "embeddings again: from the encoder, or from the pool."
    )
