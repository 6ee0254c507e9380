"""The page on reliability names tests: each of them is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
NAME = re.compile(r"`((?:tests|rust)/[\w/]+\.(?:py|rs)(?:::\w+)+)`")


def named() -> list[str]:
    return sorted(set(NAME.findall(PAGE.read_text())))


@cache
def functions_in(path: str) -> set[str]:
    text = (ROOT / path).read_text()
    if path.endswith(".rs"):
        return set(re.findall(r"#\[test\][^{]*?fn (\w+)\(", text))
    found: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}::{each.name}" for each in methods}
    return found


@pytest.mark.parametrize("name", named())
def test_a_named_test_is_there(name: str) -> None:
    path, _, test = name.partition("::")
    assert (ROOT / path).is_file(), f"{path} is not there"
    assert test in functions_in(path), f"{test} is not in {path}"


def test_every_situation_names_tests() -> None:
    table = PAGE.read_text().split("| situation |")[1]
    rows = [line for line in table.splitlines()[2:] if line.startswith("|")]
    assert len(rows) >= 30
    for row in rows:
        situation, tests, seen = (each.strip() for each in row.strip("|").split(" | "))
        assert NAME.search(tests), situation
        assert situation.startswith("**"), situation
        assert seen, situation
