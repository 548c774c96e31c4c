"""Tests the state of the noise scale: it is kept, saved, moved, and stays finite."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import noise_cases as cases
import numpy as np
import pytest
from noise_cases import REPLICATED

import autopar
from autopar.errors import PlanError
from autopar.runtime.noise.averages import (
    Groups,
    NoiseOptions,
    fresh,
    noise_scale,
    update_averages,
)

DATA: dict[str, Any] = {"axis_names": ("data",), "pins": REPLICATED}
ALONE: dict[str, Any] = {"cluster": "1:cpu"}


def trained(run: Any, w: Any, seeds: Any) -> Any:
    for seed in seeds:
        w, _ = run(w, cases.batch(seed=seed))
    return w


def test_saved_averages_go_on_where_they_were() -> None:
    whole = cases.parallel(**DATA)
    trained(whole, cases.state(), range(4))
    first = cases.parallel(**DATA)
    w = trained(first, cases.state(), range(2))
    saved = jax.tree.map(np.asarray, first.noise_state)
    then = cases.parallel(**DATA)
    then.noise_state = saved
    trained(then, jax.tree.map(np.asarray, w), range(2, 4))

    assert then.noise_scale.steps == 4
    assert then.noise_scale.phi == pytest.approx(whole.noise_scale.phi, rel=1e-5)


def test_a_replan_keeps_the_averages() -> None:
    run = cases.parallel(**DATA)
    w = trained(run, cases.state(), range(2))
    before = run.noise_scale
    w = run.replan("4:cpu", w)
    assert run.noise_scale.phi == before.phi
    trained(run, w, range(2, 3))

    assert run.noise_scale.groups == 4
    assert run.noise_scale.steps == 3


def test_a_new_state_starts_anew() -> None:
    run = cases.parallel(**DATA)
    trained(run, cases.state(), range(2))
    w = run.init(cases.state)
    with pytest.raises(PlanError, match="no step has measured"):
        _ = run.noise_scale
    trained(run, w, range(1))

    assert run.noise_scale.steps == 1


def test_steps_that_are_not_finite_are_skipped() -> None:
    run = cases.parallel(**DATA)
    w = trained(run, cases.state(), range(2))
    before = run.noise_scale
    spoilt = cases.batch()
    spoilt[3, 5] = np.nan
    run(w, spoilt)
    after = run.noise_scale

    assert (after.steps, after.skipped) == (2, 1)
    assert (after.sqr, after.var) == (before.sqr, before.var)


def test_one_group_is_compared_with_the_step_before() -> None:
    """The first step has nothing to compare with; what follows is marked."""
    run = cases.parallel(**ALONE)
    w, _ = run(cases.state(), cases.batch(seed=0))
    assert np.isnan(run.noise_scale.phi)
    gradients = [_gradient(cases.state(), 0), _gradient(w, 1)]
    run(w, cases.batch(seed=1))
    found = run.noise_scale

    assert (found.biased, found.groups, found.steps) == (True, 1, 1)
    both = np.stack(gradients)
    assert found.local == pytest.approx(np.square(both).sum(1).mean(), rel=1e-4)
    assert found.total == pytest.approx(np.square(both.mean(0)).sum(), rel=1e-4)


def _gradient(w: Any, seed: int) -> np.ndarray:
    found = jax.grad(cases.loss_of)(jax.tree.map(np.asarray, w), cases.batch(seed=seed))
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(found)])


def test_codecs_are_measured_one_step_in_so_many() -> None:
    options = NoiseOptions(every=2)
    run = cases.parallel(**DATA, compression="int8")
    sparse = cases.parallel(**DATA, compression="int8", noise_scale=options)
    trained(run, cases.state(), range(3))
    trained(sparse, cases.state(), range(3))

    assert run.noise_scale.steps == 1
    assert sparse.noise_scale.steps == 2


def test_with_codecs_the_first_steps_are_measured_more_often() -> None:
    run = cases.parallel(**DATA, compression="int8")
    state, counts = cases.state(), list[int]()
    for seed in range(66):
        state = trained(run, state, [seed])
        counts.append(run.noise_scale.steps)
    new = [k for k, n in enumerate(counts) if n != (counts[k - 1] if k else 0)]
    assert new == [0, 4, 8, 12, 16, 20, 24, 28, 32, 64]


def test_averages_forget_by_rows_and_are_corrected() -> None:
    """A batch four times as large forgets like four steps with the base batch."""
    norms = [jnp.asarray([[2.0, 1.0, 1.5]]), jnp.asarray([[4.0, 3.0, 3.0]])]
    groups = Groups((4,), 64)
    state = {**fresh(16.0)}
    for found in norms:
        state = update_averages(state, found, groups, 0.9, jnp.bool_(True))
    keep = 0.9**4
    weights = np.array([keep, 1.0])
    local, total = 4 * np.array([2.0, 4.0]), np.array([1.0, 3.0])
    sqr, var = (4 * total - local) / 3, (local - total) * 64 / 3
    found = noise_scale(state, groups)

    assert found.sqr == pytest.approx(max(0, (weights * sqr).sum() / weights.sum()))
    assert found.var == pytest.approx((weights * var).sum() / weights.sum())
    assert found.excess == pytest.approx(0.5 * keep / weights.sum())


@pytest.mark.parametrize("given", [0, 1, "yes", None])
def test_what_is_no_way_to_measure_is_refused(given: Any) -> None:
    with pytest.raises(PlanError, match="noise_scale="):
        autopar.parallelize(cases.step, noise_scale=given)


@pytest.mark.parametrize(
    "options", [{"decay": 1.0}, {"every": 0}, {"base_batch": -4}, {"base_batch": True}]
)
def test_options_are_checked(options: Any) -> None:
    with pytest.raises(PlanError, match=next(iter(options))):
        NoiseOptions(**options)


def test_nothing_measured_is_said() -> None:
    step = autopar.parallelize(cases.step)
    with pytest.raises(PlanError, match="noise_scale=True"):
        _ = step.noise_scale
    with pytest.raises(PlanError, match="noise_state"):
        step.noise_state = {"phi": 3.0}


def test_a_step_without_gradients_is_refused() -> None:
    def mean(w: Any, batch: Any) -> Any:
        return w + batch.mean(), w.sum()

    run = autopar.parallelize(
        mean, cluster="8:cpu", noise_scale=True, split_batch=False
    )
    with pytest.raises(PlanError, match="no gradients of its parameters"):
        run(jnp.zeros(8), cases.batch())
