"""Tests that programs without their checkpoints repeat no work, with equal results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from microbatch_cases import evaluated
from remat_cases import X, block, blocks, checkpointed, descent, mlp

from autopar_passes.program.trace import TracedStep, open_arguments, trace
from autopar_passes.remat.copies import (
    RematError,
    merge_repeats,
    trace_without_checkpoints,
)


def dropped(loss: Any, *args: Any) -> TracedStep:
    step = descent(loss)
    return trace_without_checkpoints(step, open_arguments(step, args))


def kinds(traced: TracedStep) -> list[str]:
    return [eqn.primitive for eqn in traced.program.body.equations]


def test_products_are_those_of_the_step_without_checkpoints() -> None:
    args = blocks(), X
    found, plain = dropped(checkpointed, *args), trace(descent(mlp), args)

    assert kinds(found).count("dot_general") == kinds(plain).count("dot_general")
    assert "optimization_barrier" not in kinds(found)
    arrays = jax.tree.leaves(args)
    for a, b in zip(
        evaluated(found.program, arrays), descent_leaves(args), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def descent_leaves(args: Any) -> list[Any]:
    return jax.tree.leaves(descent(checkpointed)(*args))


def scaled(w: Any, x: jax.Array) -> jax.Array:
    """A step in which each layer computes the same number."""
    return block(w, x) / jnp.sqrt(jnp.float32(len(w)))


def test_what_layers_have_in_common_does_not_hide_what_is_repeated() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jax.checkpoint(scaled)(w, x)
        return jnp.mean(x**2)

    found = dropped(loss, blocks(), X)

    assert kinds(found).count("dot_general") == 6 * len(blocks()) - 1


def test_a_step_without_checkpoints_stays() -> None:
    program = trace(descent(mlp), (blocks(), X)).program

    assert merge_repeats(program) == program


def test_a_checkpoint_in_a_loop_is_refused() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda c, w: (block(w, c), None))
        return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)

    stacked = jax.tree.map(lambda *w: jnp.stack(w), *blocks())

    with pytest.raises(RematError, match="within a loop"):
        dropped(loss, stacked, X)
