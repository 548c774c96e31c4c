"""What a step of a pipeline leaves behind, and which task an error came from."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any

from autopar.errors import StageError
from autopar.runtime.noise.staged import Rows
from autopar.runtime.stages.codecs import CodecStep
from autopar_passes.stages.cut import TaskKey


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
def told(key: TaskKey, number: int) -> Generator[None]:
    """Says which task an error came from.

    Raises:
      StageError: something is raised inside.
    """
    try:
        yield
    except Exception as error:
        which = "" if number < 0 else f" of microbatch {number}"
        raise StageError(
            f"stage {key.stage}, {key.phase.value}{which} (part {key.number}): "
            f"{type(error).__name__}: {error}"
        ) from error
