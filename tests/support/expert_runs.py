"""Planned steps of experts without a capacity, against `jax.jit`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar


def slow_devices(text: str) -> autopar.Cluster:
    """A cluster whose devices compute so slowly that all work is worth splitting."""
    cluster = autopar.Cluster.parse(text)
    rates = tuple(
        (dtype, 1e-3 * rate) for dtype, rate in cluster.device.peak_flops_per_s
    )
    device = dataclasses.replace(cluster.device, peak_flops_per_s=rates)
    return dataclasses.replace(cluster, device=device)


def after(step: Any, state: Any, x: Any, steps: int = 2) -> tuple[list[float], Any]:
    """Losses of some steps, and the state behind them."""
    state, found = jax.tree.map(jnp.copy, state), list[float]()
    for _ in range(steps):
        state, value = step(state, x)
        found.append(float(value))
    return found, state


def assert_equal(step: Any, given: Any, tolerance: float = 1e-5) -> None:
    """The step does what `jax.jit` does."""
    plain, state, x = given
    losses, left = after(jax.jit(plain), state, x)
    found, got = after(step, state, x)
    np.testing.assert_allclose(found, losses, rtol=tolerance)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(left), strict=True):
        bound = tolerance * np.abs(b).max()
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=bound)
