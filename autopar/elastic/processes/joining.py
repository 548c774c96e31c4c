"""What `autopar.elastic` does in a process that `autopar run` started."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from autopar.checkpoint.checkpoints import Checkpoints
from autopar.elastic.events import Event
from autopar.elastic.ledger import Ledger
from autopar.elastic.nans import OnNan
from autopar.elastic.processes.ahead import Ahead, prepare_and_exit
from autopar.elastic.processes.beside import rest_structs
from autopar.elastic.processes.following import TeamFollowing
from autopar.elastic.processes.link import AHEAD_VARIABLE, VARIABLE
from autopar.elastic.processes.team import Team, local_devices, run_folder
from autopar.elastic.processes.training import TeamRun
from autopar.elastic.resolve import Resolved
from autopar.elastic.samples import Samples
from autopar.elastic.saves import Saves
from autopar.elastic.sources.file import File
from autopar.elastic.sources.named import sources_of
from autopar.elastic.sources.signals import Signals
from autopar.elastic.sources.source import Source
from autopar.errors import PlanError
from autopar.goodput.loop import Record
from autopar.runtime.creation import state_shapes
from autopar.runtime.parallel_step import ParallelStep
from autopar.steps.spares import Spares


def join_run(
    step: ParallelStep[..., Any],
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
    """Joins the run of several processes that this one was started for.

    Args:
      step: the step.
      create_state: makes the state of a run that begins.
      args: its arguments.
      samples: what the step is trained on.
      steps: how many steps there are.
      events: where events come from; the supervisor listens there, once for all.
      ledger: path of the ledger.
      checkpoints: where the run is saved.
      every: after how many steps; None: at the end alone.
      survive: how many processes may die at once without loss of state.
      shows: whether progress is shown; None: on a terminal.
      on_nan: what is done where a step is not finite.
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
    if survive:
        # While a step runs, the state before it and the two before that are kept, and
        # neighbours' (`Team.done`); arrays that others have too are kept once.
        step.preparation.planner.hold(Spares(always=1, split=2 + survive))
    if text := os.environ.get(AHEAD_VARIABLE):
        shapes = state_shapes(create_state, args)
        structs = (*shapes.arguments(), *rest_structs(step, samples, shapes, 0))
        prepare_and_exit(_ahead(step, structs, donate=donate), text)
    splits = step.preparation.planner.options.split_batch
    if VARIABLE not in os.environ:
        return None
    texts, signals = _heard_by(events)
    rows = samples.batch if splits else 0
    saves = checkpoints is not None
    team = Team.of_environment(survive, rows, texts, saves=saves)
    assert team is not None
    for source in signals:
        source.start(Resigning(team))
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
        on_nan=on_nan,
    )


class Resigning:
    """Where a signal to this process goes: it asks to leave the run."""

    def __init__(self, team: Team) -> None:
        """Takes the part of this process."""
        self._team = team

    def put(self, event: Event) -> Resolved:
        """See `autopar.elastic.sources.source.Sink`."""
        self._team.resign()
        reason = "this process asks the supervisor to leave."
        return Resolved(event=event, status="accepted", cluster=None, reason=reason)

    def wrong(self, source: str, reason: str) -> None:
        """A signal cannot be wrong."""


def _heard_by(events: Sequence[str | Source]) -> tuple[list[str], list[Source]]:
    """The texts of sources for the supervisor, and those of this process alone.

    Raises:
      PlanError: a source is no text, or names none.
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
