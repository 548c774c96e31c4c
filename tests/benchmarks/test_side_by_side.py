"""Tests the comparison of two checkouts: its turns, rows and child processes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("side_by_side")


def test_each_turn_begins_with_the_one_that_ended_the_last(script: Any) -> None:
    order = list(script.in_turns(4))

    assert [sorted(order[k : k + 2]) for k in range(0, 8, 2)] == [[0, 1]] * 4
    assert order[1:-1:2] == order[2::2]


def test_a_row_has_medians_ratio_and_spread(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    script.row("gpt", "step ms", [0.1, 0.2, 0.4], [0.2, 0.1, 0.4])

    cells = [c.strip() for c in capsys.readouterr().out.strip(" |\n").split("|")]
    assert cells == ["gpt", "step ms", "200", "200", "1.000", "0.500 to 2.000"]


def test_an_answer_is_found_among_other_lines(script: Any) -> None:
    assert script.answer(iter(["a warning\n", "ANSWER0.5\n", "ANSWER1\n"])) == 0.5
    with pytest.raises(script.ChildError, match="ended"):
        script.answer(iter(["a warning\n"]))


def test_a_child_that_fails_says_why(script: Any, tmp_path: Path) -> None:
    with pytest.raises(script.ChildError, match="No module named 'workloads'"):
        script.planned(tmp_path, ("gpt", {}, "8:cpu", None))
