"""Tests that valid graphs pass verification, and that each corrupt field is named."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import pytest
from step_cases import NAMES, STEPS, case

from autopar_passes.graph import build
from autopar_passes.graph.build import step_graph
from autopar_passes.graph.operators import (
    BOUNDARIES,
    Operator,
    OperatorGraph,
    producers,
    read_operators,
    readers,
)
from autopar_passes.graph.roles import InputRole, Role, dependents
from autopar_passes.graph.verify import GraphError, verify
from autopar_passes.program.equations import Value
from autopar_passes.program.trace import trace
from autopar_passes.rules import factor_rule
from autopar_passes.rules.factor_rule import FactorKind, FactorRule

# A corrupted graph, the position of the operator that must be named, what is said.
Corrupted = tuple[OperatorGraph, int, str]
Corruption = Callable[[OperatorGraph], Iterator[Corrupted]]
# How often one corruption is tried on one graph.
TRIES = 4
CORRUPTIONS: dict[str, Corruption] = {}


def corruption(function: Corruption) -> Corruption:
    CORRUPTIONS[function.__name__] = function
    return function


def with_operator(graph: OperatorGraph, k: int, **fields: Any) -> OperatorGraph:
    ops = list(graph.operators)
    ops[k] = dataclasses.replace(ops[k], **fields)
    return dataclasses.replace(graph, operators=tuple(ops))


def with_rule(graph: OperatorGraph, k: int, **fields: Any) -> OperatorGraph:
    rule = dataclasses.replace(graph.operators[k].rule, **fields)
    return with_operator(graph, k, rule=rule)


def with_input(graph: OperatorGraph, k: int, **fields: Any) -> OperatorGraph:
    inputs = list(graph.inputs)
    inputs[k] = dataclasses.replace(inputs[k], **fields)
    return dataclasses.replace(graph, inputs=tuple(inputs))


def spread(graph: OperatorGraph, wanted: Callable[[Operator], bool]) -> list[int]:
    """Positions of some of the given operators, spread over the graph."""
    found = [op.index for op in graph.operators if wanted(op)]
    return found[:: max(1, len(found) // TRIES)]


def replaced(items: tuple[Any, ...], k: int, item: Any) -> tuple[Any, ...]:
    return (*items[:k], item, *items[k + 1 :])


@corruption
def index(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: True):
        yield with_operator(graph, k, index=k + 1), k, f"its index is {k + 1}"


@corruption
def unknown_operand(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: bool(op.inputs)):
        inputs = replaced(graph.operators[k].inputs, 0, len(graph.values))
        yield with_operator(graph, k, inputs=inputs), k, "there is no value"


@corruption
def made_twice(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: bool(op.outputs) and op.index > 0):
        outputs = (graph.operators[0].outputs[0], *graph.operators[k].outputs[1:])
        yield with_operator(graph, k, outputs=outputs), k, "is made a second time"


@corruption
def flops(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: op.flops > 0):
        for wrong in (-1.0, math.nan, math.inf):
            yield with_operator(graph, k, flops=wrong), k, "FLOPs"


@corruption
def missing_operand_of_rule(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: bool(op.inputs)):
        operands = graph.operators[k].rule.operands[1:]
        yield with_rule(graph, k, operands=operands), k, "its rule has"


@corruption
def missing_kind(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: bool(op.rule.kinds)):
        kinds = graph.operators[k].rule.kinds[1:]
        yield with_rule(graph, k, kinds=kinds), k, "sizes and"


@corruption
def unknown_factor(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: bool(op.rule.sizes)):
        rule = graph.operators[k].rule
        fewer = {"sizes": rule.sizes[:-1], "kinds": rule.kinds[:-1]}
        yield with_rule(graph, k, **fewer), k, f"no factor {len(rule.sizes) - 1}"


@corruption
def size_of_a_factor(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: bool(op.rule.sizes)):
        sizes = graph.operators[k].rule.sizes
        wrong = replaced(sizes, 0, sizes[0] + 1)
        yield with_rule(graph, k, sizes=wrong), k, "the rule's factors"


@corruption
def swapped_dimensions(graph: OperatorGraph) -> Iterator[Corrupted]:
    def oblong(op: Operator) -> bool:
        shapes = [graph.values[v].shape for v in op.outputs]
        return len(shapes) == 1 and len(shapes[0]) == 2 and len(set(shapes[0])) == 2

    for k in spread(graph, oblong):
        (dims,) = graph.operators[k].rule.results
        yield with_rule(graph, k, results=(dims[::-1],)), k, "result 0 has shape"


@corruption
def shape_of_a_value(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: op.kind == "input"):
        (value,) = graph.operators[k].outputs
        old = graph.values[value]
        new = Value((*old.shape, 2), old.dtype)
        values = replaced(graph.values, value, new)
        yield dataclasses.replace(graph, values=values), k, "result 0 has shape"


@corruption
def reduced_factor_in_a_result(graph: OperatorGraph) -> Iterator[Corrupted]:
    def maps(op: Operator) -> bool:
        return bool(op.outputs and op.rule.kinds and not op.rule.reduced_factors)

    for k in spread(graph, maps):
        rule = graph.operators[k].rule
        factors = [f for f, kind in enumerate(rule.kinds) if kind is FactorKind.PASS]
        if factors:
            kinds = replaced(rule.kinds, factors[0], FactorKind.REDUCE)
            wrong = with_rule(graph, k, kinds=kinds, reduction="sum")
            yield wrong, k, "is reduced, but a result has it"


@corruption
def reduced_factor_called_parallel(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: len(op.rule.reduced_factors) == 1):
        (factor,) = graph.operators[k].rule.reduced_factors
        kinds = replaced(graph.operators[k].rule.kinds, factor, FactorKind.PASS)
        wrong = with_rule(graph, k, kinds=kinds, reduction="")
        yield wrong, k, "is parallel, but no result has it"


@corruption
def reduction(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: bool(op.rule.reduced_factors)):
        yield with_rule(graph, k, reduction=""), k, "it reduces the factors"
        yield with_rule(graph, k, reduction="mean"), k, "it reduces the factors"
    for k in spread(graph, lambda op: not op.rule.reduced_factors):
        yield with_rule(graph, k, reduction="sum"), k, "it reduces the factors"


@corruption
def made_by_nothing(graph: OperatorGraph) -> Iterator[Corrupted]:
    made_by = producers(graph.operators)
    for k in spread(graph, lambda op: any(v is not None for v in op.inputs)):
        op = graph.operators[k]
        slot = next(s for s, v in enumerate(op.inputs) if v is not None)
        old = graph.values[op.inputs[slot] or 0]
        assert len(graph.values) not in made_by
        more = dataclasses.replace(graph, values=(*graph.values, old))
        inputs = replaced(op.inputs, slot, len(graph.values))
        yield with_operator(more, k, inputs=inputs), k, "is made by no operator"


@corruption
def read_before_it_is_made(graph: OperatorGraph) -> Iterator[Corrupted]:
    def maps(op: Operator) -> bool:
        alike = op.outputs and op.inputs and op.inputs[0] is not None
        return bool(
            alike
            and op.kind != "carry"
            and graph.values[op.inputs[0] or 0].shape
            == graph.values[op.outputs[0]].shape
        )

    for k in spread(graph, maps):
        op = graph.operators[k]
        inputs = replaced(op.inputs, 0, op.outputs[0])
        yield with_operator(graph, k, inputs=inputs), k, "is read before"


@corruption
def read_from_inside_a_region(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: op.kind == "enter"):
        inner, until = graph.operators[k].outputs[0], graph.operators[k].until
        for op in graph.operators[until + 1 :]:
            same = [
                slot
                for slot, v in enumerate(op.inputs)
                if v is not None and graph.values[v].shape == graph.values[inner].shape
            ]
            if same and op.kind not in BOUNDARIES | {"return"}:
                inputs = replaced(op.inputs, same[0], inner)
                wrong = with_operator(graph, op.index, inputs=inputs)
                yield wrong, op.index, "is not in its region"
                break


@corruption
def read_around_the_boundary(graph: OperatorGraph) -> Iterator[Corrupted]:
    """A region that reads an outside value which is not one of its operands."""
    made_by, read_by = producers(graph.operators), readers(graph.operators)
    for k in spread(graph, lambda op: op.kind == "enter"):
        outer, inner = graph.operators[k].inputs[0], graph.operators[k].outputs[0]
        if outer is None or made_by[outer].kind == "input":
            continue
        for op, slot in read_by.get(inner, [])[:1]:
            inputs = replaced(op.inputs, slot, outer)
            wrong = with_operator(graph, op.index, inputs=inputs)
            yield wrong, op.index, "is not in its region"


@corruption
def iteration_ends_after_its_loop(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: op.kind == "carry"):
        op = graph.operators[k]
        inputs = (op.inputs[0], op.outputs[-1])
        yield with_operator(graph, k, inputs=inputs), k, "is not in its region"


@corruption
def until(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: op.kind in BOUNDARIES):
        wrong = with_operator(graph, k, until=len(graph.operators))
        yield wrong, k, "its region ends at"
    for k in spread(graph, lambda op: op.kind not in BOUNDARIES):
        yield with_operator(graph, k, until=k), k, "it has no region"


@corruption
def number_of_trips(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: bool(op.inputs)):
        trips = graph.operators[k].input_trips[1:]
        yield with_operator(graph, k, input_trips=trips), k, "trips of its operands"


@corruption
def trips(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: True):
        count = len(graph.operators[k].inputs)
        for wrong in (-1.0, math.inf, math.nan):
            every = {"trips": wrong, "input_trips": (wrong,) * count}
            yield with_operator(graph, k, **every), k, "times"


@corruption
def trips_of_one_operator(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: op.kind not in BOUNDARIES):
        op = graph.operators[k]
        every = {"trips": op.trips + 1, "input_trips": (op.trips + 1,) * len(op.inputs)}
        yield with_operator(graph, k, **every), k, "its region"


@corruption
def trips_of_one_operand(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: bool(op.inputs) and op.kind not in BOUNDARIES):
        wrong = tuple(t + 1 for t in graph.operators[k].input_trips)
        yield with_operator(graph, k, input_trips=wrong), k, "times, reads"


@corruption
def forward_reads_the_update(graph: OperatorGraph) -> Iterator[Corrupted]:
    reads, roles = read_operators(graph.operators), [op.role for op in graph.operators]
    after = dependents([r is Role.BACKWARD for r in roles], reads)
    for k, js in enumerate(reads):
        updates = [j for j in js if roles[j] is Role.UPDATE]
        late = bool(updates) and all(after[j] for j in updates)
        if late and graph.operators[k].kind != "carry":
            wrong = with_operator(graph, k, role=Role.FORWARD)
            yield wrong, k, "the forward pass reads the update"


@corruption
def update_of_nothing(graph: OperatorGraph) -> Iterator[Corrupted]:
    reads, roles = read_operators(graph.operators), [op.role for op in graph.operators]
    after = dependents([r is Role.BACKWARD for r in roles], reads)
    by_update = {j for k, js in enumerate(reads) if roles[k] is Role.UPDATE for j in js}

    def free(op: Operator) -> bool:
        return not after[op.index] and op.index not in by_update

    for k in spread(graph, free):
        wrong = with_operator(graph, k, role=Role.UPDATE)
        yield wrong, k, "depends on nothing of the backward pass"


@corruption
def class_index(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: op.index > 0):
        yield with_operator(graph, k, class_index=k + 1), k, "its class is"
        yield with_operator(graph, k, class_index=-1), k, "its class is"
    for k in spread(graph, lambda op: op.kind == "dot_general"):
        yield with_operator(graph, k, class_index=0), k, "it differs from operator 0"


@corruption
def class_of_a_class(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in spread(graph, lambda op: op.class_index != op.index):
        chained = next(
            (op for op in graph.operators[k + 1 :] if op.class_index == op.index), None
        )
        if chained is not None:
            wrong = with_operator(graph, chained.index, class_index=k)
            yield wrong, chained.index, "is of class"


@corruption
def value_of_an_input(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k in range(len(graph.inputs)):
        other = graph.inputs[k - 1].value
        if other != graph.inputs[k].value:
            yield with_input(graph, k, value=other), k, "it does not hand in"


@corruption
def role_of_an_input(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k, given in enumerate(graph.inputs):
        batch = given.role is InputRole.BATCH
        role = InputRole.PARAMETER if batch else InputRole.BATCH
        yield with_input(graph, k, role=role), k, "is not the role of"


@corruption
def output_of_an_input(graph: OperatorGraph) -> Iterator[Corrupted]:
    carried = [k for k, given in enumerate(graph.inputs) if given.output >= 0]
    for k in carried:
        wrong = with_input(graph, k, output=len(graph.outputs))
        yield wrong, k, "cannot carry"
    for j, k in itertools.pairwise(carried):
        wrong = with_input(graph, k, output=graph.inputs[j].output)
        yield wrong, k, "cannot carry"


@corruption
def shape_of_what_comes_back(graph: OperatorGraph) -> Iterator[Corrupted]:
    for k, given in enumerate(graph.inputs):
        shape = graph.values[given.value].shape
        others = [
            position
            for position, v in enumerate(graph.outputs)
            if v is not None and graph.values[v].shape != shape
        ]
        taken = {g.output for g in graph.inputs[:k]}
        free = [position for position in others if position not in taken]
        if given.output >= 0 and free:
            yield with_input(graph, k, output=free[0]), k, "it comes back as"


@corruption
def an_output(graph: OperatorGraph) -> Iterator[Corrupted]:
    wanted = [v for v in graph.outputs if v is not None]
    first = len(graph.operators) - len(wanted)
    carried = {given.output for given in graph.inputs}
    for position, value in enumerate(graph.outputs):
        if value is not None and position not in carried:
            outputs = replaced(graph.outputs, position, 0)
            k = first + wanted.index(value)
            yield dataclasses.replace(graph, outputs=outputs), k, "it should return %0"


@pytest.mark.parametrize("name", NAMES)
def test_real_graphs_are_valid(name: str) -> None:
    verify(case(name).graph)
    verify(step_graph(case(name).traced, share_repeated=False))


@pytest.mark.parametrize("name", NAMES)
def test_every_corruption_is_found_and_named(name: str) -> None:
    for corrupt in CORRUPTIONS.values():
        for wrong, position, said in corrupt(case(name).graph):
            with pytest.raises(GraphError, match=re.escape(said)) as error:
                verify(wrong)
            first, *around = str(error.value).split("\n")
            assert first.startswith(f"operator {position} '"), (corrupt.__name__, first)
            assert [line for line in around if line.startswith(">")]


def test_every_corruption_was_tried() -> None:
    """None of them is without effect on all graphs."""
    tried = {
        kind
        for name in NAMES
        for kind, corrupt in CORRUPTIONS.items()
        if next(corrupt(case(name).graph), None) is not None
    }

    assert tried == set(CORRUPTIONS)


def test_the_error_shows_the_operators_around() -> None:
    graph = case("mlp").graph
    k = len(graph.operators) // 2

    with pytest.raises(GraphError) as error:
        verify(with_operator(graph, k, flops=-1.0))

    first, *around = str(error.value).split("\n")
    assert first == f"operator {k} '{graph.operators[k].kind}': it has -1.0 FLOPs"
    assert len(around) == 7
    assert [line.startswith(">") for line in around] == [False] * 3 + [True] + [
        False
    ] * 3
    assert f"{k} %{graph.operators[k].outputs[0]} = " in around[3]


def test_the_builder_verifies_when_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[OperatorGraph] = []
    monkeypatch.setattr(build, "verify", seen.append)

    monkeypatch.setenv("AUTOPAR_VERIFY", "1")
    asked = step_graph(case("cond").traced)
    monkeypatch.setenv("AUTOPAR_VERIFY", "0")
    step_graph(case("cond").traced)
    monkeypatch.delenv("AUTOPAR_VERIFY")
    step_graph(case("cond").traced)

    assert seen == [asked]


def test_a_wrong_rule_of_a_user_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of a custom call comes from outside: nothing else checks it."""

    monkeypatch.setattr(factor_rule, "_REGISTRY", dict(factor_rule._REGISTRY))

    @factor_rule.register_rule("sin")
    def _(operands: Any, results: Any, params: Any) -> FactorRule:
        return FactorRule((3,), (FactorKind.PASS,), (((0,),),), (((0,),),))

    with pytest.raises(GraphError, match=r"'sin': operand 0 has shape \(4,\)"):
        step_graph(trace(jnp.sin, (jnp.ones(4),)))


def test_models_of_every_kind_are_there() -> None:
    kinds = {op.kind for name in NAMES for op in case(name).graph.operators}

    assert kinds >= BOUNDARIES
    assert kinds >= {"optimization_barrier", "conv_general_dilated", "gather"}
    assert len(STEPS) + 1 == len(NAMES)
