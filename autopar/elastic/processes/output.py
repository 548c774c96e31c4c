"""Prints what a worker prints: whole lines, with the worker's number before each.

It runs as a process of its own, by its path, and ends with the last process that has
the worker's pipes open: a worker goes on printing where its supervisor is killed.
Usage: output.py PREFIX DESCRIPTOR; the worker's stdout is this process's stdin, and the
descriptor is that of its stderr. The lines in which gloo counts its connections are
left out: each program with other collectives makes gloo print them again.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import sys

# Linux writes so much to a pipe at once: lines of several workers do not mix.
_AT_ONCE = 4096
# What gloo prints for each group of processes that it connects.
_GLOO = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. "
    rb"Expected number of connected peer ranks is : \d+"
)


def print_lines(target: int, prefix: bytes, lines: list[bytes]) -> None:
    """Writes lines but gloo's to a descriptor, several at once where they are short."""
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
    """Copies both streams until both end."""
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
            with contextlib.suppress(OSError):  # nobody reads it any more
                print_lines(key.data, prefix, lines)


if __name__ == "__main__":
    main()
