"""The training loop of one process, which continues when devices leave and join."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from autopar import progress
from autopar.checkpoint.checkpoints import Checkpoints
from autopar.cluster import Cluster
from autopar.elastic.driven import Driven, OfPlan, TrainStep
from autopar.elastic.events import Event, Inbox, Resolved
from autopar.elastic.ledger import Ledger, event_data
from autopar.elastic.nans import Finiteness, OnNan
from autopar.elastic.replanning import Ahead, Outcome, likely_next, meshes_of
from autopar.elastic.replicas import OfReplicas
from autopar.elastic.samples import Samples
from autopar.elastic.saves import Saves
from autopar.elastic.sources.source import Source
from autopar.errors import AutoparError, EventError
from autopar.plans import Plan
from autopar.runtime.local.steps import LocalSteps
from autopar.runtime.state_mover import StateLayout
from autopar.runtime.world import World
from autopar.units import rounded_cluster, seconds_text
from autopar_passes.program.static_leaves import struct_of

# The line of progress is updated at most once in this number of seconds.
_EVERY_S = 0.1


class Display:
    """Shows a line of progress; by default only on a terminal."""

    def __init__(self, steps: float, shows: bool | None) -> None:
        """Shows nothing yet.

        Args:
          steps: number of steps.
          shows: whether to show the line; None: only on a terminal
            (`autopar.progress`).
        """
        self._steps = steps
        self._shows = progress.is_shown() if shows is None else shows
        self._last_s = 0.0

    def show(self, step: int, seconds: float, plan: Plan) -> None:
        """Shows the number of steps done, the last step's time and the cluster."""
        now = time.perf_counter()
        if self._shows and (now - self._last_s > _EVERY_S or step == self._steps):
            self._last_s = now
            progress.write(progress_text(step, self._steps, seconds, plan))

    def close(self) -> None:
        """Erases the line."""
        if self._shows:
            progress.wipe()
            self._shows = False


def progress_text(step: int, steps: float, seconds: float, plan: Plan) -> str:
    """The line of progress.

    Args:
      step: number of steps that have run.
      steps: total number of steps; infinite if it is unknown.
      seconds: seconds of the last step.
      plan: plan in use.
    """
    of = f" of {steps}" if math.isfinite(steps) else ""
    where = rounded_cluster(plan.cluster)
    return f"step {step}{of}, {seconds_text(seconds)} a step on {where}"


# `Membership` is the interface by which a training loop learns of changes of devices
# and processes.
#
# `Alone` implements it for a run of a single process. The changes of such a run come as
# events through its `Inbox`.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of devices or processes that the loop carries out before a step.

    Attributes:
      events: the events that caused the change, with their outcomes.
      cluster: the next cluster; None: no device is left, and the run ends.
      deadline_s: time at which devices leave, in seconds since the epoch; infinite if
        it is unknown.
      reform: whether another set of processes trains together from now on. If so, the
        loop calls `Membership.reform` to move the state to them before it plans the
        step again.
    """

    events: tuple[Resolved, ...]
    cluster: Cluster | None
    deadline_s: float
    reform: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class HostPiece:
    """A part of an array, on the host.

    Attributes:
      start: for each dimension, the index of the part's first element in the whole
        array.
      data: the elements.
    """

    start: tuple[int, ...]
    data: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldState:
    """The part of a run's state that a process keeps while processes change.

    Attributes:
      step: number of the next step.
      position: number of the next sample of the data.
      layout: how the state was split over the devices before the change.
      pieces: path of an array -> the parts of the array that this process has.
      compression: state of the gradient codecs, on the host; None if they have none.
    """

    step: int
    position: int
    layout: StateLayout
    pieces: Mapping[str, tuple[HostPiece, ...]]
    compression: Any = None


class Membership(Protocol):
    """The processes and devices that train together, and changes of them.

    Attributes:
      world: the processes and devices that train together now.
    """

    world: World

    def pending(self, step: int) -> Change | None:
        """The change that all processes must carry out before a step, or None.

        Args:
          step: number of the step that is about to start.
        """
        ...

    def settle(self, cluster: Cluster) -> None:
        """Tells the membership on which cluster the run trains after a change."""
        ...

    def broken(self, error: BaseException) -> bool:
        """Whether a step raised this error because another process was lost."""
        ...

    def reform(self, held: HeldState) -> HeldState:
        """Moves this process and its state to the next set of processes.

        Args:
          held: this process's part of the state, on the host.

        Returns:
          The state after a step on which all processes of the new set agree. It
          contains at least the pieces that this process's devices need.
        """
        ...


class Alone:
    """The membership of a run of one process, which never gets other processes."""

    def __init__(self, world: World, inbox: Inbox) -> None:
        """See `Membership`.

        Args:
          world: this process and its devices.
          inbox: where sources of events put their events.
        """
        self.world = world
        self._inbox = inbox

    def pending(self, step: int) -> Change | None:
        """See `Membership`."""
        del step
        taken = self._inbox.take()
        if not taken:
            return None
        deadline = min(x.event.ends_s for x in taken)
        return Change(events=taken, cluster=taken[-1].cluster, deadline_s=deadline)

    def settle(self, cluster: Cluster) -> None:
        """See `Membership`."""
        self._inbox.settle(cluster)

    def broken(self, error: BaseException) -> bool:
        """See `Membership`; a single process never loses another process."""
        del error
        return False

    def reform(self, held: HeldState) -> HeldState:
        """See `Membership`; returns ``held``, because the processes do not change."""
        return held


# The measured seconds of a step are the median over the last _STEPS steps. After a
# re-plan, the ledger gets this median once _AFTER steps have run.
_STEPS, _AFTER = 20, 5
# After a change, the loop starts to prepare for likely next clusters once _SETTLED
# steps have run. The last _VISITED clusters of the run are among them.
_SETTLED, _VISITED = 3, 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that has run.

    Attributes:
      step: number of the step; the first step of a run is 0.
      position: number of the first sample of the step.
      result: the values that the step returned, without the state.
      seconds: time of the step and of getting its batch, without a change before it.
      plan: the plan, if this is the first step of this process that runs under it (as
        step 0 is); otherwise None. `ElasticRun.plan` is always the plan in use.
      finite: whether the loss and the gradients of the step were finite (``on_nan=``).
    """

    step: int
    position: int
    result: Any
    seconds: float
    plan: Plan | None = None
    finite: bool = True


class ElasticRun:
    """A training run; iterate over it to train.

    Attributes:
      state: the training state, which each step takes and returns.
      step: number of the next step.
      ledger: record of events and re-plans.
      notes: plain data of the checkpoint that the run was restored from; or None.
      sources: sources of events.
      ahead: plans and compiles for likely next clusters; None: this is not done.
      nans: counts the steps that were not finite.
    """

    def __init__(
        self,
        step: TrainStep,
        samples: Samples,
        *,
        steps: float,
        ledger: Ledger,
        membership: Callable[[Inbox], Membership] | None = None,
        sources: Sequence[Source] = (),
        ahead: bool = False,
        checkpoints: Checkpoints | None = None,
        every: int | None = None,
        shows: bool | None = None,
        on_nan: OnNan = "stop",
    ) -> None:
        """See `autopar.elastic`, which makes such runs.

        Args:
          step: the train step.
          samples: the training samples.
          steps: number of steps; infinite if the run goes on until `stop`.
          ledger: record of events and re-plans.
          membership: makes the membership; None: this process is the only one.
          sources: sources of events, which start to listen at once.
          ahead: whether to plan and compile for likely next clusters in the background.
          checkpoints: where the run saves its state.
          every: number of steps between saves; None: only at the end.
          shows: whether progress is shown; None: only on a terminal.
          on_nan: what to do if a loss or gradient is not finite.
        """
        self._train_step = driven_of(step, guards=on_nan != "continue")
        self.nans = Finiteness(self._train_step, on_nan, self._write)
        self._samples, self._steps = samples, steps
        self.ledger = ledger
        self.state: Any = None
        self.step = 0
        self.notes: Any = None
        self._saves = Saves(checkpoints, every, step, ledger)
        self._stopped, self._begun = False, False
        self._cluster = step.cluster
        self._visited: tuple[Cluster, ...] = ()
        self._replanner = self._train_step.changer(samples.batch)
        self.ahead = None
        if ahead and not isinstance(step, LocalSteps):
            self.ahead = Ahead(step, samples.batch)
        own = range(len(step.world.devices))
        self._inbox = Inbox(
            step.cluster, tuple(own), self._check, ledger, most=len(own)
        )
        make = membership or (lambda inbox: Alone(step.world, inbox))
        self._membership = make(self._inbox)
        self._display = Display(steps, shows)
        self._seconds: collections.deque[float] = collections.deque(maxlen=_STEPS)
        self._replans = 0
        self._last: Any = ((), {})
        self._before_s: float | None = None
        self.sources: tuple[Source, ...] = ()
        for source in sources:
            self._listen(source)

    def _listen(self, source: Source) -> None:
        """Starts a source; if this fails, stops the sources that already listen."""
        try:
            source.start(self._inbox)
        except AutoparError:
            self.close()
            raise
        self.sources = (*self.sources, source)

    @property
    def position(self) -> int:
        """Number of the first sample of the next step."""
        return self._samples.position(self.step)

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self._train_step.plan

    @property
    def compression_state(self) -> Any:
        """The state of the codecs (`autopar.ParallelStep.compression_state`)."""
        return self._train_step.compression_state

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self._samples.batch

    def resize(self, rows: int) -> None:
        """Sets the number of samples per step, from the next step on.

        This method does not plan. The next step makes a plan if there is none for this
        number of samples.
        """
        self._samples = self._samples.resize(self.step, rows)
        self._replanner.rows = rows
        if self.ahead is not None:
            self.ahead.rows = rows
        self._seconds.clear()

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Shapes of the step's arguments after the state, in order and by name.

        The shapes are those of the last step. Before the first step, they are the
        shapes that the first step will get.
        """
        return self._last

    def horizon_s(self, rest_s: float = math.inf) -> float:
        """Seconds until the next expected change of devices; at most ``rest_s``."""
        return self._replanner.horizon_s(rest_s)

    def save(self) -> None:
        """Saves the current state, and waits until the save is complete."""
        self._saves.end(self.state, self.step, self.position)

    def keep(self, notes: Callable[[], Any]) -> None:
        """From now on, saves the result of ``notes`` (plain data) with each state."""
        self._saves.notes = notes

    def create(self, create_state: Callable[..., Any], args: Sequence[Any]) -> None:
        """Creates the state as sharded arrays, or restores the last checkpoint.

        Args:
          create_state: makes the state.
          args: arguments of ``create_state``.
        """
        world = self._membership.world
        rest, named = self._samples.arguments(self.step, world)
        self._last = jax.tree.map(struct_of, (rest, named))
        if world.process_count > 1:
            # `init` would take arrays for only this process's part of the batch, so it
            # gets shapes.
            rest, named = self._last
        others = self._train_step.study(create_state, args, (rest, named))
        found = self._saves.restore(create_state, args, others)
        if found is None:
            self.state = self._train_step.init(create_state, *args, others=others)
            return
        self.state, self.step = found.state, found.step
        self._samples = self._samples.gone_on(found.step, found.position)
        self.notes = found.notes

    def change(self, event: Event | Cluster | str | Mapping[str, Any]) -> Resolved:
        """Asks for a change before the next step.

        Args:
          event: an event, its data, or the whole next cluster, such as ``"4:cpu"``.

        Returns:
          The outcome: whether the cluster changes, or why not.

        Raises:
          EventError: the event is invalid; the run goes on without it.
        """
        if isinstance(event, Cluster):
            event = Event(kind="cluster", cluster=event)
        elif not isinstance(event, Event):
            event = Event.from_data(event)
        found = self._inbox.put(event)
        if found.status == "refused":
            raise EventError(f"{event}: {found.reason}")
        return found

    def stop(self) -> None:
        """Ends the run before the next step."""
        self._stopped = True

    def close(self) -> None:
        """Ends the run and stops its sources; further calls do nothing."""
        self._stopped = True
        for source in self.sources:
            source.stop()
        if self.ahead is not None:
            self.ahead.close()
        self._display.close()

    def __iter__(self) -> ElasticRun:
        """Returns the run itself; a later loop continues where this one stopped."""
        return self

    def __next__(self) -> Step:
        """Runs one step.

        Raises:
          StopIteration: all steps have run, or the run was stopped.
          NotFiniteError: losses or gradients are not finite; `state` is then the state
            after the last step that was finite.
        """
        plan = None if self._has_ended() else self._change()
        if self._has_ended():
            self._saves.end(self.state, self.step, self.position)
            self.close()
            raise StopIteration
        begin = time.perf_counter()
        step, position, result = self.step, self.position, self._run()
        seconds = time.perf_counter() - begin
        if (error := self.nans.error()) is not None:
            self.step = self.nans.first
            self.save()
            self.close()
            raise error
        self._take_seconds(seconds)
        plan, self._begun = plan if self._begun else self.plan, True
        self._saves.after(self.state, self.step, self.position)
        self._display.show(step + 1, seconds, self.plan)
        return Step(
            step=step,
            position=position,
            result=result,
            seconds=seconds,
            plan=plan,
            finite=self.nans.finite,
        )

    def _has_ended(self) -> bool:
        return self._stopped or self.step >= self._steps

    @property
    def rest_steps(self) -> int | None:
        """Number of steps that are left; None: unknown."""
        left = self._steps - self.step
        return int(left) if math.isfinite(left) else None

    def _run(self) -> Any:
        """Runs one step, and stores the new state.

        The method waits for the result, for two reasons: to measure the seconds of the
        step; and so that, if another process is lost, this step raises the error and
        not a later call.
        """
        world = self._membership.world
        step = self._train_step
        rest, named = step.arguments(self._samples, self.step, world, self.state)
        self._last = jax.tree.map(struct_of, (rest, named))
        state, result = step.call(self.state, rest, named)
        jax.block_until_ready(jax.tree.leaves(result))
        self.nans.look(self.step, result, says=not world.process_index)
        self.state, self.step = self.nans.state_after(self.state, state), self.step + 1
        return result

    def _write(self, kind: str, **fields: Any) -> None:
        """Writes a line of the ledger, with the current step and position."""
        self.ledger.write(kind, step=self.step, position=self.position, **fields)

    def _change(self) -> Plan | None:
        """Carries out a pending change; returns the new plan, or None."""
        change = self._membership.pending(self.step)
        if change is None:
            return None
        if change.cluster is None:
            self._leave(change)
            return None
        ahead = self.ahead
        with contextlib.nullcontext() if ahead is None else ahead.while_waiting():
            return self._move(change, change.cluster)

    def _leave(self, change: Change) -> None:
        """Ends the run, because no devices are left."""
        events = [event_data(x) for x in change.events]
        self.ledger.write("stop", step=self.step, position=self.position, events=events)
        self._stopped = True

    def _move(self, change: Change, cluster: Cluster) -> Plan | None:
        """Re-plans for another cluster; None if no plan can be made for it."""
        begin, old = time.perf_counter(), self._train_step.plan
        fields: dict[str, Any] = {
            "step": self.step,
            "position": self.position,
            "events": [event_data(x) for x in change.events],
            "old": plan_data(old),
        }
        try:
            found = self._replanner.change(
                cluster,
                self.state,
                measured_s=self._median(),
                left_s=change.deadline_s - time.time(),
                rest_steps=self.rest_steps,
            )
        except AutoparError as error:
            self._membership.settle(self._cluster)
            self.ledger.write("refused", **fields, reason=str(error))
            return None
        self._visited = (*(x for x in self._visited if x != cluster), self._cluster)
        self._visited = self._visited[-_VISITED:]
        self.state, self._cluster = found.state, cluster
        self._membership.settle(cluster)
        self._replans += 1
        self._before_s = self._median()
        self._seconds.clear()
        self.ledger.write(
            "replan",
            number=self._replans,
            **fields,
            **outcome_data(found),
            measured={
                "pause_s": time.perf_counter() - begin,
                "plan_s": found.plan_s,
                "compile_s": found.compile_s,
                "move_s": found.move_s,
                "deadline_kept": time.time() <= change.deadline_s,
            },
        )
        return None if found.chosen.name == "stay" else found.chosen.plan

    def _take_seconds(self, seconds: float) -> None:
        """Records the seconds of a step.

        Once `_AFTER` steps have run after a re-plan, the method writes their median
        seconds to the ledger.
        """
        self._seconds.append(seconds)
        if self.ahead is not None and len(self._seconds) == _SETTLED:
            self.ahead.prepare(likely_next(self._cluster, self._visited, self._check))
        if self._replans and len(self._seconds) == _AFTER:
            self.ledger.write(
                "measured",
                number=self._replans,
                step=self.step,
                step_before_s=self._before_s,
                step_after_s=self._median(),
            )

    def _median(self) -> float | None:
        """Median seconds of a step.

        The result is None before 3 steps have run, because the first step compiles.
        """
        enough = len(self._seconds) >= _SETTLED
        return statistics.median(self._seconds) if enough else None

    def _check(self, cluster: Cluster) -> None:
        """Checks that this run's processes have the devices of a cluster.

        Raises:
          PlanError: the processes lack a device of the cluster.
        """
        world = self._membership.world
        world.at(cluster.ids)


def driven_of(step: TrainStep, *, guards: bool) -> Driven:
    """What the loop asks of a planned step, or of local steps.

    Args:
      step: the train step.
      guards: whether a replica keeps its state if its step is not finite.
    """
    if isinstance(step, LocalSteps):
        return OfReplicas(step, guards=guards)
    return OfPlan(step)


def plan_data(plan: Plan) -> dict[str, Any]:
    """The description of a plan in the ledger."""
    return {
        "cluster": plan.cluster.text,
        "meshes": meshes_of(plan),
        "step_s": plan.predicted.step_s,
    }


def outcome_data(found: Outcome) -> dict[str, Any]:
    """The description of a completed change in the ledger."""
    horizon_s, chosen = found.horizon_s, found.chosen
    others = [x.steps(horizon_s) for x in found.compared if x is not chosen]
    steps = chosen.steps(horizon_s)
    return {
        "new": plan_data(chosen.plan),
        "compared": [x.to_data(horizon_s) for x in found.compared],
        "chosen": chosen.name,
        "predicted": {
            "horizon_s": horizon_s,
            "step_s": chosen.step_s,
            "cost_s": chosen.cost_s,
            "move_bytes": chosen.move_bytes,
            "compiled": chosen.compiled,
            "more_steps": steps - max(others) if others else None,
        },
        **found.fields,
    }
