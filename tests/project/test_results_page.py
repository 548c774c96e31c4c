"""Tests the first pages of the site: they are short, and equal the recorded data."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import checkout
import pytest

DOCS = checkout.ROOT / "docs"
RESULTS = (DOCS / "results.md").read_text()
FAQ = (DOCS / "faq.md").read_text()


def module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, checkout.ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_first_pages_are_short() -> None:
    assert len((checkout.ROOT / "README.md").read_text().splitlines()) <= 120
    assert len(RESULTS.split()) <= 1500


@pytest.mark.parametrize("name", ["experts", "links", "planning", "published"])
def test_data_files_are_the_tables_of_the_record(name: str) -> None:
    printed = module("benchmarks/printed.py")

    assert (DOCS / "data" / f"{name}.json").read_text() == printed.text_of(name)


def test_plots_are_those_of_the_data() -> None:
    plots = module("scripts/plots.py")
    drawn = {name: plots.drawn(name) for name in plots.PLOTS}

    assert {
        name: (DOCS / "plots" / f"{name}.svg").read_text()
        for name, picture in drawn.items()
        if picture is not None
    } == {name: picture for name, picture in drawn.items() if picture is not None}
    assert "experts" in drawn


def test_the_tables_of_when_are_those_of_the_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(checkout.ROOT / "benchmarks"))
    when = importlib.import_module("when")
    found = json.loads((DOCS / "data" / "when.json").read_text())

    assert when.table(found).strip() in (DOCS / "when.md").read_text()
    assert {case["name"] for case in found["cases"]} <= {c.name for c in when.CASES}


def test_the_table_of_stages_over_processes_is_that_of_the_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for folder in ("benchmarks", "benchmarks/network"):
        monkeypatch.syspath_prepend(str(checkout.ROOT / folder))
    stages = importlib.import_module("process_stages")
    found = json.loads((DOCS / "data" / "process_stages.json").read_text())

    assert stages.table(found["rows"]) in (DOCS / "pipelines.md").read_text()
    assert found["summary"]["rows"] == len(found["rows"])


def test_results_show_further_data(tmp_path: Path) -> None:
    hooks = module("scripts/docs_hooks.py")
    assert hooks.further_data(tmp_path) == ""

    found = {"command": "python benchmarks/soak.py", "summary": {"recovered": 600}}
    (tmp_path / "soak.json").write_text(json.dumps(found))

    assert "| soak | recovered 600 | `python benchmarks/soak.py` |" in (
        hooks.further_data(tmp_path)
    )
    assert hooks.DATA in RESULTS


def test_each_question_has_an_answer_and_a_link() -> None:
    questions = re.split(r"^### ", FAQ, flags=re.M)[1:]

    numbers = [int(question.split(".")[0]) for question in questions]
    assert numbers == list(range(1, 31))
    assert [q for q in questions if not re.search(r"\]\([^)]+\.md", q)] == []
    assert [q for q in questions if len(q.split()) > 90] == []


def test_the_table_of_figures_taken_again_is_that_of_the_data() -> None:
    regressions = module("benchmarks/regressions.py")
    found = json.loads((DOCS / "data" / "regressions.json").read_text())

    assert regressions.table(found["rows"]) in (DOCS / "record" / "jobs.md").read_text()


@pytest.mark.parametrize(
    ("figure", "now", "within"),
    [
        ({"cell": ["a", "b c", 3], "recorded": 5, "most": 4.5}, 4.25, True),
        ({"cell": ["a", 3], "recorded": 5, "least": 4.5}, 2.0, False),
        ({"key": "lost", "recorded": 2.0, "near": 0.1}, 2.5, False),
        ({"line": r"^left: (\d+)", "recorded": 3}, 4.0, None),
        ({"key": "absent", "recorded": 3}, None, False),
    ],
)
def test_figures_are_read_and_judged(
    figure: dict[str, object], now: float | None, within: bool | None
) -> None:
    regressions = module("benchmarks/regressions.py")
    output = '| a | b c | 1 | 4.25% |\n| a | d | 1 | 2.0 |\n{"lost": 2.5}\nleft: 4\n'

    found = regressions.value(figure, output)
    assert (found, regressions.is_within(figure, found)) == (now, within)
