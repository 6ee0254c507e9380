"""Runs the tests of real engines on every supported vLLM and writes what was seen into README.md.

    compat.py WHEEL [ENVIRONMENT...]

The rows of the table are the tests' scenarios, the columns the versions. Without names, all
environments are run; the table is written only then. Ends with status 1 when anything failed.
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

    environment: Environment
    libraries: dict[str, str]
    scenarios: dict[str, bool]
    passed: bool


def main(wheel: str, names: list[str]) -> int:
    environments = read_environments()
    chosen = [environments[name] for name in names] if names else list(environments.values())
    columns = [column(each, wheel) for each in sorted(chosen, key=lambda each: each.vllm)]
    table = render(columns)
    print(f"\n{table}")
    if not names:
        write(table)
    return 0 if all(each.passed for each in columns) else 1


def column(environment: Environment, wheel: str) -> Column:
    """Install, test, and read the results of one version."""
    say(f"vLLM {environment.vllm}")
    if environment.name != "main":  # which runs from these very files
        install_wheel(environment, wheel)
    RESULTS.mkdir(parents=True, exist_ok=True)
    results = RESULTS / f"{environment.name}.xml"
    results.unlink(missing_ok=True)
    started = time.monotonic()
    status = subprocess.run(
        [str(environment.python), "-m", "pytest", "-v", "-m", "real", "tests/real"]
        + [f"--junitxml={results}", "-p", "no:cacheprovider"],
        cwd=ROOT,
    ).returncode
    say(f"vLLM {environment.vllm}: status {status} after {time.monotonic() - started:.0f} s")
    if not results.exists():
        raise SetUpError(f"pytest did not run on vLLM {environment.vllm}")
    return Column(environment, libraries(environment), scenarios(results), status == 0)


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
    rows = [["", *(f"vLLM {each.environment.vllm}" for each in columns)]]
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
        sys.exit(main(sys.argv[1], sys.argv[2:]))
    except SetUpError as error:
        sys.exit(f"\ncompat failed: {error}")
