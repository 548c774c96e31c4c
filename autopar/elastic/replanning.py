"""Changes the devices of a run: chooses a plan, compiles it, and moves the state.

While the run compiles a program and moves the state, it runs no steps. The faster steps
of a better plan make up for this time. So a re-plan compares plans by the number of
steps that the run would finish under each of them until the next expected change of
devices.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import msgspec

from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.planner.codecs.adjusted import program_plan
from autopar.planner.idle_devices import dividing_part
from autopar.plans import Plan, StagePlan
from autopar.progress import LOGGER
from autopar.runtime.background import Beside, switching_often
from autopar.runtime.compiler import Compiler, CompilerClosedError, compiled_by
from autopar.runtime.creation import flat_state
from autopar.runtime.parallel_step import ParallelStep
from autopar.runtime.state_mover import Move, move_of, slowest_bytes_per_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplanOption:
    """A plan with which a run may continue after a change of devices.

    Attributes:
      name: ``stay`` (nothing changes), ``layouts`` (the same layouts with other
        codecs), ``known`` (a plan made before), ``new`` (a plan made for this change),
        or ``fewer`` (a plan for fewer devices, whose number divides the batch).
      cluster: the devices that the plan uses.
      plan: the plan.
      step_s: predicted seconds of a step, corrected by the ratio of measured to
        predicted seconds under the plan in use.
      move_bytes: bytes of the state that move between devices, summed over devices.
      move_s: seconds of moving the state.
      compiled: whether the program of the plan is already compiled.
      compile_s: seconds of compiling the program.
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
        """Seconds to move the state and compile, before the first step can run."""
        return self.move_s + self.compile_s

    def steps(self, horizon_s: float) -> float:
        """Number of steps that the run finishes in the next ``horizon_s`` seconds."""
        return max(0.0, horizon_s - self.cost_s) / self.step_s

    def to_data(self, horizon_s: float) -> dict[str, Any]:
        """The option as data for a line of the ledger."""
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
    """Returns the option with which the run finishes the most steps.

    If devices leave soon, only options that are ready in time are compared. If no
    option is ready in time, the result is the option that is ready first.

    Args:
      found: the options, at least one. Of equally good options, the first is returned.
      horizon_s: seconds until the next change is expected.
      left_s: seconds until the devices that leave are gone.
    """
    ready = [x for x in found if x.cost_s <= left_s]
    if not ready:
        return min(found, key=lambda x: x.cost_s)
    return max(ready, key=lambda x: x.steps(horizon_s))


def meshes_of(plan: Plan) -> list[dict[str, int]]:
    """For each stage, the axes of its mesh: name -> size."""
    return [
        dict(zip(stage.axis_names, stage.axis_sizes, strict=True))
        for stage in plan.stages
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class Horizon:
    """Estimates the time of the next change from the rate of changes so far.

    Attributes:
      usual_s: seconds assumed between changes while there has been no change.
      changes: number of changes so far.
      seen_s: seconds during which these changes happened.
    """

    usual_s: float = 600.0
    changes: int = 0
    seen_s: float = 0.0

    def expected_s(self, rest_s: float = math.inf) -> float:
        """Seconds until the next expected change of devices; at most ``rest_s``."""
        return min(rest_s, (self.usual_s + self.seen_s) / (1 + self.changes))


# Plans and compiles for likely next clusters while the run trains.
#
# A thread of low priority plans for one cluster after another. Programs for CPUs are
# compiled by another process (`autopar.runtime.compiler`), which leaves most CPU time
# to the run. Programs for other devices are compiled by the thread. The thread also
# stores plans in the cache on disk (``cache=`` of `autopar.parallelize`).

# At most this many clusters are prepared at a time. More programs would remove others
# from the store of programs.
MOST = 3
# The nice value of a thread with the lowest priority on Linux.
_NICE = 19


class Ahead:
    """Plans and compiles for given clusters in the background; see `prepare`.

    Attributes:
      rows: samples of a step.
      beside: runs background work that the run waits for, at normal priority.
    """

    def __init__(self, step: ParallelStep[..., Any], rows: int) -> None:
        """Starts without clusters to prepare.

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
        """Prepares these clusters next, and drops those that still wait."""
        with self._changed:
            self._wanted = tuple(clusters)[:MOST]
            if self._thread is None and self._wanted and not self._closed:
                # The thread is not a daemon, so Python waits at exit for an unfinished
                # plan.
                self._thread = threading.Thread(target=self._work, name="autopar-ahead")
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Prepares no more clusters; stops a compilation that runs."""
        with self._changed:
            self._wanted, self._closed = (), True
            self._changed.notify_all()
        self.beside.close()
        self._compiler.close()

    def while_waiting(self) -> contextlib.AbstractContextManager[None]:
        """A context in which preparation has normal CPU priority, as the run waits."""
        return self._compiler.hurry()

    def wait(self) -> None:
        """Waits until all given clusters are prepared."""
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
        """Plans for a cluster, and compiles the plan that a re-plan would choose."""
        step, preparation = self._step, self._step.preparation
        # The batch size of the step may change meanwhile, in another thread.
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
        except Exception as error:  # the run goes on without the program
            LOGGER.warning("cannot prepare %s: %s", part, error)


def likely_next(
    cluster: Cluster, visited: Sequence[Cluster], check: Callable[[Cluster], None]
) -> list[Cluster]:
    """Likely next clusters of a run, the most likely first.

    The order is: clusters that the run had before; the present cluster with one host
    less, or with one device less if it has only one host; half of its devices; twice
    its devices.

    Args:
      cluster: current cluster.
      visited: earlier clusters, the latest last.
      check: called with each cluster; raises an error if its devices do not exist.

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
    """A cluster with twice as many devices, of the same whole cluster or a larger one.

    Raises:
      ClusterError: there is no such cluster, for example because the present one
        consists of groups of different devices.
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
    """Gives this thread the lowest CPU priority, if the system can do this."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


# The measured rate of a move, in bytes per second, serves for later predictions only if
# the move had at least this many bytes. In smaller moves, latency distorts the rate.
_LARGE_BYTES = 1 << 20


# An option before it is planned: its name, its devices, and a function that makes its
# plan.
_Way = tuple[str, Cluster, Callable[[], Plan]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a change.

    Attributes:
      state: the state under the chosen plan.
      chosen: the chosen option.
      compared: all options, with their predicted costs.
      horizon_s: seconds until the next change is expected.
      plan_s: seconds of planning.
      compile_s: seconds of compiling.
      move_s: seconds of moving the state.
      fields: further fields of the line in the ledger.
    """

    state: Any
    chosen: ReplanOption
    compared: tuple[ReplanOption, ...]
    horizon_s: float
    plan_s: float
    compile_s: float
    move_s: float
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Replanner:
    """Re-plans a step after changes; measures how fast state moves and how often.

    Attributes:
      rows: samples of a step.
    """

    def __init__(
        self,
        step: ParallelStep[..., Any],
        rows: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts without measurements.

        Args:
          step: a step that has a plan.
          rows: samples of a step.
          clock: returns the present time in seconds.
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
        """Moves the step and its state to other devices, if that pays off.

        Args:
          cluster: the devices that are available now.
          state: the training state, which each step takes and returns.
          measured_s: measured seconds of a step with the plan in use; None: unknown.
          left_s: seconds until the devices that leave are gone.
          rest_steps: number of steps left in the run; None: unknown.

        Raises:
          AutoparError: no plan can be made for the cluster; step and state are then
            unchanged.
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
        """Measured seconds of a step under the plan in use, over predicted seconds."""
        predicted_s = self._step.plan.predicted.step_s
        if measured_s is None or predicted_s <= 0:
            return 1.0
        return measured_s / predicted_s

    def _expected_s(self, found: list[ReplanOption], rest_steps: int | None) -> float:
        """Seconds until the next expected change or the end of the run."""
        rest_s = math.inf
        if rest_steps is not None:
            slowest = max(found, key=lambda x: x.step_s)
            rest_s = slowest.cost_s + rest_steps * slowest.step_s
        return self.horizon_s(rest_s)

    def horizon_s(self, rest_s: float = math.inf) -> float:
        """Seconds until the next expected change of devices; at most ``rest_s``."""
        seen_s = self._clock() - self._begin_s
        return dataclasses.replace(self._horizon, seen_s=seen_s).expected_s(rest_s)

    def _learn(self, chosen: ReplanOption, move_s: float) -> None:
        """Records that a change happened, and at how many bytes/s the state moved."""
        horizon = self._horizon
        self._horizon = dataclasses.replace(horizon, changes=horizon.changes + 1)
        if chosen.move_bytes >= _LARGE_BYTES and move_s > 0:
            self._bytes_per_s = chosen.move_bytes / move_s

    def _options(
        self, cluster: Cluster, state: Any, correction: float
    ) -> list[ReplanOption]:
        """The options to compare, with their costs.

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
        """Yields the options before they are planned: name, devices and planner."""
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
        """Options that keep the state where it is, as its devices stay available."""
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
        """Plans an option and computes its costs."""
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
        """Predicted seconds to move state, at the rate of the last large move."""
        if self._bytes_per_s:
            return move.nbytes / self._bytes_per_s
        return move.most_bytes / slowest_bytes_per_s(part)


def _as_given(plan: Plan) -> Plan:
    return plan


def _decides_alike(one: Plan, other: Plan) -> bool:
    """Whether two plans lead to the same program, even if their predictions differ."""
    return _decisions(one) == _decisions(other)


def _decisions(plan: Plan) -> tuple[StagePlan, ...]:
    """A plan's decisions, without the predicted gains and errors of its codecs."""

    def bare(stage: StagePlan) -> StagePlan:
        gradients = tuple(
            msgspec.structs.replace(g, error=0.0, saved_s=0.0) for g in stage.gradients
        )
        return msgspec.structs.replace(stage, gradients=gradients)

    return tuple(bare(stage) for stage in program_plan(plan).stages)
