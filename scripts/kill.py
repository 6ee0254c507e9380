"""Kills processes that share a pool, thousands of times, and checks what they leave behind.

    kill.py --kills 1000 --processes 3             one engine: a scheduler and two workers
    kill.py --kills 1000 --clients 4               four clients on one shared pool
    kill.py --kills 500 --engines 2 --crash-points also between any two stores under the lock

Without --lifetime the run is divided among the three lifetimes that a region can have. The choice
of victims, moments and operations follows from --seed; what the system makes of it does not.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kill.harness import Report
    from kill.world import Lifetime, Settings

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "target"
SHM = Path("/dev/shm")


def main() -> int:
    options = _options()
    if options.crash_points:
        _use_native(build_with_crash_points())
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "python")]
    # After the path and the native module are in place.
    from kill.world import Settings

    with tempfile.TemporaryDirectory(dir=SHM, prefix="ecpool-kill-") as parent:
        settings = Settings(
            directory=Path(parent),
            kills=options.kills,
            seed=options.seed,
            engines=options.engines,
            workers=options.processes - 1,
            clients=options.clients,
            batch=options.batch,
            crash_points=options.crash_points,
        )
        print(f"seed {settings.seed}", flush=True)
        reports = [_run(part) for part in _parts(settings, options.lifetime)]
    return 1 if any(report.failures for report in reports) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="processes to kill in all")
    parser.add_argument(
        "--engines", type=int, help="engines at a time (default: 1, or 0 with --clients)"
    )
    parser.add_argument("--processes", type=int, default=3, help="processes of an engine")
    parser.add_argument("--clients", type=int, default=0, help="clients that are no engine")
    parser.add_argument("--lifetime", choices=["private", "shared", "persistent"])
    parser.add_argument("--batch", type=int, default=200, help="kills between two audits of 2 s")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument(
        "--crash-points",
        action="store_true",
        help="build and use the native module that can kill itself",
    )
    options = parser.parse_args()
    if options.engines is None:
        options.engines = 0 if options.clients else 1
    if options.engines + options.clients == 0 or options.processes < 2:
        parser.error("at least one engine of two processes, or one client")
    if options.clients and options.lifetime == "private":
        parser.error("a private region has no other clients")
    return options


def _parts(settings: Settings, lifetime: Lifetime | None) -> list[Settings]:
    """The whole run, or its division: most of it where what is left behind can be seen best."""
    fifth = settings.kills // 5
    shares: dict[Lifetime, int] = {
        "persistent": settings.kills - 2 * fifth,
        "shared": fifth,
        "private": fifth,
    }
    if settings.clients:  # which a private region does not let in
        shares = {"persistent": settings.kills - fifth, "shared": fifth}
    if lifetime is not None:
        shares = {lifetime: settings.kills}
    return [
        replace(settings, lifetime=name, kills=kills, directory=settings.directory / name)
        for name, kills in shares.items()
    ]


def _run(settings: Settings) -> Report:
    from kill.harness import Harness

    begun = time.monotonic()
    report = Harness(settings, log=lambda text: print(f"  {text}", flush=True)).run()
    seconds = time.monotonic() - begun
    print(
        f"{settings.lifetime}: {report.kills} kills in {seconds:.0f} s"
        f" ({report.injected} at crash points), {report.starts} starts, "
        f"{report.orderly} left by themselves, {report.stops} stopped, "
        f"{report.hung_devices} devices wrote on, longest call {report.longest_call * 1e3:.0f} ms"
    )
    seen = {name: value for name, value in report.counters.items() if value}
    if seen:
        print("  " + ", ".join(f"{name} {value}" for name, value in seen.items()))
    for failure in report.failures:
        print(f"  FAILED: {failure}")
    sys.stdout.flush()
    return report


def build_with_crash_points() -> Path:
    """Builds the native module that can kill itself, with every check of debug builds."""
    # For an extension module: symbols of Python come from the interpreter that loads it.
    environment = os.environ | {"PYO3_BUILD_EXTENSION_MODULE": "1", "PYO3_PYTHON": sys.executable}
    command = [
        "cargo", "build", "--quiet", "--locked", "--package", "ecpool-py",
        "--features", "crash-points", "--profile", "checked", "--target-dir", str(TARGET),
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    # A name that Python loads, and that stays as it is if cargo builds again meanwhile.
    module = TARGET / "checked" / f"_native-{os.getpid()}.abi3.so"
    shutil.copyfile(TARGET / "checked" / "lib_native.so", module)
    return module


def _use_native(module: Path) -> None:
    """Puts this file in the place of `ecpool._native`, for this process and its children."""
    loader = importlib.machinery.ExtensionFileLoader("ecpool._native", str(module))
    spec = importlib.util.spec_from_file_location("ecpool._native", module, loader=loader)
    if spec is None:
        raise ImportError(f"{module} cannot be loaded")
    native = importlib.util.module_from_spec(spec)
    sys.modules["ecpool._native"] = native
    loader.exec_module(native)
    module.unlink()


if __name__ == "__main__":
    sys.exit(main())
