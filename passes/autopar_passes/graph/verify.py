"""Checks that an operator graph is valid."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator

from autopar_errors import InternalError
from autopar_passes.graph.operators import (
    BOUNDARIES,
    Operator,
    OperatorGraph,
    producers,
    read_operators,
)
from autopar_passes.graph.roles import InputRole, Role, dependents
from autopar_passes.program.equations import Value
from autopar_passes.rules.factor_rule import INNER, Dims, FactorKind, FactorRule

# Number of operators that are printed before and after the faulty one.
_AROUND = 3


class GraphError(InternalError):
    """An operator graph violates an invariant: a fault of autopar, not of the user."""


def invariant_error(
    graph: OperatorGraph, position: int | None, what: str
) -> GraphError:
    """Returns the error for a violated invariant.

    Args:
      graph: the graph.
      position: the position of the faulty operator; None if the fault is elsewhere.
      what: the fault, with the values.
    """
    if position is None:
        return GraphError(what)
    first = max(0, position - _AROUND)
    around = graph.operators[first : position + _AROUND + 1]
    lines = [
        f"{'>' if k == position else ' '} {k:5} {_line(op)}"
        for k, op in enumerate(around, first)
    ]
    kind = graph.operators[position].kind
    return GraphError("\n".join((f"operator {position} '{kind}': {what}", *lines)))


def _line(op: Operator) -> str:
    read = ", ".join("constant" if v is None else f"%{v}" for v in op.inputs)
    made = ", ".join(f"%{v}" for v in op.outputs)
    where = " ".join(x for x in (op.role.value, op.module, op.source) if x)
    return f"{made} = {op.kind}({read})  # x{op.trips:g} {where}"


# A region is the body of a loop, or all branches of a ``cond``. A region contains all
# operators from the first boundary operator of its equation up to the operator
# ``until``.


# The position of a faulty operator, None if the fault is elsewhere, and the fault.
_Problem = tuple[int | None, str]


@dataclasses.dataclass(slots=True)
class _Region:
    """One region, or the whole step.

    Attributes:
      equation: the equation of the region.
      until: the last operator of the region.
      outer: the region that contains this region; None for the whole step.
      outer_trips: the number of runs of its equation; None if not known yet.
      inner_trips: the number of runs of the operators inside; None if not known yet.
    """

    equation: int
    until: int
    outer: _Region | None
    outer_trips: float | None = None
    inner_trips: float | None = None


def _check_regions(graph: OperatorGraph) -> Iterator[_Problem]:
    """Checks the regions of a graph.

    * Regions are nested. All operators that pass values into or out of a region name
      the same last operator.
    * A value is computed before it is read. The only exception is the end value of an
      iteration, which a carry reads before the body computes it.
    * A region reads values from outside only through its boundary operators. Inputs of
      the step are an exception.
    * Trips are finite and not negative (a loop may have no iteration). All operators of
      one region run the same number of times.
    """
    regions = _find_regions(graph)
    yield from _check_reads(graph, regions)
    for k, op in enumerate(graph.operators):
        yield from _check_trips(k, op, regions[k])


def _find_regions(graph: OperatorGraph) -> list[_Region]:
    """Returns the region of each operator; a boundary operator is in its own region."""
    here = _Region(-1, len(graph.operators) - 1, None, 1.0, 1.0)
    out: list[_Region] = []
    ended: set[int] = set()
    for k, op in enumerate(graph.operators):
        while k > here.until and here.outer is not None:
            ended.add(here.equation)
            here = here.outer
        if op.kind not in BOUNDARIES:
            if op.until != -1:
                raise invariant_error(
                    graph, k, f"it has no region, but ends one at {op.until}"
                )
        elif op.equation != here.equation:
            if op.equation in ended or not k <= op.until <= here.until:
                raise invariant_error(
                    graph, k, f"its region ends at {op.until}, the outer one at "
                    f"{here.until}",
                )  # fmt: skip
            here = _Region(op.equation, op.until, here)
        elif op.until != here.until:
            raise invariant_error(
                graph, k, f"its region ends at {op.until} and {here.until}"
            )
        out.append(here)
    return out


def _check_reads(graph: OperatorGraph, regions: list[_Region]) -> Iterator[_Problem]:
    made_by = producers(graph.operators)
    for k, op in enumerate(graph.operators):
        for slot, value in enumerate(op.inputs):
            if value is None:
                continue
            maker = made_by.get(value)
            if maker is None:
                yield k, f"%{value} is made by no operator"
                return
            ends = op.kind == "carry" and slot == 1
            if maker.index > op.until if ends else maker.index >= k:
                yield k, f"%{value} is read before {maker.index} makes it"
            known = _made_in(maker, value, regions[maker.index])
            wanted = _read_in(op, slot, regions[k])
            if known is not wanted and maker.kind != "input":
                yield k, f"%{value} of {maker.index} is not in its region"


def _made_in(maker: Operator, value: int, region: _Region) -> _Region | None:
    """Returns the region in which a value is available."""
    match maker.kind:
        case "stack_step" | "merge":
            return region.outer
        case "carry":
            return region.outer if value == maker.outputs[-1] else region
        case _:
            return region


def _read_in(reader: Operator, slot: int, region: _Region) -> _Region | None:
    """Returns the region in which an operand is read."""
    match reader.kind:
        case "enter" | "slice_step":
            return region.outer
        case "carry":
            return region.outer if slot == 0 else region
        case _:
            return region


def _check_trips(k: int, op: Operator, region: _Region) -> Iterator[_Problem]:
    if len(op.input_trips) != len(op.inputs):
        yield k, f"it has {len(op.input_trips)} trips of its operands"
    if not all(0 <= trips < math.inf for trips in (op.trips, *op.input_trips)):
        yield k, f"it runs {op.trips} times, reads {op.input_trips} times"
    outer, inner, reads = _trips(op, region)
    if op.input_trips != reads:
        yield k, f"it runs {op.trips} times, reads {op.input_trips} times"
    if op.kind in BOUNDARIES:
        assert region.outer is not None
        yield from _agree(k, region.outer, "inner_trips", outer)
        yield from _agree(k, region, "outer_trips", outer)
    yield from _agree(k, region, "inner_trips", inner)


def _trips(
    op: Operator, region: _Region
) -> tuple[float | None, float | None, tuple[float, ...]]:
    """How often, in a step, an operator's equation, its body and its reads run."""
    every = (op.trips,) * len(op.inputs)
    match op.kind:
        case "enter":
            return op.trips, None, every
        case "carry":
            return op.trips, op.input_trips[1], (op.trips, op.input_trips[1])
        case "slice_step":
            return op.input_trips[0], op.trips, (op.input_trips[0],)
        case "stack_step":
            return None, op.trips, every
        case "merge":
            return op.trips, op.trips, every
        case _:
            return None, op.trips, every


def _agree(
    k: int, region: _Region, name: str, trips: float | None
) -> Iterator[_Problem]:
    """Checks or stores the number of runs of a region."""
    known = getattr(region, name)
    if known is None:
        setattr(region, name, trips)
    elif trips is not None and trips != known:
        yield k, f"it runs {trips} times, its region {known} times"


_REDUCTIONS = frozenset({"", "sum", "max", "min", "or", "and", INNER})


def verify(graph: OperatorGraph) -> None:
    """Checks the invariants of a graph.

    * Numbers: an operator's index is its position, and its values exist. Each value is
      computed once. FLOPs are finite and not negative.
    * Rules: each dimension is the product of its factors. A reduced factor is in no
      result, and a parallel factor is in a result.
    * Regions: see `_check_regions`.
    * Roles: the forward pass may read an operator of the update only if that operator
      does not depend on the backward pass, except through carries of loops. An operator
      of the update depends on the backward pass, or only the update reads it.
    * Classes: the operators of a class differ only in the values that they read and
      compute.
    * Inputs and outputs: the first operators are the inputs, and the last operators
      return the outputs. Carried state keeps its shape and dtype.

    Raises:
      GraphError: one of these invariants does not hold.
    """
    for check in (
        _check_numbers, _check_rules, _check_regions, _check_roles, _check_classes,
        _check_inputs, _check_outputs,
    ):  # fmt: skip
        for position, what in check(graph):
            raise invariant_error(graph, position, what)


def _check_numbers(graph: OperatorGraph) -> Iterator[_Problem]:
    values = range(len(graph.values))
    made: set[int] = set()
    for k, op in enumerate(graph.operators):
        if op.index != k:
            yield k, f"its index is {op.index}"
        for value in (*op.inputs, *op.outputs):
            if value is not None and value not in values:
                yield k, f"there is no value %{value}"
        for value in op.outputs:
            if value in made:
                yield k, f"%{value} is made a second time"
            made.add(value)
        if not 0 <= op.flops < math.inf:
            yield k, f"it has {op.flops} FLOPs"


def _check_rules(graph: OperatorGraph) -> Iterator[_Problem]:
    known: set[tuple[int, tuple[tuple[int, ...] | None, ...], int]] = set()
    for k, op in enumerate(graph.operators):
        arrays = tuple(
            None if v is None else graph.values[v].shape
            for v in (*op.inputs, *op.outputs)
        )
        key = (id(op.rule), arrays, len(op.inputs))
        if key not in known:
            wrong = next(_wrong_rule(graph, op), "")
            if wrong:
                yield k, wrong
            known.add(key)


def _wrong_rule(graph: OperatorGraph, op: Operator) -> Iterator[str]:
    """Yields the faults of an operator's rule."""
    rule, counts = op.rule, (len(op.inputs), len(op.outputs))
    if (len(rule.operands), len(rule.results)) != counts:
        yield f"its rule has {len(rule.operands)} operands, {len(rule.results)} results"
        return
    if len(rule.sizes) != len(rule.kinds):
        yield f"its rule has {len(rule.sizes)} sizes and {len(rule.kinds)} kinds"
        return
    used = {f for dims in (*rule.operands, *rule.results) for d in dims for f in d}
    if not used <= set(range(len(rule.sizes))):
        yield f"its rule has no factor {max(used)}, only {len(rule.sizes)}"
        return
    for name, arrays, dims in (
        ("operand", op.inputs, rule.operands),
        ("result", op.outputs, rule.results),
    ):
        for slot, (value, one) in enumerate(zip(arrays, dims, strict=True)):
            shape = () if value is None else graph.values[value].shape
            if not _covers(rule, one, shape):
                sizes = [[rule.sizes[f] for f in dim] for dim in one]
                yield f"{name} {slot} has shape {shape}, the rule's factors {sizes}"
    yield from _wrong_kinds(rule, op.kind)


def _covers(rule: FactorRule, dims: Dims, shape: tuple[int, ...]) -> bool:
    """Returns whether each dimension is the product of its factors."""
    return len(dims) == len(shape) and all(
        math.prod(rule.sizes[f] for f in dim) == max(size, 1)
        for dim, size in zip(dims, shape, strict=True)
    )


def _wrong_kinds(rule: FactorRule, kind: str) -> Iterator[str]:
    reduced = rule.reduced_factors
    if rule.reduction not in _REDUCTIONS or bool(rule.reduction) != bool(reduced):
        yield f"it reduces the factors {set(reduced)} by {rule.reduction!r}"
    made = {f for dims in rule.results for f in rule.factors_of(dims)}
    for factor, what in enumerate(rule.kinds):
        if what is FactorKind.REDUCE and factor in made:
            yield f"factor {factor} is reduced, but a result has it"
        if what is FactorKind.PASS and factor not in made and kind != "return":
            yield f"factor {factor} is parallel, but no result has it"


def _check_roles(graph: OperatorGraph) -> Iterator[_Problem]:
    roles = [op.role for op in graph.operators]
    reads = read_operators(graph.operators)
    after = dependents([r is Role.BACKWARD for r in roles], reads)
    read_by_update = {
        j for k, js in enumerate(reads) if roles[k] is Role.UPDATE for j in js
    }
    for k, op in enumerate(graph.operators):
        if op.role is Role.FORWARD and op.kind != "carry":
            for j in reads[k]:
                if roles[j] is Role.UPDATE and after[j]:
                    yield k, f"the forward pass reads the update, {j}"
        if op.role is Role.UPDATE and not after[k] and k not in read_by_update:
            yield k, "the update depends on nothing of the backward pass"


def _check_classes(graph: OperatorGraph) -> Iterator[_Problem]:
    for k, op in enumerate(graph.operators):
        first = op.class_index
        if not 0 <= first <= k:
            yield k, f"its class is {first}, an operator before it is one"
        same = graph.operators[first]
        if same.class_index != first:
            yield k, f"its class {first} is of class {same.class_index}"
        if first != k and _alike(graph, op) != _alike(graph, same):
            yield k, f"it differs from operator {first} of its class"


def _alike(graph: OperatorGraph, op: Operator) -> tuple[object, ...]:
    arrays = tuple(_array(graph.values, v) for v in (*op.inputs, *op.outputs))
    return (op.kind, op.role, op.rule, op.trips, op.kernel, arrays)


def _array(
    values: tuple[Value, ...], number: int | None
) -> tuple[tuple[int, ...], object] | None:
    return None if number is None else (values[number].shape, values[number].dtype)


def _check_inputs(graph: OperatorGraph) -> Iterator[_Problem]:
    carried: set[int] = set()
    for k, given in enumerate(graph.inputs):
        op = graph.operators[k] if k < len(graph.operators) else None
        if op is None or op.kind != "input" or op.outputs != (given.value,):
            yield (k if op else None), f"it does not hand in '{given.path}'"
            return
        alone = given.role in (InputRole.BATCH, InputRole.FROZEN)
        known = alone or given.role is InputRole.OTHER
        if (alone and given.output >= 0) or (given.output < 0 and not known):
            yield k, f"{given.role} is not the role of '{given.path}'"
        if given.output == -1:
            continue
        if given.output in carried or not 0 <= given.output < len(graph.outputs):
            yield k, f"output {given.output} cannot carry '{given.path}'"
        carried.add(given.output)
        out = graph.outputs[given.output]
        before, now = _array(graph.values, given.value), _array(graph.values, out)
        if now is not None and before != now:
            yield k, f"'{given.path}' is {before}, it comes back as {now}"


def _check_outputs(graph: OperatorGraph) -> Iterator[_Problem]:
    wanted = [v for v in graph.outputs if v is not None]
    first = len(graph.operators) - len(wanted)
    for k, op in enumerate(graph.operators):
        taken = (op.inputs, op.outputs)
        if (op.kind == "return") != (k >= first):
            yield k, f"operators from {first} on return the outputs"
        if op.kind == "return" and taken != ((wanted[k - first],), ()):
            yield k, f"it should return %{wanted[k - first]}"


# Debug switches. Only this module reads them from the environment.


def verifies() -> bool:
    """Returns whether the passes check the graphs and deferrals that they return.

    The environment variable ``AUTOPAR_VERIFY=1`` enables the checks. The tests set it.
    """
    return os.environ.get("AUTOPAR_VERIFY") == "1"
