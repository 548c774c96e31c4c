"""Bytes that processes send each other, counted by the kernel for each TCP socket.

A socket counts what its peer has acknowledged (``bytes_acked`` of TCP_INFO): the data
alone, each byte once, without headers of TCP and without what was sent again. ``ss``
shows the count with the process that holds the socket. Both ends of a connection stand
in the lists of their namespaces, so that each byte has a sender and a receiver.
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
    """One way of a connection between two processes.

    Attributes:
      source: number of the process that sends.
      target: number of the process that receives.
      here: the sender's end.
      there: the receiver's end.
    """

    source: int
    target: int
    here: End
    there: End


Counts = Mapping[Connection, int]


def count(spaces: Sequence[str | None], process_of: Mapping[int, int]) -> Counts:
    """Bytes that were acknowledged so far, by connection.

    Args:
      spaces: names of the network namespaces; None: that of this process.
      process_of: number of each process by its pid.
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
    """What was sent between two counts.

    Raises:
      RuntimeError: a connection was closed meanwhile, so that its bytes are not known.
    """
    if gone := before.keys() - after.keys():
        raise RuntimeError(f"connections closed while bytes were counted: {gone}.")
    return {c: n - before.get(c, 0) for c, n in after.items()}


def matrix(sent: Mapping[Connection, int]) -> dict[tuple[int, int], int]:
    """Bytes by sender and receiver; what a process sends itself does not count."""
    out: dict[tuple[int, int], int] = defaultdict(int)
    for connection, nbytes in sent.items():
        if connection.source != connection.target and nbytes:
            out[connection.source, connection.target] += nbytes
    return dict(out)


def _end(text: str) -> End:
    address, _, port = text.rpartition(":")
    return address.strip("[]").removeprefix("::ffff:").partition("%")[0], int(port)
