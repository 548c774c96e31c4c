"""Layouts: how an array is sharded over a mesh, and how it gets another layout.

A *layout* gives each dimension of an array the mesh axes that split it, major
to minor, as positions in the mesh: ``((0,), (), (2, 1))`` splits dimension 0
over axis 0 and dimension 2 over axis 2 and then axis 1.

The compiler would choose its own collectives between two layouts. The planner chooses
them instead, and the planned program states every intermediate layout. So each step is
one elementary collective with a known price.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from autopar.plans import Spec
from autopar_passes.rules.factor_rule import Exchange

Axes = tuple[int, ...]
Layout = tuple[Axes, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ReshardStep:
    """One elementary collective.

    Attributes:
      kind: ``slice`` (free), ``all_gather``, ``all_to_all``, ``all_reduce``,
        ``reduce_scatter`` or ``collective_permute``.
      axes: the mesh axes that take part.
      fraction: the size of the collective, as `autopar.cost.collectives` defines it,
        divided by the bytes of the whole array.
      layout: the layout after the step.
    """

    kind: str
    axes: Axes
    fraction: float
    layout: Layout


def shards(layout: Layout, sizes: Sequence[int]) -> int:
    """Returns the number of different shards of an array with this layout."""
    return math.prod(sizes[a] for axes in layout for a in axes)


def axes_of(layout: Layout) -> frozenset[int]:
    """Returns the mesh axes that a layout uses."""
    return frozenset(a for axes in layout for a in axes)


def exchange_step(
    exchange: Exchange,
    axes: Axes,
    layout: Layout,
    sizes: Sequence[int],
    *,
    gathered: bool = False,
) -> tuple[ReshardStep, int]:
    """Returns a message between an operator's shards, as a collective.

    The function also returns how many such messages each device sends.

    Args:
      exchange: the exchange in the operator's rule.
      axes: the mesh axes that split the factor of the exchange.
      layout: layout of the array.
      sizes: size of each mesh axis.
      gathered: whether arrays of a ring are gathered, and summed by a reduce-scatter.
    """
    devices = math.prod(sizes[a] for a in axes)
    if gathered and exchange.around and devices > 1:
        kind = "reduce_scatter" if exchange.result else "all_gather"
        fraction = exchange.widened * devices / shards(layout, sizes)
        return ReshardStep(kind, axes, fraction, layout), 1
    fraction = exchange.part(devices) / shards(layout, sizes)
    step = ReshardStep("collective_permute", axes, fraction, layout)
    return step, exchange.messages(devices)


# Cache size: for a GPT of 2 layers on a 2x4x4 mesh, 455,000 calls have 72,000 different
# arguments. With half this cache size, 26,000 results would be computed again. An entry
# takes about 340 bytes, so a full cache takes 22 MB.
@functools.lru_cache(maxsize=1 << 16)
def reshard_steps(
    start: Layout, target: Layout, partial: Axes, reduction: str, sizes: tuple[int, ...]
) -> tuple[ReshardStep, ...]:
    """Returns the collectives that turn one layout into another.

    Args:
      start: the layout the array has.
      target: the layout it must get.
      partial: axes over which the array is partial: the sum or maximum over these axes
        is still to be computed.
      reduction: how partial results are combined; only a sum may use a reduce-scatter.
      sizes: size of each mesh axis.

    The steps come in this order. First the array is reduced over the partial axes. If
    the target has such an axis, and it can be appended to its dimension, a
    reduce-scatter is used. Second, slices are taken, which is free. Third, axes move
    between dimensions by all-to-all. Last, the remaining axes are gathered. If an axis
    in the middle of a dimension's axes is gathered, the axes behind it are gathered
    too. The reduction comes first because a program cannot state the layout of a
    partial value.
    """
    path = _LayoutPath(start, target, sizes)
    path.reduce(partial, scatter=reduction == "sum")
    while path.layout != target:
        if not (path.slice() or path.move() or path.gather()):
            raise AssertionError(f"no way from {start} to {target}")
    return tuple(path.steps)


class _LayoutPath:
    """The collectives chosen so far, and the layout after them."""

    def __init__(self, start: Layout, target: Layout, sizes: tuple[int, ...]) -> None:
        self.layout = start
        self.target = target
        self.sizes = sizes
        self.steps: list[ReshardStep] = []

    def add(self, kind: str, axes: Axes, charged: float, layout: Layout) -> None:
        self.layout = layout
        self.steps.append(ReshardStep(kind, axes, charged, layout))

    def fraction(self) -> float:
        return 1.0 / shards(self.layout, self.sizes)

    def replace(self, dim: int, axes: Axes) -> Layout:
        return (*self.layout[:dim], axes, *self.layout[dim + 1 :])

    def next_axis(self, dim: int) -> int | None:
        """The target's next axis on a dimension, if all axes before it are in place."""
        have, want = self.layout[dim], self.target[dim]
        if len(have) < len(want) and want[: len(have)] == have:
            return want[len(have)]
        return None

    def slice(self) -> bool:
        """Splits dimensions over axes that are not in use; costs no bytes."""
        before = self.layout
        layout, used = before, axes_of(before)
        for dim in range(len(before)):
            while (axis := self.next_axis(dim)) is not None and axis not in used:
                layout = self.replace(dim, (*self.layout[dim], axis))
                self.layout, used = layout, used | {axis}
        self.layout = before
        if layout == before:
            return False
        self.add("slice", tuple(axes_of(layout) - axes_of(before)), 0.0, layout)
        return True

    def reduce(self, partial: Axes, *, scatter: bool) -> None:
        """Sums over the partial axes; a reduce-scatter if the target splits a dimension
        over them.
        """
        left = list(partial)
        moved = scatter
        while moved:
            moved = False
            for dim in range(len(self.layout)):
                axis = self.next_axis(dim)
                if axis is not None and axis in left:
                    left.remove(axis)
                    after = self.replace(dim, (*self.layout[dim], axis))
                    self.add("reduce_scatter", (axis,), self.fraction(), after)
                    moved = True
        if left:
            self.add("all_reduce", tuple(sorted(left)), self.fraction(), self.layout)

    def move(self) -> bool:
        """Moves one axis from the end of a dimension to its place in the target."""
        for dim in range(len(self.layout)):
            axis = self.next_axis(dim)
            if axis is None:
                continue
            for other in range(len(self.layout)):
                have = self.layout[other]
                keep = _common(have, self.target[other])
                if other != dim and have and have[-1] == axis and len(have) > keep:
                    moved = list(self.layout)
                    moved[dim], moved[other] = (*self.layout[dim], axis), have[:-1]
                    self.add("all_to_all", (axis,), self.fraction(), tuple(moved))
                    return True
        return False

    def gather(self) -> bool:
        """Gathers axes that the target does not have on the dimension.

        The gather with the fewest bytes comes first.
        """
        best: tuple[float, int] | None = None
        for dim, have in enumerate(self.layout):
            keep = _common(have, self.target[dim])
            if len(have) > keep:
                grown = math.prod(self.sizes[a] for a in have[keep:])
                best = min(best or (math.inf, 0), (grown, dim))
        if best is None:
            return False
        dim = best[1]
        keep = _common(self.layout[dim], self.target[dim])
        after = self.replace(dim, self.layout[dim][:keep])
        charged = 1.0 / shards(after, self.sizes)
        self.add("all_gather", self.layout[dim][keep:], charged, after)
        return True


def _common(a: Axes, b: Axes) -> int:
    """Returns the length of the common prefix of two tuples."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


@functools.lru_cache(maxsize=1 << 9)
def assignments(
    factors: tuple[int, ...], sizes: tuple[int, ...], *, orders: bool
) -> tuple[Layout, ...]:
    """Returns every way to assign mesh axes to factors; the replicated layout comes
    first.

    Args:
      factors: size of each factor; an axis can split a factor only evenly.
      sizes: size of each mesh axis.
      orders: whether the axes on one factor may have any order; otherwise they have the
        order of the mesh.
    """
    out: list[Layout] = []
    options = range(-1, len(factors))
    for choice in itertools.product(options, repeat=len(sizes)):
        groups = [
            tuple(a for a, f in enumerate(choice) if f == k)
            for k in range(len(factors))
        ]
        even = all(
            size % math.prod(sizes[a] for a in g) == 0
            for size, g in zip(factors, groups, strict=True)
        )
        if not even:
            continue
        if orders:
            out.extend(itertools.product(*(itertools.permutations(g) for g in groups)))
        else:
            out.append(tuple(groups))
    return tuple(out)


def to_spec(layout: Layout, names: Sequence[str]) -> Spec:
    """Replaces positions of mesh axes by their names."""
    return tuple(tuple(names[a] for a in axes) for axes in layout)


def from_spec(spec: Spec, names: Sequence[str]) -> Layout:
    """Replaces names of mesh axes by their positions."""
    number = {name: a for a, name in enumerate(names)}
    return tuple(tuple(number[n] for n in axes) for axes in spec)
