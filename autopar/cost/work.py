"""The arithmetic and memory traffic of operators, after fusion."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from autopar.cost.combining import ALONE, SUMS
from autopar.cost.compute import work_s
from autopar.cost.overlap import Discounts, lowered
from autopar.cost.pricer import Pricer
from autopar.layouts.layout import Axes
from autopar.layouts.strategies import Space, Strategy, layout_of, partial_axes
from autopar.steps.analysis import Analysis
from autopar.steps.nodes import Node
from autopar.steps.sums import PartialRuns
from autopar_passes.graph.operators import Operator


def share_of(
    analysis: Analysis,
    pricer: Pricer,
    class_index: int,
    discounts: Discounts | None = None,
) -> float:
    """The part of a sum that each operator of a class pays.

    Sums that the compiler may take as one are charged a part of that one each. Where
    nothing waits for them and some have more time to hide, the parts differ.

    Args:
      analysis: the step.
      pricer: the mesh and cluster.
      class_index: of the operators.
      discounts: on sums that nothing waits for.
    """
    if not pricer.reassociates or class_index in pricer.alone:
        return 1.0
    known = analysis.shares
    final = class_index in analysis.independent.summing
    if final and discounts is not None and discounts.shares is not None:
        known = discounts.shares
    return known.get(class_index, 1.0)


def node_work_s(
    analysis: Analysis,
    node: Node,
    space: Space,
    pricer: Pricer,
    discounts: Discounts | None = None,
) -> np.ndarray:
    """Returns seconds of work of a node under each of its strategies.

    Work is divided by the axes given to an operator's factors: an axis that an
    operator does not use repeats its whole work on every device of that axis.

    Args:
      analysis: the step.
      node: the node.
      space: its strategies.
      pricer: the mesh and cluster.
      discounts: on work that covers communication, and on communication.
    """
    device = pricer.cluster.device
    works = analysis.works(streamed=device.streams)
    total = np.zeros(len(space.strategies))
    split = _split(space.strategies, pricer)
    for member, mapping in node.members.items():
        work = works.get(member)
        if work is None:
            continue
        op = work.op
        seconds = work_s(work, _parts(split, mapping), device)
        kernel_s = device.kernel_latency_s if work.kernel else 0.0
        factor = 1.0 if discounts is None else discounts.work[member]
        total += factor * analysis.trips[member] * (seconds + kernel_s)
        # That of a contraction is on the edge to its result.
        if node.kind != "contraction":
            own = analysis.sums[op.class_index]
            final = op.class_index in analysis.independent.summing
            together = SUMS if final else ALONE
            factor = discounts.sums[op.class_index] if discounts and final else 1.0
            summed_s = _reduction_s(op, node, space, pricer, own, together)
            part = share_of(analysis, pricer, op.class_index, discounts)
            summed_s = part * summed_s
            total += lowered(summed_s, factor)
            total += analysis.trips[member] * _inner_sums_s(
                analysis, op, node, space, pricer
            )
    return total


def _split(
    strategies: Sequence[Strategy], pricer: Pricer, without: Axes = ()
) -> np.ndarray:
    """Into how many parts each strategy splits each factor of a node.

    Args:
      strategies: of the node.
      pricer: the mesh.
      without: axes that split nothing.

    Returns:
      float64 ``[strategies, factors]``.
    """
    rows = [
        [pricer.group(tuple(a for a in axes if a not in without)) for axes in s]
        for s in strategies
    ]
    return np.array(rows, dtype=float).reshape(len(strategies), -1)


def _parts(split: np.ndarray, mapping: Sequence[int]) -> np.ndarray:
    """`_split`, of the factors of a member's rule."""
    parts = np.ones((len(split), len(mapping)))
    for factor, own in enumerate(mapping):
        if own >= 0:
            parts[:, factor] = split[:, own]
    return parts


def partial_runs(analysis: Analysis, pricer: Pricer) -> PartialRuns:
    """`Analysis.partial_runs`, of operators that have a choice and take time."""
    works = analysis.works(streamed=pricer.cluster.device.streams)
    known = analysis.contraction.node_of
    return {
        (maker, member): trips
        for (maker, member), trips in analysis.partial_runs.items()
        if maker in known and member in works
    }


def partial_work_s(
    analysis: Analysis,
    member: int,
    strategies: Sequence[Strategy],
    partials: Sequence[Axes],
    pricer: Pricer,
) -> np.ndarray:
    """Seconds that an operator takes longer where it works on partial values, a run.

    `node_work_s` charges it as its node's strategy splits it. What is partial over some
    axes is not split by them: each device works on its own part of the sum, whole.

    Args:
      analysis: the step.
      member: the operator's class.
      strategies: of its node.
      partials: axes over which the values may be partial.
      pricer: the mesh and cluster.

    Returns:
      float64 ``[partials, strategies]``.
    """
    device = pricer.cluster.device
    work = analysis.works(streamed=device.streams)[member]
    mapping = analysis.contraction.node(work.op).members[member]

    @functools.cache
    def seconds(axes: Axes) -> np.ndarray:
        split = _split(strategies, pricer, axes)
        return work_s(work, _parts(split, mapping), device)

    return np.array([seconds(axes) - seconds(()) for axes in partials])


def _inner_sums_s(
    analysis: Analysis, op: Operator, node: Node, space: Space, pricer: Pricer
) -> np.ndarray:
    """Seconds of the all-reduces that an operator itself does, each time it runs."""
    total = np.zeros(len(space.strategies))
    for slot, factors in enumerate(node.summed(op)):
        if not factors:
            continue
        dims, nbytes = op.rule.results[slot], analysis.graph.values[op.outputs[slot]]
        for i, strategy in enumerate(space.strategies):
            layout = layout_of(strategy, node.dims(op, dims))
            axes = partial_axes(strategy, factors)
            total[i] += pricer.reshard_s(
                layout, layout, axes, "all", nbytes.nbytes, ALONE
            )
    return total


def _reduction_s(
    op: Operator,
    node: Node,
    space: Space,
    pricer: Pricer,
    sums: Sequence[tuple[int, float]],
    together: frozenset[str],
) -> np.ndarray:
    """Seconds of the all-reduces of a small reduction that follows its operand.

    Args:
      op: the reduction.
      node: the node that it follows.
      space: the node's strategies.
      pricer: the mesh and cluster.
      sums: bytes of the sums over devices, and how often each is taken.
      together: kinds of collectives that may share a message.
    """
    total = np.zeros(len(space.strategies))
    reduced = node.reduced(op)
    if not reduced:
        return total
    for i, strategy in enumerate(space.strategies):
        partial = partial_axes(strategy, reduced)
        if not partial:
            continue
        for dims in op.rule.results:
            layout = layout_of(strategy, node.dims(op, dims))
            total[i] += sum(
                times
                * pricer.reshard_s(layout, layout, partial, "all", nbytes, together)
                for nbytes, times in sums
            )
    return total
