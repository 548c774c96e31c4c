"""A character language model with LSTM layers in Flax Linen, with a ``TrainState``."""

import functools

import example_data
import example_training
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state


class CharLSTM(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocab)."""

    layers: int
    d_model: int
    vocab: int
    dtype: str

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocab, self.d_model, dtype=self.dtype, name="embed")(tokens)
        for i in range(self.layers):
            wide = jnp.promote_types(self.dtype, jnp.float32)  # of its first carry, too
            cell = nn.OptimizedLSTMCell(
                self.d_model, dtype=self.dtype, param_dtype=wide
            )
            x = nn.RNN(cell, name=f"lstm_{i}")(x)
        return nn.Dense(self.vocab, dtype=self.dtype, name="head")(x)


def create_state(rng, model, optimizer):
    """Random parameters and an empty optimizer state."""
    params = model.init(rng, jnp.zeros((1, 2), jnp.int32))["params"]
    return train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optimizer
    )


def train_step(state, batch):
    """One step of next-character prediction."""

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["inputs"])
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["targets"]
        )
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def training(
    layers: int = 2,
    d_model: int = 256,
    seq: int = 64,
    batch: int = 16,
    vocab: int = 256,
    dtype: str = "float32",
    optimizer: str = "adamw",
    clip: float = 1.0,
) -> example_training.Training:
    """An LSTM that learns the text that ships with Python, byte by byte."""
    model = CharLSTM(layers=layers, d_model=d_model, vocab=vocab, dtype=dtype)
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
