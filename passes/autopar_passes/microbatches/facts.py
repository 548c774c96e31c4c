"""Facts of a step that decide how it may be split into microbatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from autopar_passes.graph.operators import (
    GraphInput,
    Operator,
    OperatorGraph,
    producers,
)
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.microbatches.pairs import Pair
from autopar_passes.program.equations import Equation, walk
from autopar_passes.sums.linear import ADDITIVE, UNARY

# They draw random numbers, or make keys for that.
RANDOM = frozenset(
    {"random_bits", "random_gamma", "random_split", "rng_bit_generator", "rng_uniform"}
)
# What they make of a statistic alone is one, too: a variance and an epsilon.
_HANDING = UNARY | ADDITIVE | {"broadcast_in_dim", "mul"}


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a step.

    Attributes:
      operators: the operator of each equation without regions.
      roles: the role of each top-level equation.
      back: top-level equations whose results the backward pass needs.
      given: values that are known before the first microbatch without a forward pass:
        those that depend on the batch, on keys and on counters alone.
      statistics: statistics of the batch that normalise its rows and that carried
        state keeps.
      updated: values that are made of results of the backward pass.
    """

    operators: dict[int, Operator]
    roles: dict[int, Role]
    back: frozenset[int]
    given: frozenset[int]
    statistics: frozenset[int]
    updated: frozenset[int]


def facts(pair: Pair, graph: OperatorGraph) -> Facts:
    """Finds the facts of a step.

    Args:
      pair: its programs.
      graph: the operator graph of the whole batch.
    """
    operators: dict[int, Operator] = {}
    roles: dict[int, set[Role]] = {}
    outermost = _outermost(pair.whole.body.equations)
    for op in graph.operators:
        if op.equation >= 0:
            operators[op.equation] = op
            roles.setdefault(outermost[op.equation], set()).add(op.role)
    found = _roles(pair.whole.body.equations, roles)
    updated = _gradient_values(graph)
    return Facts(
        operators,
        found,
        _needed_back(pair.whole.body.equations, found),
        _stateless_values(pair, graph),
        _statistics(pair, graph) - updated,
        updated,
    )


def loop_of_updates(pair: Pair, operators: Mapping[int, Operator]) -> Equation | None:
    """The loop over the batch that hands gradients of a turn to a later forward pass.

    So do updates on minibatches, and a search along a line. What a loop adds up over
    its turns, and what it hands on for each row, is read by no forward pass so.

    Args:
      pair: the programs.
      operators: the operator of each equation without regions.
    """
    for eqn in walk(pair.whole.body):
        for region in eqn.regions[-1:] if eqn.primitive in ("scan", "while") else ():
            back, ahead = set[int](), set[int]()
            first = len(region.inputs) - len(region.outputs)
            if eqn.primitive == "scan":
                first = eqn.params["num_consts"]
            carried = list(zip(region.inputs[first:], region.outputs, strict=False))
            carried = [(a, b) for a, b in carried if not pair.has_rows(a)]
            for inner in region.equations:
                roles = _roles_in(inner, operators)
                read = {a for a in inner.inputs if isinstance(a, int)}
                if Role.BACKWARD in roles or not back.isdisjoint(read):
                    back.update(inner.outputs)
            ahead.update(a for a, b in carried if b in back)
            for inner in region.equations:
                if ahead.isdisjoint(a for a in inner.inputs if isinstance(a, int)):
                    continue
                ahead.update(inner.outputs)
                made = (inner, *(e for r in inner.regions for e in walk(r)))
                rows = any(pair.has_rows(v) for e in made for v in e.outputs)
                if rows and Role.FORWARD in _roles_in(inner, operators):
                    return eqn
    return None


def _roles_in(eqn: Equation, operators: Mapping[int, Operator]) -> set[Role]:
    """The roles of an equation's operators, with those in its regions."""
    made = (eqn, *(e for region in eqn.regions for e in walk(region)))
    return {operators[e.index].role for e in made if e.index in operators}


def _outermost(equations: Iterable[Equation]) -> dict[int, int]:
    """Each equation -> the one outside of all regions that it is in."""
    out: dict[int, int] = {}
    for eqn in equations:
        out[eqn.index] = eqn.index
        for region in eqn.regions:
            out.update((inner.index, eqn.index) for inner in walk(region))
    return out


def _roles(
    equations: Sequence[Equation], roles: Mapping[int, set[Role]]
) -> dict[int, Role]:
    """The role of each top-level equation: of its operators, the innermost ones too.

    What the backward pass reads is none of the update: zeros, to which a loop adds.
    """
    found = {index: _role(of) for index, of in roles.items()}
    read: set[int] = set()
    for eqn in reversed(equations):
        if found[eqn.index] is Role.UPDATE and not read.isdisjoint(eqn.outputs):
            found[eqn.index] = Role.FORWARD
        if found[eqn.index] is not Role.UPDATE:
            read.update(a for a in eqn.inputs if isinstance(a, int))
    return found


def _role(roles: set[Role]) -> Role:
    if Role.BACKWARD in roles:
        return Role.BACKWARD
    # A loop of the update also has what depends on no gradient: its counter.
    return Role.UPDATE if Role.UPDATE in roles else Role.FORWARD


def _needed_back(
    equations: tuple[Equation, ...], roles: dict[int, Role]
) -> frozenset[int]:
    """The equations of the backward pass, and those of which one of them reads."""
    read: set[int] = set()
    found: set[int] = set()
    for eqn in reversed(equations):
        backward = roles.get(eqn.index) is Role.BACKWARD
        if backward or not read.isdisjoint(eqn.outputs):
            found.add(eqn.index)
            read.update(a for a in eqn.inputs if isinstance(a, int))
    return frozenset(found)


def _stateless_values(pair: Pair, graph: OperatorGraph) -> frozenset[int]:
    """The values outside of loops that need no array of the state."""
    body = pair.whole.body
    found = {i.value for i in graph.inputs if i.output < 0 or not _is_array(graph, i)}
    found.update(body.inputs[pair.whole.num_arguments :])
    for eqn in body.equations:
        told = eqn.source.effects
        if not told and all(a in found for a in eqn.inputs if isinstance(a, int)):
            found.update(eqn.outputs)
    return frozenset(found)


def _is_array(graph: OperatorGraph, given: GraphInput) -> bool:
    """Whether an input is an array of numbers that the step learns or keeps."""
    value = graph.values[given.value]
    return value.floating and (given.role is not InputRole.OTHER or value.size > 1)


def _gradient_values(graph: OperatorGraph) -> frozenset[int]:
    """The values that are made of gradients, such as new parameters."""
    found: set[int] = set()
    for _ in range(2):  # A loop hands its first values in behind the last of them.
        for op in graph.operators:
            arrays = (v for v in op.inputs if v is not None)
            if op.role is Role.BACKWARD or not found.isdisjoint(arrays):
                found.update(op.outputs)
    return frozenset(found)


def _statistics(pair: Pair, graph: OperatorGraph) -> frozenset[int]:
    kept = _forward_values(pair, graph)
    found = kept & _normalising(pair, graph)
    for op in graph.operators:
        if op.role is not Role.FORWARD or op.kind not in _HANDING:
            continue
        if not found.isdisjoint(op.inputs):
            found.update(v for v in op.outputs if not pair.has_rows(v))
    return frozenset(found)


def _forward_values(pair: Pair, graph: OperatorGraph) -> set[int]:
    """The values without rows that new carried arrays are made of in the forward pass.

    Through other values without rows, or element by element through those with.
    """
    made_by = producers(graph.operators)
    left = [
        graph.outputs[i.output]
        for i in graph.inputs
        if i.output >= 0
        and i.role is InputRole.OTHER
        and graph.values[i.value].floating
        and graph.values[i.value].shape
    ]
    seen: set[int] = set()
    while left:
        value = left.pop()
        op = None if value is None else made_by.get(value)
        if value is None or op is None or value in seen:
            continue
        seen.add(value)
        if op.role is not Role.FORWARD or op.kind == "input":
            continue
        if pair.has_rows(value) and op.rule.reduced_factors:
            continue
        left.extend(op.inputs)
    return {v for v in seen if not pair.has_rows(v)}


def _normalising(pair: Pair, graph: OperatorGraph) -> set[int]:
    """The values without rows of which the forward pass makes values with rows."""
    found: set[int] = set()
    for _ in range(2):  # A loop hands its first values in behind the last of them.
        for op in reversed(graph.operators):
            if op.role is not Role.FORWARD:
                continue
            if any(pair.has_rows(v) or v in found for v in op.outputs):
                arrays = (v for v in op.inputs if v is not None)
                found.update(v for v in arrays if not pair.has_rows(v))
    return found
