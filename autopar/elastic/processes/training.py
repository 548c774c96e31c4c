"""The training loop of one process in a run of several processes.

A world is a set of processes that train together. When a process leaves or joins, the
others leave their world and join the next one, and go on with the state of the last
finished step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from autopar.cluster import Cluster
from autopar.elastic import loop
from autopar.elastic.driven import TrainStep
from autopar.elastic.events import Event
from autopar.elastic.ledger import Ledger
from autopar.elastic.loop import Step
from autopar.elastic.nans import Finiteness, OnNan
from autopar.elastic.pace import Pace, plan_fields
from autopar.elastic.processes import programs
from autopar.elastic.processes.driven import Entering, TeamDriven
from autopar.elastic.processes.following import TeamFollowing
from autopar.elastic.processes.members import SUSPENDED, Message
from autopar.elastic.processes.preparing import Preparer
from autopar.elastic.processes.programs import StoredPrograms
from autopar.elastic.processes.sizing import cluster_of
from autopar.elastic.processes.team import Joined, Team, WorldBroken
from autopar.elastic.samples import Samples
from autopar.elastic.saves import Saves
from autopar.errors import NotFiniteError, RunError
from autopar.goodput.loop import Record
from autopar.planner.cache import PlanCache
from autopar.plans import Plan
from autopar.runtime import changing_batches
from autopar.runtime.local.steps import LocalSteps

# If another world's save has written nothing for this many seconds, it counts as dead.
_SIGN_S = 15.0


class TeamRun:
    """A run of a train step, of which this process computes a part.

    Iterate over the run to train. When processes leave or join, the run goes on with
    the state of the last finished step. If a change interrupts a step, the step runs
    again. Iteration yields each step once.

    Attributes:
      state: the training state, which each step takes and returns.
      step: number of the next step.
      ledger: record of changes.
    """

    def __init__(
        self,
        step: TeamDriven,
        create_state: Callable[..., Any],
        args: Sequence[Any],
        samples: Samples,
        *,
        steps: float,
        ledger: Ledger,
        saves: Saves,
        team: Team,
        donate: bool,
        shows: bool | None = None,
        following: Callable[[Record], TeamFollowing] | None = None,
        on_nan: OnNan = "stop",
    ) -> None:
        """Joins the run.

        Args:
          step: the train step.
          create_state: makes the state of a run that begins.
          args: arguments of ``create_state``.
          samples: the training samples.
          steps: number of steps.
          ledger: record of changes.
          saves: checkpoints of the run.
          team: this process's connection to the run.
          donate: whether steps donate the arrays of the state; a step that fails then
            loses the state.
          shows: whether progress is shown; None: only on a terminal.
          following: makes the object that adapts the batch size; None: the batch size
            is fixed.
          on_nan: what to do if a loss or gradient is not finite.
        """
        self.nans = Finiteness(step, on_nan, self._record)
        self._train_step, self._samples, self._steps = step, samples, steps
        self._follow = None if following is None else following(self._record)
        self._create, self._args = create_state, programs.on_host(tuple(args))
        self._team, self._donate, self.ledger = team, donate, ledger
        self._activity = team.activity
        team.on_prepare(self._preparing(step.step))
        self._activity.program = step.step.__name__
        self._activity.tasks = step.tasks
        self._base = self._own = step.given_cluster
        self._folder = team.folder
        self.state: Any = None
        self.step, self._saves = 0, saves
        # Reports the progress of the run to the supervisor. Only one process at a time
        # reports it.
        self._pace = Pace(team.say)
        # The notes that the process before this one left, if this process replaces it.
        before = team.respawning.notes
        self._yielded = int(before.get("yielded", -1))
        # The planned step that ran last.
        self._before: Any = None
        self._stopped = self._finished = False
        # Whether this process must leave the world before the next step.
        self._leaves = False
        self._seconds: list[float] = []
        self._display = loop.Display(steps, shows)
        step.study(create_state, self._args, samples)
        # This time may come from the process before this one: both read the host's
        # clock.
        self._broke_s: float | None = before.get("broke_s")
        self._join()

    @property
    def position(self) -> int:
        """Number of the first sample of the next step."""
        return self._samples.position(self.step)

    @property
    def batch_size(self) -> int:
        """Samples of the next step."""
        return self._samples.batch

    @property
    def progress(self) -> float:
        """Progress in rows of the base batch; nan if the batch size is fixed."""
        return math.nan if self._follow is None else self._follow.worth

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self._train_step.plan

    @property
    def compression_state(self) -> Any:
        """The state of the codecs (`autopar.ParallelStep.compression_state`)."""
        return self._train_step.compression_state

    def change(self, event: int | Event | Cluster | str | Mapping[str, Any]) -> None:
        """Asks the supervisor for a change; it is enough that one process calls this.

        Args:
          event: the new number of processes; or an event or its data; or the whole next
            cluster, in which each process is a host.

        Raises:
          EventError: the event is invalid. The outcome of a valid event is written to
            ``log.jsonl`` in the folder of the run.
        """
        if isinstance(event, int):
            self._team.resize(event)
            return
        if isinstance(event, Cluster):
            event = Event(kind="cluster", cluster=event)
        elif not isinstance(event, Event):
            event = Event.from_data(event)
        self._team.tell(event.to_data())

    def stop(self) -> None:
        """Ends the run before the next step, if all processes call this method."""
        self._stopped = True

    def close(self) -> None:
        """Ends the run; further calls do nothing."""
        self._stopped = True
        self._display.close()

    def __iter__(self) -> TeamRun:
        """Returns the run itself; a later loop continues where this one stopped."""
        return self

    def __next__(self) -> Step:
        """Runs one step.

        Raises:
          StopIteration: all steps have run, or the run was stopped.
          RunError: the state was lost, or was saved because the supervisor is gone.
        """
        while True:
            if self._leaves:
                self._reform()
            if self._stopped:
                self.close()
                raise StopIteration
            if self.step >= self._steps or self._is_reached():
                self._end()
                continue
            if not self._team.may_start(self.step):
                if self._team.is_orphaned:
                    self._end_orphaned()
                if self._team.is_suspended:
                    self._suspend()
                if self._team.is_stopped:
                    self._steps = self.step
                else:
                    self._part()
                    self._reform()
                continue
            done = self._try_step()
            if done is not None and done.step > self._yielded:
                self._yielded = done.step
                self._log(done)
                if (error := self.nans.error()) is not None:
                    self._give_up(error)
                self._display.show(done.step + 1, done.seconds, self.plan)
                if self._follow is not None and (until := self._follow.ends.until):
                    self._steps = self.step if until(done) else self._steps
                planned, before = self._train_step.current, self._before
                self._before = planned
                self._activity.enter("script", done.step)
                if planned is before:
                    return done
                return dataclasses.replace(done, plan=self.plan)

    def _preparing(self, step: TrainStep) -> Callable[[Message], None]:
        """What carries out the supervisor's orders to prepare worlds."""
        if isinstance(step, LocalSteps):
            return self._prepare_nothing
        preparer = Preparer(
            self._team.say,
            lambda: self._samples.batch,
            functools.partial(changing_batches.known_errors, step),
            functools.partial(changing_batches.remember_plan, step),
        )
        return preparer.take

    def _prepare_nothing(self, order: Message) -> None:
        """Answers the supervisor that local steps keep their plan."""
        if order["number"]:
            error = "the plans of replicas do not change with links or speeds"
            made = {k: order[k] for k in ("number", "processes")}
            made |= {"expected": order.get("expected", False), "refused": True}
            self._team.say("prepared", error=error, **made)

    def _give_up(self, error: NotFiniteError) -> NoReturn:
        """Ends the run; if all processes do, they save the last finite state."""
        self.step = self.nans.first
        if self._train_step.saves_together:
            self._saves.end(self.state, self.step, self.position)
        self.close()
        raise error

    def _log(self, done: Step) -> None:
        """Writes the progress of the run; only rank 0 writes."""
        world = self._train_step.world
        if not world.process_index:
            last = self.step >= self._steps
            at = (self.step, self.position, self._samples.batch, len(world.devices))
            self._pace.take(
                *at,
                done.result,
                plan=plan_fields(self.plan),
                measured=None if self._follow is None else self._follow.measurements,
                last=last,
                lost=self.nans.hopeless,
            )
            self._activity.note_done(*at[:3], self._pace.loss)

    def _is_reached(self) -> bool:
        """Whether the run has reached an end that the user set other than ``steps``."""
        follow = self._follow
        return follow is not None and follow.ends.is_reached(follow.worth)

    def _end_orphaned(self) -> None:
        """Saves the state with all processes, and ends unless a supervisor is back.

        If the save fails because the world breaks, this waits for a supervisor, with
        the state in memory.

        Raises:
          RunError: there is still no supervisor.
        """
        try:
            self._saves.end(self.state, self.step, self.position)
        except Exception as error:
            if not self._team.broken(error):
                raise
            return
        if self._team.gives_up():
            saved = f"The state after {self.step} steps was saved."
            raise self._team.lost_error(saved)

    def _settle_ways(self) -> None:
        """Lets nothing be prepared beside the steps when the world or the run ends.

        The other processes may leave the world before a message that is waited for.
        """
        if self._follow is not None:
            self._team.lanes_end.set()
            self._follow.settle()
            self._team.lanes_end.clear()

    def _suspend(self) -> None:
        """Saves the state with all processes, and exits; the run can be resumed."""
        self._settle_ways()
        self._display.close()
        self._team.say_saving()
        self._saves.end(self.state, self.step, self.position)
        sys.exit(SUSPENDED)

    def _end(self) -> None:
        """Saves the last state, and waits for the other processes."""
        self._settle_ways()
        self._team.say_saving()
        self._activity.enter("save", self.step)
        at = self.state, self.step, self.position
        try:
            self._saves.end(*at, self._team.check_alive)
        except Exception as error:
            if not self._team.broken(error):
                raise
            self._reform()
            return
        if self._team.finish(self.step) or self._team.is_orphaned:
            self._stopped = True
        elif self._team.is_suspended:
            self._suspend()
        else:
            self._reform()

    def _try_step(self) -> Step | None:
        """Runs a step; None if the world broke and this process joined a new one."""
        begin = time.perf_counter()
        step, position = self.step, self.position
        ran, result = False, None
        try:
            result = self._run()
            ran = True
            self._activity.enter("save", step)
            at = self.state, self.step, self.position
            self._saves.after(*at, self._team.check_alive)
        except Exception as error:
            self._broke_s = self._broke_s or begin
            if not self._team.broken(error):
                raise
            if ran and self._team.respawning.is_on:
                self._leaves = True  # the result is lost with the process
            else:
                self._reform()
                if not ran or self.step <= step:
                    return None  # the step runs again
        seconds = time.perf_counter() - begin
        self._seconds = [*self._seconds[-19:], seconds]
        done = Step(step=step, position=position, result=result, seconds=seconds)
        return dataclasses.replace(done, finite=self.nans.finite)

    def _run(self) -> Any:
        """Runs one step, and keeps the new state for the case that the world breaks."""
        begin = time.perf_counter()
        world, step = self._train_step.world, self._train_step
        rest, named = step.arguments(
            self._samples,
            self.step,
            self.state,
            lambda phase: self._activity.enter(phase, self.step),
        )
        self._activity.enter("program", self.step)
        returned = self._call(rest, named)
        self._activity.enter("after", self.step)
        state, result = step.after(self.state, returned)
        host = programs.on_host(result)
        self.nans.look(self.step, host, says=not world.process_index)
        state = self.nans.state_after(self.state, state)
        if self._follow is not None:
            seconds = time.perf_counter() - begin
            state = self._follow.after(state, rest, named, seconds, host)
            samples = self._follow.resize(self._samples, self.step + 1)
            self._samples, self._team.rows = samples, self._train_step.rows(samples)
        self._keep(state, self.step + 1)
        self.state, self.step = state, self.step + 1
        return host

    def _call(self, rest: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Calls the step, and waits until its results are computed."""

        def call() -> Any:
            return self._train_step.call(self.state, rest, named)

        return self._team.run(call) if self._train_step.is_pure else call()

    def _part(self) -> None:
        """Prepares to leave a world whose processes all live, and keeps the state."""
        before = self.state
        try:
            self._team.check_alive()
            state = self._train_step.part(before)
        except Exception as error:
            if not (isinstance(error, WorldBroken) or self._team.broken(error)):
                raise
            return
        if state is not before:
            self.state = state
            self._keep(state, self.step)

    def _keep(
        self, state: Any, step: int, *, placed: Cluster | None = None
    ) -> float | None:
        """Keeps the state after a step for the next world.

        Args:
          state: the training state, which each step takes and returns.
          step: number of steps that have run.
          placed: if a world begins with this state, the cluster for which it has
            planned; None: the world already trains.

        Returns:
          Seconds of the pause in training before this world; None if there was none.
        """
        arrays, trees = self._train_step.held(state)
        extra = {"position": self._samples.position(step), **trees}
        if self._follow is not None:
            extra["follow"] = self._follow.notes()
        if placed is None:
            self._team.keep_state(step, arrays, extra)
            return None
        data, scheme = placed.to_data(), self._train_step.scheme
        return self._team.say_placed(step, arrays, extra, data, scheme, self._broke_s)

    def _reform(self) -> None:
        """Leaves the world, and joins the next world that forms."""
        self._broke_s = self._broke_s or time.perf_counter()
        self._leave()
        self._join()

    def _leave(self) -> None:
        self._settle_ways()
        if (checkpoints := self._saves.checkpoints) is not None:
            checkpoints.abandon()  # a save would wait for lost processes
        known = {"yielded": self._yielded, "broke_s": self._broke_s}
        self._team.respawning.note(**known)
        self._team.leave()

    def _join(self) -> None:
        """Joins worlds until this process has the training state in one of them."""
        while True:
            joined = self._team.join()
            try:
                self._settle(joined)
                return
            except Exception as error:
                broken = isinstance(error, WorldBroken) or self._team.broken(error)
                if not broken:
                    raise
                self._leave()

    def _settle(self, joined: Joined) -> None:
        """Plans for a world, and loads the training state."""
        begin = time.perf_counter()
        world = joined.world
        local = len(world.devices) // world.process_count
        if joined.cluster is not None:
            self._base = Cluster.from_data(joined.cluster)
        cluster = cluster_of(self._base, world.process_count, local, own=self._own)
        cache = PlanCache(self._folder / "plans")
        self._train_step.enter(Entering(world, cluster, self._donate, cache))
        if self._follow is not None:
            self._follow_on(joined)
        self._train_step.prepare(self._samples, joined.step)
        planned_s = time.perf_counter() - begin
        stored = StoredPrograms(self._folder / "programs", self._team.first_program)
        self._team.offer_programs(stored.content)
        program = self._train_step.load(stored)
        if joined.fetch is None:
            self._begin(joined)
        else:
            self._take_up(joined)
        lost = self._train_step.share(self.state)
        if lost is not None:
            at = {"step": self.step, "position": self.position}
            self.ledger.write("lost", **at, **lost)
        placed_s = time.perf_counter() - begin - planned_s - program.seconds
        pause_s = self._keep(self.state, self.step, placed=cluster)
        self._broke_s = None
        self._activity.sent_bytes = self.plan.predicted.communication_bytes
        self._activity.enter("script", self.step - 1)
        seconds = {
            "pause_s": pause_s,
            "plan_s": planned_s,
            "compile_s": program.seconds,
            "place_s": placed_s,
            **self._team.respawning.seconds(),
        }
        self._write(joined, program.how, seconds)

    def _follow_on(self, joined: Joined) -> None:
        """Restores the run's batch size and its measurements of gradient noise."""
        assert self._follow is not None
        found = joined.extra.get("follow")
        if found is None and joined.fetch is None and self._saves.checkpoints:
            found = self._saves.checkpoints.notes()
        if found is not None:
            self._follow.take(found)
            self._samples = self._follow.resize(self._samples, joined.step)
            self._team.rows = self._train_step.rows(self._samples)

    def _begin(self, joined: Joined) -> None:
        """Creates the state, or restores the checkpoint of an earlier run."""
        args = programs.from_host(self._args)
        rest = self._train_step.others(self._samples, 0)
        # Another world that has lost its supervisor may still be saving its last state.
        lost = joined.lost_step is not None and self._team.is_over_hosts
        patience_s = _SIGN_S if lost else 0.0
        found = self._saves.restore(self._create, args, rest, patience_s=patience_s)
        if found is not None:
            self.state, self.step = found.state, found.step
            self._samples = self._samples.gone_on(found.step, found.position)
            self._tell()
            return
        if joined.lost_step is not None and not self._saves.is_early(joined.lost_step):
            reason = (
                f"the state after {joined.lost_step} or more steps was lost with the "
                "processes that held it, and there is no checkpoint. Pass survive=1 or "
                "checkpoint=. `autopar run` with the same folder begins at step 0."
            )
            self._team.say_lost(reason)
            raise RunError(reason)
        self.state = self._train_step.init(self._create, args, self._samples)
        self.step = 0
        self._tell()

    def _tell(self) -> None:
        """Writes the batch size into a state that is new or from a checkpoint."""
        if self._follow is not None:
            self.state = self._follow.begin(self.state)

    def _take_up(self, joined: Joined) -> None:
        """Loads the state that the processes hold, in the layout of the new plan."""
        fetch = joined.fetch
        assert fetch is not None
        self._samples = self._samples.gone_on(joined.step, joined.extra["position"])
        self.state, self.step = self._train_step.take_up(joined, self.state)
        fetch.close()

    def _write(
        self, joined: Joined, how: str, seconds: Mapping[str, float | None]
    ) -> None:
        """Writes to the ledger how a world formed and how long this took."""
        fetch, before = joined.fetch, self._seconds
        if joined.world.process_index:
            return  # only rank 0 writes
        self.ledger.write(
            "world",
            generation=joined.generation,
            process=joined.world.process_index,
            processes=joined.world.process_count,
            step=self.step,
            position=self.position,
            why=joined.why,
            program=how,
            measured={
                **seconds,
                "moved_bytes": fetch.remote_bytes if fetch else 0,
                "kept_bytes": fetch.local_bytes if fetch else 0,
                "step_before_s": statistics.median(before) if before else None,
            },
        )
        self._seconds = []

    def _record(self, kind: str, **fields: Any) -> None:
        """Writes a line of the ledger; only rank 0 writes."""
        if not self._train_step.world.process_index:
            step, position = self.step + 1, self._samples.position(self.step + 1)
            self.ledger.write(kind, step=step, position=position, **fields)
