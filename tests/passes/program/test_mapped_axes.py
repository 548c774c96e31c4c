"""Tests that collectives over a ``jax.vmap`` axis become reductions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar_passes.program.equations import evaluate
from autopar_passes.program.flatten import flatten

X, Y = jnp.arange(12.0).reshape(4, 3), jnp.arange(8).reshape(4, 2)


def test_they_are_reductions_with_the_same_results() -> None:
    def each(x: Any, y: Any) -> Any:
        several = jax.lax.psum((x, {"y": y}), "rows")
        return x - jax.lax.pmean(x, "rows"), jax.lax.pmax(y, "rows"), several

    mapped = jax.vmap(each, axis_name="rows")
    program = flatten(jax.make_jaxpr(mapped)(X, Y))
    kinds = [e.primitive for e in program.body.equations]
    found = evaluate(program, X, Y)

    assert kinds.count("reduce_sum") == 3
    assert kinds.count("reduce_max") == 1
    assert not {"psum", "pmax"} & set(kinds)
    for one, other in zip(found, jax.tree.leaves(mapped(X, Y)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_axis_inside_of_a_loop() -> None:
    def each(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, c: c - jax.lax.pmin(c, "rows"), x)

    mapped = jax.vmap(each, axis_name="rows")
    program = flatten(jax.make_jaxpr(mapped)(X))

    assert "reduce_min" in str(program.body)
    np.testing.assert_array_equal(evaluate(program, X)[0], mapped(X))
