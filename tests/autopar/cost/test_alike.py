"""Tests that values looked up once for equal layers hold for each of the layers."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator

import planner_cases as cases
import pytest

from autopar.cluster import Cluster
from autopar.cost.buffers import Brought
from autopar.cost.estimate import messages_of
from autopar.cost.live import each_held_bytes, habits_of, held_bytes
from autopar.cost.pricer import Pricer
from autopar.cost.traffic import join_messages, traffic
from autopar.layouts.assignment import Assignment
from autopar.planner.candidate import Candidate, candidate_of
from autopar.planner.problem import Formulation, formulate
from autopar.planner.search import candidate_meshes
from autopar.steps.analysis import Analysis, analyse
from autopar_passes.graph.roles import Role
from autopar_solver import Solution, Status

# Their compilers run early and widen; hide messages; and keep buffers on the chip.
CLUSTERS = ("2x4:cpu", "2x4:h100", "2x4:v5e")
PLANS = 4


@functools.cache
def analysis(name: str) -> Analysis:
    return analyse(*cases.workload(name))


@functools.cache
def formulation(name: str, text: str) -> Formulation:
    cluster = Cluster.parse(text)
    return formulate(analysis(name), Pricer(cluster, candidate_meshes(cluster)[0]))


def candidates(name: str, text: str) -> Iterator[Candidate]:
    """Random choices, also those that the problem forbids."""
    draw, found = random.Random(name), formulation(name, text)
    for _ in range(PLANS):
        choices = tuple(draw.randrange(len(s.strategies)) for s in found.spaces)
        solution = Solution(
            choices=choices, cost=0.0, bound=0.0, status=Status.FEASIBLE, seconds=0.0
        )
        yield candidate_of(analysis(name), found, solution)


@pytest.mark.parametrize(
    ("name", "text"), list(zip(cases.names(), itertools.cycle(CLUSTERS), strict=False))
)
def test_what_operators_read_is_noted_as_one_by_one(name: str, text: str) -> None:
    for candidate in candidates(name, text):
        assignment = candidate.assignment
        life = analysis(name).life(habits_of(candidate.pricer.cluster.device))
        together, one_by_one = (Brought(assignment, life) for _ in range(2))
        operators = assignment.graph.operators
        together.read_all(operators)
        for op in operators:
            for reading in analysis(name).readings.of[op.index]:
                one_by_one.read(op, reading)

        assert list(together.buffers()) == list(one_by_one.buffers())
        # What is needed until the start is needed by nobody.
        known = {v: end for v, end in one_by_one.ends.items() if end}
        assert {v: end for v, end in together.ends.items() if end} == known


def gathers(assignment: Assignment) -> set[tuple[int, object, int]]:
    """The collectives that reshard values; each form belongs to its first reader."""
    known: set[object] = set()
    out: set[tuple[int, object, int]] = set()
    readings = assignment.analysis.readings
    for op in assignment.graph.operators:
        for reading in readings.of[op.index]:
            ways = assignment.ways[reading.group]
            for source, (steps, fresh) in zip(reading.sources, ways, strict=True):
                for k, step in enumerate(steps):
                    form = source, fresh, tuple(s.layout for s in steps[: k + 1])
                    if form not in known and step.kind != "slice":
                        out.add((source, step, op.index))
                    known.add(form)
    return out


@pytest.mark.parametrize("name", cases.names())
def test_every_form_is_made_for_its_first_reader(name: str) -> None:
    for candidate in candidates(name, "2x4:h100"):
        assignment = candidate.assignment
        if assignment.stackings:
            continue  # what stays partial is not brought to those who add it up
        found = {(c.value, c.step, c.operator) for c in traffic(assignment)}

        assert gathers(assignment) <= found


@pytest.mark.parametrize("name", ["mlp_adamw_clip", "scan_layers", "embedding"])
def test_collectives_cost_the_same_together_and_alone(name: str) -> None:
    for candidate in candidates(name, "2x4:h100"):
        assignment, pricer = candidate.assignment, candidate.pricer
        found = join_messages(pricer, traffic(assignment))
        sent = messages_of(assignment, pricer, found)

        assert sent.planned_s.tolist() == pytest.approx(
            [c.seconds(pricer) for c in found]
        )
        for k, c in enumerate(found):
            alone = messages_of(assignment, pricer, [c])
            assert alone.bytes_s[0] == sent.bytes_s[k]
            assert alone.sent_bytes[0] == sent.sent_bytes[k]
            assert alone.once[0] == sent.once[k]


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("name", cases.names())
def test_inputs_hold_the_same_together_and_alone(name: str, *, tiled: bool) -> None:
    for candidate in candidates(name, "2x4:v5e"):
        assignment = candidate.assignment
        inputs = assignment.graph.inputs

        assert each_held_bytes(assignment, tiled=tiled) == [
            held_bytes(assignment, given, tiled=tiled) for given in inputs
        ]


@pytest.mark.parametrize("name", ["conv_batchnorm", "mlp_adamw_clip"])
def test_what_the_update_makes_is_gathered_in_the_update(name: str) -> None:
    """What is handed on too, though a count of steps or statistics come last."""
    for candidate in candidates(name, "2x4:h100"):
        graph = candidate.assignment.graph
        makers = candidate.assignment.contraction.producer
        for c in traffic(candidate.assignment):
            maker = makers.get(c.value)
            if maker is not None and maker.role is Role.UPDATE:
                assert graph.operators[c.operator].role is Role.UPDATE
