"""Keeps a command as its child: stops it, continues it, and ends it with who asked.

Usage: python keeper.py DESCRIPTOR COMMAND [ARGUMENT]...
It reads orders from the pipe DESCRIPTOR, a byte each: `STOP` and `CONTINUE`. The pipe
ends when its writer closes it, or ends in whatever way; then the command is killed. A
signal of stopping that was sent by the writer itself could arrive after its end, and
nobody would continue or end the command. It imports nothing of autopar, so that it
starts at once (POSIX).
"""

from __future__ import annotations

import os
import signal
import sys

STOP, CONTINUE = b"S", b"C"


def main() -> None:
    """Starts the command, which gets the standard files, and follows the orders."""
    descriptor, command = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(descriptor, False)
    pid = os.posix_spawn(command[0], command, os.environ)
    # Who reads from the command, or writes to it, has to see that it has ended.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    while order := os.read(descriptor, 1):
        os.kill(pid, signal.SIGSTOP if order == STOP else signal.SIGCONT)
    # Nobody has waited for it yet, so the number is still its own.
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
