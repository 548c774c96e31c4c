"""Tests sums of gradients that are transposed before the update reads them."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import noise_cases as cases
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar

SHAPE = (8, 16, 24)
ROWS = 4096  # so many that weights are gathered, not rows


@pytest.mark.parametrize("pins", [cases.REPLICATED, cases.SPLIT])
def test_parts_are_summed_as_they_are_made(pins: Any) -> None:
    """A device does not transpose its whole part to add it to those of others."""
    run = autopar.parallelize(
        cases.step, cluster="8:cpu", axis_names=("data",), pins=pins,
        noise_scale=True, seconds=None,
    )  # fmt: skip
    text = run.lower(cases.state(), cases.batch()).compile().as_text()
    sums = re.findall(r" (?:all-reduce|reduce-scatter)(?:-start)?\((.*?)\)", text)
    names = [n for s in sums for n in re.findall(r"%([\w.\-]+)", s)]
    matrix = rf"f32\[{cases.WIDTH},{cases.WIDTH}\]\S* (\w+)"
    makers = [re.search(rf"%{re.escape(n)} = {matrix}", text) for n in names]

    assert [m[1] for m in makers if m] == ["dot", "dot"]


@pytest.mark.parametrize("letters", ["kij", "jki", "ijk", "kji"])
def test_a_gradient_of_three_dims_is_turned_back(letters: str) -> None:
    """Whichever of its dims the product has in front, and where it lies."""
    size = dict(zip("kij", SHAPE, strict=True))
    shape = tuple(size[letter] for letter in letters)
    draw = np.random.default_rng(0)

    def loss_of(w: Any, batch: Any) -> Any:
        hidden = jnp.tanh(jnp.einsum(f"ni,{letters}->nkj", batch, w["a"]))
        return jnp.mean((hidden - 1.0) ** 2)

    def step(w: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(w, batch)
        return {"a": w["a"] - 0.1 * grads["a"]}, loss

    def weights() -> Any:
        return {"a": jnp.asarray(0.3 * draw.standard_normal(shape), jnp.float32)}

    batch = draw.standard_normal((ROWS, size["i"])).astype(np.float32)
    w = weights()
    plain, _ = jax.jit(step)(w, batch)
    run = autopar.parallelize(
        step, cluster="8:cpu", axis_names=("data",), noise_scale=True, seconds=None,
        pins={"batch": PartitionSpec("data"), "w/*": PartitionSpec("data")},
    )  # fmt: skip
    exact = jax.jit(jax.grad(loss_of))(w, batch)["a"]
    planned, _ = run(w, batch)

    assert run.noise_scale.groups == 8
    np.testing.assert_allclose(planned["a"], plain["a"], rtol=1e-5, atol=1e-6)
    wanted = float(np.square(np.asarray(exact, np.float64)).sum())
    assert run.noise_scale.total == pytest.approx(wanted, rel=1e-5)
