"""The supervisor decides which workers train together.

A world is a set of worker processes that train together. The supervisor forms one world
after another from the available workers. `Supervisor` is a state machine that a single
thread drives. The supervisor gets workers' messages by `take`, and acts only through
the methods of `Actions`, such as sending orders to workers. It does not use JAX.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.elastic.processes import members
from autopar.elastic.processes.breaks import Breaks
from autopar.elastic.processes.members import (
    SUSPENDED,
    Actions,
    MemberLimits,
    Message,
    ProcessId,
    WorkerMember,
    choose_workers,
    describe_world,
    latest_state,
    processes_of,
    side_by_side,
)
from autopar.elastic.processes.recovery import RESPAWNED
from autopar.elastic.processes.watching import HangWatch
from autopar.units import number_of

# Seconds that a world may take to save its state.
_SAVE_S = 300.0
# Descriptions of a run's end, by the command that ended it.
_ENDED = {"suspend": "suspended", "stop": "stopped"}
# Seconds for which other workers may go on after the script of one worker has ended
# without an error.
_EARLY_S = 5.0


class Supervisor:
    """Forms worlds of workers and watches over them.

    Attributes:
      watch: finds out for which worker the other workers wait.
    """

    def __init__(
        self,
        limits: MemberLimits,
        actions: Actions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts without workers (see `begin`); ``clock`` returns seconds."""
        self.limits, self._do, self._clock = limits, actions, clock
        self.members: dict[int, WorkerMember] = {}
        self.watch = HangWatch(limits)
        self.generation = self.numbers = 0
        self.wanted = limits.processes
        self.world: tuple[int, ...] = ()
        # The cluster for which the workers plan, as plain data; None: the cluster that
        # the script names.
        self.cluster: Any = None
        # What the supervisor does now: gather workers, run a world, pause it, or
        # suspend or stop the run.
        self.state = "gather"
        self.result: int | None = None
        self.reason = ""
        self._planned_for: Any = None
        # The cluster for which the first worker prepares a plan, the number of this
        # preparation, and the time until which the world trains on without it.
        self._next: Any = None
        self._preparation, self._prepare_by_s = 0, math.inf
        self._leaving: frozenset[int] = frozenset()
        self.lost = False
        # "suspend" or "stop" if the run will end after a step; '' while it goes on.
        self._ending = ""
        # A text about the first worker that failed while the run was ending; '' without
        # one.
        self._undone = ""
        # The causes of the next change of processes, for the ledger of the run.
        self._causes: list[str] = []
        # Seconds of the longest pause in training that a worker of the world has
        # measured; None: no measurement yet.
        self._pause_s: float | None = None
        self._restarts = limits.restarts
        # Number of steps done when the last world formed, and the largest number of
        # steps that any worker is known to have done.
        self._done = self.reached = -1
        # Whether the same workers must form a new world.
        self._renews = False
        self._breaks, self._ended = Breaks(clock), ""
        self._progress_s = clock()
        self._early_s = math.inf
        self._ever = False
        # Time until which an unreachable world may train on.
        self._fenced_s, self._says_fence = -math.inf, False

    def begin(self) -> None:
        """Starts the first workers."""
        for _ in range(self.limits.processes):
            self._spawn()

    def continue_from(self, generation: int, numbers: int, reached: int) -> None:
        """Continues to count worlds and workers where an earlier run ended.

        Because the counts continue, the number of a world (``generation``) names the
        same world in all logs of a run, and the number of a worker the same worker.
        """
        self.generation, self.numbers, self.reached = generation, numbers, reached

    def adopt(self, known: Mapping[str, Any]) -> None:
        """Takes over the workers of an earlier supervisor, from its `notes`."""
        now = self._clock()
        self.generation, self.numbers = known["generation"], known["numbers"]
        self.wanted, self.world = known["wanted"], tuple(known["world"])
        self.cluster = self._planned_for = known.get("cluster")
        self._next, self._prepare_by_s = known.get("next"), -math.inf
        self._ever = bool(self.world)
        self.reached = known.get("reached", -1)
        formed = known.get("formed", True)
        for worker in map(int, known["workers"]):
            inside = worker in self.world
            self.members[worker] = members.adopt(now, inside=inside, formed=formed)
            self.members[worker].respawns = inside and known.get("respawns", False)
        self.state = "run" if self._ever else "gather"

    def meet(self, worker: int) -> bool:
        """Takes over a worker that is missing in the earlier supervisor's notes.

        Returns:
          False if the worker counted as gone and a new world has formed: it must end.
        """
        if worker in self.members or self.result is not None:
            return True
        if worker < self.numbers and not self.may_return(worker):
            return False
        self.members[worker] = members.adopt(self._clock(), inside=False)
        self.numbers = max(self.numbers, worker + 1)
        return True

    def may_return(self, worker: int) -> bool:
        """Whether a lost worker may return: only until a new world forms or the run
        ends.
        """
        formed = members.all_formed(self.members, self.world)
        return worker in self.world and not formed and self.result is None

    @property
    def forms(self) -> bool:
        """Whether a world is being formed, which needs a coordination service."""
        return self.state == "run" and not members.all_formed(self.members, self.world)

    def renew(self) -> None:
        """Makes the same workers form a new world, with a new coordination service."""
        self._do.log("renew", generation=self.generation)
        self._causes.append("the supervisor or the coordination service was replaced")
        if self.forms:
            self._abort("its coordination service or supervisor died as it formed")
        self._renews = self.state == "run"
        self._advance()

    def resize(self, processes: int) -> str:
        """Changes the number of processes; returns why this is impossible, or ''."""
        return self.place(processes, frozenset())

    def follow(self, processes: int, gone: Sequence[int], cluster: Any = None) -> None:
        """Changes the number of processes, and removes the processes of some ranks.

        If ``cluster`` is given (as plain data), workers plan for it from now on. If the
        processes stay the same, the world trains on while its first worker prepares the
        new plan.
        """
        leaving = frozenset(self.world[k] for k in gone if k < len(self.world))
        if cluster is not None:
            self._next, self._prepare_by_s = cluster, -math.inf
            same = processes == self.wanted == len(self.world) and not leaving
            trains = self.state == "run" and self._all_train()
            if same and trains and self.limits.prepares:
                self._prepare_next()
                return
            self._use_next()
        if wrong := self.place(processes, leaving):
            self._do.log("refused", reason=wrong)

    def _prepare_next(self) -> None:
        """Orders the first worker to plan and compile for the next cluster."""
        self._preparation += 1
        self._prepare_by_s = self._clock() + self.limits.prepare_s
        self._do.log("prepare", processes=len(self.world))
        self._order_preparation(self._preparation, len(self.world), self._next)

    def _prepare_likely(self) -> None:
        """Orders the first worker to plan and compile for worlds of other sizes."""
        if self.limits.prepares and self._next is None:
            for count in members.likely_sizes(len(self.world), self.limits):
                self._order_preparation(0, count, self.cluster)

    def _order_preparation(self, number: int, processes: int, cluster: Any) -> None:
        order = {"number": number, "processes": processes, "cluster": cluster}
        self._do.send(self.world[0], "prepare", generation=self.generation, **order)

    def _take_prepared(
        self, worker: int, member: WorkerMember, message: Message
    ) -> None:
        self._do.log("prepared", **members.own_fields(message))
        if message["number"] != self._preparation or self._next is None:
            return
        if message.get("refused"):  # the world trains on as planned
            self._next = self.cluster
            self._do.dropped_cluster(message["error"])
        self._use_next()

    def _use_next(self) -> None:
        """Makes the next cluster the current one, for which a new world forms."""
        self.cluster = self.cluster if self._next is None else self._next
        self._next, self._prepare_by_s = None, math.inf

    def remove(self, worker: int, *, spare: bool = False) -> str:
        """Makes a worker leave; returns why this is impossible, or ''.

        Args:
          worker: number of the worker.
          spare: whether another worker can replace it.
        """
        if worker not in self.members:
            return f"there is no worker {worker}."
        least = self.limits.least
        staying = len(members.staying_of(self.members, self._leaving))
        if staying - 1 + spare < least:
            return f"at least {number_of(least, 'process')} must stay (--min)."
        self._leaving |= {worker}
        if spare:
            self._spawn()
        else:
            self.wanted = max(least, self.wanted - 1)
        self._do.log("remove", worker=worker)
        self._advance()
        return ""

    def place(self, processes: int, leaving: frozenset[int]) -> str:
        """Sets the number of processes and makes some leave; returns an error or ''."""
        if not self.limits.least <= processes <= self.limits.most:
            within = f"{self.limits.least} to {self.limits.most}"
            return f"{processes} processes: expected {within} (--min, --max)."
        if self.state in ("suspend", "stop", "end") or self.result is not None:
            return "the run is ending."
        self.wanted = processes
        self._leaving = leaving & self.members.keys()
        self._do.log("resize", processes=processes, leaving=sorted(self._leaving))
        staying = len(members.staying_of(self.members, self._leaving))
        for _ in range(self.wanted - staying):
            self._spawn()
        self._advance()
        return ""

    def suspend(self) -> None:
        """Makes all workers save the state after the same step, and ends the run."""
        self._end_after_step("suspend", SUSPENDED)

    def end_training(self) -> None:
        """Makes the training loops of all workers end after the same step."""
        self._end_after_step("stop", 0)

    def _end_after_step(self, how: str, code: int) -> None:
        if self.result is not None or self.state in ("suspend", "stop", "end"):
            return
        self._do.log(how)
        self._ending = how
        if not self._ever:
            self.stop(f"{_ENDED[how]} before its first step.", code)
        self._advance()

    def stop(self, reason: str, code: int) -> None:
        """Ends the run."""
        if self.result is None:
            self.result, self.reason = code, reason
            self._do.log("end", code=code, reason=reason, step=max(0, self.reached))
            for worker in self.members:
                self._do.send(worker, "end", code=code, reason="")

    def take(self, worker: int, message: Message) -> None:
        """Handles a message of a worker."""
        kind, now = message["kind"], self._clock()
        if kind in ("beat", "formed"):
            self.reached = max(self.reached, message["step"])
        member = self.members.get(worker)
        if member is None:
            return
        member.heard_s, member.connected = now, True
        if message.get("generation", -1) not in (-1, self.generation):
            if kind == "hello":
                self._lead_out(worker, member, message["generation"])
            return  # the message is about an earlier world
        if handler := getattr(self, f"_take_{kind}", None):
            handler(worker, member, message)
        self._advance()

    def on_wait(self, worker: int) -> None:
        """Records that no host has room for a worker; the wait has no time limit."""
        if (member := self.members.get(worker)) is not None:
            member.since_s = math.inf

    def on_start(self, worker: int) -> None:
        """Records that a worker that waited for a host has been started."""
        if (member := self.members.get(worker)) is not None:
            member.since_s = member.heard_s = self._clock()

    def on_unreached(self, worker: int, *, spare: bool) -> None:
        """Handles a worker that cannot be reached; the worker may still train."""
        if worker in self.world and worker in self.members:
            self._fenced_s = self._clock() + self.limits.fence_s
            self.members[worker].respawns = False  # its state cannot be reached, either
        self.on_end(worker, None, spare=spare)

    def on_end(self, worker: int, code: int | None, *, spare: bool = False) -> None:
        """Handles the end of a worker's process (see `Reports.on_end`)."""
        member = self.members.pop(worker, None)
        if member is None:
            return
        if self._respawn(worker, code, member):
            self._advance()
            return
        if member.trained and member.pid is None and member.phase == "joined":
            # An earlier supervisor started this worker, which may have ended because no
            # supervisor ran. So its exit code tells nothing.
            code = None
        self._do.log("gone", worker=worker, code=code, phase=member.phase)
        if worker in self.world and worker not in self._leaving:
            self._causes.append(f"worker {worker} {members.end_text(code)}")
        if self.result is not None:
            return
        if self.state in ("suspend", "stop"):
            self._on_early_end(worker, code, member)
            return
        if self.state == "end":
            # The worker is not replaced. If an earlier supervisor started it, its exit
            # code is unknown.
            if code and member.finished:
                how = f"{members.end_text(code)} after training; see its output."
                self.stop(f"worker {worker} {how}", max(code, 1))
            self._advance()
            return
        left = worker in self._leaving or member.dismissed
        self._leaving -= {worker}
        if code == 0 and member.phase == "joined" and not left:
            self._early_s = min(self._early_s, self._clock())
            if not self.members:
                self._stop_ended()
        elif members.never_starts(member, code, self._restarts) and not self._ever:
            self.stop(members.never_started(worker, code or 0, member), code or 1)
        elif (code or 0) > 0 and not left and not members.is_new(member, self.members):
            # Either an error of its own made the worker fail, or the loss of another
            # one did.
            why = f"worker {worker} ended with code {code}; see its output."
            if self._breaks.aftermath:
                self._ended = why
                self._lose(worker, replace=True, spare=spare)
            else:
                self.stop(why, code or 1)
        else:
            died = not left and (code is None or code < 0)
            if died:
                self._breaks.on_kill()
            self._lose(worker, replace=died, spare=spare)
        self._advance()

    def _respawn(self, worker: int, code: int | None, member: WorkerMember) -> bool:
        """Starts a worker again if it ended only to leave its world."""
        gathers = self.state == "gather"
        if self.result is not None or not (gathers or self.state in ("run", "pause")):
            return False
        now = self._clock()
        if not members.starts_again(member, code, now, gathers=gathers):
            return False
        self._do.log("respawn", worker=worker, code=code)
        if worker in self.world and not gathers:
            self._abort(f"worker {worker} has left")  # while no supervisor ran
        elif worker in self.world and code != RESPAWNED:
            self._do.fill(self.generation, [self.world.index(worker)])
        self.members[worker] = members.respawn_member(member, now)
        self._do.spawn(worker)
        return True

    def _on_early_end(
        self, worker: int, code: int | None, member: WorkerMember
    ) -> None:
        """Handles the end of a worker in a run that is about to end."""
        if self.state == "stop" and worker in self.world and not member.finished:
            how = members.end_text(code)
            self._undone = self._undone or f"; worker {worker} {how} before that"
            self._do.fill(self.generation, [self.world.index(worker)])
            self._leave_at_once()  # no process may wait for it
        if not self.members:
            self._stop_ended()

    def _stop_ended(self) -> None:
        """Ends the run once all workers have ended by themselves or were told to."""
        if self._ending == "suspend" and self.state == "suspend":
            self.stop("suspended", SUSPENDED)
        elif self._ending == "stop":
            steps = number_of(max(0, self.reached), "step")
            code = 1 if self._undone else 0
            self.stop(f"stopped after {steps}{self._undone}.", code)
        else:
            self.stop("", 0)

    def excuse(self, away_s: float) -> None:
        """Extends all deadlines by a time during which this process did not run."""
        self._progress_s += away_s
        self.watch.excuse(away_s)
        members.excuse(self.members, away_s)

    def tick(self) -> None:
        """Checks for workers that are silent, slow or stuck."""
        now = self._clock()
        if self.result is None and self.state != "end":
            leaves, world = self.state == "gather", self.world
            for event, data in self.watch.look(now, self.members, world, leaves=leaves):
                self._do.log(event, **data)
        for worker, member in list(self.members.items()):
            if why := members.overdue(member, self.limits, now):
                self._do.log("kill", worker=worker, reason=why)
                member.heard_s = member.since_s = now
                self._do.kill(worker)
        for worker in self._breaks.own():
            self._do.send(worker, "own", generation=self.generation)
        if now - self._early_s > _EARLY_S:
            self._early_s = math.inf
            self._abort("a worker's script has ended")
        if self.state == "run" and now - self._progress_s > self.limits.stuck_s:
            self._abort("no progress")
        if now > self._prepare_by_s:
            self._use_next()
            self._advance()
        if self.state == "gather" and self.result is None:
            self._form_if_ready()

    def _take_hello(self, worker: int, member: WorkerMember, message: Message) -> None:
        """Sends the orders that a worker missed while it was not connected."""
        member.formed = member.formed or message.get("phase") == "step"
        process = ProcessId.from_data(message.get("process"))
        member.pid = None if process is None else process.pid
        self._do.send(worker, "welcome", generation=self.generation)
        if self.result is not None:
            self._do.send(worker, "end", code=self.result, reason="")
        elif member.leave_by_s < math.inf and self.state not in ("suspend", "stop"):
            self._do.send(worker, "abort", generation=self.generation)
        elif worker in self.world and self.state == "pause" and member.started is None:
            self._do.send(worker, "pause", generation=self.generation)
        elif (
            self.state == "gather"
            and member.phase == "starting"
            and message["generation"] == self.generation
        ):
            # The worker counted as gone while it was unreachable, and missed the order
            # to leave its world.
            self.wanted = min(self.wanted + 1, self.limits.most)
            self._phase(member, "joined")
            member.leave_by_s = self._clock() + self.limits.leave_s
            self._do.send(worker, "abort", generation=self.generation)

    def _lead_out(self, worker: int, member: WorkerMember, generation: int) -> None:
        """Makes a worker leave a world that this supervisor has no record of."""
        self.generation = max(self.generation, generation)
        if self.state in ("run", "pause"):
            self._abort("its workers are in another one")
        self._phase(member, "joined")
        member.leave_by_s = self._clock() + self.limits.leave_s
        self._do.send(worker, "abort", generation=generation)

    def _take_ready(self, worker: int, member: WorkerMember, message: Message) -> None:
        self._phase(member, "ready")
        member.ready, member.started, member.formed = message, None, False
        member.finished, member.broken, member.pid = False, "", message["pid"]
        self._do.log("ready", worker=worker)
        if self.state == "stop":
            self._do.send(worker, "end", code=0, reason="")
        elif worker in self.world and self.state in ("run", "pause"):
            self._abort("a worker has left")  # while no supervisor ran

    def _take_beat(self, worker: int, member: WorkerMember, message: Message) -> None:
        self.watch.hear(worker, message.get("doing"), self._clock())
        if message["step"] > member.step:
            member.step = message["step"]
            self._progress_s = self._clock()

    def _take_started(
        self, worker: int, member: WorkerMember, message: Message
    ) -> None:
        member.started = message["step"]
        current = [self.members[w].started for w in self.world if w in self.members]
        if self.state != "pause" or None in current:
            return
        limit = max(k for k in current if k is not None)
        self._do.log("pause", step=limit)
        self._to_world("limit", step=limit, ending=self._ending)
        self.state = self._ending or "gather"
        if self._ending:
            self._end_outside()

    def _take_formed(self, worker: int, member: WorkerMember, message: Message) -> None:
        member.formed, member.respawns = True, message.get("respawns", False)
        pauses = [x for x in (self._pause_s, message.get("pause_s")) if x is not None]
        self._pause_s = max(pauses, default=None)
        self._progress_s = self._clock()
        if members.all_formed(self.members, self.world):
            members.mark_trained(self.members, self.world)
            self._causes = []
            step, scheme = message["step"], message.get("scheme", "")
            known = {"step": step, "pause_s": self._pause_s, "scheme": scheme}
            made = {"generation": self.generation, "workers": list(self.world)}
            self._do.log("formed", **made, **known)
            if step > self._done:
                self._done = step
                self._breaks.on_progress()
            for other in self.members:
                self._do.send(other, "settled", generation=self.generation)
            self._dismiss()
            self._do.formed_world(message)
            self._prepare_likely()

    def _take_event(self, worker: int, member: WorkerMember, message: Message) -> None:
        self._do.heard(message["event"])

    def _take_measured(
        self, worker: int, member: WorkerMember, message: Message
    ) -> None:
        if self.state == "run" and worker in self.world and self._all_train():
            self._do.on_measured(worker, message)

    def _take_leave(self, worker: int, member: WorkerMember, message: Message) -> None:
        """Handles a worker's request to leave, which it repeats until it is killed."""
        if worker in self._leaving:
            return
        wrong = self.remove(worker, spare=message.get("spare", False))
        if wrong and not member.refused:
            why = f"worker {worker} cannot leave: {wrong}"
            self._do.log("refused", worker=worker, reason=why)
        member.refused = bool(wrong)

    def _take_broken(self, worker: int, member: WorkerMember, message: Message) -> None:
        member.broken = message["error"]
        self._do.log("broken", worker=worker, error=message["error"])
        caused = self._breaks.of_others(member.broken)
        if worker in self.world and self.state in ("run", "pause") and caused:
            if self._breaks.too_many(len(self.world)):
                self.stop(f"worker {worker}: {member.broken}", 1)
                return
            self._abort("broken")
        elif (
            worker in self.world
            and self.state == "run"
            and members.newcomers_of(self.members, self.world)
        ):
            self._without_newcomers()
        elif worker in self.world and self.state == "gather":
            self._do.send(worker, "abort", generation=self.generation)
        else:
            self._breaks.wait(worker)

    def _take_lost(self, worker: int, member: WorkerMember, message: Message) -> None:
        self.stop(message["reason"], 1)

    def _take_finished(
        self, worker: int, member: WorkerMember, message: Message
    ) -> None:
        member.finished, member.leave_by_s = True, math.inf
        self.reached = max(self.reached, message["step"])
        if all(w in self.members and self.members[w].finished for w in self.world):
            self._do.log("finished", step=message["step"])
            self._to_world("end", code=0)
            self._dismiss(everybody=True)
            self.state = "end"
            for other, state in self.members.items():
                if state.phase == "starting":
                    self._do.kill(other)

    def _take_saving(self, worker: int, member: WorkerMember, message: Message) -> None:
        """Extends the deadline of a worker that saves the state after its last step."""
        member.leave_by_s = self._clock() + _SAVE_S

    def _take_resize(self, worker: int, member: WorkerMember, message: Message) -> None:
        self.resize(int(message["processes"]))

    def _advance(self) -> None:
        """Does what the state of the workers now requires, such as forming a world."""
        if self.result is not None or self.state == "end":
            if self.state == "end" and not self.members:
                self._stop_ended()
            return
        if self.state == "run" and self._all_train() and self._change_wanted():
            self.state = "pause"
            self._to_world("pause")
            for worker in self.world if self._ending == "stop" else ():
                by = self._clock() + self.limits.leave_s
                self.members[worker].leave_by_s = by
        if self.state == "gather":
            self._form_if_ready()

    def _end_outside(self) -> None:
        """Ends the workers outside the world at once; the world stops after a step."""
        limit_s = self.limits.leave_s if self._ending == "stop" else _SAVE_S
        for worker, member in self.members.items():
            if worker in self.world:
                member.leave_by_s = self._clock() + limit_s
            elif member.phase == "ready":
                self._do.send(worker, "end", code=SUSPENDED, reason="")
            else:
                self._do.kill(worker)

    def _all_train(self) -> bool:
        current = [self.members.get(w) for w in self.world]
        return all(m is not None and m.formed and not m.finished for m in current)

    def _change_wanted(self) -> bool:
        workers = [*self.world, *members.ready_of(self.members)]
        rows = members.rows_of(self.members)
        new = choose_workers(workers, self.wanted, self._leaving, rows)
        if len(new) < self.limits.least and not self._ending:
            return False  # workers that are starting must get ready first
        changed = new != sorted(self.world) or self.cluster != self._planned_for
        return changed or self._renews or bool(self._ending)

    def _form_if_ready(self) -> None:
        waiting = [m for m in self.members.values() if m.phase != "ready"]
        again = [m for m in waiting if m.respawns and m.since_s < math.inf]
        if again or any(m.phase == "joined" for m in waiting):
            return
        if not self._ever and waiting:
            return  # a run begins with all its workers
        ready = members.ready_of(self.members)
        if self._is_fenced(ready):
            return
        new = choose_workers(
            ready, self.wanted, self._leaving, members.rows_of(self.members)
        )
        if len(new) >= max(1, self.limits.least):
            known = {"generation": self.generation + 1, "world": new, "formed": False}
            if self._do.record({**self.notes(), **known}):
                self._form(new)
        elif not waiting:
            self.lost = True
            why = f"{len(new)} of at least {self.limits.least} workers are left (--min)"
            error = members.last_error(self.members) if new else self._ended
            self.stop(f"{why}; the last error was: {error}" if error else f"{why}.", 1)

    def _is_fenced(self, ready: Sequence[int]) -> bool:
        """Whether an unreachable world may still be training; a new world must wait.

        Once one process has left the unreachable world, this world cannot train,
        because its collectives need every process. The new world also waits until the
        processes that have left hold the whole training state together.
        """
        left = [self.members[w].ready for w in ready if w in self.world]
        held = {m["address"]: m["holds"] for m in left if m}
        if not self._ever or latest_state(held):
            return False
        left_s = self._fenced_s - self._clock()
        if left_s > 0 and not self._says_fence:
            self._do.log("fence", seconds=round(left_s, 1))
        self._says_fence = left_s > 0
        return left_s > 0

    def _form(self, workers: list[int]) -> None:
        if self.generation:
            self._do.close(self.generation - 1)
        self.generation += 1
        self._use_next()
        self._causes += self._changes(workers)
        readies = {w: m.ready for w, m in self.members.items() if m.ready}
        workers = list(side_by_side(readies, workers))
        self.world, self.state, self._ever = tuple(workers), "run", True
        self._planned_for = self.cluster
        self._renews, self._pause_s = False, None
        state = latest_state({r["address"]: r["holds"] for r in readies.values()})
        address = ""
        if len(workers) > 1:
            address = self._do.open(self.generation, processes_of(readies, workers))
        step = None if state is None else state["step"]
        # The log gets this line before any worker gets the order: a later supervisor
        # that takes over must know of the world.
        self._do.log("form", generation=self.generation, workers=workers, step=step)
        same = {
            "generation": self.generation,
            "members": describe_world(readies, workers),
            "address": address,
            "state": state,
            "lost": self.reached if state is None and self.reached >= 0 else None,
            "cluster": self.cluster,
            "why": "; ".join(dict.fromkeys(self._causes)),
        }
        for rank, worker in enumerate(workers):
            member = self.members[worker]
            self._phase(member, "joined")
            member.formed = member.finished = False
            member.started, member.step = None, -1
            self._do.send(worker, "form", rank=rank, **same)
        self._progress_s = self._clock()

    def _changes(self, workers: list[int]) -> list[str]:
        """How the next world differs from the last one, apart from deaths, as texts."""
        if not self._ever:
            return []
        left = [w for w in self.world if w not in workers and w in self.members]
        new = [w for w in workers if w not in self.world]
        found = [f"worker {w} left" for w in left] + [f"worker {w} joined" for w in new]
        planned = ["another cluster"] if self.cluster != self._planned_for else []
        return found + planned

    def _abort(self, why: str) -> None:
        """Makes all workers leave the world at once."""
        if self.state not in ("run", "pause"):
            return
        self._do.log("abort", generation=self.generation, reason=why)
        self._causes = self._causes or [why]
        missing = [k for k, w in enumerate(self.world) if w not in self.members]
        if missing and len(self.world) > 1:
            self._do.fill(self.generation, missing)
        self.state = "gather"
        self._leave_at_once()

    def _leave_at_once(self) -> None:
        self._breaks.on_leave()
        self._to_world("abort")
        for worker in self.world:
            if worker in self.members:
                by = self._clock() + self.limits.leave_s
                self.members[worker].leave_by_s = by

    def _lose(self, worker: int, *, replace: bool, spare: bool) -> None:
        if worker in self.world and self.state in ("run", "pause"):
            self._abort(f"worker {worker} is gone")
        elif worker in self.world and self.state == "gather":
            self._do.fill(self.generation, [self.world.index(worker)])
            self._leave_at_once()
        staying = len(members.staying_of(self.members, self._leaving))
        if not (replace and (spare or self._restarts > 0)):
            self.wanted = max(self.limits.least, min(self.wanted, staying))
        elif staying < self.wanted:  # more may wait for a host than are wanted
            self._restarts -= 0 if spare else 1
            again = any(m.respawns for m in self.members.values())
            self._spawn()
            # Restarted workers wait for the new worker, because it starts as fast as
            # they do.
            self.members[self.numbers - 1].respawns = again

    def _without_newcomers(self) -> None:
        """Ends new workers with which no world could form; goes on without them."""
        for worker in members.newcomers_of(self.members, self.world):
            self.members[worker].dismissed = True
            reason = f"worker {worker} does not fit the others; see the errors above"
            self._do.log("refused", worker=worker)
            self._do.send(worker, "end", code=1, reason=reason)
        staying = len(members.staying_of(self.members, self._leaving))
        self.wanted = max(self.limits.least, staying)
        self._abort("a new worker does not fit")

    def _dismiss(self, *, everybody: bool = False) -> None:
        """Ends workers that are not needed in the world."""
        for worker in set(members.ready_of(self.members)) - set(self.world):
            if everybody or worker in self._leaving or len(self.world) >= self.wanted:
                self.members[worker].dismissed = True
                reason = f"worker {worker} has no place in the run any more"
                self._do.send(worker, "end", code=0, reason=reason)

    def _spawn(self) -> None:
        now = self._clock()
        self.members[self.numbers] = WorkerMember(since_s=now, heard_s=now)
        self.numbers += 1
        self._do.spawn(self.numbers - 1)

    def _phase(self, member: WorkerMember, phase: str) -> None:
        member.phase, member.since_s = phase, self._clock()
        member.leave_by_s = math.inf

    def _to_world(self, kind: str, **data: Any) -> None:
        for worker in self.world:
            if worker in self.members:
                self._do.send(worker, kind, generation=self.generation, **data)

    def notes(self) -> Mapping[str, Any]:
        """What a later supervisor needs to take over (`adopt`), without the workers."""
        names = ("generation", "wanted", "numbers", "cluster", "reached", "world")
        formed = members.all_formed(self.members, self.world)
        known = {name: getattr(self, name) for name in names} | {"next": self._next}
        respawns = any(m.respawns for m in self.members.values())
        return {**known, "formed": formed, "respawns": respawns}

    def status(self) -> Mapping[str, Any]:
        """A short description of the run, as plain data."""
        workers = members.describe(self.members)
        for worker in self.members:
            workers[str(worker)]["doing"] = self.watch.describe(worker, self._clock())
        known = {"state": self.state, "workers": workers, "hangs": self.watch.texts()}
        return {**self.notes(), **known}
