"""Tests gradients that the step itself adds after their backward passes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from deferral_cases import PARTS, SPLIT, WIDTH, W, X, find, square, updated


class TestUnrolled:
    """Gradients that the step adds up itself, behind their backward passes."""

    @staticmethod
    def summed(params: Any, batch: Any, scale: float = 1.0) -> Any:
        total = jax.tree.map(jnp.zeros_like, params)
        for part in batch:
            grads = jax.grad(square)(params, part)
            total = jax.tree.map(lambda t, g: t + g * scale, total, grads)
        return total

    @pytest.mark.parametrize("scale", [1.0, 0.25])
    def test_micro_batches_meet(self, scale: float) -> None:
        def step(params: Any, batch: Any) -> Any:
            return updated(params, self.summed(params, batch, scale))

        found = find(step, {"w": W}, SPLIT)

        assert found.gradients() == [("add", (WIDTH, WIDTH))]
        assert found.makers(found.only) == ["dot_general"] * PARTS
        assert not found.only.hoisted

    def test_two_losses_meet(self) -> None:
        def step(params: Any, batch: Any) -> Any:
            one = jax.grad(square)(params, batch)
            other = jax.grad(lambda p, x: jnp.mean(jnp.cos(x @ p["w"])))(params, batch)
            return updated(params, jax.tree.map(jnp.add, one, other))

        assert len(find(step, {"w": W}, X).only.contributions) == 2

    def test_a_mean_of_the_sum_belongs_to_the_update(self) -> None:
        def step(params: Any, batch: Any) -> Any:
            total = self.summed(params, batch)
            return updated(params, jax.tree.map(lambda t: t / PARTS, total))

        assert find(step, {"w": W}, SPLIT).gradients() == [("add", (WIDTH, WIDTH))]

    def test_moments_and_parameters_are_none_of_it(self) -> None:
        def step(params: Any, trace: Any, batch: Any) -> Any:
            grads = jax.grad(square)(params, batch)
            trace = jax.tree.map(lambda t, g: 0.9 * t + 0.1 * g, trace, grads)
            return updated(params, trace), trace

        found = find(step, {"w": W}, {"w": W}, X)
        assert found.gradients() == [("transpose", (WIDTH, WIDTH))]

    def test_what_is_read_on_the_way_is_summed_there(self) -> None:
        def step(params: Any, batch: Any) -> Any:
            one = jax.grad(square)(params, batch[0])
            other = jax.grad(square)(params, batch[1])
            both = jax.tree.map(jnp.add, one, other)
            return updated(params, both), optax.tree.norm(one)

        kinds = [kind for kind, _ in find(step, {"w": W}, SPLIT).gradients()]
        assert kinds == ["transpose", "transpose"]

    def test_what_another_array_scales_is_none_of_it(self) -> None:
        """It may need the sum of another gradient first."""

        def step(params: Any, batch: Any) -> Any:
            one = jax.grad(square)(params, batch[0])
            scale = 1.0 / (1.0 + optax.tree.norm(one))
            other = jax.grad(square)(params, batch[1])
            both = jax.tree.map(lambda a, b: a + b * scale, one, other)
            return updated(params, both)

        assert len(find(step, {"w": W}, SPLIT).gradients()) == 2
