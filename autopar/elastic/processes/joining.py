"""What `autopar.elastic` does in a process that `autopar run` started."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from autopar.checkpoint.checkpoints import Checkpoints
from autopar.elastic.ledger import Ledger
from autopar.elastic.processes.ahead import Ahead, prepare_and_exit
from autopar.elastic.processes.following import TeamFollowing
from autopar.elastic.processes.link import AHEAD_VARIABLE
from autopar.elastic.processes.team import Team, local_devices, run_folder
from autopar.elastic.processes.training import TeamRun, rest_structs
from autopar.elastic.samples import Samples
from autopar.elastic.saves import Saves
from autopar.errors import PlanError
from autopar.goodput.loop import Record
from autopar.runtime.creation import state_shapes
from autopar.runtime.parallel_step import ParallelStep


def join_run(
    step: ParallelStep[..., Any],
    create_state: Callable[..., Any],
    args: Sequence[Any],
    samples: Samples,
    *,
    steps: float,
    ledger: str | os.PathLike[str] | None,
    checkpoints: Checkpoints | None,
    every: int | None,
    survive: int,
    shows: bool | None,
    following: Callable[[Record], TeamFollowing] | None = None,
) -> TeamRun | None:
    """Joins the run of several processes that this one was started for.

    Args:
      step: the step.
      create_state: makes the state of a run that begins.
      args: its arguments.
      samples: what the step is trained on.
      steps: how many steps there are.
      ledger: path of the ledger.
      checkpoints: where the run is saved.
      every: after how many steps; None: at the end alone.
      survive: how many processes may die at once without loss of state.
      shows: whether progress is shown; None: on a terminal.
      following: makes what lets the batch follow; None: the batch stays.

    Returns:
      The run; None: this process was started by itself.

    Raises:
      PlanError: an argument is wrong, or the supervisor is gone.
    """
    if not _is_count(survive):
        raise PlanError(
            f"elastic: survive={survive!r} must be a whole number, at least 0."
        )
    donate = survive == 0
    if text := os.environ.get(AHEAD_VARIABLE):
        shapes = state_shapes(create_state, args)
        structs = (*shapes.arguments(), *rest_structs(step, samples, shapes, 0))
        prepare_and_exit(_ahead(step, structs, donate=donate), text)
    splits = step.preparation.planner.options.split_batch
    team = Team.of_environment(survive, samples.batch if splits else 0)
    if team is None:
        return None
    written = Ledger(ledger)
    return TeamRun(
        step,
        create_state,
        args,
        samples,
        steps=steps,
        ledger=written,
        saves=Saves(checkpoints, every, step, written),
        team=team,
        donate=donate,
        shows=shows,
        following=following,
    )


def _is_count(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= 0


def _ahead(
    step: ParallelStep[..., Any], structs: Sequence[Any], *, donate: bool
) -> Ahead:
    """What the process needs that prepares programs for other worlds."""
    return Ahead(
        step=step,
        base=step.setting.cluster,
        structs=structs,
        local_devices=local_devices(),
        donate=donate,
        folder=run_folder(),
    )
