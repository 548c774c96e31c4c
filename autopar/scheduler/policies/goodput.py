"""Our policy: the most goodput, weighted by what is left, less what moves cost.

Each job has a curve: its progress per second on every configuration, best batch or plan
inside. A configuration's utility is concave in its speed-up over one device, so that no
job starves, times a weight that falls with the work that is left. What is left is never
seen. It is predicted from jobs of the same program that have ended, by Gittins' index;
before one has, a job is taken to have as much left as it has done. A move shortens the
time over which its gain counts. The allocation problem is solved to a stated gap.

A guarantee is a floor under a job's speed, counted from its submission: that of what
its owner asks for. It has a price and is no constraint. Speed up to the floor is worth
more, the more the later the job is, and the more the fewer jobs have a guarantee.

*What is left.* Gittins' index is the best rate of ends by work: the largest share of
jobs that end in the next so much work, over the work that they take until then or until
their end. Serving jobs by this index makes the mean completion time least where only
the distribution of their work is known (Gittins, 1979). Here its inverse stands for the
work that is left. A job that has outlived the short ones has more left than a new one.
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
    """How much a prediction from jobs that ended says of another, 0 to 1.

    ``1 / (1 + v)`` with ``v`` the squared coefficient of variation of their work: the
    share that the mean has in the mean square. It is 1 where all have the same work.

    Args:
      wholes: the whole work of jobs that ended; fewer than two say nothing of it, for
        which 1 is returned.

    >>> sureness([10.0, 10.0, 10.0])
    1.0
    >>> sureness([0.0, 20.0])
    0.5
    """
    work = np.asarray(wholes, float)
    square = float(np.mean(work**2)) if len(work) > 1 else 0.0
    return float(np.mean(work)) ** 2 / square if square > 0 else 1.0


def gittins_left(wholes: Sequence[float], done: float) -> float:
    """The inverse of Gittins' index, in units of work.

    Args:
      wholes: the whole work of jobs that ended, at least one.
      done: the work that a job has done. One that has done more than all of them has
        as much left as it has done.

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
    # Until the k-th ends, k jobs worked to their ends and the others as long as it.
    worked = np.cumsum(longer) + longer * (len(longer) - ended)
    return float((worked / ended).min())


def mean_left(wholes: Sequence[float], done: float) -> float:
    """The mean of what is left, in units of work.

    Args:
      wholes: as for `gittins_left`, with the same answer for one that has done more.
      done: the work that a job has done.

    >>> mean_left([10.0, 1000.0], 0.0)
    505.0
    """
    longer = [work - done for work in wholes if work > done]
    return sum(longer) / len(longer) if longer else done


_Curves = list[tuple[int, np.ndarray, np.ndarray]]

_NEW_S = 900.0
"""Seconds on one device that a job of an unknown program has left, at first."""

_ENOUGH = 3
"""So many jobs of a program must have ended to say how long another lasts. Two that are
alike say little: on one of Rubick's workloads the first two of a program were, and no
two after them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Constants of the policy; chosen on workloads 4, 5 and 8 of Pollux.

    Attributes:
      concavity: exponent of the speed-up in the utility, below 1.
      least: a speed-up that counts as none.
      shortness: exponent of the work that is left in the weight; 0 ignores it.
      known_s: seconds on one device that are added to what is left.
      events_s: seconds between events that make a job move. Its gain counts over the
        geometric mean of these and of the seconds of a move (as in Young's interval of
        checkpoints).
      growth: how often more devices than it ran on a job may get at once.
      first: the most devices of a job that was not measured.
      price: of guarantees, in extra counts of the speed up to the floor, for each job
        without a guarantee that there is to one with it.
      had_s: promised seconds after which the price of a job is half of what it was.
      size: exponent of the floor in the price, so that jobs which need many devices
        at once are not always last.
      ahead_s: the price of a job falls with how far it is ahead of its floor, to none
        where it is so many seconds ahead.
      least_sureness: of a prediction by which a job counts as nearly done (`sureness`).
      learns: whether jobs that ended tell what is left of others of their program.
      gap: of the allocation, relative.
      reserved: devices of each kind that are left free.
    """

    concavity: float = 0.2
    least: float = 0.2
    shortness: float = 0.5
    known_s: float = 800.0
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
      kind: of devices.
      count: how many.
      speed: progress per second.
      worth: with what the move there costs.
      move_s: seconds of that move; 0 where the job stays.
      place_worth: what a job that stays would lose in another place, beyond what it
        would if it lasted.
    """

    kind: int
    count: int
    speed: float
    worth: float
    move_s: float
    place_worth: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Promise:
    """What a job was promised.

    Attributes:
      speedup: the floor, as a speed-up over one device.
      price: how often speed up to the floor counts more.
    """

    speedup: float
    price: float


_NOTHING = _Promise(0.0, 0.0)


class Goodput:
    """Maximises weighted utilities of speed-ups over the curves, with move costs."""

    name = "goodput"
    adapts: Adapts = "batch"
    oracle = False
    pools = True
    """What a job measures is known of all jobs of its program."""
    remembers = True
    """It is told of jobs that may not run, too: they have not ended."""

    def __init__(self, settings: Settings | None = None) -> None:
        """No job has ended."""
        self._settings = settings or Settings()
        self._ended: dict[str, list[float]] = {}
        # The jobs that were seen, and whether each is guaranteed.
        self._seen: dict[str, bool] = {}
        self._paces: dict[str, float] = {}
        self._last: dict[str, tuple[str, float]] = {}
        # By job, kind of devices, devices of a node and of all of the kind.
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
        """The best allocation, its gap, and why jobs move."""
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
        """Remembers the whole work of jobs that ended since the last round."""
        for name, (application, progress) in list(self._last.items()):
            if name not in jobs:
                # One that ended before it was seen at work says nothing.
                if progress > 0:
                    self._ended.setdefault(application, []).append(progress)
                del self._last[name]
        for name, view in jobs.items():
            self._last[name] = view.application, view.progress
            self._seen[name] = view.guaranteed
        self._speeds = {k: v for k, v in self._speeds.items() if k[0] in jobs}

    def _left_s(self, view: JobView, single: float) -> float:
        """Predicted seconds on one device until a job ends."""
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
        """The whole work of jobs of a program that ended."""
        ended = self._ended.get(view.application, [])
        return ended if self._settings.learns else []

    def _lasts_s(self, view: JobView, single: float) -> float:
        """Predicted seconds on one device until a job ends, in the mean.

        Infinite where the jobs that ended say too little of others.
        """
        whole = self._finished_work(view)
        known = view.measured and single > 0 and len(whole) >= _ENOUGH
        if not known or sureness(whole) < self._settings.least_sureness:
            return math.inf
        return mean_left(whole, view.progress) / single

    def _curve(
        self, view: JobView, kind: str, per_node: int, total: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sizes, and the goodput of each, of one job on one kind."""
        # A node that joins makes more sizes than were asked for.
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
        """The weight of each job that runs at all: short ones count more.

        What is left counts as far as its prediction is sure (`sureness`); for the rest
        a job counts as the geometric mean of all. Weights that follow predictions which
        say little move jobs back and forth.

        What a job is entitled to counts with the power 1 - concavity: on curves on
        which each device helps as much, devices are then in proportion to it.
        """
        set_ = self._settings
        left, sure = dict[str, float](), dict[str, float]()
        for name, single in singles.items():
            if single > 0:
                view = jobs[name]
                left[name] = math.log(self._left_s(view, single) + set_.known_s)
                sure[name] = sureness(self._finished_work(view))
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
        """By kind of devices: its number, sizes, and the goodput of each."""
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
                # A job that waits gains by a start however little it has left.
                late_s = lasts_s / speedup if held else math.inf
                worth = weight * self._utility(speedup, promise, move_s, late_s)
                place = 0.0
                if stays:
                    place = weight * self._utility(speedup, promise, move_s) - worth
                    worth, move_s = weight * self._utility(speedup, promise), 0.0
                found.append(_Option(kind, count, speed, worth, move_s, place))
        return found

    def _promise(self, view: JobView, curves: _Curves, single: float) -> _Promise:
        """What was promised to a job, and what that is worth now."""
        floor = _floor(view, curves)
        if not floor:
            return _NOTHING
        set_, guaranteed = self._settings, sum(self._seen.values())
        ahead_s = max(view.progress / floor - view.age_s, 0.0)
        owed = max(1 - ahead_s / set_.ahead_s, 0.0)
        others = (len(self._seen) - guaranteed) / guaranteed
        size = (floor / single) ** set_.size
        # Nobody knows how long a job lasts: those that had little so far come first.
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
        """The best options that fit."""
        rows = [[(o.worth, o.kind, o.count) for o in options[name]] for name in jobs]
        problem = AllocationProblem.of(rows, budgets)
        solution = solve_allocation(problem, gap=self._settings.gap)
        # The numbers of choices are those of the rows that were handed over.
        flat = [option for name in jobs for option in options[name]]
        chosen = zip(jobs, solution.choices, strict=True)
        return {name: flat[k] for name, k in chosen if k >= 0}, solution


def _single(curves: _Curves) -> float:
    """Goodput on one device, as an average over the devices of all kinds that run it.

    Where one device of a kind cannot run the job: the goodput of the fewest devices
    that can, divided by their number.
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
    """Seconds that a move counts: of a job that runs, no fewer than of a restart.

    What is left of jobs is predicted, and each decision sees it anew: about half of the
    moves that cost next to nothing are undone within five minutes. Counted as a
    restart, a move must promise a gain that outlives that; dearer moves count in full.
    """
    return max(view.move_s(old, new), view.restart_s)


def _floor(view: JobView, curves: _Curves) -> float:
    """The progress per second that a job was promised; 0 for none.

    That of what its owner asks for, on the slowest kind of devices that runs it.
    """
    if not view.guaranteed or view.floor:
        return view.floor if view.guaranteed else 0.0
    asked = [
        float(speeds[counts <= view.asked].max(initial=0.0))
        for _, counts, speeds in curves
    ]
    return min((speed for speed in asked if speed > 0), default=0.0)


def _plans(jobs: Views, chosen: Mapping[str, Allocation]) -> dict[str, str]:
    """The plan of each job whose curve has plans."""
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
