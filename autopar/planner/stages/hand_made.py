"""The pipelines that people write by hand, under the same cost model.

The hand-made pipelines are those of Megatron: equal stages, each on one slice of the
cluster. Within a stage, tensor parallelism runs within a host, and data parallelism
over the other devices. The solver finds the best plan of each stage that keeps to this
rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from autopar.cluster import Cluster, MeshShape
from autopar.errors import PlanError
from autopar.planner.codecs.choose import request_of
from autopar.planner.options import PlanOptions
from autopar.planner.recipes import Recipe
from autopar.planner.search import candidate_meshes
from autopar.planner.stages.entry import cut_for, even_pipeline
from autopar.planner.stages.plan import divisors, rows_to_split
from autopar.planner.stages.stage_search import StageHints
from autopar.planner.stages.staged import WantedPipeline, staged_plan
from autopar.plans import Plan
from autopar.progress import say
from autopar.steps.analysis import Analysis
from autopar.steps.stages import CutStep

# Microbatches per stage: the first number that divides the batch is used.
_PER_STAGE = (4, 2, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class HandMade:
    """One pipeline; if ``plan`` is None, ``reason`` says why the pipeline is not
    possible.

    Attributes:
      name: what people call it.
      stages: number of stages.
      mesh: mesh of each stage, as text.
      plan: the plan.
      reason: why there is no plan.
    """

    name: str
    stages: int
    mesh: str
    plan: Plan | None
    reason: str = ""


def hand_made(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    *,
    most_stages: int | None = None,
) -> list[HandMade]:
    """Plans hand-made pipelines with every possible number of equal stages.

    Args:
      analysis: the step on the whole batch.
      cluster: the devices to plan for; for devices of several kinds there are no
        hand-made pipelines.
      options: options, of which only schedule, microbatches, coupled rows and seconds
        are read.
      most_stages: the most stages; None: the number of devices.
    """
    out: list[HandMade] = []
    if cluster.groups:
        return out
    for stages in divisors(cluster.num_devices)[1:]:
        if most_stages is not None and stages > most_stages:
            break
        say(f"planning pipelines of {stages} stages as experts do")
        try:
            out.extend(_of(analysis, cluster, options, stages))
        except PlanError as error:
            out.append(HandMade("pipeline", stages, "", None, _line(error)))
    return out


def _of(
    analysis: Analysis, cluster: Cluster, options: PlanOptions, stages: int
) -> Iterator[HandMade]:
    """Yields the pipelines of a number of stages.

    Raises:
      PlanError: the step cannot be cut into this number of stages.
    """
    cut, wanted = _cut(analysis, cluster, options, stages)
    dense = request_of(dataclasses.replace(options, compression="none"))
    for mesh in candidate_meshes(wanted.sites[0].cluster):
        sites = tuple(dataclasses.replace(site, mesh=mesh) for site in wanted.sites)
        placed = dataclasses.replace(wanted, sites=sites)
        for recipe in pipeline_recipes(mesh, cluster):
            hints = StageHints(seconds=options.seconds, recipe=recipe)
            try:
                plan = staged_plan(cut, cluster, placed, dense, hints)
                yield HandMade(recipe.name, stages, mesh.label, plan)
            except PlanError as error:
                yield HandMade(recipe.name, stages, mesh.label, None, _line(error))


def _cut(
    analysis: Analysis, cluster: Cluster, options: PlanOptions, stages: int
) -> tuple[CutStep, WantedPipeline]:
    """Returns the stages, with the most microbatches per stage that divide the batch.

    Raises:
      PlanError: the step cannot be cut or split in this way.
    """
    asked = options.microbatches
    rows = rows_to_split(analysis.whole or analysis)
    counts = [each * stages for each in _PER_STAGE if rows % (each * stages) == 0]
    if isinstance(asked, int) or not counts:
        counts = [asked]
    for number, count in enumerate(counts, 1):
        wanting = dataclasses.replace(options, microbatches=count)
        try:
            whole, wanted, found = even_pipeline(analysis, cluster, wanting, stages)
            return cut_for(whole, options, wanted, found), wanted
        except PlanError:
            if number == len(counts):
                raise
    raise AssertionError("the last number returns or raises")


def pipeline_recipes(mesh: MeshShape, cluster: Cluster) -> Iterator[Recipe]:
    """The rules for the mesh of a stage: tensor parallelism runs only within hosts.

    Args:
      mesh: mesh of each stage.
      cluster: all devices.
    """
    within = cluster.levels[-1].link
    every = tuple(range(len(mesh.axes)))
    if mesh.num_devices == 1:
        yield Recipe("pipeline", every)
        return
    yield Recipe("pipeline x data", every)
    for axis in every:
        if mesh.axes[axis].link != within:
            continue
        rest = tuple(k for k in every if k != axis)
        name = "pipeline x data x tensor" if rest else "pipeline x tensor"
        for sequence in (False, True):
            yield Recipe(name, rest, (axis,), sequence=sequence)


def _line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
