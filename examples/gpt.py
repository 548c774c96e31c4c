"""A decoder-only GPT in Flax Linen, with a ``TrainState``.

GPT-3 175B is ``layers=96 d_model=12288 heads=96 seq=2048 vocab=50257``.
"""

import functools

import example_attention
import example_data
import example_training
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state


class Block(nn.Module):
    """Attention and MLP, each with layer normalisation before it."""

    d_model: int
    heads: int
    dropout: float
    dtype: str
    attention: str

    @nn.compact
    def __call__(self, x, mask):
        init = nn.initializers.normal(0.02)
        dropout = nn.Dropout(self.dropout, deterministic=False)
        y = nn.LayerNorm(dtype=self.dtype, name="ln_1")(x)
        y = nn.MultiHeadDotProductAttention(
            self.heads,
            dtype=self.dtype,
            kernel_init=init,
            dropout_rate=self.dropout,
            deterministic=self.dropout == 0,
            attention_fn=self.attention_fn(),
            name="attention",
        )(y, mask=mask)
        x = x + dropout(y)
        y = nn.LayerNorm(dtype=self.dtype, name="ln_2")(x)
        y = nn.Dense(4 * self.d_model, dtype=self.dtype, kernel_init=init, name="up")(y)
        y = nn.gelu(y)
        y = nn.Dense(self.d_model, dtype=self.dtype, kernel_init=init, name="down")(y)
        return x + dropout(y), None

    def attention_fn(self):
        """The attention between queries, keys and values."""
        # The parameters do not depend on the kernel, which the host may not have.
        if self.attention == "plain" or self.is_initializing():
            return nn.dot_product_attention

        def attend(query, key, value, **options):
            del options  # the causal mask is the kernel's own
            return example_attention.attend(self.attention, query, key, value)

        return attend


class GPT(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocab)."""

    layers: int
    d_model: int
    heads: int
    vocab: int
    max_seq: int
    dropout: float
    scan: bool
    remat: bool
    dtype: str
    attention: str

    @nn.compact
    def __call__(self, tokens):
        init = nn.initializers.normal(0.02)
        seq = tokens.shape[1]
        embed = nn.Embed(
            self.vocab, self.d_model, dtype=self.dtype, embedding_init=init, name="wte"
        )
        positions = self.param("wpe", init, (self.max_seq, self.d_model))
        x = embed(tokens) + positions[:seq].astype(self.dtype)
        x = nn.Dropout(self.dropout, deterministic=False)(x)
        x = self.blocks(x, nn.make_causal_mask(jnp.ones((1, seq)), dtype=bool))
        x = nn.LayerNorm(dtype=self.dtype, name="ln_f")(x)
        return embed.attend(x).astype(jnp.float32)

    def blocks(self, x, mask):
        """The layers one after the other, or as one scanned layer."""
        block = nn.remat(Block, prevent_cse=not self.scan) if self.remat else Block
        arguments = (
            self.d_model,
            self.heads,
            self.dropout,
            self.dtype,
            self.attention,
        )
        if not self.scan:
            for i in range(self.layers):
                x, _ = block(*arguments, name=f"block_{i}")(x, mask)
            return x
        stacked = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=self.layers,
        )
        return stacked(*arguments, name="blocks")(x, mask)[0]


class TrainState(train_state.TrainState):
    """The usual state, with the key of dropout when there is any."""

    key: jax.Array | None = None


def create_state(rng, model, optimizer):
    """Random parameters and an empty optimizer state."""
    init_key, dropout_key = jax.random.split(rng)
    params = model.init(init_key, jnp.zeros((1, model.max_seq), jnp.int32))["params"]
    return TrainState.create(
        apply_fn=model.apply,
        params=params,
        tx=optimizer,
        key=dropout_key if model.dropout else None,
    )


def train_step(state, batch):
    """One step of next-token prediction."""
    rngs = {}
    if state.key is not None:
        rngs["dropout"] = jax.random.fold_in(state.key, state.step)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["inputs"], rngs=rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["targets"]
        )
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def training(
    layers: int = 4,
    d_model: int = 128,
    heads: int = 8,
    seq: int = 64,
    batch: int = 16,
    vocab: int = 256,
    scan: bool = False,
    remat: bool = False,
    dtype: str = "float32",
    optimizer: str = "adamw",
    clip: float = 0.0,
    dropout: float = 0.0,
    attention: str = "plain",
) -> example_training.Training:
    """A GPT that learns the text that ships with Python, byte by byte."""
    example_attention.check(attention)
    if dropout and attention != "plain":
        raise ValueError("dropout inside attention needs attention='plain'.")
    model = GPT(
        layers=layers,
        d_model=d_model,
        heads=heads,
        vocab=vocab,
        max_seq=seq,
        dropout=dropout,
        scan=scan,
        remat=remat,
        dtype=dtype,
        attention=attention,
    )
    tx = example_training.make_optimizer(optimizer, clip)
    return example_training.Training(
        step=train_step,
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
