"""The benchmarks still run: each section once, with as little work as possible.

Nothing is said about its figures.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benches import document, report
from benches.measure import SMOKE, Sample
from benches.sections import SECTIONS, section
from benches.table import print_table

QUICK_SECTIONS = [name for name in SECTIONS if name != "engines"]


@pytest.fixture(scope="module")
def results() -> dict[str, list[report.Row]]:
    return {name: list(section(name)(SMOKE)) for name in QUICK_SECTIONS}


@pytest.mark.parametrize("name", QUICK_SECTIONS)
def test_a_section_measures_every_row_it_names(
    name: str, results: dict[str, list[report.Row]]
) -> None:
    rows = results[name]
    assert rows
    for row in rows:
        assert row.section == name
        assert row.not_run or (row.ours is not None and row.ours.median > 0), row.case
        assert bool(row.against) == (row.peer is not None), row.case


def test_rows_survive_their_file_and_sections_that_did_not_run_keep_theirs(
    tmp_path: Path, results: dict[str, list[report.Row]]
) -> None:
    file = tmp_path / "benchmarks.json"
    facts = report.machine_facts() | {"seconds": 1}
    report.write_json(file, results["tracker"], facts)
    report.write_json(file, results["cycle"], facts)
    assert report.read_rows(file) == [*results["cycle"], *results["tracker"]]
    assert report.read_facts(file)["cores"] > 0


def test_a_ratio_above_one_means_that_ours_is_better() -> None:
    def row(unit: str, ours: float, peer: float, **goal: float) -> report.Row:
        mine, other = (Sample(each, each, each, 1) for each in (ours, peer))
        wanted = report.Goal(**goal) if goal else None
        return report.Row("cycle", "case", unit, mine, "other", other, wanted)

    assert row("s", 1.0, 4.0).ratio == 4.0
    assert row("GB/s", 4.0, 1.0).ratio == 4.0
    assert row("s", 1.0, 4.0, ratio=4.0).met
    assert not row("s", 1.0, 3.9, ratio=4.0).met
    assert row("B", 64.0, 1.0, at_most=64.0).met
    assert not row("B", 65.0, 1.0, at_most=64.0).met
    assert row("s", 1.0, 4.0).met is None


def test_the_page_gets_the_tables_between_its_marks(
    results: dict[str, list[report.Row]], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row for each in results.values() for row in each]
    facts = report.machine_facts() | {"seconds": 1}
    page = "before\n<!-- tracker: begin -->\nold\n<!-- tracker: end -->\nafter\n"
    new = document.refreshed(page, rows, facts, {})
    assert "old" not in new
    assert new.startswith("before\n")
    assert new.endswith("after\n")
    assert all(row.case in new for row in results["tracker"])
    assert document.refreshed(new, rows, facts, {}) == new
    print_table(rows, facts)
    assert "ratio" in capsys.readouterr().out


def test_the_page_has_a_place_for_every_section() -> None:
    page = document.PAGE.read_text()
    for what in (*SECTIONS, "machine", "goals", "instructions"):
        assert f"<!-- {what}: begin -->" in page
        assert f"<!-- {what}: end -->" in page
