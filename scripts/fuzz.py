"""Fuzzes the core: random bytes as headers and index contents, random sequences of operations.

    fuzz.py                        each target for a minute
    fuzz.py index --seconds 3600   one, for longer
    fuzz.py --plain --count 50000  without libFuzzer, on seeded random inputs, with any toolchain

Needs the nightly toolchain and cargo-fuzz (`cargo install cargo-fuzz`) unless --plain is given.
What is found lies in rust/fuzz/artifacts; `cargo +nightly fuzz run TARGET FILE` repeats it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).resolve().parent.parent / "rust" / "fuzz"
TARGETS = ["header", "index", "operations"]
SEEDS = "400"
RANDOM = ["cargo", "run", "--quiet", "--release", "--no-default-features", "--bin", "random", "--"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--plain", action="store_true", help="without libFuzzer")
    parser.add_argument("--count", type=int, default=20_000, help="inputs of each target, if plain")
    options = parser.parse_args()
    unknown = set(options.targets) - set(TARGETS)
    if unknown:
        parser.error(
            f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}"
        )
    failed = []
    for target in options.targets or TARGETS:
        if options.plain:
            passed = _call([*RANDOM, "run", target, str(options.count)])
        else:
            passed = _fuzz(target, options.seconds)
        if not passed:
            failed.append(target)
    print(f"failed: {', '.join(failed)}" if failed else "nothing found")
    return 1 if failed else 0


def _fuzz(target: str, seconds: int) -> bool:
    corpus = FUZZ / "corpus" / target
    if not corpus.is_dir() and not _call([*RANDOM, "seeds", target, SEEDS, str(corpus)]):
        return False
    limits = [f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=4096", "-max_len=2048"]
    command = ["cargo", "+nightly", "fuzz", "run", "--fuzz-dir", ".", target, "--", *limits]
    return _call([*command, "-print_final_stats=1"])


def _call(command: list[str]) -> bool:
    return subprocess.run(command, cwd=FUZZ, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
