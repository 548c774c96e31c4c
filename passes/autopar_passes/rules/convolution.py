"""Convolutions: the part of their sharding rule that a plan may use.

XLA's partitioner (jaxlib 0.10.2, CPU) multiplies the result of a convolution
by the number of replicas when a window dimension is reduced over some but not
all mesh axes, and likewise any reduction of a grouped convolution; other
shardings of grouped ones abort the process (``convolution_handler.cc``,
"Check failed: new_input_batch_size"). So window dimensions stay whole, and a
grouped convolution runs shard by shard
(`autopar_passes.replay.primitives`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

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
    """Returns whether a convolution works on several groups of features or examples."""
    return max(params["feature_group_count"], params["batch_group_count"]) > 1
