"""Rows that are sorted in blocks, against rows that are sorted together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expert_steps
import jax
import numpy as np
import pytest

from autopar_passes.graph.build import step_graph
from autopar_passes.program.equations import Program, evaluate, walk
from autopar_passes.program.row_blocks import sort_in_blocks
from autopar_passes.program.row_orders import RowOrders
from autopar_passes.program.trace import open_arguments, trace_call


def rewritten(
    step: Callable[..., Any], args: tuple[Any, ...], blocks: int
) -> tuple[Program, Program, RowOrders]:
    """The program of a step, the program in blocks, and the orders in it."""
    traced = trace_call(step, open_arguments(step, args))
    rules = {op.equation: op.rule for op in step_graph(traced).operators}
    made, orders = sort_in_blocks(traced.program, rules, blocks)
    return traced.program, made, orders


def kinds(program: Program) -> list[str]:
    return [eqn.primitive for eqn in walk(program.body)]


@pytest.mark.parametrize("blocks", [2, 8])
@pytest.mark.parametrize(
    ("again", "scanned"), [(False, False), (True, False), (True, True)]
)
@pytest.mark.parametrize("form", expert_steps.FORMS)
def test_blocks_leave_results_as_they_are(
    form: str, again: bool, scanned: bool, blocks: int
) -> None:
    step, *args = expert_steps.training(form, again=again, scanned=scanned)
    plain, made, orders = rewritten(step, tuple(args), blocks)

    assert not orders.refused
    assert "ragged_dot_general" not in kinds(made)
    assert "ragged_dot_in_blocks" in kinds(made)
    flat = jax.tree.leaves(args)
    for a, b in zip(evaluate(plain, *flat), evaluate(made, *flat), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
