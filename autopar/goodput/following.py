"""What is said of a loop whose batch follows, and what its state must be like.

Accordion's rule for the batch: small in critical regimes of training, else large.

Agarwal et al., "Accordion: Adaptive gradient communication via critical learning regime
identification", MLSys 2021 (arXiv 2010.16248), section 4. With ``norm`` that of the
gradient over a window of steps, a regime is critical where

    |previous - norm| / previous >= eta

and the first window is critical. The squared norm of the mean gradient is estimated
without the noise of its batch, so that it means the same at every batch.

The progress of biased codecs with error feedback, measured by losses.

A codec that is biased has no formula: what it leaves out is sent later, and how much
that costs depends on the loss. So it is measured. Two trainings see the same rows in
the same order, one with the codec and one without. Where both reach the same loss, the
quotient of their rows is the progress ratio.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from autopar.errors import PlanError
from autopar.goodput.choice import Ratio
from autopar.goodput.rates import Rule, rule_of
from autopar.planner.options import parsed_codec
from autopar_errors import check_type


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CriticalRegimes:
    """Accordion's rule; `with_step` returns it after a step.

    Attributes:
      eta: relative change of the norm from which on a regime is critical.
      window: samples of the base batch, in batches of it, whose norms are put together.
      only_grows: whether the batch stays large once it is, as in the paper.
      critical: whether the regime is.
      previous: norm of the last window; None: there was none.
      squares: sum of the squared norms of this window.
      steps: number of them.
      worth: base batches that its rows are.
    """

    eta: float = 0.5
    window: float = 100.0
    only_grows: bool = False
    critical: bool = True
    previous: float | None = None
    squares: float = 0.0
    steps: int = 0
    worth: float = 0.0

    def __post_init__(self) -> None:
        """Checks ranges."""
        if not (self.eta > 0 and self.window > 0):
            raise PlanError(
                "CriticalRegimes: expected eta and window above 0, got "
                f"eta={self.eta}, window={self.window}."
            )

    def with_step(self, sqr: float, worth: float) -> CriticalRegimes:
        """Takes a step.

        Args:
          sqr: its estimate of the squared norm of the mean gradient; one that is not
            finite is left out.
          worth: rows of the batch over those of the base batch.
        """
        if not math.isfinite(sqr):
            return self
        squares, steps = self.squares + sqr, self.steps + 1
        if self.worth + worth < self.window:
            return dataclasses.replace(
                self, squares=squares, steps=steps, worth=self.worth + worth
            )
        norm = math.sqrt(max(0.0, squares / steps))
        before = self.previous
        changed = not before or abs(before - norm) / before >= self.eta
        stays = self.only_grows and not self.critical
        return dataclasses.replace(
            self,
            critical=changed and not stays,
            previous=norm,
            squares=0.0,
            steps=0,
            worth=0.0,
        )

    def to_data(self) -> dict[str, Any]:
        """The rule as JSON can hold it."""
        return dataclasses.asdict(self)

    def gone_on(self, data: Mapping[str, Any]) -> CriticalRegimes:
        """The rule with what an earlier run has seen."""
        seen = ("critical", "previous", "squares", "steps", "worth")
        return dataclasses.replace(self, **{k: data[k] for k in seen if k in data})


# Loss levels at which two trainings are compared.
_LEVELS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class ProgressRatio:
    """Progress of a row with a codec, as a part of that without.

    Attributes:
      value: the mean over pairs of trainings.
      stderr: its standard error; infinite for one pair, which says nothing of it.
      pairs: number of pairs.
    """

    value: float
    stderr: float
    pairs: int

    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean, by Student's t."""
        if self.pairs < 2:
            return (-math.inf, math.inf)
        half = _T95[min(self.pairs - 1, len(_T95)) - 1] * self.stderr
        return self.value - half, self.value + half


# Student's t at 97.5 % for 1, 2 ... degrees of freedom (NIST handbook, 1.3.6.7.2).
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def progress_ratio(
    dense: Sequence[Sequence[float]], coded: Sequence[Sequence[float]]
) -> ProgressRatio:
    """Compares pairs of trainings on the same rows.

    Args:
      dense: losses of the steps of each training without the codec.
      coded: of each training with it, with the same batches.

    Raises:
      PlanError: the numbers of trainings differ, a loss is not finite, or two trainings
        have no loss in common.
    """
    if len(dense) != len(coded) or not dense:
        raise PlanError(
            f"progress_ratio: {len(dense)} trainings without the codec and "
            f"{len(coded)} with it; expected as many of each, and at least one."
        )
    found = [_progress_ratio(a, b) for a, b in zip(dense, coded, strict=True)]
    spread = float(np.std(found, ddof=1)) if len(found) > 1 else math.inf
    return ProgressRatio(
        float(np.mean(found)), spread / math.sqrt(len(found)), len(found)
    )


def _progress_ratio(dense: Sequence[float], coded: Sequence[float]) -> float:
    """The mean over loss levels that both reach."""
    one, other = _lowest(dense), _lowest(coded)
    high, low = min(one[0], other[0]), max(one[-1], other[-1])
    if not low < high:
        raise PlanError(
            "progress_ratio: two trainings have no loss in common: one goes from "
            f"{one[0]:.4g} to {one[-1]:.4g}, the other from {other[0]:.4g} to "
            f"{other[-1]:.4g}. Train longer."
        )
    # Not the first levels, which one step may cross.
    levels = np.linspace(high, low, _LEVELS + 1)[_LEVELS // 4 :]
    quotients = [steps_to(one, level) / steps_to(other, level) for level in levels]
    return float(np.mean(quotients))


def _lowest(losses: Sequence[float]) -> np.ndarray:
    found = np.asarray(losses, float)
    if found.ndim != 1 or not found.size or not np.isfinite(found).all():
        raise PlanError("progress_ratio: expected losses of steps, all of them finite.")
    return np.minimum.accumulate(found)


def steps_to(losses: Sequence[float] | np.ndarray, level: float) -> float:
    """Steps until losses that never rise reach a level, between steps linearly.

    Args:
      losses: of steps, none above the one before.
      level: at most the first loss; infinity is returned for one below the last.
    """
    values = np.asarray(losses, float)
    below = np.flatnonzero(values <= level)
    if not below.size:
        return math.inf
    k = int(below[0])
    if k == 0:
        return 1.0
    before, after = values[k - 1], values[k]
    return k + float((before - level) / (before - after))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """How a loop's batch follows.

    Attributes:
      base_batch: rows that the learning rate was chosen for, M0.
      max_batch: most rows.
      codecs: what gradients may be sent by, as ``compression=`` says it, with what was
        measured of a row's worth where they are biased (`progress_ratio`).
      rule: ``goodput``, or Accordion's rule (`CriticalRegimes`).
      every: steps between two decisions.
      sigmas: standard deviations within which a gain counts for none.
    """

    base_batch: int
    max_batch: int
    codecs: Mapping[str, Ratio | None] = dataclasses.field(
        default_factory=lambda: {"none": None}
    )
    rule: CriticalRegimes | None = None
    every: int = 10
    sigmas: float = 1.0

    def __post_init__(self) -> None:
        """Checks ranges and codecs.

        Raises:
          PlanError: a number is out of its range, or there is no such codec.
        """
        for name in ("base_batch", "max_batch", "every"):
            given = getattr(self, name)
            if not isinstance(given, int) or isinstance(given, bool) or given < 1:
                raise PlanError(f"{name}={given!r} must be a whole number, at least 1.")
        for text in self.codecs:
            check_type("codecs=", text, str, "texts of codecs, such as ['int8']")
            parsed_codec(text)
        if self.max_batch < self.base_batch:
            raise PlanError(
                f"max_batch={self.max_batch} is smaller than "
                f"base_batch={self.base_batch}. The batch grows from the base batch."
            )
        if not self.codecs or not self.sigmas >= 0:
            raise PlanError(
                "expected at least one codec, such as 'none', and sigmas of at least "
                f"0, got codecs={self.codecs!r}, sigmas={self.sigmas!r}."
            )


def codecs_of(
    given: Sequence[str] | Mapping[str, ProgressRatio | float | None], own: str
) -> dict[str, Ratio | None]:
    """The codecs that may be used, with what is known of biased ones.

    Args:
      given: texts as of ``compression=``; or with each the ratio of rows that
        `progress_ratio` has measured, or None.
      own: what the step was made with, which may be used in any case.
    """
    check_type("codecs=", given, Iterable, "texts of codecs, such as ['int8']")
    asked = dict(given) if isinstance(given, Mapping) else dict.fromkeys(given)
    return {own: None, **{k: _ratio(x) for k, x in asked.items()}}


def _ratio(given: ProgressRatio | float | None) -> Ratio | None:
    if given is None:
        return None
    if isinstance(given, ProgressRatio):
        low, high = given.interval()
        low = max(low, 0.0) if math.isfinite(low) else 0.0
        return Ratio(given.value, low, high)
    if not 0 < given < math.inf:
        raise PlanError(f"codecs: a ratio of rows must be positive, got {given!r}.")
    return Ratio(given, given, given)


def check_data(data: Any, following: Following) -> None:
    """Checks what a loop is to go on with.

    Raises:
      PlanError: it is of a loop with another base batch, or of none.
    """
    try:
        base, rows = int(data["base_batch"]), int(data["way"]["rows"])
    except (TypeError, KeyError, ValueError) as error:
        raise PlanError(
            f"expected what Loop.to_data() returned, got {data!r}."
        ) from error
    if base != following.base_batch or rows < 1:
        raise PlanError(
            f"base_batch={following.base_batch}, but the run that is gone on with had "
            f"{base}. Give the same, or begin a new run."
        )


def check_rule(state: Any, base_batch: int, rule: Rule | None = None) -> None:
    """Checks that a state's optimizer follows the batch as is said.

    Args:
      state: the train state.
      base_batch: rows of the base batch.
      rule: of the learning rate; None: any.

    Raises:
      PlanError: it does not.
    """
    found, base = rule_of(state)
    if base != base_batch:
        raise PlanError(
            f"base_batch={base_batch}, but the state's optimizer was wrapped by "
            f"scaled(..., base_batch={base}). Give both the same."
        )
    if rule is not None and found != rule:
        raise PlanError(
            f"lr_rule={rule!r}, but the state's optimizer was wrapped by "
            f"scaled(..., {found!r}). Give both the same."
        )
