"""Tests programs whose checkpoints repeat less work, with equal results."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cudnn_on_cpu import cudnn_on_cpu
from jax.experimental.pallas.ops.tpu import flash_attention
from microbatch_cases import evaluated
from remat_cases import X, block, blocks, checkpointed, descent, drawn, mlp

from autopar_passes.graph.build import step_graph
from autopar_passes.graph.verify import verify
from autopar_passes.program.equations import Program, evaluate, walk
from autopar_passes.program.trace import TracedStep, open_arguments, trace
from autopar_passes.remat.copies import (
    RematError,
    attends,
    merge_repeats,
    trace_without_checkpoints,
)
from autopar_passes.remat.kernels import keep_kernels


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


ROWS, LENGTH, HEADS, DIM, LAYERS = 2, 16, 2, 4, 2
WIDTH = HEADS * DIM


def attending(w: Any, x: jax.Array) -> jax.Array:
    """A layer with an attention kernel."""
    q, k, v = jnp.split(x @ w[0], 3, -1)
    q, k, v = (a.reshape(-1, LENGTH, HEADS, DIM) for a in (q, k, v))
    mixed = jax.nn.dot_product_attention(
        q, k, v, is_causal=True, implementation="cudnn"
    )
    return x + jnp.tanh(mixed.reshape(x.shape) @ w[1])


def weights() -> list[tuple[jax.Array, jax.Array]]:
    return [
        (drawn(WIDTH, 3 * WIDTH, seed=k), drawn(WIDTH, WIDTH, seed=9 + k))
        for k in range(LAYERS)
    ]


def in_line(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = jax.checkpoint(attending)(w, x)
    return jnp.mean(x**2)


def in_scan(params: Any, x: jax.Array, *, reverse: bool = False) -> jax.Array:
    body = jax.checkpoint(lambda c, w: (attending(w, c), None))
    return jnp.mean(jax.lax.scan(body, x, params, reverse=reverse)[0] ** 2)


def in_reverse(params: Any, x: jax.Array) -> jax.Array:
    return in_scan(params, x, reverse=True)


def twice_in_scan(params: Any, x: jax.Array) -> jax.Array:
    """Two loops of the same number of iterations over the same weights."""
    return in_scan(params, x) + in_scan(params, x[:, ::-1])


def in_turns(loss: Any) -> Any:
    """A step of gradient descent that adds up gradients in a loop over the rows."""

    def step(params: Any, x: jax.Array) -> Any:
        def turn(total: Any, part: jax.Array) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, part)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(turn, zeros, x[:, None])
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, total)

    return step


def attention_kernels(program: Program) -> int:
    return sum(attends(eqn, program.values) for eqn in walk(program.body))


@pytest.mark.parametrize("form", [descent, in_turns])
@pytest.mark.parametrize(
    ("loss", "repeated", "left"),
    [(in_line, 4, 2), (in_scan, 2, 1), (in_reverse, 2, 1), (twice_in_scan, 4, 2)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_checkpoints_keep_the_results_of_attention(
    loss: Any, repeated: int, left: int, form: Any
) -> None:
    """Each kernel of the forward pass runs once, and gradients are the same."""
    with cudnn_on_cpu():
        params = weights()
        if loss is not in_line:
            params = jax.tree.map(lambda *w: jnp.stack(w), *params)
        args = params, drawn(ROWS, LENGTH, WIDTH, seed=5)
        traced = trace(form(loss), args)
        arrays = jax.tree.leaves(args)

        found = keep_kernels(traced.program)

        verify(step_graph(dataclasses.replace(traced, program=found)))
        assert attention_kernels(traced.program) == repeated
        assert attention_kernels(found) == left
        results, expected = (
            jax.jit(functools.partial(evaluate, program))(*arrays)
            for program in (found, traced.program)
        )
        for a, b in zip(results, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_small_parts_of_a_kernels_results_are_kept_instead() -> None:
    """JAX's flash attention returns statistics of a row 128 times."""

    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return x + flash_attention.flash_attention(x @ w, x, x, causal=True)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.checkpoint(layer)(w, x) ** 2)

    shapes = (128, 128), (1, 2, 256, 128)
    args = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    traced = trace(descent(loss), args)

    found = keep_kernels(traced.program)

    assert attention_kernels(traced.program) == 2
    assert attention_kernels(found) == 1
    (kernel,) = (e for e in found.body.equations if attends(e, found.values))
    place = found.body.equations.index(kernel)
    readers = [
        e for e in found.body.equations if set(e.arrays) & set(kernel.outputs[1:])
    ]
    assert [found.body.equations.index(e) - place for e in readers] == [1, 2]
    sizes = {found.values[v].size for e in readers for v in e.outputs}
    assert sizes == {2 * 256}


@pytest.mark.parametrize("loss", [checkpointed, mlp], ids=lambda x: x.__name__)
def test_steps_without_attention_are_not_changed(loss: Any) -> None:
    program = trace(descent(loss), (blocks(), X)).program

    assert keep_kernels(program) is program


def test_kernels_with_other_operands_stay() -> None:
    """Neither another layer nor a second call of a layer is a repeat."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = attending(w, attending(w, x))
        return jnp.mean(x**2)

    with cudnn_on_cpu():
        args = weights(), drawn(ROWS, LENGTH, WIDTH, seed=5)
        program = trace(descent(loss), args).program

    assert keep_kernels(program) is program
