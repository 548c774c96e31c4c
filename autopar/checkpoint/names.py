"""Finds a model's parameters in a checkpoint, and the moments that belong to them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

from autopar.checkpoint import folders, manifest
from autopar.checkpoint.manifest import Manifest
from autopar.errors import CheckpointError
from autopar.plans import Plan

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


def parameters(folder: pathlib.Path, held: Manifest) -> list[Parameter]:
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


def counts(held: Manifest) -> list[str]:
    """The paths of an optimizer's numbers of steps."""
    return [p for p in held.state if COUNT in p.split("/")[-2:] and "/" in p]


def plan_of(folder: pathlib.Path, held: Manifest) -> Plan:
    """The plan that a checkpoint was saved under.

    Raises:
      CheckpointError: its file is not the one that was saved.
    """
    try:
        plan = Plan.load(folder / folders.PLAN)
    except ValueError as error:
        raise CheckpointError(f"{folder}: damaged: {error}") from error
    if plan.digest != held.plan.digest:
        raise CheckpointError(f"{folder}: damaged: {folders.PLAN} was changed.")
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


def find(folder: pathlib.Path, step: int | None = None) -> pathlib.Path:
    """The checkpoint that a path means: a checkpoint, or the last of a directory.

    Args:
      folder: of a checkpoint, or of `autopar.Checkpoints`.
      step: which of a directory; None: the last.

    Raises:
      CheckpointError: there is none.
    """
    if (folder / manifest.MANIFEST).is_file():
        return folder
    found = folders.complete(folder)
    if step is not None:
        found = [x for x in found if folders.step_of(x) == step]
    if not found:
        what = "" if step is None else f" of step {step}"
        raise CheckpointError(f"{folder}: no checkpoint{what}.")
    return found[-1]
