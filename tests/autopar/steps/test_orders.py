"""Tests orders of dimensions that batched products need, and the copies for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import planner_harness as harness
import pytest

from autopar import Cluster
from autopar.cost.live import habits_of
from autopar.cost.pricer import Pricer
from autopar.planner.candidate import candidate_of
from autopar.planner.memory_terms import fixed_bytes, least_terms
from autopar.planner.problem import formulate
from autopar.steps.lifetimes import Habits
from autopar.steps.orders import copies_in_orders
from autopar_solver import explain_infeasibility, solve

BATCH, SEQ, GROUPS, HEADS, SIZE = 4, 8, 2, 3, 16
SCORES = BATCH * SEQ * SEQ * GROUPS * HEADS


def grouped(x: Any, k: Any, v: Any) -> jax.Array:
    """Attention in which three heads share their keys."""
    scores = jnp.einsum("bqkgd,bskd->bkgqs", x, k)
    weights = jax.nn.softmax(scores)
    return jnp.einsum("bkgqs,bskd->bqkgd", weights, v)


def plain(x: Any, k: Any, v: Any) -> jax.Array:
    """The first head of each group."""
    scores = jnp.einsum("bqkd,bskd->bkqs", x[:, :, :, 0], k)
    return jnp.einsum("bkqs,bskd->bqkd", jax.nn.softmax(scores), v)


def prepared(
    attention: Any,
    groups: int = GROUPS,
    heads: int = HEADS,
    seq: int = SEQ,
    dtype: Any = jnp.float32,
) -> Any:
    def step(params: Any, batch: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            x = jnp.einsum("bqd,dkge->bqkge", batch, p["x"])
            k, v = (jnp.einsum("bsd,dke->bske", batch, p[n]) for n in "kv")
            return jnp.mean(attention(*(y.astype(dtype) for y in (x, k, v))) ** 2)

        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), jnp.zeros(())

    params = {
        "x": jnp.ones((SIZE, groups, heads, SIZE)),
        "k": jnp.ones((SIZE, groups, SIZE)),
        "v": jnp.ones((SIZE, groups, SIZE)),
    }
    return harness.prepare(step, (params, jnp.ones((BATCH, seq, SIZE))))


def large(case: Any, values: Any, size: int = SCORES) -> list[int]:
    """The values that are as large as the scores of grouped attention."""
    return [v for v in values if case.graph.values[v].size == size]


def test_products_of_single_dimensions_read_what_lies_there() -> None:
    assert not copies_in_orders(prepared(plain).graph)


def test_groups_are_written_in_several_orders() -> None:
    """Weights and the gradient of the scores are each read in two orders."""
    case = prepared(grouped)
    found = copies_in_orders(case.graph)

    assert len(large(case, [value for value, _ in found])) == 2


@pytest.mark.parametrize(
    ("heads", "dtype", "held"),
    [(2, jnp.bfloat16, False), (3, jnp.bfloat16, True), (2, jnp.float32, True)],
)
def test_weights_are_made_again_where_tiles_transpose_them(
    heads: int, dtype: Any, held: bool
) -> None:
    """Where no tiles do, both orders are written in the forward pass."""
    case = prepared(grouped, heads=heads, seq=32, dtype=dtype)
    size = BATCH * 32 * 32 * GROUPS * heads
    life = case.analysis.life(Habits(makes_again=True, keeps_orders=True))
    without = case.analysis.life(Habits(makes_again=True))
    (value, reader), *_ = sorted(
        pair for pair in life.copies if large(case, [pair[0]], size)
    )
    maker = case.analysis.contraction.producer[value].index
    made = life.copies[value, reader]

    assert made == (life.time[maker] if held else life.time[reader])
    assert life.reads[maker] == made
    assert without.reads[maker] == without.time[maker]


def test_heads_that_all_share_their_keys_are_read_in_one_order() -> None:
    """The products have one dimension of batches then."""
    assert not copies_in_orders(prepared(grouped, groups=1, heads=6).graph)


def test_operators_without_results_fix_nothing() -> None:
    def told(x: Any, k: Any, v: Any) -> jax.Array:
        jax.debug.callback(lambda _: None, x)
        return plain(x, k, v)

    assert not copies_in_orders(prepared(told).graph)


def test_the_solver_counts_copies() -> None:
    analysis, cluster = prepared(grouped).analysis, Cluster.parse("2:h100")
    pricer = Pricer(cluster, cluster.default_mesh())
    formulation = formulate(analysis, pricer, memory_limit=1e12)
    problem, life = formulation.problem, analysis.life(habits_of(cluster.device))
    spans = {(term.node, term.start, term.end) for term in problem.memory}

    assert life.copies
    for (value, reader), start in life.copies.items():
        end = max(life.reads[reader], analysis.graph.operators[reader].until) + 1
        assert (analysis.contraction.homes[value].node, start, end) in spans

    # What every plan needs is a bound with them, too.
    least = least_terms(analysis, pricer, formulation.spaces)
    bound = explain_infeasibility(dataclasses.replace(problem, memory=least)).least_peak
    found = candidate_of(analysis, formulation, solve(problem, seconds=5))
    assert bound + fixed_bytes(analysis, pricer) <= found.peak_memory_bytes


@pytest.mark.parametrize("attention", [plain, grouped])
def test_other_compilers_write_no_more(attention: Any) -> None:
    life = prepared(attention).analysis.life()

    assert not life.copies
