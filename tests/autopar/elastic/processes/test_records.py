"""Tests the files in a run's folder, which one supervisor uses at a time."""

from __future__ import annotations

import errno
import fcntl
import pathlib

import pytest

from autopar.elastic.processes.records import Records
from autopar.errors import PlanError


def test_a_folder_has_one_supervisor_at_a_time(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "run"
    first = Records(folder)
    first.state({"pid": 1})
    with pytest.raises(PlanError, match="another `autopar run` serves"):
        Records(folder)
    first.end()
    assert not (folder / "run.json").exists()
    Records(folder).close()
    Records(folder).close()


def test_a_folder_that_cannot_be_used(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match="--folder"):
        Records(tmp_path / "file")


def test_a_file_system_without_locks(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run goes on, and says what nobody sees to."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    Records(tmp_path).close()
    assert "has no locks" in capsys.readouterr().err
