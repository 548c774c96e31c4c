"""The strategies of each node: ways to assign mesh axes to its factors."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Sequence

from autopar.layouts.layout import Axes, Layout, assignments
from autopar.steps.nodes import Contraction, Node
from autopar.steps.uses import Use, ValueClass
from autopar_passes.graph.operators import OperatorGraph
from autopar_passes.rules.factor_rule import Dims

# A strategy gives each factor of a node the mesh axes that split it.
Strategy = tuple[Axes, ...]

# On meshes with more axes than this, only state may have its axes in any order on a
# dimension, because the number of orders grows as a factorial.
_ORDERED_MESHES = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Space:
    """The strategies of one node."""

    strategies: tuple[Strategy, ...]

    def layouts(self, dims: Dims) -> list[Layout]:
        """Returns the layout of an array under each strategy."""
        return list(_layouts(self.strategies, dims))


# The cache size is for a U-Net of three levels on a 4x4x4 mesh. This U-Net has 400
# different entries of at most 250 layouts. A layout takes about 300 bytes, so these
# entries take 30 MB.
@functools.lru_cache(maxsize=1 << 10)
def _layouts(strategies: tuple[Strategy, ...], dims: Dims) -> tuple[Layout, ...]:
    return tuple(layout_of(s, dims) for s in strategies)


def layout_of(strategy: Strategy, dims: Dims) -> Layout:
    """The layout, under a strategy, of an array whose dimensions have these factors."""
    return tuple(tuple(a for f in d for a in strategy[f]) for d in dims)


def partial_axes(strategy: Strategy, reduced: Sequence[int]) -> Axes:
    """The axes over which a result is partial: the axes that split reduced factors."""
    return tuple(sorted(a for f in reduced for a in strategy[f]))


def strategy_space(
    graph: OperatorGraph, contraction: Contraction, node: Node, sizes: Sequence[int]
) -> Space:
    """Returns the strategies of a node on a mesh with these axis sizes."""
    factors = [size for size, _ in node.factors]
    orders = node.kind != "contraction" and (
        len(sizes) <= _ORDERED_MESHES or node.state
    )
    compound = _compound_dims(graph, contraction, node)
    kept = [
        s
        for s in assignments(tuple(factors), tuple(sizes), orders=orders)
        if all(_dense(s, node, d, sizes) for d in compound)
        and all(_split_wholly(s, node, f, sizes) for f in node.whole)
        and all(_has_halves(s, node, f, sizes) for f in node.halved)
    ]
    return Space(tuple(kept))


def copy_space(factors: Sequence[int], sizes: Sequence[int], *, orders: bool) -> Space:
    """Returns the strategies of a copy of an array."""
    return Space(assignments(tuple(factors), tuple(sizes), orders=orders))


def _compound_dims(
    graph: OperatorGraph, contraction: Contraction, node: Node
) -> list[tuple[int, ...]]:
    """The dimensions of the node's root operator that consist of several factors."""
    op = graph.operators[node.root]
    mapping = node.members.get(node.root)
    if mapping is None:
        homes = [contraction.homes.get(v) for v in op.outputs]
        return [
            d for h in homes if h and h.node == node.index for d in h.dims if len(d) > 1
        ]
    out: list[tuple[int, ...]] = []
    for dims in (*op.rule.operands, *op.rule.results):
        out.extend(tuple(mapping[f] for f in d) for d in dims if len(d) > 1)
    return out


def _split_wholly(
    strategy: Strategy, node: Node, factor: int, sizes: Sequence[int]
) -> bool:
    """Whether one mesh axis alone splits a factor into single elements."""
    axes = strategy[factor]
    return len(axes) == 1 and sizes[axes[0]] == node.factors[factor][0]


def _has_halves(
    strategy: Strategy, node: Node, factor: int, sizes: Sequence[int]
) -> bool:
    """Whether a factor is not split, or its shards have an even number of elements."""
    parts = math.prod(sizes[a] for a in strategy[factor])
    return parts == 1 or node.factors[factor][0] // parts % 2 == 0


def _dense(
    strategy: Strategy, node: Node, dim: tuple[int, ...], sizes: Sequence[int]
) -> bool:
    """Whether the factors of a dimension are split from major to minor.

    A factor may be split only if all factors that are more major are split into single
    elements.
    """
    complete = True
    for f in dim:
        split = math.prod(sizes[a] for a in strategy[f]) if f >= 0 else 1
        if split > 1 and not complete:
            return False
        size = node.factors[f][0] if f >= 0 else 0
        complete = complete and split == size
    return True


class Mode(enum.Enum):
    """How a copy is made."""

    FETCH = "resharded from the value"
    REUSE = "the forward copy, kept"
    SAME = "the value itself, in the layout it has"


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """A shared copy of a value, with its own layout.

    Attributes:
      node: node of the copy in the problem.
      value_class: the value that is copied.
      backward: whether backward readers share the copy, rather than forward readers.
      dims: the factors of each dimension of the value.
      space: strategies of the copy.
      modes: for each strategy, the way in which the copy is made.
      uses: the readers that share the copy.
    """

    node: int
    value_class: ValueClass
    backward: bool
    dims: Dims
    space: Space
    modes: tuple[Mode, ...]
    uses: tuple[Use, ...]

    def mode_of(self, same: bool, reuse: bool) -> Mode:
        """How a copy is made.

        A copy is made by resharding, unless it has the value's own layout or reuses the
        forward copy.
        """
        if reuse:
            return Mode.REUSE
        return Mode.SAME if same and Mode.SAME in self.modes else Mode.FETCH
