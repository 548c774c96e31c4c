"""Runs grouped convolutions shard by shard, where the compiler's partitioner fails."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from autopar_passes.layouts import Layout
from autopar_passes.rules.factor_rule import FactorRule
from autopar_passes.sums.stacked import stack_partials, sum_partials


def grouped_convolution(
    params: Mapping[str, Any],
    operands: Sequence[Any],
    layouts: Sequence[Layout],
    rule: FactorRule,
    mesh: Any,
) -> Any:
    """Runs a grouped convolution shard by shard and sums the partial results.

    Each shard's partial result is one slice of a leading dimension, split over
    the axes of the reduction; summing that dimension is the reduction.

    Args:
      params: parameters of the primitive.
      operands: left and right operand, in their layouts.
      layouts: of the left operand, the right one, and the result.
      rule: the rule of the convolution.
      mesh: the mesh of the layouts.
    """
    left, right, result = layouts
    kept = {a for axes in result for a in axes}
    summed = tuple(sorted({a for x in (left, right) for d in x for a in d} - kept))
    sizes = [mesh.shape[name] for name in mesh.axis_names]
    local = dict(params)
    split = _group_split(rule, result, sizes)
    for name in ("feature_group_count", "batch_group_count"):
        local[name] = max(1, params[name] // split)

    def run(*shards: Any) -> Any:
        return jax.lax.conv_general_dilated_p.bind(*shards, **local)

    stacked = stack_partials(run, operands, (left, right), result, summed, mesh)
    return sum_partials(stacked)


def _group_split(rule: FactorRule, result: Layout, sizes: Sequence[int]) -> int:
    """Returns the number of parts into which the groups are split.

    The groups are the one factor of both operands and the result. In a
    dimension they are the major factor, and a minor one is split only where
    they are split wholly.
    """
    common = frozenset.intersection(
        *(rule.factors_of(dims) for dims in (*rule.operands, *rule.results))
    )
    for factors, axes in zip(rule.results[0], result, strict=True):
        if factors and factors[0] in common:
            return min(rule.sizes[factors[0]], math.prod(sizes[a] for a in axes))
    return 1
