"""The Ray actor that runs a worker of a run on a node.

The user's script is a child process of the actor. So if the script crashes, the actor
can still report the exit status. If the actor dies, the script ends with it.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from autopar.elastic.processes import leash

# After its script has ended, an actor stays for this many seconds to report the exit
# status.
_ASKED_S = 120.0
# Environment variables that belong to a machine, and the prefix of those that Ray sets
# for an actor.
_OF_MACHINE = ("HOME", "HOSTNAME", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "USER")
_OF_RAY = ("RAY_", "CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "ROCR_VISIBLE_DEVICES")


class ScriptActor:
    """Runs the script once. `ray.remote` makes an actor of this class."""

    def __init__(self, leave: Callable[[int], object] = os._exit) -> None:
        """Makes the object; does not run the script yet.

        Args:
          leave: called some time after the end of the script; ends the actor's process.
        """
        self._leave = leave
        self._child: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()

    def run(
        self, words: Sequence[str], folder: str, environment: Mapping[str, str]
    ) -> int:
        """Runs the script to its end.

        Args:
          words: path of the user's script, and its arguments.
          folder: the folder in which the script runs.
          environment: the environment variables of the worker.

        Returns:
          The exit status. If a signal ended the script, it is the negative number of
          the signal.

        Raises:
          FileNotFoundError: this node has no such script or folder.
        """
        for path in (folder, os.path.join(folder, words[0])):
            if not pathlib.Path(path).exists():
                raise FileNotFoundError(
                    f"there is no {path} on node {os.uname().nodename}: scripts and "
                    "folders of a run must be at the same place on every node."
                )
        # The script dies with the thread that starts it. This thread waits for it.
        self._child = subprocess.Popen(
            [sys.executable, leash.__file__, str(os.getpid()), sys.executable, *words],
            cwd=folder,
            env=merge_environment(os.environ, environment),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        code = self._child.wait()
        self._ended.set()
        timer = threading.Timer(_ASKED_S, self._leave, (0,))
        timer.daemon = True
        timer.start()
        return code

    def wait(self) -> int:
        """Waits for the end of the script; returns its exit status."""
        self._ended.wait()
        assert self._child is not None
        return self._child.wait()

    def signal(self, number: int) -> None:
        """Sends the script a signal."""
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.Signals(number))


def merge_environment(
    node: Mapping[str, str], given: Mapping[str, str]
) -> dict[str, str]:
    """The environment variables of a worker on a node.

    The given variables are added to those of the node, or replace them. But given
    variables that belong to a machine or to Ray are ignored.

    >>> node = {"PATH": "/node", "RAY_JOB_ID": "1"}
    >>> merge_environment(node, {"PATH": "/here", "SEED": "2"})
    {'PATH': '/node', 'RAY_JOB_ID': '1', 'SEED': '2'}
    """
    taken = {
        name: value
        for name, value in given.items()
        if name not in _OF_MACHINE and not name.startswith(_OF_RAY)
    }
    return {**node, **taken}
