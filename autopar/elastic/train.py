"""`autopar.train`: checks what it is given, and starts a run whose batch follows."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

from autopar.checkpoint.checkpoints import Checkpoints
from autopar.elastic.beside import Beside
from autopar.elastic.ledger import Ledger
from autopar.elastic.loop import ElasticRun, Step
from autopar.elastic.nans import OnNan, guard
from autopar.elastic.processes.following import Ends, TeamFollowing
from autopar.elastic.processes.joining import join_run
from autopar.elastic.processes.training import TeamRun
from autopar.elastic.samples import Samples, others_of
from autopar.elastic.sources.named import sources_of
from autopar.elastic.sources.source import Source
from autopar.elastic.start import check_step, saves_of
from autopar.elastic.training import TrainRun
from autopar.errors import PlanError
from autopar.goodput.critical import CriticalRegimes
from autopar.goodput.following import Following, check_data, check_rule, codecs_of
from autopar.goodput.progress_ratio import ProgressRatio
from autopar.goodput.rates import Rule, scaled_states
from autopar.runtime import changing_batches
from autopar.runtime.creation import state_shapes
from autopar.runtime.noise.options import NoiseOptions
from autopar.runtime.parallel_step import ParallelStep
from autopar_errors import check_type


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
    """Starts a run of a train step whose batch, plan and codecs follow its noise.

    Iterate over what it returns: each turn runs one step. The optimizer of the state
    must be wrapped by `autopar.goodput.scaled`, so that its learning rate and schedules
    follow the batch.

    >>> for done in autopar.train(  # doctest: +SKIP
    ...     train_step, create_state, source, base_batch=32, max_batch=1024, steps=1000
    ... ):
    ...     print(done.step, done.result)

    Args:
      step: what `autopar.parallelize` returned; its first arguments are the state, the
        next one is the batch. Where it does not measure the noise of its gradients
        (``noise_scale=``), it will.
      create_state: makes the state. A plain tuple holds several leading arguments.
      source: ``source(position, rows)`` returns ``rows`` samples as arrays, the first
        of which has the number ``position``.
      base_batch: rows of the batch that the learning rate was chosen for. The run
        begins with it.
      max_batch: most rows of a batch.
      lr_rule: how the learning rate follows; it must be the one that the optimizer was
        wrapped with. None: that one.
      steps: after how many steps the run ends, those before a restart included.
      samples: after how many rows of the base batch (`TrainRun.progress`) it ends.
      until: ends it behind a step for which it returns true.
      codecs: what gradients may be sent by besides what the step was made with, as
        ``compression=`` says it: ``none``, ``auto``, or a codec. Of a biased one, what
        `autopar.goodput.progress_ratio` has measured may be given with it.
      rule: `autopar.goodput.CriticalRegimes` in the place of goodput.
      args: arguments of ``create_state``, such as a key.
      others: what the step takes after the batch, as for `autopar.elastic`.
      events: where events come from, as for `autopar.elastic`.
      checkpoint: the directory of the run's checkpoints. The last one there is gone on
        with, its batch and all that was measured included.
      every: after how many steps the run is saved besides its end.
      ledger: path of the file in which changes are written down.
      ahead: whether programs are prepared beside the run, in the background; in several
        processes those of other batches and codecs, which all begin at the same step.
      survive: how many processes may die at once without loss of state, as for
        `autopar.elastic`. Where `autopar run` started several processes, one decides,
        and all change at the same step; programs are not prepared beside the run.
      on_nan: what is done where a loss or a gradient is not finite, which is always
        said and written to the ledger: ``stop`` ends the run behind the third such step
        in a row with `autopar.NotFiniteError`, the state that of the last good step;
        ``skip`` leaves the state as it was before such a step; ``continue`` goes on.
      progress: whether a line of progress is shown; None: on a terminal.

    Raises:
      PlanError: an argument is wrong, or the state's optimizer does not follow.
      CheckpointError: there are checkpoints, and none can be used.
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
            step, following, rule=lr_rule, ends=ends, record=record
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
    """The rows that a run begins with: those that an earlier one was left with."""
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
    """How noise is measured where the user does not say: as the rule needs it."""
    asked = step.preparation.planner.options
    # Nobody's stages are tried where noise is measured.
    one = asked.stages == 1 or (asked.stages is None and asked.schedule is None)
    metric = rule == "adascale-root" and one
    return NoiseOptions(base_batch=following.base_batch, preconditioned=metric)


def _check_end(steps: Any, samples: Any, until: Any) -> None:
    """Checks what ends the run.

    Raises:
      PlanError: nothing does, or a number is out of its range.
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
    """Checks that the state has an optimizer that follows, before any work is done.

    Args:
      create_state: makes the state.
      args: of it.
      wrapped: how the optimizer is to be wrapped: further arguments of `scaled`.
    """
    shapes = state_shapes(create_state, args)
    if not scaled_states(shapes.arguments()):
        raise PlanError(
            "train: the state that create_state makes holds no "
            "autopar.goodput.ScaledState, which counts progress and lets the learning "
            "rate follow the batch. Wrap its optimizer: "
            f"autopar.goodput.scaled(optimizer, {wrapped}). The rule 'none' leaves the "
            "rate as it is."
        )
