"""A vision transformer in Flax Linen that tells the orientation of stripes.

ViT-L/16 is ``layers=24 d_model=1024 heads=16 size=224 patch=16 classes=1000``.
"""

import functools

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
    dtype: str

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(dtype=self.dtype, name="ln_1")(x)
        x += nn.MultiHeadDotProductAttention(
            self.heads, dtype=self.dtype, name="attention"
        )(y)
        y = nn.LayerNorm(dtype=self.dtype, name="ln_2")(x)
        y = nn.gelu(nn.Dense(4 * self.d_model, dtype=self.dtype, name="up")(y))
        return x + nn.Dense(self.d_model, dtype=self.dtype, name="down")(y)


class ViT(nn.Module):
    """Images (batch, size, size, 3) to logits (batch, classes)."""

    layers: int
    d_model: int
    heads: int
    patch: int
    classes: int
    remat: bool
    dtype: str

    @nn.compact
    def __call__(self, images):
        patch = (self.patch, self.patch)
        x = nn.Conv(
            self.d_model, patch, strides=patch, dtype=self.dtype, name="patches"
        )(images)
        x = x.reshape(x.shape[0], -1, self.d_model)
        init = nn.initializers.normal(0.02)
        positions = self.param("positions", init, x.shape[1:])
        x += positions.astype(self.dtype)
        block = nn.remat(Block) if self.remat else Block
        for i in range(self.layers):
            x = block(self.d_model, self.heads, self.dtype, name=f"block_{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="ln_f")(x).mean(axis=1)
        return nn.Dense(self.classes, name="head")(x)


def create_state(rng, model, optimizer, size):
    """Random parameters and an empty optimizer state."""
    params = model.init(rng, jnp.zeros((1, size, size, 3)))["params"]
    return train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optimizer
    )


def train_step(state, batch):
    """One step of classification."""

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["images"])
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["labels"]
        )
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def training(
    layers: int = 4,
    d_model: int = 128,
    heads: int = 8,
    size: int = 32,
    patch: int = 4,
    classes: int = 8,
    batch: int = 16,
    remat: bool = False,
    dtype: str = "float32",
    optimizer: str = "adamw",
    clip: float = 1.0,
) -> example_training.Training:
    """A vision transformer that learns to tell the orientation of stripes."""
    model = ViT(
        layers=layers,
        d_model=d_model,
        heads=heads,
        patch=patch,
        classes=classes,
        remat=remat,
        dtype=dtype,
    )
    tx = example_training.make_optimizer(optimizer, clip)
    return example_training.Training(
        step=train_step,
        create_state=functools.partial(
            create_state, model=model, optimizer=tx, size=size
        ),
        batches=functools.partial(example_data.image_batches, batch, size, classes),
        batch=example_data.image_shapes(batch, size),
    )


workload = example_training.workload_of(training)


def main():
    """Trains, as the command line says."""
    example_training.main(training)


if __name__ == "__main__":
    main()
