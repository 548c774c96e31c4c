"""Runs the command line in this process, and reads what it says."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from checkout import GOLDEN

from autopar.cli import main

TARGET = f"{GOLDEN / 'two_layers.py'}:workload"
# Words that make the target quick to plan.
SMALL = ("width=64", "batch=64", "layers=1")


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The end of a command: its exit code, and both of its streams as text."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


Run = Callable[..., Result]


def exit_code(*words: object) -> int:
    """Runs a command line; returns its exit code."""
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def save_plan(path: pathlib.Path, *words: object) -> pathlib.Path:
    """Plans the target and saves the plan."""
    assert exit_code("plan", TARGET, *words, "--out", path) == 0
    return path


def assert_fails(result: Result, *parts: str, code: int = 2) -> None:
    """One line on stderr, nothing on stdout, and an exit code."""
    assert (result.code, result.out) == (code, "")
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith("autopar: ")
    for part in parts:
        assert part in result.err
