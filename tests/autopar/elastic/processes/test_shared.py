"""Tests states in shared memory: they are complete, and removed at the run's end."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.elastic.processes import shared
from autopar.elastic.processes.holding import Holding
from autopar.elastic.processes.members import ProcessId
from autopar.elastic.processes.recovery import (
    Recovery,
    have_notes,
    remove_shared,
    take_notes,
    write_notes,
)
from autopar.elastic.processes.shared import SharedStates
from autopar.errors import InputError, PlanError

LEFT, RIGHT = ((0, 0), (2, 3)), ((2, 0), (4, 3))


@pytest.fixture(scope="module")
def dead() -> ProcessId:
    """The identity of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as child:
        found = ProcessId.of(child.pid)
        child.kill()
    assert found is not None
    return found


@pytest.fixture
def prefix(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "autopar-run-")


def holding(step: int, *parts: Any, generation: int = 1) -> Holding:
    """Halves of an array, and a random key of one word."""
    halves = {t: np.full((2, 3), step, np.float32) for t in parts or (LEFT, RIGHT)}
    scale = np.asarray([1.5 * step], jnp.bfloat16)
    return Holding(
        version=f"{step}.{generation}",
        step=step,
        shapes={"w": ((4, 3), "float32"), "scale": ((1,), "bfloat16")},
        tiles={"w": halves, "scale": {((0,), (1,)): scale}},
        extra={"position": 8 * step},
    )


def bury(prefix: str, dead: ProcessId) -> None:
    """Marks all files as written by a process that has ended."""
    data = shared._OWNER.pack(dead.pid, dead.started, dead.boot.encode())
    folder = pathlib.Path(prefix).parent
    for path in folder.glob("autopar-*-*.*"):
        with open(path, "r+b") as file:
            file.seek(shared._OWNER_AT)
            file.write(data)


def steps(states: SharedStates) -> list[int]:
    return sorted(x.step for x in states.load())


def test_a_state_is_found_by_the_process_after(prefix: str, dead: ProcessId) -> None:
    """All of it, aligned, for the user alone; not as long as the writer lives."""
    SharedStates(prefix, 0).write(holding(3))
    assert steps(SharedStates(prefix, 1)) == []
    bury(prefix, dead)
    (found,) = SharedStates(prefix, 1).load()
    assert found.describe() == holding(3).describe()
    for path, parts in holding(3).tiles.items():
        for tile, array in parts.items():
            there = found.tiles[path][tile]
            assert there.dtype == array.dtype
            np.testing.assert_array_equal(there, array)
            assert there.ctypes.data % 64 == 0
            assert not there.flags.writeable
    (path,) = pathlib.Path(prefix).parent.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_write_that_breaks_off_leaves_the_state_before(
    prefix: str, dead: ProcessId
) -> None:
    """Of three states, the third was not written to its end, over the first one."""
    states = SharedStates(prefix, 0)
    states.write(holding(1))
    states.write(holding(2))
    broken = holding(3)
    unreadable: Any = types.SimpleNamespace(nbytes=24)
    broken.tiles["w"][RIGHT] = unreadable
    with pytest.raises(TypeError):
        states.write(broken)
    bury(prefix, dead)
    assert steps(SharedStates(prefix, 0)) == [2]


def test_states_are_written_in_turn(prefix: str, dead: ProcessId) -> None:
    states = SharedStates(prefix, 0)
    for step in range(5):
        states.write(holding(step))
    assert len(list(pathlib.Path(prefix).parent.iterdir())) == 2
    bury(prefix, dead)
    found = SharedStates(prefix, 1)
    assert steps(found) == [3, 4]
    assert steps(found) == []  # they are known


@pytest.mark.parametrize("damage", ["head", "index", "end", "empty", "text"])
def test_what_is_damaged_is_passed_over(
    prefix: str, dead: ProcessId, damage: str
) -> None:
    states = SharedStates(prefix, 0)
    states.write(holding(1))
    bury(prefix, dead)
    (path,) = pathlib.Path(prefix).parent.iterdir()
    data = bytearray(path.read_bytes())
    at = {"head": 9, "index": data.index(b'"version"')}.get(damage)
    if at is not None:
        data[at] ^= 1
    size = {"end": shared._HEAD_BYTES + 64, "empty": 0}.get(damage, len(data))
    path.write_bytes(b"no state\n" * 999 if damage == "text" else data[:size])
    assert steps(SharedStates(prefix, 1)) == []


def test_of_another_run_nothing_is_found(prefix: str, dead: ProcessId) -> None:
    SharedStates(prefix, 0).write(holding(1))
    bury(prefix, dead)
    assert steps(SharedStates(prefix.replace("-run-", "-other-"), 0)) == []


def test_last_states_are_added(prefix: str, dead: ProcessId) -> None:
    """What is written already is not, unless there is more of it."""
    states = SharedStates(prefix, 0)
    states.write(holding(4, LEFT))
    states.write(holding(5, LEFT))
    states.flush([holding(4, LEFT), holding(5), holding(6, LEFT)])
    bury(prefix, dead)
    after = SharedStates(prefix, 0)
    found = after.load()
    assert sorted((x.step, len(x.tiles["w"])) for x in found) == [
        (4, 1),
        (5, 1),
        (5, 2),
        (6, 1),
    ]
    after.flush(found)  # all is there
    assert len(list(pathlib.Path(prefix).parent.iterdir())) == 4


def test_states_of_older_worlds_are_dropped(prefix: str, dead: ProcessId) -> None:
    """Those of dead processes alone."""
    SharedStates(prefix, 0).write(holding(1, generation=1))
    SharedStates(prefix, 1).write(holding(1, generation=2))
    bury(prefix, dead)
    living = SharedStates(prefix, 2)
    living.write(holding(1, generation=1))
    living.drop(2)
    kept = sorted(x.name for x in pathlib.Path(prefix).parent.iterdir())
    assert [x.split("-")[2] for x in kept] == ["1", "2"]


def test_no_room_is_said_with_what_to_do(
    prefix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is written; at the end it is no error."""
    real = os.statvfs(pathlib.Path(prefix).parent)
    full = os.statvfs_result((real.f_bsize, 4096, *list(real)[2:4], 1, *list(real)[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    states = SharedStates(prefix, 0)
    with pytest.raises(PlanError, match=r"4\.10 kB free\. Enlarge it"):
        states.write(holding(1))
    states.flush([holding(1)])
    assert "remount,size" in capsys.readouterr().err
    assert list(pathlib.Path(prefix).parent.iterdir()) == []


def test_shared_memory_is_removed(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one worker, whose number begins another one's; then of all."""
    folder = pathlib.Path(prefix).parent
    for worker in (1, 11):
        SharedStates(prefix, worker).write(holding(1))
        write_notes(prefix, worker, {"yielded": worker})
    (folder / "autopar-other-1-2.0").touch()
    monkeypatch.chdir(folder)
    (folder / "1.txt").touch()
    remove_shared("", [1])
    remove_shared(prefix, [1])
    assert have_notes(prefix, [11])
    assert not have_notes(prefix, [1, 11])
    remove_shared(prefix)
    assert {x.name for x in folder.iterdir()} == {"autopar-other-1-2.0", "1.txt"}


def test_notes_are_taken_once(prefix: str) -> None:
    write_notes(prefix, 0, {"yielded": 4})
    assert pathlib.Path(f"{prefix}0.notes").stat().st_mode & 0o777 == 0o600
    assert take_notes(prefix, 1) == {}
    assert take_notes(prefix, 0) == {"yielded": 4}
    assert take_notes(prefix, 0) == {}


def test_how_a_worker_is_told_to_recover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_RECOVERY", str(Recovery("respawn", 7)))
    assert Recovery.of_environment() == Recovery("respawn", 7)
    assert Recovery("inplace").respawns("gpu") is False
    for text in ("respawn", "else:3", "respawn:0"):
        monkeypatch.setenv("AUTOPAR_RECOVERY", text)
        with pytest.raises(InputError, match="unset it"):
            Recovery.of_environment()
