"""Settings of a training loop with an adaptive batch size, and checks of its state.

`CriticalRegimes` is Accordion's rule for the batch size (Agarwal et al., "Accordion:
Adaptive gradient communication via critical learning regime identification", MLSys 2021
(arXiv 2010.16248), section 4). The rule uses the base batch in critical regimes of
training, and a large batch otherwise. Let ``norm`` be the norm of the gradient over a
window of steps, and ``previous`` the norm over the previous window. A regime is
critical where

    |previous - norm| / previous >= eta

The first window counts as critical, too. Autopar estimates the norm of the mean
gradient with the noise of the batch subtracted. Therefore norms from batches of
different sizes are comparable.

`progress_ratio` measures how fast training progresses with a biased codec with error
feedback. No formula gives this: the codec sends some elements of the gradient later,
and the cost of the delay depends on the loss function. Two trainings, one with the
codec and one without, see the same rows in the same order. The progress ratio is the
number of rows that the training without the codec needs to reach a loss, divided by the
number of rows that the training with the codec needs to reach the same loss.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.errors import PlanError
from autopar.goodput.choice import Ratio
from autopar.goodput.rates import Rule, rule_of
from autopar.planner.options import parsed_codec
from autopar.runtime.comparing import loss_among
from autopar_errors import check_type


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CriticalRegimes:
    """State of Accordion's rule; `with_step` returns the state after a step.

    Attributes:
      eta: a regime is critical if the norm has changed by at least this fraction since
        the previous window.
      window: length of a window, in base batches of rows.
      only_grows: whether the batch never returns to the base batch once it is large, as
        in the paper.
      critical: whether the present regime is critical.
      previous: norm over the previous window; None in the first window.
      squares: sum of the squared norms of this window's steps.
      steps: number of steps so far in this window.
      worth: rows so far in this window, divided by the rows of the base batch.
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
        """Adds a step.

        Args:
          sqr: the step's estimate of the squared norm of the mean gradient; if the
            estimate is not finite, the step is ignored.
          worth: rows of the batch divided by rows of the base batch.
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
        """The state as data that JSON can hold."""
        return dataclasses.asdict(self)

    def gone_on(self, data: Mapping[str, Any]) -> CriticalRegimes:
        """The same rule with the state that an earlier run has saved."""
        seen = ("critical", "previous", "squares", "steps", "worth")
        return dataclasses.replace(self, **{k: data[k] for k in seen if k in data})


# The number of loss levels at which two trainings are compared.
_LEVELS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class ProgressRatio:
    """Progress per row with a codec, divided by progress per row without a codec.

    Attributes:
      value: the mean over pairs of trainings.
      stderr: standard error of the mean; infinite if there is only one pair, because it
        is then unknown.
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
      coded: losses of the steps of each training with the codec, on the same batches.

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
    """Mean over loss levels: steps without the codec over steps with the codec."""
    one, other = _lowest(dense), _lowest(coded)
    high, low = min(one[0], other[0]), max(one[-1], other[-1])
    if not low < high:
        raise PlanError(
            "progress_ratio: two trainings have no loss in common: one goes from "
            f"{one[0]:.4g} to {one[-1]:.4g}, the other from {other[0]:.4g} to "
            f"{other[-1]:.4g}. Train longer."
        )
    # The highest loss levels are left out, because a single step may pass several
    # levels early in training.
    levels = np.linspace(high, low, _LEVELS + 1)[_LEVELS // 4 :]
    quotients = [steps_to(one, level) / steps_to(other, level) for level in levels]
    return float(np.mean(quotients))


def _lowest(losses: Sequence[float]) -> np.ndarray:
    found = np.asarray(losses, float)
    if found.ndim != 1 or not found.size or not np.isfinite(found).all():
        raise PlanError("progress_ratio: expected losses of steps, all of them finite.")
    return np.minimum.accumulate(found)


def steps_to(losses: Sequence[float] | np.ndarray, level: float) -> float:
    """The number of steps until a loss is reached, interpolated linearly.

    Args:
      losses: losses of successive steps, which must never rise.
      level: the loss to reach, at most the first loss. If it is below the last loss,
        the result is infinite.
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
    """Settings of a loop with an adaptive batch.

    Attributes:
      base_batch: rows of the batch for which the learning rate was chosen, M0.
      max_batch: rows of the largest batch.
      codecs: the codecs that the loop may use, as texts of the option ``compression=``.
        Biased codecs need their measured progress ratio (`progress_ratio`).
      rule: Accordion's rule (`CriticalRegimes`), which sets the batch size; None: the
        loop uses the batch size with the most goodput.
      every: number of steps between two decisions about batch size and codecs.
      sigmas: the loop changes batch or codecs only if the predicted gain exceeds this
        many standard deviations of the prediction.
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
          PlanError: a number is out of its range, or a codec does not exist.
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
    """Each codec that the loop may use, with its progress ratio if it is biased.

    Args:
      given: codecs as texts of the option ``compression=``; or a mapping from each text
        to the ratio that `progress_ratio` has measured, or None.
      own: the codecs that the step was made with; the loop may always use them.
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
    """Checks the saved data with which a loop is to continue.

    Raises:
      PlanError: the data come from a loop with another base batch, or not from a loop.
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
    """Checks that a state's optimizer scales updates with the batch as given.

    Args:
      state: the train state.
      base_batch: rows of the base batch.
      rule: the rule of the learning rate; None: any rule.

    Raises:
      PlanError: the optimizer has other settings, or does not scale with the batch.
    """
    found, base = rule_of(state)
    if base != base_batch:
        raise PlanError(
            f"base_batch={base_batch}, but the state's optimizer was wrapped by "
            f"scale_updates(..., base_batch={base}). Give both the same."
        )
    if rule is not None and found != rule:
        raise PlanError(
            f"lr_rule={rule!r}, but the state's optimizer was wrapped by "
            f"scale_updates(..., {found!r}). Give both the same."
        )


# Limits the gain that scales the learning rate, if large batches make the loss rise.
#
# The gain of a step is the number of steps with the base batch that make as much
# progress (`autopar.goodput.gain`). The learning rate is scaled by the gain. The
# formula of the gain uses the noise of gradients, but not the curvature of the loss. An
# update that is too large for the curvature makes the loss rise, and may make the
# training diverge. Therefore the guard watches the losses of steps while the gain is
# above 1. If the losses rise, the guard lowers an upper limit of the gain.


# The number of recent losses to keep, and the number of losses that are needed before a
# loss can count as an outlier.
_KEPT, _FEWEST = 16, 8
# A loss is an outlier if it lies `_FAR` standard deviations above the median of the
# recent losses. `_IN_A_ROW` successive outliers are an alarm, which lowers the limit of
# the gain. (One in a thousand normal numbers lies more than 3 standard deviations above
# the mean.)
_FAR, _IN_A_ROW = 6.0, 2
# For a normal distribution: standard deviation divided by median absolute deviation.
_SIGMA = 1.4826
# For this number of steps after an alarm, no loss counts as an outlier.
_REST = 10
# The limit of the gain is doubled after `_CALM` steps without an alarm. Each further
# alarm multiplies this number of steps by `_LONGER`.
_CALM, _LONGER = 256, 4


@dataclasses.dataclass(frozen=True, slots=True)
class LossGuard:
    """Recent losses and the limit of the gain; `with_step` returns a new guard.

    Attributes:
      most: the largest allowed gain.
      alarms: number of alarms so far.
      losses: recent losses, without outliers.
      far: number of successive outliers among the losses, up to the last step.
      rest: for this number of next steps, no loss counts as an outlier.
      calm: steps since the last alarm, or since the limit of the gain was last doubled.
    """

    most: float = math.inf
    alarms: int = 0
    losses: tuple[float, ...] = ()
    far: int = 0
    rest: int = 0
    calm: int = 0

    @property
    def limit(self) -> float:
        """The loss above which a new loss is an outlier."""
        if len(self.losses) < _FEWEST:
            return math.inf
        usual = statistics.median(self.losses)
        spread = statistics.median(abs(x - usual) for x in self.losses)
        # Equal losses have a spread of 0. Because of the second operand of `max`,
        # rounding errors then do not count as outliers.
        return usual + max(_FAR * _SIGMA * spread, 1e-3 * abs(usual))

    def with_step(self, loss: float, gain: float) -> LossGuard:
        """Adds a step.

        Args:
          loss: the loss of the step; a loss that is not finite is an outlier.
          gain: the gain of the step; a gain of at most 1 never causes an alarm.
        """
        if self.rest:
            return dataclasses.replace(self, rest=self.rest - 1)
        if gain > 1 and not loss <= self.limit:
            far = self.far + 1
            if far < _IN_A_ROW:
                return dataclasses.replace(self, far=far)
            return dataclasses.replace(
                self,
                most=max(1.0, gain / 2),
                alarms=self.alarms + 1,
                far=0,
                rest=_REST,
                calm=0,
            )
        losses = (*self.losses, loss)[-_KEPT:] if math.isfinite(loss) else self.losses
        calm, most = self.calm + 1, self.most
        if math.isfinite(most) and calm >= _CALM * _LONGER ** (self.alarms - 1):
            calm, most = 0, 2 * most
        return dataclasses.replace(self, losses=losses, far=0, calm=calm, most=most)

    def to_data(self) -> dict[str, Any]:
        """The guard as data that JSON can hold."""
        most = self.most if math.isfinite(self.most) else None
        return {**dataclasses.asdict(self), "most": most, "losses": list(self.losses)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> LossGuard:
        """The guard from the result of `to_data`."""
        return cls(
            most=math.inf if data["most"] is None else float(data["most"]),
            alarms=int(data["alarms"]),
            losses=tuple(data["losses"]),
            far=int(data["far"]),
            rest=int(data["rest"]),
            calm=int(data["calm"]),
        )


def loss_in(result: Any, *, alone: bool = True) -> float | None:
    """The loss among a step's results; None if no result is surely the loss.

    The loss is the only floating-point scalar, or else the only floating-point scalar
    whose name contains "loss".

    Args:
      result: the results of a step, any tree.
      alone: whether this process is the only one. If not, the loss must be an array
        that is replicated on all devices of all processes, because all processes must
        see the same loss.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(result)
    array = loss_among({jax.tree_util.keystr(path): leaf for path, leaf in leaves})
    if array is None:
        return None
    if not alone:
        shared = isinstance(array, jax.Array) and not array.is_fully_addressable
        if not (shared and array.is_fully_replicated):
            return None
    return float(array)


def finite(result: Any) -> bool:
    """Whether all floating-point results of a step are finite."""
    found = [np.asarray(x) for x in jax.tree.leaves(result)]
    kinds = [x for x in found if np.issubdtype(x.dtype, np.floating)]
    return all(bool(np.isfinite(x).all()) for x in kinds)
