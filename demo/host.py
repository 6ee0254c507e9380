"""Two real vLLM engines share one pool: the second never encodes what the first has encoded, and
outlives it.

python -m demo.host [--pictures N]
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from statistics import median

from rich.console import Console
from rich.table import Table

from demo.measure import SIDE
from ecpool._native import Region, remove_region
from ecpool.errors import EcpoolError
from support import tiny_model
from support.engines import EngineConfig, EngineError, EngineProcess, ec_transfer
from support.requests import Picture, Request, one_each
from support.tiny_model import REPOSITORY

LOGS = REPOSITORY / ".cache" / "demo-host"
CAPACITY = "256MiB"
PATIENCE = 60.0  # seconds until the first engine must have come to its save

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table. `wanted` is how often the encoder may run."""

    engine: str
    what: str
    encoder_runs: int
    wanted: int
    hits: int
    seconds: float
    identical: bool | None

    @property
    def is_right(self) -> bool:
        return self.encoder_runs == self.wanted and self.identical is not False


class Host:
    """One pool, and the engines that are started on it."""

    def __init__(self, model: Path, pictures: int, console: Console) -> None:
        self.pool = f"demo-{token_hex(4)}"
        self.known = one_each(Picture(seed, SIDE, SIDE) for seed in range(pictures))
        self.new = one_each([Picture(pictures, SIDE, SIDE)])
        self.answers: dict[Request, Tokens] = {}
        self.lines: list[Line] = []
        self._model = model
        self._console = console
        self._starts = 0

    @contextmanager
    def engine(self, name: str) -> Iterator[EngineProcess]:
        """An engine on the pool, warmed up by text alone."""
        self._starts += 1
        settings = ec_transfer(capacity=CAPACITY, pool=self.pool, persist=True)
        config = EngineConfig(self._model, ec_transfer=settings, images_per_prompt=1)
        process = EngineProcess(config, LOGS / f"start-{self._starts}")
        with self._console.status(f"{name} starts (half a minute)"):
            process.__enter__()
        self._console.print(f"[green]✓[/] {name} runs", highlight=False)
        try:
            process.generate([Request(text="say something", max_tokens=2)])
            yield process
        finally:
            process.close()

    def ask(
        self, engine: EngineProcess, name: str, what: str, requests: Sequence[Request], wanted: int
    ) -> None:
        """Ask one by one, and note what it took and whether the tokens are those of before."""
        before = engine.pool().counts.get("hits", 0)
        seconds, same = [], []
        with self._console.status(f"{name}: {what}"), engine.counting() as encoded:
            for request in requests:
                (outcome,) = engine.generate([request])
                seconds.append(outcome.seconds)
                if request in self.answers:
                    same.append(self.answers[request] == outcome.tokens)
                self.answers.setdefault(request, outcome.tokens)
        line = Line(
            name,
            what,
            encoded.items,
            wanted,
            engine.pool().counts.get("hits", 0) - before,
            median(seconds),
            all(same) if same else None,
        )
        self.lines.append(line)

    def kill_in_a_save(self, engine: EngineProcess) -> None:
        """Let the engine come half through a save, and kill it with SIGKILL right there."""
        flag = LOGS / "half-saved"
        engine.call("stop_in_next_save", str(flag))

        def ask_in_vain() -> None:
            with suppress(EngineError):
                engine.generate(self.new)

        asking = threading.Thread(target=ask_in_vain)
        asking.start()
        deadline = time.monotonic() + PATIENCE
        while not flag.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        engine.kill()
        asking.join()
        if not flag.exists():
            raise EngineError("the first engine did not come to its save")

    def remains(self) -> str:
        """What the dead one has left in the pool, after the others have cleaned up behind it."""
        with Region.attach(self.pool, role="tool") as region:
            status, wrong = region.status(), region.check()
        left = status["writing"] + status["orphaned"] + status["doomed"]
        return (
            f"In the pool: {status['ready']} items, {left} unfinished ones, "
            f"{status['holds']} holds, {len(wrong)} broken invariants."
        )

    def remove(self) -> None:
        with suppress(EcpoolError):
            remove_region(self.pool)


def play(host: Host, console: Console) -> None:
    """The whole demonstration. Raises EngineError when vLLM fails."""
    many = len(host.known)
    with host.engine("engine 1") as one:
        host.ask(one, "engine 1", f"{many} new pictures", host.known, wanted=many)
        with host.engine("engine 2") as two:
            host.ask(two, "engine 2", f"the same {many}", host.known, wanted=0)
            host.kill_in_a_save(one)
            console.print(
                "[red]✗[/] engine 1 was killed (SIGKILL), half through saving a new picture"
            )
            host.ask(two, "engine 2", "the half-saved one", host.new, wanted=1)
            host.ask(two, "engine 2", f"the {many} again", host.known, wanted=0)
            with host.engine("engine 1 again") as again:
                everything = [*host.known, *host.new]
                host.ask(again, "engine 1 again", f"all {many + 1}", everything, wanted=0)
                console.print(host.remains(), highlight=False)


def show(console: Console, lines: Sequence[Line]) -> None:
    table = Table(title="two vLLM engines, one pool", title_style="bold")
    table.add_column("engine")
    table.add_column("is asked for")
    for name in ("encoded", "hits", "latency"):
        table.add_column(name, justify="right")
    table.add_column("same tokens", justify="center")
    for line in lines:
        runs = (
            f"[bold green]{line.encoder_runs}[/]"
            if line.is_right
            else f"[bold red]{line.encoder_runs}[/]"
        )
        same = {None: "–", True: "[green]yes[/]", False: "[bold red]no[/]"}[line.identical]
        latency = f"{line.seconds * 1e3:.0f} ms"
        table.add_row(line.engine, line.what, runs, str(line.hits), latency, same)
    console.print(table)
    console.print(
        "Latency is the median of whole requests, one at a time. The half-saved picture was "
        "encoded "
        "again, never read. With neither a hit nor an encoder run, vLLM's own cache had the item.",
        highlight=False,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.host", description=__doc__)
    parser.add_argument("--pictures", type=int, default=12, help="how many (default: 12)")
    pictures = parser.parse_args().pictures
    if pictures < 3:
        parser.error("vLLM itself keeps two pictures, so it takes at least 3 to show anything")
    console = Console()
    shutil.rmtree(LOGS, ignore_errors=True)
    console.print("[bold]ecpool[/]: two real vLLM engines on this machine's CPU share one pool")
    with console.status("making the model (once)"):
        model = tiny_model.build(tiny_model.DEMO)
    host = Host(model, pictures, console)
    try:
        play(host, console)
    except EngineError as error:
        console.print("[bold red]The demo failed: vLLM did not start or did not answer.[/]")
        console.print(str(error), markup=False, highlight=False)
        console.print(f"Everything that vLLM printed is in {LOGS}.", highlight=False)
        return 1
    finally:
        host.remove()
    show(console, host.lines)
    wrong = [line for line in host.lines if not line.is_right]
    for line in wrong:
        console.print(
            f"[bold red]not as it should be:[/] {line.engine}, {line.what}: "
            f"{line.encoder_runs} encoder runs, not {line.wanted}, or other tokens"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
