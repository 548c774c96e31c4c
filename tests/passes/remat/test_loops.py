"""Tests loops over layers with rematerialisation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from microbatch_cases import evaluated
from remat_cases import (
    CASES,
    again,
    analysed,
    block,
    descent,
    drawn,
    flat,
    in_loop,
    remembered,
    results,
    stacked,
)

from autopar.compression.codecs.blocks import WITH_BARRIERS
from autopar.planner.scheme import is_repeated
from autopar.steps.analysis import Analysis, analyse
from autopar.steps.remat import layer_starts
from autopar_passes.graph.verify import verify
from autopar_passes.program.equations import Equation
from autopar_passes.program.trace import open_arguments
from autopar_passes.remat.copies import RematError
from autopar_passes.remat.loops import Recomputation, recompute_layers

LOOPS = [name for name in CASES if name.startswith("scan")]


def loops(analysis: Analysis) -> list[Equation]:
    return [e for e in analysis.program.body.equations if e.primitive == "scan"]


def stacked_bytes(analysis: Analysis) -> int:
    """Bytes that the loops of the forward pass stack."""
    forward = [e for e in loops(analysis) if "transpose(" not in e.name_stack]
    return sum(
        analysis.program.values[v].nbytes
        for e in forward
        for v in e.outputs[e.params["num_carry"] :]
    )


@pytest.mark.parametrize("name", LOOPS)
def test_all_but_the_last_iteration_give_the_same_numbers(name: str) -> None:
    """The first one and all of them are cases of test_recompute.py."""
    plain, arrays = analysed(name), flat(name)
    found = again(plain, len(layer_starts(plain)) - 1)

    verify(found.graph)
    for a, b in zip(results(found, arrays), results(plain, arrays), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "name", ["scan", "scan backwards", "scans", "scans of one kind"]
)
def test_iterations_are_layers(name: str) -> None:
    plain = analysed(name)
    lengths = [
        e.params["length"] for e in loops(plain) if "transpose(" not in e.name_stack
    ]

    assert len(layer_starts(plain)) == sum(lengths)


def test_a_teacher_of_the_same_layers_leaves_them_layers() -> None:
    plain = analysed("taught")
    backward = [e for e in loops(plain) if "transpose(" in e.name_stack]

    assert len(loops(plain)) - len(backward) == 3
    assert len(layer_starts(plain)) == len(backward) * 3 == 3
    found = again(plain, None)
    # Of three carries alone: the loops of the teacher stay as they are.
    assert stacked_bytes(found) == stacked_bytes(plain) * 2 / 3 + 3 * 8 * 16 * 4


def test_loops_over_experts_are_parts_of_their_layers() -> None:
    starts = layer_starts(analysed("experts"))

    assert len(starts) == len(set(starts)) == 3


def test_loops_without_a_backward_pass_have_no_layers() -> None:
    """Two loops of a frozen teacher, behind each other, have most of the work."""
    teacher, x = stacked(6), drawn(8, 16)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        _, hidden = jax.lax.scan(lambda c, w: (block(w, c),) * 2, x, teacher)
        wanted, _ = jax.lax.scan(lambda c, h: (c + h @ h.T @ c, None), x, hidden)
        for w in params:
            x = block(w, x)
        return jnp.mean((x - jax.lax.stop_gradient(wanted)) ** 2)

    params = [
        jax.tree.map(lambda w: w[0], teacher),
        jax.tree.map(lambda w: w[1], teacher),
    ]
    plain = analyse(descent(loss), (params, x))
    starts = layer_starts(plain)

    assert len(set(starts)) == len(starts)
    for a, b in zip(
        results(again(plain, None), (*jax.tree.leaves(params), x)),
        results(plain, (*jax.tree.leaves(params), x)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["scan", "scan with results"])
def test_all_layers_stack_what_a_checkpoint_would(name: str) -> None:
    """Only the carry of each iteration is left, and what is small."""
    found = again(analysed(name), None)
    layers = len(found.remat.layers)
    carry = 8 * 16 * 4

    assert layers * carry <= stacked_bytes(found) <= layers * (carry + 64)


def test_the_program_is_that_of_a_checkpoint() -> None:
    """The same operators as where the step itself says ``jax.checkpoint``."""

    def kinds(analysis: Analysis) -> list[str]:
        return sorted(op.kind for op in analysis.graph.operators)

    args = stacked(), drawn(8, 16)
    written = analyse(descent(remembered), args)

    assert kinds(again(analyse(descent(in_loop), args), None)) == kinds(written)


def test_a_checkpoint_in_the_body_leaves_nothing_to_do() -> None:
    plain = analysed("scan with checkpoint")

    assert again(plain, None).program.body == plain.program.body


def test_what_is_stacked_shrinks_with_each_iteration() -> None:
    plain = analysed("scan")
    sizes = [
        stacked_bytes(plain),
        *(stacked_bytes(again(plain, n)) for n in (1, 2, 3)),
    ]

    assert sizes == sorted(set(sizes), reverse=True)
    assert stacked_bytes(again(plain, 2, "dots")) > sizes[2]


def test_products_are_kept_or_named_values() -> None:
    def counted(level: str) -> int:
        found = again(analysed("scan named"), None, level)
        kinds = [op.kind for op in found.graph.operators if is_repeated(op)]
        return kinds.count("dot_general")

    assert counted("full") == 2
    assert counted("dots") == counted("names=down,up") == 0
    assert counted("names=up") == counted("names=down") == 1


def test_the_compiler_keeps_less() -> None:
    step, args = descent(in_loop), (stacked(6), drawn(512, 16))
    plain = analyse(step, args)

    def temporary_bytes(analysis: Analysis) -> int:
        run = jax.jit(
            lambda *x: evaluated(analysis.program, x), compiler_options=WITH_BARRIERS
        )
        compiled = run.lower(*jax.tree.leaves(args)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    most = temporary_bytes(plain)
    some = temporary_bytes(again(plain, 3))
    assert temporary_bytes(again(plain, None)) < 0.3 * most
    assert 0.3 * most < some < 0.8 * most


def test_effects_stay_once() -> None:
    seen: list[float] = []

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def layer(c: jax.Array, w: Any) -> Any:
            jax.debug.callback(lambda v: seen.append(float(v)), c.sum())
            return block(w, c), None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    args = stacked(3), drawn(8, 16)
    found = again(analyse(descent(loss), args), 2)
    evaluated(found.program, jax.tree.leaves(args))
    jax.effects_barrier()

    assert len(seen) == 3


def test_what_the_backward_pass_reads_at_once_is_kept() -> None:
    """A stack that something reads beside the backward loop has to be there."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def layer(c: jax.Array, w: Any) -> Any:
            h = jnp.tanh(c @ w[0])
            return c + h @ w[1], h

        out, hidden = jax.lax.scan(layer, x, params)
        return jnp.mean(out**2) + jnp.mean(jnp.sin(hidden))

    args = stacked(3), drawn(8, 16)
    plain = analyse(descent(loss), args)
    found = again(plain, 2)
    arrays = jax.tree.leaves(args)

    for a, b in zip(results(found, arrays), results(plain, arrays), strict=True):
        np.testing.assert_array_equal(a, b)


class Layer(nn.Module):
    """A layer with dropout, as in a loop of Flax."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> Any:
        """Rows to rows."""
        inner = nn.gelu(nn.Dense(32)(x))
        inner = nn.Dropout(0.2, deterministic=False)(inner)
        return x + nn.Dense(x.shape[-1])(inner), None


def linen_case() -> tuple[Any, tuple[Any, ...]]:
    """Layers in ``flax.linen.scan``."""
    stack = nn.scan(
        Layer,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        length=3,
    )()
    x, key = drawn(8, 16), jax.random.key(1)
    params = stack.init({"params": key, "dropout": key}, x, None)["params"]

    def loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        out, _ = stack.apply({"params": params}, x, None, rngs={"dropout": key})
        return jnp.mean(out**2)

    return descent(loss), (params, x, key)


def nnx_case() -> tuple[Any, tuple[Any, ...]]:
    """Layers in ``flax.nnx.scan``."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def layers(rngs: nnx.Rngs) -> nnx.Linear:
        return nnx.Linear(16, 16, rngs=rngs)

    graph, params = nnx.split(layers(nnx.Rngs(0)))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        through = nnx.scan(
            lambda x, layer: x + jnp.tanh(nnx.gelu(layer(x))),
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
        )
        return jnp.mean(through(x, nnx.merge(graph, params)) ** 2)

    return descent(loss), (params, drawn(8, 16))


@pytest.mark.parametrize("case", [linen_case, nnx_case])
def test_loops_of_flax(case: Any) -> None:
    step, args = case()
    plain = analyse(step, args)
    arrays = open_arguments(step, args).arrays
    expected = results(plain, arrays)

    assert len(layer_starts(plain)) == 3
    for count in (2, 3):
        found = again(plain, count)
        assert stacked_bytes(found) < stacked_bytes(plain)
        for a, b in zip(results(found, arrays), expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_wrong_iterations_are_refused() -> None:
    plain = analysed("scan")
    starts = layer_starts(plain)
    wanted = Recomputation(starts, (0,))

    def rewrite(**changes: Any) -> None:
        recompute_layers(
            plain.program, plain.graph, dataclasses.replace(wanted, **changes), ()
        )

    with pytest.raises(RematError, match="the first layers of a loop"):
        rewrite(layers=(1,))
    with pytest.raises(RematError, match="no loop of 2 iterations"):
        rewrite(starts=starts[:2])
    with pytest.raises(RematError, match=r"named 'norm'.*; it names none"):
        rewrite(level="names=norm")
    backward = loops(plain)[-1]
    with pytest.raises(RematError, match="does not go through the loop"):
        rewrite(starts=(backward.index,) * backward.params["length"])


def test_names_that_there_are_not_are_listed() -> None:
    plain = analysed("named")
    wanted = Recomputation(layer_starts(plain), (0,), "names=up,norm")

    with pytest.raises(RematError, match=r"'norm' .*; it has act, down, up\."):
        recompute_layers(plain.program, plain.graph, wanted, ())
