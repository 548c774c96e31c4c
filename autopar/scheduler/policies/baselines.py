"""Scheduling policies of papers, and the names of all policies.

Optimus gives devices one by one, each to the job whose remaining time it shortens most
(Peng et al., "Optimus: An efficient dynamic resource scheduler for deep learning
clusters", EuroSys 2018). Here Optimus is an oracle: it sees the true number of
remaining steps and the true seconds of a step.

Tiresias first runs the jobs that have had the fewest device-seconds (the least attained
service), in two queues (Gu et al., "Tiresias: A GPU cluster manager for distributed
deep learning", NSDI 2019). The simulator that was published with Pollux has the same
two queues and the same threshold.

Sia chooses the kind and number of devices of all jobs by one integer program per round
(Jayaram Subramanya et al., "Sia: Heterogeneity-aware, goodput-optimized ML-cluster
scheduling", SOSP 2023). Each job's goodputs on all configurations are divided by the
job's smallest goodput per device. Goodputs on configurations that need a move are also
multiplied by a factor that depends on the job's age and number of restarts. The program
minimises the sum, over jobs, of the resulting goodput to the power of -0.5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from autopar.errors import ScheduleError
from autopar.plugins import SCHEDULING_POLICIES, load_plugin, plugin_names
from autopar.scheduler.jobs import Allocation, Decisions, JobView, Views
from autopar.scheduler.nodes import Nodes, pack, sizes_of
from autopar.scheduler.policies.base import (
    Adapts,
    SchedulingPolicy,
    changes,
    take_fullest,
    with_counts,
)
from autopar.scheduler.policies.goodput import Goodput
from autopar.scheduler.policies.pollux import Pollux
from autopar.scheduler.policies.rubick import Rubick
from autopar_solver import AllocationProblem, solve_allocation


class Fifo:
    """First in, first out: jobs run on the devices they ask for, without preemption."""

    name = "fifo"
    adapts: Adapts = "nothing"
    oracle = False

    def decide(
        self,
        now_s: float,
        jobs: Views,
        nodes: Nodes,
        current: Mapping[str, Allocation],
    ) -> Decisions:
        """Starts waiting jobs in order, up to the first job that does not fit."""
        del now_s
        chosen = dict(current)
        free = nodes.free(chosen)
        for name, view in jobs.items():
            if name in chosen:
                continue
            if view.asked > sum(free):
                break
            chosen[name] = take_fullest(free, view.asked)
        return Decisions(
            allocations=chosen, reasons=changes(jobs, current, chosen, "who came first")
        )


class FairShare:
    """Gives all jobs equally many devices, if users and priorities are equal.

    Devices are first divided among users in proportion to the users' shares
    (`JobView.share`). No user gets more devices than the user's jobs can use. Each
    user's devices are then divided among the user's jobs in proportion to priorities.
    """

    name = "fair"
    adapts: Adapts = "batch"
    oracle = False

    def decide(
        self,
        now_s: float,
        jobs: Views,
        nodes: Nodes,
        current: Mapping[str, Allocation],
    ) -> Decisions:
        """Divides the devices; moves only jobs whose number of devices changes."""
        del now_s
        counts = _fair_shares(jobs, nodes.total)
        order = sorted(counts, key=lambda name: -counts[name])
        chosen = with_counts(counts, order, current, nodes)
        return Decisions(
            allocations=chosen, reasons=changes(jobs, current, chosen, "equal shares")
        )


def _fair_shares(jobs: Views, total: int) -> dict[str, int]:
    """The number of devices of each job, by its user's share and its priority.

    Each number is rounded down to a power of two, so that it changes seldom.
    """
    of: dict[str, list[str]] = {}
    for name, view in jobs.items():
        of.setdefault(view.user, []).append(name)
    counts: dict[str, int] = {}
    for user, budget in _budgets(jobs, of, total).items():
        weight = sum(jobs[name].priority for name in of[user])
        left = budget
        for name in sorted(of[user], key=lambda name: -jobs[name].priority):
            part = max(budget * jobs[name].priority / weight, 1.0)
            size = 2 ** int(np.log2(part))
            counts[name] = min(size, jobs[name].most, left)
            left -= counts[name]
    return counts


def _budgets(jobs: Views, of: Mapping[str, list[str]], total: int) -> dict[str, int]:
    """The number of devices of each user, in proportion to the users' shares.

    No user gets more than the user's jobs can use. If no user can use the remaining
    devices, their number is added to the number of every user.
    """
    if len(of) == 1:
        return dict.fromkeys(of, total)
    useful = {u: sum(jobs[name].most for name in names) for u, names in of.items()}
    shares = {user: jobs[names[0]].share for user, names in of.items()}
    budgets = dict.fromkeys(of, 0)
    for left in range(total, 0, -1):
        open_ = [user for user in of if budgets[user] < useful[user]]
        if not open_:
            return {user: n + left for user, n in budgets.items()}
        user = min(open_, key=lambda user: (budgets[user] + 1) / shares[user])
        budgets[user] += 1
    return budgets


class Gavel:
    """Gavel with max-min fairness: in each round, the least served jobs run first.

    Narayanan et al., "Heterogeneity-aware cluster scheduling policies for deep learning
    workloads", OSDI 2020. Jobs get the number of devices that they ask for. For each
    job, the fraction of the time since its submission in which it had these devices is
    computed. Jobs with a smaller fraction run first.
    """

    name = "gavel"
    adapts: Adapts = "nothing"
    oracle = False
    _round_s = 360.0

    def __init__(self) -> None:
        """Starts so that the first decision begins a round."""
        self._next_s = 0.0

    def decide(
        self,
        now_s: float,
        jobs: Views,
        nodes: Nodes,
        current: Mapping[str, Allocation],
    ) -> Decisions:
        """Reorders all jobs at the end of a round; else only starts jobs that fit."""
        chosen = dict(current)
        if now_s >= self._next_s:
            self._next_s = now_s + self._round_s
            chosen = {}
        free = nodes.free(chosen)
        for name in sorted(jobs, key=lambda name: _share(jobs, name)):
            if name not in chosen and jobs[name].asked <= sum(free):
                old = current.get(name, ())
                fits = bool(old) and all(free[i] >= old.count(i) for i in set(old))
                chosen[name] = old if fits else take_fullest(free, jobs[name].asked)
                if fits:
                    for node in old:
                        free[node] -= 1
        why = "least share of time served first"
        return Decisions(
            allocations=chosen, reasons=changes(jobs, current, chosen, why)
        )


def _share(jobs: Views, name: str) -> float:
    """For which fraction of its time since submission a job had the requested
    devices.
    """
    view = jobs[name]
    return view.served_device_s / (view.asked * max(view.age_s, 1.0))


class Optimus:
    """Gives each job one device, then each next one to the job that it helps most."""

    name = "optimus"
    adapts: Adapts = "devices"
    oracle = True

    def decide(
        self,
        now_s: float,
        jobs: Views,
        nodes: Nodes,
        current: Mapping[str, Allocation],
    ) -> Decisions:
        """Gives out devices one by one.

        Moves only jobs whose number of devices changes.
        """
        del now_s
        counts = _counts(jobs, nodes.total)
        order = sorted(jobs, key=counts.__getitem__)
        chosen = with_counts(counts, order, current, nodes)
        why = "largest drop of the remaining seconds for one more device"
        return Decisions(
            allocations=chosen, reasons=changes(jobs, current, chosen, why)
        )


def _counts(jobs: Views, left: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    gains: dict[str, float] = {}
    for name, view in jobs.items():
        counts[name] = min(1, left)
        left -= counts[name]
        gains[name] = _gain(view, counts[name]) if counts[name] and left else 0.0
    while left > 0 and max(gains.values()) > 0:
        name = max(gains, key=gains.__getitem__)
        counts[name] += 1
        # As in the published code, the gain is computed before the device is subtracted
        # from the free devices. So the gain may be that of one device more than exists.
        # The result is the same.
        gains[name] = _gain(jobs[name], counts[name])
        left -= 1
    return counts


def _gain(view: JobView, devices: int) -> float:
    """Seconds by which one more device shortens a job's remaining time."""
    oracle = view.oracle
    assert oracle is not None
    if devices + 1 > view.most or devices + 1 > len(oracle.step_s):
        return 0.0
    return (oracle.step_s[devices - 1] - oracle.step_s[devices]) * oracle.remaining


QUEUE_DEVICE_S = 16 * 3600.0
"""Device-seconds after which a job goes into the second queue."""


class Tiresias:
    """Tiresias with two queues, each in order of arrival.

    Jobs get the number of devices that they ask for.
    """

    name = "tiresias"
    adapts: Adapts = "nothing"
    oracle = False
    remembers = True
    """The policy also receives jobs that may not run, which keep their queue places."""

    def __init__(self, queue_device_s: float = QUEUE_DEVICE_S) -> None:
        """Starts with empty queues."""
        self._limit = queue_device_s
        self._first: list[str] = []
        self._second: list[str] = []
        self._running: dict[str, bool] = {}
        self._looked_s: dict[str, float] = {}
        self._executed_s: dict[str, float] = {}

    def decide(
        self,
        now_s: float,
        jobs: Views,
        nodes: Nodes,
        current: Mapping[str, Allocation],
    ) -> Decisions:
        """Runs the jobs of the first queue, then of the second, while devices last."""
        self._forget(jobs)
        for name in jobs:
            if name not in self._running:
                self._running[name] = False
                self._first.append(name)
        for name, view in jobs.items():
            self._demote(name, now_s, view.asked)
        left = nodes.total
        chosen = {k: v for k, v in current.items() if k in jobs}
        order = [*self._first, *self._second]
        for name in order:
            allowed = jobs[name].cap != 0
            self._running[name] = allowed and jobs[name].asked <= left
            if self._running[name]:
                left -= jobs[name].asked
            else:
                chosen.pop(name, None)
        free = nodes.free(chosen)
        for name in order:
            if self._running[name] and not chosen.get(name):
                chosen[name] = take_fullest(free, jobs[name].asked)
        why = "least attained service first, two queues"
        return Decisions(
            allocations=chosen, reasons=changes(jobs, current, chosen, why)
        )

    def _forget(self, jobs: Views) -> None:
        self._first = [name for name in self._first if name in jobs]
        self._second = [name for name in self._second if name in jobs]
        for kept in (self._running, self._looked_s, self._executed_s):
            for name in [name for name in kept if name not in jobs]:
                del kept[name]

    def _demote(self, name: str, now_s: float, devices: int) -> None:
        """Adds the seconds since the last decision to the total of a running job.

        If this total times the job's devices reaches the threshold, the job moves to
        the second queue.
        """
        if self._running[name]:
            spent = now_s - self._looked_s.get(name, 0.0)
            self._executed_s[name] = self._executed_s.get(name, 0.0) + spent
            if name in self._first and self._executed_s[name] * devices >= self._limit:
                self._first.remove(name)
                self._second.append(name)
        self._looked_s[name] = now_s


_POWER = -0.5
_WAIT = 1.1  # the term of a waiting job in the sum that Sia minimises


class Sia:
    """Sia: minimises a sum of powers of normalised goodputs (module docstring)."""

    name = "sia"
    adapts: Adapts = "batch"
    oracle = False

    def decide(
        self,
        now_s: float,
        jobs: Views,
        nodes: Nodes,
        current: Mapping[str, Allocation],
    ) -> Decisions:
        """Solves the integer program and places the jobs on nodes."""
        del now_s
        kinds = sorted(
            {k for k, n in zip(nodes.kinds, nodes.devices, strict=True) if n}
        )
        allowed = [[i for i in nodes.of_kind(k) if nodes.devices[i]] for k in kinds]
        rows = [
            _row(view, current.get(name, ()), nodes, kinds, allowed)
            for name, view in jobs.items()
        ]
        budgets = [sum(nodes.devices[i] for i in of) for of in allowed]
        problem = AllocationProblem.of(rows, budgets)
        solution = solve_allocation(problem)
        wanted = {
            name: (int(problem.counts[o]), allowed[int(problem.kinds[o])])
            for name, o in zip(jobs, solution.choices, strict=True)
            if o >= 0
        }
        chosen = pack(wanted, current, nodes)
        why = "normalised goodput of all configurations"
        return Decisions(
            allocations=chosen,
            reasons=changes(jobs, current, chosen, why),
            gap=solution.gap,
        )


def _row(
    view: JobView,
    held: Allocation,
    nodes: Nodes,
    kinds: list[str],
    allowed: list[list[int]],
) -> list[tuple[float, int, int]]:
    """For each configuration: its value in the objective, kind and devices.

    A job gets at most twice as many devices as it has ever run on.
    """
    found: list[tuple[float, int, int]] = []
    limit = min(max(2 * view.tried, 1), view.most)
    moved = max(view.age_s - view.restarts * view.restart_s, 0.0)
    moved /= view.age_s + view.restart_s
    for kind, of in enumerate(allowed):
        per = max(nodes.devices[i] for i in of)
        total = sum(nodes.devices[i] for i in of if nodes.devices[i] == per)
        counts = np.array(sizes_of(per, total))
        counts = counts[counts <= limit]
        speeds = view.on(kinds[kind]).goodput(-(-counts // per), counts)
        for count, speed in zip(counts.tolist(), speeds.tolist(), strict=True):
            stays = len(held) == count and held[0] in of
            factor = 1.0 if stays or not held else moved
            if speed * factor > 0:
                found.append((speed * factor, kind, count))
    least = min((speed / count for speed, _, count in found), default=1.0)
    return [
        (_WAIT - (speed / least) ** _POWER, kind, count) for speed, kind, count in found
    ]


POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "fifo": Fifo,
    "fair": FairShare,
    "tiresias": Tiresias,
    "optimus": Optimus,
    "gavel": Gavel,
    "pollux": Pollux,
    "sia": Sia,
    "rubick": Rubick,
    "goodput": Goodput,
}


def policy_of(name: str) -> SchedulingPolicy:
    """A new instance of the policy with a name, perhaps of another package.

    Raises:
      ScheduleError: no policy has this name.
    """
    make = POLICIES.get(name) or load_plugin(SCHEDULING_POLICIES, name)
    if make is None:
        names = [*POLICIES, *plugin_names(SCHEDULING_POLICIES)]
        raise ScheduleError(
            f"policy {name!r}: there is none; choose one of {', '.join(names)}."
        )
    return make()
