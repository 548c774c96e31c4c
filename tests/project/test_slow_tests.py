"""Tests which of the slowest tests a run of the whole suite includes."""

from __future__ import annotations

import ast
import pathlib

import pytest
import slow_tests
from checkout import ROOT


def test_a_quarter_of_the_cases_of_slow_tests_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slow_tests, "names", lambda: frozenset({"a::slow", "a::long"}))
    cases = [f"a::slow[{k}]" for k in range(5)]
    quick = ["a::quick[0]", "a::quick[1]"]
    taken: list[str] = []
    for turn in range(4):
        monkeypatch.setattr(slow_tests, "_turn", lambda turn=turn: turn)
        found = slow_tests.kept([*cases, "a::long", *quick])
        assert found >= {*quick}
        assert 1 <= len(found & {*cases}) <= 2
        taken += found - {*quick}
    assert sorted(taken) == ["a::long", *cases]


def test_whoever_names_tests_runs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPAR_ALL_TESTS", raising=False)
    assert slow_tests.leaves_out(["tests"], ["tests"])
    assert not slow_tests.leaves_out(["tests/a.py"], ["tests"])
    monkeypatch.setenv("AUTOPAR_ALL_TESTS", "1")
    assert not slow_tests.leaves_out(["tests"], ["tests"])


def test_slow_tests_are_there() -> None:
    """A renamed test would no longer count as slow, and every run would include it."""
    missing: list[str] = []
    for name in slow_tests.names():
        path, *places = name.split("::")
        if not _is_there(ROOT / path, places):
            missing.append(name)
    assert missing == []


def _is_there(path: pathlib.Path, places: list[str]) -> bool:
    if not path.exists():
        return False
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for place in places:
        named = [
            x
            for x in body
            if isinstance(x, ast.ClassDef | ast.FunctionDef) and x.name == place
        ]
        if not named:
            return False
        body = named[0].body
    return True
