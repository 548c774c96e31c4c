"""Runs a command that dies with its parent process (Linux).

Usage: python leash.py PID COMMAND [ARGUMENT]...
This module imports nothing of autopar, so that it starts fast.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>


def main() -> None:
    """Asks Linux for a signal at the parent's death, then executes the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # the parent died before the request
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
