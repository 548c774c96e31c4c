"""Builds the operator graph of a program, and finds repeated layers.

A model that applies the same block L times has the same sequence of equations L times
in the forward pass, and again in the backward pass. The optimizer also repeats one
sequence L times, for the parameters of each block. The operators at the same position
in each repetition form one *class*. The planner makes one set of decisions for each
class: its operators get the same layouts. A model of 96 layers therefore costs the
solver about as much as one layer. Repeated layers are found without the names of
modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from autopar_passes import debug
from autopar_passes.graph.batch import with_batch
from autopar_passes.graph.emit import emit_operators
from autopar_passes.graph.operators import (
    GraphInput,
    Operator,
    OperatorGraph,
    producers,
    read_operators,
)
from autopar_passes.graph.roles import InputRole, Role, input_roles, operator_roles
from autopar_passes.graph.verify import verify
from autopar_passes.program.calls import NOT_NAMED, NamedRoles
from autopar_passes.program.equations import Program, walk
from autopar_passes.program.trace import TracedStep
from autopar_passes.rules.book import rule_book, signature

# Number of periods that are tried per round. A period is a distance between two equal
# operators in the sequence. The periods that are tried are those that occur most often
# between neighbouring equal operators.
_CANDIDATES = 128
_ROUNDS = 64


def repeated_classes(
    signatures: Sequence[Hashable], *, min_length: int = 2
) -> np.ndarray:
    """Assigns each operator of a sequence to a class.

    Args:
      signatures: one key per operator; operators with equal keys may share decisions.
      min_length: shortest period that counts as a layer.

    Returns:
      int array ``[operators]``: the smallest operator index of its class.
    """
    codes = _codes(signatures)
    classes = np.arange(len(codes))
    free = np.ones(len(codes), dtype=bool)
    for _ in range(_ROUNDS):
        runs, period = _best_runs(codes, free, min_length)
        if not runs:
            break
        for start, stop in runs:
            offsets = np.arange(start, stop)
            shortest = _shortest_period(codes[start:stop], period, min_length)
            classes[offsets] = start + (offsets - start) % shortest
            free[offsets] = False
    return classes


def _codes(signatures: Sequence[Hashable]) -> np.ndarray:
    table: dict[Hashable, int] = {}
    return np.array(
        [table.setdefault(s, len(table)) for s in signatures], dtype=np.int64
    )


def _best_runs(
    codes: np.ndarray, free: np.ndarray, min_length: int
) -> tuple[list[tuple[int, int]], int]:
    """The runs (start, stop) with the period that makes most operators share."""
    best: tuple[list[tuple[int, int]], int] = ([], 0)
    best_saved = 0
    for period in _candidate_periods(codes, free, min_length):
        equal = (codes[:-period] == codes[period:]) & free[:-period] & free[period:]
        runs = _true_runs(equal, period, free)
        saved = sum(stop - start - period for start, stop in runs)
        if saved > best_saved:
            best, best_saved = (runs, period), saved
    return best


def _shortest_period(run: np.ndarray, period: int, min_length: int) -> int:
    """Returns the shortest period of a run: a period of 64 may be four of 16."""
    for divisor in range(min_length, period // 2 + 1):
        if period % divisor == 0 and np.array_equal(run[:-divisor], run[divisor:]):
            return divisor
    return period


def _candidate_periods(
    codes: np.ndarray, free: np.ndarray, min_length: int
) -> list[int]:
    """Returns distances between neighbouring occurrences of the same operator."""
    positions = np.flatnonzero(free)
    order = positions[np.argsort(codes[positions], kind="stable")]
    gaps = np.diff(order)[np.diff(codes[order]) == 0]
    gaps = gaps[gaps >= min_length]
    if gaps.size == 0:
        return []
    values, counts = np.unique(gaps, return_counts=True)
    rank = np.argsort(-np.sqrt(values) * counts, kind="stable")[:_CANDIDATES]
    return sorted(values[rank].tolist())


def _true_runs(
    equal: np.ndarray, period: int, free: np.ndarray
) -> list[tuple[int, int]]:
    """Returns the longest stretches that repeat with a period, as (start, stop)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], equal.view(np.int8), [0]))))
    starts, stops = edges[::2], edges[1::2]
    long = stops - starts >= period
    out: list[tuple[int, int]] = []
    for start, stop in zip(starts[long].tolist(), stops[long].tolist(), strict=True):
        if out and start < out[-1][1]:
            continue  # this run overlaps the last period of the previous run
        if free[start : stop + period].all():
            out.append((start, stop + period))
    return out


def step_graph(
    traced: TracedStep,
    *,
    like: OperatorGraph | None = None,
    share_repeated: bool = True,
) -> OperatorGraph:
    """Builds the operator graph of a traced step.

    Args:
      traced: the step.
      like: a graph of a step with the same first arguments. Its roles and rows are used
        for these arguments. None to find the roles and rows.
      share_repeated: whether repeated layers share one set of decisions.
    """
    return build_graph(
        traced.program,
        input_paths=traced.input_paths,
        carried=traced.carried,
        named=traced.form.roles,
        like=None if like is None else like.inputs,
        share_repeated=share_repeated,
    )


def build_graph(
    program: Program,
    *,
    input_paths: Sequence[str],
    carried: dict[int, int],
    named: NamedRoles = NOT_NAMED,
    like: Sequence[GraphInput] | None = None,
    share_repeated: bool = True,
) -> OperatorGraph:
    """Builds the operator graph of a flat program.

    Args:
      program: the flat step.
      input_paths: a readable path for each flat argument.
      carried: flat argument -> flat output that is its next value.
      named: the roles that the user has given.
      like: known inputs for the first arguments. An argument that does not come back
        gets the role and rows of its known input. Arguments without a known input
        belong to no batch. None to find all roles.
      share_repeated: whether repeated layers share one set of decisions.
    """
    equations = walk(program.body)
    signatures = [signature(e, program.values) for e in equations]
    found = rule_book(program, equations, signatures)
    emitted = emit_operators(program, found.rules, found.kernels)
    roles = operator_roles(emitted.stacks, read_operators(emitted.operators))
    inputs = _inputs(program, emitted.operators, roles, input_paths, carried)
    if like is None:
        inputs = with_batch(inputs, emitted.operators, roles, program.values, named)
    else:
        inputs = tuple(
            _like(given, like[k] if k < len(like) else None)
            for k, given in enumerate(inputs)
        )
    classes = _classes(program, emitted.operators, roles, inputs, share=share_repeated)
    operators = [
        op.with_role(role, class_index)
        for op, role, class_index in zip(emitted.operators, roles, classes, strict=True)
    ]
    outputs = tuple(a if isinstance(a, int) else None for a in program.body.outputs)
    graph = OperatorGraph(
        program.values,
        tuple(operators),
        inputs,
        outputs,
        found.unsupported,
        emitted.assumed_trips,
    )
    if debug.verifies():
        verify(graph)
    return graph


def _inputs(
    program: Program,
    operators: Sequence[Operator],
    role_of: Sequence[Role],
    paths: Sequence[str],
    carried: dict[int, int],
) -> tuple[GraphInput, ...]:
    values = program.body.inputs[: program.num_arguments]
    readers: dict[int, list[Role]] = {v: [] for v in values}
    inner_of: dict[int, int] = {v: v for v in values}
    producer = producers(operators)
    for op in operators:
        for v in op.inputs:
            if v in inner_of and op.kind not in ("input", "return"):
                readers[inner_of[v]].append(role_of[op.index])
                if op.kind in ("enter", "slice_step"):
                    inner_of.update((out, inner_of[v]) for out in op.outputs)
    after = (Role.BACKWARD, Role.UPDATE)
    outputs = program.body.outputs
    makers = [outputs[carried[i]] if i in carried else None for i in range(len(values))]
    roles = input_roles(
        num_inputs=len(values),
        carried=frozenset(carried),
        floating=[program.values[v].floating for v in values],
        read_by=[readers[v] for v in values],
        from_backward=[
            isinstance(m, int) and role_of[producer[m].index] in after for m in makers
        ],
    )
    return tuple(
        GraphInput(v, paths[i], roles[i], carried.get(i, -1))
        for i, v in enumerate(values)
    )


def _like(given: GraphInput, other: GraphInput | None) -> GraphInput:
    """Gives an input the role and rows of a known input, unless the step returns it."""
    if other is None:
        return dataclasses.replace(given, role=InputRole.OTHER)
    role = given.role
    if given.output < 0:  # state that another stage carries has no role in this stage
        role = InputRole.OTHER if other.output >= 0 else other.role
    return dataclasses.replace(
        given, role=role, rows=other.rows, unit=other.unit, turns=other.turns
    )


def _classes(
    program: Program,
    operators: Sequence[Operator],
    roles: Sequence[Role],
    inputs: Sequence[GraphInput],
    *,
    share: bool,
) -> list[int]:
    """For each operator, the index of the first operator that shares its decisions."""
    if not share:
        return [op.index for op in operators]
    given = {i.value: i.role if i.output >= 0 else None for i in inputs}
    keys = [
        (
            _class_key(program, op, role),
            given.get(op.outputs[0]) if op.kind == "input" else None,
        )
        for op, role in zip(operators, roles, strict=True)
    ]
    return [int(c) for c in repeated_classes(keys)]


def _class_key(program: Program, op: Operator, role: Role) -> tuple[Any, ...]:
    shapes = tuple(
        None if v is None else (program.values[v].shape, program.values[v].dtype)
        for v in (*op.inputs, *op.outputs)
    )
    return (op.kind, role, op.rule, shapes, op.trips, op.kernel)
