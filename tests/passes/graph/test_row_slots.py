"""Rows that have slots, against rows that are sorted together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import expert_steps
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from property_tests import examples

from autopar_passes.graph.build import step_graph
from autopar_passes.graph.roles import Role
from autopar_passes.graph.row_orders import find_row_orders
from autopar_passes.graph.row_slots import (
    EXPECTED_RUNS,
    RowSlots,
    capacity_for,
    give_slots,
    slots_for,
)
from autopar_passes.program.equations import Program, evaluate, walk
from autopar_passes.program.trace import open_arguments, trace_call
from autopar_passes.sums.find import find_deferrals


def rewritten(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    blocks: int,
    capacity: float | None,
) -> tuple[Program, Program, RowSlots]:
    """The program of a step, the program with slots, and what the rewrite found."""
    traced = trace_call(step, open_arguments(step, args))
    rules = {op.equation: op.rule for op in step_graph(traced).operators}
    orders = find_row_orders(traced.program, rules, blocks)
    made, found = give_slots(traced.program, rules, orders, blocks, capacity)
    return traced.program, made, found


def kinds(program: Program) -> list[str]:
    return [eqn.primitive for eqn in walk(program.body)]


def assert_equal(plain: Program, made: Program, args: Any) -> None:
    flat = jax.tree.leaves(args)
    runs = [jax.jit(functools.partial(evaluate, p)) for p in (plain, made)]
    for a, b in zip(*(run(*flat) for run in runs), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * np.abs(a).max())


CASES = [
    ("inverse", False, False, 2, 1.0),
    ("inverse", True, True, 8, 0.3),
    ("addition", True, False, 1, 2.0),
    ("addition", False, False, 4, 99),
    ("setting", False, False, 8, 0.3),
    ("setting", True, True, 2, 1.0),
]


@pytest.mark.parametrize(("form", "again", "scanned", "blocks", "capacity"), CASES)
def test_slots_leave_results_as_they_are(
    form: str, again: bool, scanned: bool, blocks: int, capacity: float
) -> None:
    step, *args = expert_steps.training(form, again=again, scanned=scanned, layers=1)
    plain, made, found = rewritten(step, tuple(args), blocks, capacity)

    assert found.slots, found.refused
    assert found.capacity == capacity
    assert "ragged_dot_general" not in kinds(made)
    assert ("while" in kinds(made)) == (capacity < 99)
    assert_equal(plain, made, args)


def test_layers_that_differ_are_not_taken_for_equal() -> None:
    """Equal layers are traced once; these differ in one number or one operator."""
    last = [lambda y: y * 2.0, lambda y: y * 3.0, jnp.tanh, lambda y: y * 2.0]

    def step(p: list[jax.Array], router: jax.Array, x: jax.Array) -> Any:
        for matrices, function in zip(p, last, strict=True):
            keys = jnp.argmax(x @ router, -1)
            order = jnp.argsort(keys)
            sizes = jnp.bincount(keys, length=4)
            y = function(jax.lax.ragged_dot(x[order], matrices, sizes))
            x = x + y[jnp.argsort(order)]
        return p, x

    rng = np.random.default_rng(0)
    shapes = (4, 8, 8), (4, 8, 8), (4, 8, 8), (4, 8, 8), (8, 4), (16, 8)
    *p, router, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    args = p, router, x
    plain, made, found = rewritten(step, args, 4, 0.5)

    assert found.slots, found.refused
    assert_equal(plain, made, args)


def test_layers_that_fill_other_operands_are_not_taken_for_equal() -> None:
    """Both layers select between a number and equal rows, the other way around."""

    def step(p: list[jax.Array], router: jax.Array, w: jax.Array, x: jax.Array) -> Any:
        for k, matrices in enumerate(p):
            keys = jnp.argmax(x @ router, -1)
            order = jnp.argsort(keys)
            sizes = jnp.bincount(keys, length=4)
            y = jax.lax.ragged_dot(x[order], matrices, sizes)
            pair = jnp.full_like(y, 2.0), jnp.broadcast_to(w, y.shape)
            y = y * jnp.where(y > 0, pair[k], pair[1 - k])
            x = x + y[jnp.argsort(order)]
        return x

    rng = np.random.default_rng(0)
    shapes = (4, 8, 8), (4, 8, 8), (8, 4), (8,), (16, 8)
    *p, router, w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    args = p, router, w, x
    plain, made, found = rewritten(step, args, 4, 0.5)

    assert found.slots, found.refused
    assert_equal(plain, made, args)


def test_one_row_of_equal_rows_enters_the_loop() -> None:
    def step(p: jax.Array, router: jax.Array, scale: jax.Array, x: jax.Array) -> Any:
        keys = jnp.argmax(x @ router, -1)
        order = jnp.argsort(keys)
        sizes = jnp.bincount(keys, length=4)
        y = jax.lax.ragged_dot(x[order], p, sizes)
        y = y * jnp.broadcast_to(scale, y.shape)
        return y[jnp.argsort(order)]

    rng = np.random.default_rng(0)
    shapes = (4, 8, 6), (8, 4), (16, 8)
    p, router, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    args = p, router, jnp.arange(6, dtype=jnp.int32), x
    plain, made, found = rewritten(step, args, 2, 0.5)

    assert found.slots, found.refused
    (loop,) = (eqn for eqn in walk(made.body) if eqn.primitive == "while")
    shapes_read = [made.values[a].shape for a in loop.inputs if isinstance(a, int)]
    assert shapes_read.count((16, 6)) == 1, "only the results of the first round"
    assert (1, 6) in shapes_read
    assert_equal(plain, made, args)


def test_further_rounds_belong_to_the_pass_of_their_rows() -> None:
    """Loops of the backward pass are no part of the update that reads their sums."""
    step, *args = expert_steps.training(layers=1, again=True)
    traced = trace_call(step, open_arguments(step, tuple(args)))
    _, made, _ = rewritten(step, tuple(args), 8, 0.3)
    graph = step_graph(dataclasses.replace(traced, program=made))
    roles: dict[bool, set[Role]] = {False: set(), True: set()}
    for eqn in made.body.equations:
        if eqn.primitive == "while":
            inner = {e.index for region in eqn.regions for e in walk(region)}
            own = {op.role for op in graph.operators if op.equation in inner}
            roles["transpose(" in eqn.name_stack] |= own

    assert roles == {False: {Role.FORWARD}, True: {Role.BACKWARD}}
    # Rounds that seldom run add up their gradients themselves, and often run ones after
    # the loop.
    often = dataclasses.replace(
        graph,
        operators=tuple(
            dataclasses.replace(op, input_trips=(1.0, 1.0))
            if op.kind == "carry"
            else op
            for op in graph.operators
        ),
    )
    assert not any(d.hoisted for d in find_deferrals(made, graph))
    assert any(d.hoisted for d in find_deferrals(made, often))


ROWS, GROUPS, WIDTH = 48, 6, 8


def _step(p: Any, x: jax.Array, logits: jax.Array) -> Any:
    """A layer of experts that the batch chooses, with sums and maxima over rows."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        weights, chosen = jax.lax.top_k(logits, 2)
        keys = chosen.reshape(-1)
        order = jnp.argsort(keys)
        sizes = jnp.bincount(keys, length=GROUPS)
        y = jax.lax.ragged_dot(x[order // 2], p["up"], sizes) + p["bias"][keys[order]]
        y = jnp.tanh(y) * jax.nn.softmax(weights).reshape(-1)[order][:, None]
        z = jax.lax.ragged_dot(y, p["down"], sizes)
        rest = jnp.max(jnp.abs(z), 0).sum() + 0.1 * jnp.sum(z * z)
        back = z[jnp.argsort(order)].reshape(-1, 2, WIDTH)
        return jnp.mean((back.sum(1) - x) ** 2) + rest

    value, grads = jax.value_and_grad(loss, (0, 1))(p, x)
    return value, grads


def routings(seed: int) -> Iterator[np.ndarray]:
    """Logits: random, skewed, tied, all to one, sorted, and tied for some rows."""
    rng = np.random.default_rng(seed)
    shape = ROWS // 2, GROUPS
    yield rng.normal(size=shape)
    yield rng.normal(size=shape) + 3 * rng.normal(size=GROUPS)
    yield rng.integers(0, 2, shape).astype(float)
    yield np.zeros(shape)
    yield np.eye(GROUPS)[rng.integers(GROUPS)] + np.zeros(shape)
    yield np.sort(rng.normal(size=shape), 0)
    yield np.where(np.arange(shape[0])[:, None] < 8, rng.normal(size=shape), 0.0)


@pytest.mark.parametrize(
    ("blocks", "capacity"), [(1, 1.0), (2, 0.2), (4, 0.5), (4, 1.5), (8, 2.0)]
)
def test_every_routing_gives_the_same(blocks: int, capacity: float) -> None:
    """Empty experts, ties, and all rows to one expert, with gradients."""
    rng = np.random.default_rng(blocks)
    shapes = {
        "up": (GROUPS, WIDTH, 12),
        "bias": (GROUPS, 12),
        "down": (GROUPS, 12, WIDTH),
    }
    p = {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in shapes.items()}
    x = jnp.asarray(rng.normal(size=(ROWS // 2, WIDTH)), jnp.float32)
    args = p, x, jnp.zeros((ROWS // 2, GROUPS))
    plain, made, found = rewritten(_step, args, blocks, capacity)

    assert found.slots, found.refused
    runs = [jax.jit(functools.partial(evaluate, q)) for q in (plain, made)]
    for seed in range(examples(6)):
        for logits in routings(seed):
            flat = jax.tree.leaves((p, x, jnp.asarray(logits, jnp.float32)))
            for a, b in zip(*(run(*flat) for run in runs), strict=True):
                bound = 1e-5 * np.abs(a).max()
                np.testing.assert_allclose(b, a, rtol=1e-5, atol=bound)


def _keys_of_the_batch(x: jax.Array, keys: jax.Array) -> Any:
    return keys


def _more_keys(x: jax.Array, keys: jax.Array) -> Any:
    return jnp.argmax(jnp.concatenate([x, x], 1), -1)


@pytest.mark.parametrize(
    ("keys_of", "reason"),
    [
        (_keys_of_the_batch, "the sorted keys may be negative"),
        (_more_keys, "other keys than the numbers of groups"),
    ],
)
def test_rows_without_a_group_have_no_slots(
    keys_of: Callable[..., jax.Array], reason: str
) -> None:
    """Ragged products make zeros of such rows, so they may not be lost."""

    def step(p: jax.Array, x: jax.Array, keys: jax.Array) -> Any:
        keys = keys_of(x, keys)
        order = jnp.argsort(keys)
        made = jax.lax.ragged_dot(x[order], p, jnp.bincount(keys, length=4))
        return p, made[jnp.argsort(order)] + 1.0

    args = jnp.ones((4, 8, 8)), jnp.ones((16, 8)), jnp.zeros((16,), jnp.int32)
    plain, made, found = rewritten(step, args, 4, None)
    assert made is plain
    assert not found.slots
    assert reason in found.refused


@pytest.mark.parametrize(
    "between",
    [
        lambda y: jnp.cumsum(y, 0),
        lambda y: y * jnp.arange(len(y), dtype=y.dtype)[:, None],
        lambda y: jnp.concatenate([y[:8], y[8:] * 2]),
    ],
)
def test_rows_that_depend_on_their_place_have_no_slots(
    between: Callable[[jax.Array], jax.Array],
) -> None:
    def step(p: jax.Array, router: jax.Array, x: jax.Array) -> Any:
        keys = jnp.argmax(x @ router, -1)
        order = jnp.argsort(keys)
        y = jax.lax.ragged_dot(x[order], p, jnp.bincount(keys, length=4))
        return p, between(y)[jnp.argsort(order)]

    args = jnp.ones((4, 8, 8)), jnp.ones((8, 4)), jnp.ones((16, 8))
    plain, made, found = rewritten(step, args, 4, None)
    assert made is plain
    assert found.refused


def test_random_rows_seldom_overflow() -> None:
    """With the chosen capacity, few random routings need further rounds."""
    rng = np.random.default_rng(0)
    for shape in ((8, 2048, 8), (8, 512, 64)):
        slots = slots_for(shape, capacity_for(shape))
        blocks, rows, groups = shape
        keys = rng.integers(0, groups, (500, blocks, rows))
        keys += groups * np.arange(500 * blocks).reshape(500, blocks, 1)
        counts = np.bincount(keys.reshape(-1), minlength=500 * blocks * groups)
        assert (counts.reshape(500, -1) > slots).any(1).mean() <= 2 * EXPECTED_RUNS
        assert slots <= 3 * rows / groups
