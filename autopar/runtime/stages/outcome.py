"""What a step of a pipeline leaves behind, and which task an error came from."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Generator, Iterable
from typing import Any

from autopar.errors import StageError
from autopar.runtime.noise.staged import Rows
from autopar.runtime.stages.codecs import CodecStep
from autopar_passes.jax_compat import source_line
from autopar_passes.program.equations import Equation
from autopar_passes.stages.cut import TaskKey

_ENCOUNTERED = re.compile(r"encountered in (\w+)")
# An operator may occur in many lines; so many are named.
_MOST_LINES = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """What a step leaves behind.

    Attributes:
      state: the values that leave the step, where they lie between steps.
      told: those that all processes are told, where each can read them.
      noise: what tasks measured of gradients.
      codecs: the codecs' side of the step, where the pipeline has any.
    """

    state: dict[int, Any]
    told: dict[int, Any]
    noise: Rows
    codecs: CodecStep | None = None


@contextlib.contextmanager
def name_task(key: TaskKey, number: int) -> Generator[None]:
    """Says which task an error came from.

    Args:
      key: the task.
      number: the microbatch; -1: of the step.

    Raises:
      StageError: something is raised inside.
    """
    try:
        yield
    except Exception as error:
        raise failure(key, number, error) from error


def failure(
    key: TaskKey, number: int, error: Exception, operators: Iterable[Equation] = ()
) -> StageError:
    """The error of a task, with the operator that it came from if that is known.

    Args:
      key: the task.
      number: the microbatch; -1: of the step.
      error: what was raised.
      operators: the equations of the task.
    """
    which = "" if number < 0 else f" of microbatch {number}"
    return StageError(
        f"stage {key.stage}, {key.phase.value}{which} (part {key.number}): "
        f"{type(error).__name__}: {error}{_lines(error, operators)}"
    )


def calls_back(equations: Iterable[Equation]) -> bool:
    """Whether equations call functions of the host, also within their regions."""
    return any(
        eqn.source.effects
        or eqn.primitive == "pure_callback"
        or any(calls_back(region.equations) for region in eqn.regions)
        for eqn in equations
    )


def _lines(error: Exception, operators: Iterable[Equation]) -> str:
    """The lines of the operator that made a number that is not finite.

    Under ``jax_debug_nans`` JAX runs the task again by operators, and names the first
    that does so.
    """
    found = _ENCOUNTERED.search(str(error))
    if found is None or not isinstance(error, FloatingPointError):
        return ""
    named = [e for e in operators if e.primitive == found[1]]
    lines = dict.fromkeys(line for e in named if (line := source_line(e.source)))
    return f" ({', '.join(list(lines)[:_MOST_LINES])})" if lines else ""
