"""Decides how devices that split a sequence share keys and values, in tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import autopar
from autopar.planner import candidate

_SCHEMES = {"ring": "ring attention", "gather": "gathered keys and values"}


def force_keys(patch: pytest.MonkeyPatch, keys: str) -> None:
    """Lets all plans pass keys around a ring, or gather them."""

    def chosen(analysis: Any, *_: Any) -> frozenset[int]:
        kernels = [op for op in analysis.graph.operators if op.rule.exchanges]
        return frozenset(analysis.contraction.node(op).index for op in kernels)

    none = lambda *_: frozenset[int]()  # noqa: E731
    patch.setattr(candidate, "gathered_nodes", chosen if keys == "gather" else none)


def check_keys(plan: autopar.Plan, sent: Mapping[str, float], keys: str) -> None:
    """Checks what a plan says of keys and values against the bytes of its program.

    Args:
      plan: the plan.
      sent: bytes by kind of collective, as the compiler partitions the program.
      keys: how the plan should share keys and values.
    """
    said = [d.keys for stage in plan.stages for d in stage.attention]
    assert said
    assert set(said) == {keys}
    assert plan.worth is not None
    if "sequence parallel" in plan.worth.scheme:
        assert f"sequence parallel with {_SCHEMES[keys]}" in str(plan)
    assert sent["collective_permute" if keys == "ring" else "reduce_scatter"] > 0
