"""Carries out a change of the cluster: chooses a plan, compiles it, moves the state.

The plans that a re-plan compares, and which of them is worth most.

Moving and compiling cost time in which nothing is trained; a better plan gains it back
step by step. So options are compared by the steps that they finish until the next
change is expected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
import msgspec

from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.planner.codecs.adjusted import program_plan
from autopar.plans import Plan, StagePlan
from autopar.progress import LOGGER
from autopar.runtime.compiler import Compiler, CompilerClosedError, compiled_by
from autopar.runtime.creation import flat_state
from autopar.runtime.parallel_step import ParallelStep
from autopar.runtime.state_mover import Move, move_of, slowest_bytes_per_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplanOption:
    """A plan that a run may go on under.

    Attributes:
      name: ``stay`` (go on as it is), ``layouts`` (the same layouts, other codecs),
        ``known`` (a plan made before), ``new`` (made for this change), ``fewer`` (on
        fewer devices, which divide the batch).
      cluster: the devices that it uses.
      plan: the plan.
      step_s: seconds of a step; predicted, and corrected by what the running plan was
        measured to take.
      move_bytes: of the state, over all devices.
      move_s: seconds of moving it.
      compiled: whether the program is compiled already.
      compile_s: seconds of compiling it.
    """

    name: str
    cluster: Cluster
    plan: Plan
    step_s: float
    move_bytes: float
    move_s: float
    compiled: bool
    compile_s: float

    @property
    def cost_s(self) -> float:
        """Seconds before the first step can run."""
        return self.move_s + self.compile_s

    def steps(self, horizon_s: float) -> float:
        """Steps that are finished within so many seconds from now."""
        return max(0.0, horizon_s - self.cost_s) / self.step_s

    def to_data(self, horizon_s: float) -> dict[str, Any]:
        """The option as a line of the ledger has it."""
        return {
            "name": self.name,
            "cluster": str(self.cluster),
            "meshes": meshes_of(self.plan),
            "step_s": self.step_s,
            "move_bytes": self.move_bytes,
            "move_s": self.move_s,
            "compiled": self.compiled,
            "compile_s": self.compile_s,
            "steps": self.steps(horizon_s),
        }


def best_option(
    found: Sequence[ReplanOption], horizon_s: float, left_s: float = math.inf
) -> ReplanOption:
    """Returns the option that finishes most steps.

    Where time is short before devices go, an option that is ready in time comes before
    one that is not; where none is, the one that is ready first.

    Args:
      found: the options, at least one; of equal ones the first is taken.
      horizon_s: seconds until the next change is expected.
      left_s: seconds until devices go.
    """
    ready = [x for x in found if x.cost_s <= left_s]
    if not ready:
        return min(found, key=lambda x: x.cost_s)
    return max(ready, key=lambda x: x.steps(horizon_s))


def meshes_of(plan: Plan) -> list[dict[str, int]]:
    """The mesh of each stage: its axes and their sizes."""
    return [
        dict(zip(stage.axis_names, stage.axis_sizes, strict=True))
        for stage in plan.stages
    ]


def dividing_part(cluster: Cluster, rows: int) -> Cluster | None:
    """The largest part of a cluster that divides a batch, where the whole does not.

    The last devices stay idle.

    >>> str(dividing_part(Cluster.parse("6:cpu"), 32))
    '4:cpu (devices 0-3 of 6)'
    >>> dividing_part(Cluster.parse("8:cpu"), 32)
    """
    if rows % cluster.num_devices == 0:
        return None
    for count in range(cluster.num_devices - 1, 0, -1):
        if rows % count == 0:
            part = cluster.without(devices=cluster.ids[count:])
            if rows % part.num_devices == 0:
                return part
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Horizon:
    """Expects the next change from those that there were.

    Attributes:
      usual_s: seconds between changes that are expected before any is seen.
      changes: how many were seen.
      seen_s: over how many seconds.
    """

    usual_s: float = 600.0
    changes: int = 0
    seen_s: float = 0.0

    def expected_s(self, rest_s: float = math.inf) -> float:
        """Seconds until the next change, or the end of the run in ``rest_s``."""
        return min(rest_s, (self.usual_s + self.seen_s) / (1 + self.changes))


# How long a thread may keep Python to itself.
_SWITCH_S = 5e-4


class Beside:
    """Threads that have the priority of the run.

    On a busy machine one of the least priority might never come to its end.
    """

    def __init__(self) -> None:
        """Does nothing yet."""
        self._changed = threading.Condition()
        self._running = 0
        self._closed = False

    def do(self, work: Callable[[], None]) -> None:
        """Does some work in a thread of its own; nothing once this is closed."""
        with self._changed:
            if self._closed:
                return
            self._running += 1

        def mark_done() -> None:
            try:
                with switching_often():
                    work()
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

        # No daemon: Python waits at its end for work under way.
        threading.Thread(target=mark_done, name="autopar-beside").start()

    def close(self) -> None:
        """Begins no more work; what is under way ends by itself."""
        with self._changed:
            self._closed = True

    def wait(self) -> None:
        """Waits until nothing is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running)


@contextlib.contextmanager
def switching_often() -> Generator[None]:
    """Lets the thread of the run come in quickly while this one works in Python."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


# Prepares likely next clusters while the run goes on.
#
# A thread of low priority plans for one cluster after the other. Programs for CPUs are
# compiled by another process (`autopar.runtime.compiler`) that leaves most of the time
# to the run, others by the thread. Plans go to the cache on disk too (``cache=`` of
# `autopar.parallelize`).

# Most clusters that are prepared at a time: more programs would drive others out.
MOST = 3
# Least priority of a thread on Linux.
_NICE = 19


class Ahead:
    """Prepares clusters in the background; see `prepare`.

    Attributes:
      rows: samples of a step.
      beside: does what is known to pay.
    """

    def __init__(self, step: ParallelStep[..., Any], rows: int) -> None:
        """Has prepared nothing yet.

        Args:
          step: a step that has a plan.
          rows: samples of a step.
        """
        self._step, self.rows = step, rows
        self.beside = Beside()
        self._compiler = Compiler()
        self._wanted: tuple[Cluster, ...] = ()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = self._closed = False

    def prepare(self, clusters: Sequence[Cluster]) -> None:
        """Prepares these clusters next, and forgets those that still waited."""
        with self._changed:
            self._wanted = tuple(clusters)[:MOST]
            if self._thread is None and self._wanted and not self._closed:
                # No daemon: Python waits at its end for a plan under way.
                self._thread = threading.Thread(target=self._work, name="autopar-ahead")
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Prepares nothing more; a program under way is given up."""
        with self._changed:
            self._wanted, self._closed = (), True
            self._changed.notify_all()
        self.beside.close()
        self._compiler.close()

    def while_waiting(self) -> contextlib.AbstractContextManager[None]:
        """Within it, what is prepared comes first: the run waits for a new plan."""
        return self._compiler.hurry()

    def wait(self) -> None:
        """Waits until all that was wanted is prepared."""
        with self.while_waiting(), self._changed:
            self._changed.wait_for(lambda: not (self._wanted or self._busy))
            self.beside.wait()

    def _work(self) -> None:
        _lower_priority()
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._wanted or self._closed)
                if not self._wanted:
                    return
                cluster, *rest = self._wanted
                self._wanted, self._busy = tuple(rest), True
            with switching_often(), compiled_by(self._compiler):
                self._prepare_one(cluster)

    def _prepare_one(self, cluster: Cluster) -> None:
        """Plans for a cluster, and compiles the plan that a change would take."""
        step, preparation = self._step, self._step.preparation
        # The batch of the step may change while this works.
        analysed = step.running.analysed
        found: list[tuple[Plan, Cluster]] = []
        for part in (cluster, dividing_part(cluster, self.rows)):
            if part is None:
                continue
            try:
                setting = preparation.move_setting(step.setting, part)
                plan = preparation.plan(analysed, setting)
                preparation.remember(analysed, setting, plan)
                found.append((plan, part))
            except AutoparError as error:
                LOGGER.info("nothing is prepared for %s: %s", part, error)
        if not found:
            return
        plan, part = min(found, key=lambda pair: pair[0].predicted.step_s)
        try:
            preparation.made_for(analysed, step.setting, part, plan=plan)
        except CompilerClosedError:
            return
        except Exception as error:  # the run goes on without it
            LOGGER.warning("cannot prepare %s: %s", part, error)


def likely_next(
    cluster: Cluster, visited: Sequence[Cluster], check: Callable[[Cluster], None]
) -> list[Cluster]:
    """Clusters that may follow, the most likely first.

    Those that the run came from; one host less (one device less, where there is one
    host); half of the devices; twice as many.

    Args:
      cluster: now.
      visited: clusters before it, the latest last.
      check: raises an error where there are no such devices.

    >>> [str(c) for c in likely_next(Cluster.parse("4x2:h100"), (), lambda found: None)]
    ... # doctest: +NORMALIZE_WHITESPACE
    ['3x2:h100 (devices 0-5 of 4x2)', '2x2:h100 (devices 0-3 of 4x2)', '8x2:h100']
    """
    hosts = cluster.hosts
    makers: list[Callable[[], Cluster]] = [
        *(lambda found=found: found for found in reversed(visited)),
        lambda: (
            cluster.without(hosts[-1])
            if len(hosts) > 1
            else cluster.without(devices=cluster.ids[-1:])
        ),
        lambda: cluster.without(devices=cluster.ids[cluster.num_devices // 2 :]),
        lambda: _double(cluster),
    ]
    found: list[Cluster] = []
    for make in makers:
        with contextlib.suppress(AutoparError):
            other = make()
            check(other)
            if other != cluster and other not in found:
                found.append(other)
    return found


def _double(cluster: Cluster) -> Cluster:
    """Twice as many devices: of the same whole, or in a whole of twice the size.

    Raises:
      ClusterError: groups have no such size.
    """
    if cluster.members is None:
        outer, *rest = cluster.levels
        larger = dataclasses.replace(outer, size=2 * outer.size)
        return dataclasses.replace(cluster, levels=(larger, *rest))
    of = cluster.members
    free = [of.start + p for p in range(_size(of.whole)) if p not in of.positions]
    return cluster.with_devices(free[: cluster.num_devices])


def _size(levels: Sequence[Any]) -> int:
    count = 1
    for level in levels:
        count *= level.size
    return count


def _lower_priority() -> None:
    """Gives this thread the least priority, where the system has one for threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


# Fewest bytes of a move whose rate is remembered: latencies hide that of small ones.
_LARGE_BYTES = 1 << 20


# Name, devices and maker of a plan that comes into question.
_Way = tuple[str, Cluster, Callable[[], Plan]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a change.

    Attributes:
      state: the state under the plan that was chosen.
      chosen: the option that was taken.
      compared: all options.
      horizon_s: seconds until the next change is expected.
      plan_s: seconds of planning.
      compile_s: seconds of compiling.
      move_s: seconds of moving the state.
    """

    state: Any
    chosen: ReplanOption
    compared: tuple[ReplanOption, ...]
    horizon_s: float
    plan_s: float
    compile_s: float
    move_s: float


class Replanner:
    """Re-plans a step; remembers what moving and compiling took.

    Attributes:
      rows: samples of a step.
    """

    def __init__(
        self,
        step: ParallelStep[..., Any],
        rows: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Has moved nothing yet.

        Args:
          step: a step that has a plan.
          rows: samples of a step.
          clock: seconds now.
        """
        self._step, self.rows, self._clock = step, rows, clock
        self._begin_s = clock()
        self._horizon = Horizon()
        self._bytes_per_s = 0.0

    def change(
        self,
        cluster: Cluster,
        state: Any,
        *,
        measured_s: float | None = None,
        left_s: float = math.inf,
        rest_steps: int | None = None,
    ) -> Outcome:
        """Moves the step and its state to another cluster, where that pays.

        Args:
          cluster: the devices that are there now.
          state: the carried state.
          measured_s: seconds of a step under the running plan; None: not known.
          left_s: seconds until devices go.
          rest_steps: steps that are left of the run; None: not known.

        Raises:
          AutoparError: the step cannot be planned there; nothing has changed.
        """
        begin = self._clock()
        correction = self._correction(measured_s)
        found = self._options(cluster, state, correction)
        horizon_s = self._expected_s(found, rest_steps)
        chosen = best_option(found, horizon_s, left_s - (self._clock() - begin))
        planned = self._clock()
        step = self._step
        compiled = planned
        if chosen.name != "stay":
            preparation, analysed = step.preparation, step.running.analysed
            preparation.made_for(
                analysed, step.setting, chosen.cluster, plan=chosen.plan
            )
            compiled = self._clock()
            state = step.replan(chosen.cluster, state, plan=chosen.plan, consume=True)
            jax.block_until_ready(jax.tree.leaves(state))
        end = self._clock()
        self._learn(chosen, end - compiled)
        return Outcome(
            state=state,
            chosen=chosen,
            compared=tuple(found),
            horizon_s=horizon_s,
            plan_s=planned - begin,
            compile_s=compiled - planned,
            move_s=end - compiled,
        )

    def _correction(self, measured_s: float | None) -> float:
        """Measured over predicted seconds of a step of the running plan."""
        predicted_s = self._step.plan.predicted.step_s
        if measured_s is None or predicted_s <= 0:
            return 1.0
        return measured_s / predicted_s

    def _expected_s(self, found: list[ReplanOption], rest_steps: int | None) -> float:
        """Seconds until the next change, or the end of the run."""
        rest_s = math.inf
        if rest_steps is not None:
            slowest = max(found, key=lambda x: x.step_s)
            rest_s = slowest.cost_s + rest_steps * slowest.step_s
        return self.horizon_s(rest_s)

    def horizon_s(self, rest_s: float = math.inf) -> float:
        """Seconds until the next change, or the end of the run in ``rest_s``."""
        seen_s = self._clock() - self._begin_s
        return dataclasses.replace(self._horizon, seen_s=seen_s).expected_s(rest_s)

    def _learn(self, chosen: ReplanOption, move_s: float) -> None:
        """Takes what a change took."""
        horizon = self._horizon
        self._horizon = dataclasses.replace(horizon, changes=horizon.changes + 1)
        if chosen.move_bytes >= _LARGE_BYTES and move_s > 0:
            self._bytes_per_s = chosen.move_bytes / move_s

    def _options(
        self, cluster: Cluster, state: Any, correction: float
    ) -> list[ReplanOption]:
        """The plans to compare; the first error, where there is none.

        Raises:
          AutoparError: no plan can be made.
        """
        found: list[ReplanOption] = []
        failure: Exception | None = None
        for name, part, plan in self._ways(cluster):
            try:
                found.append(self._price(name, part, plan(), state, correction))
            except AutoparError as error:
                failure = failure or error
        if found:
            return found
        assert failure is not None
        raise failure

    def _ways(self, cluster: Cluster) -> Iterator[_Way]:
        """Name, devices and maker of each plan that comes into question."""
        step = self._step
        planner, analysed = step.preparation, step.running.analysed
        if set(step.cluster.ids) <= set(cluster.ids):
            yield from self._staying(cluster)
        fewer = dividing_part(cluster, self.rows)
        for name, part in (("new", cluster), ("fewer", fewer)):
            if part is None:
                continue
            setting = planner.move_setting(step.setting, part)
            known = planner.known_plan(analysed, setting)
            if known is not None:
                yield "known", part, functools.partial(_as_given, known)
            else:
                make = functools.partial(planner.warm, analysed, setting, step.plan)
                yield name, part, make

    def _staying(self, cluster: Cluster) -> Iterator[_Way]:
        """Ways to go on where the state lies, as its devices are all there."""
        step = self._step
        pipelined = len(step.plan.stages) > 1
        if pipelined or cluster.groups or step.cluster.groups:
            if step.cluster == cluster:
                yield "stay", cluster, functools.partial(_as_given, step.plan)
        elif step.cluster.ids != cluster.ids:
            if step.cluster.device == cluster.device:
                yield "stay", step.cluster, functools.partial(_as_given, step.plan)
        else:
            repriced = functools.cache(
                functools.partial(
                    step.preparation.reprice,
                    step.running.analysed,
                    step.setting,
                    cluster,
                    step.plan,
                )
            )
            with contextlib.suppress(AutoparError):
                same = _decides_alike(repriced(), step.plan)
                yield "stay" if same else "layouts", cluster, repriced

    def _price(
        self, name: str, part: Cluster, plan: Plan, state: Any, correction: float
    ) -> ReplanOption:
        """An option with what it costs."""
        step = self._step
        stays = name == "stay"
        setting = step.preparation.move_setting(step.setting, part)
        devices = step.preparation.devices(setting)
        move = Move(0.0, 0.0) if stays else self._move(plan, devices, state)
        compiled = stays or step.preparation.has_program(
            step.running.analysed, plan, devices
        )
        return ReplanOption(
            name=name,
            cluster=part,
            plan=plan,
            step_s=max(plan.predicted.step_s * correction, 1e-9),
            move_bytes=move.nbytes,
            move_s=self._move_s(move, part),
            compiled=compiled,
            compile_s=0.0 if compiled else step.preparation.compile_s,
        )

    def _move(self, plan: Plan, devices: tuple[Any, ...], state: Any) -> Move:
        arrays, _ = flat_state(state)
        shardings = [x.sharding for x in arrays]
        return move_of(shardings, arrays, plan, devices)

    def _move_s(self, move: Move, part: Cluster) -> float:
        """Seconds of a move, by the rate of the last large one if there was one."""
        if self._bytes_per_s:
            return move.nbytes / self._bytes_per_s
        return move.most_bytes / slowest_bytes_per_s(part)


def _as_given(plan: Plan) -> Plan:
    return plan


def _decides_alike(one: Plan, other: Plan) -> bool:
    """Whether two plans run the same program: their predictions may differ."""
    return _decisions(one) == _decisions(other)


def _decisions(plan: Plan) -> tuple[StagePlan, ...]:
    """What a plan decides, without what its codecs are expected to gain and to lose."""

    def bare(stage: StagePlan) -> StagePlan:
        gradients = tuple(
            msgspec.structs.replace(g, error=0.0, saved_s=0.0) for g in stage.gradients
        )
        return msgspec.structs.replace(stage, gradients=gradients)

    return tuple(bare(stage) for stage in program_plan(plan).stages)
