"""Builds the step of a plan of several stages, as a function of its flat arguments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autopar.compilers.targets import room_options
from autopar.compression.fallback import Fallback
from autopar.errors import PlanError
from autopar.planner.record import assignment_of
from autopar.planner.stages.staged import schedule_of
from autopar.planner.stages.submeshes import one_stage, stage_cluster
from autopar.plans import Plan
from autopar.runtime.gradients.state_restorer import restored_state
from autopar.runtime.gradients.sums import StagedSums, gradient_sums
from autopar.runtime.noise.averages import NoiseOptions
from autopar.runtime.noise.staged import StagedNoise, staged_noise
from autopar.runtime.placement import home_meshes, stage_meshes
from autopar.runtime.planned import PlannedStep
from autopar.runtime.stages.codecs import StagedCodecs
from autopar.runtime.stages.feed import Feed
from autopar.runtime.stages.order import issue_order
from autopar.runtime.stages.pipeline import Crossed, StagePipeline
from autopar.runtime.stages.stacked import StackedArray, WithStacked, stacked_array
from autopar.runtime.stages.stage import Stage
from autopar.runtime.stages.transport import Links
from autopar.runtime.world import World
from autopar.steps.analysis import Analysis
from autopar.steps.batch import batch_rows
from autopar.steps.stages import CutStep
from autopar_passes import jax_compat
from autopar_passes.layer_loops.operators import piece_arguments
from autopar_passes.microbatches.facts import Combine, Microbatched, join_microbatches
from autopar_passes.stages.cut import TaskKey
from autopar_solver import make_table


def check_world(world: World, plan: Plan, devices: Sequence[Any]) -> None:
    """Checks that a plan of several stages can run in a world.

    Args:
      world: the processes.
      plan: the plan.
      devices: the devices of the plan's cluster, by position.

    Raises:
      PlanError: there are several processes without a coordination service.
    """
    if world.process_count == 1:
        return
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
    donate: bool,
    wait_s: Callable[[TaskKey], float] | None = None,
    links: Links | None = None,
    noise: NoiseOptions | None = None,
    fallback: Fallback | None = None,
    signals: bool = False,
) -> PlannedStep:
    """Builds a step of several stages, without compiling it.

    Args:
      analysis: the analysis of the step on the whole batch.
      cut: the step cut into the plan's stages.
      plan: the plan.
      devices: the devices of the plan's cluster, by position.
      donate: whether a call of the step donates the carried state.
      wait_s: task -> the least number of seconds that it takes (`StagePipeline`).
      links: the connections to other processes; None: there is one process.
      noise: how the noise of gradients is measured; None: it is not measured.
      fallback: codecs for a bucket whose own codecs send too little of the gradients.
      signals: whether steps measure the signal in the gradients that codecs send.

    Raises:
      PlanError: there are too few devices, the noise cannot be measured, or a codec
        cannot send its gradient.
    """
    meshes = stage_meshes(plan, devices)
    stages = _stages(cut, plan, meshes, fallback, signals=signals)
    codecs = _staged_codecs(cut, stages, fallback, links, donate=donate)
    found, whole = cut.found, cut.analysis.whole or cut.analysis
    table = make_table(schedule_of(plan), len(stages), found.microbatches)
    measured = _staged_noise(analysis, cut, stages, noise, links)
    pipeline = StagePipeline(
        cut.cut,
        stages,
        issue_order(table),
        _crossing_rules(found),
        donate=donate,
        wait_s=wait_s,
        links=links,
        shown=_values_of_results(whole, cut),
        noise=measured,
        codecs=codecs,
    )
    feed = Feed(whole, cut, pipeline, measured)
    flat = [d for mesh in meshes for d in mesh.devices.flat]
    function, shardings = _as_written(
        analysis, whole, plan, feed, meshes, donate=donate
    )
    sums = None if codecs is None else codecs.sums

    def sums_of(other: Plan) -> StagedSums | None:
        if sums is None:
            return None
        made = _stages(cut, other, meshes, fallback, signals=signals)
        found = {k: s.sums for k, s in enumerate(made) if s.sums is not None}
        return dataclasses.replace(sums, stages=found)

    return PlannedStep(
        analysis,
        plan,
        function,
        Mesh(np.array(flat), ("device",)),
        shardings,
        tuple(home_meshes(plan, meshes)),
        sums=sums,
        sums_of=sums_of,
        gradients=None if sums is None else function.gradients,
        noise=None if measured is None else measured.spec,
        pipeline=pipeline,
    )


def audited_pipeline(
    cut: CutStep, plan: Plan, meshes: Sequence[Mesh | AbstractMesh]
) -> StagePipeline:
    """The tasks of a plan of several stages, for inspection only.

    Args:
      cut: the step cut into the plan's stages.
      plan: the plan.
      meshes: the mesh of each stage, with or without devices.
    """
    stages = _stages(cut, plan, meshes, None, signals=False)
    table = make_table(schedule_of(plan), len(stages), cut.found.microbatches)
    return StagePipeline(
        cut.cut, stages, issue_order(table), _crossing_rules(cut.found)
    )


def _stages(
    cut: CutStep,
    plan: Plan,
    meshes: Sequence[Any],
    fallback: Fallback | None,
    *,
    signals: bool,
) -> list[Stage]:
    """The stages on their devices, each with the gradients that it sums by codecs."""
    out: list[Stage] = []
    count = 0
    whole = plan.cluster.read()
    for k, (program, stage, mesh) in enumerate(
        zip(cut.programs, cut.stages, meshes, strict=True)
    ):
        own = one_stage(plan, k)
        assignment = assignment_of(stage, own)
        sums = gradient_sums(
            assignment, own, mesh, fallback, signals=signals, first=count
        )
        count += len(own.gradients)
        room = room_options(stage_cluster(whole, plan.stages[k].devices))
        out.append(Stage(program, assignment, mesh, room, sums))
    return out


def _staged_codecs(
    cut: CutStep,
    stages: Sequence[Stage],
    fallback: Fallback | None,
    links: Links | None,
    *,
    donate: bool,
) -> StagedCodecs | None:
    """How the stages sum gradients by codecs; None: no stage has codecs."""
    sums = {k: s.sums for k, s in enumerate(stages) if s.sums is not None}
    if not sums:
        return None
    return StagedCodecs(
        StagedSums(sums, _own_device(stages, links), fallback),
        restored_state(cut.analysis),
        tuple(stages),
        donate,
    )


def _own_device(stages: Sequence[Stage], links: Links | None) -> Any:
    """The device of this process that holds values that all processes have."""
    if links is None:
        return stages[0].mesh.devices.flat[0]
    return links.devices[links.index]


def _as_written(
    analysis: Analysis,
    whole: Analysis,
    plan: Plan,
    feed: Feed,
    meshes: Sequence[Mesh],
    *,
    donate: bool,
) -> tuple[Any, list[NamedSharding]]:
    """The function of the step's own flat arguments, and the shardings of these.

    Args:
      analysis: the step as the user wrote it.
      whole: the step with stacked layers split into pieces.
      plan: the plan.
      feed: the step that takes pieces.
      meshes: the mesh of each stage.
      donate: whether a call of the step donates the carried state.
    """
    if not whole.pieces:
        return feed, feed.in_shardings
    homes, inputs = home_meshes(plan, meshes), analysis.graph.inputs
    shardings = list(feed.in_shardings[: len(inputs)])
    arrays: dict[int, StackedArray] = {}
    for k, places in piece_arguments(len(inputs), whole.pieces).items():
        path = inputs[k].path
        spec = PartitionSpec(*(axes or None for axes in plan.home_spec(path)))
        home = plan.home(path)
        shardings[k] = NamedSharding(homes[home], spec)
        arrays[k] = stacked_array(
            places=places,
            results=[whole.carried_arguments[p] for p in places],
            sizes=whole.pieces[k],
            shape=analysis.graph.values[inputs[k].value].shape,
            sharding=shardings[k],
            pieces=[feed.in_shardings[p] for p in places],
            holders=meshes if home == len(meshes) else meshes[home : home + 1],
        )
    made = WithStacked(
        feed,
        arrays,
        len(feed.in_shardings),
        len(analysis.graph.outputs),
        donate,
        feed.pipeline.links,
    )
    return made, shardings


def _staged_noise(
    analysis: Analysis,
    cut: CutStep,
    stages: Sequence[Stage],
    noise: NoiseOptions | None,
    links: Links | None,
) -> StagedNoise | None:
    """The noise measurement of the step; None: the noise is not measured."""
    if noise is None:
        return None
    assignments = [stage.assignment for stage in stages]
    rows = batch_rows((analysis.whole or analysis).graph)
    coded = frozenset[int]().union(*(stage.coded_values for stage in stages))
    device, meshes = _own_device(stages, links), [stage.mesh for stage in stages]
    return staged_noise(cut, assignments, rows, noise, device, meshes, coded)


def _values_of_results(analysis: Analysis, cut: CutStep) -> set[int]:
    """The values of results that are not state."""
    state = set(analysis.carried_arguments.values())
    atoms = enumerate(cut.cut.program.body.outputs)
    return {a for k, a in atoms if k not in state and isinstance(a, int)}


def _crossing_rules(found: Microbatched) -> Crossed:
    """How the values of microbatches are combined."""
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
                    functools.partial(_join_rows, crossing.rows)
                )
    return Crossed(scales=scales, same=frozenset(same), rows=rows)


def _join_rows(rows: Any, arrays: list[Any]) -> Any:
    return join_microbatches(jax.numpy.stack(arrays), rows)
