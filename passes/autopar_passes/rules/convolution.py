"""Convolutions: what of their sharding rule may be used, and how grouped ones run.

XLA's partitioner (jaxlib 0.10.2, CPU) multiplies the result of a convolution
by the number of replicas when a window dimension is reduced over some but not
all mesh axes, and likewise any reduction of a grouped convolution; other
shardings of grouped ones abort the process (``convolution_handler.cc``,
"Check failed: new_input_batch_size"). So window dimensions stay whole, and a
grouped convolution runs shard by shard, in a `jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar_passes.layouts import Layout, partition_spec
from autopar_passes.rules.factor_rule import FactorKind, FactorRule

PRIMITIVE = "conv_general_dilated"


def whole_windows(rule: FactorRule, params: Mapping[str, Any]) -> FactorRule:
    """Returns the rule of a convolution with its window dimensions replicated."""
    numbers = params["dimension_numbers"]
    specs = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    arrays = (*rule.operands, *rule.results)
    windows = {
        factor
        for spec, dims in zip(specs, arrays, strict=True)
        for dim in spec[2:]
        for factor in dims[dim]
    }
    kinds = tuple(
        FactorKind.BLOCKED if f in windows else kind
        for f, kind in enumerate(rule.kinds)
    )
    reduction = rule.reduction if FactorKind.REDUCE in kinds else ""
    return dataclasses.replace(rule, kinds=kinds, reduction=reduction)


def is_grouped(params: Mapping[str, Any]) -> bool:
    """Whether a convolution works on several groups of features or examples."""
    return max(params["feature_group_count"], params["batch_group_count"]) > 1


def grouped(
    params: Mapping[str, Any],
    operands: Sequence[Any],
    layouts: Sequence[Layout],
    rule: FactorRule,
    mesh: Any,
) -> Any:
    """A grouped convolution shard by shard, the partial results summed outside.

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

    def shard(lhs: Any, rhs: Any) -> Any:
        return jax.lax.conv_general_dilated_p.bind(lhs, rhs, **local)[None]

    stacked = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(partition_spec(mesh, left), partition_spec(mesh, right)),
        out_specs=partition_spec(mesh, (summed, *result)),
        check_vma=False,
    )(*operands)
    zero = np.zeros((), stacked.dtype)
    return jax.lax.reduce(stacked, zero, jax.lax.add, (0,))


def _group_split(rule: FactorRule, result: Layout, sizes: Sequence[int]) -> int:
    """Into how many parts the groups are split.

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
