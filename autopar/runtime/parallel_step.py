"""A train step that runs under a plan: planner, programs, state and world together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from autopar.cluster import Cluster
from autopar.compression.policies.policy import GradientReport
from autopar.errors import PlanError
from autopar.planner.edited import carried_out
from autopar.planner.options import (
    PlanOptions,
    as_cluster,
    as_plan,
    fitting_layouts,
    sent_by_hand,
    with_codecs_of,
)
from autopar.planner.record import check_plan
from autopar.plans import Plan
from autopar.runtime import agreement, arguments, creation, placement
from autopar.runtime.codec_run import CodecRun
from autopar.runtime.planned import PlannedStep, device_mesh
from autopar.runtime.program_store import ProgramStore
from autopar.runtime.recent import Recent
from autopar.runtime.state_mover import DevicePut, move, named, state_layout
from autopar.runtime.step_planner import ANALYSES, Analysed, StepPlanner
from autopar.runtime.world import World
from autopar_passes.graph.roles import InputRole
from autopar_passes.program.trace import pure_arguments

P = ParamSpec("P")
R = TypeVar("R")

# Most plans that are remembered, by shapes of the arguments and cluster.
PLANS = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a step is planned for.

    Attributes:
      cluster: the cluster; None: as many of the backend's devices as there are.
      plan: a plan to use as it is, instead of planning.
      devices: the devices to run on, or their ids; None: those that the cluster
        names, or the first of the world.
      codecs: whose choice of codecs, and of layouts to keep, holds in place of the
        planner's; None: its own.
      sent: a plan whose codecs hold gradient by gradient; None: none.
    """

    cluster: Cluster | None = None
    plan: Plan | None = None
    devices: tuple[Any, ...] | None = None
    codecs: PlanOptions | None = None
    sent: Plan | None = None


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
    ) -> None:
        """See `autopar.parallelize`, which makes these.

        Args:
          step: the train step.
          setting: what it is planned for.
          options: hints and limits of planning.
          store: where its programs are kept.
          codecs: runs the steps whose gradients have codecs.
          world: the processes and devices; None: those of JAX on the first use.
        """
        self.__name__: str = getattr(step, "__name__", type(step).__name__)
        functools.update_wrapper(self, step)
        self._step = step
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
        self, create_state: Callable[..., Any], *args: Any, batch: Any = None
    ) -> Any:
        """Creates the state directly in its shards; no device holds all of it.

        With an example ``batch`` (or a plan given to `autopar.parallelize`) the
        state lies as the plan wants it. Without, it is split evenly and moved on the
        first call. Codecs start anew with it: residuals of earlier steps are not
        sent to a new state.

        Args:
          create_state: makes the state (for NNX: the model and optimizer).
          args: its arguments.
          batch: an example batch, arrays or ``ShapeDtypeStruct``s.
        """
        abstract = creation.abstract(create_state, args)
        if batch is not None:
            self.prepare(*creation.splat(abstract), batch)
        pure = creation.pure_state(abstract)
        shardings = self._state_shardings(jax.tree.leaves(pure), batch is not None)
        made = placement.create(creation.leaves_of(create_state), args, shardings)
        self._codecs.start_anew()
        tree = jax.tree.structure(pure)
        return creation.rebuilt(abstract, jax.tree.unflatten(tree, made))

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
        next call places it for the plan in use, and sends gradients by the codecs that
        `recode` or a policy had chosen.
        """
        current = self._current
        return self._codecs.saved(None if current is None else current.planned.plan)

    @compression_state.setter
    def compression_state(self, state: Any) -> None:
        self._codecs.restore(state)

    @property
    def telemetry(self) -> dict[str, GradientReport]:
        """What the last step says of each compressed gradient, by parameter.

        Raises:
          PlanError: no step with compressed gradients has run.
        """
        return self._codecs.report()

    def recode(self, codecs: Mapping[str, str] | Literal["auto"]) -> None:
        """Sends gradients by other codecs from the next call on.

        Args:
          codecs: name of a parameter -> codec as text. Sets of codecs that were
            used before are not compiled again while their programs are kept. Or
            ``auto``: they are chosen anew for the layouts in use, by the errors that
            were measured while training where there are any.

        Raises:
          PlanError: a parameter has no compressed gradient, or a codec is not known
            or cannot send it.
        """
        if self._current is None:
            raise PlanError(f"{self.__name__}: recode needs a step that was planned.")
        recoding, plan = self._codecs.recoding, self._current.planned.plan
        if codecs == "auto":
            self._use(self._chosen_anew(plan))
        else:
            self._use(recoding.changed(plan, codecs))

    def _chosen_anew(self, plan: Plan) -> Plan:
        """The layouts of a plan with the codecs that ``auto`` chooses for them."""
        assert self._current is not None
        asked = dataclasses.replace(
            self._setting.codecs or self._planner.options,
            compression="auto",
            layouts=plan,
        )
        analysed, cluster = self._current.analysed, plan.cluster.read()
        return agreement.agree(
            self.world,
            lambda: self._planner.plan(
                analysed, cluster, asked, errors=self._codecs.errors
            ),
        )

    def _use(self, plan: Plan) -> PlannedStep:
        """Runs steps by a plan that differs from the current one in its codecs."""
        assert self._current is not None
        analysed, current = self._current.analysed, self._current.planned
        if plan is current.plan:
            return current
        devices = tuple(current.mesh.devices.flat)
        planned = self._store.program(analysed, plan, devices, like=current)
        self._plans.put(self._place(analysed, self._setting), plan)
        self._current = _Running(analysed, planned)
        return planned

    def prepare(self, *args: Any) -> PlannedStep:
        """Plans for these arguments without running; arrays or structs."""
        structs = self._batches.structs(args, self.world)
        if self._current is None or self._current.analysed.key != (
            arguments.signature(structs)
        ):
            analysed = self._planner.analysed(structs)
            plan = self._plan_for(analysed, self._setting)
            planned = self._program(analysed, plan, self._devices(self._setting))
            self._plans.put(self._place(analysed, self._setting), plan)
            self._current = _Running(analysed, planned)
        return self._current.planned

    def _place(self, analysed: Analysed, setting: Setting) -> Hashable:
        """What a plan that is remembered belongs to."""
        if setting.plan is not None:
            return analysed.key, agreement.content_digest(setting.plan)
        cluster = setting.cluster or self.cluster
        devices = tuple(d.id for d in self._devices(setting))
        asked = setting.codecs or self._planner.options
        plans = [
            p and agreement.content_digest(p) for p in (setting.sent, asked.layouts)
        ]
        codecs = (asked.compression, asked.error_budget, *plans)
        return analysed.key, cluster.fingerprint(), devices, codecs

    def _plan_for(self, analysed: Analysed, setting: Setting) -> Plan:
        """The plan of a setting, the same on every process."""
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
        return agreement.agree(
            self.world,
            lambda: self._planner.plan(
                analysed, cluster, setting.codecs, setting.sent, self._codecs.errors
            ),
        )

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
        given = arguments.positional(self._step, args, kwargs)
        leaves = jax.tree.leaves(pure_arguments(given))
        if any(isinstance(x, Tracer) for x in leaves):
            return self._step(*args, **kwargs)
        planned = self.prepare(*given)
        if planned.sums is not None:
            planned = self._use(self._codecs.resumed(planned.plan))
        placed = self._placed(planned, leaves)
        carried = planned.analysis.carried if self._store.donate else {}
        placement.separate(placed, carried)
        if planned.sums is None:
            flat = planned.function(*placed)
        else:
            flat = self._codecs.run(planned, placed, self.world)
        placement.consume(leaves, placed, carried)
        if planned.sums is not None and (wish := self._codecs.advise(self.world)):
            recoding = self._codecs.recoding
            self._use(recoding.changed(planned.plan, wish, lenient=True))
        return _result(planned, given, flat)

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

    def lower(self, *args: Any) -> Any:
        """Returns JAX's ``Lowered`` of the planned program for these arguments."""
        return self.prepare(*args).lower()

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
        of one's own as that plan says. Layouts that were given as ``layouts=`` are kept
        where the cluster has their mesh; elsewhere new ones are found, with a warning.

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
        codecs, sent = self._setting.codecs, self._setting.sent
        if self._setting.plan is not None:
            model = given or self._setting.plan
            codecs = with_codecs_of(self._planner.options, model)
            sent = sent_by_hand(model)
        asked = codecs or self._planner.options
        if asked.layouts is not None and given is None:
            codecs = fitting_layouts(asked, cluster)
        return Setting(cluster=cluster, devices=chosen, codecs=codecs, sent=sent)


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


def _result(planned: PlannedStep, given: Sequence[Any], flat: Sequence[Any]) -> Any:
    """What the step returns; NNX objects among the arguments are updated."""
    out = jax.tree.unflatten(planned.analysis.pytrees.out_tree, flat)
    mutated = planned.analysis.pytrees.mutated
    if not mutated:
        return out
    state, result = out
    nnx.update(tuple(given[i] for i in mutated), state)
    return result
