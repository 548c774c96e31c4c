"""Tests learning-rate rules and progress, in the wrapper of optimizers."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar.errors import PlanError
from autopar.goodput.choice import CodecError
from autopar.goodput.rates import progress, scale_updates, set_batch

BASE = 16
PARAMS = {"w": jnp.ones(3)}
GRADIENTS = {"w": jnp.asarray([0.5, -1.0, 2.0])}


def step_size(rule: Any, batch: int, phi: float | None, **options: Any) -> float:
    """The factor by which the first update is multiplied."""
    tx = scale_updates(optax.sgd(1.0), rule, base_batch=BASE, **options)
    state = set_batch(tx.init(PARAMS), batch=batch, phi=phi)
    updates, _ = tx.update(GRADIENTS, state, PARAMS)
    found = np.asarray(updates["w"]) / -np.asarray(GRADIENTS["w"])
    assert np.ptp(found) < 1e-6
    return float(found[0])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("none", 1.0),
        ("linear", 4.0),
        ("sqrt", 2.0),
        ("adascale", 4 * (48 + 16) / (48 + 64)),
        ("adascale-root", math.sqrt(4 * (48 + 16) / (48 + 64))),
        ("legw", 2.0),
    ],
)
def test_rules(rule: Any, expected: float) -> None:
    assert step_size(rule, 4 * BASE, 48.0) == pytest.approx(expected)
    assert step_size(rule, BASE, 48.0) == pytest.approx(1.0)


def test_adascale_between_its_ends() -> None:
    """Nothing is gained without noise, all where there is nothing else."""
    assert step_size("adascale", 4 * BASE, 0.0) == pytest.approx(1.0)
    assert step_size("adascale", 4 * BASE, math.inf) == pytest.approx(4.0)
    assert step_size("adascale", 4 * BASE, None) == pytest.approx(1.0)
    assert step_size("adascale", 4 * BASE, math.nan) == pytest.approx(1.0)


def test_errors_of_codecs_make_steps_shorter() -> None:
    tx = scale_updates(optax.sgd(1.0), "adascale", base_batch=BASE)
    error = CodecError(own=3.0, workers=4)
    state = set_batch(tx.init(PARAMS), batch=BASE, phi=48.0, error=error)

    assert float(state.gain) == pytest.approx((48 + 16) / (4 * 48 + 1.75 * 16))


def test_legw_warms_up_over_as_many_rows() -> None:
    tx = scale_updates(optax.sgd(1.0), "legw", base_batch=BASE, warmup_steps=5)
    state = set_batch(tx.init(PARAMS), batch=4 * BASE)
    found = []
    for _ in range(24):
        updates, state = tx.update(GRADIENTS, state, PARAMS)
        found.append(-float(updates["w"][0]) / 0.5)

    np.testing.assert_allclose(found[:20], 2 * np.arange(1, 21) / 20, rtol=1e-5)
    np.testing.assert_allclose(found[20:], 2.0, rtol=1e-6)


OPTIMIZERS = {
    "chain": lambda schedule: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule)
    ),
    "injected": lambda schedule: optax.inject_hyperparams(optax.sgd)(schedule),
    "masked": lambda schedule: optax.masked(
        optax.sgd(schedule, momentum=0.5), {"w": True}
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_schedules_follow_progress(name: str) -> None:
    """With four times the batch and no mean gradient, four times as fast."""
    schedule = optax.piecewise_constant_schedule(1.0, {8: 0.125})
    sizes = {}
    for batch in (BASE, 4 * BASE):
        tx = scale_updates(OPTIMIZERS[name](schedule), "none", base_batch=BASE)
        state = set_batch(tx.init(PARAMS), batch=batch, phi=math.inf)
        sizes[batch] = []
        for _ in range(16):
            updates, state = tx.update(GRADIENTS, state, PARAMS)
            sizes[batch].append(float(jnp.abs(updates["w"]).max()))
    small, large = np.array(sizes[BASE]), np.array(sizes[4 * BASE])

    assert small[8] < 0.5 * small[7]
    assert large[2] < 0.5 * large[1]
    assert small[7] > 0.5 * small[5]


def test_moments_of_adam_count_steps() -> None:
    tx = scale_updates(optax.adam(1e-3), "adascale-root", base_batch=BASE)
    state = set_batch(tx.init(PARAMS), batch=4 * BASE, phi=math.inf)
    for _ in range(3):
        _, state = tx.update(GRADIENTS, state, PARAMS)

    assert int(state.inner[0].count) == 3
    assert progress(state) == 3 * 4 * BASE


def test_progress_adds_up_gains_without_loss() -> None:
    """A million steps of a small gain: float32 alone would stop counting."""
    tx = scale_updates(optax.sgd(0.1), "none", base_batch=1)
    state = set_batch(tx.init(PARAMS), batch=1, phi=0.0)
    state = state._replace(progress=jnp.asarray(2.0**24, jnp.float32))

    def many(state: Any) -> Any:
        return jax.lax.fori_loop(
            0, 1000, lambda _, s: tx.update(GRADIENTS, s, PARAMS)[1], state
        )

    assert progress(jax.jit(many)(state)) == 2.0**24 + 1000


def test_the_state_may_lie_anywhere_in_a_train_state() -> None:
    tx = scale_updates(optax.sgd(0.1), "linear", base_batch=BASE)
    state = {"params": PARAMS, "tx": (tx.init(PARAMS), jnp.zeros(2))}
    after = set_batch(state, batch=32, phi=5.0)

    assert float(after["tx"][0].batch) == 32.0
    assert float(after["tx"][0].gain) == pytest.approx(2 * 21 / 37)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert progress(after) == 0.0


def test_what_is_wrong_is_said() -> None:
    tx = optax.sgd(0.1)
    with pytest.raises(PlanError, match="rule='fast'"):
        scale_updates(tx, "fast", base_batch=BASE)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="base_batch=0"):
        scale_updates(tx, "sqrt", base_batch=0)
    with pytest.raises(PlanError, match="warmup_steps"):
        scale_updates(tx, "legw", base_batch=1, warmup_steps=-1)
    with pytest.raises(PlanError, match="Wrap its optimizer"):
        set_batch(tx.init(PARAMS), batch=4)
    with pytest.raises(PlanError, match="progress"):
        progress(tx.init(PARAMS))
    state = scale_updates(tx, "sqrt", base_batch=BASE).init(PARAMS)
    with pytest.raises(PlanError, match="batch=0"):
        set_batch(state, batch=0)
    with pytest.raises(PlanError, match=r"phi=-2\.0"):
        set_batch(state, batch=4, phi=-2.0)
