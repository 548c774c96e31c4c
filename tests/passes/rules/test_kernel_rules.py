"""Tests rules and work of hand-written kernels: what a grid proves and what not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from kernel_cases import (
    BATCH,
    DIM,
    FULL,
    HEADS,
    SEQ,
    cudnn,
    free_sizes,
    gradient,
    kernels_of,
    numbered,
    on_gpu,
    on_tpu,
    row_sum,
    running,
    scaled,
    shifted,
    splash,
    struct,
    traced,
    work,
)

from autopar_passes.rules.factor_rule import (  # pyright: ignore[reportPrivateUsage]
    _REGISTRY,
    GPU,
    TPU,
    FactorKind,
    FactorRule,
    register_rule,
)

BSNH = struct(BATCH, SEQ, HEADS, DIM)
BNSH = struct(BATCH, HEADS, SEQ, DIM)


@pytest.mark.parametrize(
    ("attention", "array", "heads", "device"),
    [(on_gpu, BSNH, 2, GPU), (on_tpu, BNSH, 1, TPU), (splash, BNSH, 1, TPU)],
    ids=["gpu", "tpu", "splash"],
)
def test_pallas_attention_splits_batch_and_heads(
    attention: Any, array: Any, heads: int, device: str
) -> None:
    """The grids of JAX's own kernels prove batch and heads, forward and backward."""
    found = kernels_of(gradient(attention), array, array, array)

    assert len(found) == 3
    for op in found:
        assert work(op).platforms == (device,)
        if "preprocess" in work(op).name:
            continue
        last = max(k for k, dims in enumerate(op.rule.results) if len(dims) == 4)
        assert free_sizes(op, last) == {0: BATCH, heads: HEADS}, op.kernel
        assert work(op).matrix


def test_causal_kernels_count_the_blocks_that_they_run() -> None:
    """Of 2 x 2 blocks of 128, a causal mask leaves 3; backward 7 products, not 2."""
    forward, _, backward = kernels_of(gradient(on_gpu), BSNH, BSNH, BSNH)
    assert forward.flops == pytest.approx(0.75 * FULL)
    # Blocks of 32: 8 x 9 / 2 of 64.
    assert backward.flops == pytest.approx(3.5 * FULL * 36 / 64)

    flash = kernels_of(gradient(on_tpu), BNSH, BNSH, BNSH)
    assert [op.flops / FULL for op in flash] == pytest.approx([0.75, 1.5, 1.125])
    sparse = kernels_of(gradient(splash), BNSH, BNSH, BNSH)
    assert [op.flops / FULL for op in sparse] == pytest.approx([0.75, 1.5, 1.125])


def test_blocks_of_rows_are_independent() -> None:
    (op,) = kernels_of(scaled, struct(64, 16), struct(16))

    assert free_sizes(op) == {0: 8}
    assert not op.rule.free & op.rule.factors_of(op.rule.operands[1])
    assert op.flops == 64 * 16
    assert not work(op).matrix


@pytest.mark.parametrize(
    "kernel",
    [row_sum, numbered, shifted, lambda x: running(x, parallel=False)],
    ids=["adds up", "asks for its number", "mirrors", "carries scratch memory"],
)
def test_what_a_grid_does_not_prove_is_replicated_and_named(kernel: Any) -> None:
    _, graph = traced(kernel, struct(64, 16, dtype=jnp.float32))
    (op,) = [op for op in graph.operators if op.kernel is not None]

    assert not op.rule.free
    assert graph.unsupported == (f"kernel '{work(op).name}'",)


def test_scratch_memory_of_parallel_points_is_their_own() -> None:
    def step(x: Any) -> Any:
        return running(x, parallel=True)

    (op,) = kernels_of(step, struct(64, 16, dtype=jnp.float32))

    assert free_sizes(op) == {0: 8}


def test_vmapped_dimensions_are_independent() -> None:
    (op,) = kernels_of(jax.vmap(row_sum), struct(6, 64, 16, dtype=jnp.float32))

    assert free_sizes(op) == {0: 6}


def test_an_estimate_of_the_cost_is_taken() -> None:
    def step(x: Any) -> Any:
        return pl.pallas_call(
            lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...]),
            out_shape=x,
            cost_estimate=pl.CostEstimate(
                flops=123, bytes_accessed=0, transcendentals=0
            ),
        )(x)

    (op,) = kernels_of(step, struct(8, 128))

    assert op.flops == 123


def test_loops_over_data_are_assumed_and_said() -> None:
    def step(x: Any) -> Any:
        def kernel(x_ref: Any, o_ref: Any) -> None:
            end = x_ref[0, 0]
            o_ref[...] = jax.lax.fori_loop(0, end, lambda i, y: y + 1, x_ref[...])

        return pl.pallas_call(kernel, out_shape=x, name="loops")(x)

    _, graph = traced(step, struct(8, 128, dtype=jnp.int32))

    assert any("'loops'" in text for text in graph.assumed_trips)


@pytest.fixture
def registry() -> Any:
    before = dict(_REGISTRY)
    yield
    _REGISTRY.clear()
    _REGISTRY.update(before)


def rows_rule(kind: FactorKind, columns: FactorKind) -> FactorRule:
    """The rule for blocks of 8 rows of (64, 16), and a result (64, 16)."""
    kinds = (kind, FactorKind.BLOCKED, columns)
    dims = ((0, 1), (2,))
    return FactorRule((8, 8, 16), kinds, (dims,), (dims,))


@pytest.mark.usefixtures("registry")
def test_a_rule_is_registered_by_the_name_of_the_kernel() -> None:
    register_rule("kernel")(lambda *_: rows_rule(FactorKind.PASS, FactorKind.BLOCKED))
    (op,) = kernels_of(numbered, struct(64, 16, dtype=jnp.float32))

    assert free_sizes(op) == {0: 8}


@pytest.mark.usefixtures("registry")
def test_a_registered_rule_cannot_split_blocks() -> None:
    register_rule("kernel")(lambda *_: rows_rule(FactorKind.PASS, FactorKind.PASS))

    with pytest.raises(ValueError, match="splits dimension 1 of array 0"):
        kernels_of(numbered, struct(64, 16, dtype=jnp.float32))


def test_cudnn_splits_batch_and_heads() -> None:
    forward, backward = kernels_of(gradient(cudnn(is_causal=True)), BSNH, BSNH, BSNH)

    assert free_sizes(forward) == {0: BATCH, 2: HEADS}
    assert free_sizes(forward, 1) == {0: BATCH, 1: HEADS}
    assert all(free_sizes(backward, k) == {0: BATCH, 2: HEADS} for k in range(3))
    assert forward.flops == 0.5 * FULL
    assert backward.flops == 1.25 * FULL
    assert work(forward).platforms == (GPU,)


@pytest.mark.parametrize(
    ("options", "bias", "split"),
    [
        ({}, (), True),
        ({"is_causal": True}, (), True),
        ({"is_causal": True, "local_window_size": (63, 0)}, (), False),
        ({}, (1, 1, SEQ, SEQ), False),
    ],
    ids=["full", "causal", "window", "bias"],
)
def test_a_sequence_is_split_where_blocks_are_calls(
    options: dict[str, Any], bias: tuple[int, ...], split: bool
) -> None:
    arrays = [BSNH, BSNH, BSNH, *([struct(*bias)] if bias else [])]
    for op in kernels_of(gradient(cudnn(**options)), *arrays):
        (factor,) = op.rule.results[0][1]

        assert (op.rule.kinds[factor] is FactorKind.EXCHANGED) == split
        assert (factor in op.rule.free) == split
        assert bool(op.rule.exchanges) == split
        # Keys are of the same sequence.
        assert (op.rule.operands[1][1] == (factor,)) == split


def test_keys_of_another_length_are_not_split() -> None:
    keys = struct(BATCH, SEQ // 2, HEADS, DIM)
    (op, _) = kernels_of(gradient(cudnn()), BSNH, keys, keys)

    assert not op.rule.exchanges


def test_groups_of_query_heads_stay_with_their_key_head() -> None:
    queries, keys = struct(BATCH, SEQ, 6, DIM), struct(BATCH, SEQ, 2, DIM)
    forward, backward = kernels_of(gradient(cudnn()), queries, keys, keys)

    assert free_sizes(forward) == {0: BATCH, 2: 2}
    assert free_sizes(backward, 1) == {0: BATCH, 2: 2}
    assert forward.flops == 3 * FULL


@pytest.mark.parametrize(
    ("shape", "free", "sums"),
    [
        ((1, HEADS), {1: HEADS}, {"batch"}),
        ((BATCH, 1), {0: BATCH}, {"heads"}),
        ((1, 1), {}, {"batch", "heads"}),
        ((BATCH, HEADS), {0: BATCH, 1: HEADS}, set()),
    ],
)
def test_the_gradient_of_a_shared_bias_is_summed_over_shards(
    shape: tuple[int, int], free: dict[int, int], sums: set[str]
) -> None:
    bias = struct(*shape, SEQ, SEQ)
    _, backward = kernels_of(gradient(cudnn()), BSNH, BSNH, BSNH, bias)
    rule = backward.rule
    names = {rule.results[0][0][0]: "batch", rule.results[0][2][0]: "heads"}

    assert free_sizes(backward, 3) == free
    assert {names[f] for f in (rule.sums[3] if rule.sums else ())} == sums


def test_lengths_are_split_as_the_batch() -> None:
    lengths = struct(BATCH, dtype=jnp.int32)

    def step(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return cudnn(query_seq_lengths=lengths, key_value_seq_lengths=lengths)(q, k, v)

    (op,) = kernels_of(step, BSNH, BSNH, BSNH, lengths)
    batch = op.rule.results[0][0]

    assert op.rule.operands[4] == op.rule.operands[5] == (batch,)


def test_a_window_bounds_the_work() -> None:
    step = cudnn(is_causal=True, local_window_size=(63, 0))
    (op,) = kernels_of(step, BSNH, BSNH, BSNH)

    assert op.flops == FULL * 64 / SEQ
