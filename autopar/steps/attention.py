"""Attention that a step writes out: products with a softmax between them.

The scores of a group of heads are a batched product, and the probabilities that a
softmax makes of them are an operand of another. What lies between is element by
element, also in the backward pass and through loops. So values of the scores' size that
element-wise operators join are one group, and its products are those of attention:
two of the forward pass, four of the backward pass.
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

# Operators whose result of the same size is not element by element that of an operand.
_APART = PRODUCTS | {"gather", "sort", "top_k", "dynamic_update_slice", "rev", "cumsum"}
# Operators that a mask is made by; what lies behind more of them is not looked at.
_DEEP = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """Attention that is written out.

    Attributes:
      products: indices of its products, those that are repeated too.
      between: indices of the other operators over its scores.
      causal: whether a mask leaves out the later keys.
      head_dim: size of the dimension over which a score is summed.
      dtype: of the queries.
    """

    products: frozenset[int]
    between: frozenset[int]
    causal: bool
    head_dim: int
    dtype: str


def written_attention(
    graph: OperatorGraph, constants: Mapping[int, Any]
) -> tuple[Attention, ...]:
    """Finds the attention that a step writes out.

    Args:
      graph: the operator graph.
      constants: the arrays of values that the step closes over.
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
    """Values that element-wise operators join, as a forest."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}

    def root(self, value: int) -> int:
        """The value that stands for a group."""
        path = [value]
        while (above := self.parent.get(path[-1], path[-1])) != path[-1]:
            path.append(above)
        for passed in path:
            self.parent[passed] = path[-1]
        return path[-1]

    def of(self, values: Iterable[int | None]) -> set[int]:
        """The groups of some values; a value that nothing has joined has none."""
        return {self.root(v) for v in values if v is not None and v in self.parent}

    def join(self, op: Operator, graph: OperatorGraph, free: frozenset[int]) -> None:
        """Joins what an operator reads and makes, element by element."""
        known = [v for v in op.inputs if v is not None and v not in free]
        for made in op.outputs:
            for read in known:
                if _alike(graph, op, read, made):
                    self.parent[self.root(read)] = self.root(made)


def _alike(graph: OperatorGraph, op: Operator, read: int, made: int) -> bool:
    """Whether a result holds an element for each one of an operand."""
    one, other = graph.values[read], graph.values[made]
    if not (one.floating and other.floating and other.shape):
        return False
    if op.kind in ("slice_step", "stack_step"):
        stacked, part = (one, other) if op.kind == "slice_step" else (other, one)
        return stacked.size == part.size * stacked.shape[0]
    return one.size == other.size


def _free(graph: OperatorGraph) -> frozenset[int]:
    """Values that hang on no input, such as what masked scores become."""
    out: set[int] = set()
    for op in graph.operators:
        if op.kind != "input" and all(v is None or v in out for v in op.inputs):
            out.update(op.outputs)
    return frozenset(out)


class _Group:
    """One group of values, and the operators that read or make one of them."""

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
        """Whether one of some values is of the group."""
        return self.root in self.groups.of(values)

    def is_attention(self) -> bool:
        """Whether it is scores, their softmax, and what is multiplied by it."""
        kinds = {op.kind for op in self.ops if self.has(op.inputs)}
        return (
            bool(self.scores)
            and bool(kinds & EXPONENTIALS)
            and "reduce_sum" in kinds
            and any(self.has(op.inputs) for op in self.products)
            and all(map(_is_batched, self.products))
        )

    def masks(self) -> Iterator[int]:
        """What scores are chosen by, or what is added to them."""
        for op in self.ops:
            if op.kind in ("select_n", "add") and self.has(op.outputs):
                known = (v for v in op.inputs if v is not None)
                yield from (v for v in known if not self.has((v,)))

    def attention(self, causal: bool) -> Attention:
        """The group as a value."""
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
    """Whether a product is one of many: of each row and head, and of no weights."""
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
    """Whether a mask leaves out what lies above the diagonal.

    It compares positions of queries with those of keys, which both count from 0
    (``iota``) or come from the same input; or it is an array that shows it.
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
    """The inputs that a value comes from; -1 stands for counting from 0."""
    return frozenset(
        -1 if op.kind == "iota" else found
        for found, op in _behind(value, made)
        if op.kind in ("iota", "input")
    )


def _behind(value: int, made: Mapping[int, Operator]) -> Iterator[tuple[int, Operator]]:
    """The values that a value is made of, itself first, and who makes each."""
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
    """Whether all at and below the diagonal is alike, and all above it, otherwise."""
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
