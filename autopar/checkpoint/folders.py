"""The folders of checkpoints: which of them are complete, and how one is completed
atomically.

A checkpoint is a folder ``<step>-<time>``; the time is in nanoseconds since 1970, as
hex digits. A checkpoint is complete if it has a manifest. A save first writes all other
files and flushes them to disk. Then the save renames a file to put the manifest in
place. If the save is killed before that, the folder has no manifest. To remove a
checkpoint, its manifest is removed first.

Checkpoints are ordered by time and not by step. So if a user goes back to an earlier
step and trains on from there, the last checkpoint is the one that was saved last.
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
import re
import shutil
import socket
import warnings
from collections.abc import Generator, Mapping
from typing import Any

from autopar.checkpoint import manifest
from autopar.checkpoint.manifest import MANIFEST, Manifest
from autopar.errors import CheckpointError
from autopar.plans import Plan

ARRAYS, PLAN = "arrays", "plan.json"
_NAME = re.compile(r"(\d{8,})-([0-9a-f]{16})")


def folder_name(step: int, time_ns: int) -> str:
    """The name of a checkpoint's folder.

    >>> folder_name(100, 1700000000000000000)
    '00000100-17979cfe362a0000'
    """
    return f"{step:08d}-{time_ns:016x}"


def step_of(folder: pathlib.Path) -> int:
    """Reads the step of a checkpoint from the name of its folder.

    Raises:
      CheckpointError: the folder's name does not have the form of a checkpoint's name.
    """
    found = _NAME.fullmatch(folder.name)
    if found is None:
        raise CheckpointError(f"{folder}: not the folder of a checkpoint.")
    return int(found[1])


def complete(directory: pathlib.Path) -> list[pathlib.Path]:
    """The complete checkpoints of a directory, oldest first."""
    return [x for x in _folders(directory) if (x / MANIFEST).is_file()]


def incomplete(directory: pathlib.Path) -> list[pathlib.Path]:
    """The folders without a manifest: of saves that were aborted or are in progress."""
    return [x for x in _folders(directory) if not (x / MANIFEST).is_file()]


def _folders(directory: pathlib.Path) -> list[pathlib.Path]:
    if not directory.is_dir():
        return []
    with telling(directory, "read"):
        found = [x for x in directory.iterdir() if _NAME.fullmatch(x.name)]
    return sorted(
        (x for x in found if x.is_dir()), key=lambda x: x.name.partition("-")[2]
    )


def progress_of_save(directory: pathlib.Path) -> tuple[str, int, int] | None:
    """How far a save has come that began after the last complete checkpoint.

    Returns:
      The name of its folder, the bytes in the folder, and when a file in it was last
      written, in nanoseconds since 1970; None: there is no such save.
    """
    folders = _folders(directory)
    if not folders or (folders[-1] / MANIFEST).is_file():
        return None
    stats: list[os.stat_result] = []
    for root, _, names in os.walk(folders[-1]):
        for name in [".", *names]:
            with contextlib.suppress(OSError):  # renamed or removed meanwhile
                stats.append(os.stat(os.path.join(root, name)))
    written = max((s.st_mtime_ns for s in stats), default=0)
    return folders[-1].name, sum(s.st_size for s in stats), written


def begin(folder: pathlib.Path) -> None:
    """Makes the folder of a checkpoint, without a manifest.

    Raises:
      CheckpointError: the folder cannot be made, for example in a read-only directory.
    """
    with telling(folder, "written"):
        folder.mkdir(parents=True)


def commit(folder: pathlib.Path, manifest: bytes) -> None:
    """Completes a checkpoint: flushes its files, and puts its manifest in place."""
    for root, _, names in os.walk(folder):
        for name in names:
            flush(pathlib.Path(root, name))
        flush(pathlib.Path(root))
    put(folder / MANIFEST, manifest)
    flush(folder.parent)


def put(path: pathlib.Path, data: bytes) -> None:
    """Writes a file atomically: the file exists with all of its content, or not
    at all.
    """
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    flush(part)
    part.replace(path)
    flush(path.parent)


def flush(path: pathlib.Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def remove(folder: pathlib.Path) -> None:
    """Removes a checkpoint. If the removal is interrupted, the checkpoint counts as
    incomplete.
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def prune(directory: pathlib.Path, keep: int, newest: pathlib.Path) -> None:
    """Removes folders that are not needed after a new checkpoint was saved.

    The function removes other checkpoints of the same step, all checkpoints except the
    last ``keep``, and unfinished saves.
    """
    whole = [x for x in complete(directory) if x != newest]
    again = [x for x in whole if step_of(x) == step_of(newest)]
    rest = [x for x in whole if x not in again]
    surplus = rest[: max(0, len(rest) - (keep - 1))] if keep else []
    for folder in [*again, *surplus, *incomplete(directory)]:
        remove(folder)


@contextlib.contextmanager
def telling(path: pathlib.Path, what: str) -> Generator[None]:
    """A context that converts an error of the file system to one that names the path.

    Raises:
      CheckpointError: the block raised an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise CheckpointError(f"{path}: cannot be {what}: {why}.") from error


_PARAMETER = "parameter"
# optax's names of Adam's two moments and of the step counter, as they occur in paths.
FIRST, SECOND, COUNT = "mu", "nu", "count"


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter, and where its optimizer state is.

    Attributes:
      name: its path with dots, without the name of the step's argument and ``params``.
      path: path of the parameter in the training state.
      first: path of the first moment; '' if there is none.
      second: path of the second moment; '' if there is none.
    """

    name: str
    path: str
    first: str = ""
    second: str = ""


def parameter_paths(folder: pathlib.Path, held: Manifest) -> list[Parameter]:
    """The parameters of a checkpoint, in their order in the training state.

    Raises:
      CheckpointError: the checkpoint's plan is damaged, or names no parameter.
    """
    roles = plan_of(folder, held).roles
    paths = [p for p in held.state if roles.get(p) == _PARAMETER]
    if not paths:
        raise CheckpointError(f"{folder}: the plan of it names no parameters.")
    first, second = (_moments(held, x) for x in (FIRST, SECOND))
    return [
        Parameter(
            name=_name(path),
            path=path,
            first=_of(path, first, held),
            second=_of(path, second, held),
        )
        for path in paths
    ]


def count_paths(held: Manifest) -> list[str]:
    """The paths of the optimizer's step counters in a checkpoint."""
    return [p for p in held.state if COUNT in p.split("/")[-2:] and "/" in p]


def plan_of(folder: pathlib.Path, held: Manifest) -> Plan:
    """Reads the plan that was in use when a checkpoint was saved.

    Raises:
      CheckpointError: the plan's file has changed since it was saved.
    """
    try:
        plan = Plan.load(folder / PLAN)
    except ValueError as error:
        raise CheckpointError(f"{folder}: damaged: {error}") from error
    if plan.digest != held.plan.digest:
        raise CheckpointError(f"{folder}: damaged: {PLAN} was changed.")
    return plan


def _name(path: str) -> str:
    """The name of a parameter.

    >>> _name("state/params/Dense_0/kernel")
    'Dense_0.kernel'
    >>> _name("model/up/kernel/value")
    'up.kernel'
    """
    words = path.split("/")
    begin = words.index("params") + 1 if "params" in words[:-1] else 1
    words = words[begin:] or words
    if words[-1] == "value" and len(words) > 1:
        words = words[:-1]
    return ".".join(words)


def _moments(held: Manifest, word: str) -> dict[tuple[str, ...], list[str]]:
    """Groups the paths of moments: the part of a path after ``mu`` or ``nu`` -> all
    paths with this part.
    """
    out: dict[tuple[str, ...], list[str]] = {}
    for path in held.state:
        words = path.split("/")
        if word in words:
            tail = tuple(words[len(words) - words[::-1].index(word) :])
            out.setdefault(tail, []).append(path)
    return out


def _of(path: str, moments: Mapping[tuple[str, ...], list[str]], held: Manifest) -> str:
    """The path of a parameter's moment: the one that has the longest suffix in common
    with the parameter's path.
    """
    words = path.split("/")
    for begin in range(len(words)):
        for found in moments.get(tuple(words[begin:]), []):
            if held.state[found].shape == held.state[path].shape:
                return found
    return ""


def find_checkpoint(folder: pathlib.Path, step: int | None = None) -> pathlib.Path:
    """Finds a checkpoint: the given folder itself, or one in a directory of
    checkpoints.

    Args:
      folder: folder of a checkpoint, or directory of `autopar.Checkpoints`.
      step: if ``folder`` is a directory of checkpoints, the step of the one to find;
        None: the last.

    Raises:
      CheckpointError: there is no such checkpoint.
    """
    if (folder / manifest.MANIFEST).is_file():
        return folder
    found = complete(folder)
    if step is not None:
        found = [x for x in found if step_of(x) == step]
    if not found:
        what = "" if step is None else f" of step {step}"
        raise CheckpointError(f"{folder}: no checkpoint{what}.")
    return found[-1]


# The lock of a directory of checkpoints: it decides which run may write there.
#
# Two runs that save into one directory would remove each other's checkpoints. The
# process that saves holds a POSIX record lock on the file ``.lock`` in the directory.
# The operating system releases the lock when the process ends, however it ends. The
# file's content identifies the process.

_LOCK = ".lock"
# `autopar run` sets this environment variable to the same value in all its processes.
# By it, a process recognises its own run if another process of the run takes over
# saving.
_RUN_VARIABLE = "AUTOPAR_SUPERVISOR"
_HELD = (errno.EACCES, errno.EAGAIN)
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclasses.dataclass(frozen=True, slots=True)
class _Claim:
    descriptor: int
    pid: int


# Directory -> the lock that this process holds. POSIX releases the lock when the
# process closes any descriptor of the file. So all users of a directory share one
# descriptor.
_CLAIMS: dict[str, _Claim] = {}


def claim(directory: pathlib.Path) -> None:
    """Locks a directory for this run, until this process ends or releases the lock.

    Raises:
      CheckpointError: another run holds the lock.
      OSError: the directory cannot be written.
    """
    path = directory / _LOCK
    if _is_ours(path):
        return
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        try:
            _refuse(directory, descriptor, error)
        finally:
            os.close(descriptor)
        return
    _CLAIMS[str(path)] = _Claim(descriptor, os.getpid())
    with contextlib.suppress(OSError):  # the lock is valid even if the disk is full
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_own()).encode(), 0)


def release(directory: pathlib.Path) -> None:
    """Releases the lock of a directory; does nothing if this process does not
    hold it.
    """
    path = directory / _LOCK
    if _is_ours(path):
        os.close(_CLAIMS.pop(str(path)).descriptor)


def _is_ours(path: pathlib.Path) -> bool:
    """Whether this process holds the lock of a file that still exists."""
    found = _CLAIMS.get(str(path))
    if found is None or found.pid != os.getpid():  # a fork has no locks
        return False
    try:
        return os.path.samestat(os.fstat(found.descriptor), path.stat())
    except OSError:
        return False


def _own() -> dict[str, Any]:
    _, *token = os.environ.get(_RUN_VARIABLE, "").rsplit(":", 3)[:2]
    run = hashlib.sha256(token[0].encode()).hexdigest()[:16] if token else ""
    return {"host": socket.gethostname(), "pid": os.getpid(), "run": run}


def _refuse(directory: pathlib.Path, descriptor: int, error: OSError) -> None:
    """Raises an error that names the run that has locked a directory, unless it is this
    run.
    """
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
