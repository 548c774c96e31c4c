"""Tests directories of checkpoints: one run writes at a time, and all content is
checked.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import jax
import pytest
import small_step

import autopar
from autopar import CheckpointError, Checkpoints
from autopar.checkpoint import folders


@functools.cache
def plan() -> autopar.Plan:
    return autopar.plan(small_step.step, *small_step.structs(), cluster="4:cpu")


def small() -> Any:
    made = autopar.parallelize(small_step.step, plan=plan())
    made.prepare(*small_step.structs())
    return made


def numbers() -> Any:
    return jax.random.normal(jax.random.key(0), (small_step.WIDTH, small_step.WIDTH))


def saved(directory: pathlib.Path, *steps: int) -> Checkpoints:
    made = Checkpoints(directory)
    for k in steps:
        made.save(small(), numbers(), step=k)
    made.wait()
    return made


def restored(made: Checkpoints, step: int | None = None) -> Any:
    return made.restore(small(), small_step.state, step=step)


HOLDER = """
import fcntl, json, sys
file = open(sys.argv[1], "a+")
try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    file.seek(0)
    print(file.read(), flush=True)
else:
    json.dump({"host": "far", "pid": 4711, "run": ""}, file)
    file.flush()
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def another_process(directory: pathlib.Path) -> Iterator[str]:
    """Another process tries to lock a directory; returns its output."""
    directory.mkdir(exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-Sc", HOLDER, str(directory / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        try:
            yield child.stdout.readline()
        finally:
            child.kill()


class TestTwoRuns:
    def test_the_second_is_refused(self, tmp_path: pathlib.Path) -> None:
        directory = tmp_path / "saved"
        with another_process(directory) as said:
            assert said == "held\n"
            with pytest.raises(CheckpointError, match="process 4711 on host far"):
                saved(directory, 1)
            assert Checkpoints(directory).steps() == []
            with pytest.raises(CheckpointError, match="process 4711 on host far"):
                autopar.elastic(
                    small(),
                    numbers,
                    lambda first, rows: small_step.batch(rows),
                    batch=small_step.ROWS,
                    steps=2,
                    checkpoint=directory,
                )
        assert saved(directory, 1).steps() == [1]  # its process has ended

    def test_who_has_it_can_be_read(self, tmp_path: pathlib.Path) -> None:
        with saved(tmp_path, 1), another_process(tmp_path) as said:
            found = json.loads(said)
            assert (found["host"], found["pid"]) == (socket.gethostname(), os.getpid())
        with another_process(tmp_path) as said:
            assert said == "held\n"

    def test_runs_on_the_same_port_differ(self, monkeypatch: Any) -> None:
        """Processes of one run have the same token, whichever their supervisor."""
        found: list[str] = []
        for address in ("10.0.0.1:7000:aa:0:60", "10.0.0.2:7000:bb:0:60"):
            monkeypatch.setenv("AUTOPAR_SUPERVISOR", address)
            found.append(folders._own()["run"])
        monkeypatch.setenv("AUTOPAR_SUPERVISOR", "[::1]:7001:aa:3:60")
        assert found[0] == folders._own()["run"] != found[1]


class TestAnotherWorld:
    """A world that lost its supervisor saves while another one begins."""

    def waited_s(self, directory: pathlib.Path, patience_s: float) -> float:
        begin = time.monotonic()
        Checkpoints(directory).wait_for_other_world(small(), patience_s)
        return time.monotonic() - begin

    def test_its_save_is_waited_for(self, tmp_path: pathlib.Path) -> None:
        saved(tmp_path, 1)
        folder = tmp_path / folders.folder_name(2, time.time_ns())
        folder.mkdir()

        def save() -> None:
            for k in range(8):
                (folder / f"part{k}").write_bytes(bytes(100))
                time.sleep(0.1)
            (folder / "manifest.json").write_text("{}")

        with futures.ThreadPoolExecutor() as pool:
            done = pool.submit(save)
            self.waited_s(tmp_path, 5.0)
            assert (folder / "manifest.json").exists()
            done.result()

    def test_an_aborted_save_is_given_up(self, tmp_path: pathlib.Path) -> None:
        saved(tmp_path, 1)
        (tmp_path / folders.folder_name(2, time.time_ns())).mkdir()
        assert self.waited_s(tmp_path, 0.3) >= 0.3

    def test_complete_checkpoints_are_not_waited_for(
        self, tmp_path: pathlib.Path
    ) -> None:
        (tmp_path / folders.folder_name(0, 1)).mkdir()  # aborted before the others
        saved(tmp_path, 1)
        assert self.waited_s(tmp_path, 60.0) < 30.0
        assert self.waited_s(tmp_path / "none", 60.0) < 30.0


def with_manifest(directory: pathlib.Path, **fields: Any) -> None:
    """Changes fields of the last manifest, and its checksum."""
    path = Checkpoints(directory).restore(small(), small_step.state).folder
    found = json.loads((path / "manifest.json").read_text()) | fields
    found.pop("checksum")
    plain = {k: x for k, x in found.items() if k[:2] != "no" or x} | {"checksum": ""}
    digest = hashlib.sha256(json.dumps(plain, separators=(",", ":")).encode())
    found["checksum"] = digest.hexdigest()[:32]
    (path / "manifest.json").write_text(json.dumps(found))


class TestManifests:
    def test_a_newer_schema_is_not_passed_over(self, tmp_path: pathlib.Path) -> None:
        made = saved(tmp_path, 1, 2)
        with_manifest(tmp_path, schema=7)
        with pytest.raises(CheckpointError, match="has schema 7, this autopar reads"):
            restored(made)
        with pytest.raises(CheckpointError, match="has schema 7, this autopar reads"):
            made.notes()
        assert restored(made, 1).step == 1

    @pytest.mark.parametrize("depth", [300, 900, 100_000])
    def test_nested_too_deeply(self, tmp_path: pathlib.Path, depth: int) -> None:
        made = saved(tmp_path, 1, 2)
        path = restored(made).folder / "manifest.json"
        text = json.dumps(json.loads(path.read_text()) | {"notes": 0})
        path.write_text(
            text.replace('"notes": 0', f'"notes": {"[" * depth}{"]" * depth}')
        )
        with pytest.warns(UserWarning, match="damaged.*Restored .*00000001-"):
            assert restored(made).step == 1

    @pytest.mark.parametrize(
        ("field", "value", "says"),
        [
            ("file", "../../../etc", "has a file"),
            ("file", "..", "has a file"),
            ("shape", [-1, 8], "has the shape"),
            ("shape", [1 << 40, 1 << 40], "has the shape"),
        ],
    )
    def test_what_is_used_as_size_or_path(
        self, tmp_path: pathlib.Path, field: str, value: Any, says: str
    ) -> None:
        made = saved(tmp_path, 1, 2)
        path = restored(made).folder / "manifest.json"
        state = json.loads(path.read_text())["state"]
        state["w"][field] = value
        with_manifest(tmp_path, state=state)
        with pytest.warns(UserWarning, match=f"{says}.*Restored .*00000001-"):
            assert restored(made).step == 1
