"""Runs the command line in this process and collects its output."""

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
# Arguments that make the target quick to plan.
SMALL = ("width=64", "batch=64", "layers=1")


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The exit code of a command, and what it wrote to stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


Run = Callable[..., Result]


def exit_code(*words: object) -> int:
    """Runs a command line and returns its exit code."""
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def save_plan(path: pathlib.Path, *words: object) -> pathlib.Path:
    """Runs the command that plans the target and saves the plan."""
    assert exit_code("plan", TARGET, *words, "--out", path) == 0
    return path


def assert_fails(result: Result, *parts: str, code: int = 2) -> None:
    """Checks that a command failed with one line on stderr and nothing on stdout."""
    assert (result.code, result.out) == (code, "")
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith("autopar: ")
    for part in parts:
        assert part in result.err
