"""Tests sums of which devices keep slices, and sums inside of kernels."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import planner_harness as harness
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.traffic import _Forms, _sliced_axes, scatter_sum
from autopar.cost.work import node_seconds
from autopar.layouts.layout import ReshardStep
from autopar.layouts.strategies import strategy_space

BATCH, SEQ, HEADS, DIM = 4, 64, 2, 64


@given(st.lists(st.sampled_from((2, 4, 8)), min_size=1, max_size=3), st.data())
def test_scatters_in_turn_send_what_one_over_all_axes_sends(
    sizes: list[int], data: st.DataObject
) -> None:
    """Each device sends all but its slice once, however many axes share the work."""
    axes = tuple(range(len(sizes)))
    kept = data.draw(st.frozensets(st.sampled_from(axes), min_size=1))
    step = ReshardStep("all_reduce", axes, 1.0, ((),))
    made = scatter_sum(step, kept, sizes)

    scatters = [s for s in made if s.kind == "reduce_scatter"]
    sent = sum(s.fraction * (1 - 1 / sizes[s.axes[0]]) for s in scatters)
    slices = math.prod(sizes[a] for a in kept)
    assert sent == pytest.approx(1 - 1 / slices)
    # What is summed over the others is the slice alone.
    rest = [s for s in made if s.kind == "all_reduce"]
    assert {s.axes for s in rest} == ({tuple(a for a in axes if a not in kept)} - {()})
    assert all(s.fraction == pytest.approx(1 / slices) for s in rest)


@pytest.mark.parametrize(
    ("kind", "axes", "kept"),
    [
        ("slice", (0,), {0}),
        ("slice", (0, 1), {0, 1}),
        # The compiler merges a slice with a sum over all axes of the slice alone.
        ("slice", (0, 2), set[int]()),
        ("all_gather", (0,), set[int]()),
    ],
)
def test_a_sum_is_scattered_over_the_axes_of_its_slice(
    kind: str, axes: tuple[int, ...], kept: set[int]
) -> None:
    start: tuple[object, ...] = (0, False)
    end = (*start, ((0,),))
    step = ReshardStep(kind, axes, 1.0, ((0,),))
    forms = _Forms([], {start: {end: step}}, {end}, False, np.zeros(1, dtype=bool))

    assert _sliced_axes(forms, start, frozenset({0, 1})) == kept


def test_a_kernel_that_sums_over_its_rows_waits_for_the_sum() -> None:
    """The gradient of a bias that all examples share is summed inside the kernel."""

    def step(q: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        def total(q: jax.Array, bias: jax.Array) -> jax.Array:
            made = jax.nn.dot_product_attention(q, q, q, bias, implementation="cudnn")
            return jnp.sum(made.astype(jnp.float32))

        return jax.grad(total, (0, 1))(q, bias)

    def waited_s(*bias: int) -> list[float]:
        q = jax.ShapeDtypeStruct((BATCH, SEQ, HEADS, DIM), jnp.bfloat16)
        case = harness.prepare(step, (q, jax.ShapeDtypeStruct(bias, jnp.bfloat16)))
        backward = [op for op in case.graph.operators if op.kernel is not None][-1]
        node = case.contraction.node(backward)
        space = strategy_space(case.graph, case.contraction, node, (BATCH,))
        assert [any(s) for s in space.strategies] == [False, True]
        return list(node_seconds(case.analysis, node, space, pricer)[-1])

    pricer = harness.pricer_of((BATCH,))
    (axis,) = pricer.mesh.axes
    nbytes = 2 * HEADS * SEQ * SEQ
    ring_s = nbytes / BATCH / axis.link.bandwidth_bytes_per_s + axis.link.latency_s
    all_reduce_s = pricer.skew((axis,)) * 2 * (BATCH - 1) * ring_s

    assert waited_s(BATCH, HEADS, SEQ, SEQ) == [0.0, 0.0]
    assert waited_s(1, HEADS, SEQ, SEQ) == pytest.approx([0.0, all_reduce_s])
