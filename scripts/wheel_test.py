"""Installs the wheel where nothing else of this repository is, and uses it there.

    wheel_test.py WHEEL

An empty environment with another Python (3.12 or newer) and torch, without vLLM: `ecpool.Pool` has
to work, and the tests that need no vLLM have to pass. Skipped, with a word, on a machine that has
no such Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from environments import ROOT, SetUpError, find_uv, interpreter_version, run, say

DIRECTORY = ROOT / ".cache" / "wheel-test"
OLDEST, NEWEST = (3, 12), (3, 14)
TEST_TOOLS = ["hypothesis", "pytest", "pytest-timeout", "typing-extensions"]

CHECK = """
import importlib.util, sys
import ecpool, ecpool._native
assert "torch" not in sys.modules, "importing ecpool imports torch"
assert importlib.util.find_spec("vllm") is None, "vLLM is here, so this shows nothing"
import torch
from ecpool import Pool
with Pool(capacity="8MiB") as pool:
    written = torch.arange(12_000, dtype=torch.float32).reshape(60, 200)
    pool.put("picture", written)
    read = pool.get("picture")
    assert pool.contains("picture") and not pool.contains("another")
    assert read is not None and torch.equal(read, written)
    assert pool.get("another") is None
print(f"ecpool {ecpool.__version__} from {ecpool.__file__} works")
print(f"with Python {sys.version.split()[0]} and torch {torch.__version__}")
"""


def main(wheel: str) -> None:
    python = find_newer_python()
    if python is None:
        print(f"skipped: this machine has no Python {OLDEST[0]}.{OLDEST[1]} or newer")
        return
    say(f"an empty environment with {python}")
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    uv = find_uv()
    run([uv, "venv", "--quiet", "--python", python, str(DIRECTORY)])
    own = str(DIRECTORY / "bin" / "python")
    run(
        [uv, "pip", "install", "--quiet", "--python", own]
        + ["--constraint", str(ROOT / "requirements" / "main.txt")]
        + [f"ecpool[cli,torch] @ {Path(wheel).resolve().as_uri()}", *TEST_TOOLS]
    )
    run([own, "-c", CHECK])
    run(
        [
            own,
            "-m",
            "pytest",
            "-q",
            "-m",
            "not real and not gpu and not slow",
            "tests/core",
            "tests/torch",
        ]
    )


def find_newer_python() -> str | None:
    """The newest interpreter in range, on the path or among those that pyenv or uv know."""
    found = {
        version: path
        for path in _candidates()
        if OLDEST <= (version := interpreter_version(path)) <= NEWEST
    }
    return found[max(found)] if found else None


def _candidates() -> list[str]:
    names = [f"python{OLDEST[0]}.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)]
    paths = [path for name in names if (path := shutil.which(name))]
    if pyenv := _output(["pyenv", "root"]):
        paths += map(str, Path(pyenv).glob("versions/*/bin/python3"))
    if known := _output(
        [find_uv(), "python", "find", "--no-python-downloads", f">={OLDEST[0]}.{OLDEST[1]}"]
    ):
        paths.append(known)
    return paths


def _output(command: list[str]) -> str:
    if not shutil.which(command[0]):
        return ""
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    return result.stdout.strip() if result.returncode == 0 else ""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(sys.argv[1])
    except SetUpError as error:
        sys.exit(f"the wheel's test failed: {error}")
