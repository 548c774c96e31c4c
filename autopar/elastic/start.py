"""`autopar.elastic`: checks what it is given, and starts a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.checkpoint.checkpoints import Checkpoints
from autopar.elastic.ledger import Ledger
from autopar.elastic.loop import ElasticRun
from autopar.elastic.nans import OnNan, guard
from autopar.elastic.processes.joining import join_run
from autopar.elastic.processes.link import CHECKPOINT_VARIABLE, EVERY_VARIABLE
from autopar.elastic.processes.training import TeamRun
from autopar.elastic.samples import Samples, others_of
from autopar.elastic.sources.named import sources_of
from autopar.elastic.sources.source import Source
from autopar.errors import PlanError
from autopar.runtime.parallel_step import ParallelStep


def elastic(
    step: ParallelStep[..., Any],
    create_state: Callable[..., Any],
    source: Callable[[int, int], Any],
    *,
    batch: int,
    steps: int,
    args: Sequence[Any] = (),
    others: Callable[[int], Any] | Sequence[Any] | Mapping[str, Any] | None = None,
    events: Sequence[str | Source] = (),
    checkpoint: str | os.PathLike[str] | Checkpoints | None = None,
    every: int | None = None,
    ledger: str | os.PathLike[str] | None = None,
    ahead: bool = True,
    survive: int = 0,
    on_nan: OnNan = "stop",
    progress: bool | None = None,
) -> ElasticRun | TeamRun:
    """Starts a run of a train step that goes on when devices go and come.

    Iterate over what it returns: each turn runs one step.

    >>> for done in autopar.elastic(  # doctest: +SKIP
    ...     train_step, create_state, source, batch=32, steps=1000
    ... ):
    ...     print(done.step, done.result)

    Args:
      step: what `autopar.parallelize` returned; its first arguments are the state, the
        next one is the batch.
      create_state: makes the state. A plain tuple holds several leading arguments.
      source: ``source(position, rows)`` returns ``rows`` samples as arrays, the first
        of which has the number ``position``.
      batch: samples of a step, over all devices and processes.
      steps: how many steps there are, those before a restart included.
      args: arguments of ``create_state``, such as a key.
      others: what the step takes after the batch, in order or by name; or a function
        from the number of the step to it.
      events: where events come from besides `ElasticRun.change`: ``file:PATH``,
        ``http:PORT``, ``signal``, or a source of one's own (page 'Elastic training' of
        the documentation).
      checkpoint: the directory of the run's checkpoints, or `autopar.Checkpoints`. The
        last one there is gone on with. The end of the run is saved.
      every: after how many steps the run is saved besides.
      ledger: path of the file in which events and re-plans are written down.
      ahead: whether plans and programs of likely next clusters are prepared in the
        background, with low priority.
      survive: how many processes may die at once without loss of state, where `autopar
        run` started several (page 'Processes that come and go' of the documentation).
        The state before a step is kept as long as the step runs, and what lies on one
        process alone is copied to others.
      on_nan: what is done where a loss or a gradient is not finite, which is always
        said and written to the ledger: ``stop`` ends the run behind the third such step
        in a row with `autopar.NotFiniteError`, the state that of the last good step;
        ``skip`` leaves the state as it was before such a step; ``continue`` goes on.
      progress: whether a line of progress is shown; None: on a terminal.

    Raises:
      PlanError: an argument is wrong.
      CheckpointError: there are checkpoints, and none can be used.
      TraceError: JAX cannot trace the step.
      InfeasibleError: no plan fits the memory of a device.
    """
    check_step("elastic", step, create_state, source)
    _check_counts(batch, steps)
    checkpoints, every = saves_of("elastic", checkpoint, every)
    guard("elastic", step, on_nan)
    samples = Samples(source, batch, others_of(others))
    together = join_run(
        step,
        create_state,
        args,
        samples,
        steps=steps,
        events=events,
        ledger=ledger,
        checkpoints=checkpoints,
        every=every,
        survive=survive,
        shows=progress,
        on_nan=on_nan,
    )
    if together is not None:
        return together
    run = ElasticRun(
        step,
        samples,
        steps=steps,
        ledger=Ledger(ledger),
        sources=sources_of(events),
        ahead=ahead and step.world.process_count == 1,
        checkpoints=checkpoints,
        every=every,
        shows=progress,
        on_nan=on_nan,
    )
    try:
        run.create(create_state, args)
    except BaseException:
        run.close()
        raise
    return run


def saves_of(
    name: str, checkpoint: Any, every: Any
) -> tuple[Checkpoints | None, int | None]:
    """Where and how often a run is saved; a scheduler says it for scripts that do not.

    A job that is preempted goes on from a checkpoint. Nothing is read or written yet.

    Args:
      name: of the function that was called, for the error.
      checkpoint: where checkpoints are kept; None: nothing was said.
      every: after how many steps; None: at the end alone.

    Raises:
      PlanError: what is said of checkpoints is wrong.
    """
    folder = os.environ.get(CHECKPOINT_VARIABLE)
    if checkpoint is None and folder:
        checkpoint = folder
        every = every or int(os.environ.get(EVERY_VARIABLE, "0")) or None
    _check_saves(name, checkpoint, every)
    if checkpoint is not None and not isinstance(checkpoint, Checkpoints):
        checkpoint = Checkpoints(checkpoint)
    return checkpoint, every


def _check_saves(name: str, checkpoint: Any, every: Any) -> None:
    """Checks what is said of checkpoints.

    Raises:
      PlanError: it is wrong.
    """
    if every is None:
        return
    if checkpoint is None:
        raise PlanError(f"{name}: every={every!r} needs checkpoint=, a directory.")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise PlanError(f"{name}: every={every!r} must be a whole number, at least 1.")


def check_step(name: str, step: Any, create_state: Any, source: Any) -> None:
    """Checks the arguments that make a run, before any work is done.

    Args:
      name: of the function that was called, for the error.
      step: the step.
      create_state: makes the state.
      source: returns samples.

    Raises:
      PlanError: one is wrong.
    """
    if not isinstance(step, ParallelStep):
        raise PlanError(
            f"{name}: step is {type(step).__name__}; pass what "
            "autopar.parallelize(step) returns."
        )
    for kind, given in (("create_state", create_state), ("source", source)):
        if not callable(given):
            raise PlanError(
                f"{name}: {kind} must be a function, got {type(given).__name__}."
            )


def _check_counts(batch: Any, steps: Any) -> None:
    """Checks the batch and the number of steps.

    Raises:
      PlanError: one is wrong.
    """
    for name, given, least in (("batch", batch, 1), ("steps", steps, 0)):
        if not isinstance(given, int) or isinstance(given, bool) or given < least:
            raise PlanError(
                f"elastic: {name}={given!r} must be a whole number, at least {least}."
            )
