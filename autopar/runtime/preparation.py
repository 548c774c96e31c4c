"""Turns the shapes of a call into the program that all processes run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar import progress
from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.garbage import collector_paused
from autopar.planner.cache import PlanCache
from autopar.planner.codecs.choose import EDITED, Errors
from autopar.planner.edited import carried_out
from autopar.planner.options import PlanOptions, as_cluster, as_plan
from autopar.planner.record import check_plan
from autopar.planner.replicas import check_mesh
from autopar.plans import Plan
from autopar.runtime import agreement, arguments, creation, placement
from autopar.runtime.batch_rows import Rows, place_rows
from autopar.runtime.placement import device_mesh, home_meshes, stage_meshes
from autopar.runtime.planned import PlannedStep
from autopar.runtime.program_store import ProgramStore
from autopar.runtime.recent import Recent
from autopar.runtime.stages.placing import moved_between
from autopar.runtime.stages.placing import place_arrays as placed_on_processes
from autopar.runtime.stages.planned import check_world
from autopar.runtime.stages.transport import Links
from autopar.runtime.state_mover import DevicePut, move, state_layout
from autopar.runtime.step_planner import Analysed, StepPlanner
from autopar.runtime.world import World
from autopar.steps import program_text
from autopar_passes import jax_compat
from autopar_passes.graph.operators import GraphInput
from autopar_passes.graph.roles import InputRole
from autopar_passes.jax_meshes import without_mesh
from autopar_passes.program.calls import StepCall


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The cluster, plan, devices and codecs for which a step is planned.

    Attributes:
      cluster: the cluster; None for all devices of the backend.
      plan: a plan from the user, which is used instead of planning; None to plan.
      devices: the devices to run on, or their ids; None for the devices that the
        cluster names, or the first devices of the world.
      codecs: planning options to use instead of the planner's own; they differ in
        ``compression``, ``error_budget`` and ``layouts``. None for the planner's own.
      sent: a plan whose codec of each gradient the new plan must use; None to choose
        codecs.
    """

    cluster: Cluster | None = None
    plan: Plan | None = None
    devices: tuple[Any, ...] | None = None
    codecs: PlanOptions | None = None
    sent: Plan | None = None


def moved_setting(
    setting: Setting,
    options: PlanOptions,
    cluster: Cluster,
    devices: tuple[Any, ...] | None,
    given: Plan | None,
) -> Setting:
    """Returns a setting for another cluster, with the codecs that the user requested.

    Args:
      setting: the setting that the step was planned for.
      options: hints and limits of planning.
      cluster: the cluster to move to.
      devices: the devices to run on there.
      given: a plan for that cluster.

    Raises:
      PlanError: the codecs of the plan are not those of one ``compression=`` value.
    """
    codecs, sent = setting.codecs, setting.sent
    if setting.plan is not None:
        model = given or setting.plan
        codecs, sent = with_codecs_of(options, model), sent_by_hand(model)
    asked = codecs or options
    if asked.layouts is not None and given is None:
        codecs = fitting_layouts(asked, cluster)
    return Setting(cluster=cluster, devices=devices, codecs=codecs, sent=sent)


def with_codecs_of(options: PlanOptions, plan: Plan) -> PlanOptions:
    """Returns the options with the ``compression=`` that a plan was made with.

    If a user chose codecs for single gradients (`sent_by_hand`), ``compression=`` can
    name only one of them. The function takes the codec whose gradients have the most
    bytes before compression, and layouts are then planned for that codec.
    """
    mode = plan.compression.mode
    if mode == "none" or _by_hand(plan):
        sent = _dense_bytes(plan)
        mode = max(sent, key=lambda text: sent[text], default="none")
    budget = plan.compression.error_budget if mode == "auto" else None
    return dataclasses.replace(options, compression=mode, error_budget=budget)


def sent_by_hand(plan: Plan) -> Plan | None:
    """Returns the plan if no ``compression=`` value yields its codecs; else None.

    No single value does if a user set the codecs of single gradients, or if a plan
    without compression has several codecs in use.
    """
    several = plan.compression.mode == "none" and len(_dense_bytes(plan)) > 1
    return plan if several or (_by_hand(plan) and _dense_bytes(plan)) else None


def _by_hand(plan: Plan) -> bool:
    return plan.compression.mode == EDITED or "gradients" in plan.changed_parts


def _dense_bytes(plan: Plan) -> dict[str, float]:
    """Returns the uncompressed bytes of the gradients that each codec sends.

    The bytes are those of one device. The codec ``dense`` is left out if some gradient
    has another codec, because a plan with any codec may still send gradients densely if
    that is faster.
    """
    found: dict[str, float] = {}
    for g in plan.gradients:
        if g.codec:
            found[g.codec] = found.get(g.codec, 0.0) + g.dense_bytes
    return {text: found[text] for text in set(found) - {"dense"}} or found


def fitting_layouts(options: PlanOptions, cluster: Cluster) -> PlanOptions:
    """Returns the options, without ``layouts`` if these do not fit a cluster.

    Layouts belong to one mesh. If the cluster does not have this mesh, the function
    warns that the planner will find new layouts.
    """
    kept = options.layouts
    if kept is None:
        return options
    try:
        check_mesh(kept, cluster)
    except PlanError as error:
        warnings.warn(
            f"layouts=: {error} New layouts are found for it, with the same codecs. "
            "Give replan(..., plan=) for layouts of your own.",
            stacklevel=4,
        )
        return dataclasses.replace(options, layouts=None)
    return options


# The largest number of plans that a `Preparation` remembers. Each plan belongs to a
# signature of the arguments and a setting (cluster, devices and codecs).
PLANS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """The running step: its analysis and its program.

    Attributes:
      analysed: the analysis of the step, for the shapes that it was planned for.
      planned: the program of the plan.
      ready: whether all processes have compiled the program.
      full: the step of a full batch, if this step is for a batch with fewer rows; None
        otherwise. Both steps have the same shardings of the state.
    """

    analysed: Analysed
    planned: PlannedStep
    ready: bool = False
    full: PlannedStep | None = None

    @property
    def of_full_batch(self) -> PlannedStep:
        """The step that was planned for a full batch."""
        return self.full or self.planned


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A setting, the plan made for it, and the compiled program of that plan."""

    setting: Setting
    plan: Plan
    planned: PlannedStep


class Preparation:
    """Analyses, plans and builds a step, the same way on all processes."""

    def __init__(
        self,
        planner: StepPlanner,
        store: ProgramStore,
        world: Callable[[], World],
        cluster: Callable[[], Cluster],
        errors: Callable[[], Errors],
    ) -> None:
        """Creates a preparation without plans.

        Args:
          planner: plans the step.
          store: keeps the programs of the step.
          world: returns the processes and devices.
          cluster: returns the cluster for settings without a cluster.
          errors: returns the measured relative errors of codecs.
        """
        self.planner = planner
        self._store = store
        self._world = world
        self._cluster = cluster
        self._errors = errors
        # The key is a call's signature and a setting. If a step returns to an earlier
        # cluster, its plan there still has the codecs that `recode` had set.
        self._plans: Recent[Hashable, Plan] = Recent(PLANS)
        # The functions that have run; the first call of a function compiles it.
        self._started: weakref.WeakSet[Any] = weakref.WeakSet()
        self._compared = agreement.StepComparison()
        self._links: Links | None = None
        # Plans that this process remembers from earlier sets of processes.
        self._earlier: dict[Hashable, Plan] = {}

    def enter(self, cache: PlanCache | None) -> None:
        """Prepares for a new set of processes that may remember different plans.

        The new set uses the plans that its process 0 remembers.

        Args:
          cache: the folder of saved plans, used if the planner has none yet.
        """
        self.planner.cache = self.planner.cache or cache
        kept = {key: self._plans.peek(key) for key in self._plans}
        self._earlier = {**self._earlier, **kept}
        self._plans = Recent(PLANS)
        self._started = weakref.WeakSet()
        self._links = None

    @without_mesh()
    def analyse(self, structs: StepCall) -> Analysed:
        """Returns the analysis of the step for a call with structs of global shapes.

        Raises:
          TraceError: JAX cannot trace the step.
        """
        with agreement.tell_errors(self._world().planning, "tracing the step"):
            return self.planner.analyse_structs(structs)

    def remember(self, analysed: Analysed, setting: Setting, plan: Plan) -> None:
        """Remembers the plan of a setting, for a later use of the same setting."""
        self._plans.put(self._place(analysed, setting), plan)

    def remember_for_next(
        self, analysed: Analysed, setting: Setting, plan: Plan
    ) -> None:
        """Remembers a plan that the next set of processes uses for a setting."""
        self._earlier[self._place(analysed, setting)] = plan

    @without_mesh()
    def plan(
        self, analysed: Analysed, setting: Setting, beside: Plan | None = None
    ) -> Plan:
        """Returns the plan of a setting, the same plan on every process.

        If another plan is given as ``beside``, the returned plan shards the state like
        that plan.
        """
        known = self._plans.get(self._place(analysed, setting))
        if known is not None:
            return known
        given = setting.plan
        if beside is not None:
            on = setting.cluster or (
                self._cluster() if given is None else beside.cluster.read()
            )
            sent = setting.sent if given is None else beside
            return agreement.agree(
                self._world().planning,
                lambda: self.planner.plan_beside(
                    analysed, on, beside, setting.codecs, sent
                ),
            )
        if given is not None:
            if not given.changed_parts:
                return given
            return agreement.agree(
                self._world().planning,
                lambda: carried_out(
                    analysed.analysis, given, seconds=self.planner.options.seconds
                ),
            )
        cluster = self._on(setting)
        place = self._place(analysed, setting)
        return agreement.agree(
            self._world().planning,
            lambda: (
                self._earlier.get(place)
                or self.planner.plan(
                    analysed, cluster, setting.codecs, setting.sent, self._errors()
                )
            ),
        )

    @without_mesh()
    def made_for(
        self,
        analysed: Analysed,
        setting: Setting,
        cluster: Cluster | str,
        devices: Sequence[Any] | None = None,
        plan: Plan | str | None = None,
    ) -> Made:
        """Returns the plan and the compiled program of a step on another cluster.

        Args:
          analysed: the analysis of the step.
          setting: the setting that the step runs under.
          cluster: the cluster to move to.
          devices: the devices to run on there, or their ids.
          plan: a plan to use there instead of planning, or its file.

        Raises:
          AutoparError: for the same reasons as `autopar.ParallelStep.replan`.
        """
        given = None if plan is None else as_plan(plan)
        moved = self.move_setting(setting, cluster, devices, given)
        chosen = given or self.plan(analysed, moved)
        planned = self.program(analysed, chosen, moved)
        agreement.run_together(
            self._world(), "compiling", lambda: self.compile(planned)
        )
        return Made(moved, chosen, planned)

    def move_setting(
        self,
        setting: Setting,
        cluster: Cluster | str,
        devices: Sequence[Any] | None = None,
        given: Plan | None = None,
    ) -> Setting:
        """Returns a setting on another cluster; see `made_for` for the arguments."""
        taken = None if devices is None else self._world().take(devices)
        options = self.planner.options
        return moved_setting(setting, options, as_cluster(cluster), taken, given)

    def known_plan(self, analysed: Analysed, setting: Setting) -> Plan | None:
        """Returns the plan of a setting from memory or disk; None if neither has it."""
        found = self._plans.get(self._place(analysed, setting))
        if found is None and setting.sent is None and not self._errors():
            cluster = self._on(setting)
            found = self.planner.plan_on_disk(analysed, cluster, setting.codecs)
        return found

    @without_mesh()
    def warm(self, analysed: Analysed, setting: Setting, running: Plan) -> Plan:
        """Finds a good plan of a setting in a short time (`StepPlanner.warm`)."""
        cluster = self._on(setting)
        return agreement.agree(
            self._world().planning,
            lambda: self.planner.warm(
                analysed,
                cluster,
                running,
                setting.codecs,
                setting.sent,
                self._errors(),
            ),
        )

    @without_mesh()
    def reprice(
        self, analysed: Analysed, setting: Setting, cluster: Cluster, plan: Plan
    ) -> Plan:
        """Returns a plan's layouts with newly chosen codecs, for another cluster.

        Args:
          analysed: the analysis of the step.
          setting: the setting that the step runs under.
          cluster: a cluster with the mesh of the plan, such as one with slower links.
          plan: the plan with the layouts.

        Raises:
          PlanError: the cluster does not have the plan's mesh.
        """
        asked = setting.codecs or self.planner.options
        asked = dataclasses.replace(asked, layouts=plan, microbatches=None)
        return agreement.agree(
            self._world().planning,
            lambda: self.planner.plan(
                analysed, cluster, asked, setting.sent, self._errors()
            ),
        )

    def has_program(
        self, analysed: Analysed, plan: Plan, devices: Sequence[Any]
    ) -> bool:
        """Whether the store has a plan's compiled program on a setting's devices."""
        return self._store.is_compiled(analysed, plan, devices)

    @property
    def compile_s(self) -> float:
        """Seconds that the last compilation took."""
        return self._store.compile_s

    @without_mesh()
    def recode_plan(self, analysed: Analysed, setting: Setting, plan: Plan) -> Plan:
        """Returns a plan with the same layouts and the codecs that ``auto`` chooses."""
        asked = dataclasses.replace(
            setting.codecs or self.planner.options, compression="auto", layouts=plan
        )
        cluster = plan.cluster.read()
        return agreement.agree(
            self._world().planning,
            lambda: self.planner.plan(analysed, cluster, asked, errors=self._errors()),
        )

    @without_mesh()
    def program(self, analysed: Analysed, plan: Plan, setting: Setting) -> PlannedStep:
        """Returns the program of a plan, after a check that all processes hold the same
        plan.
        """
        devices = self.devices(setting)
        if (world := self._world().planning).process_count > 1:
            with agreement.tell_errors(world, "comparing the traced steps"):
                step = program_text.identity(analysed.analysis)
            agreement.check_same(
                world, plan, step, lambda: program_text.lines(analysed.analysis)
            )
        links = None
        with agreement.tell_errors(self._world(), "building the program"):
            if len(plan.stages) > 1:
                check_world(self._world(), plan, devices)
            else:
                check_plan(analysed.analysis, plan)
                self._world().check_mesh(list(device_mesh(plan, devices).devices.flat))
        if len(plan.stages) > 1:
            links = self._links_to_others()
        with agreement.tell_errors(self._world(), "building the program"):
            return self._store.program(analysed, plan, devices, links=links)

    def coded_step(
        self, analysed: Analysed, plan: Plan, setting: Setting, like: PlannedStep
    ) -> PlannedStep:
        """Returns the program of a plan that differs from ``like``'s only in codecs."""
        devices = self.devices(setting)
        return self._store.program(analysed, plan, devices, like=like, links=like.links)

    def _links_to_others(self) -> Links | None:
        """Returns the links to the other processes; creates them on the first call.

        Returns None if this process is the only one.
        """
        if self._links is None and self._world().process_count > 1:
            self._links = Links(self._world())
        return self._links

    def links_between(self, old: PlannedStep, new: PlannedStep) -> Links | None:
        """Returns the links over which the state moves between two plans.

        None if the state needs no links: both plans use the same devices and neither
        step has links, or there is only one process.

        Args:
          old: the step under the plan that the state was made by.
          new: the step under the plan that the state is moved to.
        """
        devices = [set(step.mesh.devices.flat) for step in (old, new)]
        if devices[0] == devices[1] and old.links is None and new.links is None:
            return None
        return self._links_to_others()

    def is_compiled(self, planned: PlannedStep) -> bool:
        """Whether a program has run before."""
        return planned.function in self._started

    def load_program(self, planned: PlannedStep) -> None:
        """Marks a program as compiled, so that `compile` does nothing for it."""
        self._started.add(planned.function)

    @without_mesh()
    def compile(self, planned: PlannedStep) -> None:
        """Compiles a program, and measures the time."""
        with self._store.compiling(planned):
            planned.compile()

    @contextlib.contextmanager
    def compiling(self, planned: PlannedStep, name: str) -> Generator[None]:
        """Shows and times the compilation of a program in the ``with`` block.

        Does nothing for a program that has run before, because only the first run
        compiles.
        """
        if self.is_compiled(planned):
            yield
            return
        stage = progress.stage(f"compiling {name}")
        told, timed = progress.show_progress(), self._store.compiling(planned)
        with told, stage, timed, collector_paused():
            yield
        self._started.add(planned.function)

    def place_arguments(
        self, planned: PlannedStep, leaves: Sequence[Any], *, first: bool
    ) -> list[Any]:
        """Returns the flat arguments with the shardings that a program expects.

        Args:
          planned: the program.
          leaves: the arguments.
          first: whether this is the first step that runs the program.

        Raises:
          PlanError: an array that each process holds a copy of differs between
            processes, in this step or in one of the steps before.
        """
        graph, shardings = planned.analysis.graph, planned.in_shardings
        if first:
            agreement.warn_of_equal_rows(self._world(), _own_rows(planned, leaves))
        if planned.links is not None:
            return placed_on_processes(
                planned.links,
                {i.path: x for i, x in zip(graph.inputs, leaves, strict=True)},
                [graph.values[i.value].shape for i in graph.inputs],
                shardings,
                first=first,
            )
        every = self.place_some(planned, dict(enumerate(leaves)), first=first)
        return list(every.values())

    def placing(
        self, planned: PlannedStep
    ) -> Callable[[Mapping[int, Any]], Mapping[int, Any]] | None:
        """Returns `place_some` for a program; None in one process."""
        if self._world().process_count == 1:
            return None
        return functools.partial(self.place_some, planned)

    def place_some(
        self, planned: PlannedStep, leaves: Mapping[int, Any], *, first: bool = False
    ) -> dict[int, Any]:
        """Returns some of the flat arguments, placed; see `place_arguments`.

        All processes must place arguments of the same positions.

        Args:
          planned: a program whose stages all processes run.
          leaves: position of an argument -> the array.
          first: whether this is the first step that runs the program.
        """
        inputs, shardings = planned.analysis.graph.inputs, planned.in_shardings
        values = planned.analysis.graph.values
        whole: dict[str, Any] = {}
        rows: dict[int, Rows] = {}
        placed: dict[int, Any] = {}
        world = self._world()
        # In a first step, the processes compare arrays on the host, by an exchange
        # that also reports failures. So an error here reaches the other processes.
        what = "placing the arguments"
        with agreement.tell_errors(world, what) if first else contextlib.nullcontext():
            for k, x in leaves.items():
                given, sharding = inputs[k], shardings[k]
                shape = values[given.value].shape
                placed[k] = None
                if _is_own_part(x, given, shape):
                    rows[k] = Rows(x, shape, sharding)
                    continue
                if placement.held_here(x, sharding):
                    whole[given.path] = x
                placed[k] = placement.place(x, sharding)
            placed |= place_rows(rows)
        if first:
            agreement.check_equal(world, whole, first=True)
        else:
            self._compared.add(world, whole)
        return placed

    def finish_comparison(self) -> None:
        """Compares the arrays of the last steps between processes.

        Raises:
          PlanError: arrays that each process holds a copy of differ.
        """
        self._compared.finish(self._world())

    def devices(self, setting: Setting) -> tuple[Any, ...]:
        """Returns the devices that a setting may use."""
        if setting.devices is not None:
            return self._world().take(setting.devices)
        cluster = setting.cluster
        if cluster is None or (cluster.members is None and not cluster.groups):
            return self._world().devices
        return self._world().at(cluster.ids)

    def _on(self, setting: Setting) -> Cluster:
        """Returns the cluster of a setting."""
        return setting.cluster or self._cluster()

    def _place(self, analysed: Analysed, setting: Setting) -> Hashable:
        """Returns the key under which the plan of a setting is remembered."""
        if setting.plan is not None:
            return analysed.key, agreement.content_digest(setting.plan)
        cluster = self._on(setting)
        found = self.devices(setting)
        devices = tuple(d.id for d in found[: cluster.num_devices])
        asked = setting.codecs or self.planner.options
        plans = [
            p and agreement.content_digest(p) for p in (setting.sent, asked.layouts)
        ]
        codecs = (asked.compression, asked.error_budget, *plans)
        return analysed.key, _shape(cluster), devices, codecs

    def state_shardings(
        self, name: str, leaves: Sequence[Any], setting: Setting
    ) -> list[Any]:
        """Returns the shardings of a state that is created before its step is planned.

        If the setting has a plan, these are the shardings of that plan. Otherwise the
        state is split evenly.

        Args:
          name: name of the step.
          leaves: shapes of the arrays.
          setting: the setting that will be planned for.

        Raises:
          PlanError: the state does not have the shapes of the setting's plan.
        """
        devices = self.devices(setting)
        if (given := setting.plan) is not None:
            arguments.check_shapes(name, given, leaves)
            meshes = home_meshes(given, stage_meshes(given, devices))
            return creation.plan_shardings(given, meshes, len(leaves))
        if setting.devices is None:
            devices = devices[: self._on(setting).num_devices]
        return creation.even_shardings(leaves, devices)


def _shape(cluster: Cluster) -> str:
    """Returns a fingerprint of a cluster's form, without its device ids.

    For a cluster of several groups of devices, the fingerprint includes the ids.
    """
    if cluster.groups:
        return cluster.fingerprint()
    return dataclasses.replace(cluster, members=None).fingerprint()


def moved_state(
    state: dict[str, Any],
    old: PlannedStep,
    new: PlannedStep,
    links: Links | None = None,
    *,
    consume: bool,
) -> list[Any]:
    """Returns the arrays of a state with the shardings of another plan.

    Args:
      state: the arrays of the state, by path.
      old: the step under the plan that the state was made by.
      new: the step under the other plan.
      links: the result of `Preparation.links_between`; with links, the state moves over
        them to other processes.
      consume: whether each old array is freed as soon as it has been moved
        (`autopar.runtime.state_mover.move`); ignored if the state moves over links.
    """
    if links is not None:
        return moved_between(links, state, new.in_shardings)
    count = len(state)
    lies = all(
        isinstance(x, jax.Array) and x.sharding.is_equivalent_to(s, x.ndim)
        for x, s in zip(state.values(), old.in_shardings, strict=False)
    )
    source = state_layout(old.analysis, old.plan, count) if lies else None
    target = state_layout(new.analysis, new.plan, count)
    transport = DevicePut(new.meshes)
    return list(move(state, source, target, transport, consume=consume).values())


def _own_rows(planned: PlannedStep, leaves: Sequence[Any]) -> dict[str, Any]:
    """Returns this process's rows of each array of a batch, by path."""
    graph = planned.analysis.graph
    return {
        given.path: x
        for x, given in zip(leaves, graph.inputs, strict=True)
        if _is_own_part(x, given, graph.values[given.value].shape)
        and not jax_compat.is_extended(jax.typeof(x).dtype)
    }


def _is_own_part(x: Any, given: GraphInput, shape: Sequence[int]) -> bool:
    """Whether an array holds only this process's rows of a batch.

    The given shape is the shape of the whole batch.
    """
    return given.role is InputRole.BATCH and np.shape(x) != tuple(shape)
