"""Tests that workers of this machine are watched until they end."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys

from autopar.elastic.processes import output
from autopar.elastic.processes.launching import LocalLauncher
from autopar.elastic.processes.members import ProcessId


def test_a_worker_that_nobody_waited_for_has_ended() -> None:
    launcher = LocalLauncher([sys.executable, "-c", "pass"])
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        process = ProcessId.of(child.pid)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert pathlib.Path(f"/proc/{child.pid}").exists()
        assert not launcher.watch(0, process)
    assert not launcher.watch(0, process)


def test_a_number_that_was_given_again_is_another_process() -> None:
    """Neither watched nor ended, where it started at another time or boot."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as child:
        process = ProcessId.of(child.pid)
        assert process is not None
        assert ProcessId.from_data(process.to_data()) == process
        for other in (
            dataclasses.replace(process, started=process.started - 1),
            dataclasses.replace(process, boot="another"),
        ):
            assert not LocalLauncher(["true"]).watch(0, other)
            other.kill()
        assert child.poll() is None
        process.kill()
        assert child.wait(60) == -9


def test_of_what_a_worker_prints_only_lines_of_gloo_are_left_out() -> None:
    gloo = (
        "[Gloo] Rank 1 is connected to 3 peer ranks. "
        "Expected number of connected peer ranks is : 3"
    )
    kept = ["", f"loss {gloo}", f"{gloo}.", "[Gloo] Rank 1 failed", "no end of line"]
    read, write = os.pipe()
    os.close(write)
    found = subprocess.run(
        [sys.executable, output.__file__, "[1] ", str(read)],
        input="\n".join([gloo, *kept[:3], gloo, *kept[3:]]),
        capture_output=True,
        text=True,
        pass_fds=(read,),
        check=True,
    )
    os.close(read)
    assert found.stdout.splitlines() == [f"[1] {line}" for line in kept]
