"""The scheduler: gives devices of a real cluster to jobs, as a policy decides in
rounds.

The scheduler stores each decision before it carries the decision out. So after a
scheduler was killed, a new scheduler can continue. The new scheduler finds the running
jobs by their folders.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from autopar.dispatch import store as states
from autopar.dispatch.backend import Backend, Ending, Look, Runs
from autopar.dispatch.specs import obstacle
from autopar.dispatch.store import JobRecord, Store
from autopar.dispatch.views import MOVES, MoveTimes, Numbering, view_of
from autopar.elastic.processes.members import SUSPENDED
from autopar.goodput.curves import noise_scale_of
from autopar.scheduler.jobs import Allocation, Decisions, JobView, Rounds, check_times
from autopar.scheduler.policies.base import SchedulingPolicy
from autopar.scheduler.users import UserLimits, Users, decide_for_users, new_waits

# The exit status of a job's processes that were told to end.
_INTERRUPTED = 130
# The states in which a job has no devices.
_WITHOUT = (states.PENDING, states.WAITING)
# The messages about wishes of owners (`autopar.dispatch.owners`).
_WISHES = {
    "": "it may run again",
    states.HOLD: "it is held",
    states.CANCEL: "it is to be cancelled",
}
# A job's goodput curve is corrected by at most this number of its last lines of
# progress.
_LINES = 200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Options of a scheduler.

    Attributes:
      interval_s: seconds between two regular decisions.
      react_s: seconds between two looks at jobs and nodes. If jobs or nodes have come
        or gone, the policy decides at once. None: it decides only regularly.
      moves: how many seconds a start and a change of devices cost a job, for policies.
      losses: a job has failed after it lost workers this many times in succession
        without doing a step between.
      leave_s: seconds that a job may take to give devices back before it is killed.
      stays: whether the scheduler waits for new jobs after all jobs have ended.
      users: quotas and shares by user.

    Raises:
      ScheduleError: a number is out of its range.
    """

    interval_s: float = 10.0
    react_s: float | None = 2.0
    moves: MoveTimes = MOVES
    losses: int = 3
    leave_s: float = 60.0
    stays: bool = False
    users: Users = dataclasses.field(default_factory=dict[str, UserLimits])

    def __post_init__(self) -> None:
        """Checks the times between decisions."""
        check_times(self.interval_s, self.react_s)


class Scheduler:
    """Gives the devices of a cluster to jobs, in rounds."""

    def __init__(
        self,
        store: Store,
        backend: Backend,
        runs: Runs,
        policy: SchedulingPolicy,
        settings: SchedulerSettings | None = None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Reads the state of an earlier scheduler, and finds the jobs that still run.

        Args:
          store: the file with the scheduler's state.
          backend: the cluster.
          runs: the processes of jobs.
          policy: the scheduling policy.
          settings: options of the scheduler.
          clock: returns seconds since the epoch.
          sleep: waits for a number of seconds.
          say: called with one line of text for each event.
        """
        self._store, self._backend, self._runs = store, backend, runs
        self._policy, self._set = policy, settings or SchedulerSettings()
        self._clock, self._sleep, self._say = clock, sleep, say
        self._jobs = store.jobs()
        self._lines: dict[str, list[Mapping[str, Any]]] = {}
        self._begin_s = store.begin_s(clock())
        self._looked_s = store.seconds("looked_s") or 0.0
        self._take_up()

    @property
    def now_s(self) -> float:
        """Seconds since the scheduler's first start."""
        return self._clock() - self._begin_s

    @property
    def jobs(self) -> Mapping[str, JobRecord]:
        """The jobs by name."""
        return self._jobs

    def run(self) -> None:
        """Runs rounds until all jobs have ended."""
        times = Rounds(self._set.interval_s, self._set.react_s, first_s=self.now_s)
        while True:
            self.round(times)
            ended = all(job.state in states.ENDED for job in self._jobs.values())
            if ended and not self._set.stays:
                return
            self._sleep(times.until_look_s(self.now_s))

    def round(self, times: Rounds | None = None) -> None:
        """Looks at all jobs; if a decision is due, lets the policy decide and carries
        it out.

        Args:
          times: tells whether a decision is due; None: it is due in this round.
        """
        now_s = self.now_s
        numbering = Numbering(self._store, self._backend.places())
        self._arrive(now_s)
        self._look(now_s)
        self._take_up_jobs(now_s)
        self._leave_lost_nodes(now_s, numbering)
        if times is None:
            self._decide(now_s, numbering)
        elif times.calls(now_s, self._state_key(numbering)):
            self._decide(now_s, numbering)
            times.settle(self._state_key(numbering))

    def _state_key(self, numbering: Numbering) -> Hashable:
        """Returns the nodes and the states of jobs. If they change, a decision is due.

        A job that has lost its workers counts as running here, so that it is restarted
        only at the next regular decision. The job's node may be dead without the
        cluster knowing yet. If the job were restarted on it at once, it would fail
        again.
        """
        found = [
            (job.name, states.RUNNING if job.losses else job.state)
            for job in self._jobs.values()
            if job.active
        ]
        return numbering.nodes, tuple(found)

    def _decide(self, now_s: float, numbering: Numbering) -> None:
        """Lets the policy decide, stores the decision, and carries it out."""
        kinds = numbering.kinds
        views = {
            job.name: view_of(
                job, now_s, kinds, self._set.moves, self._lines.get(job.name, ())
            )
            for job in list(self._jobs.values())
            if job.active and job.state != states.STOPPING
            # With a policy that serves jobs in order, a job that cannot run would block
            # all jobs behind it.
            if not self._obstacle(job, numbering)
        }
        if not views:
            return
        current = {
            name: numbering.allocation(self._jobs[name].places)
            for name in views
            if self._keeps(self._jobs[name])
        }
        decided = decide_for_users(
            self._policy, now_s, views, numbering.nodes, current, self._set.users
        )
        numbering.nodes.free(decided.allocations)
        # If a job waits because it has lost its workers, it keeps this reason.
        told = {n: j.reason for n in views if not (j := self._jobs[n]).losses}
        more = new_waits(decided, {**decided.waits, **told})
        decided = dataclasses.replace(decided, reasons=(*decided.reasons, *more))
        self._store.add_decisions(now_s, decided)
        for reason in decided.reasons:
            self._say(f"{now_s:.0f} s: {reason.text}")
        self._apply(decided, views, numbering)
        for name in views:
            job, why = self._jobs[name], decided.waits.get(name, "")
            if job.state == states.WAITING and job.reason != why and not job.losses:
                self._update(job, reason=why)

    def _obstacle(self, job: JobRecord, numbering: Numbering) -> str:
        """Returns why a waiting job cannot run on the current nodes; '' if it can.

        The reason is stored.
        """
        if job.state != states.WAITING:
            return ""
        adapts = self._policy.adapts != "nothing"
        devices, kinds = numbering.nodes.total, numbering.kinds
        wrong = obstacle(job.handed, devices, kinds, adapts=adapts)
        if wrong and job.reason != wrong and not job.losses:
            self._update(job, reason=wrong)
            self._say(f"job {job.name} waits: {wrong}")
        return wrong

    def _keeps(self, job: JobRecord) -> bool:
        """Whether the policy sees which devices a job has now.

        A job that has lost a node has fewer devices than its owner asks for. If the
        policy never gives another number than the requested one, it sees the job
        without devices. The policy then gives the job all requested devices, or lets
        the job wait.
        """
        asked = job.handed.spec.devices
        return bool(job.places) and (
            self._policy.adapts != "nothing" or job.given_devices == asked
        )

    # What happens to jobs.

    def _take_up(self) -> None:
        """Takes over the jobs that an earlier scheduler left running.

        If the supervisor of a job has died, the scheduler starts a new one, which finds
        the workers. If stored decisions were not carried out yet, the next round does
        it.
        """
        for job in self._jobs.values():
            if job.state in (states.RUNNING, states.STOPPING):
                look = self._runs.look(job)
                self._note(job, look.lines)
                if not look.alive and _end_of(job, look) is None:
                    self._say(f"job {job.name}: its process is started again")
                    self._runs.start(job)
                elif look.alive and job.state == states.RUNNING and job.places:
                    self._runs.move(job)

    def _take_up_jobs(self, now_s: float) -> None:
        """Reads new jobs and owners' wishes from the store; carries out the wishes."""
        wishes = self._store.wishes()
        if not wishes.keys() <= self._jobs.keys():
            self._jobs = {**self._store.jobs(), **self._jobs}
        for name, wish in wishes.items():
            job = self._jobs[name]
            if job.wish != wish:
                self._jobs[name] = dataclasses.replace(job, wish=wish)
                self._say(f"job {name}: {_WISHES[wish]}")
        for job in list(self._jobs.values()):
            if job.wish == states.CANCEL and job.state in _WITHOUT:
                self._take_end(job, Ending(code=_INTERRUPTED), now_s)
            elif job.wish == states.CANCEL and job.state not in states.ENDED:
                self._runs.kill(self._update(job, state=states.STOPPING))
            elif job.wish == states.HOLD:
                self._suspend(job)
        self._settle([job.name for job in self._jobs.values() if job.wish])

    def _arrive(self, now_s: float) -> None:
        for job in list(self._jobs.values()):
            if job.state == states.PENDING and job.submitted_s <= now_s:
                self._update(job, state=states.WAITING)

    def _look(self, now_s: float) -> None:
        """Looks at the processes of all jobs that have devices, and updates the
        jobs.
        """
        passed_s = max(now_s - self._looked_s, 0.0)
        self._looked_s = now_s
        self._store.set_facts({"looked_s": str(now_s)})
        for job in list(self._jobs.values()):
            if job.state not in (states.RUNNING, states.STOPPING):
                continue
            served = job.served_device_s + passed_s * job.given_devices
            look = self._runs.look(self._update(job, served_device_s=served))
            job = self._note(self._jobs[job.name], look.lines)
            if ending := _end_of(job, look):
                self._take_end(job, ending, now_s)
            elif not job.finite:
                self._runs.kill(job)  # its loss is not finite: more steps are useless
            elif not look.alive:
                self._runs.start(job)
            elif job.state == states.STOPPING:
                self._runs.suspend(job)
            elif (
                look.wanted is not None
                and look.wanted != job.given_devices
                and job.places
            ):
                # The supervisor wants another number of workers than the job has
                # devices: workers have died, or it did not get an earlier order to
                # move.
                self._runs.move(job)

    def _note(self, job: JobRecord, lines: Sequence[Mapping[str, Any]]) -> JobRecord:
        """Updates a job by its new lines of progress."""
        if not lines:
            return job
        kept = self._lines.setdefault(job.name, [])
        before, batch = job.devices, job.batch
        known = {name: kind for name, _, kind in self._store.nodes()}
        kinds = {known[name] for name in job.places}
        for line in lines:
            # The first steps after a change of devices or batch size are slower, so
            # they are not measured.
            same = line["devices"] == before == job.given_devices
            if same and line["batch"] == (batch or line["batch"]) and len(kinds) == 1:
                kept.append({**line, "device": min(kinds)})
            before, batch = line["devices"], line["batch"]
        del kept[:-_LINES]
        last = lines[-1]
        further = last["step"] > job.step
        told = (noise_scale_of(line) for line in reversed(lines))
        phi = next((found for found in told if found is not None), job.noise_scale)
        return self._update(
            job,
            step=last["step"],
            position=last["position"],
            devices=last["devices"],
            step_s=last["step_s"],
            loss=last["loss"],
            finite=last["finite"],
            told_s=last["time_s"] - self._begin_s,
            losses=0 if further else job.losses,
            batch=last["batch"],
            noise_scale=phi,
            microbatches=last.get("microbatches", 1),
            scheme=last.get("scheme", ""),
            codecs=" ".join(last.get("codecs", ())),
            worth=last.get("progress", job.worth),
        )

    def _take_end(self, job: JobRecord, ending: Ending, now_s: float) -> None:
        """Updates a job after its processes have ended."""
        self._store.span(job.name, now_s, {})
        if job.wish == states.CANCEL and ending.code:
            self._update(
                job, state=states.CANCELLED, places={}, reason="", ended_s=now_s
            )
            self._say(f"{now_s:.0f} s: job {job.name} is cancelled")
            return
        gives_back = job.state == states.STOPPING and ending.code == _INTERRUPTED
        if job.finite and (ending.code == SUSPENDED or gives_back):
            self._update(job, state=states.WAITING, places={}, reason="")
            return
        if ending.lost and job.finite and job.losses + 1 < self._set.losses:
            self._say(f"job {job.name} lost its workers: {ending.reason}")
            lost = job.losses + 1
            self._update(
                job, state=states.WAITING, places={}, reason=ending.reason, losses=lost
            )
            return
        reason = ending.reason if ending.code else ""
        if not job.finite:
            reason = f"its loss is not finite after {job.step} steps"
        state = states.FAILED if ending.code or reason else states.DONE
        told_s = job.told_s if state == states.DONE else None
        self._update(
            job,
            state=state,
            places={},
            reason=reason,
            ended_s=now_s if told_s is None else min(told_s, now_s),
        )
        why = f": {reason}" if reason else ""
        self._say(f"{now_s:.0f} s: job {job.name} is {state}{why}")

    def _leave_lost_nodes(self, now_s: float, numbering: Numbering) -> None:
        """Takes nodes that the cluster has lost away from jobs."""
        for job in list(self._jobs.values()):
            there = numbering.there(job.places)
            if there != dict(job.places):
                self._say(f"{now_s:.0f} s: job {job.name} lost a node")
                self._store.span(job.name, now_s, there)
                self._update(job, places=there)

    # Decisions.

    def _apply(
        self, decided: Decisions, views: Mapping[str, JobView], numbering: Numbering
    ) -> None:
        """Carries out a decision: first takes devices from jobs, then gives devices to
        jobs.
        """
        chosen = {name: numbering.places(self._enough(name, decided)) for name in views}
        before = {name: dict(self._jobs[name].places) for name in views}
        changed = [name for name in views if chosen[name] != before[name]]
        leaving = [name for name in changed if not chosen[name]]
        for name in leaving:
            self._suspend(self._jobs[name])
        self._settle(leaving)
        smaller = [n for n in changed if chosen[n] and _within(chosen[n], before[n])]
        others = [n for n in changed if chosen[n] and n not in smaller]
        for name in (*smaller, *others):
            self._give(self._jobs[name], chosen[name])

    def _enough(self, name: str, decided: Decisions) -> Allocation:
        """The devices that a decision gives a job; none if they are fewer than the job
        needs.
        """
        given, least = (
            decided.allocations.get(name, ()),
            self._jobs[name].handed.spec.min,
        )
        if 0 < len(given) < least:
            self._say(f"job {name} waits: {len(given)} devices, below min = {least}")
            return ()
        return given

    def _suspend(self, job: JobRecord) -> None:
        """Makes a job save its state, give all its devices back, and wait."""
        if job.state != states.RUNNING:
            return
        wrong = self._runs.suspend(self._update(job, state=states.STOPPING))
        if wrong:
            self._say(f"job {job.name}: {wrong}")  # the next look asks again

    def _settle(self, names: Sequence[str]) -> None:
        """Waits until jobs have given their devices back; kills those that take too
        long.
        """
        end = self._clock() + self._set.leave_s
        while self._clock() < end:
            open_ = [n for n in names if self._jobs[n].state == states.STOPPING]
            if not open_:
                return
            self._sleep(0.1)
            for name in open_:
                look = self._runs.look(self._jobs[name])
                job = self._note(self._jobs[name], look.lines)
                if ending := _end_of(job, look):
                    self._take_end(job, ending, self.now_s)
        for name in names:
            if self._jobs[name].state == states.STOPPING:
                self._say(f"job {name} did not give its devices back, and is killed")
                self._runs.kill(self._jobs[name])

    def _give(self, job: JobRecord, places: Mapping[str, int]) -> None:
        """Starts a job on given devices, or moves it to them."""
        now_s = self.now_s
        self._store.span(job.name, now_s, places)
        given = sum(places.values())
        fields: dict[str, Any] = {
            "places": dict(places),
            "tried": max(job.tried, given),
            "moves": job.moves + (job.attempt > 0),
        }
        if job.state == states.RUNNING:
            moved = self._update(job, **fields)
            if wrong := self._runs.move(moved):
                self._say(f"job {job.name}: {wrong}")  # the next round tries again
            return
        started = job.started_s if job.started_s is not None else now_s
        made = self._update(
            job,
            **fields,
            state=states.RUNNING,
            reason="",
            attempt=job.attempt + 1,
            started_s=started,
        )
        self._runs.start(made)

    def _update(self, job: JobRecord, **fields: Any) -> JobRecord:
        made = self._store.update(job, **fields)
        self._jobs[job.name] = made
        return made


def _end_of(job: JobRecord, look: Look) -> Ending | None:
    """How a job ended; None if it has not ended.

    A job that was told to end and has no process any more has ended.
    """
    ends = job.wish == states.CANCEL or not job.finite
    gone = ends and not look.alive
    return look.ending or (Ending(code=_INTERRUPTED) if gone else None)


def _within(new: Mapping[str, int], old: Mapping[str, int]) -> bool:
    """Whether ``new`` has at most as many devices of each node as ``old``."""
    return all(n <= old.get(name, 0) for name, n in new.items())
