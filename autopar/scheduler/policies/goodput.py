"""autopar's own policy: maximises weighted goodput, minus the cost of moves.

Each job has a curve: its progress per second on every configuration, with the best
batch or plan there. The utility of a configuration is a concave function of its
speed-up over one device, so that no job gets nothing for long. The policy maximises the
sum of weighted utilities. A job's weight is smaller if it has more work left. An owner
may state the remaining work. Otherwise, the policy predicts it by Gittins' index, from
completed jobs of the same program. If no job of the program has completed yet, the
policy assumes that a job has as much work left as it has done. A
move (a change of a job's devices) costs time, so its gain counts only for the time that
remains after it. The integer program is solved until the proved relative gap to the
optimum is at most `Settings.gap`.

A guaranteed job is promised a least mean speed since its submission, the floor: its
speed on the devices that its owner asks for. The floor is not a constraint of the
optimisation. Instead, the part of the job's speed below the floor has an extra value,
the price. The price is lower if the job's mean speed is above its floor. The price is
higher if fewer jobs have guarantees.

*Remaining work.* Take completed jobs that needed more work than the job has done.
Suppose that each of them, at the point where it had done this much work, receives at
most x more units of work. For each x, divide the number of these jobs that then
complete by the total work that they receive. Gittins' index is the largest such ratio
over all x. If only the distribution of jobs' work is known, running jobs in descending
order of this index minimises the mean completion time (Gittins, 1979). The policy uses
the inverse of the index as the remaining work. So once a job has run longer than the
short jobs, it counts as having more work left than a new job.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.errors import ScheduleError
from autopar.scheduler.jobs import (
    Allocation,
    Curve,
    Decisions,
    JobView,
    Reason,
    Shape,
    Views,
    entitlements,
    placement_of,
)
from autopar.scheduler.nodes import Nodes, pack, sizes_of
from autopar.scheduler.policies.base import Adapts
from autopar_solver import Allocated, AllocationProblem, solve_allocation


def sureness(wholes: Sequence[float]) -> float:
    """How well completed jobs predict the work of another job, from 0 to 1.

    The result is ``1 / (1 + v)``, where ``v`` is the squared coefficient of variation
    of the jobs' work. The result equals the squared mean divided by the mean square.
    The result is 1 if all jobs have the same work.

    Args:
      wholes: the total work of each completed job. For fewer than two jobs the
        variation is unknown, and the result is 1.

    >>> sureness([10.0, 10.0, 10.0])
    1.0
    >>> sureness([0.0, 20.0])
    0.5
    """
    work = np.asarray(wholes, float)
    square = float(np.mean(work**2)) if len(work) > 1 else 0.0
    return float(np.mean(work)) ** 2 / square if square > 0 else 1.0


def gittins_left(wholes: Sequence[float], done: float) -> float:
    """Predicts a job's remaining work: the inverse of Gittins' index, in units of work.

    Args:
      wholes: the total work of each completed job, at least one.
      done: the work that the job has done. If no completed job needed more work, the
        result is ``done``.

    >>> gittins_left([10.0, 1000.0], 0.0)
    20.0
    >>> gittins_left([10.0, 1000.0], 10.0)
    990.0
    """
    longer = np.sort(np.asarray(wholes, float))
    longer = longer[longer > done] - done
    if not len(longer):
        return done
    ended = np.arange(1, len(longer) + 1)
    # The jobs are sorted by work. When each was given as much work as the k-th job
    # needs, k jobs are complete, and each of the others has done as much work as the
    # k-th job.
    worked = np.cumsum(longer) + longer * (len(longer) - ended)
    return float((worked / ended).min())


def mean_left(wholes: Sequence[float], done: float) -> float:
    """Predicts a job's remaining work by the mean over jobs that needed more work.

    Args:
      wholes: the total work of each completed job.
      done: the work that the job has done. If no completed job needed more work, the
        result is ``done``.

    >>> mean_left([10.0, 1000.0], 0.0)
    505.0
    """
    longer = [work - done for work in wholes if work > done]
    return sum(longer) / len(longer) if longer else done


_Curves = list[tuple[int, np.ndarray, np.ndarray]]

_NEW_S = 900.0
"""Remaining seconds on one device of a new job of an unknown program."""

_ENOUGH = 3
"""The number of completed jobs of a program from which `Goodput` predicts the duration
of another job. Two jobs are too few: on one of Rubick's workloads, the first two jobs
of a program lasted equally long, and no two later jobs did."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Constants of the policy, chosen with workloads 4, 5 and 8 of Pollux's artifact.

    Attributes:
      concavity: exponent below 1 by which a speed-up enters the utility.
      least: a configuration with a speed-up of at most this value has a utility of 0.
      shortness: a job's weight is its remaining work to the power of minus this value;
        with 0 the weight does not depend on the remaining work.
      known_s: seconds on one device that are added to each job's predicted remaining
        work before the weight is computed.
      stated_s: the same for a job whose owner states its remaining work.
      trust: weight of the remaining work that an owner states, where the best
        prediction has a weight of 1 (`sureness`).
      events_s: assumed seconds between events that make a job move. The gain of a move
        counts for a time: the geometric mean of these seconds and the seconds of the
        move (as in Young's formula for the interval between checkpoints).
      growth: a job gets at most this many times as many devices as it has ever run on.
      first: largest number of devices of a job without measurements.
      price: value of speed below the floor, as a multiple of its utility, in addition
        to the utility itself. The price is also multiplied by the number of jobs
        without a guarantee, divided by the number of jobs with one.
      had_s: a job's price is halved when the job has done as much work as in this many
        seconds at its guaranteed speed.
      size: the price is multiplied by (floor as a speed-up over one device) to this
        power. With 0, jobs that need many devices would always come last.
      ahead_s: seconds by which a job is ahead of its promise when its price is 0. The
        price falls linearly until then.
      least_sureness: a job may count as nearly done only if the `sureness` of its
        predicted remaining work is at least this value.
      learns: whether completed jobs predict the remaining work of other jobs of their
        program.
      gap: relative optimality gap at which the solver stops.
      reserved: number of devices of each kind that stay free.
    """

    concavity: float = 0.2
    least: float = 0.2
    shortness: float = 0.5
    known_s: float = 800.0
    stated_s: float = 10.0
    trust: float = 2.0
    events_s: float = 960.0
    growth: int = 4
    first: int = 1
    price: float = 1.5
    had_s: float = 900.0
    size: float = 0.3
    ahead_s: float = 7200.0
    least_sureness: float = 0.8
    learns: bool = True
    gap: float = 1e-4
    reserved: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])


@dataclasses.dataclass(frozen=True, slots=True)
class _Option:
    """A configuration of a job.

    Attributes:
      kind: index of the kind of devices.
      count: number of devices.
      speed: progress per second.
      worth: weighted utility, minus the cost of the move to this configuration.
      move_s: seconds of the move; 0 if the job stays where it is.
      place_worth: the part of ``worth`` that a move to other nodes loses, if the job
        keeps its number of devices, because the job may end soon after the move. It is
        the worth of the move if the job never ended, minus the worth if the job ends as
        predicted.
    """

    kind: int
    count: int
    speed: float
    worth: float
    move_s: float
    place_worth: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Promise:
    """What a guaranteed job was promised, and what keeping the promise is worth.

    Attributes:
      speedup: the guaranteed speed (floor), divided by the speed on one device.
      price: value of speed below the floor, as a multiple of its utility, in addition
        to the utility itself.
    """

    speedup: float
    price: float


_NOTHING = _Promise(0.0, 0.0)


class Goodput:
    """Maximises the weighted utilities of jobs' speed-ups, minus costs of moves."""

    name = "goodput"
    adapts: Adapts = "batch"
    oracle = False
    pools = True
    """All jobs of a program share their measurements."""
    remembers = True
    """The policy also receives jobs that may not run, to know that they have not
    completed."""

    def __init__(self, settings: Settings | None = None) -> None:
        """Starts without completed jobs."""
        self._settings = settings or Settings()
        self._ended: dict[str, list[float]] = {}
        # Job that the policy has seen -> whether it is guaranteed.
        self._seen: dict[str, bool] = {}
        self._paces: dict[str, float] = {}
        self._last: dict[str, tuple[str, float]] = {}
        # Cache: (job, kind of devices, devices per node, devices of the kind) -> the
        # curve, the possible numbers of devices and their goodputs.
        self._speeds: dict[
            tuple[str, str, int, int], tuple[Curve, np.ndarray, np.ndarray]
        ] = {}

    def decide(
        self,
        now_s: float,
        jobs: Views,
        nodes: Nodes,
        current: Mapping[str, Allocation],
    ) -> Decisions:
        """Decides the best allocation that the solver finds, with reasons for moves."""
        del now_s
        self._learn(jobs)
        kinds = sorted(
            {k for k, n in zip(nodes.kinds, nodes.devices, strict=True) if n}
        )
        allowed = [[i for i in nodes.of_kind(k) if nodes.devices[i]] for k in kinds]
        curves = {n: self._curves(v, nodes, kinds, allowed) for n, v in jobs.items()}
        weights = self._weights(jobs, {n: _single(c) for n, c in curves.items()})
        options = {
            name: self._options(
                jobs[name], current.get(name, ()), nodes, allowed, curves[name], weight
            )
            if (weight := weights.get(name))
            else []
            for name in jobs
        }
        budgets = [
            max(
                sum(nodes.devices[i] for i in of) - self._settings.reserved.get(k, 0), 0
            )
            for k, of in zip(kinds, allowed, strict=True)
        ]
        picked, solution = self._solve(jobs, options, budgets)
        wanted = {name: (o.count, allowed[o.kind]) for name, o in picked.items()}
        costs = {name: o.place_worth for name, o in picked.items()}
        chosen = pack(wanted, current, nodes, costs)
        return Decisions(
            allocations=chosen,
            plans=_plans(jobs, chosen),
            reasons=_reasons(jobs, options, picked, current, chosen),
            gap=solution.gap,
        )

    def _learn(self, jobs: Views) -> None:
        """Stores the total work of each job that completed since the last round."""
        for name, (application, progress) in list(self._last.items()):
            if name not in jobs:
                # A job that never made progress tells nothing about work.
                if progress > 0:
                    self._ended.setdefault(application, []).append(progress)
                del self._last[name]
        for name, view in jobs.items():
            self._last[name] = view.application, view.progress
            self._seen[name] = view.guaranteed
        self._speeds = {k: v for k, v in self._speeds.items() if k[0] in jobs}

    def _left_s(self, view: JobView, single: float) -> float:
        """Seconds on one device until a job completes, stated or by Gittins' index."""
        if view.left is not None:
            return view.left / single
        whole = self._finished_work(view)
        if whole:
            if not view.measured:
                mean = sum(whole) / len(whole)
                single = self._paces.get(view.application, mean / _NEW_S)
            else:
                self._paces[view.application] = single
            return gittins_left(whole, view.progress) / single
        begun = view.measured and view.progress > 0
        return view.progress / single if begun else _NEW_S

    def _finished_work(self, view: JobView) -> list[float]:
        """The total work of each completed job of the same program."""
        ended = self._ended.get(view.application, [])
        return ended if self._settings.learns else []

    def _lasts_s(self, view: JobView, single: float) -> float:
        """Predicted mean seconds on one device until a job completes.

        If completed jobs predict this time badly (`sureness`), the result is infinite.
        """
        if view.left is not None and single > 0:
            return view.left / single
        whole = self._finished_work(view)
        known = view.measured and single > 0 and len(whole) >= _ENOUGH
        if not known or sureness(whole) < self._settings.least_sureness:
            return math.inf
        return mean_left(whole, view.progress) / single

    def _curve(
        self, view: JobView, kind: str, per_node: int, total: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Possible numbers of devices of a kind, and a job's goodput on each."""
        # The key includes the number of devices in the cluster, because a job has more
        # possible numbers of devices after a node joins.
        curve, key = view.on(kind), (view.name, kind, per_node, total)
        known = self._speeds.get(key)
        if known is None or known[0] is not curve:
            counts = np.array(sizes_of(per_node, total))
            found = curve.goodput(-(-counts // per_node), counts)
            if not np.all(np.isfinite(found)) or found.min() < 0:
                raise ScheduleError(
                    f"job {view.name!r}: its curve has a goodput of "
                    f"{found[~(found >= 0)][:1]}; give finite numbers of at least 0."
                )
            known = self._speeds[key] = curve, counts, found
        return known[1], known[2]

    def _weights(self, jobs: Views, singles: Mapping[str, float]) -> dict[str, float]:
        """The weight of each job that can run; smaller if more work remains.

        The weight uses a mixture of the job's predicted remaining work and the
        geometric mean over all jobs. The surer the prediction is (`sureness`), the less
        the mean counts. Without the mean, uncertain predictions would move jobs back
        and forth.

        The weight is also multiplied by ``entitlement ** (1 - concavity)``. With this
        exponent, jobs with linear curves get devices in proportion to their
        entitlements.
        """
        set_ = self._settings
        left, sure = dict[str, float](), dict[str, float]()
        for name, single in singles.items():
            if single > 0:
                view = jobs[name]
                stated = view.left is not None
                more_s = set_.stated_s if stated else set_.known_s
                left[name] = math.log(self._left_s(view, single) + more_s)
                wholes = self._finished_work(view)
                sure[name] = set_.trust if stated else sureness(wholes)
        mean = sum(left.values()) / max(len(left), 1)
        due = entitlements(jobs)
        return {
            name: math.exp(-set_.shortness * (mean + sure[name] * (found - mean)))
            * due.get(name, 1.0) ** (1 - set_.concavity)
            for name, found in left.items()
        }

    def _curves(
        self,
        view: JobView,
        nodes: Nodes,
        kinds: list[str],
        allowed: list[list[int]],
    ) -> _Curves:
        """For each kind: its index, possible numbers of devices, and their goodputs."""
        found: _Curves = []
        for kind, of in enumerate(allowed):
            per = max(nodes.devices[i] for i in of)
            total = sum(nodes.devices[i] for i in of if nodes.devices[i] == per)
            found.append((kind, *self._curve(view, kinds[kind], per, total)))
        return found

    def _options(
        self,
        view: JobView,
        held: Allocation,
        nodes: Nodes,
        allowed: list[list[int]],
        curves: _Curves,
        weight: float,
    ) -> list[_Option]:
        found: list[_Option] = []
        set_ = self._settings
        limit = max(set_.growth * view.tried, set_.first)
        old, single = (len(placement_of(held)), len(held)), _single(curves)
        lasts_s = self._lasts_s(view, single)
        promise = self._promise(view, curves, single)
        for kind, counts, speeds in curves:
            per = max(nodes.devices[i] for i in allowed[kind])
            there = bool(held) and held[0] in allowed[kind]
            for count, speed in zip(counts.tolist(), speeds.tolist(), strict=True):
                if speed <= 0 or count > view.most or count > limit:
                    continue
                shape = -(-count // per), count
                stays = there and count == len(held)
                speedup, move_s = speed / single, _move_s(view, old, shape)
                # For a waiting job, the gain counts as if the job had unlimited work
                # left: starting it is worth its cost even if little work is left.
                late_s = lasts_s / speedup if held else math.inf
                worth = weight * self._utility(speedup, promise, move_s, late_s)
                place = 0.0
                if stays:
                    place = weight * self._utility(speedup, promise, move_s) - worth
                    worth, move_s = weight * self._utility(speedup, promise), 0.0
                found.append(_Option(kind, count, speed, worth, move_s, place))
        return found

    def _promise(self, view: JobView, curves: _Curves, single: float) -> _Promise:
        """The guarantee of a job, with its price at present."""
        floor = _floor(view, curves)
        if not floor:
            return _NOTHING
        set_, guaranteed = self._settings, sum(self._seen.values())
        ahead_s = max(view.progress / floor - view.age_s, 0.0)
        owed = max(1 - ahead_s / set_.ahead_s, 0.0)
        others = (len(self._seen) - guaranteed) / guaranteed
        size = (floor / single) ** set_.size
        # A job's duration is unknown. So jobs that have made less progress get a higher
        # price.
        had = 1 + view.progress / floor / set_.had_s
        return _Promise(floor / single, set_.price * others * owed * size / had)

    def _utility(
        self,
        speedup: float,
        promise: _Promise,
        move_s: float = 0.0,
        lasts_s: float = math.inf,
    ) -> float:
        horizon_s = min(math.sqrt(self._settings.events_s * move_s), lasts_s)
        kept = horizon_s / (horizon_s + move_s) if move_s else 1.0
        value = self._value(speedup * kept)
        if promise.price:
            value += promise.price * self._value(min(speedup * kept, promise.speedup))
        return value

    def _value(self, speedup: float) -> float:
        set_ = self._settings
        value = max(speedup, set_.least) ** set_.concavity
        return value - set_.least**set_.concavity

    def _solve(
        self, jobs: Views, options: Mapping[str, list[_Option]], budgets: list[int]
    ) -> tuple[dict[str, _Option], Allocated]:
        """Chooses one option for each job; maximises the sum of their worths."""
        rows = [[(o.worth, o.kind, o.count) for o in options[name]] for name in jobs]
        problem = AllocationProblem.of(rows, budgets)
        solution = solve_allocation(problem, gap=self._settings.gap)
        # `choices` are indices into the list of all jobs' options.
        flat = [option for name in jobs for option in options[name]]
        chosen = zip(jobs, solution.choices, strict=True)
        return {name: flat[k] for name, k in chosen if k >= 0}, solution


def _single(curves: _Curves) -> float:
    """A job's goodput on one device, as a mean over all devices that can run it.

    If a single device of a kind cannot run the job, the goodput on the smallest number
    of devices that can run it is divided by that number.
    """
    found: list[float] = []
    weights: list[int] = []
    for _, counts, speeds in curves:
        runs = np.flatnonzero(speeds > 0)
        if len(runs):
            found.append(float(speeds[runs[0]] / counts[runs[0]]))
            weights.append(int(counts[-1]))
    return float(np.average(found, weights=weights)) if found else 0.0


def _move_s(view: JobView, old: Shape, new: Shape) -> float:
    """The seconds for which a moved job does not train, as assumed in the optimisation.

    The result is at least the seconds of a restart (`JobView.restart_s`), even if the
    move takes less time. The reason: predictions of remaining work change between
    decisions. If moves cost almost nothing, about half of them are undone within five
    minutes. With the larger cost, the policy moves a job only if the gain lasts longer.
    """
    return max(view.move_s(old, new), view.restart_s)


def _floor(view: JobView, curves: _Curves) -> float:
    """The guaranteed progress per second of a job; 0 if it has no guarantee.

    The guaranteed speed is the job's progress on the devices that its owner asks for,
    on the slowest kind of devices that can run the job.
    """
    if not view.guaranteed or view.floor:
        return view.floor if view.guaranteed else 0.0
    asked = [
        float(speeds[counts <= view.asked].max(initial=0.0))
        for _, counts, speeds in curves
    ]
    return min((speed for speed in asked if speed > 0), default=0.0)


def _plans(jobs: Views, chosen: Mapping[str, Allocation]) -> dict[str, str]:
    """The plan of each allocated job whose curve has plans."""
    found: dict[str, str] = {}
    for name, places in chosen.items():
        plan = getattr(jobs[name].curve, "plan", None)
        if plan is not None:
            found[name] = plan(len(placement_of(places)), len(places))
    return found


def _reasons(
    jobs: Views,
    options: Mapping[str, list[_Option]],
    picked: Mapping[str, _Option],
    current: Mapping[str, Allocation],
    chosen: Mapping[str, Allocation],
) -> tuple[Reason, ...]:
    found: list[Reason] = []
    for name in jobs:
        old, new = current.get(name, ()), chosen.get(name, ())
        if old == new:
            continue
        option = picked.get(name)
        before = [o.speed for o in options[name] if o.count == len(old)]
        gain = option.speed / before[0] - 1 if option and before else float("nan")
        best = max(options[name], key=lambda o: o.worth, default=None)
        words = f"{len(options[name])} configurations"
        if best is not None and best is not option:
            words += (
                f"; {best.count} devices are worth more alone, not beside the others"
            )
        if option is not None and option.move_s == 0:
            words += "; moved to make room for a job on whole nodes"
        move_s = jobs[name].restart_s if new else 0.0
        found.append(
            Reason(
                job=name,
                devices=len(new),
                kept=len(old),
                compared=words,
                gain=gain,
                cost_s=option.move_s or move_s if option else 0.0,
            )
        )
    return tuple(found)
