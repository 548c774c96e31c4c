"""A step under a plan of several stages, as a function of its flat arguments."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.errors import PlanError
from autopar.planner.record import assignment_of
from autopar.planner.stages.staged import schedule_of
from autopar.plans import NO_SCHEDULE, Plan
from autopar.runtime.noise.options import NoiseOptions
from autopar.runtime.noise.sources import batch_rows
from autopar.runtime.noise.staged import Rows, StagedNoise, staged_noise
from autopar.runtime.stages.order import issue_order
from autopar.runtime.stages.pipeline import Crossed, Pipeline
from autopar.runtime.stages.run import run_step
from autopar.runtime.stages.stacked import StackedArray, WithStacked
from autopar.runtime.stages.stage import Stage
from autopar.runtime.stages.transport import Links
from autopar.runtime.world import World, grid
from autopar.steps.analysis import Analysis
from autopar.steps.stages import CutStep
from autopar_passes import jax_compat
from autopar_passes.layer_loops.split import piece_arguments
from autopar_passes.microbatches.microbatched import Combine, Microbatched
from autopar_passes.microbatches.rows import part, together
from autopar_passes.program.equations import Program, Scalar, walk
from autopar_passes.program.evaluate import evaluate
from autopar_passes.stages.cut import TaskKey
from autopar_solver import make_table


@dataclasses.dataclass(frozen=True)
class PipelinedStep:
    """The flat step under a plan of several stages.

    Attributes:
      analysis: the step on the whole batch.
      plan: the plan.
      cut: the step as stages.
      pipeline: its tasks on devices.
      mesh: all devices of the stages, in their order.
      in_shardings: where each flat argument lies before a step: state at home on its
        stage, the batch on the first stage that reads it.
      function: runs a step on the flat arguments.
      sums: None; stages sum gradients themselves.
      gradients: None; see ``sums``.
      noise: how the noise of gradients is measured; None: it is not. Then ``function``
        takes and returns the averages last.
    """

    analysis: Analysis
    plan: Plan
    cut: CutStep
    pipeline: Pipeline
    mesh: Mesh
    in_shardings: list[NamedSharding]
    function: Any
    sums: None = None
    gradients: Any = None
    noise: StagedNoise | None = None

    @property
    def links(self) -> Links | None:
        """Links to the other processes that have stages; None: there are none."""
        return self.pipeline.links

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The meshes that state lies on: each stage's, that of all if one is used."""
        own = [stage.mesh for stage in self.pipeline.stages]
        return tuple(_with_all(self.plan, own))

    def compile(self) -> None:
        """Compiles the tasks of all stages."""
        self.pipeline.compile()

    def lower(self) -> Any:
        """There is no one program to lower.

        Raises:
          PlanError: always; it says what there is.
        """
        raise PlanError(
            f"a plan of {len(self.plan.stages)} stages has no program of the whole "
            "step to lower: each task is a program of its own."
        )


def stage_meshes(plan: Plan, devices: Sequence[Any]) -> list[Mesh]:
    """Lays the mesh of each stage over its devices.

    Args:
      plan: the plan.
      devices: those of the cluster, by position.

    Raises:
      PlanError: there are fewer devices than the plan has.
    """
    need = 1 + max(d for stage in plan.stages for d in stage.devices)
    if len(devices) < need:
        raise PlanError(
            f"the plan is for {need} devices in {len(plan.stages)} stages, and there "
            f"are {len(devices)} to run it on. Simulate devices with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={need}."
        )
    out: list[Mesh] = []
    for stage in plan.stages:
        laid = grid([devices[d] for d in stage.devices], stage.axis_sizes)
        kinds = (AxisType.Auto,) * laid.ndim
        out.append(Mesh(laid, stage.axis_names, axis_types=kinds))
    return out


def home_meshes(plan: Plan, devices: Sequence[Any]) -> list[Mesh]:
    """The meshes that state lies on between steps, in the order of `Plan.home_axes`.

    Args:
      plan: the plan.
      devices: those of the cluster, by position.

    Raises:
      PlanError: there are fewer devices than the plan has.
    """
    return _with_all(plan, stage_meshes(plan, devices))


def _with_all(plan: Plan, own: Sequence[Mesh]) -> list[Mesh]:
    """The meshes of stages, with that of all stages where the plan has one."""
    axes = plan.home_axes
    if len(axes) == len(own):
        return list(own)
    names = tuple(name for name, _ in axes[-1])
    laid = np.stack([mesh.devices for mesh in own])
    return [*own, Mesh(laid, names, axis_types=(AxisType.Auto,) * laid.ndim)]


def check_world(world: World, plan: Plan, devices: Sequence[Any]) -> None:
    """Checks that a plan of several stages can run in a world.

    Args:
      world: the processes.
      plan: the plan.
      devices: those of the plan's cluster, by position.

    Raises:
      PlanError: a stage lies on devices of several processes, there are too few
        devices, or the processes have no coordination service.
    """
    if world.process_count == 1:
        return
    for number, mesh in enumerate(stage_meshes(plan, devices)):
        owners = sorted({d.process_index for d in mesh.devices.flat})
        if len(owners) > 1:
            raise PlanError(
                f"stage {number} of the plan lies on devices of processes "
                f"{', '.join(map(str, owners))}. A stage runs in one process: plan "
                "with stages= a multiple of the number of processes, or run one "
                "process with all devices."
            )
    if jax_compat.coordination() is None:
        raise PlanError(
            "stages in several processes find each other by jax.distributed, which "
            "was not started: call jax.distributed.initialize first."
        )


def pipelined_step(
    analysis: Analysis,
    cut: CutStep,
    plan: Plan,
    devices: Sequence[Any],
    *,
    donate: bool = True,
    wait_s: Callable[[TaskKey], float] | None = None,
    links: Links | None = None,
    noise: NoiseOptions | None = None,
) -> PipelinedStep:
    """Builds a step of several stages; nothing is compiled yet.

    Args:
      analysis: the step on the whole batch.
      cut: the step as the plan's stages.
      plan: the plan.
      devices: those of the plan's cluster, by position.
      donate: whether the carried state is consumed by the call.
      wait_s: seconds that a task takes at least (`Pipeline`).
      links: to the other processes, where there are several.
      noise: how the noise of gradients is measured; None: it is not.

    Raises:
      PlanError: there are too few devices, or no noise to measure.
    """
    meshes = stage_meshes(plan, devices)
    stages = [
        Stage(program, assignment_of(stage, one_stage(plan, k)), mesh)
        for k, (program, stage, mesh) in enumerate(
            zip(cut.programs, cut.stages, meshes, strict=True)
        )
    ]
    found = cut.found
    table = make_table(schedule_of(plan), len(stages), found.microbatches)
    measured = _staged_noise(analysis, cut, stages, noise, links)
    pipeline = Pipeline(
        cut.cut,
        stages,
        issue_order(table),
        _crossed(found),
        donate=donate,
        wait_s=wait_s,
        links=links,
        shown=_shown(analysis, cut),
        noise=None if measured is None else measured.tasks,
    )
    whole = cut.analysis.whole or cut.analysis
    feed = _Feed(whole, cut, pipeline, measured)
    flat = [d for mesh in meshes for d in mesh.devices.flat]
    function, shardings = _as_written(analysis, whole, plan, feed, meshes)
    return PipelinedStep(
        analysis,
        plan,
        cut,
        pipeline,
        Mesh(np.array(flat), ("device",)),
        shardings,
        function,
        noise=measured,
    )


def _as_written(
    analysis: Analysis,
    whole: Analysis,
    plan: Plan,
    feed: _Feed,
    meshes: Sequence[Mesh],
) -> tuple[Any, list[NamedSharding]]:
    """The function of the step's own arguments, and where these lie.

    Args:
      analysis: the step as it is written.
      whole: the step with stacked layers in pieces.
      plan: the plan.
      feed: the function of arguments in pieces.
      meshes: of the stages.
    """
    if not whole.pieces:
        return feed, feed.in_shardings
    homes, inputs = _with_all(plan, meshes), analysis.graph.inputs
    shardings = list(feed.in_shardings[: len(inputs)])
    arrays: dict[int, StackedArray] = {}
    for k, places in piece_arguments(len(inputs), whole.pieces).items():
        path = inputs[k].path
        spec = PartitionSpec(*(axes or None for axes in plan.home_spec(path)))
        shardings[k] = NamedSharding(homes[plan.home(path)], spec)
        arrays[k] = StackedArray(
            places=tuple(places),
            results=tuple(whole.carried[p] for p in places),
            sizes=tuple(whole.pieces[k]),
            shape=tuple(analysis.graph.values[inputs[k].value].shape),
            sharding=shardings[k],
            pieces=tuple(feed.in_shardings[p] for p in places),
        )
    made = WithStacked(
        feed, arrays, len(feed.in_shardings), len(analysis.graph.outputs)
    )
    return made, shardings


def _staged_noise(
    analysis: Analysis,
    cut: CutStep,
    stages: Sequence[Stage],
    noise: NoiseOptions | None,
    links: Links | None,
) -> StagedNoise | None:
    """What is measured of gradients."""
    if noise is None:
        return None
    if links is not None:
        raise PlanError(
            "noise_scale: stages in several processes do not measure it. Leave "
            "noise_scale= out, or plan with stages=1."
        )
    assignments = [stage.assignment for stage in stages]
    device = stages[0].mesh.devices.flat[0]
    return staged_noise(cut, assignments, batch_rows(analysis), noise, device)


def one_stage(plan: Plan, number: int) -> Plan:
    """A stage of a plan as a plan of its own.

    Args:
      plan: the plan.
      number: of the stage, from 0.
    """
    return msgspec.structs.replace(
        plan, stages=(plan.stages[number],), schedule=NO_SCHEDULE, pipeline=None
    )


def _shown(analysis: Analysis, cut: CutStep) -> set[int]:
    """The values of results that are not state."""
    state = set(analysis.carried.values())
    atoms = enumerate(cut.cut.program.body.outputs)
    return {a for k, a in atoms if k not in state and isinstance(a, int)}


def _crossed(found: Microbatched) -> Crossed:
    """How the values of microbatches are put together."""
    scales: dict[int, float] = {}
    same: set[int] = set()
    rows: dict[int, Any] = {}
    for crossing in found.crossings:
        match crossing.combine:
            case Combine.SUM:
                scales[crossing.value] = 1.0
            case Combine.MEAN:
                scales[crossing.value] = 1.0 / found.microbatches
            case Combine.SAME:
                same.add(crossing.value)
            case Combine.ROWS:
                assert crossing.rows is not None
                rows[crossing.value] = jax.jit(
                    functools.partial(_joined, crossing.rows)
                )
    return Crossed(scales=scales, same=frozenset(same), rows=rows)


def _joined(rows: Any, arrays: list[Any]) -> Any:
    return together(jax.numpy.stack(arrays), rows)


class _Feed:
    """Hands the flat arguments of a step to a pipeline, and its results back."""

    def __init__(
        self,
        analysis: Analysis,
        cut: CutStep,
        pipeline: Pipeline,
        noise: StagedNoise | None = None,
    ) -> None:
        """Resolves where each argument goes.

        Args:
          analysis: the step on the whole batch.
          cut: the step as stages.
          pipeline: its tasks on devices.
          noise: what is measured of gradients.
        """
        self.noise = noise
        self.found = cut.found
        self.program: Program = cut.cut.program
        self.pipeline = pipeline
        arguments = self.program.body.inputs
        self.values = arguments[: len(analysis.graph.inputs)]
        self.owners = pipeline.cut.owners
        shapes = [analysis.graph.values[i.value].shape for i in analysis.graph.inputs]
        self.in_shardings = [
            self._lies(k, value, shapes[k]) for k, value in enumerate(self.values)
        ]
        # Stage -> the flat arguments that it deals out to microbatches.
        self.dealt: dict[int, list[int]] = defaultdict(list)
        for k in self.found.batch:
            self.dealt[self.owners[self.values[k]]].append(k)
        self.deal = {s: self._deal_code(s, ks) for s, ks in self.dealt.items()}
        self.state = set(analysis.carried.values())
        self.numbers = self._numbers(arguments)
        self.ahead = None if self.found.ahead is None else self._ahead_code()

    def _lies(self, k: int, value: int, shape: tuple[int, ...]) -> NamedSharding:
        """Where an argument lies: rows are split as those of a microbatch are."""
        stage = self.pipeline.stages[self.owners[value]]
        where = stage.sharding(value)
        if k not in self.found.batch:
            return where
        spec = [*where.spec, *(None,) * (len(shape) - len(where.spec))]
        for dim, names in enumerate(spec):
            if names and shape[dim] % _size(stage.mesh, names):
                spec[dim] = None
        return NamedSharding(stage.mesh, PartitionSpec(*spec))

    def _deal_code(self, stage: int, positions: Sequence[int]) -> Any:
        """A jitted function from whole batches to those of all microbatches."""
        where = self.pipeline.stages[stage]
        count = self.found.microbatches
        shardings = [where.sharding(self.values[k]) for k in positions]

        def deal(*arrays: Any) -> list[list[Any]]:
            return [
                [
                    part(x, self.found.batch[k], count, np.int32(m))
                    for k, x in zip(positions, arrays, strict=True)
                ]
                for m in range(count)
            ]

        return jax.jit(deal, out_shardings=[shardings] * count)

    def _numbers(self, arguments: Sequence[int]) -> list[dict[int, Any]]:
        """The number of each microbatch, where the program takes it."""
        count, place = self.found.microbatches, self.found.number
        if place is None:
            return [{} for _ in range(count)]
        value = arguments[place]
        owner = self.owners[value]
        if not self.pipeline.here(owner):
            return [{value: None} for _ in range(count)]
        where = self.pipeline.stages[owner].sharding(value)
        return [{value: jax.device_put(np.int32(m), where)} for m in range(count)]

    @functools.cached_property
    def read(self) -> frozenset[int]:
        """The arguments that are read ahead of the microbatches."""
        assert self.found.ahead is not None
        body = self.found.ahead.body
        read = {a for eqn in walk(body) for a in eqn.inputs} | {*body.outputs}
        arguments = body.inputs[: len(self.values)]
        return frozenset(k for k, value in enumerate(arguments) if value in read)

    def _ahead_code(self) -> Any:
        """A jitted function from the whole batch to what all microbatches take."""
        ahead = self.found.ahead
        assert ahead is not None
        return jax.jit(functools.partial(evaluate, ahead))

    def __call__(self, *arguments: Any) -> Any:
        """Runs one step; measured noise comes and goes behind the other arrays."""
        flat = arguments[: len(self.values)]
        made, rows = self._step(flat)
        if self.noise is None:
            return made
        return made, self.noise.updated(arguments[-1], rows)

    def _step(self, flat: Sequence[Any]) -> tuple[list[Any], Rows]:
        """Runs one step on the flat arguments."""
        split = set(self.found.batch)
        known = {
            v: x
            for k, (v, x) in enumerate(zip(self.values, flat, strict=True))
            if k not in split
        }
        known.update(self._given(flat))
        micro = [dict(given) for given in self.numbers]
        for stage, positions in self.dealt.items():
            values = [self.values[k] for k in positions]
            if not self.pipeline.here(stage):
                for given in micro:
                    given.update(dict.fromkeys(values))
                continue
            parts = self.deal[stage](*(flat[k] for k in positions))
            for given, arrays in zip(micro, parts, strict=True):
                given.update(zip(values, arrays, strict=True))
        state, told, rows = run_step(self.pipeline, known, micro)
        told.update(self._passed(flat))
        made = [
            atom.value
            if isinstance(atom, Scalar)
            else (state if k in self.state else told)[atom]
            for k, atom in enumerate(self.program.body.outputs)
        ]
        return made, rows

    def _passed(self, flat: Sequence[Any]) -> dict[int, Any]:
        """The arrays of the batch that the step returns as they are."""
        out: dict[int, Any] = {}
        for k in sorted(self.found.batch):
            value, links = self.values[k], self.pipeline.links
            if value in self.pipeline.outputs:
                owner = self.pipeline.processes[self.owners[value]]
                whole = flat[k]
                if links is not None:
                    whole = links.spread(("passed", k), owner, whole)
                out[value] = whole
        return out

    def clear_cache(self) -> None:
        """Frees compiled code."""
        self.pipeline.clear_cache()
        for code in self.deal.values():
            code.clear_cache()

    def _given(self, flat: Sequence[Any]) -> dict[int, Any]:
        """What depends on the whole batch and goes to all microbatches."""
        if self.ahead is None:
            return {}
        made = self.ahead(*self._whole(flat))
        values = [self.program.body.inputs[k] for k in self.found.given]
        return {v: self._on_owner(v, x) for v, x in zip(values, made, strict=True)}

    def _on_owner(self, value: int, array: Any) -> Any:
        owner = self.owners[value]
        if not self.pipeline.here(owner):
            return None
        return jax.device_put(array, self.pipeline.stages[owner].sharding(value))

    def _whole(self, flat: Sequence[Any]) -> list[Any]:
        """The arguments on one device; None for those that are not read."""
        links, stages = self.pipeline.links, self.pipeline.stages
        here = next(k for k in range(len(stages)) if self.pipeline.here(k))
        first = stages[here].mesh.devices.flat[0]
        out: list[Any] = [None for _ in flat]
        for k in sorted(self.read):
            if links is None:
                out[k] = jax.device_put(flat[k], first)
            else:
                owner = self.pipeline.processes[self.owners[self.values[k]]]
                out[k] = links.spread(("ahead", k), owner, flat[k])
        return out


def _size(mesh: Mesh, names: Any) -> int:
    group = (names,) if isinstance(names, str) else names
    return int(np.prod([mesh.shape[n] for n in group]))
