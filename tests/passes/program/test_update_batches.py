"""Tests that equal matrices of an update are computed together, with equal results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar_passes.graph.build import step_graph
from autopar_passes.graph.operators import update_equations
from autopar_passes.program import update_batches
from autopar_passes.program.equations import Program, evaluate
from autopar_passes.program.trace import trace
from autopar_passes.program.update_batches import batch_updates

Update = Callable[[Any, Any], Any]


def products(w: Any, g: Any) -> Any:
    x = g / (jnp.linalg.norm(g) + 1e-6)
    for _ in range(2):
        x = 1.5 * x - 0.5 * (x @ x.T) @ x
    return w - 0.1 * x


def loop(w: Any, g: Any) -> Any:
    return w - jax.lax.fori_loop(
        0, 3, lambda i, x: x - 0.1 * x @ (x.T @ x) / (i + 1), g
    )


def factorised(w: Any, g: Any) -> Any:
    cold = g @ g.T + jnp.eye(g.shape[0])
    return w - jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(cold), True), g)


def chosen(w: Any, g: Any) -> Any:
    large = jnp.sum(g) > 0
    return w - jax.lax.cond(large, lambda x: x @ (x.T @ x), lambda x: x + x, g)


def shared(w: Any, g: Any) -> Any:
    return w - g @ jnp.eye(g.shape[1], k=1) @ jnp.tril(jnp.ones((g.shape[1],) * 2))


UPDATES: dict[str, Update] = {
    "products": products,
    "loop": loop,
    "shared": shared,
}


def step_of(update: Update, twice: bool = False) -> Callable[..., Any]:
    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w @ w.T)
        return jnp.mean(x**2)

    def step(ws: Any, x: Any) -> Any:
        found = 0.0
        for _ in range(2 if twice else 1):
            found, grads = jax.value_and_grad(loss)(ws, x)
            ws = [update(w, g) for w, g in zip(ws, grads, strict=True)]
        return ws, found

    return step


def traced(step: Callable[..., Any], shapes: list[tuple[int, int]]) -> Any:
    keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
    ws = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=False)]
    args = (ws, jax.random.normal(keys[-1], (4, shapes[0][0])))
    found = trace(step, args)
    return found, update_equations(found.program, step_graph(found)), args


def stacks(program: Program) -> list[int]:
    """The sizes of the batches of a program."""
    return [
        len(e.inputs) for e in program.body.equations if e.primitive == "concatenate"
    ]


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("devices", [2, 3, 8])
def test_results_are_those_of_each_matrix_alone(name: str, devices: int) -> None:
    step = step_of(UPDATES[name])
    found, update, args = traced(step, [(8, 8)] * 5)
    made, _ = batch_updates(found.program, update, devices)

    assert max(stacks(made)) == {2: 4, 3: 3, 8: 5}[devices]
    wanted = evaluate(found.program, *jax.tree.leaves(args))
    for a, b in zip(evaluate(made, *jax.tree.leaves(args)), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def test_matrices_of_other_shapes_have_batches_of_their_own() -> None:
    def loss(ws: Any, x: Any) -> Any:
        return sum(jnp.sum((x[:, : w.shape[0]] @ w) ** 2) for w in ws)

    def step(ws: Any, x: Any) -> Any:
        grads = jax.grad(loss)(ws, x)
        return [products(w, g) for w, g in zip(ws, grads, strict=True)], 0.0

    shapes = [(4, 6), (6, 4), (4, 6), (4, 6), (6, 4), (5, 5)]
    found, update, _ = traced(step, [(6, 6), *shapes])
    made, _ = batch_updates(found.program, update, 8)
    assert sorted(stacks(made)) == [2, 3]


def test_large_matrices_come_one_to_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found, update, _ = traced(step_of(products), [(8, 8)] * 7)
    assert stacks(batch_updates(found.program, update, 2)[0]) == [6]
    monkeypatch.setattr(update_batches, "MOST_BYTES", 8 * 8 * 4)
    assert stacks(batch_updates(found.program, update, 2)[0]) == [2, 2, 2]


def test_the_norm_of_a_matrix_is_taken_in_the_batch() -> None:
    found, update, _ = traced(step_of(products), [(8, 8)] * 4)
    made, _ = batch_updates(found.program, update, 4)
    sums = [
        e
        for e in made.body.equations
        if e.primitive == "reduce_sum" and e.index not in found.program.by_index()
    ]
    assert stacks(made) == [4]  # of the gradients alone
    assert [made.values[e.outputs[0]].shape for e in sums] == [(4,)]


def test_products_of_other_passes_stay() -> None:
    found, update, _ = traced(step_of(products), [(8, 8)] * 4)
    made, _ = batch_updates(found.program, update, 4)
    before = {e.index for e in found.program.body.equations}
    kept = {e.index for e in made.body.equations} & before
    assert before - kept <= update


def test_a_step_that_updates_twice_batches_the_first() -> None:
    found, update, args = traced(step_of(products, twice=True), [(8, 8)] * 3)
    made, _ = batch_updates(found.program, update, 8)
    assert stacks(made) == [3]
    wanted = evaluate(found.program, *jax.tree.leaves(args))
    for a, b in zip(evaluate(made, *jax.tree.leaves(args)), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def test_nothing_changes_without_equal_products() -> None:
    found, update, _ = traced(step_of(lambda w, g: w - 0.1 * g), [(8, 8)] * 4)
    assert batch_updates(found.program, update, 4) == (found.program, ())
    alone, own, _ = traced(step_of(products), [(8, 8)])
    assert batch_updates(alone.program, own, 4) == (alone.program, ())


def test_random_numbers_stay_those_of_their_keys() -> None:
    def noisy(w: Any, g: Any) -> Any:
        key = jax.random.key_data(jax.random.key(0)) + g[0, 0].astype(jnp.uint32)
        drawn = jax.random.normal(jax.random.wrap_key_data(key), g.shape)
        return w - (g @ g.T) @ drawn @ (g.T @ g)

    found, update, _ = traced(step_of(noisy), [(8, 8)] * 3)
    made, _ = batch_updates(found.program, update, 4)
    drawn = [e for e in made.body.equations if e.primitive == "random_bits"]
    assert len(drawn) == 3


@pytest.mark.parametrize("update", [factorised, chosen])
def test_factorisations_and_branches_stay_as_they_are(update: Update) -> None:
    found, own, _ = traced(step_of(update), [(8, 8)] * 3)
    assert batch_updates(found.program, own, 4) == (found.program, ())


def test_steps_with_effects_stay_in_their_order() -> None:
    def told(w: Any, g: Any) -> Any:
        jax.debug.print("{}", g[0, 0])
        return products(w, g)

    found, update, _ = traced(step_of(told), [(8, 8)] * 3)
    assert batch_updates(found.program, update, 4) == (found.program, ())
