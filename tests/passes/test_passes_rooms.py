"""Tests that each part of the passes is in the import contract."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "passes" / "autopar_passes"
MODULES = sorted(PACKAGE.rglob("*.py"))


def rooms() -> set[str]:
    """The folders and modules at the root of the package."""
    found = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    return found | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def test_the_contract_names_every_room() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = [
        contract
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract.get("containers") == ["autopar_passes"]
    ]
    named = [
        name.strip(" ()") for layer in contract["layers"] for name in layer.split("|")
    ]

    assert sorted(named) == sorted(rooms())


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_stand_on_top(path: Path) -> None:
    """No import inside a function hides an order that the contract would refuse."""
    tree = ast.parse(path.read_text())
    everywhere = [
        n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)
    ]

    assert all(node in tree.body for node in everywhere)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]

    assert text.count("\n") <= 800
    for function in functions:
        assert (function.end_lineno or 0) - function.lineno < 60, function.name
