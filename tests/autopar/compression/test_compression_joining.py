"""Tests that gradients which are encoded together are sent as if encoded alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.compression import encoding as module
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.encoding import LARGEST, MOST, CodecInput, group_gradients
from autopar.compression.exchange import MeshLinks
from autopar.compression.gradient import Feedback, Gradient, init_state
from autopar.compression.synchronise import NON_FINITE, RecordingLinks, synchronise

N = 4
SHAPES = ((64, 32), (32, 64), (16, 64), (8, 128))


def gradients(text: str, scatter: int | None) -> list[Gradient]:
    codec = parse_codec(text)
    feedback = Feedback("residual" if codec.feedback else "none")
    return [
        Gradient(str(k), shape, codec, feedback, scatter, seed=k)
        for k, shape in enumerate(SHAPES)
    ]


def step_of(found: list[Gradient]) -> Any:
    """Makes a step that returns totals, states and sums of all workers, stacked."""
    links = MeshLinks(("workers",), N)

    def run(own: Any, before: Any, worker: Any, step: Any) -> Any:
        return synchronise(found, own, before, links, worker, step)

    workers = jnp.arange(N, dtype=jnp.int32)
    mapped = jax.vmap(run, in_axes=(0, 0, 0, None), axis_name="workers")
    # Compiled: one by one, its operators take ten times as long.
    return jax.jit(
        lambda partials, states, step: mapped(partials, states, workers, step)
    )


def first_states(found: list[Gradient]) -> Any:
    states = [init_state(g, N) for g in found]
    return jax.tree.map(lambda x: jnp.stack([x] * N), states)


def two_steps(found: list[Gradient], sizes: float = 1.0) -> Any:
    """The results of two steps."""
    draw = np.random.default_rng(0)
    partials = [
        jnp.asarray(draw.standard_normal((N, *g.shape)), jnp.float32) * sizes
        for g in found
    ]
    states, run, out = first_states(found), step_of(found), []
    for step in range(2):
        totals, states, rows = run(partials, states, step)
        out.append((totals, states, rows))
    return out


@pytest.mark.parametrize(
    ("text", "scatter"),
    [
        ("dense", None),
        ("bf16", 0),
        ("fp8:block=64", 0),
        ("int8:block=64", None),
        ("int4:block=64", None),
        ("int4:block=64", 0),
        ("sign:block=64", 0),
    ],
)
def test_side_by_side_is_the_same(
    text: str, scatter: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, but for the sums of telemetry, whose order differs."""
    found = gradients(text, scatter)
    together = two_steps(found)

    def alone(pieces: Any) -> list[tuple[int, ...]]:
        assert len(group_gradients(pieces)) == 1
        return [(k,) for k in range(len(pieces))]

    monkeypatch.setattr(module, "group_gradients", alone)
    for one, other in zip(together, two_steps(found), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one[:2], other[:2])
        np.testing.assert_allclose(one[2], other[2], rtol=1e-5, atol=1e-6)


def piece(text: str, size: int, **fields: Any) -> CodecInput:
    codec = parse_codec(text)
    made = CodecInput(codec, size, codec.chunk(-(-size // N)), N, False, "float32")
    return dataclasses.replace(made, **fields)


@pytest.mark.parametrize(
    ("text", "put_together"), [("dense", 0), ("int8:block=64", 4), ("int4:block=64", 4)]
)
def test_gradients_are_single_slices_where_their_order_is_free(
    text: str, put_together: int
) -> None:
    """With blocks, each is put together of a part of each chunk."""
    found = gradients(text, None)
    partials = [jnp.ones(g.shape) for g in found]
    states = [init_state(g, N) for g in found]

    def totals(partials: Any) -> Any:
        zero = jnp.int32(0)
        return synchronise(found, partials, states, RecordingLinks(N), zero, zero)[0]

    sizes = {g.size for g in found}
    made = [
        eqn
        for eqn in jax.make_jaxpr(totals)(partials).eqns
        if eqn.primitive.name == "concatenate" and eqn.outvars[0].aval.size in sizes
    ]
    # Those of the errors are not read by the totals, but are traced.
    assert len(made) == 2 * put_together


def test_what_is_put_together() -> None:
    int8, int4 = piece("int8", 1 << 14), piece("int4", 1 << 14)
    odd = piece("int8", 1000)
    wide = piece("int8", 1 << 14, dtype="bfloat16")
    rank = piece("powersgd", 1 << 14)
    found = group_gradients([int8, int4, odd, int8, wide, rank, rank, int4])
    assert found == [(0, 3), (1, 7), (2,), (4,), (5,), (6,)]


def test_large_ones_stay_alone_and_groups_are_bounded() -> None:
    large = piece("int8", 2 * LARGEST)
    assert group_gradients([large, large]) == [(0,), (1,)]
    most = piece("int8", LARGEST)
    sizes = {len(group) for group in group_gradients([most] * 10)}
    assert max(sizes) * LARGEST == MOST


def test_a_gradient_that_is_not_finite_is_told_from_those_beside_it() -> None:
    found = gradients("int8:block=64", None)
    partials = [jnp.ones((N, *g.shape)) for g in found]
    partials[1] = partials[1].at[2, 3, 5].set(jnp.nan).at[2, 0, 0].set(jnp.inf)
    totals, _, rows = step_of(found)(partials, first_states(found), 0)
    found_in = rows[:, :, NON_FINITE]
    assert found_in[2].tolist() == [0, 2, 0, 0]
    assert (found_in[:, [0, 2, 3]] == 0).all()
    assert [bool(jnp.isfinite(t).all()) for t in totals] == [True, False, True, True]


def test_a_sum_that_overflows_is_counted() -> None:
    """Although what each worker sends is finite."""
    found = gradients("dense", None)
    rows = two_steps(found, sizes=1e38)[0][2]
    assert (rows[:, :, NON_FINITE] > 0).all()
