"""Workers of this machine are watched until they end."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from autopar.elastic.processes.launching import LocalLauncher


def test_a_worker_that_nobody_waited_for_has_ended(tmp_path: pathlib.Path) -> None:
    launcher = LocalLauncher([sys.executable, "-c", "pass"])
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert pathlib.Path(f"/proc/{child.pid}").exists()
    assert not launcher.watch(0, child.pid)
    child.wait()
    assert not launcher.watch(0, child.pid)
