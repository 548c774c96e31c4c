"""Runs a command as a child process; stops, continues and ends it on request.

Usage: python keeper.py DESCRIPTOR COMMAND [ARGUMENT]... The *keeper*, this program,
reads orders from the pipe DESCRIPTOR, one byte each: `STOP` and `CONTINUE`. When the
process that writes the orders closes the pipe or ends in any way, the keeper kills the
command. The writer sends no signals to the command itself: if it ended after a stop
signal, the command would stay stopped forever. The keeper imports nothing of autopar,
so that it starts quickly. It needs POSIX.
"""

from __future__ import annotations

import os
import signal
import sys

STOP, CONTINUE = b"S", b"C"


def main() -> None:
    """Starts the command with this process's standard files, and follows the orders."""
    descriptor, command = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(descriptor, False)
    pid = os.posix_spawn(command[0], command, os.environ)
    # Closes this process's copies of the command's pipes. The other ends of the pipes
    # then see the end of the command.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    while order := os.read(descriptor, 1):
        os.kill(pid, signal.SIGSTOP if order == STOP else signal.SIGCONT)
    # The command's process has not been reaped yet, so its process id cannot belong
    # to another process.
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
