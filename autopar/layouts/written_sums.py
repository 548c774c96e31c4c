"""The sums that a planned program writes down collective by collective."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from autopar.layouts.layout import Axes, Layout, ReshardStep
from autopar_passes.sums.finish import Sum


def written_sums(
    start: Layout, steps: Sequence[ReshardStep], kept: Layout | None = None
) -> tuple[Sum, ...]:
    """The sums of a way that have to be stated; empty: a compiler finds them.

    XLA finds a sum over one axis. One over several it cuts into others than the plan's,
    on some platforms (`autopar_passes.sums.finish`).

    Args:
      start: the layout before the steps.
      steps: from `reshard_steps`.
      kept: the layout of the slices that alone are read of what the last step leaves
        (`kept_slices`); None: more is read.
    """
    out: list[Sum] = []
    layout = start
    for step in steps:
        if step.kind == "reduce_scatter":
            out += _scatters(layout, step.layout)
        elif step.kind == "all_reduce":
            split = [] if kept is None else _scatters(layout, kept)
            left = set(step.axes).difference(*(s.axes for s in split))
            out += split
            if left:
                layout = kept or step.layout
                out.append(Sum(tuple(sorted(left)), None, layout))
        layout = step.layout
    return tuple(out) if sum(len(s.axes) for s in out) > 1 else ()


def _scatters(before: Layout, after: Layout) -> list[Sum]:
    """A reduce-scatter for each axis by which a dimension is split further."""
    out: list[Sum] = []
    layout = before
    for dim, (have, want) in enumerate(zip(before, after, strict=True)):
        for end in range(len(have), len(want)):
            layout = (*layout[:dim], want[: end + 1], *layout[dim + 1 :])
            out.append(Sum((want[end],), dim, layout))
    return out


def kept_slices(
    ways: Collection[tuple[Sequence[ReshardStep], bool]], axes: Axes
) -> Layout | None:
    """The layout of the slice of an array that all its readers begin with.

    Args:
      ways: how the array is brought to its readers (`Assignment.fetch_steps`).
      axes: the mesh axes that the slice may go over.

    Returns:
      None: some reader takes the array as it is, or in another slice.
    """
    layout: Layout | None = None
    if not ways or any(fresh for _, fresh in ways):
        return None
    for k in itertools.count():
        following = {steps[k] if k < len(steps) else None for steps, _ in ways}
        step = following.pop()
        if following or step is None or step.kind != "slice":
            return layout
        if not set(axes).issuperset(step.axes):
            return layout
        layout = step.layout
    return None
