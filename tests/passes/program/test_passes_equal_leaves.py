"""Tests that steps with hundreds of small arrays run on stacks of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar_passes.program.equal_leaves import LEAST, stacked_leaves
from autopar_passes.program.equations import Program, evaluate
from autopar_passes.program.flatten import flatten

# Some arrays are read otherwise than all others.
COUNT = LEAST + 4
Leaf = dict[str, jax.Array]


def leaves(count: int) -> list[Leaf]:
    """Small layers with different values: matrices, vectors and scalars."""
    draw = np.random.default_rng(0).normal
    return [
        {
            "w": jnp.asarray(draw(size=(3, 3)) * 0.5, jnp.float32),
            "b": jnp.asarray(draw(size=3), jnp.float32),
            "s": jnp.asarray(draw(), jnp.float32),
        }
        for _ in range(count)
    ]


def layer(leaf: Leaf, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ leaf["w"] + leaf["b"]) * leaf["s"]


def beside(model: list[Leaf], x: jax.Array) -> jax.Array:
    """A step in which all layers read the input; the first layer is read twice."""
    first = jnp.sum(model[0]["b"])
    return sum((jnp.mean((layer(leaf, x) - 1) ** 2) for leaf in model), first)


def behind(model: list[Leaf], x: jax.Array) -> jax.Array:
    """A step in which each layer reads the previous layer."""
    for leaf in model:
        x = x + 0.05 * layer(leaf, x)
    return jnp.mean((x - 1) ** 2)


def update(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Momentum, and clipping by the global norm; a loop reads some of the arrays."""

    def step(model: list[Leaf], moments: list[Leaf], x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(model, x)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        scale = jnp.minimum(1.0, 1.0 / norm)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g * scale, moments, grads)
        model = jax.tree.map(lambda p, m: p - 0.1 * m, model, moments)
        last = jax.lax.fori_loop(0, 3, lambda _, y: y + model[-1]["b"], model[1]["b"])
        return model, moments, value, norm, last

    return step


def flat(step: Callable[..., Any], *args: Any) -> Program:
    return flatten(jax.make_jaxpr(step)(*args))


@pytest.mark.parametrize("loss", [beside, behind])
def test_results_are_those_of_each_array_by_itself(loss: Callable[..., Any]) -> None:
    model = leaves(COUNT)
    zeros = jax.tree.map(jnp.zeros_like, model)
    arguments = (model, zeros, jnp.linspace(-1, 1, 12).reshape(4, 3))
    program = flat(update(loss), *arguments)

    stacked = stacked_leaves(program)

    given = jax.tree.leaves(arguments)
    wanted, found = evaluate(program, *given), evaluate(stacked, *given)
    for a, b in zip(wanted, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    # Updates are blocks of about the root of their number, in three shapes.
    before, after = (
        Counter(e.primitive for e in p.body.equations) for p in (program, stacked)
    )
    assert after["split"] >= 6
    assert before["sub"] - after["sub"] > 2.7 * COUNT


def test_few_arrays_are_left_alone() -> None:
    model = leaves(LEAST // 2)
    step = update(beside)
    program = flat(step, model, model, jnp.ones((4, 3)))

    assert stacked_leaves(program) is program
    large = [jnp.ones((256, 256))] * COUNT
    program = flat(lambda ws: [w - 1.0 for w in ws], large)
    assert stacked_leaves(program) is program
