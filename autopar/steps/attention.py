"""Finds attention that a step computes as products with a softmax between them.

The scores of a group of heads are the result of a batched product. The softmax turns
the scores into probabilities, which are an operand of another batched product. All
operators between the two products are element-wise, also in the backward pass and
through loops. The search therefore groups values that have the size of the scores and
that element-wise operators connect. The products that read or write a group are the
products of attention: two in the forward pass and four in the backward pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from autopar_passes.graph.operators import PRODUCTS, Operator, OperatorGraph, producers
from autopar_passes.graph.roles import Role
from autopar_passes.rules.kernels import EXPONENTIALS, ORDERINGS

# Operators whose result may have the size of an operand although it is not
# element-wise.
_APART = PRODUCTS | {"gather", "sort", "top_k", "dynamic_update_slice", "rev", "cumsum"}
# The largest number of operators that the search visits from a mask back to the inputs
# of the mask.
_DEEP = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """Attention that a step computes without a hand-written kernel.

    Attributes:
      products: indices of its products, including products that are rematerialised.
      between: indices of the other operators that read or write values of the size of
        the scores.
      causal: whether a mask hides later keys from a query.
      head_dim: the size of the contracted dimension of the product that computes the
        scores.
      dtype: the dtype of the queries.
    """

    products: frozenset[int]
    between: frozenset[int]
    causal: bool
    head_dim: int
    dtype: str


def written_attention(
    graph: OperatorGraph, constants: Mapping[int, Any]
) -> tuple[Attention, ...]:
    """Finds the attention that a step computes without a hand-written kernel.

    Args:
      graph: the operator graph.
      constants: value -> the array, for values that the step closes over.
    """
    if not any(op.kind in EXPONENTIALS for op in graph.operators):
        return ()
    made = producers(graph.operators)
    free = _free(graph)
    groups = _Groups()
    passes = [op for op in graph.operators if op.role is not Role.UPDATE]
    for op in passes:
        if op.kind not in _APART and op.kernel is None:
            groups.join(op, graph, free)
    touched: dict[int, list[Operator]] = defaultdict(list)
    for op in passes:
        for root in groups.of((*op.inputs, *op.outputs)):
            touched[root].append(op)
    found: list[Attention] = []
    for root, ops in touched.items():
        group = _Group(graph, groups, root, ops)
        if group.is_attention():
            masks = group.masks()
            causal = any(_is_causal(mask, made, constants) for mask in masks)
            found.append(group.attention(causal))
    return tuple(found)


class _Groups:
    """Groups of values that element-wise operators connect, as a union-find forest."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}

    def root(self, value: int) -> int:
        """Returns the value that stands for the group of a value."""
        path = [value]
        while (above := self.parent.get(path[-1], path[-1])) != path[-1]:
            path.append(above)
        for passed in path:
            self.parent[passed] = path[-1]
        return path[-1]

    def of(self, values: Iterable[int | None]) -> set[int]:
        """Returns the groups of some values.

        A value that was never joined to others has no group.
        """
        return {self.root(v) for v in values if v is not None and v in self.parent}

    def join(self, op: Operator, graph: OperatorGraph, free: frozenset[int]) -> None:
        """Joins each result with the operands that match it element by element."""
        known = [v for v in op.inputs if v is not None and v not in free]
        for made in op.outputs:
            for read in known:
                if _alike(graph, op, read, made):
                    self.parent[self.root(read)] = self.root(made)


def _alike(graph: OperatorGraph, op: Operator, read: int, made: int) -> bool:
    """Whether each element of a result belongs to the same element of an operand."""
    one, other = graph.values[read], graph.values[made]
    if not (one.floating and other.floating and other.shape):
        return False
    if op.kind in ("slice_step", "stack_step"):
        stacked, part = (one, other) if op.kind == "slice_step" else (other, one)
        return stacked.size == part.size * stacked.shape[0]
    return one.size == other.size


def _free(graph: OperatorGraph) -> frozenset[int]:
    """Returns values that depend on no input, such as a constant mask value."""
    out: set[int] = set()
    for op in graph.operators:
        if op.kind != "input" and all(v is None or v in out for v in op.inputs):
            out.update(op.outputs)
    return frozenset(out)


class _Group:
    """A group of values, and the operators that read or compute values of the group."""

    def __init__(
        self, graph: OperatorGraph, groups: _Groups, root: int, ops: list[Operator]
    ) -> None:
        self.graph, self.groups, self.root, self.ops = graph, groups, root, ops
        self.products = [op for op in ops if op.kind in PRODUCTS]
        self.scores = [
            op
            for op in self.products
            if self.has(op.outputs) and not self.has(op.inputs)
        ]

    def has(self, values: Iterable[int | None]) -> bool:
        """Whether one of the values is in the group."""
        return self.root in self.groups.of(values)

    def is_attention(self) -> bool:
        """Whether the group has scores, their softmax, and an operand of a product."""
        kinds = {op.kind for op in self.ops if self.has(op.inputs)}
        return (
            bool(self.scores)
            and bool(kinds & EXPONENTIALS)
            and "reduce_sum" in kinds
            and any(self.has(op.inputs) for op in self.products)
            and all(map(_is_batched, self.products))
        )

    def masks(self) -> Iterator[int]:
        """Yields masks: operands that are combined with the scores."""
        for op in self.ops:
            if op.kind in ("select_n", "add") and self.has(op.outputs):
                known = (v for v in op.inputs if v is not None)
                yield from (v for v in known if not self.has((v,)))

    def attention(self, causal: bool) -> Attention:
        """Returns the attention of the group."""
        query = self.scores[0].inputs[0]
        products = frozenset(op.index for op in self.products)
        return Attention(
            products=products,
            between=frozenset(op.index for op in self.ops) - products,
            causal=causal,
            head_dim=_contracted_size(self.scores[0]),
            dtype="" if query is None else str(self.graph.values[query].dtype),
        )


def _is_batched(op: Operator) -> bool:
    """Whether a product has a batch dimension, unlike products with weights."""
    rule = op.rule
    if len(rule.operands) < 2:
        return False
    left, right, result = (
        rule.factors_of(d) for d in (*rule.operands[:2], rule.results[0])
    )
    return any(rule.sizes[f] > 1 for f in left & right & result)


def _contracted_size(op: Operator) -> int:
    left, right, result = (
        op.rule.factors_of(d) for d in (*op.rule.operands[:2], op.rule.results[0])
    )
    return math.prod(op.rule.sizes[f] for f in (left & right) - result)


def _is_causal(
    mask: int, made: Mapping[int, Operator], constants: Mapping[int, Any]
) -> bool:
    """Whether a mask hides the scores above the diagonal.

    A causal mask compares the positions of queries with the positions of keys. Both
    positions count from 0 (``iota``) or come from the same input. A mask may also be a
    constant array in the form of a triangle.
    """
    for value, op in _behind(mask, made):
        if value in constants and _is_triangle(constants[value]):
            return True
        one, other = (*op.inputs, None, None)[:2]
        if (
            op.kind in ORDERINGS
            and one is not None
            and other is not None
            and one != other
        ):
            sources = _sources(one, made)
            if sources and sources == _sources(other, made):
                return True
    return False


def _sources(value: int, made: Mapping[int, Operator]) -> frozenset[int]:
    """Returns the inputs from which a value is computed; -1 stands for ``iota``."""
    return frozenset(
        -1 if op.kind == "iota" else found
        for found, op in _behind(value, made)
        if op.kind in ("iota", "input")
    )


def _behind(value: int, made: Mapping[int, Operator]) -> Iterator[tuple[int, Operator]]:
    """Yields a value and all values it is computed from, each with its operator."""
    left, seen = [value], set[int]()
    while left and len(seen) < _DEEP:
        value = left.pop()
        op = made.get(value)
        if value in seen or op is None or op.kind in PRODUCTS:
            continue
        seen.add(value)
        yield value, op
        left += [v for v in op.inputs if v is not None]


def _is_triangle(array: Any) -> bool:
    """Whether the elements up to the diagonal are equal, and differ from all others."""
    if np.ndim(array) < 2 or min(np.shape(array)[-2:]) < 2:
        return False
    square = np.asarray(array).reshape(-1, *np.shape(array)[-2:])[0]
    lower = np.tril(np.ones(square.shape, bool))
    one, other = square[lower], square[~lower]
    return bool(
        other.size
        and one[0] != other[0]
        and (one == one[0]).all()
        and (other == other[0]).all()
    )
