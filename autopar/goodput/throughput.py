"""Seconds of a step: a plan's prediction, corrected by measurements.

A plan predicts three terms: seconds of work that grows with the rows, seconds that each
microbatch takes whatever its number of rows, and seconds of synchronisation (the update
and the exposed exchange of gradients). The model of a step's seconds is
(`Throughput`)::

    (sum over terms of exp(b_t) * predicted_t) * product over axes of (x_a / seen_a)^c_a

Here the constant b_t corrects term t. A fourth term is a constant number of seconds per
step. The index a runs over four quantities, called axes: devices, hosts, rows of a
microbatch, and microbatches. x_a is the value of quantity a for the step, seen_a is the
mean of that quantity over the measured steps, and c_a is an exponent to fit. The b_t of
the three predicted terms have a common summand, because the errors of a plan's terms
often have a common cause. The prior of all b_t and c_a is Student's distribution around
0, which allows large corrections if measurements require them. Gauss-Newton steps fit
these constants to the logarithms of measured seconds. Outliers get a lower weight,
except for the configuration in use. The posterior gives intervals for predictions. The
intervals are wider for configurations that differ more from the measured ones. If all
measurements have the same value of a quantity, its exponent is given by the prior
alone.

The median of a configuration's step times represents the configuration in the fit. The
spread of these times gives the standard error of the median. The fit never assumes a
smaller relative error than `_FLOOR`, because other load on a shared machine lasts for
many steps.

`PlanCurve` predicts the three terms of a plan at its own batch size and at others. For
other batch sizes with the same layouts, `PlanCurve` evaluates the step's estimate
(`autopar.cost.estimate`). If the plan has several pipeline stages, or no such estimate,
`PlanCurve` scales the seconds in proportion to the rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopar.cost.estimate import StepEstimate, estimate
from autopar.cost.pricer import Pricer
from autopar.errors import PlanError
from autopar.layouts.assignment import Assignment, unsplit
from autopar.planner.record import restore
from autopar.planner.search import plan_mesh
from autopar.plans import Plan
from autopar.plans.files import digest_of
from autopar.steps.analysis import Analysis

# Assumed constant seconds per step, for the Python call and the wait for its result.
_CALL_S = 3e-4
# Widths of the prior distributions, in the order of the constants: the common summand
# of the predicted terms, each term's own summand (work, fixed, synchronisation), the
# constant term, and the exponents of devices, hosts, rows of a microbatch and
# microbatches.
_WIDTHS = np.array([1.0, 0.4, 0.7, 0.6, 1.5, 0.15, 0.25, 0.08, 0.08])
_COUNT = len(_WIDTHS)
# The smallest assumed relative error of a median, and the degrees of freedom of the
# errors' Student distribution.
_FLOOR, _FREEDOM = 0.04, 4.0
_STEPS = 30
# The last `KEPT` steps of a configuration are kept. These steps count as at most
# `_INDEPENDENT` independent steps, because a slow machine is slow for many successive
# steps.
KEPT, _INDEPENDENT = 32, 8
# The number of latest configurations whose measurements are kept.
MOST = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The seconds of a step as a plan predicts them, split into three terms.

    Attributes:
      devices: number of devices.
      hosts: number of hosts.
      rows: rows of the batch.
      microbatches: number of microbatches into which the batch is split.
      work_s: seconds of work that grows with the rows, over all microbatches.
      fixed_s: seconds of work that do not depend on the rows, over all microbatches.
      sync_s: seconds of the optimizer's update and of communication that does not
        overlap with work.
    """

    devices: int
    hosts: int
    rows: int
    microbatches: int = 1
    work_s: float
    fixed_s: float = 0.0
    sync_s: float = 0.0

    def __post_init__(self) -> None:
        """Checks ranges."""
        counts = (self.devices, self.hosts, self.rows, self.microbatches)
        seconds = (self.work_s, self.fixed_s, self.sync_s)
        if min(counts) < 1 or not all(0 <= s < math.inf for s in seconds):
            raise PlanError(
                "Terms: expected counts of at least 1 and seconds of at least 0, got "
                f"{self}."
            )

    @property
    def predicted_s(self) -> float:
        """Seconds of the step by the plan's prediction."""
        return self.work_s + self.fixed_s + self.sync_s

    def axes(self) -> np.ndarray:
        """Logarithms of the four axes (module docstring), shape (4,)."""
        each = self.rows / self.microbatches
        return np.log([self.devices, self.hosts, each, self.microbatches])


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """Seconds of a step with their uncertainty.

    Attributes:
      seconds: the most likely seconds.
      spread: standard deviation of the logarithm of the seconds.
    """

    seconds: float
    spread: float

    def bounds(self, sigmas: float) -> tuple[float, float]:
        """The seconds ``sigmas`` standard deviations below and above ``seconds``."""
        wide = math.exp(min(sigmas * self.spread, 700.0))
        return self.seconds / wide, self.seconds * wide


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Measured steps of one configuration.

    Attributes:
      terms: the seconds that the plan predicts, as three terms.
      seconds: seconds of the latest steps.
    """

    terms: Terms
    seconds: tuple[float, ...]

    def median(self) -> tuple[float, float]:
        """The median of the seconds, and the standard deviation of its logarithm."""
        middle = statistics.median(self.seconds)
        far = [abs(s - middle) for s in self.seconds]
        count = min(len(self.seconds), _INDEPENDENT)
        # For a normal distribution, the standard deviation is 1.4826 times the median
        # absolute deviation, and the standard error of a median is 1.2533 times the
        # standard error of a mean.
        alone = 1.4826 * 1.2533 * statistics.median(far) / middle
        few = _FLOOR * _INDEPENDENT / count
        return middle, math.hypot(alone / math.sqrt(count), few)


@dataclasses.dataclass(frozen=True, slots=True)
class Throughput:
    """Predicts seconds of a step; `with_step` and `fit` return new objects.

    Attributes:
      seen: measured steps by configuration; the latest configuration is last.
      mean: posterior mean of the constants, (9,): the common summand, a summand for
        each of the three predicted terms, the correction of the constant term, and the
        exponents of the four axes.
      covariance: posterior covariance of the constants, (9, 9).
      middle: logarithms of the mean values of the four axes over measured steps, (4,).
    """

    seen: tuple[Measured, ...] = ()
    mean: tuple[float, ...] = (0.0,) * _COUNT
    covariance: tuple[tuple[float, ...], ...] = ()
    middle: tuple[float, ...] = ()

    def with_step(self, terms: Terms, seconds: float) -> Throughput:
        """Adds the measured seconds of a step; `fit` must follow to use them.

        Seconds that are not positive and finite are ignored.
        """
        if not 0 < seconds < math.inf:
            return self
        before = next((m for m in self.seen if m.terms == terms), Measured(terms, ()))
        now = Measured(terms, (*before.seconds, seconds)[-KEPT:])
        others = tuple(m for m in self.seen if m.terms != terms)
        return dataclasses.replace(self, seen=(*others, now)[-MOST:])

    def fit(self) -> Throughput:
        """Fits the constants by maximum posterior density, with their covariance."""
        if not self.seen:
            return Throughput()
        medians = [m.median() for m in self.seen]
        noise = np.array([spread for _, spread in medians])
        terms = [m.terms for m in self.seen]
        axes = np.array([t.axes() for t in terms])
        middle = noise**-2 @ axes / (noise**-2).sum()
        logs = np.log([seconds for seconds, _ in medians])
        table = _Table(_parts(terms), axes - middle, logs, noise)
        mean, covariance = _posterior(table)
        return Throughput(
            self.seen,
            tuple(mean.tolist()),
            tuple(tuple(row) for row in covariance.tolist()),
            tuple(middle.tolist()),
        )

    def step_s(self, terms: Terms) -> Interval:
        """Predicted seconds of a step, with their uncertainty."""
        logs, slopes = _predict([terms], np.array(self.mean), self._middle(terms))
        return Interval(math.exp(logs[0]), self._spreads(slopes)[0])

    def ratio(self, one: Terms, other: Terms) -> Interval:
        """Predicted seconds of one step divided by those of another step.

        An error that changes the seconds of both steps by the same factor does not
        widen the interval.
        """
        return self.ratios([one], other)[0]

    def ratios(self, ones: Sequence[Terms], other: Terms) -> list[Interval]:
        """The seconds of several steps, each divided by the seconds of another step.

        Args:
          ones: the steps of the numerators.
          other: the step of the denominator.
        """
        mean, middle = np.array(self.mean), self._middle(other)
        logs, slopes = _predict([*ones, other], mean, middle)
        far, slopes = logs[:-1] - logs[-1], slopes[:-1] - slopes[-1]
        each = zip(far.tolist(), self._spreads(slopes), strict=True)
        return [Interval(math.exp(log), spread) for log, spread in each]

    def sync_part(self, terms: Terms) -> float:
        """The fraction of a step's predicted seconds that synchronisation takes."""
        bare = dataclasses.replace(terms, sync_s=0.0)
        return max(0.0, 1.0 - self.ratio(bare, terms).seconds)

    def _middle(self, terms: Terms) -> np.ndarray:
        """The mean logarithms of the axes; before a measurement, those of this step."""
        return np.array(self.middle) if self.middle else terms.axes()

    def _spreads(self, slopes: np.ndarray) -> list[float]:
        """Standard deviations of n predicted logarithms, from derivatives (n, 9)."""
        covariance = np.diag(_WIDTHS**2)
        if self.covariance:
            covariance = np.array(self.covariance)
        squares = np.einsum("ni,ij,nj->n", slopes, covariance, slopes)
        return np.sqrt(np.maximum(squares, 0.0)).tolist()

    def to_data(self) -> list[dict[str, Any]]:
        """The measurements as data that JSON can hold."""
        return [
            {"terms": dataclasses.asdict(m.terms), "seconds": list(m.seconds)}
            for m in self.seen
        ]

    @classmethod
    def from_data(cls, data: Sequence[Mapping[str, Any]]) -> Throughput:
        """Reads the measurements in a result of `to_data`, and fits them.

        Raises:
          PlanError: the data are not a result of `to_data`.
        """
        try:
            seen = tuple(
                Measured(Terms(**x["terms"]), tuple(map(float, x["seconds"])))
                for x in data
            )
        except (TypeError, KeyError, ValueError) as error:
            raise PlanError(
                f"Throughput: expected what to_data() returned: {error!r}."
            ) from error
        return cls(seen).fit()


@dataclasses.dataclass(frozen=True, slots=True)
class _Table:
    """The data of a fit, for n configurations.

    Attributes:
      parts: seconds of the three predicted terms and of the constant term, (n, 4).
      far: logarithms of the axes, minus their means (`Throughput.middle`), (n, 4).
      logs: logarithms of measured seconds, (n,).
      noise: standard deviations of the logarithms in ``logs``, (n,).
    """

    parts: np.ndarray
    far: np.ndarray
    logs: np.ndarray
    noise: np.ndarray

    def predict(self, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logarithms of seconds, (n,), and their derivatives by constant, (n, 9)."""
        factors = np.exp([*(mean[0] + mean[1:4]), mean[4]])
        parts = self.parts * factors
        total = parts.sum(axis=1)
        shares = parts / total[:, None]
        shared = shares[:, :3].sum(axis=1, keepdims=True)
        slopes = np.hstack([shared, shares, self.far])
        return np.log(total) + self.far @ mean[5:], slopes

    def loss(self, mean: np.ndarray) -> float:
        """Twice the negative logarithm of the posterior density."""
        error = (self.logs - self.predict(mean)[0]) / self.noise
        far = _far(error)
        far[-1] = error[-1] ** 2
        return float(far.sum() + _far(mean / _WIDTHS).sum())


def _far(error: np.ndarray) -> np.ndarray:
    """Twice the negative logarithm of the density of Student's distribution."""
    return (_FREEDOM + 1) * np.log1p(error**2 / _FREEDOM)


def _weight(error: np.ndarray) -> np.ndarray:
    """The weight of an error in the fit; 1 if errors were normally distributed."""
    return (_FREEDOM + 1) / (_FREEDOM + error**2)


def _parts(terms: Sequence[Terms]) -> np.ndarray:
    """Seconds of the three predicted terms and of the constant term, (n, 4)."""
    return np.array([[t.work_s, t.fixed_s, t.sync_s, _CALL_S] for t in terms])


def _predict(
    terms: Sequence[Terms], mean: np.ndarray, middle: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of predicted seconds, (n,), and derivatives by constants, (n, 9)."""
    nothing = np.zeros(len(terms))
    far = np.array([t.axes() for t in terms]) - middle
    return _Table(_parts(terms), far, nothing, nothing).predict(mean)


def _posterior(table: _Table) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of the constants.

    Errors are assumed to follow Student's distribution. Therefore an outlier gets less
    weight the farther it lies from the prediction. The latest configuration is the
    configuration in use, and always has full weight. Different constants may explain
    the measurements, such as a constant term or work that the plan underestimates. The
    fit starts once from each such explanation and takes the result with the highest
    density.
    """
    starts = [np.zeros(_COUNT)]
    typical = np.log(np.maximum(np.median(table.parts, axis=0), 1e-12))
    for term, log in enumerate(typical, 1):
        start = np.zeros(_COUNT)
        start[term] = np.clip(np.median(table.logs) - log, -12.0, 12.0)
        starts.append(start)
    mean = min((_climb(start, table) for start in starts), key=table.loss)
    return mean, np.linalg.inv(_normal(mean, table)[0])


def _climb(mean: np.ndarray, table: _Table) -> np.ndarray:
    """The nearest local maximum of the posterior density, by damped Gauss-Newton."""
    loss, damping = table.loss(mean), 1e-3
    for _ in range(_STEPS):
        normal, pull = _normal(mean, table)
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), pull)
        tried = mean + np.clip(step, -2.0, 2.0)
        new = table.loss(tried)
        if new > loss:
            damping *= 10
            continue
        done = loss - new < 1e-6 * max(loss, 1.0)
        mean, loss, damping = tried, new, max(damping * 0.1, 1e-9)
        if done:
            break
    return mean


def _normal(mean: np.ndarray, table: _Table) -> tuple[np.ndarray, np.ndarray]:
    """The matrix and the right-hand side of a Gauss-Newton step's normal equations."""
    logs, slopes = table.predict(mean)
    error = (table.logs - logs) / table.noise
    weight = _weight(error)
    weight[-1] = 1.0
    each = weight / table.noise**2
    prior = _weight(mean / _WIDTHS) / _WIDTHS**2
    normal = slopes.T @ (each[:, None] * slopes) + np.diag(prior)
    return normal, slopes.T @ (each * error * table.noise) - prior * mean


# Rows of an almost empty batch divided by rows of the planned batch. At this ratio,
# only the seconds that do not depend on the rows remain.
_NOTHING = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCurve:
    """The terms of a plan as a function of the rows of its batch.

    Attributes:
      plan: the plan.
      rows: rows of the batch that the plan was made for.
      devices: number of devices.
      hosts: number of hosts.
      estimate: the estimate of a step in the plan's layouts; None if the plan has
        several stages or cannot be estimated.
      layouts: a digest of all decisions of the plan except batch size and codecs.
      analysis: the analysis of the planned step.
    """

    plan: Plan
    rows: int
    devices: int
    hosts: int
    estimate: StepEstimate | None
    layouts: str
    analysis: Analysis = dataclasses.field(repr=False, compare=False)
    # A cache of the results of `terms`, because each decision of a training loop needs
    # the same results again.
    _known: dict[tuple[int, int], Terms | None] = dataclasses.field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    @functools.cached_property
    def alone(self) -> StepEstimate | None:
        """The estimate of the whole step on one device; None if `estimate` is None."""
        if self.estimate is None:
            return None
        pricer = self.estimate.pricer
        whole = unsplit(self.estimate.assignment.analysis, pricer.sizes)
        return estimate(whole, pricer)

    def terms(
        self, rows: int | None = None, microbatches: int | None = None
    ) -> Terms | None:
        """The predicted seconds at a batch size; None if there is no prediction.

        Args:
          rows: rows of the batch; None: the rows that the plan was made for.
          microbatches: number of microbatches; None: as in the plan. Another number
            must be a multiple of the plan's.
        """
        rows = self.rows if rows is None else rows
        parts = self.plan.microbatches if microbatches is None else microbatches
        if (rows, parts) not in self._known:
            self._known[rows, parts] = self._terms(rows, parts)
        return self._known[rows, parts]

    def lost_part(self, rows: int) -> float:
        """The largest fraction of a step's seconds that other layouts could save.

        Other layouts may save work that several devices repeat, and waits for
        communication. The result is the time of a device's microbatches, minus the time
        of the whole step on a single device divided by the number of devices. The
        optimizer's update and the sums of gradients are not included.

        Args:
          rows: rows of the batch.
        """
        terms = self.terms(rows)
        if terms is None or self.alone is None or not terms.predicted_s > 0:
            return 0.0
        fixed_s = self.alone.microbatch_s(_NOTHING)
        grows_s = self.alone.microbatch_s(rows / self.rows) - fixed_s
        repeated_s = max(0.0, terms.work_s - grows_s / self.devices)
        gathers_s = max(0.0, terms.fixed_s - terms.microbatches * fixed_s)
        return (repeated_s + gathers_s) / terms.predicted_s

    def _terms(self, rows: int, microbatches: int) -> Terms | None:
        own = self.plan.microbatches
        times, rest = divmod(microbatches, own)
        if rest or (times > 1 and self.estimate is None):
            return None
        work, fixed, sync = self._seconds(rows / self.rows, times)
        return Terms(
            devices=self.devices,
            hosts=self.hosts,
            rows=rows,
            microbatches=own * times,
            work_s=max(0.0, work),
            fixed_s=max(0.0, fixed),
            sync_s=max(0.0, sync),
        )

    def _seconds(self, ratio: float, times: int) -> tuple[float, float, float]:
        """Seconds of work, seconds that do not depend on rows, and synchronisation.

        Args:
          ratio: rows of the batch divided by rows of the planned batch.
          times: number of parts into which each microbatch is split further.
        """
        predicted, found = self.plan.predicted, self.estimate
        if found is None:
            sync = predicted.step_s - predicted.compute_s
            return predicted.compute_s * ratio, 0.0, sync
        # The seconds that codecs add to the step or save, which the estimate lacks.
        coded = predicted.step_s - found.seconds()
        fixed = times * found.microbatch_s(_NOTHING)
        work = times * found.microbatch_s(ratio / times) - fixed
        if times > 1:
            fixed += times * found.accumulate_s
        return work, fixed, found.seconds(ratio, times) - work - fixed + coded


def layouts_of(plan: Plan) -> str:
    """A digest of all decisions of a plan except batch size and codecs.

    Args:
      plan: the plan.
    """
    homes = tuple((p, plan.home(p), plan.home_spec(p)) for p in sorted(plan.shapes))
    devices = tuple(stage.devices for stage in plan.stages)
    work = tuple((n.name, n.axes) for stage in plan.stages for n in stage.nodes)
    name = plan.cluster.text
    return digest_of((name, devices, plan.home_axes, plan.microbatches, homes, work))


def plan_curve(analysis: Analysis, plan: Plan, rows: int) -> PlanCurve:
    """Prepares the prediction of a plan's seconds at any batch size.

    Args:
      analysis: the analysis of the planned step.
      plan: the plan.
      rows: rows of the analysed step's batch.
    """
    cluster = plan.cluster.read()
    found: StepEstimate | None = None
    if len(plan.stages) == 1 and not cluster.groups:
        with contextlib.suppress(PlanError):
            found = estimate(*_price(analysis, plan))
    hosts = max(1, len(cluster.hosts))
    return PlanCurve(
        plan=plan,
        rows=rows,
        devices=cluster.num_devices,
        hosts=hosts,
        estimate=found,
        layouts=layouts_of(plan),
        analysis=analysis,
    )


def _price(analysis: Analysis, plan: Plan) -> tuple[Assignment, Pricer]:
    cluster = plan.cluster.read()
    mesh = plan_mesh(cluster, plan.axis_names, plan.axis_sizes)
    return restore(analysis, plan), Pricer(cluster, mesh)
