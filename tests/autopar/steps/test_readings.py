"""Tests that readings of one group need the same reshardings, for all layouts."""

from __future__ import annotations

import random

import planner_cases
import pytest
from planner_steps import mlp_batch, mlp_loss, mlp_params, training

from autopar import Cluster
from autopar.cost.pricer import Pricer
from autopar.layouts.assignment import Assignment, assign
from autopar.planner.problem import formulate
from autopar.planner.search import candidate_meshes
from autopar.steps.analysis import Analysis, analyse


def analysed(name: str) -> Analysis:
    return analyse(*planner_cases.workload(name))


def assignments(analysis: Analysis) -> list[Assignment]:
    """Random layouts on each mesh of a cluster, not only those of good plans."""
    cluster, draw = Cluster.parse("2x4:h100"), random.Random(0)
    out: list[Assignment] = []
    for mesh in candidate_meshes(cluster):
        found = formulate(analysis, Pricer(cluster, mesh))
        spaces = found.spaces[: len(analysis.contraction.nodes)]
        strategies = [draw.choice(space.strategies) for space in spaces]
        copies = [
            (copy, draw.randrange(len(copy.space.strategies))) for copy in found.copies
        ]
        out.append(assign(analysis, mesh.sizes, strategies, copies))
    return out


@pytest.mark.parametrize(
    "name", ["attention", "scan_remat_layers", "mixture_of_experts", "remat"]
)
def test_ways_are_those_of_each_reading(name: str) -> None:
    """Each reading by itself: its operand's layout, what makes it, and the steps."""
    analysis = analysed(name)
    operators = analysis.graph.operators
    moved = 0
    for assignment in assignments(analysis):
        for op, own in zip(operators, analysis.readings.of, strict=True):
            for reading in own:
                layout = assignment.layout(op, op.rule.operands[reading.slot])
                parts = assignment.required_layouts(reading.value, layout)
                wanted = [
                    assignment.fetch_steps(source, form, assignment.is_backward(op))
                    for source, form in parts
                ]

                assert reading.sources == tuple(source for source, _ in parts)
                assert list(assignment.ways[reading.group]) == wanted
                moved += any(steps for steps, _ in wanted)
    assert moved


def test_every_operand_of_an_operator_with_a_choice_is_there() -> None:
    analysis = analysed("attention")
    nodes = analysis.contraction.node_of
    for op, own in zip(analysis.graph.operators, analysis.readings.of, strict=True):
        chosen = op.kind != "return" and op.class_index in nodes
        slots = [k for k, v in enumerate(op.inputs) if v is not None and chosen]

        assert [r.slot for r in own] == slots


def test_equal_layers_share_their_groups() -> None:
    """Twice as many layers need no more groups, but for the seams."""
    few, many = (
        analyse(*training(mlp_loss, mlp_params(layers=n), mlp_batch())).readings
        for n in (4, 16)
    )

    assert len(many.of) > 2 * len(few.of)
    assert len(many.groups) < 1.5 * len(few.groups)
