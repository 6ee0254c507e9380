"""Long runs of the simulated engine: `python scripts/simulate.py --steps 1000000`.

Goes from world to world, each with settings of its own from its seed, until so many steps have been
made in all. Stops at the first failure with the line that shows it again. Needs vLLM.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

TOLD = ("steps", "announced loads", "announced saves", "pool evictions", "preempted", "stalls")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=1, help="of the first world; the next has the next"
    )
    parser.add_argument(
        "--steps", type=int, default=1_000_000, help="steps in all (default: %(default)s)"
    )
    parser.add_argument("--steps-per-world", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--worlds", type=int, default=0, help="at most so many worlds; 0: no limit")
    parser.add_argument("--vllm-order", choices=["v1", "v2"], help="order of calls; both without")
    parser.add_argument(
        "--restarts", action="store_true", help="engines die and begin again; slow, by 2 s a world"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of every world"
    )
    return parser.parse_args()


def fixed_settings(options: argparse.Namespace) -> dict[str, Any]:
    from ast import literal_eval

    fixed: dict[str, Any] = {}
    for each in options.set:
        name, _, value = each.partition("=")
        fixed[name] = literal_eval(value)
    if options.vllm_order:
        fixed["runner"] = options.vllm_order
    if options.restarts:
        fixed.update(restarts=True, copies="late", completion="events")
    return fixed


def main() -> int:
    options = arguments()
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    from sim.driver import SimulationFailed, simulate
    from sim.settings import Settings
    from sim.simulation import numbers

    fixed = fixed_settings(options)
    total: Counter[str] = Counter()
    started = last = time.monotonic()
    seed = options.seed
    while total["steps"] < options.steps and (
        not options.worlds or seed < options.seed + options.worlds
    ):
        settings = Settings.draw(seed, **fixed)
        steps = min(options.steps_per_world, options.steps - total["steps"])
        try:
            total.update(numbers(simulate(settings, steps)))
        except SimulationFailed as failure:
            print(f"\nseed {seed} failed\n{failure}", file=sys.stderr, flush=True)
            return 1
        seed += 1
        if time.monotonic() - last > 5:
            last = time.monotonic()
            show(total, seed - options.seed, last - started)
    show(total, seed - options.seed, time.monotonic() - started)
    for name, count in sorted(total.items()):
        print(f"  {count:>12,}  {name}")
    return 0


def show(total: Counter[str], worlds: int, seconds: float) -> None:
    parts = ", ".join(f"{total[name]:,} {name}" for name in TOLD)
    rate = total["steps"] / max(seconds, 1e-9)
    print(f"{seconds:7.0f} s  {worlds} worlds, {parts}; {rate:,.0f} steps/s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
