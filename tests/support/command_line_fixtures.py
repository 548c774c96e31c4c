"""Fixtures that run the command line in this process, and a plan saved by it."""

from __future__ import annotations

import pathlib
import sys

import pytest
from command_line import SMALL, Result, Run, exit_code, save_plan


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line in this process."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run_words(*words: object) -> Result:
        capsys.readouterr()
        return Result(exit_code(*words), *capsys.readouterr())

    return run_words


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A plan saved by the command line; tests only read the file."""
    path = tmp_path_factory.mktemp("plans") / "a.json"
    words = ("--cluster", "2x4:cpu", "--axis-names", "data,tensor")
    return save_plan(path, *SMALL, *words)
