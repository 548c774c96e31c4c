"""Seconds of the operators of a node under each of its strategies, after fusion."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from autopar.cluster import Cluster
from autopar.cost.combining import ALONE, SUMS
from autopar.cost.compute import matrix_sides, work_s
from autopar.cost.pricer import Pricer
from autopar.cost.ragged import dense_product
from autopar.cost.traffic import exchanged_array
from autopar.layouts.layout import Axes, exchange_step
from autopar.layouts.strategies import Space, Strategy, layout_of, partial_axes
from autopar.steps.analysis import Analysis
from autopar.steps.nodes import Node
from autopar.steps.positions import SEGMENTS
from autopar.steps.sums import PartialRuns
from autopar_passes.graph.operators import Operator


def least_work_s(analysis: Analysis, cluster: Cluster) -> float:
    """Returns a lower bound of the seconds of work in a step, for every plan.

    Only matrix products count. All devices share each product equally, and compute it
    at their peak rate.
    """
    device, count = cluster.device, cluster.num_devices
    total_s = 0.0
    for member, work in analysis.works(streamed=device.streams).items():
        if not work.sides:
            continue
        flops, masked = np.array([work.op.flops]), np.zeros(1)
        if work.groups > 1:
            sides = matrix_sides(work.op.rule, np.ones((1, len(work.op.rule.sizes))))
            flops, _, masked = dense_product(work, device.kind, flops, sides)
        peak = max(device.peak(work.dtype), device.vector_peak)
        seconds = flops / peak + masked / device.memory_bandwidth_bytes_per_s
        total_s += analysis.trips[member] * float(seconds[0]) / count
    return total_s


def share_of(analysis: Analysis, pricer: Pricer, class_index: int) -> float:
    """The fraction of a sum over devices that is charged to each operator of a class.

    If the compiler may merge the all-reduces of several operators into one, each
    operator is charged a fraction of the merged all-reduce.

    Args:
      analysis: the step.
      pricer: the mesh and cluster.
      class_index: the class of the operators.
    """
    return analysis.shares.get(class_index, 1.0) if pricer.reassociates else 1.0


def node_seconds(
    analysis: Analysis,
    node: Node,
    space: Space,
    pricer: Pricer,
    *,
    packed: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns seconds of a node under each of its strategies.

    The work of an operator is divided among the devices of the mesh axes that split its
    factors. Devices along any other mesh axis repeat the same work.

    Args:
      analysis: the step.
      node: the node.
      space: the node's strategies.
      pricer: the mesh and cluster.
      packed: whether sums that no operator waits for are packed (`Pricer.packed`).

    Returns:
      Three float64 arrays. Seconds of work in each segment of both passes and in the
      update, ``[2 * SEGMENTS + 1, strategies]``. Seconds of sums that no operator waits
      for, by the segment of the backward pass that completes their operands,
      ``[SEGMENTS, strategies]``. All other seconds, ``[strategies]``.
    """
    device = pricer.cluster.device
    works = analysis.works(streamed=device.streams)
    places = analysis.positions
    count = len(space.strategies)
    covering, waited = np.zeros((2 * SEGMENTS + 1, count)), np.zeros(count)
    free = np.zeros((SEGMENTS, count))
    split = _split(space.strategies, pricer)
    of_sums = pricer.packed if packed else pricer
    for member, mapping in node.members.items():
        work = works.get(member)
        if work is None:
            continue
        op = work.op
        seconds = work_s(work, _parts(split, mapping), device)
        if op.rule.exchanges:
            exposed_s = kernel_wait_s(
                analysis, op, node, space.strategies, pricer, seconds
            )
            waited += analysis.trips[member] * exposed_s.min(axis=0)
        kernel_s = device.kernel_latency_s if work.kernel else 0.0
        seconds = analysis.trips[member] * (seconds + kernel_s)
        parts = places.work_parts[member]
        covering += np.outer(parts, seconds)
        waited += (1.0 - parts.sum()) * seconds
        # The sum over devices of a contraction's result is not charged to the
        # contraction's node. It is part of the cost of the edge from the contraction to
        # its result.
        if node.kind != "contraction":
            own = analysis.sums[op.class_index]
            final = op.class_index in analysis.independent.summing
            together = SUMS if final else ALONE
            judge = of_sums if final else pricer
            summed_s = _reduction_s(op, node, space, judge, own, together)
            summed_s = share_of(analysis, pricer, op.class_index) * summed_s
            if final:
                free += np.outer(places.sum_parts[op.class_index], summed_s)
            else:
                waited += summed_s
            waited += analysis.trips[member] * _inner_sums_s(
                analysis, op, node, space, pricer
            )
    return covering, free, waited


def _split(
    strategies: Sequence[Strategy], pricer: Pricer, without: Axes = ()
) -> np.ndarray:
    """Into how many parts each strategy splits each factor of a node.

    Args:
      strategies: the node's strategies.
      pricer: the mesh.
      without: mesh axes that are ignored.

    Returns:
      float64 ``[strategies, factors]``.
    """
    rows = [
        [pricer.group(tuple(a for a in axes if a not in without)) for axes in s]
        for s in strategies
    ]
    return np.array(rows, dtype=float).reshape(len(strategies), -1)


def _parts(split: np.ndarray, mapping: Sequence[int]) -> np.ndarray:
    """`_split` for the factors of one operator's rule, ``[strategies, factors]``."""
    parts = np.ones((len(split), len(mapping)))
    for factor, own in enumerate(mapping):
        if own >= 0:
            parts[:, factor] = split[:, own]
    return parts


def partial_runs(analysis: Analysis, pricer: Pricer) -> PartialRuns:
    """`Analysis.partial_runs` of operators that have strategies and take time."""
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
    """Extra seconds per run of an operator that computes with partial values.

    `node_seconds` divides the operator's work by all mesh axes of the node's strategy.
    Mesh axes over which a value is partial do not split the value: each device works on
    an unsharded summand.

    Args:
      analysis: the step.
      member: the operator's class.
      strategies: the strategies of the operator's node.
      partials: mesh axes over which the values may be partial.
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


def kernel_wait_s(
    analysis: Analysis,
    op: Operator,
    node: Node,
    strategies: Sequence[Strategy],
    pricer: Pricer,
    work_seconds: np.ndarray,
) -> np.ndarray:
    """Seconds per run that an operator waits for exchanges among its shards.

    Args:
      analysis: the step.
      op: the operator.
      node: the operator's node.
      strategies: the node's strategies.
      pricer: the mesh and cluster.
      work_seconds: ``[strategies]``, seconds of work of one run of the operator.

    Returns:
      float64 ``[2, strategies]``: arrays go around a ring; arrays are gathered.
    """
    total = np.zeros((2, len(strategies)))
    for gathered, i in np.ndindex(*total.shape):
        around_s = once_s = hidden_s = 0.0
        for exchange in op.rule.exchanges:
            axes = strategies[i][node.members[op.class_index][exchange.factor]]
            if not axes:
                continue
            dims, value = exchanged_array(op, exchange)
            layout = layout_of(strategies[i], node.dims(op, dims))
            step, messages = exchange_step(
                exchange, axes, layout, pricer.sizes, gathered=bool(gathered)
            )
            nbytes = analysis.graph.values[value].nbytes
            seconds = messages * pricer.collective_s(step, nbytes)
            if exchange.around and not gathered:
                around_s += seconds
                hidden_s = beside_ring_s(float(work_seconds[i]), pricer, axes)
            else:
                once_s += seconds
        total[gathered, i] = once_s + max(0.0, around_s - hidden_s)
    return total


# Keys and values are gathered only if this saves at least this fraction of the seconds
# for which a kernel waits in a ring. A ring needs less memory.
_LEAST_SAVED = 1e-6


def gathered_nodes(
    analysis: Analysis, strategies: Sequence[Strategy], pricer: Pricer
) -> frozenset[int]:
    """Returns the nodes of attention kernels that gather keys and values.

    These kernels split the sequence, and wait for gathers for fewer seconds than for
    messages around a ring.

    Args:
      analysis: the step.
      strategies: the strategy of each node.
      pricer: the mesh and cluster.
    """
    device, found = pricer.cluster.device, set[int]()
    for member, work in analysis.works(streamed=device.streams).items():
        if not any(e.around for e in work.op.rule.exchanges):
            continue
        node = analysis.contraction.node(work.op)
        own = (strategies[node.index],)
        seconds = work_s(
            work, _parts(_split(own, pricer), node.members[member]), device
        )
        ring_s, gather_s = kernel_wait_s(analysis, work.op, node, own, pricer, seconds)[
            :, 0
        ]
        if gather_s < (1.0 - _LEAST_SAVED) * ring_s:
            found.add(node.index)
    return frozenset(found)


def beside_ring_s(work_seconds: float, pricer: Pricer, axes: Axes) -> float:
    """The most seconds of ring communication that one run of an operator can hide.

    On n devices the operator works in n rounds. The first round needs no message. The
    message of each later round is sent during the round before it.
    """
    turns = pricer.group(axes)
    share = pricer.cluster.device.corrections.overlap
    return share * work_seconds * (turns - 1) / turns


def _inner_sums_s(
    analysis: Analysis, op: Operator, node: Node, space: Space, pricer: Pricer
) -> np.ndarray:
    """Seconds per run of the all-reduces inside an operator, ``[strategies]``."""
    total = np.zeros(len(space.strategies))
    for slot, factors in enumerate(node.summed_factors(op)):
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
    """Seconds of the all-reduces of a small reduction, which has its operand's node.

    Args:
      op: the reduction.
      node: the node of the operand of the reduction.
      space: the node's strategies.
      pricer: the mesh and cluster.
      sums: the bytes and the number of runs in a step of each sum over devices.
      together: kinds of collectives that may share a message.
    """
    total = np.zeros(len(space.strategies))
    reduced = node.factors_reduced(op)
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
