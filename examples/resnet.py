"""A ResNet for small images in Flax Linen, with batch normalisation.

The running statistics are state that the forward pass changes, beside the parameters.
ResNet-18 for CIFAR is ``width=64 size=32 classes=10``.
"""

import functools
from typing import Any

import example_data
import example_training
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut."""

    channels: int
    stride: int
    dtype: str

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype
        )
        stride = (self.stride, self.stride)
        y = nn.relu(norm()(conv(self.channels, (3, 3), stride)(x)))
        y = conv(self.channels, (3, 3))(y)
        y = norm(scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = norm(name="norm_shortcut")(
                conv(self.channels, (1, 1), stride, name="conv_shortcut")(x)
            )
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images (batch, size, size, 3) to logits (batch, classes)."""

    stages: int
    blocks: int
    width: int
    classes: int
    dtype: str

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(self.width, (3, 3), use_bias=False, dtype=self.dtype)(images)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(x)
        x = nn.relu(x)
        for stage in range(self.stages):
            for block in range(self.blocks):
                x = ResidualBlock(
                    self.width * 2**stage,
                    stride=2 if stage > 0 and block == 0 else 1,
                    dtype=self.dtype,
                    name=f"stage_{stage}_block_{block}",
                )(x)
        return nn.Dense(self.classes, name="head")(x.mean(axis=(1, 2)))


class TrainState(train_state.TrainState):
    """The usual state, with the running statistics of batch normalisation."""

    batch_stats: Any


def create_state(rng, model, optimizer, size):
    """Random parameters, and empty statistics and optimizer state."""
    variables = model.init(rng, jnp.zeros((1, size, size, 3)))
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optimizer,
    )


def train_step(state, batch):
    """One step of classification."""

    def loss_fn(params):
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["images"],
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["labels"]
        )
        return losses.mean(), updates["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


def training(
    stages: int = 4,
    blocks: int = 2,
    width: int = 16,
    size: int = 32,
    classes: int = 8,
    batch: int = 32,
    dtype: str = "float32",
    learning_rate: float = 0.03,
    warmup: int = 5,
    steps: int = 1000,
) -> example_training.Training:
    """A ResNet that learns to tell the orientation of stripes."""
    model = ResNet(
        stages=stages, blocks=blocks, width=width, classes=classes, dtype=dtype
    )
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, steps)
    tx = optax.chain(
        optax.add_decayed_weights(5e-4),
        optax.sgd(schedule, momentum=0.9, nesterov=True),
    )
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
