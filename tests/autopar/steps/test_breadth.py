"""Tests the breadth-first order of operators on small programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from planner_steps import mlp_batch, mlp_loss, mlp_params, training

from autopar.steps.analysis import Analysis, analyse
from autopar.steps.fusion import is_elementwise
from autopar.steps.lifetimes import breadth_first, region_ends
from autopar_passes.graph.operators import Operator, producers


def _scanned(params: Any, batch: Any) -> jax.Array:
    def body(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ p["up"]) @ p["down"], None

    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *params)
    y, _ = jax.lax.scan(body, batch["x"], stacked)
    return jnp.mean((y - batch["y"]) ** 2)


def _recomputed(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for p in params:
        x = jax.checkpoint(lambda p, x: x + jnp.tanh(x @ p["up"]) @ p["down"])(p, x)
    return jnp.mean((x - batch["y"]) ** 2)


LOSSES = {"plain": mlp_loss, "scan": _scanned, "remat": _recomputed}


def analysed(loss: Any) -> Analysis:
    params = mlp_params(width=8, hidden=16, layers=3)
    return analyse(*training(loss, params, mlp_batch(8, 8), optax.sgd(1e-2)))


def _outermost(operators: tuple[Operator, ...]) -> list[int]:
    """The first operator of the outermost region of each operator, or the operator
    itself.
    """
    out: list[int] = []
    first = until = -1
    for op in operators:
        if op.index > until:
            first = op.index
        until = max(until, op.until)
        out.append(first)
    return out


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_operators_run_once_and_behind_what_they_read(name: str) -> None:
    graph = analysed(LOSSES[name]).graph
    times = breadth_first(graph, analysed(LOSSES[name]).fusion.buffers)
    makers = producers(graph.operators)

    assert sorted(times) == list(range(len(graph.operators)))
    for op in graph.operators:
        for value in op.inputs:
            # A loop's carry reads what the loop makes last.
            if value is not None and op.kind != "carry":
                assert times[makers[value].index] < times[op.index]


@pytest.mark.parametrize("name", ["plain", "scan"])
def test_operators_run_by_the_longest_way_to_them(name: str) -> None:
    """Counted in kernels, from each operator back to the inputs."""
    analysis = analysed(LOSSES[name])
    graph, written = analysis.graph, analysis.fusion.buffers
    makers, outer = producers(graph.operators), _outermost(graph.operators)
    blocks: dict[int, list[Operator]] = {}
    for op in graph.operators:
        blocks.setdefault(outer[op.index], []).append(op)
    known: dict[int, int] = {}

    def depth(first: int) -> int:
        if first not in known:
            block = blocks[first]
            read = [v for op in block for v in op.inputs if v is not None]
            before = {outer[makers[v].index] for v in read} - {first}
            fused = is_elementwise(block[0]) and written.isdisjoint(block[0].outputs)
            free = len(block) == 1 and (fused or block[0].kind == "input")
            most = max((depth(b) for b in before), default=0)
            known[first] = most if free else most + 1
        return known[first]

    times = breadth_first(graph, written)
    running = sorted(graph.operators, key=lambda op: times[op.index])
    depths = [depth(outer[op.index]) for op in running if op.kind != "return"]
    assert depths == sorted(depths)


def test_a_loop_runs_in_one_piece() -> None:
    analysis = analysed(_scanned)
    graph = analysis.graph
    times = breadth_first(graph, analysis.fusion.buffers)
    ends = region_ends(graph, times)
    outer = _outermost(graph.operators)

    loops = {op.index for op in graph.operators if op.until > op.index} & set(outer)
    assert loops
    for first in loops:
        within = [times[k] for k, start in enumerate(outer) if start == first]
        assert max(within) - min(within) == len(within) - 1
        assert ends[first] == max(within)
    assert all(
        e == -1 for e, op in zip(ends, graph.operators, strict=True) if op.until < 0
    )


def test_what_enters_a_barrier_runs_before_all_that_leaves_it() -> None:
    analysis = analysed(_recomputed)
    graph = analysis.graph
    times = breadth_first(graph, analysis.fusion.buffers)
    makers = producers(graph.operators)
    barriers: dict[int, list[Operator]] = {}
    for op in graph.operators:
        if op.kind == "optimization_barrier":
            barriers.setdefault(op.equation, []).append(op)

    assert barriers
    for together in barriers.values():
        inputs = [v for op in together for v in op.inputs if v is not None]
        made = max(times[makers[v].index] for v in inputs)
        assert all(times[op.index] > made for op in together)
