"""Draws the plots from the JSON of a run: `python -m benches.plots FILE`.

Needs matplotlib and nothing else of the benchmarks, so it can run in an environment of its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benches.report import Row, read_rows

OURS, PEER, THIRD, FOURTH = "#1b6ca8", "#c8553d", "#8d99ae", "#2a9d8f"
_SIZE = (6.4, 3.6)  # inches
_DPI = 110

Draw = Callable[[Axes, Sequence[Row]], None]


def main(file: Path) -> None:
    """Write each plot for which the file has rows, beside it."""
    rows = [row for row in read_rows(file) if row.ours is not None]
    written = []
    for name, (title, section, draw) in PLOTS.items():
        chosen = [row for row in rows if row.section == section]
        if chosen:
            _draw(file.with_name(f"{name}.png"), title, draw, chosen)
            written.append(f"{name}.png")
    print("plots: " + (", ".join(written) or "none"))


def _draw(path: Path, title: str, draw: Draw, rows: Sequence[Row]) -> None:
    figure, axes = plt.subplots(figsize=_SIZE, dpi=_DPI, layout="constrained")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.25, which="both", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes, rows)
    figure.savefig(path)
    plt.close(figure)


def _line(
    axes: Axes,
    rows: Sequence[Row],
    label: str,
    color: str,
    *,
    peer: bool = False,
    scale: float = 1.0,
) -> None:
    """Medians over the first number of each row's case, with the quartiles as a band."""
    points = [(number_of(row.case), row.peer if peer else row.ours) for row in rows]
    there = [(x, sample) for x, sample in points if sample is not None]
    if not there:
        return
    xs = [x for x, _ in there]
    axes.plot(
        xs, [s.median * scale for _, s in there], "o-", color=color, label=label, markersize=4
    )
    low, high = ([getattr(s, side) * scale for _, s in there] for side in ("low", "high"))
    axes.fill_between(xs, low, high, color=color, alpha=0.18, linewidth=0)


def _dashed(axes: Axes, rows: Sequence[Row], label: str, color: str, *, scale: float = 1.0) -> None:
    """The other side's medians, as a thin line."""
    there = [(number_of(row.case), row.peer.median * scale) for row in rows if row.peer]
    axes.plot([x for x, _ in there], [y for _, y in there], "--", color=color, label=label, lw=1)


def number_of(case: str) -> float:
    """The first number in a row's name."""
    found = re.search(r"[\d,]+(?:\.\d+)?", case)
    return float(found[0].replace(",", "")) if found else 0.0


def _cycle(axes: Axes, rows: Sequence[Row]) -> None:
    blocks = [row for row in rows if row.case.endswith("blocks")]
    held = [row for row in rows if "rows" in row.case]
    _line(axes, blocks, "vLLM's EmbeddingCache", PEER, peer=True, scale=1e6)
    _line(axes, blocks, "ecpool, heap, as many blocks", OURS, scale=1e6)
    _line(axes, held, "ecpool, shared region, as many bytes", THIRD, scale=1e6)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="blocks (vLLM: one a row) of an item",
        ylabel="µs a cycle",
    )
    axes.legend(fontsize=8)


def _bars(axes: Axes, rows: Sequence[Row], unit: str, scale: float) -> None:
    """A pair of bars a row, on a logarithmic scale."""
    shown = list(reversed(rows))
    places = range(len(shown))
    mine = [row.ours.median * scale for row in shown if row.ours]
    other = [row.peer.median * scale if row.peer else float("nan") for row in shown]
    axes.barh([p + 0.2 for p in places], other, 0.38, color=PEER, label="the other")
    axes.barh([p - 0.2 for p in places], mine, 0.38, color=OURS, label="ecpool")
    axes.set_yticks(list(places), [row.case for row in shown], fontsize=7)
    axes.set(xscale="log", xlabel=unit)
    axes.grid(visible=False, axis="y")
    axes.legend(fontsize=8)


def _delegate(axes: Axes, rows: Sequence[Row]) -> None:
    _bars(axes, rows, "µs a step of 4 hits and 4 saves", 1e6)


def _peer(row: Row) -> float:
    return row.peer.median if row.peer else 0.0


def _copies(axes: Axes, rows: Sequence[Row]) -> None:
    whole = [row for row in rows if "pieces" not in row.case]
    for kind, color in (("save", OURS), ("load, fresh", PEER), ("Region.read, warm", THIRD)):
        ours = [row for row in whole if row.case.endswith(kind) and row.against == "memcpy"]
        better = [max((row for row in whole if row.case == each.case), key=_peer) for each in ours]
        _line(axes, ours, f"{kind}: ecpool", color)
        _dashed(axes, better, f"{kind}: better of memcpy and copy_", color)
    axes.set(xscale="log", xlabel="MB", ylabel="GB/s", ylim=(0, None))
    axes.legend(fontsize=7)


def _scaling(axes: Axes, rows: Sequence[Row]) -> None:
    for kind, color in (
        ("cycle", OURS),
        ("hit, get", THIRD),
        ("hit, lease + end_leases", FOURTH),
    ):
        chosen = [row for row in rows if row.case.endswith(f"entries: {kind}")]
        _line(axes, chosen, f"ecpool: {kind}", color, scale=1e9)
        if kind != "hit, lease + end_leases":
            _dashed(axes, chosen, f"vLLM: {kind}", color, scale=1e9)
    axes.set(xscale="log", xlabel="entries of one block", ylabel="ns", ylim=(0, None))
    axes.legend(fontsize=7)


def _occupancy(axes: Axes, rows: Sequence[Row]) -> None:
    chosen = [row for row in rows if "% full, mixed" in row.case]
    _line(axes, chosen, "ecpool", OURS, scale=1e9)
    _line(axes, chosen, "vLLM's EmbeddingCache", PEER, peer=True, scale=1e9)
    axes.set(
        xlabel="% of the blocks in use; at 100 % each alloc evicts",
        ylabel="ns a cycle",
        ylim=(0, None),
    )
    axes.legend(fontsize=8)


def _engines(axes: Axes, rows: Sequence[Row]) -> None:
    """Cold and warm latency of each way, from the pairs that the rows hold."""
    models = list(dict.fromkeys(row.case.partition(":")[0] for row in rows))
    bars: list[tuple[str, float, str]] = []
    for model in models:
        mine = [row for row in rows if row.case.startswith(model)]
        for word, short in (("new", "new picture"), ("again", "again")):
            chosen = [row for row in mine if word in row.case]
            bars += [
                (f"{model}, {short}: {r.against}", r.peer.median, THIRD) for r in chosen if r.peer
            ]
            bars += [
                (f"{model}, {short}: ecpool", r.ours.median, OURS) for r in chosen[:1] if r.ours
            ]
    bars.reverse()
    axes.barh(range(len(bars)), [b[1] * 1e3 for b in bars], color=[b[2] for b in bars])
    axes.set_yticks(range(len(bars)), [b[0] for b in bars], fontsize=7)
    axes.set(xlabel="ms a request, one token")
    axes.grid(visible=False, axis="y")


def _regions(axes: Axes, rows: Sequence[Row]) -> None:
    for kind, color in (("create", THIRD), ("create and fill", OURS), ("attach", FOURTH)):
        chosen = [row for row in rows if row.case.endswith(f"blocks: {kind}")]
        _line(axes, chosen, f"ecpool: {kind}", color, scale=1e3)
    filled = [row for row in rows if row.case.endswith("blocks: create and fill")]
    _line(axes, filled, "vLLM: create and fill", PEER, peer=True, scale=1e3)
    axes.set(xscale="log", yscale="log", xlabel="blocks of 4 KiB", ylabel="ms")
    axes.legend(fontsize=8)


PLOTS: dict[str, tuple[str, str, Draw]] = {
    "cycle": ("alloc (evicting) + mark_ready + pin + unpin", "cycle", _cycle),
    "delegate": ("One step of the scheduler's half", "delegate", _delegate),
    "copies": ("Copies on CPU", "copies", _copies),
    "entries": ("Cost by number of entries", "scaling", _scaling),
    "occupancy": ("Cost by occupancy", "scaling", _occupancy),
    "regions": ("Regions", "regions", _regions),
    "engines": ("Latency inside vLLM on the CPU", "engines", _engines),
}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
