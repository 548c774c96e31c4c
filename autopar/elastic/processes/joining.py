"""Joins a run, in a process that `autopar run` started."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from autopar.checkpoint.checkpoints import Checkpoints
from autopar.elastic.events import Event, Resolved
from autopar.elastic.ledger import Ledger
from autopar.elastic.nans import OnNan
from autopar.elastic.processes.driven import team_driven_of
from autopar.elastic.processes.following import TeamFollowing
from autopar.elastic.processes.link import AHEAD_VARIABLE, VARIABLE, Address
from autopar.elastic.processes.preparing import NextWorlds
from autopar.elastic.processes.team import Team, local_devices
from autopar.elastic.processes.training import TeamRun
from autopar.elastic.samples import Samples
from autopar.elastic.saves import Saves
from autopar.elastic.sources.file import File
from autopar.elastic.sources.named import Signals, sources_of
from autopar.elastic.sources.source import Source
from autopar.errors import PlanError
from autopar.goodput.loop import Record
from autopar.runtime.creation import state_shapes
from autopar.runtime.local.steps import LocalSteps
from autopar.runtime.parallel_step import ParallelStep
from autopar.steps.spares import Spares


def join_run(
    step: ParallelStep[..., Any] | LocalSteps,
    create_state: Callable[..., Any],
    args: Sequence[Any],
    samples: Samples,
    *,
    steps: float,
    events: Sequence[str | Source],
    ledger: str | os.PathLike[str] | None,
    checkpoints: Checkpoints | None,
    every: int | None,
    survive: int,
    shows: bool | None,
    on_nan: OnNan = "stop",
    following: Callable[[Record], TeamFollowing] | None = None,
) -> TeamRun | None:
    """Joins the run of several processes for which `autopar run` started this one.

    Args:
      step: the train step.
      create_state: makes the state of a run that begins.
      args: arguments of ``create_state``.
      samples: the training samples.
      steps: number of steps.
      events: sources of events. The supervisor listens to these sources for all
        processes.
      ledger: path of the ledger.
      checkpoints: where the run is saved.
      every: number of steps between saves; None: only at the end.
      survive: how many processes may die at once without loss of training state.
      shows: whether progress is shown; None: only on a terminal.
      on_nan: what to do if a loss or gradient is not finite.
      following: makes the object that adapts the batch size; None: the batch size is
        fixed.

    Returns:
      The run; None: `autopar run` did not start this process.

    Raises:
      PlanError: an argument is wrong, or the supervisor is gone.
    """
    if not _is_count(survive):
        raise PlanError(
            f"elastic: survive={survive!r} must be a whole number, at least 0."
        )
    donate = survive == 0
    splits = True  # among replicas
    if isinstance(step, ParallelStep):
        # The supervisor decides how many processes a world has.
        step.preparation.planner.uses_all = True
        if survive:
            # Tells the planner how much memory the copies of the state take. While a
            # step runs, memory holds the state before the step, the states of the two
            # steps before it, and copies of other processes' states
            # (`Team.keep_state`). An array that other processes also have is kept in
            # one further copy only.
            step.preparation.planner.hold(Spares(always=1, split=2 + survive))
        if AHEAD_VARIABLE in os.environ:
            shapes = state_shapes(create_state, args)
            NextWorlds(step=step, shapes=shapes, samples=samples, donate=donate).serve()
        splits = step.preparation.planner.options.split_batch
    if VARIABLE not in os.environ:
        return None
    texts, signals = _heard_by(events)
    rows = samples.batch if splits else 0
    worker = Address.parse(os.environ[VARIABLE]).worker
    driven = team_driven_of(step, worker, guards=on_nan != "continue")
    if isinstance(step, LocalSteps):
        rows = samples.batch * local_devices()
    saves = checkpoints is not None
    team = Team.of_environment(survive, rows, texts, saves=saves)
    assert team is not None
    for source in signals:
        source.start(Resigning(team))
    written = Ledger(ledger)
    return TeamRun(
        driven,
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
        on_nan=on_nan,
    )


class Resigning:
    """Receives signal events: on a signal, this process asks to leave the run."""

    def __init__(self, team: Team) -> None:
        """Stores this process's connection to the run."""
        self._team = team

    def put(self, event: Event) -> Resolved:
        """See `autopar.elastic.sources.source.Sink`."""
        self._team.resign()
        reason = "this process asks the supervisor to leave."
        return Resolved(event=event, status="accepted", cluster=None, reason=reason)

    def wrong(self, source: str, reason: str) -> None:
        """Does nothing: a signal is always a valid event."""


def _heard_by(events: Sequence[str | Source]) -> tuple[list[str], list[Source]]:
    """Splits events into texts for the supervisor and sources for this process.

    Raises:
      PlanError: a source is not a text, or the text names no source.
    """
    texts: list[str] = []
    signals: list[Source] = []
    for given, source in zip(events, sources_of(events), strict=True):
        if isinstance(source, Signals):
            signals.append(source)
        elif isinstance(source, File):
            texts.append(f"file:{source.path.absolute()}")
        elif isinstance(given, str):
            texts.append(given)
        else:
            raise PlanError(
                f"events: under `autopar run` the supervisor listens, and cannot have "
                f"{given!r}; name it, such as 'http:8765', or use run.change(...)."
            )
    return texts, signals


def _is_count(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= 0
