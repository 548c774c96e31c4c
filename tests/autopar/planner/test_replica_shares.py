"""Tests shares of replicas against all other shares."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from remat_cases import blocks, descent, drawn, mlp

import autopar
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, PlanError
from autopar.planner.replicas import best_shares, sites_of

MIXED = "1x2:cpu+1x2:cpu,efficiency=0.1"


@pytest.mark.parametrize("replicas", [2, 3])
def test_few_prices_find_the_best_shares(replicas: int) -> None:
    draw = np.random.default_rng(replicas)
    for _ in range(150):
        count = int(draw.integers(replicas, 9))
        # Some take no more for a microbatch more, and some many times as much.
        steps = draw.integers(0, 4, (replicas, count)) ** draw.integers(0, 3)
        rows = np.cumsum(steps, axis=1)

        def price(k: int, n: int, rows: Any = rows) -> float:
            return float(rows[k, n - 1])

        found = best_shares(price, replicas, count)

        every = itertools.product(range(1, count + 1), repeat=replicas)
        least = min(end_s(rows, c) for c in every if sum(c) == count)
        assert sum(found) == count
        assert end_s(rows, found) == least


def end_s(rows: Any, counts: Any) -> float:
    """The time at which the last replica ends."""
    return max(row[n - 1] for row, n in zip(rows, counts, strict=True))


def step(w: Any, batch: Any) -> Any:
    def loss_of(w: Any) -> Any:
        return jnp.mean((jnp.tanh(batch @ w) @ w.T - 1.0) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(w)
    return w - 0.1 * grad, loss


def shapes(rows: int = 6144) -> tuple[Any, ...]:
    return (
        jax.ShapeDtypeStruct((256, 256), jnp.float32),
        jax.ShapeDtypeStruct((rows, 256), jnp.float32),
    )


def seconds(microbatches: Any, rows: int = 6144) -> float:
    plan = autopar.plan(step, *shapes(rows), cluster=MIXED, microbatches=microbatches)
    return plan.predicted.step_s


def test_no_other_shares_are_predicted_to_be_faster() -> None:
    plan = autopar.plan(step, *shapes(), cluster=MIXED, microbatches=6)
    shares = tuple(r.microbatches for r in plan.replicas)

    assert shares[0] > shares[1]
    every = {n: seconds([n, 6 - n]) for n in range(1, 6)}
    assert plan.predicted.step_s == pytest.approx(min(every.values()))
    assert every[shares[0]] == pytest.approx(min(every.values()))
    assert plan.predicted.step_s == max(r.step_s for r in plan.replicas)


def test_auto_is_never_worse_than_even_shares() -> None:
    best = autopar.plan(step, *shapes(), cluster=MIXED)

    assert best.predicted.step_s < min(seconds([n, n]) for n in (1, 2, 3))
    assert best.microbatches == sum(r.microbatches for r in best.replicas)


def test_equal_groups_get_equal_shares() -> None:
    plan = autopar.plan(step, *shapes(), cluster="1x2:cpu+1x2:cpu", microbatches=4)
    assert [r.microbatches for r in plan.replicas] == [2, 2]


def test_stages_are_compared_with_replicas() -> None:
    plan = autopar.plan(step, *shapes(), cluster=MIXED, stages="auto", microbatches=6)
    assert plan.predicted.step_s <= seconds(6)


@pytest.mark.parametrize(
    ("text", "each"),
    [
        ("1x4:cpu+1x4:cpu", [4, 4]),
        ("4x8:h100+2x8:a100", [16, 16, 16]),
        ("8:h100+4:a100", [4, 4, 4]),
        ("3x8:h100+2x8:a100", [8] * 5),
        ("2x8:h100+1x4:a100", [4] * 5),
        ("2x2x4:h100+1x2x4:a100", [8] * 3),
        ("1x3:h100+1x2:a100", [1] * 5),
    ],
)
def test_groups_are_cut_into_replicas_of_one_shape(text: str, each: list[int]) -> None:
    sites = sites_of(Cluster.parse(text))

    assert [site.part.num_devices for site in sites] == each
    ids = [i for site in sites for i in site.part.ids]
    assert ids == list(range(sum(each)))
    assert {site.whole.num_devices for site in sites} == {sum(each)}


def test_what_does_not_fit_is_an_error_with_a_way_out() -> None:
    text = "1x2:cpu,memory=100kB+1x2:cpu,memory=100kB"
    with pytest.raises(InfeasibleError):
        autopar.plan(step, *shapes(), cluster=text, microbatches=4)


def test_fewest_layers_compute_again_where_memory_is_short() -> None:
    layered = descent(mlp), (blocks(4), drawn(2048, 16, seed=5))

    def planned(memory: str, remat: Any) -> autopar.Plan:
        step, args = layered
        cluster = f"1x2:cpu{memory}+1x2:cpu{memory}"
        return autopar.plan(
            step, *args, cluster=cluster, microbatches=[1, 1], remat=remat
        )

    plain, least = (planned("", r).predicted.peak_memory_bytes for r in (0, "all"))
    short = f",memory={0.3e-3 * plain + 0.7e-3 * least:.0f}kB"
    with pytest.raises(InfeasibleError):
        planned(short, 0)
    found = {n: planned(short, n) for n in ("auto", "all", 3)}
    assert 0 < len(found["auto"].remat.layers) < 4
    seconds = {n: plan.predicted.step_s for n, plan in found.items()}
    assert seconds["auto"] == min(seconds.values())
    assert not planned("", "auto").remat.layers


def test_a_batch_that_cannot_be_dealt_out_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot be split into microbatches"):
        autopar.plan(step, *shapes(37), cluster="1x2:cpu+1x2:cpu")
