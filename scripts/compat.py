"""Runs the tests of real engines on every supported vLLM and writes what was seen into README.md.

    compat.py WHEEL [ENVIRONMENT...]

The rows of the table are the tests' scenarios, the columns the versions. Without names, all
environments are run. The table is written once all of them have been tested with this wheel.
Ends with a status other than 0 when anything failed.
"""

from __future__ import annotations

import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from environments import ROOT, Environment, SetUpError, install_wheel, read_environments, say

README = ROOT / "README.md"
RESULTS = ROOT / ".cache" / "compat"
BEGIN, END = "<!-- compat: begin -->", "<!-- compat: end -->"


@dataclass(frozen=True)
class Column:
    """One version: its libraries, and for each scenario whether all of its tests passed."""

    vllm: str
    libraries: dict[str, str]
    scenarios: dict[str, bool]


def main(wheel: Path, names: list[str]) -> int:
    known = read_environments()
    if unknown := [name for name in names if name not in known]:
        raise SetUpError(f"no environment is called {unknown[0]!r}: {', '.join(known)}")
    environments = sorted(known.values(), key=lambda each: each.vllm)
    chosen = [each for each in environments if not names or each.name in names]
    statuses = [test(each, wheel) for each in chosen]
    table = render([column(each) for each in environments if results_of(each, wheel)])
    print(f"\n{table}")
    if all(results_of(each, wheel) for each in environments):
        write(table)
    return max(statuses)


def test(environment: Environment, wheel: Path) -> int:
    """Install and test one version; pytest's exit status."""
    say(f"vLLM {environment.vllm}")
    if environment.name != "main":  # which runs from these very files
        install_wheel(environment, str(wheel))
    RESULTS.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    status = subprocess.run(
        [str(environment.python), "-m", "pytest", "-v", "-m", "real", "tests/real"]
        + [f"--junitxml={RESULTS / environment.name}.xml", "-p", "no:cacheprovider"],
        cwd=ROOT,
    ).returncode
    say(f"vLLM {environment.vllm}: status {status} after {time.monotonic() - started:.0f} s")
    return status


def results_of(environment: Environment, wheel: Path) -> bool:
    """Whether this version was tested with this wheel."""
    results = RESULTS / f"{environment.name}.xml"
    return results.exists() and results.stat().st_mtime >= wheel.stat().st_mtime


def column(environment: Environment) -> Column:
    seen = scenarios(RESULTS / f"{environment.name}.xml")
    return Column(environment.vllm, libraries(environment), seen)


def scenarios(results: Path) -> dict[str, bool]:
    """Scenario → whether every test of it passed; a test that was skipped says nothing."""
    seen: dict[str, bool] = {}
    for case in ElementTree.parse(results).iter("testcase"):
        named = [
            each.get("value") for each in case.iter("property") if each.get("name") == "scenario"
        ]
        if case.find("skipped") is not None:
            continue
        passed = case.find("failure") is None and case.find("error") is None
        for name in filter(None, named):
            seen[name] = seen.get(name, True) and passed
    return seen


def libraries(environment: Environment) -> dict[str, str]:
    names = ("torch", "transformers")
    code = f"from importlib.metadata import version; print(*map(version, {names}))"
    output = subprocess.run(
        [str(environment.python), "-c", code], capture_output=True, text=True, check=True
    ).stdout
    return dict(zip(names, output.split(), strict=True))


def render(columns: list[Column]) -> str:
    """The table in Markdown."""
    rows = [["", *(f"vLLM {each.vllm}" for each in columns)]]
    rows.append([":--", *(":-:" for _ in columns)])
    for name in dict.fromkeys(name for each in columns for name in each.scenarios):
        marks = {True: "passes", False: "**fails**", None: "not run"}
        rows.append([name, *(marks[each.scenarios.get(name)] for each in columns)])
    for library in ("torch", "transformers"):
        rows.append([f"with {library}", *(each.libraries[library] for each in columns)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write(table: str) -> None:
    before, begin, rest = README.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SetUpError(f"{README.name} has no place for the table ({BEGIN} … {END})")
    README.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
    say("README.md has the table")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
    except SetUpError as error:
        sys.exit(f"\ncompat failed: {error}")
