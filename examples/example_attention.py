"""Causal self-attention as XLA computes it, or as a fused kernel.

``plain`` runs everywhere, ``cudnn`` and ``pallas`` on GPUs, ``pallas_tpu`` and
``splash`` on TPUs; all of them can be planned on any host. cuDNN wants 16-bit arrays,
and the TPU kernels a sequence of at least 128.
"""

import jax
import jax.numpy as jnp

KINDS = ("plain", "cudnn", "pallas", "pallas_tpu", "splash")


def check(kind):
    """Raises an error unless there is an attention of this kind."""
    if kind not in KINDS:
        raise ValueError(f"attention must be one of {', '.join(KINDS)}: {kind!r}.")


def attend(kind, query, key, value):
    """Attention of (batch, seq, heads, head_dim); key heads may be fewer."""
    scale = query.shape[-1] ** -0.5
    if kind in ("plain", "cudnn"):
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            implementation="xla" if kind == "plain" else "cudnn",
        )
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    if kind == "pallas":
        from jax.experimental.pallas.ops.gpu.attention import mha

        return mha(query, key, value, None, sm_scale=scale, causal=True)
    heads_first = [x.swapaxes(1, 2) for x in (query, key, value)]
    attention = _splash if kind == "splash" else _flash
    return attention(*heads_first, scale).swapaxes(1, 2)


def _flash(query, key, value, scale):
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    return flash_attention(query, key, value, causal=True, sm_scale=scale)


def _splash(query, key, value, scale):
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    heads, seq = query.shape[1:3]
    causal = splash_attention_mask.CausalMask((seq, seq))
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([causal] * heads),
        head_shards=1,
        q_seq_shards=1,
    )
    return jax.vmap(kernel)(query * scale, key, value)
