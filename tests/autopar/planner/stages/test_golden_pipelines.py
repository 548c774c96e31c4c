"""Golden pipelines of steps with layers: layouts and costs of stages, and choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import layer_cases
import numpy as np
import pytest
from figures import digest, digest_all, row
from golden import assert_golden

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.planner.options import PlanOptions
from autopar.planner.stages import plan as stages
from autopar.planner.stages.hand_made import hand_made
from autopar.planner.stages.plan import PipelineChoice, layers_of, plan_stages
from autopar.planner.stages.submeshes import submeshes
from autopar.planner.weights import partly
from autopar.steps.analysis import Analysis
from autopar_solver.stages.problem import StageProblem

STEPS: dict[str, Callable[[], Analysis]] = {
    "mlp": layer_cases.mlp,
    "tied": layer_cases.tied,
}
CLUSTERS = (
    "2x2:cpu,network=100Mb/s",
    "1x4:a100,memory=9MB",
    "2x2:v5e",
    "1x2:a100+1x2:v100",
    "1x2:cpu,memory=200kB",
)


def layer_lines(analysis: Analysis, cluster: Cluster) -> Iterator[str]:
    layers = layers_of(analysis, cluster)
    yield row("layers", count=layers.count, starts=list(layers.starts))
    if cluster.groups:
        return
    weights = partly(gathers=4.0, sums=1.0)
    for found in submeshes(analysis, cluster, weights, scales=[1.0, 0.25]):
        split = [len(axes) for s in found.assignment.strategies for axes in s]
        yield row(
            "submesh",
            shape=found.shape,
            mesh=found.pricer.mesh.label,
            rule=found.rule,
            split=digest(split),
        )


def problem_lines(problem: StageProblem) -> Iterator[str]:
    yield row(
        "problem",
        groups=[x for g in problem.groups for x in (g.devices, g.memory_bytes)],
        options=digest_all((o.group, o.devices, o.link) for o in problem.options),
        schedules=" ".join(s.name for s in problem.schedules),
        shared=digest_all(
            (s.source, s.target, *s.step_s, *s.copy_bytes) for s in problem.shared
        ),
        most=problem.max_stages,
    )
    for costs in problem.costs:
        named = {f.name: getattr(costs, f.name) for f in dataclasses.fields(costs)}
        arrays = {k: digest(v) for k, v in named.items() if isinstance(v, np.ndarray)}
        yield row("costs", microbatches=costs.microbatches, **arrays)


def choice_lines(found: PipelineChoice) -> Iterator[str]:
    yield row(
        "choice",
        microbatches=found.microbatches,
        schedule=found.schedule.name,
        starts=found.starts,
        cuts=found.cuts,
        step=found.step_s,
        bound=found.bound_s,
        gap=found.gap,
        status=found.status,
        one=found.one_stage_s,
        tasks=digest(found.tasks.task_s),
    )
    for stage in found.stages:
        yield row(
            "stage",
            rule=stage.submesh.rule,
            devices=stage.devices,
            layers=stage.layers,
            again=stage.recomputed,
            memory=stage.memory_bytes,
            limit=stage.limit_bytes,
            bubble=stage.bubble,
        )


def lines_of(name: str, cluster: Cluster) -> Iterator[str]:
    analysis = STEPS[name]()
    yield from layer_lines(analysis, cluster)
    problems: list[StageProblem] = []
    solve = stages.solve_stages

    def noted(problem: StageProblem, **options: Any) -> Any:
        problems.append(problem)
        return solve(problem, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "solve_stages", noted)
        try:
            found = plan_stages(analysis, cluster, microbatches=[1, 4])
        except PlanError as error:
            yield str(error)
        else:
            yield from choice_lines(found)
    yield from problem_lines(problems[0])


@pytest.mark.parametrize("name", STEPS)
def test_choices(name: str) -> None:
    lines: list[str] = []
    for text in CLUSTERS:
        lines += ["", text, *lines_of(name, Cluster.parse(text))]

    assert_golden("\n".join(lines).strip(), f"pipelines/{name}.txt")


def test_pipelines_of_people() -> None:
    options = PlanOptions(seconds=None)
    analysis, cluster = layer_cases.mlp(), Cluster.parse("2x2:a100")
    found = hand_made(analysis, cluster, options)
    few = hand_made(analysis, cluster, options, most_stages=2)
    assert [(f.name, f.stages) for f in few] == [
        (f.name, f.stages) for f in found if f.stages == 2
    ]
    assert not hand_made(analysis, Cluster.parse("1x2:a100+1x2:v100"), options)
    lines = [
        row(
            one.name,
            stages=one.stages,
            mesh=one.mesh,
            reason=one.reason,
            step=one.plan.predicted.step_s if one.plan else None,
            microbatches=one.plan.microbatches if one.plan else None,
        )
        for one in found
    ]

    assert_golden("\n".join(lines), "pipelines/hand_made.txt")
