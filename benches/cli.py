"""The command: runs sections, prints one table, writes JSON and plots."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benches import ROOT
from benches.measure import FULL, QUICK, Effort
from benches.report import Row, machine_facts, read_rows, write_json
from benches.sections import SECTIONS, section
from benches.table import print_table

RESULTS = ROOT / "benches" / "results"
PLOTTING = ROOT / ".venvs" / "bench" / "bin" / "python"  # has matplotlib, which nothing else needs


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("ecpool").setLevel(logging.ERROR)
    effort = QUICK if options.quick else FULL
    chosen = options.section or list(SECTIONS)
    results: Path = options.results or (RESULTS / "quick" if options.quick else RESULTS)
    file = results / "benchmarks.json"
    facts = machine_facts()
    started = time.monotonic()
    rows = [row for name in SECTIONS if name in chosen for row in run(name, effort)]
    facts["seconds"] = round(time.monotonic() - started)
    write_json(file, rows, facts)
    print_table(rows if options.section else read_rows(file), facts)
    _say(f"written: {_short(file)}")
    _plot(file)
    if any(row.not_run.startswith("failed") for row in rows):
        sys.exit("some sections failed; the table says which")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    listing = "\n".join(f"  {name:10} {about}" for name, about in SECTIONS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benches",
        description="ecpool beside vLLM's own classes.\n\nsections:\n" + listing,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("section", nargs="*", help="what to run; everything if none is given")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller sizes")
    parser.add_argument("--results", type=Path, help="directory for JSON and plots")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.section if name not in SECTIONS]
    if unknown:
        parser.error(f"no section is called {unknown[0]!r}; there are: {', '.join(SECTIONS)}")
    return options


def run(name: str, effort: Effort) -> list[Row]:
    """A section's rows. If it fails, what it had measured and one row that says why."""
    _say(f"{name}: {SECTIONS[name]}")
    started = time.monotonic()
    rows: list[Row] = []
    try:
        for row in section(name)(effort):
            rows.append(row)
    except Exception as error:
        logging.getLogger("benches").exception("%s failed", name)
        reason = f"failed: {type(error).__name__}: {error}"[:200]
        rows.append(Row(name, "the rest of this section", "", None, not_run=reason))
    _say(f"  {len(rows)} rows in {time.monotonic() - started:.0f} s")
    return rows


def _plot(file: Path) -> None:
    """Plots are drawn by an interpreter that has matplotlib, from the JSON alone."""
    interpreter = str(PLOTTING) if PLOTTING.exists() else sys.executable
    command = [interpreter, "-m", "benches.plots", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        _say(done.stdout.strip())
    else:
        last = done.stderr.strip().splitlines()[-1:] or ["?"]
        _say(f"no plots: {last[0]} (`make bench` installs what they need)")


def _short(path: Path) -> str:
    return (
        str(path.resolve().relative_to(ROOT)) if path.resolve().is_relative_to(ROOT) else path.name
    )


def _say(text: str) -> None:
    print(f"-- {text}", file=sys.stderr, flush=True)
