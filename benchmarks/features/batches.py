"""Features: kinds of batches, states and keys, and operations on a batch in a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from feature import (
    LABELS,
    WIDTH,
    Feature,
    X,
    Y,
    descent,
    layers,
    loss_of,
    numbers,
    updated,
)


def features() -> Iterator[Feature]:
    """The features of this module."""
    for name, (loss, batch) in BATCHES.items():
        yield Feature(f"batch: {name}", descent(loss), layers, batch)
    yield Feature("batch: augmented images", _augmented, _keyed, (_pixels(), LABELS))
    yield Feature("batch: key of the step", _keyed_step, layers, (X, Y, _key(0)))
    yield Feature("batch: raw key of the step", _keyed_step, layers, (X, Y, _raw(0)))
    rate = (X, Y, 0.1)
    yield Feature("batch: a rate as a Python number", _rated, layers, rate)
    yield Feature(
        "batch: fields by name", descent(_named), layers, (Fields(X, Y, None),)
    )
    yield Feature("batch: dataclass", descent(_named), layers, (Record(X, Y, None),))
    yield Feature("state: 8 bits", _small, _small_state, (X, Y))
    yield Feature(
        "state: tuple by name", _fields, lambda: Fields(layers(), 0, None), (X, Y)
    )
    yield Feature("state: history", _history, _history_state, (X, Y))
    yield Feature("metrics: confusion", _confused, layers, (X, LABELS))
    yield Feature("metrics: of rows", _of_rows, layers, (X, Y))
    yield Feature("metrics: none", _silent, layers, (X, Y))
    yield Feature("step: under jit that donates", _donating(), layers, (X, Y))
    yield Feature("step: method of an object", Trainer(0.1).step, layers, (X, Y))


class Fields(NamedTuple):
    """A named tuple as batch or state."""

    x: Any
    y: Any
    mask: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    """A batch as a dataclass."""

    x: Any
    y: Any
    mask: Any


def _pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (16, 4, 2, 1)).astype(np.uint8)


def _of_labels(weights: Any, x: Any, labels: Any) -> Any:
    hot = _smooth(jax.nn.one_hot(labels, WIDTH))
    return -jnp.mean(jnp.sum(hot * jax.nn.log_softmax(_hidden(weights, x)), 1))


def _smooth(hot: Any) -> Any:
    return 0.9 * hot + 0.1 / hot.shape[-1]


def _hidden(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def _image(weights: Any, image: Any, labels: Any) -> Any:
    x = (image.astype(jnp.float32) / 255 - 0.5) / 0.25
    return _of_labels(weights, x.reshape(x.shape[0], -1), labels)


def _dict(weights: Any, batch: Any) -> Any:
    inputs = batch["inputs"]
    assert inputs["mask"] is None
    return loss_of(weights, inputs["x"], batch["target"][0])


def _named(weights: Any, batch: Any) -> Any:
    assert batch.mask is None
    return loss_of(weights, batch.x, batch.y)


def _packed(weights: Any, tokens: Any, segments: Any) -> Any:
    """Packed sequences: attention within a segment, and loss where the segment
    continues.
    """
    x = jnp.stack([jnp.sin(tokens * (k + 1.0)) for k in range(WIDTH)], -1)
    same = segments[:, :, None] == segments[:, None, :]
    scores = jnp.where(same, (x @ weights[0]) @ jnp.swapaxes(x, 1, 2), -1e9)
    logits = _hidden(weights[1:], jax.nn.softmax(scores) @ x)[:, :-1]
    on = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    wanted = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], 2)
    return -jnp.sum(wanted[..., 0] * on) / jnp.sum(on)


def _padded(weights: Any, x: Any, lengths: Any, y: Any) -> Any:
    """Sequences of unequal length: the last output of each sequence counts."""

    def cell(h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ weights[0] + h @ weights[1])
        return h, h

    start = jnp.zeros((x.shape[0], WIDTH))
    _, out = jax.lax.scan(cell, start, jnp.swapaxes(x, 0, 1))
    last = jnp.swapaxes(out, 0, 1)[jnp.arange(x.shape[0]), lengths - 1]
    return loss_of(weights[2:], last, y)


def _weighted(weights: Any, x: Any, y: Any, rows: Any) -> Any:
    errors = jnp.mean((_hidden(weights, x) - y) ** 2, 1)
    return jnp.sum(errors * rows / jnp.sum(rows))


_RNG = np.random.default_rng(3)
_TOKENS = _RNG.integers(0, WIDTH, (16, 6)).astype(np.int32)
_SEGMENTS = np.sort(_RNG.integers(0, 3, (16, 6)), 1).astype(np.int32)
_LENGTHS = _RNG.integers(1, 5, 16).astype(np.int32)

BATCHES = {
    "uint8 images": (_image, (_pixels(), LABELS)),
    "int8 labels": (_of_labels, (X, LABELS.astype(np.int8))),
    "float16": (loss_of, (X.astype(np.float16), Y.astype(np.float16))),
    "dict with none": (_dict, ({"inputs": {"x": X, "mask": None}, "target": (Y,)},)),
    "packed sequences": (_packed, (_TOKENS, _SEGMENTS)),
    "padded sequences": (_padded, (numbers(4, 16, 4, WIDTH), _LENGTHS, Y)),
    "weights of rows": (_weighted, (X, Y, np.abs(Y[:, 0]))),
    "rows that devices do not divide": (loss_of, (X[:6], Y[:6])),
    "sparse ids": (
        lambda w, ids, y: loss_of(
            w, jnp.zeros(y.shape).at[jnp.arange(ids.shape[0]), ids].add(1.0), y
        ),
        (LABELS, Y),
    ),
}


def _key(seed: int) -> Any:
    return jax.random.key(seed)


def _raw(seed: int) -> Any:
    return jax.random.PRNGKey(seed)


def _keyed() -> Any:
    return layers(), jax.random.key(0)


def _augmented(state: Any, image: Any, labels: Any) -> Any:
    """Crops and flips, drawn for each row."""
    weights, key = state
    key, crop, flip = jax.random.split(key, 3)

    def one(image: Any, key: Any) -> Any:
        padded = jnp.pad(image, ((1, 1), (1, 1), (0, 0)))
        at = jax.random.randint(key, (2,), 0, 3)
        return jax.lax.dynamic_slice(padded, (at[0], at[1], 0), image.shape)

    image = jax.vmap(one)(image, jax.random.split(crop, image.shape[0]))
    turned = jax.random.bernoulli(flip, 0.5, (image.shape[0], 1, 1, 1))
    image = jnp.where(turned, image[:, :, ::-1], image)
    weights, metrics = descent(_image)(weights, image, labels)
    return (weights, key), metrics


def _keyed_step(weights: Any, x: Any, y: Any, key: Any) -> Any:
    keep = jax.random.bernoulli(key, 0.8, x.shape)
    return descent(loss_of)(weights, x * keep, y)


def _rated(weights: Any, x: Any, y: Any, rate: Any) -> Any:
    loss, gradient = jax.value_and_grad(loss_of)(weights, x, y)
    return updated(weights, gradient, rate), {"loss": loss, "rate": rate}


def _small_state() -> Any:
    scales = [jnp.max(jnp.abs(w)) / 127 for w in layers()]
    small = [jnp.round(w / s) for w, s in zip(layers(), scales, strict=True)]
    return [w.astype(jnp.int8) for w in small], scales


def _small(state: Any, x: Any, y: Any) -> Any:
    """Weights that are stored in 8 bits."""
    small, scales = state
    whole = [w.astype(jnp.float32) * s for w, s in zip(small, scales, strict=True)]
    loss, gradient = jax.value_and_grad(loss_of)(whole, x, y)
    whole = updated(whole, gradient)
    scales = [jnp.max(jnp.abs(w)) / 127 for w in whole]
    small = [jnp.floor(w / s) for w, s in zip(whole, scales, strict=True)]
    return ([w.astype(jnp.int8) for w in small], scales), {"loss": loss}


def _fields(state: Any, x: Any, y: Any) -> Any:
    loss, gradient = jax.value_and_grad(loss_of)(state.x, x, y)
    return state._replace(x=updated(state.x, gradient), y=state.y + 1), {"loss": loss}


def _history_state() -> Any:
    return layers(), jnp.zeros(4), jnp.zeros((), jnp.int32)


def _history(state: Any, x: Any, y: Any) -> Any:
    """Losses of the last steps; a step is skipped if its loss jumps."""
    weights, losses, n = state
    loss, gradient = jax.value_and_grad(loss_of)(weights, x, y)
    jumps = loss > 2 * jnp.sum(losses) / jnp.maximum(n, 1)
    new = updated(weights, gradient)
    weights = jax.lax.cond((n > 0) & jumps, lambda: weights, lambda: new)
    losses = jax.lax.dynamic_update_index_in_dim(losses, loss, n % 4, 0)
    return (weights, losses, n + 1), {"median": jnp.median(losses)}


def _confused(weights: Any, x: Any, labels: Any) -> Any:
    def loss(weights: Any) -> Any:
        logits = _hidden(weights, x)
        return _of_labels(weights, x, labels), logits

    (value, logits), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
    found = jnp.argmax(logits, 1)
    table = jnp.zeros((WIDTH, WIDTH), jnp.int32).at[labels, found].add(1)
    order = jnp.argsort(logits[:, 0])
    positive = (labels == 0)[order]
    area = jnp.sum(jnp.where(positive, jnp.cumsum(~positive), 0))
    right = jnp.mean(found == labels)
    metrics = {"loss": value, "table": table, "area": area, "right": right}
    return updated(weights, gradient), metrics


def _of_rows(weights: Any, x: Any, y: Any) -> Any:
    loss, gradient = jax.value_and_grad(loss_of)(weights, x, y)
    errors = jnp.mean((_hidden(weights, x) - y) ** 2, 1)
    worst, where = jax.lax.top_k(errors, 3)
    metrics = {"loss": loss, "errors": errors, "worst": worst, "where": where}
    return updated(weights, gradient), metrics


def _silent(weights: Any, x: Any, y: Any) -> Any:
    return updated(weights, jax.grad(loss_of)(weights, x, y)), None


def _donating() -> Any:
    return jax.jit(descent(loss_of), donate_argnums=0)


class Trainer:
    """An object whose method is the step."""

    def __init__(self, rate: float) -> None:
        """Keeps the rate."""
        self.rate = rate

    def step(self, weights: Any, x: Any, y: Any) -> Any:
        """One step."""
        return descent(loss_of, self.rate)(weights, x, y)
