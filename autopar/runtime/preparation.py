"""From a call's shapes to the program that all processes run."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Generator, Hashable, Sequence
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
from autopar.planner.search import plan_mesh
from autopar.plans import Plan
from autopar.runtime import agreement, arguments, creation, placement
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
    """The cluster, the plan and the devices that a step is given.

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


def moved_setting(
    setting: Setting,
    options: PlanOptions,
    cluster: Cluster,
    devices: tuple[Any, ...] | None,
    given: Plan | None,
) -> Setting:
    """The setting on another cluster, with the codecs that were asked for.

    Args:
      setting: what the step was planned for.
      options: what was said about planning it.
      cluster: the cluster to move to.
      devices: the devices to run on there.
      given: a plan for it.

    Raises:
      PlanError: the codecs of a plan were asked for by nobody in one word.
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
    """The options with the choice of codecs that a plan was made with.

    Where it has several that nobody asked for in one word (`sent_by_hand`), layouts are
    found for the one that sends most.
    """
    mode = plan.compression.mode
    if mode == "none" or _by_hand(plan):
        sent = _dense_bytes(plan)
        mode = max(sent, key=lambda text: sent[text], default="none")
    budget = plan.compression.error_budget if mode == "auto" else None
    return dataclasses.replace(options, compression=mode, error_budget=budget)


def sent_by_hand(plan: Plan) -> Plan | None:
    """The plan if each gradient has the codec that it was given; else None."""
    several = plan.compression.mode == "none" and len(_dense_bytes(plan)) > 1
    return plan if several or (_by_hand(plan) and _dense_bytes(plan)) else None


def _by_hand(plan: Plan) -> bool:
    return plan.compression.mode == EDITED or "gradients" in plan.edited


def _dense_bytes(plan: Plan) -> dict[str, float]:
    """By codec, what one device would send of its gradients without it.

    What a codec cannot send, or not with profit, is sent beside it as it is.
    """
    found: dict[str, float] = {}
    for g in plan.gradients:
        if g.codec:
            found[g.codec] = found.get(g.codec, 0.0) + g.dense_bytes
    return {text: found[text] for text in set(found) - {"dense"}} or found


def fitting_layouts(options: PlanOptions, cluster: Cluster) -> PlanOptions:
    """The options without layouts to keep, where these do not fit another cluster.

    Layouts are for one mesh. On another new ones are found, which a warning says.
    """
    kept = options.layouts
    if kept is None:
        return options
    try:
        plan_mesh(cluster, kept.axis_names, kept.axis_sizes)
    except PlanError as error:
        warnings.warn(
            f"layouts=: {error} New layouts are found for it, with the same codecs. "
            "Give replan(..., plan=) for layouts of your own.",
            stacklevel=4,
        )
        return dataclasses.replace(options, layouts=None)
    return options


# Most plans that are remembered, by shapes of the arguments and cluster.
PLANS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """The step that runs: the shapes it was planned for, and its program.

    It is ready once all processes have compiled the program. Batches with fewer rows
    leave the state where the step of a ``full`` batch has it.
    """

    analysed: Analysed
    planned: PlannedStep
    ready: bool = False
    full: PlannedStep | None = None

    @property
    def of_full_batch(self) -> PlannedStep:
        """The step that was planned for a full batch."""
        return self.full or self.planned

    @property
    def has_stages(self) -> bool:
        """Whether it is a pipeline."""
        return len(self.planned.plan.stages) > 1


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """What is made for a setting: its plan, and the compiled program of it."""

    setting: Setting
    plan: Plan
    planned: PlannedStep


class Preparation:
    """Analyses, plans and builds a step; all processes agree on each."""

    def __init__(
        self,
        planner: StepPlanner,
        store: ProgramStore,
        world: Callable[[], World],
        cluster: Callable[[], Cluster],
        errors: Callable[[], Errors],
    ) -> None:
        """Has prepared nothing yet.

        Args:
          planner: of the step.
          store: where its programs are kept.
          world: returns the processes and devices.
          cluster: returns the cluster of a setting that names none.
          errors: returns what codecs were measured to lose.
        """
        self.planner = planner
        self._store = store
        self._world = world
        self._cluster = cluster
        self._errors = errors
        # What `recode` has changed stays changed where a cluster comes back.
        self._plans: Recent[Hashable, Plan] = Recent(PLANS)
        # The functions that have run: the first call of one compiles it.
        self._started: weakref.WeakSet[Any] = weakref.WeakSet()
        self._links: Links | None = None
        # Of worlds that were left.
        self._earlier: dict[Hashable, Plan] = {}

    def enter(self, cache: PlanCache | None) -> None:
        """Prepares for another world, whose processes know different plans.

        The plans of this process are used again where it is the one that plans.

        Args:
          cache: where plans are kept, unless they are kept elsewhere.
        """
        self.planner.cache = self.planner.cache or cache
        kept = {key: self._plans.peek(key) for key in self._plans}
        self._earlier = {**self._earlier, **kept}
        self._plans = Recent(PLANS)
        self._started = weakref.WeakSet()
        self._links = None

    @without_mesh()
    def analyse(self, structs: StepCall) -> Analysed:
        """The step on the arguments of a call, structs of global shapes.

        Raises:
          TraceError: JAX cannot trace the step.
        """
        with agreement.tell_errors(self._world(), "tracing the step"):
            return self.planner.analyse_structs(structs)

    def remember(self, analysed: Analysed, setting: Setting, plan: Plan) -> None:
        """Uses a plan where this setting comes back."""
        self._plans.put(self._place(analysed, setting), plan)

    @without_mesh()
    def plan(
        self, analysed: Analysed, setting: Setting, beside: Plan | None = None
    ) -> Plan:
        """The plan of a setting, the same on every process.

        With a plan to be ``beside``, the state lies as in that one.
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
                self._world(),
                lambda: self.planner.plan_beside(
                    analysed, on, beside, setting.codecs, sent
                ),
            )
        if given is not None:
            if not given.edited:
                return given
            return agreement.agree(
                self._world(),
                lambda: carried_out(
                    analysed.analysis, given, seconds=self.planner.options.seconds
                ),
            )
        cluster = setting.cluster or self._cluster()
        place = self._place(analysed, setting)
        return agreement.agree(
            self._world(),
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
        """The plan and the compiled program of a step on another cluster.

        Args:
          analysed: the step.
          setting: that it runs under.
          cluster: to move to.
          devices: to run on there, or their ids.
          plan: to use there instead of planning, or its file.

        Raises:
          AutoparError: as of `autopar.ParallelStep.replan`.
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
        """A setting on another cluster; arguments are those of `made_for`."""
        taken = None if devices is None else self._world().take(devices)
        options = self.planner.options
        return moved_setting(setting, options, as_cluster(cluster), taken, given)

    def known_plan(self, analysed: Analysed, setting: Setting) -> Plan | None:
        """The plan of a setting that was made before, here or on disk; or None."""
        found = self._plans.get(self._place(analysed, setting))
        if found is None and setting.sent is None and not self._errors():
            cluster = setting.cluster or self._cluster()
            found = self.planner.plan_on_disk(analysed, cluster, setting.codecs)
        return found

    @without_mesh()
    def warm(self, analysed: Analysed, setting: Setting, running: Plan) -> Plan:
        """A good plan of a setting in a short time (`StepPlanner.warm`)."""
        cluster = setting.cluster or self._cluster()
        return agreement.agree(
            self._world(),
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
        """The layouts of a plan on a cluster of the same shape, codecs chosen anew.

        Args:
          analysed: the step.
          setting: that it runs under.
          cluster: the same devices, with other links perhaps.
          plan: the plan.

        Raises:
          PlanError: the cluster has not the plan's mesh.
        """
        asked = setting.codecs or self.planner.options
        asked = dataclasses.replace(asked, layouts=plan, microbatches=None)
        return agreement.agree(
            self._world(),
            lambda: self.planner.plan(
                analysed, cluster, asked, setting.sent, self._errors()
            ),
        )

    def has_program(
        self, analysed: Analysed, plan: Plan, devices: Sequence[Any]
    ) -> bool:
        """Whether the program of a plan on these devices is compiled already."""
        return self._store.is_compiled(analysed, plan, devices)

    @property
    def compile_s(self) -> float:
        """Seconds that the program took which was compiled last."""
        return self._store.compile_s

    @without_mesh()
    def recode_plan(self, analysed: Analysed, setting: Setting, plan: Plan) -> Plan:
        """The layouts of a plan with the codecs that ``auto`` chooses for them."""
        asked = dataclasses.replace(
            setting.codecs or self.planner.options, compression="auto", layouts=plan
        )
        cluster = plan.cluster.read()
        return agreement.agree(
            self._world(),
            lambda: self.planner.plan(analysed, cluster, asked, errors=self._errors()),
        )

    @without_mesh()
    def program(self, analysed: Analysed, plan: Plan, setting: Setting) -> PlannedStep:
        """The program of a plan, once all processes have checked that it fits."""
        devices = self.devices(setting)
        if self._world().process_count > 1:
            with agreement.tell_errors(self._world(), "comparing the traced steps"):
                step = program_text.identity(analysed.analysis)
            agreement.check_same(
                self._world(), plan, step, lambda: program_text.lines(analysed.analysis)
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
        """The program of a plan that differs from the running one in its codecs."""
        devices = self.devices(setting)
        return self._store.program(analysed, plan, devices, like=like, links=like.links)

    def _links_to_others(self) -> Links | None:
        """The links to the other processes, from the first pipeline on."""
        if self._links is None and self._world().process_count > 1:
            self._links = Links(self._world())
        return self._links

    def links_between(self, old: PlannedStep, new: PlannedStep) -> Links | None:
        """Links to the other processes, where state moves to other devices of them.

        Args:
          old: the step under the plan that the state was made by.
          new: the step under the plan that it is moved to.
        """
        devices = [set(step.mesh.devices.flat) for step in (old, new)]
        if devices[0] == devices[1] and old.links is None and new.links is None:
            return None
        return self._links_to_others()

    def is_compiled(self, planned: PlannedStep) -> bool:
        """Whether a program has run before."""
        return planned.function in self._started

    def load_program(self, planned: PlannedStep) -> None:
        """Takes a program for one that has been compiled."""
        self._started.add(planned.function)

    @without_mesh()
    def compile(self, planned: PlannedStep) -> None:
        """Compiles a program, and takes the time."""
        with self._store.compiling(planned):
            planned.compile()

    @contextlib.contextmanager
    def compiling(self, planned: PlannedStep, name: str) -> Generator[None]:
        """Says so where a program runs for the first time, which compiles it."""
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
        """The flat arguments where a program wants them.

        Args:
          planned: the program.
          leaves: the arguments.
          first: whether it is the first step that runs by it.

        Raises:
          PlanError: arrays that each process holds alone differ.
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
        whole: dict[str, Any] = {}
        placed: list[Any] = []
        world = self._world()
        # Before a first step the others ask whether a process has failed.
        what = "placing the arguments"
        with agreement.tell_errors(world, what) if first else contextlib.nullcontext():
            for x, given, sharding in zip(leaves, graph.inputs, shardings, strict=True):
                shape = graph.values[given.value].shape
                if _is_own_part(x, given, shape):
                    placed.append(placement.place_rows(x, shape, sharding))
                    continue
                if placement.held_here(x, sharding):
                    whole[given.path] = x
                placed.append(placement.place(x, sharding))
        agreement.check_equal(world, whole, first=first)
        return placed

    def devices(self, setting: Setting) -> tuple[Any, ...]:
        """The devices that a setting may use."""
        if setting.devices is not None:
            return self._world().take(setting.devices)
        cluster = setting.cluster
        if cluster is None or (cluster.members is None and not cluster.groups):
            return self._world().devices
        return self._world().at(cluster.ids)

    def _place(self, analysed: Analysed, setting: Setting) -> Hashable:
        """What a plan that is remembered belongs to."""
        if setting.plan is not None:
            return analysed.key, agreement.content_digest(setting.plan)
        cluster = setting.cluster or self._cluster()
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
        """Where the arrays of a state go that is made before there is a plan.

        Args:
          name: of the step.
          leaves: shapes of the arrays.
          setting: what will be planned for; its plan's shardings, if it has one.

        Raises:
          PlanError: the state is not that of the given plan.
        """
        devices = self.devices(setting)
        if (given := setting.plan) is not None:
            arguments.check_shapes(name, given, leaves)
            meshes = home_meshes(given, stage_meshes(given, devices))
            return creation.plan_shardings(given, meshes, len(leaves))
        if setting.devices is None:
            devices = devices[: (setting.cluster or self._cluster()).num_devices]
        return creation.even_shardings(leaves, devices)


def _shape(cluster: Cluster) -> str:
    """Digits that clusters share which differ only in which devices they are of."""
    if cluster.groups:
        return cluster.fingerprint()
    return dataclasses.replace(cluster, members=None).fingerprint()


def moved_state(
    state: dict[str, Any],
    old: PlannedStep,
    new: PlannedStep,
    links: Links | None = None,
    *,
    consume: bool = False,
) -> list[Any]:
    """The leaves of a state, where another plan wants them.

    Args:
      state: path -> array.
      old: the step under the plan that it was made by.
      new: the step under the other plan.
      links: of `Preparation.links_between`.
      consume: see `autopar.runtime.state_mover.move`; what moves between processes
        keeps the given state.
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
    """Path -> rows of this process, of what holds a part of the batch."""
    graph = planned.analysis.graph
    return {
        given.path: x
        for x, given in zip(leaves, graph.inputs, strict=True)
        if _is_own_part(x, given, graph.values[given.value].shape)
        and not jax_compat.is_extended(jax.typeof(x).dtype)
    }


def _is_own_part(x: Any, given: GraphInput, shape: Sequence[int]) -> bool:
    """Whether an array is this process's part of a batch of a shape."""
    return given.role is InputRole.BATCH and np.shape(x) != tuple(shape)
