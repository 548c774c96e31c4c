"""The folders of checkpoints: which are whole, and how one becomes so at once.

A checkpoint is a folder ``<step>-<time>``, the time in nanoseconds since 1970 as hex
digits. It is whole once its manifest is there: everything else is written and flushed
to the disk before, and a rename puts the manifest in its place. A save that is killed
leaves a folder without one. Of a checkpoint that is removed, the manifest goes first.

Checkpoints are ordered by time, not by step: who goes back to an earlier step, and
trains on from there, has the last state in the last checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
from collections.abc import Generator, Mapping

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
    """The step of a checkpoint, from the name of its folder.

    Raises:
      CheckpointError: it is no such name.
    """
    found = _NAME.fullmatch(folder.name)
    if found is None:
        raise CheckpointError(f"{folder}: not the folder of a checkpoint.")
    return int(found[1])


def complete(directory: pathlib.Path) -> list[pathlib.Path]:
    """The whole checkpoints of a directory, the last one last."""
    return [x for x in _folders(directory) if (x / MANIFEST).is_file()]


def incomplete(directory: pathlib.Path) -> list[pathlib.Path]:
    """The folders of saves that did not end, or are not over."""
    return [x for x in _folders(directory) if not (x / MANIFEST).is_file()]


def _folders(directory: pathlib.Path) -> list[pathlib.Path]:
    if not directory.is_dir():
        return []
    with telling(directory, "read"):
        found = [x for x in directory.iterdir() if _NAME.fullmatch(x.name)]
    return sorted(
        (x for x in found if x.is_dir()), key=lambda x: x.name.partition("-")[2]
    )


def begin(folder: pathlib.Path) -> None:
    """Makes the folder of a checkpoint, without a manifest.

    Raises:
      CheckpointError: it cannot be made, as in a directory that is read-only.
    """
    with telling(folder, "written"):
        folder.mkdir(parents=True)


def commit(folder: pathlib.Path, manifest: bytes) -> None:
    """Makes a checkpoint whole: flushes its files, and puts its manifest in place."""
    for root, _, names in os.walk(folder):
        for name in names:
            flush(pathlib.Path(root, name))
        flush(pathlib.Path(root))
    put(folder / MANIFEST, manifest)
    flush(folder.parent)


def put(path: pathlib.Path, data: bytes) -> None:
    """Writes a file that is there with all its content, or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    flush(part)
    part.replace(path)
    flush(path.parent)


def flush(path: pathlib.Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def remove(folder: pathlib.Path) -> None:
    """Removes a checkpoint; one that is killed leaves an incomplete one."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def prune(directory: pathlib.Path, keep: int, newest: pathlib.Path) -> None:
    """Removes what a new checkpoint makes superfluous.

    That is: others of its step, all but the last ``keep``, and saves that did not end.
    """
    whole = [x for x in complete(directory) if x != newest]
    again = [x for x in whole if step_of(x) == step_of(newest)]
    rest = [x for x in whole if x not in again]
    surplus = rest[: max(0, len(rest) - (keep - 1))] if keep else []
    for folder in [*again, *surplus, *incomplete(directory)]:
        remove(folder)


@contextlib.contextmanager
def telling(path: pathlib.Path, what: str) -> Generator[None]:
    """Makes an error of the file system one that names the path.

    Raises:
      CheckpointError: an ``OSError`` was raised inside.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise CheckpointError(f"{path}: cannot be {what}: {why}.") from error


_PARAMETER = "parameter"
# What optax calls Adam's moments, and where it counts steps.
FIRST, SECOND, COUNT = "mu", "nu", "count"


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter with the paths of what an optimizer keeps for it.

    Attributes:
      name: with dots, without the argument of the step and ``params``.
      path: in the state.
      first: path of its first moment; '' without.
      second: path of its second moment.
    """

    name: str
    path: str
    first: str = ""
    second: str = ""


def parameter_paths(folder: pathlib.Path, held: Manifest) -> list[Parameter]:
    """The parameters of a checkpoint, in the order of the state.

    Raises:
      CheckpointError: its plan is damaged, or knows of no parameter.
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
    """The paths of an optimizer's numbers of steps."""
    return [p for p in held.state if COUNT in p.split("/")[-2:] and "/" in p]


def plan_of(folder: pathlib.Path, held: Manifest) -> Plan:
    """The plan that a checkpoint was saved under.

    Raises:
      CheckpointError: its file is not the one that was saved.
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
    """The words behind ``mu`` or ``nu`` in a path -> the paths that end so."""
    out: dict[tuple[str, ...], list[str]] = {}
    for path in held.state:
        words = path.split("/")
        if word in words:
            tail = tuple(words[len(words) - words[::-1].index(word) :])
            out.setdefault(tail, []).append(path)
    return out


def _of(path: str, moments: Mapping[tuple[str, ...], list[str]], held: Manifest) -> str:
    """The moment of a parameter: the longest end that both paths share."""
    words = path.split("/")
    for begin in range(len(words)):
        for found in moments.get(tuple(words[begin:]), []):
            if held.state[found].shape == held.state[path].shape:
                return found
    return ""


def find_checkpoint(folder: pathlib.Path, step: int | None = None) -> pathlib.Path:
    """The checkpoint that a path means: a checkpoint, or the last of a directory.

    Args:
      folder: of a checkpoint, or of `autopar.Checkpoints`.
      step: which of a directory; None: the last.

    Raises:
      CheckpointError: there is none.
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
