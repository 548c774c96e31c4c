"""Tests that notebooks are committed without results; `make docs` runs them."""

from __future__ import annotations

import json
from pathlib import Path

import checkout
import pytest

NOTEBOOKS = sorted((checkout.ROOT / "docs").rglob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=checkout.relative)
def test_nothing_of_a_run_is_kept(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]

    assert code
    assert {(len(c["outputs"]), c["execution_count"]) for c in code} == {(0, None)}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=checkout.relative)
def test_cells_are_python(path: Path) -> None:
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            compile("".join(cell["source"]), checkout.relative(path), "exec")


def test_the_site_runs_the_notebooks() -> None:
    site = (checkout.ROOT / "mkdocs.yml").read_text()

    assert "execute: true" in site
    assert "allow_errors: false" in site
    assert [x.name for x in NOTEBOOKS if f"notebooks/{x.name}" not in site] == []
