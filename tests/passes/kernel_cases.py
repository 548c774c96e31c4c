"""Small steps with hand-written kernels, and the equations of their kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.gpu import attention as gpu_attention
from jax.experimental.pallas.ops.tpu import flash_attention as tpu_attention
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from autopar_passes.graph.build import step_graph
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.program.trace import TracedStep, trace
from autopar_passes.rules.factor_rule import FactorKind, KernelWork

BATCH, SEQ, HEADS, DIM = 4, 256, 2, 64
# All pairs of a query and a key, four FLOPs a pair and element of a head.
FULL = 4.0 * BATCH * HEADS * SEQ * SEQ * DIM


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def gradient(attention: Callable[..., Any]) -> Callable[..., Any]:
    """A step that returns the gradients of an attention's operands."""

    def step(*arrays: Any) -> Any:
        numbers = tuple(range(len(arrays)))
        total = lambda *a: jnp.sum(attention(*a).astype(jnp.float32))  # noqa: E731
        return jax.grad(total, numbers)(*arrays)

    return step


def cudnn(**options: Any) -> Callable[..., Any]:
    def attend(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, bias, implementation="cudnn", **options
        )

    return attend


def on_gpu(q: Any, k: Any, v: Any) -> Any:
    return gpu_attention.mha(q, k, v, None, causal=True)


def on_tpu(q: Any, k: Any, v: Any) -> Any:
    return tpu_attention.flash_attention(q, k, v, causal=True)


def splash(q: Any, k: Any, v: Any) -> Any:
    causal = splash_attention_mask.CausalMask((SEQ, SEQ))
    mask = splash_attention_mask.MultiHeadMask([causal] * q.shape[1])
    kernel = splash_attention_kernel.make_splash_mha(
        mask, head_shards=1, q_seq_shards=1
    )
    return jax.vmap(kernel)(q, k, v)


def traced(step: Callable[..., Any], *arrays: Any) -> tuple[TracedStep, OperatorGraph]:
    found = trace(step, arrays)
    return found, step_graph(found)


def kernels_of(step: Callable[..., Any], *arrays: Any) -> list[Operator]:
    """The operators of a step that are kernels."""
    _, graph = traced(step, *arrays)
    return [op for op in graph.operators if op.kernel is not None]


def work(op: Operator) -> KernelWork:
    """What a kernel does."""
    assert op.kernel is not None
    return op.kernel


def free_sizes(op: Operator, slot: int = 0) -> dict[int, int]:
    """Dimension of a result -> the number of parts into which it may be split."""
    out: dict[int, int] = {}
    for dim, factors in enumerate(op.rule.results[slot]):
        free = [f for f in factors if op.rule.kinds[f] is FactorKind.PASS]
        if free:
            out[dim] = op.rule.sizes[free[0]]
    return out


def scaled(x: Any, w: Any, *, rows: int = 8, interpret: bool = False) -> Any:
    """Rows of x (m, n) times w (n,), by blocks of rows."""

    def kernel(x_ref: Any, w_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * w_ref[...]

    m, n = x.shape
    return pl.pallas_call(
        kernel,
        grid=(m // rows,),
        in_specs=[
            pl.BlockSpec((rows, n), lambda i: (i, 0)),
            pl.BlockSpec((n,), lambda i: (0,)),
        ],
        out_specs=pl.BlockSpec((rows, n), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        interpret=interpret,
        name="scaled",
    )(x, w)


def row_sum(x: Any, *, interpret: bool = False) -> Any:
    """The sum of the rows of x (m, n), accumulated block by block."""

    def kernel(x_ref: Any, o_ref: Any) -> None:
        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...].sum(0)

    m, n = x.shape
    return pl.pallas_call(
        kernel,
        grid=(m // 8,),
        in_specs=[pl.BlockSpec((8, n), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((n,), lambda i: (0,)),
        out_shape=jax.ShapeDtypeStruct((n,), x.dtype),
        interpret=interpret,
        name="row_sum",
    )(x)


def numbered(x: Any) -> Any:
    """x (m, n) plus the number of each block, so blocks must not be exchanged."""

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] + pl.program_id(0).astype(x_ref.dtype)

    return _by_rows(kernel, x)


def running(x: Any, *, parallel: bool) -> Any:
    """Blocks of x (m, n), with scratch memory that is kept between blocks."""

    def kernel(x_ref: Any, o_ref: Any, kept_ref: Any) -> None:
        kept_ref[...] = kept_ref[...] + x_ref[...]
        o_ref[...] = kept_ref[...]

    said = "parallel" if parallel else "arbitrary"
    return _by_rows(
        kernel,
        x,
        scratch_shapes=[pltpu.VMEM((8, x.shape[1]), x.dtype)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=(said,)),
    )


def shifted(x: Any) -> Any:
    """Computes each block of x (m, n) from the opposite block."""

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...]

    last = x.shape[0] // 8 - 1
    return _by_rows(kernel, x, index=lambda i: (last - i, 0))


def _by_rows(
    kernel: Callable[..., None],
    x: Any,
    index: Callable[[Any], Any] = lambda i: (i, 0),
    **options: Any,
) -> Any:
    m, n = x.shape
    return pl.pallas_call(
        kernel,
        grid=(m // 8,),
        in_specs=[pl.BlockSpec((8, n), index)],
        out_specs=pl.BlockSpec((8, n), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        **options,
    )(x)
