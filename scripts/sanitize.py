"""Runs the core's tests under AddressSanitizer and ThreadSanitizer, with the nightly toolchain.

    sanitize.py              both
    sanitize.py thread -- lock::tests     one, and what to pass to the tests

The standard library comes as it is installed, without instrumentation, unless its source is there
(`rustup component add rust-src`): then it is built anew. Without that ThreadSanitizer does not see
what the library's own locks, threads and channels order, so what it reports in code that is ordered
by these alone is not a finding; `tsan-suppressions.txt` beside this file names them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = "x86_64-unknown-linux-gnu"
SUPPRESSIONS = Path(__file__).with_name("tsan-suppressions.txt")
# Its own threads do not survive a fork, and neither sanitizer follows the model checker's stacks.
SKIPPED = {"address": ["model"], "thread": ["model", "fork"]}
# Whole processes one by one tell ThreadSanitizer nothing that the unit tests' threads do not.
TESTS = {"address": ["--lib", "--tests"], "thread": ["--lib"]}
OPTIONS = {
    "address": {"ASAN_OPTIONS": "detect_stack_use_after_return=1:abort_on_error=1"},
    "thread": {"TSAN_OPTIONS": f"suppressions={SUPPRESSIONS}:halt_on_error=0:exitcode=66"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "sanitizer", nargs="*", default=["address", "thread"], choices=list(OPTIONS)
    )
    parser.add_argument("--cases", type=int, default=20, help="cases of each property test")
    options, tests = parser.parse_known_args()
    failed = [name for name in options.sanitizer if not _run(name, options.cases, tests)]
    return 1 if failed else 0


def _run(sanitizer: str, cases: int, tests: list[str]) -> bool:
    rebuilt = _has_library_source()
    flags = f"-Zsanitizer={sanitizer} -Cforce-frame-pointers=yes"
    command = [
        "cargo",
        "+nightly",
        "test",
        "--package",
        "ecpool-core",
        *TESTS[sanitizer],
        "--no-fail-fast",
    ]
    command += ["--target", TARGET, "--target-dir", str(ROOT / "target" / f"sanitize-{sanitizer}")]
    if rebuilt:
        command.append("-Zbuild-std")
    else:
        flags += " -Cunsafe-allow-abi-mismatch=sanitizer"
    command += ["--", *tests, *(f"--skip={name}" for name in SKIPPED[sanitizer])]
    environment = os.environ | OPTIONS[sanitizer]
    environment |= {"RUSTFLAGS": flags, "PROPTEST_CASES": str(cases), "RUST_BACKTRACE": "0"}
    library = "built with it" if rebuilt else "as installed, not instrumented"
    print(f"{sanitizer}: the standard library is {library}", flush=True)
    begun = time.monotonic()
    ended = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    outcome = "no finding" if ended.returncode == 0 else f"exit code {ended.returncode}"
    print(f"{sanitizer}: {outcome} in {time.monotonic() - begun:.0f} s", flush=True)
    return ended.returncode == 0


def _has_library_source() -> bool:
    found = subprocess.run(
        ["rustc", "+nightly", "--print", "sysroot"], capture_output=True, text=True, check=True
    )
    return (Path(found.stdout.strip()) / "lib/rustlib/src/rust/library/std").is_dir()


if __name__ == "__main__":
    sys.exit(main())
