"""Compares training with codecs with exact training, from time to time.

A *comparison* takes some steps twice, on equal batches and from equal states: with the
codecs of the plan, and beside it with all values exact, in the same layouts. The exact
steps have a state of their own, which is dropped afterwards. With ``c`` and ``e`` the
losses that the steps of both return, and n steps::

    difference = mean(c - e)
    error      = standard deviation(c - e) / sqrt(n)

The batches are equal, so `error` is much smaller than the spread of losses. Codecs cost
progress if ``difference - 2 error > most * |mean(e)|``, or if a loss with codecs is not
finite and all exact ones are. The codecs of one kind are then made milder: first int8,
then exact values. Kinds without error feedback come first: cuts, gathers, gradients.
"""

from __future__ import annotations

import dataclasses
import math
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
from autopar.runtime.codec_run import copy_array
from autopar.runtime.gradients.recoding import Recoding
from autopar.runtime.planned import PlannedStep
from autopar_errors import check_type

CUTS, GATHERS, GRADIENTS = KINDS = ("cuts", "gathers", "gradients")
# Kind -> the options of planning that ask for its codecs.
OPTIONS = {CUTS: "cut_codecs", GATHERS: "gather_codecs", GRADIENTS: "compression"}
MILD = "int8"
STANDARD_ERRORS = 2.0
# The shape of a gradient for which stated errors of codecs are compared.
_SHAPE = (1024, 1024)


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """When training with codecs is compared with exact training.

    During a comparison, devices hold the state twice.

    Attributes:
      every: steps from the end of a comparison to the begin of the next.
      steps: steps of a comparison, which are also taken exactly.
      most: the largest rise of the loss, as a part of the exact loss, with which codecs
        stay in use.

    Raises:
      PlanError: a number is out of range.
    """

    every: int = 2000
    steps: int = 32
    most: float = 0.01

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for name in ("every", "steps"):
            check_type(f"Comparison: {name}=", getattr(self, name), int, "a number")
        if self.every < 0 or self.steps < 2 or not 0 <= self.most < math.inf:
            raise PlanError(
                f"{self!r}: expected every= of at least 0, steps= of at least 2, and "
                "most= of at least 0."
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """The result of a comparison.

    Attributes:
      step: number of calls of the step before its end.
      loss: mean of the losses with codecs.
      exact_loss: mean of the losses of exact steps.
      error: standard error of the difference of the means.
      withdrawn: the kind of codecs that was made milder: ``cuts``, ``gathers`` or
        ``gradients``; '' if all codecs stayed.
    """

    step: int
    loss: float
    exact_loss: float
    error: float
    withdrawn: str = ""


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

    def __init__(
        self, planned: PlannedStep, exact: PlannedStep, placed: Sequence[Any]
    ) -> None:
        """Copies the state.

        Args:
          planned: the step with codecs.
          exact: the same step with exact values.
          placed: the arguments of the next step of training.

        Raises:
          PlanError: the steps lay out their arguments differently.
        """
        if planned.in_shardings != exact.in_shardings:
            raise PlanError(
                "comparison=: the exact step has other layouts of its arguments than "
                "the step with codecs. Leave comparison= out for this plan."
            )
        self.planned, self._exact = planned, exact
        self._results = planned.analysis.carried_arguments
        self._state = {k: copy_array(placed[k]) for k in self._results}
        sums = exact.sums
        self._codecs = () if sums is None else (sums.init(),)
        self.losses: list[tuple[float, float]] = []
        self._last = math.nan

    def run(self, placed: Sequence[Any], loss_of: Callable[[Any], float]) -> None:
        """Takes the exact step on the batch of the next step of training."""
        exact = self._exact
        arguments = [self._state.get(k, x) for k, x in enumerate(placed)]
        noise = () if exact.noise is None else (exact.noise.init(),)
        flat = exact.function(*arguments, *self._codecs, *noise)
        if exact.sums is not None:
            flat, state, *_ = flat
            self._codecs = (state,)
        elif noise:
            flat = flat[:-1]
        self._state = {k: flat[result] for k, result in self._results.items()}
        self._last = loss_of(flat)

    def take(self, loss: float) -> None:
        """Takes the loss of the step with codecs."""
        self.losses.append((loss, self._last))


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

    def begin_step(
        self,
        planned: PlannedStep,
        placed: Sequence[Any],
        exact: Callable[[Plan], PlannedStep],
        loss_of: Callable[[Any], float],
    ) -> None:
        """Takes the exact step beside the next step, if there is a comparison.

        Args:
          planned: the step of training.
          placed: its arguments.
          exact: returns the compiled program of an edited plan.
          loss_of: returns the loss among the flat results of a step.
        """
        self._calls += 1
        if self._beside is not None and self._beside.planned is not planned:
            self._beside = None  # the codecs or the devices have changed
        if self._beside is None:
            self._since += 1
            if self._since <= self.options.every or not kinds_of(planned.plan):
                return
            self._beside = _Beside(planned, exact(exact_plan(planned.plan)), placed)
        self._beside.run(placed, loss_of)

    def end_step(self, flat: Sequence[Any], loss_of: Callable[[Any], float]) -> str:
        """Takes the results of the step; returns the kind of codecs to make milder.

        Returns:
          The kind; '' for none.
        """
        beside = self._beside
        if beside is None:
            return ""
        beside.take(loss_of(flat))
        if len(beside.losses) < self.options.steps:
            return ""
        self._beside, self._since = None, 0
        result = judged(beside.losses, self._calls)
        if self._is_costly(result):
            result = dataclasses.replace(
                result, withdrawn=kinds_of(beside.planned.plan)[0]
            )
            self._since = self.options.every  # the milder codecs are compared at once
        self.results.append(result)
        return result.withdrawn

    def _is_costly(self, result: Compared) -> bool:
        """Whether codecs cost progress; see the module."""
        if not math.isfinite(result.exact_loss):
            return False
        if not math.isfinite(result.loss):
            return True
        sure = result.loss - result.exact_loss - STANDARD_ERRORS * result.error
        return sure > self.options.most * abs(result.exact_loss)


def judged(losses: Sequence[tuple[float, float]], step: int) -> Compared:
    """The result of a comparison, from pairs of a loss with codecs and an exact one.

    >>> judged([(1.5, 1.0), (2.5, 2.0)], 7)
    Compared(step=7, loss=2.0, exact_loss=1.5, error=0.0, withdrawn='')
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
    """The loss among results by name; None if no result is surely the loss.

    It is the only floating-point scalar, or else the only one with "loss" in its name.
    """
    found = {
        name: x
        for name, x in results.items()
        if np.ndim(x) == 0 and jax.numpy.issubdtype(jax.typeof(x).dtype, np.floating)
    }
    named = [name for name in found if "loss" in name.lower()]
    chosen = list(found) if len(found) == 1 else named
    return found[chosen[0]] if len(chosen) == 1 else None
