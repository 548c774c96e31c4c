"""Tests that a first call reports its progress, and caches plans for later calls."""

from __future__ import annotations

import logging
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import pytest
import small_step
from jax.sharding import PartitionSpec as P

import autopar
from autopar import PlanError, progress
from autopar.planner import plan as planning


def one_step(**options: Any) -> Any:
    step = autopar.parallelize(small_step.step, cluster="8:cpu", **options)
    step(small_step.state(), small_step.batch(16))
    return step


def test_says_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "autopar"):
        step = one_step()
        step(small_step.state(), small_step.batch(16))
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "tracing step"
    assert any(text.startswith("planning mesh 1 of") for text in said)
    assert sum(text.startswith("compiling step took") for text in said) == 1


@pytest.mark.parametrize("wanted", ["1", "0"])
def test_one_line_of_a_terminal(
    wanted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOPAR_PROGRESS", wanted)
    monkeypatch.setenv("COLUMNS", "60")
    one_step()
    err = capsys.readouterr().err
    if wanted == "0":
        assert err == ""
        return
    lines = err.split("\r\x1b[K")
    assert lines[0] == lines[-1] == ""
    assert all(0 < len(line) < 60 for line in lines[1:-1] if line)
    assert "\n" not in err
    assert "autopar: compiling step" in lines


def test_piped_there_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the seconds so far and the newest message, and none once it is done."""
    monkeypatch.delenv("AUTOPAR_PROGRESS")
    monkeypatch.setattr(progress, "EVERY_S", 0.001)
    one_step()
    lines = capsys.readouterr().err.splitlines()
    assert lines
    found = [re.fullmatch(r"autopar: (\d+) s: (.+)", line) for line in lines]
    assert all(found)
    assert "compiling step" in {line[2] for line in found if line}
    monkeypatch.setattr(progress, "EVERY_S", 60.0)
    one_step()
    assert capsys.readouterr().err == ""


def test_a_stage_that_fails_leaves_a_clean_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOPAR_PROGRESS", "1")
    with pytest.raises(KeyError), progress.show_progress(), progress.stage("searching"):
        raise KeyError
    assert capsys.readouterr().err.endswith("\r\x1b[K")


def _flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _link(path: pathlib.Path) -> None:
    path.symlink_to(path.rename(path.parent.parent / "moved"))


_HARMS = [
    pytest.param(lambda path: path.write_text("{"), id="garbage"),
    pytest.param(lambda path: path.write_bytes(b""), id="empty"),
    pytest.param(_flip, id="one flipped bit"),
    pytest.param(lambda path: path.chmod(0o622), id="others may write"),
    pytest.param(_link, id="link"),
]
_HINDRANCES = [
    pytest.param(lambda path: path.write_text(""), id="a file in its place"),
    pytest.param(lambda path: path.symlink_to("/proc"), id="a folder without room"),
]


class TestCache:
    @pytest.fixture
    def folder(self, tmp_path: pathlib.Path) -> pathlib.Path:
        return tmp_path / "kept"

    @pytest.fixture
    def searches(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """Counts the searches of the planner."""
        found: list[Any] = []
        search = planning.search

        def counted(*args: Any, **kwargs: Any) -> Any:
            found.append(args)
            return search(*args, **kwargs)

        monkeypatch.setattr(planning, "search", counted)
        return found

    def test_a_plan_is_found_again(
        self, folder: pathlib.Path, searches: list[Any]
    ) -> None:
        first, second = one_step(cache=folder), one_step(cache=folder)
        assert len(searches) == 1
        assert second.plan == first.plan
        assert len(list((folder / "plans").iterdir())) == 1

    @pytest.mark.parametrize(
        "other",
        [{"max_axes": 1}, {"pins": {"batch": P("data")}}, {"axis_names": ("a", "b")}],
    )
    def test_other_options_are_another_plan(
        self, folder: pathlib.Path, searches: list[Any], other: Any
    ) -> None:
        one_step(cache=folder)
        before = len(searches)
        one_step(cache=folder, **other)
        assert len(searches) > before

    @pytest.mark.parametrize("harm", _HARMS)
    def test_a_file_that_cannot_be_trusted_is_said_and_replaced(
        self, folder: pathlib.Path, searches: list[Any], harm: Callable[..., Any]
    ) -> None:
        first = one_step(cache=folder)
        (path,) = (folder / "plans").iterdir()
        harm(path)
        with pytest.warns(UserWarning, match=f"{path.name}.* is made anew"):
            assert one_step(cache=folder).plan.digest == first.plan.digest
        one_step(cache=folder)
        assert len(searches) == 2

    @pytest.mark.parametrize("harm", _HINDRANCES)
    def test_a_plan_that_cannot_be_kept_is_said(
        self, folder: pathlib.Path, harm: Callable[..., Any]
    ) -> None:
        folder.mkdir()
        harm(folder / "plans")
        with pytest.warns(UserWarning, match="plan .*is made anew"):
            one_step(cache=folder)
        assert not list(folder.rglob("*.part"))

    def test_a_key_that_others_may_read_is_not_used(
        self,
        folder: pathlib.Path,
        tmp_path: pathlib.Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        one_step(cache=folder)
        key = tmp_path / "state" / "autopar" / "key"
        assert key.stat().st_mode & 0o777 == 0o600
        key.chmod(0o640)
        with pytest.warns(UserWarning, match=r"others may read or write .*key"):
            one_step(cache=folder)
        key.unlink()  # the next key is another one
        with pytest.warns(UserWarning, match="not written with this user's key"):
            one_step(cache=folder)

    def test_from_the_environment(
        self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AUTOPAR_CACHE", str(folder))
        one_step()
        assert (folder / "plans").is_dir()

    def test_no_folder(self, tmp_path: pathlib.Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(PlanError, match="cannot be used as a folder"):
            one_step(cache=tmp_path / "file")

    def test_programs_go_where_jax_was_told(self, folder: pathlib.Path) -> None:
        before = jax.config.jax_compilation_cache_dir
        assert before is not None  # the tests of one run share theirs
        one_step(cache=folder)
        assert jax.config.jax_compilation_cache_dir == before
