"""Ragged products (`jax.lax.ragged_dot`), and the copies that compilers make for them.

XLA's compilers for GPUs and CPUs write each row once for each group, with zeros outside
of its own group (`autopar.cost.ragged`). Several products of the same rows share these
masked rows. The masked rows therefore stay in memory from the first product to the
last, often from the forward to the backward pass (read from the buffers of programs
compiled for H100, jax 0.10.2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from autopar_passes.graph.operators import RAGGED_PRODUCTS, Operator, OperatorGraph
from autopar_passes.rules.factor_rule import FactorRule


@dataclasses.dataclass(frozen=True, slots=True)
class RaggedCopy:
    """A copy of an operand of a ragged product.

    Attributes:
      times: the bytes of the copy, divided by the bytes of the operand.
      start: the time at which the copy is written.
      end: the last time at which it is read.
    """

    times: int
    start: int
    end: int


def ragged_groups(op: Operator) -> int:
    """Returns the number of groups of a ragged product; 1 for other operators."""
    if op.kind not in RAGGED_PRODUCTS:
        return 1
    return math.prod(op.rule.sizes[f] for f in op.rule.operands[2][-1])


def sums_groups(rule: FactorRule) -> bool:
    """Whether a ragged product sums the rows of each group.

    The result then has the dimension of the groups, and not that of the rows.
    """
    return not rule.factors_of(rule.results[0]).isdisjoint(rule.operands[2][-1])


def ragged_copies(
    graph: OperatorGraph, time: Sequence[int]
) -> dict[tuple[int, int], list[RaggedCopy]]:
    """The copies of a compiler that masks the rows of ragged products.

    Rows are written once for each group. A product whose result has the rows reads
    them in another order of dimensions, so that they are written once more if another
    product reads them, too. The matrices are copied if their contracted dimension does
    not follow that of the groups, because the product contracts both.

    Args:
      graph: the operator graph.
      time: the time at which each operator runs.

    Returns:
      The operator that reads an operand first, and the operand's position -> copies.
    """
    out: dict[tuple[int, int], list[RaggedCopy]] = {}
    masked: dict[tuple[int | None, int], list[tuple[int, Operator, int]]] = {}
    for op in graph.operators:
        groups = ragged_groups(op)
        if groups == 1:
            continue
        now = time[op.index]
        summed = sums_groups(op.rule)
        for slot in (0, 1) if summed else (0,):
            masked.setdefault((op.inputs[slot], groups), []).append((now, op, slot))
        if not summed and not _contracts_behind_groups(op.rule):
            out.setdefault((op.index, 1), []).append(RaggedCopy(1, now, now))
    for (_, groups), readers in masked.items():
        times = [now for now, _, _ in readers]
        start, first, slot = min(readers, key=lambda r: (r[0], r[1].index))
        whole = RaggedCopy(groups, start, max(times))
        out.setdefault((first.index, slot), []).append(whole)
        for now, op, slot in readers if len(readers) > 1 else ():
            if not sums_groups(op.rule):
                again = RaggedCopy(groups, now, now)
                out.setdefault((op.index, slot), []).append(again)
    return out


def _contracts_behind_groups(rule: FactorRule) -> bool:
    """Whether the contracted dimensions of the matrices follow that of the groups."""
    left, right, sizes = rule.operands
    contracted = rule.factors_of(left) - rule.factors_of(rule.results[0])
    inner = rule.factors_of(sizes) | contracted
    inside = [not inner.isdisjoint(dim) for dim in right if dim]
    return inside == sorted(inside, reverse=True)
