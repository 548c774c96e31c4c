"""Counts the bytes that processes send each other, by the kernel's TCP counters.

A socket counts the bytes that its peer has acknowledged (``bytes_acked`` of TCP_INFO).
These are data bytes, each counted once, without TCP headers and retransmissions. ``ss``
prints the count and the process that holds the socket. Both ends of a connection are in
the lists of their namespaces, so the sender and the receiver of each byte are known.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import netns

_PID = re.compile(r"pid=(\d+)")
_ACKED = re.compile(r"bytes_acked:(\d+)")

End = tuple[str, int]
"""Address and port."""


@dataclasses.dataclass(frozen=True, slots=True)
class Connection:
    """One direction of a connection between two processes.

    Attributes:
      source: number of the sending process.
      target: number of the receiving process.
      here: address of the sender's end.
      there: address of the receiver's end.
    """

    source: int
    target: int
    here: End
    there: End


Counts = Mapping[Connection, int]


def count(spaces: Sequence[str | None], process_of: Mapping[int, int]) -> Counts:
    """Connection -> bytes acknowledged so far.

    Args:
      spaces: names of the network namespaces; None: the namespace of this process.
      process_of: process id -> number of the process.
    """
    held: dict[tuple[End, End], tuple[int, int]] = {}
    for space in spaces:
        inside = [] if space is None else ["ip", "netns", "exec", space]
        lines = netns.command([*inside, "ss", "-HtinpO"], "list sockets").splitlines()
        for line in lines:
            pid, acked = _PID.search(line), _ACKED.search(line)
            if pid is None or int(pid[1]) not in process_of:
                continue
            words = line.split()
            ends = _end(words[3]), _end(words[4])
            held[ends] = process_of[int(pid[1])], int(acked[1]) if acked else 0
    out: dict[Connection, int] = {}
    for (here, there), (source, acked) in held.items():
        if (there, here) in held:
            target, _ = held[there, here]
            out[Connection(source, target, here, there)] = acked
    return out


def between(before: Counts, after: Counts) -> dict[Connection, int]:
    """The bytes sent between two counts.

    Raises:
      RuntimeError: a connection was closed between the counts, so its bytes are not
        known.
    """
    if gone := before.keys() - after.keys():
        raise RuntimeError(f"connections closed while bytes were counted: {gone}.")
    return {c: n - before.get(c, 0) for c, n in after.items()}


def matrix(sent: Mapping[Connection, int]) -> dict[tuple[int, int], int]:
    """Bytes by sender and receiver; bytes within a process do not count."""
    out: dict[tuple[int, int], int] = defaultdict(int)
    for connection, nbytes in sent.items():
        if connection.source != connection.target and nbytes:
            out[connection.source, connection.target] += nbytes
    return dict(out)


def _end(text: str) -> End:
    address, _, port = text.rpartition(":")
    return address.strip("[]").removeprefix("::ffff:").partition("%")[0], int(port)
