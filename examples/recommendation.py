"""A recommendation model in Flax Linen: embedding tables, towers, interactions.

As in DLRM (Naumov et al., 2019, arXiv 1906.00091): the bottom tower makes a vector of
the dense features, a table makes one of each sparse id, the top tower reads the
products of all pairs of them and says how likely a click is. Tables differ in size,
from ``rows`` down, each half of the one before. Of a large table a batch touches few
rows.

The ids follow Zipf's law, and a planted teacher tells the labels: there is something to
learn, and nothing is downloaded.
"""

import functools

import example_data
import example_training
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state


class Tower(nn.Module):
    """Dense layers, each with a ReLU but the last one where ``logits`` is true."""

    widths: tuple[int, ...]
    logits: bool = False

    @nn.compact
    def __call__(self, x):
        for i, width in enumerate(self.widths):
            x = nn.Dense(width, name=f"dense_{i}")(x)
            if not self.logits or i + 1 < len(self.widths):
                x = nn.relu(x)
        return x


class Recommender(nn.Module):
    """Features (batch, dense) and ids (batch, tables) to logits (batch,)."""

    sizes: tuple[int, ...]  # rows of each table
    width: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]

    @nn.compact
    def __call__(self, dense, ids):
        x = Tower((*self.bottom, self.width), name="bottom")(dense)
        init = nn.initializers.normal(self.width**-0.5)
        vectors = [x] + [
            nn.Embed(rows, self.width, embedding_init=init, name=f"table_{t}")(
                ids[:, t]
            )
            for t, rows in enumerate(self.sizes)
        ]
        stacked = jnp.stack(vectors, axis=1)  # b: row, i, j: vector, d: column
        products = jnp.einsum("bid,bjd->bij", stacked, stacked)
        first, second = np.tril_indices(len(vectors), -1)
        pairs = products[:, first, second]
        y = jnp.concatenate([x, pairs], axis=1)
        return Tower((*self.top, 1), logits=True, name="top")(y)[:, 0]


def create_state(rng, model, optimizer, dense):
    """Random parameters and an empty optimizer state."""
    ids = jnp.zeros((1, len(model.sizes)), jnp.int32)
    params = model.init(rng, jnp.zeros((1, dense)), ids)["params"]
    return train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optimizer
    )


def train_step(state, batch):
    """One step on the cross-entropy of clicks."""

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["dense"], batch["ids"])
        return optax.sigmoid_binary_cross_entropy(logits, batch["clicks"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def training(
    tables: int = 8,
    rows: int = 16384,
    width: int = 32,
    dense: int = 13,
    hidden: int = 128,
    batch: int = 1024,
    optimizer: str = "adam",
) -> example_training.Training:
    """A model of clicks that learns what a planted teacher prefers."""
    sizes = tuple(max(rows >> t, 64) for t in range(tables))
    model = Recommender(
        sizes=sizes, width=width, bottom=(hidden,), top=(hidden, hidden)
    )
    tx = example_training.make_optimizer(optimizer)
    return example_training.Training(
        step=train_step,
        create_state=functools.partial(
            create_state, model=model, optimizer=tx, dense=dense
        ),
        batches=functools.partial(example_data.click_batches, batch, sizes, dense),
        batch=example_data.click_shapes(batch, sizes, dense),
    )


workload = example_training.workload_of(training)


def main():
    """Trains, as the command line says."""
    example_training.main(training)


if __name__ == "__main__":
    main()
