"""Golden programs of microbatches, and of random layouts.

The files have a checksum of each program's text. Other tests compare results; these
show every unintended change, such as an additional collective.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import jax
import planner_cases
import pytest
from checkout import GOLDEN
from figures import row
from golden import assert_golden
from planner_harness import Case, all_waiting, mesh_of, random_plan
from program_figures import check_sum, microbatch_lines, program_row

from autopar.errors import PlanError
from autopar.steps.analysis import Analysis, analyse
from autopar.steps.microbatches import in_microbatches, one_microbatch
from autopar_passes.replay.run import replay

SIZES = (2, 4)


def replay_line(analysis: Analysis, name: str, *, waits: bool) -> str:
    """A line about the step as traced under a plan that splits most arrays."""
    case = Case(lambda: None, (), analysis)
    draw = random.Random(name)
    plan = random_plan(all_waiting(case) if waits else case, SIZES, draw)
    program = analysis.program
    run = replay(program, analysis.graph, plan, mesh_of(SIZES))
    values = [program.values[k] for k in program.body.inputs[: program.num_arguments]]
    traced = jax.make_jaxpr(run)(
        *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values)
    )
    text = str(traced)
    return row(
        "replayed",
        waits=waits,
        stated=text.count("sharding_constraint"),
        barriers=text.count("optimization_barrier"),
        mapped=text.count("shard_map"),
        text=check_sum(text),
    )


def lines_of(name: str) -> Iterator[str]:
    analysis = analyse(*planner_cases.workload(name))
    yield program_row("step", analysis.program)
    yield replay_line(analysis, name, waits=False)
    yield replay_line(analysis, name, waits=True)
    for count, couple in ((2, False), (4, True)):
        yield f"{count} microbatches"
        try:
            yield from microbatch_lines(
                one_microbatch(analysis, count, couple=couple).split
            )
            whole = in_microbatches(analysis, count, couple=couple)
        except PlanError as error:
            yield str(error)
            continue
        yield program_row("whole", whole.program)
        yield replay_line(whole, name, waits=count == 2)


@pytest.mark.parametrize("name", planner_cases.names())
def test_programs(name: str) -> None:
    assert_golden("\n".join(lines_of(name)), f"programs/{name}.txt")


def test_every_step_has_its_file_and_no_others() -> None:
    kept = {path.stem for path in (GOLDEN / "programs").iterdir()}
    assert kept == set(planner_cases.names())
