"""Instructions per operation of the core: `python -m benches.instructions`. Needs valgrind, cargo.

They repeat to a few in a thousand on a machine however busy, so a change of the code shows where a
clock shows only noise. They are no times: caches and the Python side are not in them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from benches import ROOT

RESULTS = ROOT / "benches" / "results" / "instructions.json"
COUNT = 1_000
_TARGET = ROOT / "target" / "callgrind"
_COLLECTED = re.compile(r"Collected\s*:\s*(\d+)")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.instructions", description=__doc__)
    parser.add_argument("operation", nargs="*", help="all if none is given")
    wanted = parser.parse_args().operation
    if shutil.which("valgrind") is None:
        sys.exit("valgrind is missing (on Debian: apt-get install valgrind)")
    program = build()
    listed = subprocess.run([program], capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.splitlines() if not wanted or name in wanted]
    counts = {}
    for name in names:
        counts[name] = count(program, name)
        print(f"{name:28} {counts[name]:>8,.0f} instructions", flush=True)
    if not wanted:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(counts, indent=1) + "\n")


def build() -> Path:
    """Compile the operations in the release profile, with names for what is to be counted."""
    # Valgrind hides the kernel's own page of functions, which rustix would look for.
    flags = f"{os.environ.get('RUSTFLAGS', '')} --cfg rustix_use_libc".strip()
    variables = {
        **os.environ,
        "RUSTFLAGS": flags,
        "CARGO_TARGET_DIR": str(_TARGET),
        "CARGO_PROFILE_BENCH_DEBUG": "line-tables-only",
    }
    command = ["cargo", "bench", "--package", "ecpool-core", "--bench", "instructions", "--no-run"]
    command += ["--message-format", "json", "--quiet"]
    built = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)
    if built.returncode != 0:
        sys.exit("the operations could not be compiled")
    messages = (json.loads(line) for line in built.stdout.splitlines())
    programs = [each["executable"] for each in messages if each.get("executable")]
    return Path(programs[-1])


def count(program: Path, name: str) -> float:
    """Instructions of one operation, on average."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    command += ["--toggle-collect=*measured*", str(program), name, str(COUNT)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = _COLLECTED.search(done.stderr)
    if done.returncode != 0 or found is None:
        sys.exit(f"valgrind failed:\n{done.stderr[-2000:]}")
    return int(found[1]) / COUNT


if __name__ == "__main__":
    main()
