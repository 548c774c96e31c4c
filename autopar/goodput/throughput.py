"""Seconds of a step: what a plan predicts, corrected by what was measured.

A plan predicts seconds of work that grows with the rows, of work that each microbatch
pays whatever its rows, and of synchronisation. A step is taken to last::

    (sum over terms of exp(b_t) * predicted_t) * product over axes of (x_a / seen_a)^c_a

with a constant of each step as a fourth term, and with the axes devices, hosts, rows of
a microbatch and microbatches. The b of the predicted terms share a part, as a plan that
is wrong is often wrong everywhere. The constants lie around 0 before anything is
measured, by Student's distribution: far from 0 where measurements clearly say so. They
are fitted to the logarithms of measured seconds by the steps of Gauss and Newton, with
weights that outliers lose; the configuration that runs now loses none. The posterior
gives intervals: they widen with the distance from what was seen, and on an axis along
which nothing was seen the prior alone decides.

A configuration counts by the median of its steps. How far steps scatter says how exact
the median is, down to a floor: what else runs on a shared machine stays for many steps.

The terms of a plan's predicted step, at its batch and at others.

Where the layouts stay, `autopar.cost.estimate` says what another batch takes. A plan of
several stages, or one that cannot be scaled, is scaled by its rows.
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

# A constant of each step, in seconds: calls, and waiting for the result.
_CALL_S = 3e-4
# Widths of the priors: of what all terms share, of what each has besides, of the
# constant, and of the exponents of devices, hosts, rows of a microbatch, microbatches.
_WIDTHS = np.array([1.0, 0.4, 0.7, 0.6, 1.5, 0.15, 0.25, 0.08, 0.08])
_COUNT = len(_WIDTHS)
# Relative error of a median at least, and degrees of freedom of errors.
_FLOOR, _FREEDOM = 0.04, 4.0
_STEPS = 30
# Steps of one configuration that are kept, and how many independent ones they count
# for at most: a machine is slow for many steps at a time.
KEPT, _INDEPENDENT = 32, 8
# Most configurations that are kept.
MOST = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a plan predicts of a step.

    Attributes:
      devices: number of them.
      hosts: number of them.
      rows: rows of the batch.
      microbatches: into how many it is split.
      work_s: seconds of work that grows with the rows, of all microbatches.
      fixed_s: seconds that microbatches take whatever their rows, of all of them.
      sync_s: seconds of the update and of the communication that nothing hides.
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
        """Seconds of the step as the plan predicts them."""
        return self.work_s + self.fixed_s + self.sync_s

    def axes(self) -> np.ndarray:
        """Logarithms of devices, hosts, rows of a microbatch and microbatches, (4,)."""
        each = self.rows / self.microbatches
        return np.log([self.devices, self.hosts, each, self.microbatches])


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """Seconds of a step, and how sure they are.

    Attributes:
      seconds: the most likely.
      spread: standard deviation of their logarithm.
    """

    seconds: float
    spread: float

    def bounds(self, sigmas: float) -> tuple[float, float]:
        """Seconds so many standard deviations below and above."""
        wide = math.exp(min(sigmas * self.spread, 700.0))
        return self.seconds / wide, self.seconds * wide


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Steps of one configuration.

    Attributes:
      terms: what its plan predicts.
      seconds: of the latest steps.
    """

    terms: Terms
    seconds: tuple[float, ...]

    def median(self) -> tuple[float, float]:
        """The median, and the standard deviation of its logarithm."""
        middle = statistics.median(self.seconds)
        far = [abs(s - middle) for s in self.seconds]
        count = min(len(self.seconds), _INDEPENDENT)
        # Of a normal distribution: 1.4826 times the median distance is its deviation,
        # and a median errs 1.2533 times as much as a mean.
        alone = 1.4826 * 1.2533 * statistics.median(far) / middle
        few = _FLOOR * _INDEPENDENT / count
        return middle, math.hypot(alone / math.sqrt(count), few)


@dataclasses.dataclass(frozen=True, slots=True)
class Throughput:
    """Predicts the seconds of steps; `with_step` and `fitted` return others of it.

    Attributes:
      seen: what was measured, the latest configuration last.
      mean: of the constants, (9,): what terms share, each of the three, the constant of
        a step, four axes.
      covariance: of them, (9, 9).
      middle: what the axes are measured from, (4,).
    """

    seen: tuple[Measured, ...] = ()
    mean: tuple[float, ...] = (0.0,) * _COUNT
    covariance: tuple[tuple[float, ...], ...] = ()
    middle: tuple[float, ...] = ()

    def with_step(self, terms: Terms, seconds: float) -> Throughput:
        """Takes the seconds of a step; constants stay until `fitted`.

        A step whose seconds are no positive number is left out.
        """
        if not 0 < seconds < math.inf:
            return self
        before = next((m for m in self.seen if m.terms == terms), Measured(terms, ()))
        now = Measured(terms, (*before.seconds, seconds)[-KEPT:])
        others = tuple(m for m in self.seen if m.terms != terms)
        return dataclasses.replace(self, seen=(*others, now)[-MOST:])

    def fit(self) -> Throughput:
        """The constants of highest posterior probability, and how sure they are."""
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
        """Seconds of a step under a plan."""
        logs, slopes = _predict([terms], np.array(self.mean), self._middle(terms))
        return Interval(math.exp(logs[0]), self._spreads(slopes)[0])

    def ratio(self, one: Terms, other: Terms) -> Interval:
        """Seconds of one step over those of another.

        What is uncertain of both alike does not count.
        """
        return self.ratios([one], other)[0]

    def ratios(self, ones: Sequence[Terms], other: Terms) -> list[Interval]:
        """The same for many steps, in the time of a few.

        Args:
          ones: the steps.
          other: by whose seconds they are divided.
        """
        mean, middle = np.array(self.mean), self._middle(other)
        logs, slopes = _predict([*ones, other], mean, middle)
        far, slopes = logs[:-1] - logs[-1], slopes[:-1] - slopes[-1]
        each = zip(far.tolist(), self._spreads(slopes), strict=True)
        return [Interval(math.exp(log), spread) for log, spread in each]

    def sync_part(self, terms: Terms) -> float:
        """The part of a step's seconds that its synchronisation takes."""
        bare = dataclasses.replace(terms, sync_s=0.0)
        return max(0.0, 1.0 - self.ratio(bare, terms).seconds)

    def _middle(self, terms: Terms) -> np.ndarray:
        """What axes are measured from: before any step, from where is asked."""
        return np.array(self.middle) if self.middle else terms.axes()

    def _spreads(self, slopes: np.ndarray) -> list[float]:
        """Standard deviations of logarithms, from their slopes, (n, 9)."""
        covariance = np.diag(_WIDTHS**2)
        if self.covariance:
            covariance = np.array(self.covariance)
        squares = np.einsum("ni,ij,nj->n", slopes, covariance, slopes)
        return np.sqrt(np.maximum(squares, 0.0)).tolist()

    def to_data(self) -> list[dict[str, Any]]:
        """What was measured, as JSON can hold it."""
        return [
            {"terms": dataclasses.asdict(m.terms), "seconds": list(m.seconds)}
            for m in self.seen
        ]

    @classmethod
    def from_data(cls, data: Sequence[Mapping[str, Any]]) -> Throughput:
        """What `to_data` returned, fitted again.

        Raises:
          PlanError: it is something else.
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
    """What is fitted, of n configurations.

    Attributes:
      parts: seconds of three terms and of the constant, (n, 4).
      far: logarithms of the axes less those they are measured from, (n, 4).
      logs: logarithms of measured seconds, (n,).
      noise: their standard deviations, (n,).
    """

    parts: np.ndarray
    far: np.ndarray
    logs: np.ndarray
    noise: np.ndarray

    def predict(self, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logarithms of seconds (n,), and their slopes by each constant, (n, 9)."""
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
    """Twice the negative logarithm of Student's density."""
    return (_FREEDOM + 1) * np.log1p(error**2 / _FREEDOM)


def _weight(error: np.ndarray) -> np.ndarray:
    """What an error counts for, beside one of a normal distribution."""
    return (_FREEDOM + 1) / (_FREEDOM + error**2)


def _parts(terms: Sequence[Terms]) -> np.ndarray:
    """Seconds of three terms and of the constant, (n, 4)."""
    return np.array([[t.work_s, t.fixed_s, t.sync_s, _CALL_S] for t in terms])


def _predict(
    terms: Sequence[Terms], mean: np.ndarray, middle: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of steps' seconds, (n,), and their slopes by each constant, (n, 9)."""
    nothing = np.zeros(len(terms))
    far = np.array([t.axes() for t in terms]) - middle
    return _Table(_parts(terms), far, nothing, nothing).predict(mean)


def _posterior(table: _Table) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of the constants.

    Errors are taken for those of Student's distribution: one that is far out counts
    less, and by the more the farther it is. The latest configuration, which runs now,
    counts in any case. There may be several explanations, such as a constant or work
    that was underestimated: each is a start, and the most likely end is taken.
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
    """The nearest constants of highest density: Gauss and Newton's steps, damped."""
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
    """The matrix and the right side of a step's normal equations."""
    logs, slopes = table.predict(mean)
    error = (table.logs - logs) / table.noise
    weight = _weight(error)
    weight[-1] = 1.0
    each = weight / table.noise**2
    prior = _weight(mean / _WIDTHS) / _WIDTHS**2
    normal = slopes.T @ (each[:, None] * slopes) + np.diag(prior)
    return normal, slopes.T @ (each * error * table.noise) - prior * mean


# A batch, over the planned one, that is next to nothing.
_NOTHING = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCurve:
    """The terms of a plan by the rows of its batch.

    Attributes:
      plan: the plan.
      rows: rows that it was made for.
      devices: number of devices.
      hosts: number of hosts.
      estimate: what a step does in its layouts; None: its stages have several.
      layouts: digits that tell what the plan decides besides the batch and the codecs.
      analysis: of the step that the plan is for.
    """

    plan: Plan
    rows: int
    devices: int
    hosts: int
    estimate: StepEstimate | None
    layouts: str
    analysis: Analysis = dataclasses.field(repr=False, compare=False)
    # What was asked for before: each decision of a loop asks for all of it again.
    _known: dict[tuple[int, int], Terms | None] = dataclasses.field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    @functools.cached_property
    def alone(self) -> StepEstimate | None:
        """What one device does that does everything; None likewise."""
        if self.estimate is None:
            return None
        pricer = self.estimate.pricer
        whole = unsplit(self.estimate.assignment.analysis, pricer.sizes)
        return estimate(whole, pricer)

    def terms(
        self, rows: int | None = None, microbatches: int | None = None
    ) -> Terms | None:
        """What the plan predicts of a step; None: it says nothing of such a step.

        Args:
          rows: of the batch; None: those that it was made for.
          microbatches: into how many they are split; None: as in the plan. Others are
            known where they are a multiple of the plan's.
        """
        rows = self.rows if rows is None else rows
        parts = self.plan.microbatches if microbatches is None else microbatches
        if (rows, parts) not in self._known:
            self._known[rows, parts] = self._terms(rows, parts)
        return self._known[rows, parts]

    def lost_part(self, rows: int) -> float:
        """The part of a step's seconds that other layouts may save.

        It is what devices take, besides the update and the sums behind it, for more
        than an equal share of what one device would do: for work that several do, and
        for waiting.

        Args:
          rows: of the batch.
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
        """Seconds of work, of what is fixed and of synchronisation.

        Args:
          ratio: of the batch to the planned one.
          times: into how many parts each microbatch is split once more.
        """
        predicted, found = self.plan.predicted, self.estimate
        if found is None:
            sync = predicted.step_s - predicted.compute_s
            return predicted.compute_s * ratio, 0.0, sync
        # What codecs, which the estimate does not hold, change of a synchronisation.
        coded = predicted.step_s - found.seconds()
        fixed = times * found.microbatch_s(_NOTHING)
        work = times * found.microbatch_s(ratio / times) - fixed
        if times > 1:
            fixed += times * found.accumulate_s
        return work, fixed, found.seconds(ratio, times) - work - fixed + coded


def layouts_of(plan: Plan) -> str:
    """Digits that tell what a plan decides besides the batch and the codecs.

    Args:
      plan: the plan.
    """
    homes = tuple((p, plan.home(p), plan.home_spec(p)) for p in sorted(plan.shapes))
    devices = tuple(stage.devices for stage in plan.stages)
    work = tuple((n.name, n.axes) for stage in plan.stages for n in stage.nodes)
    name = plan.cluster.text
    return digest_of((name, devices, plan.home_axes, plan.microbatches, homes, work))


def plan_curve(analysis: Analysis, plan: Plan, rows: int) -> PlanCurve:
    """The terms of a plan.

    Args:
      analysis: of the step that it is for.
      plan: the plan.
      rows: of that step's batch.
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
