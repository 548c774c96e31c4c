"""A train step that runs under a plan: planner, programs, state and world together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from autopar.cluster import Cluster
from autopar.compression.policies.policy import GradientReport
from autopar.errors import PlanError
from autopar.planner.edited import carried_out
from autopar.planner.options import (
    PlanOptions,
    as_cluster,
    as_plan,
    with_codecs_of,
)
from autopar.planner.record import check_plan
from autopar.plans import Plan
from autopar.runtime import agreement, arguments, creation, last_batch, placement
from autopar.runtime.codec_run import CodecRun, recoded
from autopar.runtime.evaluation import Evaluation
from autopar.runtime.last_batch import LastBatch
from autopar.runtime.methods import method_of
from autopar.runtime.planned import PlannedStep, device_mesh
from autopar.runtime.program_store import ProgramStore
from autopar.runtime.recent import Recent
from autopar.runtime.setting import Setting
from autopar.runtime.state_mover import DevicePut, move, named, state_layout
from autopar.runtime.step_planner import ANALYSES, Analysed, StepPlanner
from autopar.runtime.world import World
from autopar_passes.graph.roles import InputRole
from autopar_passes.program.calls import Call
from autopar_passes.program.nnx_objects import exchange
from autopar_passes.program.trace import opened, step_name

P = ParamSpec("P")
R = TypeVar("R")
Q = ParamSpec("Q")
S = TypeVar("S")

# Most plans that are remembered, by shapes of the arguments and cluster.
PLANS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class _Running:
    """The step that runs: the shapes it was planned for, and its program."""

    analysed: Analysed
    planned: PlannedStep


class ParallelStep(Generic[P, R]):
    """A train step that runs under a plan; see `autopar.parallelize`."""

    def __init__(
        self,
        step: Callable[P, R],
        *,
        setting: Setting,
        options: PlanOptions,
        store: ProgramStore,
        codecs: CodecRun,
        world: World | None = None,
        static: Collection[str] = (),
        fewer: LastBatch = "run",
    ) -> None:
        """See `autopar.parallelize`, which makes these.

        Args:
          step: the train step.
          setting: what it is planned for.
          options: hints and limits of planning.
          store: where its programs are kept.
          codecs: runs the steps whose gradients have codecs.
          world: the processes and devices; None: those of JAX on the first use.
          static: names of arguments that are part of the program.
          fewer: what to do with a batch of fewer rows.
        """
        functools.update_wrapper(self, step)
        self.__name__: str = step_name(step)
        self._step = step
        self._static = frozenset(static)
        self._last_batch: LastBatch = fewer
        self._world = world
        self._setting = setting
        self._planner = StepPlanner(step, options)
        self._store = store
        self._codecs = codecs
        self._batches = arguments.BatchArguments(step, ANALYSES)
        # What `recode` has changed stays changed where a cluster comes back.
        self._plans: Recent[Hashable, Plan] = Recent(PLANS)
        self._current: _Running | None = None

    @property
    def world(self) -> World:
        """The processes and devices that the step may use."""
        if self._world is None:
            self._world = World.current()
        return self._world

    @property
    def plan(self) -> Plan:
        """The plan in use.

        Raises:
          PlanError: no plan has been made yet.
        """
        if self._current is not None:
            return self._current.planned.plan
        if self._setting.plan is not None:
            return self._setting.plan
        raise PlanError(
            f"{self.__name__}: no plan yet: it is made on the first call, or give "
            "init(..., batch=...) an example batch."
        )

    @property
    def cluster(self) -> Cluster:
        """The cluster that is planned for."""
        if self._setting.cluster is None:
            count = len(self._setting.devices or self.world.devices)
            local = Cluster.local(count)
            self._setting = dataclasses.replace(self._setting, cluster=local)
            return local
        return self._setting.cluster

    def init(
        self,
        create_state: Callable[..., Any],
        *args: Any,
        batch: Any = None,
        others: Sequence[Any] | Mapping[str, Any] | None = None,
    ) -> Any:
        """Creates the state directly in its shards; no device holds all of it.

        With an example ``batch`` (or a plan given to `autopar.parallelize`) the
        state lies as the plan wants it. Without, it is split evenly and moved on the
        first call. Codecs start anew with it: residuals of earlier steps are not
        sent to a new state.

        Args:
          create_state: makes the state (for NNX: the model and optimizer). A plain
            tuple holds several leading arguments of the step.
          args: its arguments.
          batch: an example batch, arrays or ``ShapeDtypeStruct``s, for a step whose
            one further argument is the batch.
          others: for any other step: all arguments after the state, in their order,
            or by name.

        Raises:
          PlanError: both ``batch`` and ``others`` are given.
        """
        if batch is not None and others is not None:
            raise PlanError(
                f"{self.__name__}: init takes batch= or others=, not both: others= "
                "holds the batch as well."
            )
        shapes = creation.state_shapes(create_state, args)
        rest = others if batch is None else (batch,)
        if rest is not None:
            named = dict(rest) if isinstance(rest, Mapping) else {}
            placed = () if named else tuple(rest)
            self.prepare(*shapes.arguments(), *placed, **named)
        shardings = self._state_shardings(shapes.structs, rest is not None)
        made = placement.create(creation.leaves_of(create_state), args, shardings)
        self._codecs.start_anew()
        return shapes.state(made)

    def _state_shardings(self, leaves: Sequence[Any], planned: bool) -> list[Any]:
        if planned and self._current is not None:
            return self._current.planned.in_shardings[: len(leaves)]
        setting, given = self._setting, self._setting.plan
        if given is not None:
            arguments.check_shapes(self.__name__, given, leaves)
            mesh = device_mesh(given, self._devices(setting))
            return creation.plan_shardings(given, mesh, len(leaves))
        devices = self._devices(setting)
        if setting.devices is None:
            devices = devices[: self.cluster.num_devices]
        return creation.even_shardings(leaves, devices)

    @property
    def compression_state(self) -> Any:
        """The state of the codecs: residuals and what they learned; None: none yet.

        Save it with the train state. After a restart, assign what was saved; the
        next call places it for the plan in use.
        """
        return self._codecs.state

    @compression_state.setter
    def compression_state(self, state: Any) -> None:
        self._codecs.restore(state)

    @property
    def telemetry(self) -> dict[str, GradientReport]:
        """Telemetry of the last step for each compressed gradient, by parameter.

        Raises:
          PlanError: no step with compressed gradients has run.
        """
        return self._codecs.report()

    def recode(self, codecs: Mapping[str, str]) -> None:
        """Sends gradients by other codecs from the next call on.

        Args:
          codecs: name of a parameter -> codec as text. Sets of codecs that were
            used before are not compiled again while their programs are kept.

        Raises:
          PlanError: a parameter has no compressed gradient.
        """
        if self._current is None:
            raise PlanError(f"{self.__name__}: recode needs a step that was planned.")
        analysed, current = self._current.analysed, self._current.planned
        plan = recoded(current.plan, codecs)
        devices = tuple(current.mesh.devices.flat)
        planned = self._store.program(analysed, plan, devices, like=current)
        self._plans.put(self._place(analysed, self._setting), plan)
        self._current = _Running(analysed, planned)

    def prepare(self, *args: Any, **kwargs: Any) -> PlannedStep:
        """Plans for these arguments without running; arrays or structs."""
        return self._prepare(opened(self._step, args, kwargs, self._static))

    def _prepare(self, call: Call) -> PlannedStep:
        """Plans for the arguments of a call."""
        structs = self._batches.structs(call, self.world)
        if self._current is None or not self._current.analysed.fits(structs):
            analysed = self._planner.analysed(structs)
            plan = self._plan_for(analysed, self._setting, self._running_beside(call))
            planned = self._program(analysed, plan, self._devices(self._setting))
            self._plans.put(self._place(analysed, self._setting), plan)
            self._current = _Running(analysed, planned)
        return self._current.planned

    def _running_beside(self, call: Call) -> Plan | None:
        """The plan that runs, if a call has fewer rows of the batch than it."""
        if self._current is None or self._setting.plan is not None:
            return None
        running, count = self._current.planned, self.world.process_count
        fewer = last_batch.fewer_rows(call, running, count)
        return None if fewer is None else running.plan

    def _fitted(self, call: Call) -> Call:
        """The call with the rows that the step is to run."""
        if self._current is None or self._last_batch == "run":
            return call
        running, count = self._current.planned, self.world.process_count
        rows = last_batch.fewer_rows(call, running, count)
        if rows is None:
            return call
        return last_batch.fitted(call, rows, running.plan, self._last_batch, count)

    def _place(self, analysed: Analysed, setting: Setting) -> Hashable:
        """What a plan that is remembered belongs to."""
        if setting.plan is not None:
            return analysed.key, agreement.content_digest(setting.plan)
        cluster = setting.cluster or self.cluster
        devices = tuple(d.id for d in self._devices(setting))
        asked = setting.codecs or self._planner.options
        codecs = (asked.compression, asked.error_budget)
        return analysed.key, cluster.fingerprint(), devices, codecs

    def _plan_for(
        self, analysed: Analysed, setting: Setting, beside: Plan | None = None
    ) -> Plan:
        """The plan of a setting, the same on every process.

        With a plan to be ``beside``, the state lies as in that one.
        """
        known = self._plans.get(self._place(analysed, setting))
        if known is not None:
            return known
        if (given := setting.plan) is not None:
            if not given.edited:
                return given
            return agreement.agree(
                self.world,
                lambda: carried_out(
                    analysed.analysis, given, seconds=self._planner.options.seconds
                ),
            )
        cluster = setting.cluster or self.cluster
        find = functools.partial(self._planner.plan, analysed, cluster)
        if beside is not None:
            find = functools.partial(
                self._planner.plan_beside, analysed, cluster, beside
            )
        return agreement.agree(self.world, lambda: find(setting.codecs))

    def _program(
        self, analysed: Analysed, plan: Plan, devices: Sequence[Any]
    ) -> PlannedStep:
        """The program of a plan, once all processes have checked that it fits."""
        agreement.check_same(self.world, plan, analysed.analysis.fingerprint)
        check_plan(analysed.analysis, plan)
        self.world.check_mesh(list(device_mesh(plan, devices).devices.flat))
        return self._store.program(analysed, plan, devices)

    def _devices(self, setting: Setting) -> tuple[Any, ...]:
        """The devices that a setting may use."""
        if setting.devices is not None:
            return self.world.take(setting.devices)
        cluster = setting.cluster
        if cluster is None or cluster.members is None:
            return self.world.devices
        return self.world.at(cluster.ids)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs one step; see `autopar.parallelize`. Under a JAX transform, as it is."""
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs))):
            return self._step(*args, **kwargs)
        with exchange():
            call = opened(self._step, args, kwargs, self._static, within=True)
            return self._run(call)

    def _run(self, call: Call) -> Any:
        """Runs one step on the arrays of a call."""
        arguments.check_alive(self.__name__, call)
        call = self._fitted(call)
        planned = self._prepare(call)
        placed = self._placed(planned, call.arrays)
        carried = planned.analysis.carried if self._store.donate else {}
        placement.separate(call.arrays, placed, carried)
        if planned.sums is None:
            flat = planned.function(*placed)
        else:
            flat = self._codecs.run(planned, placed, self.world)
        placement.consume(call.arrays, placed, carried)
        if planned.sums is not None and (wish := self._codecs.advise(self.world)):
            self.recode(wish)
        return planned.analysis.pytrees.result.returned(flat)

    def _placed(self, planned: PlannedStep, leaves: Sequence[Any]) -> list[Any]:
        """The flat arguments where the program wants them."""
        graph, shardings = planned.analysis.graph, planned.in_shardings
        whole: list[Any] = []
        placed: list[Any] = []
        for x, given, sharding in zip(leaves, graph.inputs, shardings, strict=True):
            shape = graph.values[given.value].shape
            if given.role is InputRole.BATCH and np.shape(x) != tuple(shape):
                placed.append(placement.place_rows(x, shape, sharding))
                continue
            if placement.held_here(x, sharding):
                whole.append(x)
            placed.append(placement.place(x, sharding))
        agreement.check_equal(self.world, whole)
        return placed

    def __repr__(self) -> str:
        """The step's name and plan in one line."""
        if self._current is None and self._setting.plan is None:
            return f"<ParallelStep {self.__name__}, no plan yet>"
        return f"<ParallelStep {self.__name__}, {self.plan!r}>"

    def __set_name__(self, owner: type, name: str) -> None:
        """Learns the name of the method that it decorates."""
        self.__name__ = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The step as a method of an object (`autopar.runtime.methods`)."""
        return self if instance is None else method_of(self, instance, self._bound)

    def _bound(self, instance: Any) -> ParallelStep[..., Any]:
        """The step of one object, with plans of its own."""
        return ParallelStep(
            functools.partial(self._step, instance),
            setting=self._setting,
            options=self._planner.options,
            store=self._store.empty(),
            codecs=CodecRun(self._codecs.policy),
            world=self._world,
            static=self._static,
            fewer=self._last_batch,
        )

    def jit(
        self, function: Callable[Q, S], *, static_argnames: str | Sequence[str] = ()
    ) -> Evaluation[Q, S]:
        """Compiles a function, such as evaluation, for state as the step has it.

        State that the step returned, or that `init` made, stays where it lies. The
        batch is split over the axes that split the step's batch. Nothing is consumed.

        Args:
          function: such as ``evaluate(state, batch)``.
          static_argnames: names of arguments that are part of the program.

        Raises:
          PlanError: on a call, if the step has not been planned yet.
        """
        names = (
            (static_argnames,) if isinstance(static_argnames, str) else static_argnames
        )
        return Evaluation(function, self._running, lambda: self.world, names)

    def _running(self) -> PlannedStep:
        if self._current is None:
            raise PlanError(
                f"{self.__name__}: no plan yet: call the step first, or make the state "
                "with init(..., batch=...)."
            )
        return self._current.planned

    def shardings(self, state: Any) -> Any:
        """The ``NamedSharding`` of each array of a state under the plan in use.

        Args:
          state: one pytree, or a tuple of the leading arguments; arrays or structs.

        Returns:
          The same trees with a sharding in the place of each array; an NNX object
          becomes its ``nnx.State``.

        Raises:
          PlanError: the step has not been planned, or the state is of another step.
        """
        running = self._running()
        named(self.__name__, running.analysis, state, structs=True)
        return creation.with_leaves(state, running.in_shardings)

    def compile(self, *args: Any, **kwargs: Any) -> Plan:
        """Plans and compiles for these arguments without running; arrays or structs.

        The next call with such arguments finds the program compiled.
        """
        planned = self.prepare(*args, **kwargs)
        planned.compile()
        return planned.plan

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Returns JAX's ``Lowered`` of the planned program for these arguments."""
        return self.prepare(*args, **kwargs).lower()

    def replan(
        self,
        cluster: Cluster | str,
        state: Any,
        devices: Sequence[Any] | None = None,
        *,
        plan: Plan | str | None = None,
    ) -> Any:
        """Plans for another cluster, moves the state there and returns it.

        The next call of the step runs under the new plan, which is compiled here.
        Where this raises, nothing has changed: the next call runs under the old plan
        with the old state. Gradients are sent as was asked for at first, with a plan
        of one's own as that plan says (its ``compression.mode``).

        Args:
          cluster: the cluster to move to, such as ``Cluster.local(devices=4)``, or
            its text, such as ``"4:cpu"``.
          state: the carried state: one pytree, or a tuple of the leading
            arguments (NNX: the model and optimizer, updated in place).
          devices: the devices to run on, or their ids; default: those that the
            cluster names, or the first of the world.
          plan: a plan for the new cluster, or its JSON file, used instead of planning
            for the arguments of the last call.

        Raises:
          ClusterError: the text describes no cluster.
          InfeasibleError: no plan fits the memory of a device.
          PlanError: the step has not been planned before, the state or the plan is
            of another step, or a device is missing.
        """
        if self._current is None:
            raise PlanError(
                f"{self.__name__}: replan needs a step that ran, or "
                "init(..., batch=...)."
            )
        given = None if plan is None else as_plan(plan)
        setting = self._next(as_cluster(cluster), devices, given)
        analysed, old = self._current.analysed, self._current.planned
        arrays = named(self.__name__, analysed.analysis, state)
        chosen = given or self._plan_for(analysed, setting)
        planned = self._program(analysed, chosen, self._devices(setting))
        planned.compile()
        moved = _moved(arrays, old, planned)
        self._codecs.check(planned.sums)
        where = self._place(analysed, setting)
        new = creation.replaced(state, moved)
        self._setting, self._current = setting, _Running(analysed, planned)
        self._plans.put(where, chosen)
        return new

    def _next(
        self, cluster: Cluster, devices: Sequence[Any] | None, given: Plan | None
    ) -> Setting:
        """The setting of `replan`, with the codecs that were asked for."""
        chosen = None if devices is None else self.world.take(devices)
        codecs = self._setting.codecs
        if self._setting.plan is not None:
            codecs = with_codecs_of(self._planner.options, given or self._setting.plan)
        return Setting(cluster=cluster, devices=chosen, codecs=codecs)


def _moved(state: dict[str, Any], old: PlannedStep, new: PlannedStep) -> list[Any]:
    """The leaves of a state, where another plan wants them."""
    count = len(state)
    lies = all(
        isinstance(x, jax.Array) and x.sharding.is_equivalent_to(s, x.ndim)
        for x, s in zip(state.values(), old.in_shardings, strict=False)
    )
    source = state_layout(old.analysis, old.plan, count) if lies else None
    target = state_layout(new.analysis, new.plan, count)
    return list(move(state, source, target, DevicePut((new.mesh,))).values())
