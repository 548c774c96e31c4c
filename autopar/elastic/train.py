"""Starts runs: `autopar.elastic`, and `autopar.train`, which adapts the batch size."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

from autopar.checkpoint.checkpoints import Checkpoints
from autopar.cluster import Cluster
from autopar.elastic.events import Event, Resolved
from autopar.elastic.ledger import Ledger
from autopar.elastic.loop import ElasticRun, Step
from autopar.elastic.nans import Finiteness, OnNan, guard
from autopar.elastic.processes.following import Ends, TeamFollowing
from autopar.elastic.processes.joining import join_run
from autopar.elastic.processes.link import CHECKPOINT_VARIABLE, EVERY_VARIABLE
from autopar.elastic.processes.training import TeamRun
from autopar.elastic.samples import Samples, others_of
from autopar.elastic.sources.named import sources_of
from autopar.elastic.sources.source import Source
from autopar.errors import PlanError
from autopar.goodput.following import (
    CriticalRegimes,
    Following,
    ProgressRatio,
    check_data,
    check_rule,
    codecs_of,
)
from autopar.goodput.loop import Loop
from autopar.goodput.rates import Rule, progress, scaled_states
from autopar.plans import Plan
from autopar.runtime import changing_batches
from autopar.runtime.background import Beside
from autopar.runtime.creation import state_shapes
from autopar.runtime.local.steps import LocalSteps
from autopar.runtime.noise.averages import NoiseOptions
from autopar.runtime.parallel_step import ParallelStep
from autopar_errors import check_type


class TrainRun:
    """A training run that adapts its batch size; iterate over it to train.

    Attributes:
      run: the elastic run that runs the steps.
      loop: chooses the batch size.
    """

    def __init__(
        self,
        run: ElasticRun,
        step: ParallelStep[..., Any],
        following: Following,
        *,
        samples: float | None = None,
        until: Callable[[Step], bool] | None = None,
        beside: Beside | None = None,
    ) -> None:
        """See `autopar.train`, which makes such runs.

        Args:
          run: the elastic run, before its first step.
          step: the train step.
          following: settings of the adaptive batch size.
          samples: progress at which the run ends, as a number of rows of the base
            batch; None: no such limit.
          until: test of each step; the run ends after a step for which it returns true.
            None: no test.
          beside: compiles other programs in the background; None: steps wait for them.
        """
        self.run, self._beside = run, beside
        self._samples, self._until = samples, until
        self.loop = Loop(
            step,
            following,
            record=self._write,
            background=None if beside is None else beside.do,
            horizon_s=self._horizon_s,
            rest_s=self._rest_s,
        )
        self._step_s = math.nan
        self._worth = 0.0

    def begin(self, create_state: Callable[..., Any], args: Sequence[Any]) -> None:
        """Creates the state, or restores it from the last checkpoint.

        Args:
          create_state: makes the state.
          args: arguments of ``create_state``.
        """
        self.run.create(create_state, args)
        if self.run.notes is not None:
            self.loop.go_on(self.run.notes)
            self.run.resize(self.loop.batch_size)
        self._step_s = self.run.plan.predicted.step_s
        rest, named = self.run.arguments()
        self.run.state = self.loop.begin(self.run.state, *rest, **named)
        self.run.keep(self.loop.to_data)
        self._worth = progress(self.run.state)

    @property
    def nans(self) -> Finiteness:
        """Counts the steps with a loss or gradient that is not finite."""
        return self.run.nans

    @property
    def state(self) -> Any:
        """The training state, which each step takes and returns."""
        return self.run.state

    @property
    def step(self) -> int:
        """Number of the next step."""
        return self.run.step

    @property
    def position(self) -> int:
        """Number of the first sample of the next step."""
        return self.run.position

    @property
    def batch_size(self) -> int:
        """Samples of the next step."""
        return self.loop.batch_size

    @property
    def progress(self) -> float:
        """The number of rows of base batches that would have made the same progress."""
        return self._worth

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self.run.plan

    @property
    def compression_state(self) -> Any:
        """The state of the codecs (`autopar.ParallelStep.compression_state`)."""
        return self.run.compression_state

    @property
    def ledger(self) -> Ledger:
        """The ledger of events, re-plans and changes of the batch size."""
        return self.run.ledger

    @property
    def sources(self) -> Any:
        """The sources of events."""
        return self.run.sources

    def change(self, event: Event | Cluster | str | Mapping[str, Any]) -> Resolved:
        """Asks for a change of the devices (`ElasticRun.change`)."""
        return self.run.change(event)

    def stop(self) -> None:
        """Ends the run before the next step."""
        self.run.stop()

    def close(self) -> None:
        """Ends the run and its sources; further calls do nothing."""
        self.run.close()
        if self._beside is not None:
            self._beside.close()

    def __iter__(self) -> TrainRun:
        """Returns the run itself; a loop can stop and a later loop can go on."""
        return self

    def __next__(self) -> Step:
        """Runs one step, and chooses the batch size of the next step.

        Raises:
          StopIteration: the run is at its end, or was stopped.
          PlanError: the source has no more samples; `state` is then the state before
            the step.
        """
        if self._samples is not None and self._worth >= self._samples:
            self.run.stop()
        try:
            done = next(self.run)
        except PlanError:  # for example, the source has no more samples
            self.run.save()
            raise
        self._step_s = done.seconds
        rest, named = self.run.arguments()
        self.run.state = self.loop.observe(
            self.run.state, *rest, seconds=done.seconds, loss=done.result, **named
        )
        if self.loop.batch_size != self.run.batch:
            self.run.resize(self.loop.batch_size)
        self._worth = progress(self.run.state)
        if self._until is not None and self._until(done):
            self.run.stop()
        return done

    def _horizon_s(self) -> float:
        """Seconds until the next change of devices, or the end of the run."""
        steps = self.run.rest_steps
        rest_s = self._rest_s() if steps is None else max(0.0, steps * self._step_s)
        return self.run.horizon_s(rest_s)

    def _rest_s(self) -> float:
        """Estimated seconds until the progress reaches ``samples``; infinite for no
        limit.
        """
        if self._samples is None:
            return math.inf
        each = float(self.loop.following.base_batch)
        if self._worth > 0 and self.run.step:
            each = self._worth / self.run.step
        return max(0.0, (self._samples - self._worth) / each * self._step_s)

    def _write(self, kind: str, **fields: Any) -> None:
        """Writes a line of the ledger, with the current step and position."""
        where = {"step": self.run.step, "position": self.run.position}
        self.run.ledger.write(kind, **{**where, **fields})


def elastic(
    step: ParallelStep[..., Any] | LocalSteps,
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
    """Starts a run of a train step that goes on when devices leave and join.

    Iterate over the result: each iteration runs one step.

    >>> for done in autopar.elastic(  # doctest: +SKIP
    ...     train_step, create_state, source, batch=32, steps=1000
    ... ):
    ...     print(done.step, done.result)

    Args:
      step: the result of `autopar.parallelize` or of `autopar.local_steps`. Its first
        arguments are the state, and its next argument is the batch.
      create_state: makes the state. A plain tuple holds several leading arguments.
      source: ``source(position, rows)`` returns ``rows`` samples as arrays, beginning
        with sample number ``position``.
      batch: samples of a step, over all devices and processes. Replicas of local steps
        share them evenly, whatever their number.
      steps: number of steps, including the steps before a restart.
      args: arguments of ``create_state``, such as a random key.
      others: arguments of the step after the batch, in order or by name; or a function
        from the number of the step to these arguments.
      events: sources of events besides `ElasticRun.change`: ``file:PATH``,
        ``http:PORT``, ``signal``, or your own source (page 'Elastic training' of the
        documentation).
      checkpoint: the directory of the run's checkpoints, or `autopar.Checkpoints`. The
        run resumes from the last checkpoint there. The run is saved when it ends.
      every: number of steps between saves; None: the run is saved only at its end.
      ledger: path of the file for the record of events and re-plans.
      ahead: whether the run plans and compiles for likely next clusters in the
        background, with low priority.
      survive: how many processes may die at once without loss of state, if `autopar
        run` started several processes (page 'Processes that come and go' of the
        documentation). Each process keeps the state before a step while the step runs.
        State that only one process holds is copied to other processes.
      on_nan: reaction to a loss or gradient that is not finite. Each such step is
        printed and written to the ledger. ``stop`` ends the run with
        `autopar.NotFiniteError` after the third such step in a row, and restores the
        state of the last good step. ``skip`` restores the state from before each such
        step. ``continue`` goes on.
      progress: whether a line of progress is shown; None: only on a terminal.

    Raises:
      PlanError: an argument is wrong.
      CheckpointError: there are checkpoints, but none of them can be used.
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
    """The checkpoints of a run, and the number of steps between saves.

    If the script sets neither, the values come from environment variables that a
    scheduler sets, because a preempted job must resume from a checkpoint. This function
    reads and writes no file.

    Args:
      name: name of the calling function, for error messages.
      checkpoint: where checkpoints are stored; None: the script does not set it.
      every: number of steps between saves; None: only at the end.

    Raises:
      PlanError: an argument is wrong.
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
    """Checks the arguments about checkpoints.

    Raises:
      PlanError: an argument is wrong.
    """
    if every is None:
        return
    if checkpoint is None:
        raise PlanError(f"{name}: every={every!r} needs checkpoint=, a directory.")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise PlanError(f"{name}: every={every!r} must be a whole number, at least 1.")


def check_step(name: str, step: Any, create_state: Any, source: Any) -> None:
    """Checks the functions that the user gave, before any work is done.

    Args:
      name: name of the calling function, for error messages.
      step: the step.
      create_state: makes the state.
      source: returns samples.

    Raises:
      PlanError: an argument is wrong.
    """
    if isinstance(step, LocalSteps) and name == "train":
        raise PlanError(
            "train: local steps have no gradient of the whole batch whose noise could "
            "choose the batch size; use autopar.elastic with a fixed batch."
        )
    if not isinstance(step, ParallelStep | LocalSteps):
        raise PlanError(
            f"{name}: step is {type(step).__name__}; pass what "
            "autopar.parallelize(step) or autopar.local_steps(step) returns."
        )
    for kind, given in (("create_state", create_state), ("source", source)):
        if not callable(given):
            raise PlanError(
                f"{name}: {kind} must be a function, got {type(given).__name__}."
            )


def _check_counts(batch: Any, steps: Any) -> None:
    """Checks the batch and the number of steps.

    Raises:
      PlanError: an argument is wrong.
    """
    for name, given, least in (("batch", batch, 1), ("steps", steps, 0)):
        if not isinstance(given, int) or isinstance(given, bool) or given < least:
            raise PlanError(
                f"elastic: {name}={given!r} must be a whole number, at least {least}."
            )


def train(
    step: ParallelStep[..., Any],
    create_state: Callable[..., Any],
    source: Callable[[int, int], Any],
    *,
    base_batch: int,
    max_batch: int,
    lr_rule: Rule | None = None,
    steps: int | None = None,
    samples: float | None = None,
    until: Callable[[Step], bool] | None = None,
    codecs: Sequence[str] | Mapping[str, ProgressRatio | float | None] = (),
    rule: CriticalRegimes | None = None,
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
) -> TrainRun | TeamRun:
    """Starts a run whose batch size, plan and codecs follow the gradient noise.

    Iterate over the result: each iteration runs one step. Wrap the optimizer in the
    state with `autopar.goodput.scale_updates`, so that its learning rate and schedules
    follow the batch size.

    >>> for done in autopar.train(  # doctest: +SKIP
    ...     train_step, create_state, source, base_batch=32, max_batch=1024, steps=1000
    ... ):
    ...     print(done.step, done.result)

    Args:
      step: the result of `autopar.parallelize`. Its first arguments are the state, and
        its next argument is the batch. If the step does not measure its gradient noise
        (``noise_scale=``), `train` turns the measurement on.
      create_state: makes the state. A plain tuple holds several leading arguments.
      source: ``source(position, rows)`` returns ``rows`` samples as arrays, beginning
        with sample number ``position``.
      base_batch: rows of the batch that the learning rate was chosen for. The run
        begins with this batch size.
      max_batch: largest number of rows of a batch.
      lr_rule: rule by which the learning rate follows the batch size. It must be the
        rule that the optimizer was wrapped with. None: that rule.
      steps: number of steps after which the run ends, including the steps before a
        restart.
      samples: rows of the base batch after which the run ends (`TrainRun.progress`).
      until: ends the run after a step for which it returns true.
      codecs: further codecs for gradients, besides those of the step, written as for
        ``compression=``: ``none``, ``auto``, or a codec. A biased codec may come with
        its measured progress ratio (`autopar.goodput.following`).
      rule: `autopar.goodput.CriticalRegimes`, which then chooses the batch instead of
        goodput.
      args: arguments of ``create_state``, such as a random key.
      others: arguments of the step after the batch, as for `autopar.elastic`.
      events: sources of events, as for `autopar.elastic`.
      checkpoint: the directory of the run's checkpoints. The run resumes from the last
        checkpoint there, with its batch size and its measurements.
      every: number of steps between saves; None: the run is saved only at its end.
      ledger: path of the file for the record of changes.
      ahead: whether programs are prepared in the background during the run. In a
        run of several processes, these are the programs of other batch sizes and
        codecs, and all processes switch at the same step.
      survive: how many processes may die at once without loss of state, as for
        `autopar.elastic`. If `autopar run` started several processes, one process
        decides, and all processes change at the same step.
      on_nan: reaction to a loss or gradient that is not finite. Each such step is
        printed and written to the ledger. ``stop`` ends the run with
        `autopar.NotFiniteError` after the third such step in a row, and restores the
        state of the last good step. ``skip`` restores the state from before each such
        step. ``continue`` goes on.
      progress: whether a line of progress is shown; None: only on a terminal.

    Raises:
      PlanError: an argument is wrong, or the optimizer was not wrapped with
        `scale_updates`.
      CheckpointError: there are checkpoints, but none of them can be used.
      TraceError: JAX cannot trace the step.
      InfeasibleError: no plan fits the memory of a device.
    """
    check_step("train", step, create_state, source)
    checkpoints, every = saves_of("train", checkpoint, every)
    _check_end(steps, samples, until)
    own = step.preparation.planner.options.compression
    following = Following(
        base_batch=base_batch,
        max_batch=max_batch,
        codecs=codecs_of(codecs, own),
        rule=rule,
    )
    _check_state(create_state, args, f"{lr_rule or 'adascale'!r}, {base_batch=}")
    rows = _rows_left(step, checkpoints, following)
    guard("train", step, on_nan)
    changing_batches.measure_noise(step, noise_options(step, following, lr_rule))
    most = math.inf if steps is None else steps
    ends = Ends(samples=samples, until=until, steps=most)
    together = join_run(
        step,
        create_state,
        args,
        Samples(source, rows, others_of(others)),
        steps=most,
        events=events,
        ledger=ledger,
        checkpoints=checkpoints,
        every=every,
        survive=survive,
        shows=progress,
        on_nan=on_nan,
        following=lambda record: TeamFollowing(
            step, following, rule=lr_rule, ends=ends, record=record, ahead=ahead
        ),
    )
    if together is not None:
        return together
    alone = step.world.process_count == 1
    run = ElasticRun(
        step,
        Samples(source, rows, others_of(others)),
        steps=most,
        ledger=Ledger(ledger),
        sources=sources_of(events),
        ahead=ahead and alone,
        checkpoints=checkpoints,
        every=every,
        shows=progress,
        on_nan=on_nan,
    )
    try:
        beside = run.ahead.beside if run.ahead is not None else None
        if ahead and not alone:
            beside = Beside()
        made = TrainRun(
            run, step, following, samples=samples, until=until, beside=beside
        )
        made.begin(create_state, args)
        check_rule(made.state, base_batch, lr_rule)
    except BaseException:
        run.close()
        raise
    return made


def _rows_left(
    step: ParallelStep[..., Any], checkpoints: Checkpoints | None, following: Following
) -> int:
    """The batch size to begin with: the last checkpoint's, or the base batch."""
    notes = None if checkpoints is None else checkpoints.notes()
    if notes is None:
        return following.base_batch
    check_data(notes, following)
    way = notes["way"]
    changing_batches.begin_with(
        step, codecs=way["codecs"], microbatches=way["microbatches"]
    )
    return int(way["rows"])


def noise_options(
    step: ParallelStep[..., Any], following: Following, rule: Rule | None
) -> NoiseOptions:
    """Default options for measuring gradient noise, for the given rule."""
    asked = step.preparation.planner.options
    # If a step measures noise, the planner tries pipeline stages only if the user asks
    # for them.
    one = asked.stages == 1 or (asked.stages is None and asked.schedule is None)
    metric = rule == "adascale-root" and one
    return NoiseOptions(base_batch=following.base_batch, preconditioned=metric)


def _check_end(steps: Any, samples: Any, until: Any) -> None:
    """Checks the arguments that say when the run ends.

    Raises:
      PlanError: no argument ends the run, or a number is out of its range.
    """
    if steps is None and samples is None and until is None:
        raise PlanError("train: give steps=, samples= or until=: nothing ends the run.")
    if steps is not None and (
        not isinstance(steps, int) or isinstance(steps, bool) or steps < 0
    ):
        raise PlanError(f"train: steps={steps!r} must be a whole number, at least 0.")
    check_type(
        "train: samples=", samples, (int, float, NoneType), "a number, such as 1e6"
    )
    if samples is not None and not 0 <= samples < math.inf:
        raise PlanError(f"train: samples={samples!r} must be a number, at least 0.")
    if until is not None and not callable(until):
        raise PlanError(f"train: until={until!r} must be a function of a step.")


def _check_state(
    create_state: Callable[..., Any], args: Sequence[Any], wrapped: str
) -> None:
    """Checks before any work that the optimizer was wrapped with `scale_updates`.

    Args:
      create_state: makes the state.
      args: arguments of ``create_state``.
      wrapped: the further arguments that `scale_updates` must get; the error message
        shows them.
    """
    shapes = state_shapes(create_state, args)
    if not scaled_states(shapes.arguments()):
        raise PlanError(
            "train: the state that create_state makes holds no "
            "autopar.goodput.ScaledState, which counts progress and lets the learning "
            "rate follow the batch. Wrap its optimizer: "
            f"autopar.goodput.scale_updates(optimizer, {wrapped}). The rule 'none' "
            "leaves the rate as it is."
        )
