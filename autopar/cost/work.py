"""The arithmetic and memory traffic of operators, after fusion."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.cost.combining import ALONE, SUMS
from autopar.cost.compute import attained_flops_per_s
from autopar.cost.pricer import Pricer
from autopar.layouts.strategies import Space, layout_of, partial_axes
from autopar.steps.analysis import Analysis
from autopar.steps.nodes import Node
from autopar.steps.work import (
    BOUNDARY,
    MATRIX,
)
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.rules.factor_rule import FactorRule


def node_work_s(
    analysis: Analysis, node: Node, space: Space, pricer: Pricer
) -> np.ndarray:
    """Returns seconds of work of a node under each of its strategies.

    Work is divided by the axes given to an operator's factors: an axis that an
    operator does not use repeats its whole work on every device of that axis.
    """
    total = np.zeros(len(space.strategies))
    split = np.array(
        [[pricer.group(axes) for axes in s] for s in space.strategies], dtype=float
    ).reshape(len(space.strategies), -1)
    for member, mapping in node.members.items():
        op = analysis.graph.operators[member]
        if op.kind in BOUNDARY:
            continue
        # Column f: into how many parts each strategy splits factor f of the rule.
        parts = np.ones((len(total), len(mapping)))
        for factor, own in enumerate(mapping):
            if own >= 0:
                parts[:, factor] = split[:, own]
        seconds = operator_s(analysis.graph, op, parts, pricer, analysis.written)
        total += analysis.trips[member] * seconds
        # That of a contraction is on the edge to its result.
        if node.kind != "contraction":
            own = analysis.sums[op.class_index]
            final = op.class_index in analysis.independent.summing
            together = SUMS if final else ALONE
            total += _reduction_s(op, node, space, pricer, own, together)
    return total


def operator_s(
    graph: OperatorGraph,
    op: Operator,
    parts: np.ndarray,
    pricer: Pricer,
    written: set[int],
) -> np.ndarray:
    """Roofline seconds of one operator under each strategy.

    A kernel's fixed time is charged once for each result that is written.

    Args:
      graph: the operator graph.
      op: the operator.
      parts: ``[strategies, factors]``, into how many parts each factor is split.
      pricer: the mesh and cluster.
      written: the values that are written to memory.
    """
    shards = parts.prod(axis=1)
    device = pricer.cluster.device
    arrays = [v for v in (*op.inputs, *op.outputs) if v is not None and v in written]
    nbytes = sum(graph.values[v].nbytes for v in arrays)
    first = op.inputs[0] if op.inputs and op.inputs[0] is not None else None
    value = graph.values[first if first is not None else op.outputs[0]]
    rate = attained_flops_per_s(str(value.dtype), device, op.kind in MATRIX)
    work = np.maximum(
        op.flops / rate / shards, nbytes / device.memory_bandwidth_bytes_per_s / shards
    )
    if op.kind not in MATRIX:
        work = work * (CPU_ELEMENTWISE if device.kind == "cpu" else 1.0)
    else:
        sides = matrix_sides(op.rule, parts)
        work = work / matrix_efficiency(sides, device.kind)
        if device.kind == "cpu" and op.kind == "conv_general_dilated":
            bandwidth = device.memory_bandwidth_bytes_per_s
            patches = 2.0 * sides[:, 0] * sides[:, 2] * value.nbytes / value.size
            work = work + PATCH_PASSES * patches / bandwidth
    kernels = any(v in written for v in op.outputs)
    return work + (device.kernel_latency_s if kernels else 0.0)


# A matrix product with one side of this length runs at half its rate: what is left
# of a tile or a vector is wasted. 8 is the width of a vector register of 32-bit
# numbers (AVX2); 16 and 32 are a quarter of the tiles that GPU libraries prefer (64)
# and of a TPU's matrix unit (128). Assumptions, none of them fitted.
HALF_RATE_SIDE = {"cpu": 8.0, "gpu": 16.0, "tpu": 32.0}
# XLA's CPU code for element-wise operators and reductions takes longer than one
# pass over memory. Chosen by hand: least squares over measured steps gave about 3,
# but then the fastest plans of some examples were predicted worse
# (docs/cost-model.md).
CPU_ELEMENTWISE = 2.0
# XLA's CPU convolutions are products over unfolded patches (Eigen), which are
# written and read once, mostly in cache: half a pass over memory each way.
PATCH_PASSES = 0.5


def matrix_sides(rule: FactorRule, parts: np.ndarray) -> np.ndarray:
    """Returns the sides M, N, K of a product on one shard, ``[strategies, 3]``.

    M is only in the left operand and the result, N only in the right one and the
    result, K is reduced.
    """
    left, right = (rule.factors_of(dims) for dims in rule.operands[:2])
    result = rule.factors_of(rule.results[0])
    sides = ((left - right) & result, (right - left) & result, (left & right) - result)
    columns: list[np.ndarray] = []
    for side in sides:
        factors = sorted(side)
        whole = float(np.prod([rule.sizes[f] for f in factors]))
        columns.append(whole / parts[:, factors].prod(axis=1))
    return np.stack(columns, axis=1)


def matrix_efficiency(sides: np.ndarray, kind: str) -> np.ndarray:
    """Part of the attained rate that a product with these sides reaches.

    The product over the sides of ``side / (side + h)``, h from `HALF_RATE_SIDE`.

    >>> float(matrix_efficiency(np.array([[8.0, 24.0, 8.0]]), "cpu")[0])
    0.1875
    """
    half = HALF_RATE_SIDE[kind]
    return (sides / (sides + half)).prod(axis=1)


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
