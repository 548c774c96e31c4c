"""Compares training with codecs with exact training, from time to time.

A *comparison* trains for some steps with the codecs of the plan, and beside it with all
values exact, in the same layouts, on equal batches and from equal states. The exact
training has a state of its own, which is dropped afterwards. Both have taken k steps
when step k + 1 begins. On its batch, the exact program computes the losses of both
states, ``c`` and ``e``. For k from 1 to n::

    difference = mean(c - e)
    error      = standard deviation(c - e) / sqrt(n)
    fall       = fall of the mean loss in a step, since the last comparison
    cost       = difference / (fall (n + 1) / 2)

The batches are equal, so `error` is much smaller than the spread of losses. `cost` is
the part of the progress that codecs cost: on average, the two have been apart for
``(n + 1) / 2`` steps. Before the first comparison, the first n steps of the training
stand for the last comparison.

A step with codecs takes ``s`` seconds by its plan, and one with the next milder codecs
``m``. The milder codecs make more progress in a second if ``cost > 1 - s / m``. So they
are taken if this holds for ``difference - 3 error``, and if a loss with codecs is not
finite and all exact ones are. First come int8 codes, then exact values; and kinds of
values without error feedback come first: cuts, gathers, gradients.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from autopar.compression.codecs.registry import parse_codec
from autopar.compression.cut_codes import EXACT
from autopar.errors import PlanError
from autopar.planner.options import PlanOptions
from autopar.plans import Plan
from autopar.runtime import placement
from autopar.runtime.codec_run import copy_array
from autopar.runtime.gradients.recoding import Recoding
from autopar.runtime.planned import PlannedStep
from autopar_errors import check_type

CUTS, GATHERS, GRADIENTS = KINDS = ("cuts", "gathers", "gradients")
# Kind -> the options of planning that ask for its codecs.
OPTIONS = {CUTS: "cut_codecs", GATHERS: "gather_codecs", GRADIENTS: "compression"}
MILD = "int8"
STANDARD_ERRORS = 3.0
# A rise of the loss by a smaller part of it does not count, even if the loss falls no
# more.
LEAST_RISE = 1e-4
# The end of the path of a result with the name "loss": `metrics/loss`, `['loss']`.
_LOSS = re.compile(r"(?i)(^|\W)loss\W*$")
# The shape of a gradient for which stated errors of codecs are compared.
_SHAPE = (1024, 1024)


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """When training with codecs is compared with exact training.

    During a comparison, devices hold the state three times.

    Attributes:
      every: steps from the end of a comparison to the begin of the next.
      steps: number of steps after which losses are compared, n.
      most: the largest part of the progress that codecs may cost; None: as much as
        their faster steps make up for, by the seconds of the plans.

    Raises:
      PlanError: a number is out of range.
    """

    every: int = 2000
    steps: int = 32
    most: float | None = None

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for name in ("every", "steps"):
            check_type(f"Comparison: {name}=", getattr(self, name), int, "a number")
        most = 0.0 if self.most is None else self.most
        if self.every < 0 or self.steps < 2 or not 0 <= most < math.inf:
            raise PlanError(
                f"{self!r}: expected every= of at least 0, steps= of at least 2, and "
                "most= of at least 0, or None."
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """The result of a comparison.

    Attributes:
      step: number of calls of the step before its end.
      loss: mean of the losses of the states that were trained with codecs, which are
        computed exactly.
      exact_loss: mean of the losses of the states that were trained exactly.
      error: standard error of the difference of the means.
      cost: the part of the progress that codecs cost; NaN if it is not known how fast
        the loss falls, infinite if it does not fall.
      withdrawn: the kind of codecs that was made milder: ``cuts``, ``gathers`` or
        ``gradients``; '' if all codecs stayed.
    """

    step: int
    loss: float
    exact_loss: float
    error: float
    cost: float = math.nan
    withdrawn: str = ""

    @property
    def sure_cost(self) -> float:
        """The least part of the progress that codecs cost, by `STANDARD_ERRORS`."""
        if not math.isfinite(self.loss):
            return math.inf if math.isfinite(self.exact_loss) else 0.0
        difference = self.loss - self.exact_loss
        sure = difference - STANDARD_ERRORS * self.error
        if math.isnan(self.cost) or sure <= LEAST_RISE * abs(self.exact_loss):
            return 0.0
        return self.cost * sure / difference


def kinds_of(plan: Plan) -> list[str]:
    """The kinds of values that a plan sends by codecs, in the order of withdrawal."""
    return [kind for kind in KINDS if _texts(plan, kind)]


def _texts(plan: Plan, kind: str) -> set[str]:
    """The codecs of a kind."""
    if kind == CUTS:
        data = plan.pipeline
        texts = (
            () if data is None else (*data.activation_codecs, *data.cotangent_codecs)
        )
    elif kind == GATHERS:
        texts = tuple(g.codec for stage in plan.stages for g in stage.gathers)
    else:
        texts = tuple(g.codec for g in plan.gradients)
    return set(texts) - {"", EXACT}


def milder_text(plan: Plan, kind: str) -> str:
    """The next milder codec of a kind: `MILD`, or `EXACT`."""
    most = parse_codec(MILD).error(_SHAPE)
    errors = [parse_codec(text).error(_SHAPE) for text in _texts(plan, kind)]
    return MILD if max(errors) > most else EXACT


def with_codec(plan: Plan, kind: str, text: str) -> Plan:
    """The plan with a milder codec for a kind, to be carried out as an edited plan."""
    if kind == GRADIENTS:
        own = {
            g.name: text
            for g in plan.gradients
            if g.codec and _is_coarser(g.codec, text)
        }
        return Recoding().change_codecs(plan, own, lenient=True)
    if kind == GATHERS:
        stages = [
            msgspec.structs.replace(
                stage,
                gathers=tuple(_gather_with(g, text) for g in stage.gathers),
            )
            for stage in plan.stages
        ]
        return msgspec.structs.replace(plan, stages=tuple(stages))
    data = plan.pipeline
    assert data is not None
    sent = {
        name: tuple(
            text if _is_coarser(own, text) else own for own in getattr(data, name)
        )
        for name in ("activation_codecs", "cotangent_codecs")
    }
    return msgspec.structs.replace(plan, pipeline=msgspec.structs.replace(data, **sent))


def _gather_with(gather: Any, text: str) -> Any:
    if not gather.codec or not _is_coarser(gather.codec, text):
        return gather
    codec = "" if text == EXACT else text
    return msgspec.structs.replace(gather, codec=codec)


def _is_coarser(own: str, text: str) -> bool:
    """Whether a codec has a larger error than another; both may be `EXACT`."""
    errors = [0.0 if x == EXACT else parse_codec(x).error(_SHAPE) for x in (own, text)]
    return errors[0] > errors[1]


def exact_plan(plan: Plan) -> Plan:
    """The plan with exact values of all kinds, to be carried out as an edited plan."""
    for kind in kinds_of(plan):
        plan = with_codec(plan, kind, EXACT)
    return plan


def milder_options(options: PlanOptions, kind: str, text: str) -> PlanOptions:
    """Options of planning that ask for a milder codec of a kind."""
    asked = "none" if text == EXACT else text
    changed: dict[str, Any] = {OPTIONS[kind]: asked}
    if kind == CUTS:
        changed["cut_error_budget"] = None
    after = {name: getattr(options, name) for name in OPTIONS.values()} | changed
    if "auto" not in (after["compression"], after["gather_codecs"]):
        changed["error_budget"] = None
    return dataclasses.replace(options, **changed)


class _Beside:
    """Exact steps beside training, from the state at their begin."""

    def __init__(self, planned: PlannedStep, placed: Sequence[Any]) -> None:
        """Copies the state.

        Args:
          planned: the step with codecs.
          placed: the arguments of the next step of training.
        """
        self._results = planned.analysis.carried_arguments
        self._state = self._copied(placed)
        self._begun = False
        # Shapes of arguments -> the step with codecs, and the same with exact values.
        self._steps: dict[tuple[Any, ...], tuple[PlannedStep, PlannedStep]] = {}
        self.losses: list[tuple[float, float]] = []

    def goes_on(self, planned: PlannedStep, placed: Sequence[Any]) -> bool:
        """Whether a step continues the training: its batch may have another shape.

        Args:
          planned: the step.
          placed: its arguments.
        """
        known = self._steps.get(_shapes(placed))
        if known is not None:
            return known[0] is planned  # else codecs or devices have changed
        # Other processes do not pass on the copy of a state that has to move.
        return planned.links is None or all(
            x.sharding == planned.in_shardings[k] for k, x in self._state.items()
        )

    def run(
        self,
        planned: PlannedStep,
        placed: Sequence[Any],
        exact: Callable[[Plan], PlannedStep],
        loss_of: Callable[[Any], float],
    ) -> None:
        """Takes the exact step on the batch of the next step of training.

        Args:
          planned: the next step of training.
          placed: its arguments.
          exact: as for `Comparer.begin_step`.
          loss_of: returns the loss among the flat results of a step.

        Raises:
          PlanError: the steps lay out their arguments differently.
        """
        shapes = _shapes(placed)
        if shapes not in self._steps:
            made = exact(exact_plan(planned.plan))
            if planned.in_shardings != made.in_shardings:
                raise PlanError(
                    "comparison=: the exact step has other layouts of its arguments "
                    "than the step with codecs. Leave comparison= out for this plan."
                )
            self._steps[shapes] = planned, made
        _, made = self._steps[shapes]
        coarse = math.nan
        if self._begun:
            coarse = loss_of(self._step(made, placed, self._copied(placed)))
        state = {
            k: placement.place(x, made.in_shardings[k]) for k, x in self._state.items()
        }
        flat = self._step(made, placed, state)
        self._state = {k: flat[result] for k, result in self._results.items()}
        if self._begun:
            self.losses.append((coarse, loss_of(flat)))
        self._begun = True

    def _copied(self, placed: Sequence[Any]) -> dict[int, Any]:
        """Copies of the state among arguments, in the same kind of memory."""
        return {
            k: placement.place(copy_array(placed[k]), placed[k].sharding)
            for k in self._results
        }

    def _step(
        self, exact: PlannedStep, placed: Sequence[Any], state: Mapping[int, Any]
    ) -> list[Any]:
        """The flat results of an exact step from a state, which is consumed."""
        arguments = [state.get(k, x) for k, x in enumerate(placed)]
        codecs = () if exact.sums is None else (exact.sums.init(),)
        noise = () if exact.noise is None else (exact.noise.init(),)
        flat = exact.function(*arguments, *codecs, *noise)
        if codecs:
            return flat[0]
        return flat[:-1] if noise else flat


def _shapes(placed: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((x.shape, x.dtype) for x in placed)


class Comparer:
    """Runs the comparisons of a training.

    Attributes:
      options: when there are comparisons.
      results: the results, in order.
    """

    def __init__(self, options: Comparison) -> None:
        """Creates a comparer; the first comparison begins after ``every`` steps."""
        self.options = options
        self.results: list[Compared] = []
        self._calls, self._since = 0, 0
        self._beside: _Beside | None = None
        self._ended: Compared | None = None
        self._first: list[float] = []  # losses of the first steps with codecs
        self._looked_at: tuple[Plan, bool] | None = None
        # A mean loss, and the number of the step to which it belongs.
        self._known: tuple[float, float] | None = None

    def begin_step(
        self,
        planned: PlannedStep,
        placed: Sequence[Any],
        exact: Callable[[Plan], PlannedStep],
        loss_of: Callable[[Any], float],
        *,
        full: bool,
    ) -> None:
        """Takes the exact step beside the next step, if there is a comparison.

        Args:
          planned: the step of training.
          placed: its arguments.
          exact: returns the compiled program of an edited plan of this step.
          loss_of: returns the loss among the flat results of a step.
          full: whether the step has a full batch. Comparisons begin and end in such
            steps, as a milder codec changes the plan of the step.
        """
        self._calls += 1
        if self._beside is not None and not self._beside.goes_on(planned, placed):
            self._beside = None
        if self._beside is None:
            self._since += 1
            wanted = full and self._since > self.options.every
            if not (wanted and self._has_codecs(planned.plan)):
                return
            self._beside = _Beside(planned, placed)
        self._beside.run(planned, placed, exact, loss_of)
        if full and len(self._beside.losses) >= self.options.steps:
            self._ended = self._result(self._beside.losses)
            self._beside, self._since = None, 0

    def _has_codecs(self, plan: Plan) -> bool:
        """Whether a plan sends values by codecs; remembered for the last plan."""
        if self._looked_at is None or self._looked_at[0] is not plan:
            self._looked_at = plan, bool(kinds_of(plan))
        return self._looked_at[1]

    def end_step(
        self,
        planned: PlannedStep,
        flat: Sequence[Any],
        loss_of: Callable[[Any], float],
    ) -> Compared | None:
        """Takes the results of the step.

        To read a loss is to wait for the step, so none is read without codecs.

        Args:
          planned: the step of training.
          flat: its flat results.
          loss_of: as for `begin_step`.

        Returns:
          The result of a comparison that has ended; None otherwise. `end` adds it to
          `results`.
        """
        ended, self._ended = self._ended, None
        count = self.options.steps
        if not self._has_codecs(planned.plan):
            self._first = []
        elif len(self._first) < count:
            self._first.append(loss_of(flat))
            if len(self._first) == count and self._known is None:
                self._known = statistics.fmean(self._first), self._middle()
        return ended

    def _result(self, losses: Sequence[tuple[float, float]]) -> Compared:
        """The result of the comparison that ends with this step."""
        result = judged(losses, self._calls)
        if self._known is not None:
            before, then = self._known
            fall = (before - result.exact_loss) / (self._middle() - then)
            difference = result.loss - result.exact_loss
            cost = cost_of(difference, fall, self.options.steps)
            result = dataclasses.replace(result, cost=cost)
        self._known = result.exact_loss, self._middle()
        return result

    def end(self, result: Compared, withdrawn: str) -> None:
        """Keeps a result.

        Args:
          result: the result.
          withdrawn: the kind of codecs that becomes milder; the milder codecs are
            compared at once. '' for none.
        """
        self.results.append(dataclasses.replace(result, withdrawn=withdrawn))
        if withdrawn:
            self._since = self.options.every

    def _middle(self) -> float:
        """The number of the middle of the last steps."""
        return self._calls - (self.options.steps - 1) / 2


def cost_of(difference: float, fall: float, steps: int) -> float:
    """The part of the progress that codecs cost.

    Args:
      difference: of the mean losses with codecs and without.
      fall: of the loss in a step.
      steps: of a comparison.
    """
    if not math.isfinite(fall):
        return math.nan
    if fall <= 0:
        return math.copysign(math.inf, difference)
    return difference / (fall * (steps + 1) / 2)


def is_costly(result: Compared, most: float | None, saved: Callable[[], float]) -> bool:
    """Whether milder codecs make more progress in a second.

    Args:
      result: of a comparison.
      most: as in `Comparison`.
      saved: returns the part of the seconds of a step that the codecs save against the
        milder ones.
    """
    sure = result.sure_cost
    return sure > 0 and sure > (saved() if most is None else most)


def judged(losses: Sequence[tuple[float, float]], step: int) -> Compared:
    """The result of a comparison, from pairs of a loss with codecs and an exact one.

    >>> judged([(1.5, 1.0), (2.5, 2.0)], 7)
    Compared(step=7, loss=2.0, exact_loss=1.5, error=0.0, cost=nan, withdrawn='')
    """
    coarse, exact = (statistics.fmean(side) for side in zip(*losses, strict=True))
    apart = [a - b for a, b in losses]
    error = (
        statistics.stdev(apart) / math.sqrt(len(apart))
        if all(map(math.isfinite, apart))
        else math.nan
    )
    return Compared(step, coarse, exact, error)


def loss_among(results: Mapping[str, Any]) -> Any:
    """The loss among results by path; None if no result is surely the loss.

    It is the only floating-point scalar, or else the only one with the name "loss", or
    else the only one with "loss" in its name.
    """
    found = {
        name: x
        for name, x in results.items()
        if np.ndim(x) == 0
        and jax.numpy.issubdtype(jax.numpy.result_type(x), np.floating)
    }
    named = [name for name in found if "loss" in name.lower()]
    exactly = [name for name in named if _LOSS.search(name)]
    for names in (list(found), exactly, named):
        if len(names) == 1:
            return found[names[0]]
    return None
