"""A Llama in Flax Linen: RMS norm, rotary positions, SwiGLU, grouped-query attention.

The step takes and returns plain trees, ``(params, opt_state, batch)``. Llama 3 8B is
``layers=32 d_model=4096 heads=32 kv_heads=8 ffn=14336 seq=8192 vocab=128256``.
"""

import functools

import example_attention
import example_data
import example_training
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

INIT = nn.initializers.normal(0.02)


def rotate(x):
    """Rotary position embedding of x (batch, seq, heads, head_dim)."""
    half = x.shape[-1] // 2
    frequency = 500_000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x.dtype)


class Attention(nn.Module):
    """Causal attention in which groups of heads share their keys and values."""

    heads: int
    kv_heads: int
    dtype: str
    attention: str

    @nn.compact
    def __call__(self, x):
        batch, seq, d_model = x.shape
        head_dim = d_model // self.heads
        dense = functools.partial(
            nn.DenseGeneral, use_bias=False, dtype=self.dtype, kernel_init=INIT
        )
        q = rotate(dense((self.heads, head_dim), name="query")(x))
        k = rotate(dense((self.kv_heads, head_dim), name="key")(x))
        v = dense((self.kv_heads, head_dim), name="value")(x)
        out = dense(d_model, axis=(-2, -1), name="out")
        # The parameters do not depend on the kernel, which the host may not have.
        if self.attention != "plain" and not self.is_initializing():
            return out(example_attention.attend(self.attention, q, k, v))
        # k: the shared key and value head, g: the query head within its group
        q = q.reshape(batch, seq, self.kv_heads, -1, head_dim)
        scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k) * head_dim**-0.5
        causal = jnp.tril(jnp.ones((seq, seq), bool))
        scores = jnp.where(causal, scores.astype(jnp.float32), -1e30)
        weights = nn.softmax(scores).astype(self.dtype)
        y = jnp.einsum("bkgqs,bskd->bqkgd", weights, v)
        y = y.reshape(batch, seq, self.heads, head_dim)
        return out(y)


class Block(nn.Module):
    """Attention and a gated MLP."""

    heads: int
    kv_heads: int
    ffn: int
    dtype: str
    attention: str

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(
            nn.Dense, use_bias=False, dtype=self.dtype, kernel_init=INIT
        )
        y = nn.RMSNorm(dtype=self.dtype, name="attention_norm")(x)
        x = x + Attention(
            self.heads, self.kv_heads, self.dtype, self.attention, name="attention"
        )(y)
        y = nn.RMSNorm(dtype=self.dtype, name="mlp_norm")(x)
        y = nn.silu(dense(self.ffn, name="gate")(y)) * dense(self.ffn, name="up")(y)
        return x + dense(x.shape[-1], name="down")(y)


class Llama(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocab)."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    remat: bool
    dtype: str
    attention: str

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(
            self.vocab, self.d_model, dtype=self.dtype, embedding_init=INIT, name="wte"
        )(tokens)
        block = nn.remat(Block) if self.remat else Block
        for i in range(self.layers):
            x = block(
                self.heads,
                self.kv_heads,
                self.ffn,
                self.dtype,
                self.attention,
                name=f"block_{i}",
            )(x)
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        logits = nn.Dense(
            self.vocab,
            use_bias=False,
            dtype=self.dtype,
            kernel_init=INIT,
            name="head",
        )(x)
        return logits.astype(jnp.float32)


def create_state(rng, model, optimizer):
    """Random parameters and an empty optimizer state."""
    params = model.init(rng, jnp.zeros((1, 2), jnp.int32))["params"]
    return params, optimizer.init(params)


def make_train_step(model, optimizer):
    """One step of next-token prediction, between plain trees."""

    def train_step(params, opt_state, batch):
        def loss_fn(params):
            logits = model.apply({"params": params}, batch["inputs"])
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits, batch["targets"]
            )
            return losses.mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step


def training(
    layers: int = 4,
    d_model: int = 128,
    heads: int = 16,
    kv_heads: int = 8,
    ffn: int = 352,
    seq: int = 64,
    batch: int = 16,
    vocab: int = 256,
    remat: bool = False,
    dtype: str = "float32",
    optimizer: str = "adamw",
    clip: float = 1.0,
    attention: str = "plain",
) -> example_training.Training:
    """A Llama that learns the text that ships with Python, byte by byte."""
    example_attention.check(attention)
    model = Llama(
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        remat=remat,
        dtype=dtype,
        attention=attention,
    )
    tx = example_training.make_optimizer(optimizer, clip)
    return example_training.Training(
        step=make_train_step(model, tx),
        create_state=functools.partial(create_state, model=model, optimizer=tx),
        batches=functools.partial(example_data.text_batches, batch, seq),
        batch=example_data.text_shapes(batch, seq),
    )


workload = example_training.workload_of(training)


def main():
    """Trains, as the command line says."""
    example_training.main(training)


if __name__ == "__main__":
    main()
