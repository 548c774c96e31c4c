"""Which run writes into a directory of checkpoints: a lock that ends with its process.

Two runs that save into one directory would remove each other's checkpoints. The process
that saves holds a record lock of POSIX on the file ``.lock``, which the system drops
when the process ends, however it ends. The file says who it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import socket
import warnings
from typing import Any

from autopar.errors import CheckpointError

_NAME = ".lock"
# `autopar run` gives all its processes one token; the one that saves may change.
_RUN_VARIABLE = "AUTOPAR_SUPERVISOR"
_HELD = (errno.EACCES, errno.EAGAIN)
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclasses.dataclass(frozen=True, slots=True)
class _Claim:
    descriptor: int
    pid: int


# Directory -> the lock that this process has. Closing any other descriptor of the file
# would drop it, so there is one for all users of a directory.
_CLAIMS: dict[str, _Claim] = {}


def claim(directory: pathlib.Path) -> None:
    """Takes a directory for this process's run, until it ends or releases it.

    Raises:
      CheckpointError: another run has it.
      OSError: the directory cannot be written.
    """
    path = directory / _NAME
    if _is_ours(path):
        return
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        try:
            _refused(directory, descriptor, error)
        finally:
            os.close(descriptor)
        return
    _CLAIMS[str(path)] = _Claim(descriptor, os.getpid())
    with contextlib.suppress(OSError):  # the lock counts, also on a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_own()).encode(), 0)


def release(directory: pathlib.Path) -> None:
    """Lets other runs have a directory; nothing where this process has it not."""
    path = directory / _NAME
    if _is_ours(path):
        os.close(_CLAIMS.pop(str(path)).descriptor)


def _is_ours(path: pathlib.Path) -> bool:
    """Whether this process has the lock of a file that is still there."""
    found = _CLAIMS.get(str(path))
    if found is None or found.pid != os.getpid():  # a fork has no locks
        return False
    try:
        return os.path.samestat(os.fstat(found.descriptor), path.stat())
    except OSError:
        return False


def _own() -> dict[str, Any]:
    token = os.environ.get(_RUN_VARIABLE, "").split(":")[1:2]
    run = hashlib.sha256(token[0].encode()).hexdigest()[:16] if token else ""
    return {"host": socket.gethostname(), "pid": os.getpid(), "run": run}


def _refused(directory: pathlib.Path, descriptor: int, error: OSError) -> None:
    """Says who has a directory, unless that is this run."""
    if error.errno in _WITHOUT_LOCKS:
        warnings.warn(
            f"{directory}: its file system has no locks; see to it that no other run "
            "saves there.",
            stacklevel=4,
        )
        return
    if error.errno not in _HELD:
        raise error
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        host, pid, run = (found[name] for name in ("host", "pid", "run"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        host, pid, run = "unknown", "unknown", ""
    if run and run == _own()["run"]:
        return
    raise CheckpointError(
        f"{directory}: another run saves there: process {pid} on host {host}. Wait "
        "until it has ended, or name another directory."
    )
