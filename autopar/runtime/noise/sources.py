"""Finds the gradients of parameters in a planned step, and their partial gradients.

A *group* is the rows of one microbatch that one data replica works on. With K replicas
and A microbatches there are n = K * A groups of equal size. The gradient of a parameter
is the sum of the partial gradients of all groups.

Replicas of unequal devices share the A microbatches of a step. Each microbatch belongs
to one of them, so K counts the data replicas within such a replica. The groups have
equal sizes even though the replicas have unequal numbers of rows. If a gradient has no
partial gradients of single microbatches, it has K groups, each with rows of all
microbatches.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Axes
from autopar.planner.codecs.sites import gradients_of, updated_parameters
from autopar.steps.analysis import Analysis
from autopar.steps.batch import BATCH, batch_dims, batch_rows
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.microbatches.facts import Combine
from autopar_passes.program.equations import walk


@dataclasses.dataclass(frozen=True, slots=True)
class GradientSource:
    """The gradient of one parameter, and its partial gradients by group.

    Values are given as numbers of values of the program.

    Attributes:
      name: path of the parameter.
      value: the gradient.
      replicas: mesh axes whose devices hold partial gradients of different rows.
      groups: number of groups with separate partial gradients, n.
      parts: the value that holds the partial gradients of the groups, as partial sums
        over devices or as one value for each microbatch.
      bare: an earlier value that only transpositions and reshapes turn into ``parts``,
        so that both have the same norm (`bare_of`).
      loop: the equation of the loop over microbatches that makes ``parts``; -1: no loop
        makes ``parts``.
      share: the factor with which each microbatch's partial gradient counts in the
        gradient.
    """

    name: str
    value: int
    replicas: Axes
    groups: int
    parts: int
    bare: int
    loop: int = -1
    share: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """The gradients that are measured.

    Attributes:
      found: the measured gradients, in program order.
      left_out: paths of the parameters whose gradients are not found.
      rows: number of rows in the batch, M.
    """

    found: tuple[GradientSource, ...]
    left_out: tuple[str, ...]
    rows: int


def with_waiting(assignment: Assignment) -> Assignment:
    """The assignment with every gradient's sum over devices deferred, if it can be."""
    waiting = frozenset(gradients_of(assignment.analysis))
    return dataclasses.replace(assignment, waiting=waiting)


def find_sources(assignment: Assignment) -> Sources:
    """Finds the gradients of a step's parameters.

    Args:
      assignment: the plan as layouts, from `with_waiting`.
    """
    analysis = assignment.analysis
    rows = batch_rows((analysis.whole or analysis).graph)
    parameters = trained_paths(analysis.graph)
    names = updated_parameters(analysis.graph, list(_candidates(analysis)))
    alone = alone_in(names)
    micro = _micro_values(analysis)
    found = [_source(assignment, v, name, micro, rows) for v, name in alone.items()]
    left = tuple(name for name in parameters if name not in alone.values())
    return Sources(tuple(found), left, rows)


def trained_paths(graph: OperatorGraph) -> list[str]:
    """Paths of the parameters that a step changes.

    An input that the step returns unchanged, such as a learning rate, is not included.
    """
    return [
        given.path
        for given in graph.inputs
        if given.role is InputRole.PARAMETER
        and graph.outputs[given.output] != given.value
    ]


def alone_in(names: dict[int, str]) -> dict[int, str]:
    """Value -> name of its parameter, if this value alone updates the parameter.

    If several values update a parameter, each is only a part of the gradient, so none
    is returned.

    Args:
      names: value -> name of the parameter, from `updated_parameters`.
    """
    counts = Counter(names.values())
    return {v: name for v, name in names.items() if name and counts[name] == 1}


def _candidates(analysis: Analysis) -> Iterator[int]:
    """Yields the values that may be gradients of parameters.

    Gradients whose sum over devices is deferred come first.
    """
    graph = analysis.graph
    yield from gradients_of(analysis)
    on_path = set[int]().union(*(d.members for d in analysis.deferrals))
    crossing = (
        set[int]() if analysis.split is None else analysis.split.accumulated_values
    )
    top = {e.index for e in analysis.program.body.equations}
    read = {
        v
        for op in graph.operators
        if op.role is Role.UPDATE or op.kind == "return"
        for v in op.inputs
        if v is not None
    }
    for op in graph.operators:
        for value in op.outputs:
            backward = op.role is Role.BACKWARD and op.equation in top
            if (
                (backward or value in crossing)
                and value in read
                and value not in on_path
                and graph.values[value].floating
            ):
                yield value


def _micro_values(analysis: Analysis) -> dict[int, tuple[int, int, float]]:
    """Gradient -> its value in one microbatch, the loop over microbatches, its share.

    The share is the factor with which one microbatch counts in the gradient.
    """
    split, whole = analysis.split, analysis.whole
    if split is None or whole is None:
        return {}
    first = len(whole.program.values)
    loops = {
        value: eqn.index
        for eqn in analysis.program.body.equations
        for region in eqn.regions
        for inner in walk(region)
        for value in inner.outputs
    }
    shares = {Combine.SUM: 1.0, Combine.MEAN: 1.0 / split.microbatches}
    return {
        c.value: (first + c.value, loops[first + c.value], shares[c.combine])
        for c in split.crossings
        if c.combine in shares and first + c.value in loops
    }


def _source(
    assignment: Assignment,
    value: int,
    name: str,
    micro: dict[int, tuple[int, int, float]],
    rows: int,
) -> GradientSource:
    replicas = replicas_of(assignment, value)
    workers = math.prod(assignment.sizes[a] for a in replicas)
    count = assignment.analysis.microbatches if value in micro else 1
    if rows % (workers * count):
        # The rows cannot be divided equally. So several devices work on the same row,
        # and no device has the partial gradient of rows of its own.
        replicas, workers = (), 1
    parts, loop, share = micro.get(value, (value, -1, 1.0))
    bare = bare_of(assignment, parts)
    return GradientSource(
        name, value, replicas, workers * count, parts, bare, loop, share
    )


# Operators that only change the order or the shape of the elements.
_LAYING = ("copy", "reshape", "squeeze", "transpose")


def bare_of(assignment: Assignment, value: int) -> int:
    """The earliest value that has the same elements as ``value``.

    Copies, transpositions and reshapes before ``value`` are followed back as long as
    the values are partial over the same mesh axes. The measurement reads this earlier
    array: the compiler can fuse a transposition with a sum, but would have to store the
    transposed array if the measurement read it.
    """
    held = assignment.partial_layout(value)
    while True:
        op = assignment.contraction.producer[value]
        before = op.inputs[0] if op.kind in _LAYING and len(op.inputs) == 1 else None
        if before is None or assignment.floating(before):
            return value
        found = assignment.partial_layout(before)
        if (held and held[0]) != (found and found[0]):
            return value
        value = before


def turn_of(assignment: Assignment, value: int, bare: int) -> tuple[int, ...] | None:
    """The permutation of dims that transposes ``bare`` to ``value``.

    Args:
      assignment: the plan as layouts.
      value: a gradient.
      bare: the value that `bare_of` returns for ``value``.

    Returns:
      For each dim of ``value`` the number of the same dim in ``bare``. None if ``bare``
      is also reshaped on its way to ``value``.
    """
    equations = assignment.analysis.program.by_index()
    turn = tuple(range(len(assignment.graph.values[value].shape)))
    while value != bare:
        op = assignment.contraction.producer[value]
        if op.kind not in ("copy", "transpose"):
            return None
        if op.kind == "transpose":
            permutation = equations[op.equation].params["permutation"]
            turn = tuple(permutation[dim] for dim in turn)
        (before,) = op.inputs
        assert before is not None
        value = before
    return turn


def replicas_of(assignment: Assignment, value: int) -> Axes:
    """The mesh axes over which a gradient is a partial sum of different rows.

    On such an axis the devices are data replicas.
    """
    held = assignment.stackings.get(value)
    if held is None or value not in held.deferral.ends:
        return ()
    operators = assignment.graph.operators
    makers = [operators[op] for op, ends in held.deferral.reach if value in ends]
    batch = _batch_axes(assignment)
    return tuple(
        a
        for a in held.axes
        if all(_splits_rows(assignment, m, a, batch) for m in makers)
    )


def _batch_axes(assignment: Assignment) -> frozenset[int]:
    """The mesh axes that split the rows of the batch in the inputs of the step."""
    analysis = assignment.analysis
    inputs, found = analysis.graph.inputs, set[int]()
    for k, dim in batch_dims((analysis.whole or analysis).graph).items():
        found.update(assignment.home_layout(inputs[k].value)[dim])
    return frozenset(found)


def _splits_rows(
    assignment: Assignment, maker: Operator, axis: int, batch: frozenset[int]
) -> bool:
    """Whether a mesh axis splits the rows over which an operator sums.

    Args:
      assignment: the plan as layouts.
      maker: an operator that makes a gradient.
      axis: the mesh axis.
      batch: the mesh axes that split the rows of the batch.
    """
    analysis = assignment.analysis
    node = assignment.contraction.node(maker)
    labels = analysis.node_labels.get(node.index, {})
    strategy: Sequence[Axes] = assignment.strategies[node.index]
    for factor in node.factors_reduced(maker):
        if axis in strategy[factor]:
            label = labels.get(factor)
            return label == BATCH or (label is None and axis in batch)
    return False
