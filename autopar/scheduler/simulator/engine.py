"""Simulates a policy: it decides in rounds, until all jobs are done or have failed."""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from autopar.errors import ScheduleError
from autopar.scheduler.jobs import (
    Allocation,
    Decisions,
    Job,
    JobView,
    Reason,
    Rounds,
    check_times,
    placement_of,
)
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.base import SchedulingPolicy
from autopar.scheduler.users import UserLimits, Users, decide_for_users, new_waits


class RunningJob(Protocol):
    """A job in the simulator.

    Attributes:
      job: the submitted job.
      completed_s: time of completion in seconds; None before it.
      placement: number of devices on each of the job's nodes; () while the job waits.
      plan: name of the plan that the job runs; '' if the program has only one plan.
      restarts: how often the job's devices changed after its start; -1 before the
        start.
      failed: the reason why the job failed; '' if it did not fail.
    """

    job: Job
    completed_s: float | None
    placement: tuple[int, ...]
    plan: str
    restarts: int
    failed: str

    def advance(self, now_s: float, seconds: float, slowdown: float) -> None:
        """Runs for ``seconds``; ``slowdown`` is the fraction of its speed it loses."""
        ...

    def reallocate(
        self, placement: tuple[int, ...], plan: str, kinds: tuple[str, ...] = ()
    ) -> None:
        """Moves the job to a placement on devices of these kinds; () stops the job."""
        ...

    def view(self, now_s: float, oracle: bool) -> JobView:
        """What a policy can see of the job."""
        ...

    @property
    def batch(self) -> int:
        """Samples of a step of the job; 0 while the job waits."""
        ...


# If jobs wait and the policy leaves the whole cluster idle for this number of
# successive rounds, the waiting jobs fail.
_IDLE_ROUNDS = 1000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """A node that leaves or comes back.

    Attributes:
      at_s: time in seconds from the beginning of the trace.
      node: number of the node.
      away: True if the node leaves, False if it comes back.
      noticed_s: if the node dies without notice, seconds until jobs and the scheduler
        notice it. Jobs that use the node stand still meanwhile. A job whose nodes have
        all died goes back to its last save. 0: the node leaves with notice.
    """

    at_s: float
    node: int
    away: bool
    noticed_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a simulation.

    Attributes:
      interval_s: seconds between two regular decisions.
      react_s: seconds between two looks at the jobs and nodes. If a look finds that
        jobs or nodes have come or gone, the policy decides at once. None: it decides
        only regularly.
      interference: the fraction of its speed that a job on several nodes loses if it
        shares a node with another job that is also on several nodes.
      events: nodes that leave or come back.
      most_s: jobs that are not done after this many simulated seconds fail.
      users: quotas and shares by user.
    """

    interval_s: float = 60.0
    react_s: float | None = None
    interference: float = 0.0
    events: tuple[NodeEvent, ...] = ()
    most_s: float = 365 * 86400.0
    users: Users = dataclasses.field(default_factory=dict[str, UserLimits])

    def __post_init__(self) -> None:
        """Checks the ranges of times and of the interference.

        Raises:
          ScheduleError: a number is out of its range.
        """
        check_times(self.interval_s, self.react_s)
        if not 0 <= self.interference < 1:
            raise ScheduleError(
                f"the interference is {self.interference}; give a share from 0 to 1."
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A period during which a job's devices stayed the same.

    Attributes:
      job: the job's name.
      start_s: start of the period.
      end_s: end of the period.
      allocation: the node of each device.
      plan: the plan that the job ran.
      batch: the job's batch at the start of the period.
    """

    job: str
    start_s: float
    end_s: float
    allocation: Allocation
    plan: str
    batch: int


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """One decision.

    Attributes:
      at_s: time of the decision.
      active: number of waiting and running jobs.
      used: number of devices that jobs have.
      available: number of devices of the present nodes.
      reasons: reasons for changes of jobs' devices.
      gap: proved bound on how far the allocation's objective is from the best possible,
        as a fraction of the best.
    """

    at_s: float
    active: int
    used: int
    available: int
    reasons: tuple[Reason, ...]
    gap: float


@dataclasses.dataclass(frozen=True, slots=True)
class History:
    """The result of a simulation.

    Attributes:
      policy: name of the policy.
      nodes: the cluster.
      jobs: the jobs, with their completion times, numbers of moves and reasons of
        failure.
      rounds: all decisions.
      spans: the periods in which jobs had the same devices.
    """

    policy: str
    nodes: Nodes
    jobs: tuple[RunningJob, ...]
    rounds: tuple[Round, ...]
    spans: tuple[Span, ...]


def simulate(
    jobs: Sequence[RunningJob],
    nodes: Nodes,
    policy: SchedulingPolicy,
    options: Options | None = None,
) -> History:
    """Runs jobs under a policy until every job is done or has failed.

    Raises:
      ScheduleError: two jobs have the same name, or the policy allocates devices that
        do not exist.
    """
    simulation = _Simulation(jobs, nodes, policy, options or Options())
    return simulation.run()


class _Simulation:
    def __init__(
        self,
        jobs: Sequence[RunningJob],
        nodes: Nodes,
        policy: SchedulingPolicy,
        options: Options,
    ) -> None:
        self._jobs = {job.job.name: job for job in jobs}
        if len(self._jobs) != len(jobs):
            counted = collections.Counter(job.job.name for job in jobs)
            name = counted.most_common(1)[0][0]
            raise ScheduleError(f"job {name!r} stands in the trace twice; rename one.")
        for job in jobs:
            if policy.adapts == "nothing" and job.job.devices > nodes.total:
                job.failed = (
                    f"it asks for {job.job.devices} devices and the cluster has "
                    f"{nodes.total}; policy {policy.name!r} gives a job what it asks "
                    "for, so take a larger cluster"
                )
        self._nodes, self._policy, self._options = nodes, policy, options
        self._now_s = 0.0
        self._order = {name: number for number, name in enumerate(self._jobs)}
        fit = [job for job in self._jobs.values() if not job.failed]
        fit.sort(key=lambda job: job.job.submitted_s)
        self._coming, self._there = collections.deque(fit), list[RunningJob]()
        self._current: dict[str, Allocation] = {}
        self._begun: dict[str, tuple[float, Allocation, str, int]] = {}
        self._rounds: list[Round] = []
        self._spans: list[Span] = []
        self._away: set[int] = set()
        # Dead node -> when its death is noticed; job -> until when it stands still.
        self._dead: dict[int, float] = {}
        self._stands: dict[str, float] = {}
        self._events = sorted(options.events, key=lambda event: event.at_s)
        self._idle = 0
        self._owned = any(job.job.user or job.job.priority != 1 for job in jobs)
        self._waits: Mapping[str, str] = {}
        first_s = options.interval_s
        self._times = Rounds(options.interval_s, options.react_s, first_s)

    def run(self) -> History:
        """Runs the simulation to its end."""
        while self._active() or self._coming:
            if self._now_s > self._options.most_s:
                self._give_up(f"it is not done after {self._now_s:g} s")
                break
            self._step()
        jobs = tuple(self._jobs.values())
        return History(
            self._policy.name,
            self._nodes,
            jobs,
            tuple(self._rounds),
            tuple(self._spans),
        )

    def _open(self) -> list[RunningJob]:
        return [*self._active(), *self._coming]

    def _active(self) -> list[RunningJob]:
        """The waiting and running jobs, in the order of the trace.

        A trace may have a hundred thousand jobs. Therefore a call does not iterate over
        completed jobs and jobs that are submitted later.
        """
        count = len(self._there)
        while self._coming and self._coming[0].job.submitted_s <= self._now_s:
            self._there.append(self._coming.popleft())
        if len(self._there) > count:
            self._there.sort(key=lambda job: self._order[job.job.name])
        self._there = [
            job for job in self._there if job.completed_s is None and not job.failed
        ]
        return self._there

    def _step(self) -> None:
        """Simulates until the next look, and lets the policy decide if it must."""
        seconds = self._times.until_look_s(self._now_s)
        slowed = self._interfering()
        for job in self._active():
            if job.placement:
                self._advance(job, seconds, slowed)
        self._now_s += seconds
        self._leave_and_join()
        active = frozenset(job.job.name for job in self._active())
        for name in [name for name in self._current if name not in active]:
            self._end_span(name)
            del self._current[name]
        found = active, frozenset(self._away)
        if self._times.calls(self._now_s, found):
            self._decide()
            self._times.settle(found)

    def _decide(self) -> None:
        """Asks the policy for a decision and applies it."""
        nodes = self._nodes.without(self._away)
        if views := self._views(nodes.total):
            decided = decide_for_users(
                self._policy,
                self._now_s,
                views,
                nodes,
                self._current,
                self._options.users,
            )
            self._apply(views, nodes, decided)
        self._end_idleness()

    def _end_idleness(self) -> None:
        """Fails waiting jobs if no job has run for long and no node event will come."""
        comes = bool(self._coming or self._events)
        idle = bool(self._active()) and not (self._current or comes)
        self._idle = self._idle + 1 if idle else 0
        if self._idle >= _IDLE_ROUNDS:
            self._give_up(
                f"policy {self._policy.name!r} gives it nothing of an idle cluster "
                f"with {self._nodes.total} devices; its tables may have no "
                "configuration that fits, so take a larger cluster"
            )

    def _give_up(self, why: str) -> None:
        for job in self._open():
            job.failed = why
            if job.placement:
                job.reallocate((), "")
                self._end_span(job.job.name)

    def _advance(self, job: RunningJob, seconds: float, slowed: set[str]) -> None:
        slowdown = self._options.interference if job.job.name in slowed else 0.0
        stands_s = min(seconds, self._stands_s(job.job.name))
        try:
            job.advance(self._now_s + stands_s, seconds - stands_s, slowdown)
        except ScheduleError as error:
            # A job that cannot run fails. The other jobs continue.
            job.failed = str(error)
            job.reallocate((), "")

    def _interfering(self) -> set[str]:
        """Names of jobs on several nodes that share a node with another such job."""
        if not self._options.interference:
            return set()
        wide = {k: set(v) for k, v in self._current.items() if len(set(v)) > 1}
        users = collections.Counter(node for nodes in wide.values() for node in nodes)
        return {k for k, v in wide.items() if any(users[node] > 1 for node in v)}

    def _stands_s(self, name: str) -> float:
        """Seconds for which a job stands still from now on."""
        held = self._current.get(name, ())
        ends = [self._dead[node] for node in held if node in self._dead]
        return max(0.0, max([self._stands.get(name, 0.0), *ends]) - self._now_s)

    def _leave_and_join(self) -> None:
        while self._events and self._events[0].at_s <= self._now_s:
            event = self._events.pop(0)
            if event.away and event.noticed_s:
                noticed = event.at_s + event.noticed_s
                self._dead[event.node] = noticed
                later = dataclasses.replace(event, at_s=noticed, noticed_s=0.0)
                bisect.insort(self._events, later, key=lambda x: x.at_s)
                continue
            (self._away.add if event.away else self._away.discard)(event.node)
            lost = [k for k, v in self._current.items() if event.node in v]
            for name in lost if event.away else []:
                self._end_span(name)
                self._strand(name, self._current[name])
                self._lose(name, event.node)
            self._dead.pop(event.node, None)

    def _strand(self, name: str, held: Allocation) -> None:
        """Lets a job that gives up dead nodes stand still until it can go on."""
        ends = [self._dead[node] for node in held if node in self._dead]
        if not ends:
            return
        lose = getattr(self._jobs[name], "lose_state", None)
        fence_s = 0.0
        if lose is not None and len(ends) == len(held):
            fence_s = lose()
        self._stands[name] = max(ends) + fence_s

    def _lose(self, name: str, node: int) -> None:
        """Takes a node from a job; a job that can, continues on its other nodes."""
        job, held = self._jobs[name], self._current.pop(name)
        rest = tuple(other for other in held if other != node)
        goes_on = getattr(job, "goes_on", False) and self._policy.adapts != "nothing"
        if not (goes_on and rest):
            job.reallocate((), "")
            return
        self._current[name] = rest
        job.reallocate(placement_of(rest), job.plan, self._nodes.kinds_of(rest))
        self._begun[name] = self._now_s, rest, job.plan, job.batch

    def _views(self, devices: int) -> dict[str, JobView]:
        """What the policy sees of the jobs that the present devices can serve.

        As in a cluster, a job that needs more devices waits for nodes that join, and
        other jobs do not wait behind it.
        """
        oracle, fixed = self._policy.oracle, self._policy.adapts == "nothing"
        found = {
            job.job.name: job.view(self._now_s, oracle)
            for job in self._active()
            if not (fixed and job.job.devices > devices)
        }
        if not self._owned:
            return found
        return {
            name: dataclasses.replace(
                view,
                user=self._jobs[name].job.user,
                priority=self._jobs[name].job.priority,
            )
            for name, view in found.items()
        }

    def _apply(
        self, views: Mapping[str, JobView], nodes: Nodes, decided: Decisions
    ) -> None:
        chosen = {k: v for k, v in decided.allocations.items() if v}
        for name in chosen:
            if name not in views:
                raise ScheduleError(
                    f"policy {self._policy.name!r} gives devices to job {name!r}, "
                    "which is not there."
                )
        nodes.free(chosen)
        for name in views:
            new, old = chosen.get(name, ()), self._current.get(name, ())
            job = self._jobs[name]
            plan = decided.plans.get(name, job.plan)
            if new != old or (new and plan != job.plan):
                self._end_span(name)
                self._strand(name, old)
                job.reallocate(placement_of(new), plan, nodes.kinds_of(new))
                if new:
                    self._begun[name] = self._now_s, new, job.plan, job.batch
        self._current = chosen
        self._rounds.append(
            Round(
                self._now_s,
                len(views),
                sum(map(len, chosen.values())),
                nodes.total,
                (*decided.reasons, *new_waits(decided, self._waits)),
                decided.gap,
            )
        )
        self._waits = decided.waits

    def _end_span(self, name: str) -> None:
        if name in self._begun:
            start, allocation, plan, batch = self._begun.pop(name)
            done = self._jobs[name].completed_s
            end = self._now_s if done is None else done
            self._spans.append(Span(name, start, end, allocation, plan, batch))
