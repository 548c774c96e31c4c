"""Prints the output of a worker in whole lines, with the worker's number before each.

The module is run as a script in its own process, which reads the worker's output from
pipes. This process ends when no process has the pipes open any more. So a worker can
print even after its supervisor was killed.

Usage: output.py PREFIX DESCRIPTOR. This process reads the worker's stdout from its own
  stdin, and the worker's stderr from the file descriptor. It leaves out the lines in
  which gloo (JAX's communication library on CPUs) counts its connections: gloo prints
  them for every program with other groups of devices.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import sys

# Linux writes up to this many bytes to a pipe at once, so that lines of several workers
# do not mix.
_AT_ONCE = 4096
# The line that gloo prints for each group of processes that it connects.
_GLOO = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. "
    rb"Expected number of connected peer ranks is : \d+"
)


def print_lines(target: int, prefix: bytes, lines: list[bytes]) -> None:
    """Writes lines with a prefix, several at once, without those of gloo."""
    waiting = b""
    for line in lines:
        if _GLOO.fullmatch(line):
            continue
        text = prefix + line + b"\n"
        if waiting and len(waiting) + len(text) > _AT_ONCE:
            os.write(target, waiting)
            waiting = b""
        waiting += text
    left = memoryview(waiting)
    while left:
        left = left[os.write(target, left) :]


def main() -> None:
    """Copies stdout and stderr of the worker until both end."""
    prefix, errors = sys.argv[1].encode(), int(sys.argv[2])
    begun = {0: b"", errors: b""}
    selector = selectors.DefaultSelector()
    for descriptor, target in ((0, 1), (errors, 2)):
        selector.register(descriptor, selectors.EVENT_READ, target)
    while selector.get_map():
        for key, _ in selector.select():
            data = os.read(key.fd, 1 << 16)
            *lines, begun[key.fd] = (begun[key.fd] + data).split(b"\n")
            if not data:
                selector.unregister(key.fd)
                lines += [begun[key.fd]] if begun[key.fd] else []
            with contextlib.suppress(OSError):  # the reader is gone
                print_lines(key.data, prefix, lines)


if __name__ == "__main__":
    main()
