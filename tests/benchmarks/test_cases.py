"""Tests that `benchmarks/cases.py` detects wrong results."""

from __future__ import annotations

import importlib
import json
import pathlib
from typing import Any

import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
REFUSED = "64 256 {} PlanError takes rows of others"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delenv("AUTOPAR_CASES", raising=False)
    return importlib.import_module("cases")


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("64 64 {} want 1.5 got 1.5", 0),
        ("64 64 {} want 1.5 got 1.6", 1),
        ("64 64 {} ValueError of another", 1),
        ("", 1),
    ],
)
def test_a_program_is_judged_by_its_losses(
    command: Any, tmp_path: pathlib.Path, last: str, code: int
) -> None:
    lines = "\n".join([REFUSED] * 3 + [last])
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "gnn_coupled.py").write_text(f"print({lines!r})")
    data = tmp_path / "cases.json"

    found = command.main([str(tmp_path), "--only", "gnn", "--json", str(data)])

    assert found == code
    rows = json.loads(data.read_text())["rows"]
    assert [row["right"] for row in rows] == [code == 0]


def test_without_a_folder_it_says_so(
    command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([]) == 2
    assert "AUTOPAR_CASES" in capsys.readouterr().err
