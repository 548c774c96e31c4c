"""cuDNN's attention on CPUs, from plain operations, for tests of planned kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax._src.interpreters import mlir

from autopar_passes import jax_compat
from autopar_passes.rules import kernels

_LOWERINGS = mlir._platform_specific_lowerings  # pyright: ignore[reportPrivateUsage]


def attention(q: Any, k: Any, v: Any, params: dict[str, Any]) -> tuple[Any, Any]:
    """The output in float32, and the log-sum-exp of scores (batch, heads, sequence)."""
    if params["layout"]:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, 2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * params["scale"]
    if params["mask_type"] == fused.MaskType.CAUSAL:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    rows = jax.nn.logsumexp(scores, -1)
    out = jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(scores - rows[..., None]), v)
    return (out.swapaxes(1, 2) if params["layout"] else out), rows


def _forward(q: Any, k: Any, v: Any, *_: Any, **params: Any) -> Any:
    out, rows = attention(q, k, v, params)
    out = out.astype(q.dtype)
    return [out, rows] if params["is_training"] else [out]


def block_gradients(
    q: Any, k: Any, v: Any, rows: Any, out: Any, gradient: Any, params: dict[str, Any]
) -> Any:
    """A block's part of the gradients, from output and log-sum-exp over all blocks."""

    def share(q: Any, k: Any, v: Any) -> Any:
        own, logs = attention(q, k, v, params)
        part = jnp.exp(logs - rows)
        part = (part if params["layout"] else part.swapaxes(1, 2))[..., None]
        turned = (gradient.astype(jnp.float32) * out).sum(-1, keepdims=True)
        return (gradient * (part * own)).sum() - (turned * part).sum()

    return jax.grad(share, (0, 1, 2))(q, k, v)


def _backward(q: Any, k: Any, v: Any, *rest: Any, **params: Any) -> Any:
    rows, out, gradient = rest[-3:]
    found = block_gradients(q, k, v, rows, out, gradient, params)
    return [x.astype(like.dtype) for x, like in zip(found, (q, k, v), strict=True)]


@contextlib.contextmanager
def cudnn_on_cpu() -> Generator[None]:
    """Lets steps with cuDNN's attention run on CPUs, also in float32."""
    functions = {
        fused._dot_product_attention_fwd_p_wrapper: _forward,  # pyright: ignore[reportPrivateUsage]
        fused._dot_product_attention_bwd_p_wrapper: _backward,  # pyright: ignore[reportPrivateUsage]
    }
    with pytest.MonkeyPatch.context() as patch, jax_compat.without_devices():
        patch.setattr(kernels, "GPU", "cpu")
        for check in ("check_layout", "check_is_flash_attention"):
            patch.setattr(fused, check, lambda *_, **__: None)
        for primitive, function in functions.items():
            lowered = mlir.lower_fun(function, multiple_results=True)
            mlir.register_lowering(primitive, lowered, platform="cpu")
        try:
            yield
        finally:
            for primitive in functions:
                del _LOWERINGS["cpu"][primitive]
