"""Compares intermediate figures of the stage solver and schedules with golden files."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from figures import arrays_of, digest, digest_all, row
from golden import assert_golden
from stage_problems import random_problem

from autopar_solver.clock import Clock
from autopar_solver.stages.completion import (
    PipelineIncumbent,
    complete_pipeline,
    evaluate_pipeline,
    lower_bound_s,
    task_seconds,
)
from autopar_solver.stages.entries import build_entries
from autopar_solver.stages.problem import Pipeline, StageProblem
from autopar_solver.stages.relaxation import recompute_prices
from autopar_solver.stages.schedules.play import (
    Schedule,
    ScheduleKind,
    TaskKind,
    TaskSeconds,
    count_alive,
    make_table,
    play,
)
from autopar_solver.stages.search import bound_space, most_stages
from autopar_solver.stages.solve import (
    binding_memory,
    offer_mixed,
    polish,
    solve_stages,
    uniform_pipelines,
)

SCHEDULES = (*map(Schedule, ScheduleKind), Schedule(ScheduleKind.INTERLEAVED, 3))


@contextlib.contextmanager
def noted(log: list[tuple[float, ...]]) -> Iterator[None]:
    """Appends each offered pipeline and the best step time after it to the log."""
    offer = PipelineIncumbent.offer

    def noted_offer(self: PipelineIncumbent, pipeline: Pipeline) -> None:
        offer(self, pipeline)
        cuts = [pipeline.microbatches, *pipeline.options, *pipeline.cuts]
        log.append((self.step_s, *cuts, *pipeline.recomputed))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineIncumbent, "offer", noted_offer)
        yield


def solution_lines(problem: StageProblem) -> Iterator[str]:
    log: list[tuple[float, ...]] = []
    with noted(log):
        found = solve_stages(problem, gap=1e-3)
    chosen = found.pipeline
    yield row(
        "solution",
        status=found.status.name,
        step=found.step_s,
        bound=found.bound_s,
        offers=len(log),
        steps=digest([step_s for step_s, *_ in log]),
        cuts=digest_all(cuts for _, *cuts in log),
    )
    if chosen is not None:
        yield row("pipeline", schedule=chosen.schedule.name, **_figures_of(chosen))
        cost = evaluate_pipeline(problem, chosen)
        yield row("cost", arrays_of(cost))
    binding = binding_memory(problem)
    if binding is not None:
        yield row("binding", dataclasses.asdict(binding))


def _figures_of(pipeline: Pipeline) -> dict[str, object]:
    return {
        "microbatches": pipeline.microbatches,
        "options": pipeline.options,
        "cuts": pipeline.cuts,
        "recomputed": pipeline.recomputed,
    }


def bound_lines(problem: StageProblem) -> Iterator[str]:
    uniform = uniform_pipelines(problem, most_stages(problem))
    yield row(
        "uniform",
        stages=most_stages(problem),
        bounds=digest([u.bound_s for u in uniform]),
        cuts=digest_all(u.cuts for u in uniform),
    )
    for candidate in uniform[:12]:
        pipeline = Pipeline(
            microbatches=candidate.microbatches,
            schedule=problem.schedules[candidate.schedule],
            options=(candidate.option,) * candidate.stages,
            cuts=candidate.cuts,
        )
        whole = complete_pipeline(problem, pipeline)
        if whole is not None:
            seconds = task_seconds(problem, whole)
            yield row(
                "complete",
                recomputed=whole.recomputed,
                bound=lower_bound_s(whole, seconds),
                tasks=digest(seconds.task_s),
                held=digest_all((seconds.held_bytes, seconds.pending_bytes)),
            )
    for costs in problem.costs:
        entries, prices = build_entries(problem, costs), recompute_prices(costs)
        yield row("entries", arrays_of(entries))
        yield row("prices", price=digest(prices.price), sums=digest(prices.sums))
        for schedule in problem.schedules:
            if schedule.kind is ScheduleKind.INTERLEAVED:
                continue
            found = bound_space(problem, costs, schedule, 1e3)
            if found is None:
                yield row("space", schedule=schedule.name, none=True)
                continue
            yield row(
                "space",
                schedule=schedule.name,
                bound=found.bound_s,
                stages=len(found.space.entries),
                low=found.space.low,
                add=digest(found.loosest.add),
                peak=digest(found.loosest.peak),
                price=digest(found.price),
                intervals=digest_all(found.intervals),
                cross=digest(found.space.crossings.cross),
                link=digest(found.space.crossings.link),
            )


def offer_lines(problem: StageProblem) -> Iterator[str]:
    """Lines of what mixed pipelines and single moves find without the search."""
    incumbent = PipelineIncumbent(problem)
    log: list[tuple[float, ...]] = []
    with noted(log):
        offer_mixed(problem, incumbent, Clock(0.0, None))
        mixed_s = incumbent.step_s
        for candidate in uniform_pipelines(problem, most_stages(problem))[-2:]:
            incumbent.offer(
                Pipeline(
                    microbatches=candidate.microbatches,
                    schedule=problem.schedules[candidate.schedule],
                    options=(candidate.option,) * candidate.stages,
                    cuts=candidate.cuts,
                )
            )
        polish(problem, incumbent, Clock(0.0, None))
    yield row(
        "moves",
        mixed=mixed_s,
        polished=incumbent.step_s,
        offers=len(log),
        steps=digest([step_s for step_s, *_ in log]),
        cuts=digest_all(cuts for _, *cuts in log),
    )


def test_searches() -> None:
    lines: list[str] = []
    for seed in range(30):
        problem = random_problem(seed, most_layers=6, schedules=SCHEDULES)
        lines += ["", problem.name, *solution_lines(problem)]
        lines += [*bound_lines(problem), *offer_lines(problem)]
    for seed in range(100, 106):
        # More layers than there are prices of recomputation.
        problem = random_problem(seed, most_layers=24, schedules=SCHEDULES)
        lines += ["", problem.name, *bound_lines(problem)]

    assert_golden("\n".join(lines).strip(), "searches/stages.txt")


def task_seconds_of(parts: int, stages: int, seed: int, blocking: bool) -> TaskSeconds:
    random = np.random.default_rng(seed)
    task = random.uniform(1.0, 9.0, (parts, len(TaskKind)))
    link = random.uniform(0.0, 6.0, (3, parts - 1)) * (seed % 3 > 0)
    return TaskSeconds(
        task_s=task,
        forward_link_s=link[0],
        backward_link_s=link[1],
        latency_s=link[2],
        step_s=random.uniform(0.0, 5.0, stages),
        held_bytes=random.uniform(1.0, 9.0, parts),
        pending_bytes=random.uniform(1.0, 9.0, parts),
        blocking=blocking,
    )


def test_schedules() -> None:
    """The order of tasks, what is alive, and when everything runs."""
    lines: list[str] = []
    shapes = ((1, 1), (1, 4), (2, 1), (2, 3), (3, 2), (4, 4), (4, 9))
    for schedule in SCHEDULES:
        for seed, (stages, microbatches) in enumerate(shapes):
            table = make_table(schedule, stages, microbatches)
            alive = [count_alive(table, stage) for stage in range(stages)]
            found = play(
                table, task_seconds_of(table.parts, stages, seed, seed % 2 > 0)
            )
            lines.append(
                row(
                    schedule.name,
                    shape=(stages, microbatches),
                    order=digest_all(table.orders),
                    alive=digest_all(x for a in alive for x in (a.held, a.pending)),
                    most=[a.most for a in alive],
                    starts=digest_all(found.starts_s),
                    ends=digest_all(found.ends_s),
                    makespan=found.makespan_s,
                    busy=digest(found.busy_s),
                    bubble=digest(found.bubble),
                    peak=digest(found.peak_bytes),
                )
            )

    assert_golden("\n".join(lines), "searches/schedules.txt")
