"""Runs one step of a longer job, so that a reader sees what runs, how long it took, and what to
repeat if it failed.

    step.py TITLE COMMAND [ARGUMENT...]
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path


def main(title: str, command: list[str]) -> int:
    bold, red, plain = ("\033[1m", "\033[31m", "\033[0m") if sys.stdout.isatty() else ("", "", "")
    print(f"{bold}==> {title}{plain}", flush=True)
    started = time.monotonic()
    try:
        status = subprocess.run(command, env=environment()).returncode
    except FileNotFoundError:
        print(f"{command[0]}: no such program", file=sys.stderr)
        status = 127
    except KeyboardInterrupt:
        status = 130
    seconds = time.monotonic() - started
    if status == 0:
        print(f"    {title}: ok, {seconds:.0f} s", flush=True)
    else:
        print(
            f"{red}    {title}: FAILED with status {status} after {seconds:.0f} s{plain}\n"
            f"    to repeat it alone: {shlex.join(command)}",
            flush=True,
        )
    return status


def environment() -> dict[str, str]:
    """What this process was given, with the tools of this clone's own environment found first.

    A version manager's stand-in for Python puts its own programs before all others.
    """
    tools = Path(__file__).resolve().parents[1] / ".venv" / "bin"
    return os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
