"""Tests the actor class that runs scripts, without Ray."""

from __future__ import annotations

import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from autopar.backends.ray_worker import ScriptActor
from autopar.elastic.processes import leash

WAIT = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(300)"


def stay(code: int) -> None:
    """A test process must stay alive, unlike an actor's process after its script."""


def script(folder: pathlib.Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def test_a_script_gets_its_words_and_its_environment(tmp_path: pathlib.Path) -> None:
    name = script(
        tmp_path,
        "import os, pathlib, sys\n"
        "pathlib.Path('out').write_text(sys.argv[1] + os.environ['SEED'])\n"
        "sys.exit(5)\n",
    )
    actor = ScriptActor(leave=stay)
    assert actor.run([name, "word"], str(tmp_path), {"SEED": "7"}) == 5
    assert (tmp_path / "out").read_text() == "word7"
    assert actor.wait() == 5


def test_a_script_that_is_not_on_the_node(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="at the same place on every node"):
        ScriptActor(leave=stay).run(["none.py"], str(tmp_path), {})


def test_a_script_that_is_killed(tmp_path: pathlib.Path) -> None:
    name, started = script(tmp_path, WAIT), tmp_path / "started"
    actor, codes = ScriptActor(leave=stay), list[int]()
    thread = threading.Thread(
        target=lambda: codes.append(actor.run([name, str(started)], str(tmp_path), {}))
    )
    thread.start()
    while not started.exists():
        time.sleep(0.01)
    actor.signal(signal.SIGTERM)
    thread.join()
    assert codes == [-signal.SIGTERM]


def test_a_command_dies_with_the_process_that_started_it(
    tmp_path: pathlib.Path,
) -> None:
    """As a script does whose actor is killed with its node."""
    out = tmp_path / "pid"
    inner = f"import os, pathlib, time; pathlib.Path({str(out)!r}).write_text("
    inner += "str(os.getpid())); time.sleep(300)"
    words = [leash.__file__, "PID", sys.executable, "-c", inner]
    outer = "import os, subprocess, sys\n"
    outer += f"words = {words!r}; words[1] = str(os.getpid())\n"
    outer += "subprocess.Popen([sys.executable, *words], start_new_session=True).wait()"
    parent = subprocess.Popen([sys.executable, "-c", outer])
    while not (out.exists() and out.read_text()):
        time.sleep(0.01)
    descriptor = os.pidfd_open(int(out.read_text()))
    assert not select.select([descriptor], [], [], 0)[0]
    parent.kill()
    parent.wait()
    assert select.select([descriptor], [], [], 60)[0]
    os.close(descriptor)


def test_a_command_does_not_start_once_its_starter_is_gone() -> None:
    words = [sys.executable, leash.__file__, "1", sys.executable, "-c", "print('on')"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
