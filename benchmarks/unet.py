"""A diffusion U-Net with attention, as a train step on abstract arrays.

Each level has two residual blocks. Levels below the first one also have attention. Each
level on the upward path also reads the results of the same level on the downward path
(skip connections). The step learns to predict the noise in an image. Parameters are
float32 and are cast where they are used; the optimizer is AdamW.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

BLOCKS = 2  # of each level, on the downward and on the upward path


class Residual(nn.Module):
    """Two convolutions with group normalisation; their input includes the diffusion
    time.
    """

    channels: int
    dtype: str

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        """Images (batch, height, width, channels) and time (batch, features)."""
        norm = functools.partial(nn.GroupNorm, 32, dtype=self.dtype)
        conv = functools.partial(nn.Conv, self.channels, (3, 3), dtype=self.dtype)
        y = conv()(nn.silu(norm()(x)))
        y += nn.Dense(self.channels, dtype=self.dtype)(nn.silu(time))[:, None, None]
        y = conv()(nn.silu(norm()(y)))
        if x.shape[-1] != self.channels:
            x = nn.Conv(self.channels, (1, 1), dtype=self.dtype)(x)
        return x + y


class Attention(nn.Module):
    """Attention among all pixels of an image."""

    heads: int
    dtype: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Images (batch, height, width, channels)."""
        batch, height, width, channels = x.shape
        y = nn.GroupNorm(32, dtype=self.dtype)(x).reshape(batch, -1, channels)
        y = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(y)
        return x + y.reshape(batch, height, width, channels)


class UNet(nn.Module):
    """Predicts the noise of images from noisy images and their times.

    Attributes:
      widths: channels of each level; the level of the largest images comes first.
      heads: of attention.
      dtype: dtype of the computation.
      remat: whether residual blocks are rematerialised in the backward pass.
    """

    widths: Sequence[int]
    heads: int
    dtype: str
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        """Images (batch, size, size, channels) and times (batch,)."""
        out, first = x.shape[-1], self.widths[0]
        residual = nn.remat(Residual) if self.remat else Residual
        rates = jnp.exp(-jnp.arange(first // 2) / (first // 2) * 9.2)
        angles = time[:, None] * rates
        told = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        told = nn.Dense(4 * first, dtype=self.dtype)(told)
        told = nn.Dense(4 * first, dtype=self.dtype)(nn.silu(told))
        x = nn.Conv(first, (3, 3), dtype=self.dtype)(x)
        skips = [x]
        for level, width in enumerate(self.widths):
            for _ in range(BLOCKS):
                x = residual(width, self.dtype)(x, told)
                x = Attention(self.heads, self.dtype)(x) if level else x
                skips.append(x)
            if level + 1 < len(self.widths):
                x = nn.Conv(width, (3, 3), (2, 2), dtype=self.dtype)(x)
                skips.append(x)
        x = residual(width, self.dtype)(x, told)
        for level, width in reversed(list(enumerate(self.widths))):
            for _ in range(BLOCKS + 1):
                x = jnp.concatenate([x, skips.pop()], -1)
                x = residual(width, self.dtype)(x, told)
                x = Attention(self.heads, self.dtype)(x) if level else x
            if level:
                x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
                x = nn.Conv(width, (3, 3), dtype=self.dtype)(x)
        x = nn.silu(nn.GroupNorm(32, dtype=self.dtype)(x))
        return nn.Conv(out, (3, 3), dtype=self.dtype)(x)


def train_step(
    *,
    batch: int,
    size: int = 32,
    widths: Sequence[int] = (128, 256, 512),
    heads: int = 8,
    dtype: str = "float32",
    remat: bool = False,
    optimizer: optax.GradientTransformation | None = None,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step ``(state, batch) -> (state, loss)`` and its abstract arguments.

    The default ``optimizer`` is AdamW.
    """
    model = UNet(tuple(widths), heads, dtype, remat)
    optimizer = optimizer or optax.adamw(1e-4)

    def loss_of(params: Any, given: dict[str, jax.Array]) -> jax.Array:
        part = jnp.exp(-given["time"])[:, None, None, None]
        x = part * given["images"] + (1 - part) * given["noise"]
        found = model.apply({"params": params}, x.astype(dtype), given["time"])
        return jnp.mean((found.astype(jnp.float32) - given["noise"]) ** 2)

    def step(state: Any, given: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], given)
        updates, moments = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": moments}, loss

    images = jax.ShapeDtypeStruct((batch, size, size, 4), jnp.float32)
    times = jax.ShapeDtypeStruct((batch,), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), images, times)["params"]
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    return step, (state, {"images": images, "noise": images, "time": times})
