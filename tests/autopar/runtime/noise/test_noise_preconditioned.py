"""Tests noise in the metric of optimizers with second moments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import noise_cases as cases
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from noise_cases import ROWS

import autopar
from autopar.errors import PlanError
from autopar.runtime.noise.averages import NoiseOptions
from autopar.runtime.noise.meter import second_moments
from autopar.steps.analysis import analyse

PRECONDITIONED = NoiseOptions(preconditioned=True)


def step_of(tx: optax.GradientTransformation) -> Any:
    def step(state: Any, batch: Any) -> Any:
        w, opt = state
        loss, grads = jax.value_and_grad(cases.loss_of)(w, batch)
        updates, opt = tx.update(grads, opt, w)
        return (optax.apply_updates(w, updates), opt), loss

    return step


@pytest.mark.parametrize("split", [False, True])
def test_gradients_are_divided_by_the_roots_of_moments(split: bool) -> None:
    """The moments are those before the step, on whichever devices they lie."""
    tx = optax.adam(1e-3)
    options: dict[str, Any] = {"cluster": "8:cpu", "axis_names": ("data",)}
    specs = cases.SPLIT if split else cases.REPLICATED
    weights = {
        "batch": specs["batch"],
        "state/0/*": specs["w/*"],
        "state/1/0/nu/*": specs["w/*"],
    }
    run = autopar.parallelize(
        step_of(tx), noise_scale=PRECONDITIONED, pins=weights, seconds=None, **options
    )
    w = cases.state()
    opt = tx.init(w)
    draw = np.random.default_rng(3)
    nu = {
        k: jnp.asarray(np.maximum(draw.standard_normal(x.shape), 0), jnp.float32)
        for k, x in w.items()
    }
    opt = (opt[0]._replace(nu=nu), *opt[1:])
    scale = np.concatenate(
        [np.sqrt(np.asarray(nu[k], float)).ravel() for k in sorted(w)]
    )
    scale = np.where(scale > 0, scale + 1e-8, np.inf)
    run((w, opt), cases.batch())
    found = run.noise_scale
    wanted = cases.expected(cases.groups(ROWS, 8, 1), scale=scale)

    assert found.groups == 8
    # All norms are divided by `local`.
    assert found.local == pytest.approx(1.0, rel=1e-5)
    assert found.total == pytest.approx(wanted.total / wanted.local, rel=1e-4)


def row_noise(w: Any, nu: Any) -> float:
    """The noise scale of single rows, from the gradients of 4096 of them."""
    one = jax.grad(lambda w, row: cases.loss_of(w, row[None]))
    found = jax.vmap(one, in_axes=(None, 0))(w, cases.batch(4096, seed=99))
    rows = np.concatenate(
        [np.asarray(x, float).reshape(4096, -1) for x in jax.tree.leaves(found)], axis=1
    )
    root = np.concatenate([np.sqrt(np.asarray(x, float)).ravel() for x in nu.values()])
    rows /= root + 1e-8
    var = rows.var(0, ddof=1).sum()
    return var / (np.square(rows.mean(0)).sum() - var / 4096)


@pytest.mark.parametrize("devices", [1, 4])
def test_the_first_steps_of_an_optimizer_count_no_more_than_others(
    devices: int,
) -> None:
    """There moments are so small that some elements of a gradient are huge."""
    tx = optax.adam(1e-4)
    options = NoiseOptions(preconditioned=True, decay=0.99, base_batch=16)
    run = autopar.parallelize(
        step_of(tx),
        cluster=f"{devices}:cpu",
        axis_names=("data",),
        pins={"batch": PartitionSpec("data"), "state/*": PartitionSpec()},
        noise_scale=options,
        split_batch=False,
        seconds=None,
    )
    w = cases.state()
    state = (w, tx.init(w))
    for seed in range(60):
        state, _ = run(state, cases.batch(16, seed))
    found = run.noise_scale
    wanted = row_noise(state[0], state[1][0].nu)
    assert found.groups == devices
    assert found.steps == 59
    assert 0.5 * wanted < found.phi < 2.0 * wanted


def clipped(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


@pytest.mark.parametrize(
    ("tx", "field"),
    [
        (optax.adamw(1e-3), "nu"),
        (clipped(optax.nadam(1e-3)), "nu"),
        (optax.lamb(1e-3), "nu"),
        (optax.rmsprop(1e-3), "nu"),
        (optax.adagrad(1e-3), "sum_of_squares"),
        (optax.sgd(1e-3, momentum=0.9), ""),
        (optax.lion(1e-3), ""),
    ],
)
def test_moments_are_found_by_what_they_are(tx: Any, field: str) -> None:
    w = cases.state()
    analysis = analyse(step_of(tx), ((w, tx.init(w)), cases.batch(8)))
    gradients = [v for d in analysis.deferrals for v in d.gradients]
    found = second_moments(analysis, gradients)
    paths = sorted(analysis.graph.inputs[k].path for k in found.values())

    if not field:
        assert not paths
        return
    assert len(gradients) == 3
    assert [p.rpartition("/")[0].rpartition("/")[2] for p in paths] == [field] * 3
    assert [p.rpartition("/")[2] for p in paths] == ["bias", "down", "up"]


def test_an_optimizer_without_moments_is_refused() -> None:
    tx = optax.sgd(0.1)
    run = autopar.parallelize(
        step_of(tx), cluster="8:cpu", noise_scale=PRECONDITIONED, split_batch=False
    )
    with pytest.raises(PlanError, match=r"state/0/.*preconditioned= out"):
        run((cases.state(), tx.init(cases.state())), cases.batch(64))
