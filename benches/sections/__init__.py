"""The sections of the benchmark, in the order of the table."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

from benches.measure import Effort
from benches.report import Row

Section = Callable[[Effort], Iterator[Row]]

# Name, and what its module's `rows` measures.
SECTIONS = {
    "cycle": "alloc (evicting) + mark_ready + pin + unpin",
    "delegate": "a whole step of the scheduler's half",
    "tracker": "StepTracker: adds and a step",
    "metadata": "a step's metadata: bytes, pickle, unpickle",
    "regions": "creating, attaching and filling regions",
    "copies": "saving and loading on CPU",
    "scaling": "cost by occupancy and by entries",
    "sharing": "many processes on one pool",
    "engines": "latency inside real vLLM",
}


def section(name: str) -> Section:
    """A section's generator of rows; its module is imported only now."""
    rows: Section = importlib.import_module(f"benches.sections.{name}").rows
    return rows
