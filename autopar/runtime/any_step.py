"""The program of a plan: of one stage, or of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.runtime.gradients.state_restorer import is_finite, with_old_state
from autopar.runtime.planned import PlannedStep
from autopar.runtime.stages.planned import PipelinedStep

AnyStep = PlannedStep | PipelinedStep


def settled(
    planned: AnyStep, placed: Sequence[Any], flat: Sequence[Any]
) -> tuple[list[Any], Any]:
    """The flat results of a guarded step, and whether it was finite.

    A program of one stage has restored its state and says so. What stages return is
    looked at here, by each process that has a part of it.

    Args:
      planned: the program.
      placed: its flat arguments.
      flat: what it returned.
    """
    if isinstance(planned, PlannedStep):
        *own, finite = flat
        return own, finite
    finite = is_finite(planned.analysis, flat)
    if planned.links is not None:
        finite = planned.links.agreed(finite, "looking at the results of a step")
    if finite:
        return list(flat), True
    return with_old_state(planned.analysis, placed, flat), False
