"""Finds the worker for which all other workers of a run wait.

A world is a set of processes that train together.

`HangWatch` knows three things about a worker: what its heartbeats say
(`autopar.elastic.processes.activity`), when the last heartbeat came, and, for processes
of this machine, the state of the process in ``/proc``. A worker's place is the part of
a step that it is in. A finding names a worker, and is of one of these kinds:

* ``stopped``: a signal has stopped the process;
* ``silent``: no heartbeat has come for half of the time after which the supervisor
  kills the worker;
* ``own``: the worker has long been in code that it runs alone (the user's script, the
  source of samples, a save, the compiler), and other workers have waited in the step's
  program for as long;
* ``task``: all workers are in the same step of a pipeline, and only this worker is
  inside the call of a pipeline task;
* ``behind``: the worker is inside the program of a step that all other workers have
  finished;
* ``all``: all workers have long been at the same place of the same step, so no single
  worker can be named;
* ``slow``: in each step the worker spends more time than the others in code that it
  runs alone.

A late finding is better than a wrong one. So there are no findings in the first steps
of a world, which compile and connect. Later a worker must be without progress for
several times the usual time of a step.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.elastic.processes.activity import FIRST_STEPS, PLACES
from autopar.elastic.processes.members import (
    MemberLimits,
    ProcessId,
    WorkerMember,
)
from autopar.elastic.processes.network import split_address
from autopar.units import name_numbers, runs_of, seconds_text

# For each place, a worker is named only after this many seconds without progress there.
# A user's script may write logs, and a save may take long. Compilation may take ten
# minutes.
_LEAST_S = {"samples": 5.0, "program": 5.0, "script": 8.0, "after": 60.0, "save": 60.0}
_COMPILE_S, _FIRST_S, _ALL_S = 600.0, 60.0, 60.0
# A worker is named only after _USUAL times the usual seconds of a step, and after
# _LONGEST times the longest step of the last thousand. For the finding ``all``,
# _ALL_USUAL takes the place of _USUAL.
_USUAL, _LONGEST, _ALL_USUAL = 10.0, 2.0, 20.0
# After this many seconds without a heartbeat, the watch checks the state of the
# process.
_STOPPED_S = 2.0
_HEARD_S = 1.5
# A worker is ``slow`` if the code that it runs alone takes at least _SLOW times as long
# in a step as for the other workers. The difference must be at least the fraction
# _SLOW_SHARE of a step and at least _SLOW_LEAST_S seconds. The difference is measured
# over _SLOW_STEPS steps, and must last for _SLOW_S seconds.
_SLOW, _SLOW_SHARE, _SLOW_LEAST_S, _SLOW_STEPS, _SLOW_S = 3.0, 0.5, 0.05, 20, 10.0
# The places where a worker runs code that does not depend on other workers, and the
# places where it may wait for other workers.
_OWN, _WAITS = ("samples", "script", "after", "save"), ("program", "finish")
_IN_WORDS = {
    "samples": "in the source of samples for step {step}",
    "script": "in its script before step {next}",
    "after": "keeping the state of step {step}",
    "save": "saving after step {step}",
    "program": "inside the program {program} of step {step}",
    "finish": "waiting for the end of the run",
    "order": "waiting for the start of step {step}",
}


def process_state(process: ProcessId | None) -> str:
    """The state of a local process as a letter, such as ``T`` if it is stopped.

    The letter is field 3 of proc(5). The result is '' if the process is on another
    machine or has ended.
    """
    if process is None or ProcessId.of(process.pid) != process:
        return ""
    try:
        text = pathlib.Path(f"/proc/{process.pid}/stat").read_text()
        return text.rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


@dataclasses.dataclass(slots=True)
class Seen:
    """The contents of a worker's last heartbeat.

    Attributes:
      doing: see `autopar.elastic.processes.activity.Activity.data`.
      since_s: time on the watch's clock at which the first heartbeat from its present
        place came.
      heard_s: time on the watch's clock at which the heartbeat came.
    """

    doing: Mapping[str, Any]
    since_s: float
    heard_s: float

    @property
    def place(self) -> str:
        """The worker's place in a step; ``compile`` if it compiles, traces or plans."""
        return "compile" if self.doing.get("compiles") else self.doing["place"]

    @property
    def position(self) -> tuple[int, int]:
        """The step, and the place as a number that grows within the step."""
        return self.doing["step"], PLACES.index(self.doing["place"])

    @property
    def progress(self) -> tuple[Any, ...]:
        """A value that changes whenever the worker makes progress."""
        task = self.doing.get("task", {})
        return (*self.position, task.get("number"), task.get("inside"))

    @property
    def is_known(self) -> bool:
        """Whether the worker has done enough steps that their usual time is known."""
        return self.doing.get("steps", 0) > FIRST_STEPS

    def stalled_s(self, now: float) -> float:
        """Seconds without progress, counted by the worker or by the watch.

        The smaller of the two counts is returned.
        """
        said = self.doing["for_s"] + max(0.0, now - self.heard_s)
        return min(said, now - self.since_s)


@dataclasses.dataclass(slots=True)
class HangFinding:
    """A worker for which others wait, or which does not answer.

    Attributes:
      kind: kind of the finding; see the module docstring.
      worker: number of the worker; None: no worker can be named.
      data: data for the log.
      progress: the progress of the workers when the finding began; the finding ends
        when it changes.
      begun_s: when the finding began, on the watch's clock.
    """

    kind: str
    worker: int | None
    data: dict[str, Any]
    progress: Mapping[int, tuple[Any, ...]]
    begun_s: float


class HangWatch:
    """Checks the workers of a world repeatedly.

    Attributes:
      hang_s: worker -> total seconds for which findings other than ``slow`` named it.
    """

    def __init__(
        self, limits: MemberLimits, state_of: Callable[..., str] = process_state
    ) -> None:
        """Starts without heartbeats.

        Args:
          limits: the run's limits on times.
          state_of: returns the state of a local process, like `process_state`.
        """
        self._limits, self._state_of = limits, state_of
        self.seen: dict[int, Seen] = {}
        self._open: dict[tuple[str, int | None], HangFinding] = {}
        self._slow_since: dict[int, float] = {}
        self._slow_until: dict[int, float] = {}
        self._looked_s: float | None = None
        self.hang_s: dict[int, float] = {}

    def hear(self, worker: int, doing: Mapping[str, Any] | None, now: float) -> None:
        """Records a worker's heartbeat; ``doing`` is None if it has no contents."""
        if doing is None:
            return
        new, old = Seen(doing, now, now), self.seen.get(worker)
        if old is not None and old.progress == new.progress:
            new.since_s = old.since_s
        self.seen[worker] = new

    def excuse(self, away_s: float) -> None:
        """Shifts all times by a period during which the supervisor did not run."""
        for seen in self.seen.values():
            seen.since_s += away_s
            seen.heard_s += away_s

    def look(
        self,
        now: float,
        members: Mapping[int, WorkerMember],
        world: Sequence[int],
        *,
        leaves: bool,
    ) -> list[tuple[str, dict[str, Any]]]:
        """Returns what began or ended since the last call, as events for the log.

        Args:
          now: seconds on the supervisor's clock.
          members: the workers.
          world: the workers that train together, by rank.
          leaves: whether the world is being left. The workers that have left it wait
            for the others.
        """
        self._count(now)
        for worker in self.seen.keys() - members.keys():
            del self.seen[worker]
        found = {(f.kind, f.worker): f for f in self._find(now, members, world, leaves)}
        events: list[tuple[str, dict[str, Any]]] = []
        for key, finding in list(self._open.items()):
            if how := self._how_over(finding, now, members):
                del self._open[key]
                for_s = round(now - finding.begun_s, 1)
                data = {"worker": finding.worker, "hang": finding.kind}
                data |= {"seconds": for_s, "how": how}
                events.append(("hang over", {**data, "text": _end_text(data)}))
        named = {worker for _, worker in self._open}
        for key, finding in found.items():
            if key in self._open:
                self._open[key].data = finding.data  # with the new duration
            elif finding.worker not in named:
                self._open[key] = finding
                events.append(("hang", finding.data))
        return events

    def texts(self) -> list[str]:
        """The present findings, each as a sentence."""
        return [finding.data["text"] for finding in self._open.values()]

    def named_workers(self) -> frozenset[int]:
        """The workers that are named by open findings of any kind except ``slow``."""
        found = self._open.values()
        return frozenset(f.worker for f in found if f.worker is not None and _hangs(f))

    def describe(self, worker: int, now: float) -> str:
        """Where a worker is, in words; '' if it has not reported its place."""
        if (seen := self.seen.get(worker)) is None or seen.doing["step"] < 0:
            return ""
        for_s = seen.doing["for_s"] + max(0.0, now - seen.heard_s)
        since = f" for {for_s:.0f} s" if for_s >= 2.0 else ""
        return f"{_place_text(seen)}{since}"

    def _count(self, now: float) -> None:
        passed = 0.0 if self._looked_s is None else now - self._looked_s
        self._looked_s = now
        for worker in self.named_workers():
            self.hang_s[worker] = self.hang_s.get(worker, 0.0) + passed

    def _how_over(
        self,
        finding: HangFinding,
        now: float,
        members: Mapping[int, WorkerMember],
    ) -> str:
        """How a finding has ended, in words; '' while it still holds."""
        worker, kind = finding.worker, finding.kind
        if worker is not None:
            if (member := members.get(worker)) is None:
                return "it is gone"
            if kind in ("stopped", "silent"):
                return "it answers" if now - member.heard_s < _HEARD_S else ""
            if member.phase != "joined":
                return "it has left its world"
        if kind == "slow":
            holds = now < self._slow_until.get(worker or 0, 0.0)
            return "" if holds else "it is as fast as the others"
        there = {w: s.progress for w, s in self.seen.items()}
        moved = [w for w, p in finding.progress.items() if there.get(w) != p]
        return "it goes on" if moved else ""

    def _find(
        self,
        now: float,
        members: Mapping[int, WorkerMember],
        world: Sequence[int],
        leaves: bool,
    ) -> list[HangFinding]:
        make = _Maker(now, members, world, self.seen)
        quiet = self._quiet(make)
        inside = [w for w in world if _is_inside(members.get(w)) and w in self.seen]
        fresh = all(now - self.seen[w].heard_s < 2 * _HEARD_S for w in inside)
        if quiet or not fresh or not inside:
            return quiet  # others wait for these, or too little is known
        gone = _waiting_outside(members, now) if leaves else {}
        stuck = _own_code(make, inside, gone)
        # A worker inside a program may be waiting for a worker that has left or died.
        if not stuck and not leaves and len(inside) == len(world):
            stuck = _in_program(make, inside) or _all_alike(make, inside)
            if not stuck:
                return self._slow(make, inside)
        return stuck

    def _quiet(self, make: _Maker) -> list[HangFinding]:
        """Findings for the workers that send no heartbeats."""
        found: list[HangFinding] = []
        for worker, member in make.members.items():
            silent_s = make.now - member.heard_s
            if not member.connected or silent_s < _STOPPED_S:
                continue
            ready = member.ready or {}
            process = ProcessId.from_data(ready.get("process"))
            state = self._state_of(process)
            if state in ("T", "t"):
                found.append(make.finding("stopped", worker, silent_s))
            elif (
                member.formed
                and (seen := self.seen.get(worker)) is not None
                and seen.is_known
                and silent_s >= max(_LEAST_S["program"], self._limits.silent_s / 2)
            ):
                found.append(make.finding("silent", worker, silent_s, state=state))
        return found

    def _slow(self, make: _Maker, inside: Sequence[int]) -> list[HangFinding]:
        """Findings for workers that are ``slow``."""
        found: list[HangFinding] = []
        own = {w: _own_s(self.seen[w].doing) for w in inside}
        for worker in inside:
            doing = self.seen[worker].doing
            others = [x for w, x in own.items() if w != worker]
            if not others or doing.get("measured", 0) < _SLOW_STEPS:
                continue
            usual_s = statistics.median(others)
            more_s = own[worker] - usual_s
            share_s = max(_SLOW_LEAST_S, _SLOW_SHARE * doing["step_s"])
            if own[worker] <= _SLOW * usual_s or more_s <= share_s:
                continue
            if make.now > self._slow_until.get(worker, -math.inf):
                self._slow_since[worker] = make.now
            self._slow_until[worker] = make.now + _SLOW_S
            if (for_s := make.now - self._slow_since[worker]) >= _SLOW_S:
                waits = [w for w in inside if w != worker]
                more = {"own_s": own[worker], "others_s": usual_s}
                found.append(make.finding("slow", worker, for_s, waits=waits, **more))
        return found


def _hangs(finding: HangFinding) -> bool:
    return finding.kind not in ("slow", "all")


def _is_inside(member: WorkerMember | None) -> bool:
    """Whether a worker trains: it has the training state in its world."""
    return member is not None and member.phase == "joined" and member.formed


def _waiting_outside(
    members: Mapping[int, WorkerMember], now: float
) -> dict[int, float]:
    """Worker that has left the world -> seconds since it left."""
    return {w: now - m.since_s for w, m in members.items() if m.phase == "ready"}


def _own_s(doing: Mapping[str, Any]) -> float:
    return doing.get("samples_s", 0.0) + doing.get("script_s", 0.0)


def _limit_s(make: _Maker, workers: Sequence[int], place: str) -> float:
    """Seconds without progress after which a worker at a place is named."""
    seen = [make.seen[w] for w in workers]
    usual_s = max((s.doing.get("step_s", 0.0) for s in seen), default=0.0)
    longest_s = max((s.doing.get("longest_s", 0.0) for s in seen), default=0.0)
    least_s = _COMPILE_S if place == "compile" else _LEAST_S[place]
    if not all(s.is_known for s in seen):
        least_s = max(least_s, _FIRST_S)
    return max(least_s, _USUAL * usual_s, _LONGEST * longest_s)


def _own_code(
    make: _Maker, inside: Sequence[int], outside: Mapping[int, float]
) -> list[HangFinding]:
    """Findings for workers in code that they run alone, while others wait for them.

    Args:
      make: makes findings.
      inside: the workers that are still in the world.
      outside: worker that has left the world -> seconds since it left.
    """
    found: list[HangFinding] = []
    for worker in inside:
        seen = make.seen[worker]
        if seen.doing["place"] not in _OWN and seen.place != "compile":
            continue
        waits = dict(outside)
        for other in inside:
            there = make.seen[other]
            if there.place in _WAITS and there.position > seen.position:
                waits[other] = there.stalled_s(make.now)
        held_s = min(seen.stalled_s(make.now), max(waits.values(), default=0.0))
        if waits and held_s >= _limit_s(make, inside, seen.place):
            more = {"waits": sorted(waits)}
            found.append(make.finding("own", worker, seen.stalled_s(make.now), **more))
    return found


def _in_program(make: _Maker, inside: Sequence[int]) -> list[HangFinding]:
    """A finding for the one worker that is still inside a step's program."""
    seen = {w: make.seen[w] for w in inside}
    first = min(s.position for s in seen.values())
    late = [w for w, s in seen.items() if s.position == first]
    if len(inside) < 2 or any(seen[w].place != "program" for w in late):
        return []
    stalled_s = min(s.stalled_s(make.now) for s in seen.values())
    if stalled_s < _limit_s(make, inside, "program"):
        return []
    if len(late) == 1 and all(
        s.place in _WAITS for w, s in seen.items() if w not in late
    ):
        waits = [w for w in inside if w not in late]
        return [make.finding("behind", late[0], stalled_s, waits=waits)]
    if len(late) < len(inside):
        return []
    return _issuing(make, inside, stalled_s)


def _issuing(make: _Maker, inside: Sequence[int], for_s: float) -> list[HangFinding]:
    """A finding for the worker inside a pipeline task while the others wait for it."""
    tasks = {w: task for w in inside if (task := make.seen[w].doing.get("task"))}
    called = [w for w, task in tasks.items() if task["inside"]]
    if len(called) != 1 or len(tasks) < len(inside):
        return []
    (worker,), waits = called, [w for w in inside if w not in called]
    # The worker may itself be waiting for tasks that other workers have not started
    # yet.
    number = tasks[worker]["number"]
    if any(tasks[w]["left"] and tasks[w]["number"] < number for w in waits):
        return []
    return [make.finding("task", worker, for_s, waits=waits, task=tasks[worker])]


def _all_alike(make: _Maker, inside: Sequence[int]) -> list[HangFinding]:
    """A finding if all workers have been at one place of one step for long."""
    seen = [make.seen[w] for w in inside]
    places = {(s.position, s.place) for s in seen}
    if len(places) > 1 or seen[0].place not in ("program", "samples"):
        return []
    stalled_s = min(s.stalled_s(make.now) for s in seen)
    usual_s = max(s.doing.get("step_s", 0.0) for s in seen)
    limit_s = _limit_s(make, inside, seen[0].place)
    if stalled_s < max(limit_s, _ALL_S, _ALL_USUAL * usual_s):
        return []
    return [make.finding("all", None, stalled_s)]


# The sentences about findings that users read.


@dataclasses.dataclass(frozen=True, slots=True)
class _Maker:
    """Makes findings from the last heartbeats."""

    now: float
    members: Mapping[int, WorkerMember]
    world: Sequence[int]
    seen: Mapping[int, Seen]

    def finding(
        self,
        kind: str,
        worker: int | None,
        for_s: float,
        *,
        waits: Sequence[int] | None = None,
        **more: Any,
    ) -> HangFinding:
        """Makes a finding, with all data about the worker.

        Args:
          kind: kind of the finding; see the module docstring.
          worker: number of the worker.
          for_s: seconds since the worker last made progress, or sent a heartbeat.
          waits: the workers that wait for the named worker; None: all other workers
            that train.
          **more: further data for this kind of finding.
        """
        there = [w for w in self.world if _is_inside(self.members.get(w))]
        asked = there if worker is None else [worker]
        if waits is None:
            inside = worker in self.world
            waits = [w for w in there if w != worker] if inside else []
        seen = self.seen.get(asked[0]) if asked else None
        doing = {} if seen is None else seen.doing
        keys = ("place", "step", "program", "frame", "busy")
        keys = (*keys, "samples_s", "script_s")
        data: dict[str, Any] = {
            "worker": worker,
            "hang": kind,
            **({} if worker is None else self._who(worker)),
            **{key: doing[key] for key in keys if key in doing},
            "seconds": round(for_s, 1),
            "since_s": round(time.time() - for_s, 1),
            "waits": list(waits),
            **more,
        }
        data["text"] = _text(data, seen, there)
        progress = {w: self.seen[w].progress for w in asked if w in self.seen}
        return HangFinding(kind, worker, data, progress, self.now - for_s)

    def _who(self, worker: int) -> dict[str, Any]:
        """Process number, host and devices of a worker."""
        member = self.members[worker]
        ready = member.ready or {}
        host = split_address(ready["address"])[0] if "address" in ready else None
        devices: list[int] = []
        if worker in self.world and ready.get("devices"):
            first = self.world.index(worker) * ready["devices"]
            devices = list(range(first, first + ready["devices"]))
        return {"pid": member.pid, "host": host, "devices": devices}


def _who_text(data: Mapping[str, Any]) -> str:
    parts = [] if data["pid"] is None else [f"process {data['pid']}"]
    if data["host"] not in (None, "127.0.0.1"):
        parts.append(f"host {data['host']}")
    for run in runs_of(data["devices"]):
        last = f" to {run[-1]}" if len(run) > 1 else ""
        parts.append(f"device{'s' if last else ''} {run[0]}{last}")
    return f"worker {data['worker']}" + (f" ({', '.join(parts)})" if parts else "")


def _place_text(seen: Seen) -> str:
    """The place of a worker, as the end of a sentence."""
    doing, place = seen.doing, seen.place
    if place == "compile":
        return f"compiling, tracing or planning in step {doing['step']}"
    name = f"'{doing['program']}'" if doing.get("program") else "that is compiled"
    step = doing["step"]
    text = _IN_WORDS[place].format(step=step, next=step + 1, program=name)
    if place == "program" and (task := doing.get("task")):
        return f"{text}, has issued {_task_text(task)}"
    return text


def _task_text(task: Mapping[str, Any]) -> str:
    if task["number"] > task["of"]:
        return f"'{task['task']}', behind the {task['of']} tasks of the schedule"
    return f"task {task['number']} of {task['of']} '{task['task']}'"


def _how_text(data: Mapping[str, Any]) -> str:
    """Which line of the user's code runs, and whether it uses CPU time."""
    parts = [data["frame"]] if data.get("frame") else []
    share = data.get("busy", 0.25)
    if share > 0.5:
        parts.append("it computes")
    elif share < 0.05:
        parts.append("it sleeps, or waits for something")
    return f" ({'; '.join(parts)})" if parts else ""


def _text(data: Mapping[str, Any], seen: Seen | None, there: Sequence[int]) -> str:
    """A finding as a sentence."""
    kind, for_s = data["hang"], f"{data['seconds']:.0f} s"
    step = f" in step {data['step']}" if data.get("step", -1) >= 0 else ""
    waits = ""
    if data["waits"]:
        verb = "waits" if len(data["waits"]) == 1 else "wait"
        waits = f"; {name_numbers('worker', data['waits'])} {verb} for it"
    if kind == "all":
        assert seen is not None
        many = f"all {len(there)} workers have"
        if len(there) == 1:
            many = f"worker {there[0]} has"
        return (
            f"{many} been {_place_text(seen)} for {for_s}{_how_text(data)}; "
            "`autopar workers --stacks` shows where"
        )
    who = _who_text(data)
    match kind:
        case "stopped":
            what = f"is stopped by a signal{step}: nothing was heard of it for {for_s}"
        case "silent" if data["state"]:
            what = (
                f"has said nothing for {for_s}{step}: its process is there, but its "
                "Python threads do not run, as in a call that keeps the interpreter"
            )
        case "silent":
            what = (
                f"has said nothing for {for_s}{step}: its process is stopped, or its "
                "host or the network is down"
            )
        case "task":
            what = f"has been{step}, {_task_text(data['task'])}, for {for_s}"
        case "behind":
            assert seen is not None
            what = f"has been {_place_text(seen)} for {for_s}; the others are done"
        case "slow":
            where = "script" if data["script_s"] > data["samples_s"] else "samples"
            code = "its script" if where == "script" else "its source of samples"
            what = (
                f"is slow: {code} takes {seconds_text(data['own_s'])} of each step, "
                f"and {seconds_text(data['others_s'])} in other workers"
            )
        case _:
            assert seen is not None
            what = f"has been {_place_text(seen)} for {for_s}{_how_text(data)}"
    return f"{who} {what}{waits}"


def _end_text(data: Mapping[str, Any]) -> str:
    if data["worker"] is None:
        return f"all workers made no progress for {data['seconds']:.0f} s: they go on"
    slow = "was slow" if data["hang"] == "slow" else "made no progress"
    return f"worker {data['worker']} {slow} for {data['seconds']:.0f} s: {data['how']}"
