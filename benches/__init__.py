"""Benchmarks: ours beside vLLM's own classes. `python -m benches --help`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# The fake requests and the engine harness are the tests'.
sys.path.insert(0, str(ROOT / "tests"))
