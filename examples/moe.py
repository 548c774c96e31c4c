"""A transformer with mixture-of-experts MLPs in Flax Linen, with a ``TrainState``.

Each token goes to its two best experts, each of which takes a limited number of
tokens from each sequence. Einsums dispatch and combine the tokens, as in GShard
(Lepikhin et al., 2020, algorithm 1); the load-balancing loss is that of the Switch
Transformer (Fedus et al., 2021, equation 4).
"""

import functools

import example_data
import example_training
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state

INIT = nn.initializers.normal(0.02)


def route(gates, capacity):
    """Sends each token to its two best experts while they have room.

    Args:
        gates: the router's probabilities, (batch, seq, experts).
        capacity: how many tokens of a sequence an expert takes.

    Returns:
        The weight of each token in each slot of each expert, (batch, seq, experts,
        capacity), and the load-balancing loss.
    """
    experts = gates.shape[-1]
    weights, chosen = jax.lax.top_k(gates, 2)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    masks = jax.nn.one_hot(chosen, experts)  # (batch, seq, 2, experts)
    first, second = masks[..., 0, :], masks[..., 1, :]
    # All first choices come before the second ones in the queue of an expert.
    first_slot = jnp.cumsum(first, axis=1) - 1
    second_slot = jnp.cumsum(second, axis=1) - 1 + first.sum(axis=1, keepdims=True)
    combine = 0
    for i, (mask, slot) in enumerate([(first, first_slot), (second, second_slot)]):
        slots = jax.nn.one_hot(slot.astype(jnp.int32), capacity)  # zero when full
        combine += weights[..., i, None, None] * mask[..., None] * slots
    load, importance = first.mean(axis=(0, 1)), gates.mean(axis=(0, 1))
    return combine, experts * jnp.sum(load * importance)


class ExpertMLP(nn.Module):
    """An MLP for each expert; returns its output and the load-balancing loss."""

    experts: int
    ffn: int
    capacity_factor: float
    dtype: str

    @nn.compact
    def __call__(self, x):
        seq, d_model = x.shape[1:]
        logits = nn.Dense(
            self.experts, use_bias=False, kernel_init=INIT, name="router"
        )(x.astype(jnp.float32))
        capacity = max(1, int(2 * seq * self.capacity_factor / self.experts))
        combine, balance = route(nn.softmax(logits), capacity)
        up = self.param("up", INIT, (self.experts, d_model, self.ffn))
        down = self.param("down", INIT, (self.experts, self.ffn, d_model))
        # b: sequence, s: token, e: expert, c: slot, d: d_model, f: ffn
        combine = combine.astype(self.dtype)
        dispatch = (combine > 0).astype(self.dtype)
        x = jnp.einsum("bsec,bsd->ebcd", dispatch, x)
        x = nn.gelu(jnp.einsum("ebcd,edf->ebcf", x, up.astype(self.dtype)))
        x = jnp.einsum("ebcf,efd->ebcd", x, down.astype(self.dtype))
        return jnp.einsum("bsec,ebcd->bsd", combine, x), balance


class MLP(nn.Module):
    """The usual MLP; its load-balancing loss is zero."""

    ffn: int
    dtype: str

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(self.ffn, dtype=self.dtype, kernel_init=INIT, name="up")(x)
        y = nn.gelu(y)
        y = nn.Dense(x.shape[-1], dtype=self.dtype, kernel_init=INIT, name="down")(y)
        return y, 0.0


class Transformer(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocab).

    Every second layer has experts.
    """

    layers: int
    d_model: int
    heads: int
    experts: int
    ffn: int
    capacity_factor: float
    vocab: int
    max_seq: int
    dtype: str

    @nn.compact
    def __call__(self, tokens):
        seq = tokens.shape[1]
        mask = nn.make_causal_mask(jnp.ones((1, seq)), dtype=bool)
        embed = nn.Embed(
            self.vocab, self.d_model, dtype=self.dtype, embedding_init=INIT, name="wte"
        )
        positions = self.param("wpe", INIT, (self.max_seq, self.d_model))
        x = embed(tokens) + positions[:seq].astype(self.dtype)
        balance = 0.0
        for i in range(self.layers):
            y = nn.LayerNorm(dtype=self.dtype, name=f"ln_1_{i}")(x)
            x += nn.MultiHeadDotProductAttention(
                self.heads, dtype=self.dtype, kernel_init=INIT, name=f"attention_{i}"
            )(y, mask=mask)
            y = nn.LayerNorm(dtype=self.dtype, name=f"ln_2_{i}")(x)
            y, block_balance = self.mlp(i)(y)
            x, balance = x + y, balance + block_balance
        x = nn.LayerNorm(dtype=self.dtype, name="ln_f")(x)
        return embed.attend(x).astype(jnp.float32), balance

    def mlp(self, layer):
        """The MLP of a layer: dense, experts, dense, experts, ..."""
        if layer % 2 == 0:
            return MLP(self.ffn, self.dtype, name=f"mlp_{layer}")
        return ExpertMLP(
            self.experts,
            self.ffn,
            self.capacity_factor,
            self.dtype,
            name=f"experts_{layer}",
        )


def create_state(rng, model, optimizer):
    """Random parameters and an empty optimizer state."""
    params = model.init(rng, jnp.zeros((1, model.max_seq), jnp.int32))["params"]
    return train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optimizer
    )


def train_step(state, batch):
    """One step of next-token prediction that also balances the experts."""

    def loss_fn(params):
        logits, balance = state.apply_fn({"params": params}, batch["inputs"])
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["targets"]
        )
        return losses.mean() + 0.01 * balance

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def training(
    layers: int = 4,
    d_model: int = 128,
    heads: int = 8,
    experts: int = 8,
    ffn: int = 512,
    capacity_factor: float = 1.25,
    seq: int = 64,
    batch: int = 16,
    vocab: int = 256,
    dtype: str = "float32",
    optimizer: str = "adamw",
    clip: float = 1.0,
) -> example_training.Training:
    """A mixture of experts that learns the text that ships with Python."""
    model = Transformer(
        layers=layers,
        d_model=d_model,
        heads=heads,
        experts=experts,
        ffn=ffn,
        capacity_factor=capacity_factor,
        vocab=vocab,
        max_seq=seq,
        dtype=dtype,
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
