"""Runs real vLLM over the same pictures twice, without a connector and with ecpool's, and compares.

python -m demo [--pictures N]
"""

from __future__ import annotations

import argparse
import shutil
import sys

from rich.console import Console

from demo.measure import LOGS, measure
from demo.report import problems, show
from support import tiny_model
from support.engines import EngineError


def main() -> int:
    arguments = _arguments()
    console = Console()
    shutil.rmtree(LOGS, ignore_errors=True)
    console.print(
        "[bold]ecpool[/]: real vLLM on this machine's CPU, a local model with random weights"
    )
    try:
        with console.status("making the model (once)"):
            model = tiny_model.build(tiny_model.DEMO)
        without = measure("without", model, arguments.pictures, pool=False, console=console)
        pooled = measure("with ecpool", model, arguments.pictures, pool=True, console=console)
    except EngineError as error:
        console.print("[bold red]The demo failed: vLLM did not start or did not answer.[/]")
        console.print(str(error), markup=False, highlight=False)
        console.print(f"Everything that vLLM printed is in {LOGS}.", highlight=False)
        return 1
    show(console, without, pooled)
    found = problems(without, pooled)
    for problem in found:
        console.print(f"[bold red]not as it should be:[/] {problem}")
    return 1 if found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--pictures", type=int, default=24, help="how many (default: 24)")
    arguments = parser.parse_args()
    if arguments.pictures < 8:
        parser.error("vLLM itself keeps a few pictures, so it takes at least 8 to show anything")
    return arguments


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
