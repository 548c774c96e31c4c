"""Ends the waits of collectives whose other side is gone or has left.

A collective of gloo waits for ever for a process that does not come. Shutting down the
connections between workers turns the wait into an error (Linux only, one machine).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterable

_ESTABLISHED, _LISTENING = "01", "0A"
# gloo numbers the connections that it waits for; a world has few of them.
_NUMBERS = 64


def break_connections(peers: Iterable[int], but: Collection[int]) -> int:
    """Shuts down this process's TCP connections to other processes.

    Args:
      peers: process ids of the other ends.
      but: ports whose connections stay.

    Returns:
      How many there were.
    """
    rows = _rows(_ESTABLISHED)
    inode_at = {(here, there): inode for here, there, inode in rows}
    theirs = {inode for pid in peers for inode in inodes(pid)}
    own = inodes(os.getpid())
    count = 0
    for here, there, inode in rows:
        other = inode_at.get((there, here))
        if inode not in own or other not in theirs:
            continue
        if not {_port(here), _port(there)} & set(but):
            count += _shut_down(own[inode])
    return count


def listening() -> frozenset[int]:
    """The ports on which this process waits for connections."""
    own = inodes(os.getpid())
    return frozenset(_port(here) for here, _, x in _rows(_LISTENING) if x in own)


def knock(ports: Iterable[int]) -> None:
    """Connects in the place of processes that gloo waits for, and hangs up.

    A process that died would have connected, and gloo waits for it without a limit.

    Args:
      ports: on which gloo listens.
    """
    for port in ports:
        for number in range(_NUMBERS):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), 1.0) as end,
            ):
                end.sendall(number.to_bytes(8, "little"))


def _rows(state: str) -> list[tuple[str, str, int]]:
    """Own address, other address and inode of each connection in a state."""
    found: list[tuple[str, str, int]] = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}") as lines:
            next(lines, None)
            fields = [line.split() for line in lines]
            found += [(f[1], f[2], int(f[9])) for f in fields if f[3] == state]
    return found


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def inodes(pid: int) -> dict[int, int]:
    """Inode -> descriptor of each socket of a process; none of one that is gone."""
    found: dict[int, int] = {}
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{folder}/{name}")
                if target.startswith("socket:["):
                    found[int(target[8:-1])] = int(name)
    return found


def _shut_down(descriptor: int) -> int:
    """Shuts a socket down without closing the owner's descriptor; 1 if it was open."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as found:
            found.shutdown(socket.SHUT_RDWR)
    except OSError:
        return 0
    return 1
