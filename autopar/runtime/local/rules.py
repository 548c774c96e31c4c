"""When replicas synchronise, beside how many steps, and where they go on."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from autopar.errors import PlanError
from autopar_errors import InputTypeError, check_type


def check_numbers(settings: object, **kinds: type) -> None:
    """Checks the types of fields: `numbers.Integral` or `numbers.Real` by name.

    Raises:
      InputTypeError: a field has another type.
    """
    for name, kind in kinds.items():
        where = f"{type(settings).__name__}: {name}="
        wanted = "a whole number" if kind is numbers.Integral else "a number"
        check_type(where, getattr(settings, name), kind, wanted)


@dataclasses.dataclass(frozen=True, slots=True)
class RelativeChange:
    """The rule of SelSync (arXiv 2307.07950): synchronise where gradients change.

    Let ``n(i)`` be the exponential moving average of a replica's squared gradient norm
    after step i. If ``|n(i) - n(i - 1)| / n(i - 1)`` is at least ``delta`` in any
    replica, all replicas synchronise after step i. Each step tells all replicas one
    byte of every process for this.

    Attributes:
      delta: the relative change; 0 synchronises after every step.
      norm: takes what the step returns besides the state, and returns the squared norm
        of the gradient. With ``return state, {"norm": n}`` it is
        ``lambda metrics: metrics["norm"]``.
      weight: weight of the new norm in the average. SelSync's is a hundredth of the
        number of workers, 0.16 for 16.
      most: most steps without an outer step; None: no limit.

    Raises:
      InputTypeError: a value has a wrong type.
      PlanError: a value is out of range.
    """

    delta: float
    norm: Callable[[Any], Any]
    weight: float = 0.16
    most: int | None = None

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_numbers(self, delta=numbers.Real, weight=numbers.Real)
        if not callable(self.norm):
            raise InputTypeError(
                f"RelativeChange: norm=: expected a function, got {self.norm!r}."
            )
        if self.most is not None:
            check_numbers(self, most=numbers.Integral)
        if not (math.isfinite(self.delta) and self.delta >= 0.0):
            raise PlanError(
                f"RelativeChange: delta must be at least 0, got {self.delta!r}."
            )
        if not 0.0 < self.weight <= 1.0:
            raise PlanError(
                f"RelativeChange: weight must be above 0 and at most 1, got "
                f"{self.weight!r}."
            )
        if self.most is not None and self.most < 1:
            raise PlanError(
                f"RelativeChange: most must be at least 1, got {self.most!r}."
            )

    def check_norm(self, results: tuple[Any, ...]) -> None:
        """Checks that ``norm`` returns a number, before a step consumes its state.

        A ``norm`` that does not run on traced results is left to `observe`.

        Args:
          results: what the step returns besides the state, traced.

        Raises:
          PlanError: ``norm`` returns no number.
        """
        try:
            norm = self.norm(*results)
        except Exception:  # the user's function may raise any exception
            return
        kinds = jax.Array | np.ndarray | numbers.Number
        if not isinstance(norm, kinds) or np.ndim(norm):
            raise _no_norm(norm)

    def observe(self, average: float, results: tuple[Any, ...]) -> tuple[float, bool]:
        """The new average of a replica, and whether the replica asks for an outer step.

        Args:
          average: the average before this step; NaN before the first.
          results: what the step returned besides the state.

        Raises:
          PlanError: ``norm`` returns no number.
        """
        norm = self.norm(*results)
        try:
            now = float(norm)
        except (TypeError, ValueError) as error:
            raise _no_norm(norm) from error
        if math.isnan(average):
            return now, True
        after = average + self.weight * (now - average)
        change = abs(after - average) / average if average else math.inf
        return after, not change < self.delta


def _no_norm(given: object) -> PlanError:
    shape = getattr(given, "shape", None)
    kind = (
        f"a {type(given).__name__}" if shape is None else f"an array of shape {shape}"
    )
    return PlanError(
        f"RelativeChange: norm returned {kind}; expected the squared norm of the "
        "gradient, a scalar out of what the step returns."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    """Outer steps that run beside training, as in Streaming DiLoCo (arXiv 2501.18512).

    Differences are taken after a step, and sent while replicas run the next ones. Then
    the result is merged. Let ``x`` be the parameters of a replica when the difference
    was taken, ``y`` those after ``steps`` more steps, and ``a`` the new anchor. The
    replica continues from::

        y + (a - x)                           # without mixing
        mixing * y + (1 - mixing) * a         # with mixing

    Attributes:
      steps: steps beside which an outer step runs.
      mixing: None: what a replica learnt meanwhile is kept whole (delayed averaging, as
        in DaSGD, arXiv 2006.00441). Streaming DiLoCo mixes by 0.5.

    Raises:
      InputTypeError: a value has a wrong type.
      PlanError: a value is out of range.
    """

    steps: int
    mixing: float | None = None

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_numbers(self, steps=numbers.Integral)
        if self.mixing is not None:
            check_numbers(self, mixing=numbers.Real)
        if self.steps < 1:
            raise PlanError(f"Overlap: steps must be at least 1, got {self.steps!r}.")
        if self.mixing is not None and not 0.0 <= self.mixing < 1.0:
            raise PlanError(
                f"Overlap: mixing must be at least 0 and below 1, got {self.mixing!r}."
            )


@dataclasses.dataclass(frozen=True, slots=True)
class StepAhead:
    """Step-ahead error feedback (SAEF, arXiv 2008.05823; in part: arXiv 2601.20738).

    Let ``a`` be the new anchor and ``e`` the residual of a replica: what its codec has
    not sent yet. Instead of the anchor, the replica continues from ``a - part * e``,
    so that it takes its gradients where all that it learnt is applied. Its next
    difference then contains ``part * e``, and ``(1 - part) * e`` stays in the residual.
    With ``every=1``, ``MEAN`` and ``part=1``, this is SAEF. Replicas that differ after
    an outer step have the parameters ``train_step.agreed(state)`` in common.

    Attributes:
      part: the part of the residual that is applied ahead, above 0 and at most 1.
      average: after this many outer steps, a dense sum averages the residuals over the
        replicas; 0: never. SAEF's is 20.

    Raises:
      InputTypeError: a value has a wrong type.
      PlanError: a value is out of range.
    """

    part: float = 1.0
    average: int = 20

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_numbers(self, part=numbers.Real, average=numbers.Integral)
        if not 0.0 < self.part <= 1.0:
            raise PlanError(
                f"StepAhead: part must be above 0 and at most 1, got {self.part!r}."
            )
        if self.average < 0:
            raise PlanError(
                f"StepAhead: average must be 0 (never) or a number of outer steps, "
                f"got {self.average!r}."
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Auto:
    """Chooses the number of steps between two outer steps by their seconds.

    It is the least number with which outer steps lengthen a step by at most ``share``
    of its seconds. The number is first chosen by predicted seconds (those of
    `LocalSteps.step_s`, from the rates of the cluster). Once all fragments have had two
    outer steps, it is chosen again by measured seconds. Progress is no part of the
    rule. As a rule, fewer steps between outer steps help it, so the number is not
    larger than the links need.

    Attributes:
      share: by which part of its seconds outer steps may lengthen a step.
      most: the largest number of steps. DiLoCo's is 500 (arXiv 2311.08105).
      measured: whether the number is chosen again by measured seconds. The losses of
        two runs may then differ, because measured seconds differ.

    Raises:
      InputTypeError: a value has a wrong type.
      PlanError: a value is out of range.
    """

    share: float = 0.1
    most: int = 500
    measured: bool = True

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_numbers(self, share=numbers.Real, most=numbers.Integral)
        check_type("Auto: measured=", self.measured, bool, "True or False")
        if not (math.isfinite(self.share) and self.share > 0.0):
            raise PlanError(f"Auto: share must be positive, got {self.share!r}.")
        if self.most < 1:
            raise PlanError(f"Auto: most must be at least 1, got {self.most!r}.")

    def interval(
        self, least: int, own_s: float, waited_s: float, outer_s: float
    ) -> int:
        """The number of steps.

        Args:
          least: the least number that is possible.
          own_s: seconds of a step without outer steps.
          waited_s: seconds for which replicas wait in the outer steps of all fragments.
          outer_s: seconds for which these use the links.

        Raises:
          PlanError: ``least`` is above ``most``.
        """
        if least > self.most:
            raise PlanError(
                f"Auto: fragments and overlap need at least {least} steps between "
                f"outer steps, but most={self.most}."
            )
        # A step takes max(own_s + waited_s / n, outer_s / n) seconds.
        needed = max(
            waited_s / (self.share * own_s), outer_s / ((1 + self.share) * own_s)
        )
        return math.ceil(min(max(least, needed), self.most))
