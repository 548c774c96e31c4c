"""Data for the examples: text that ships with Python; images and clicks by a formula.

Nothing is downloaded. All iterators are endless, and the same seed gives the same
batches on every machine with the same Python.
"""

import functools
from collections.abc import Iterator
from pydoc_data import topics

import jax
import numpy as np

Batch = dict[str, np.ndarray]
BatchShapes = dict[str, jax.ShapeDtypeStruct]


@functools.cache
def text_tokens() -> np.ndarray:
    """The text of Python's language reference, one token for each byte (0 to 127)."""
    text = "\n".join(body for _, body in sorted(topics.topics.items()))
    return np.frombuffer(text.encode("ascii", "ignore"), np.uint8).astype(np.int32)


def text_batches(batch: int, seq: int, seed: int = 0) -> Iterator[Batch]:
    """Random windows of the text; the targets are the inputs one byte later."""
    tokens = text_tokens()
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(tokens) - seq, size=(batch, 1))
        windows = tokens[starts + np.arange(seq + 1)]
        yield {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def text_shapes(batch: int, seq: int) -> BatchShapes:
    """The shapes of what ``text_batches`` yields."""
    tokens = jax.ShapeDtypeStruct((batch, seq), np.int32)
    return {"inputs": tokens, "targets": tokens}


def image_batches(
    batch: int, size: int, classes: int, seed: int = 0
) -> Iterator[Batch]:
    """Noisy gratings; the label is the orientation of the stripes.

    Wavelength, phase and colour differ from image to image, so that no single pixel
    tells the label.
    """
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:size, 0:size] / size
    while True:
        labels = random.integers(0, classes, size=batch)
        angle = (np.pi * labels / classes)[:, None, None]
        waves = random.uniform(4, 6, size=(batch, 1, 1))
        phase = random.uniform(0, 2 * np.pi, size=(batch, 1, 1))
        along = x * np.cos(angle) + y * np.sin(angle)
        stripes = np.sin(2 * np.pi * waves * along + phase)
        colour = random.uniform(0.5, 1.0, size=(batch, 1, 1, 3))
        noise = random.normal(0, 0.3, size=(batch, size, size, 3))
        images = stripes[..., None] * colour + noise
        yield {"images": images.astype(np.float32), "labels": labels.astype(np.int32)}


def image_shapes(batch: int, size: int) -> BatchShapes:
    """The shapes of what ``image_batches`` yields."""
    return {
        "images": jax.ShapeDtypeStruct((batch, size, size, 3), np.float32),
        "labels": jax.ShapeDtypeStruct((batch,), np.int32),
    }


def zipf_ids(random: np.random.Generator, rows: int, count: int) -> np.ndarray:
    """Draws ids below ``rows``: id k has the probability log((k + 2) / (k + 1)) /
    log(rows + 1), which is Zipf's law for large k."""
    return ((rows + 1) ** random.random(count)).astype(np.int32) - 1


@functools.cache
def click_teacher(sizes: tuple[int, ...], dense: int) -> tuple[np.ndarray, ...]:
    """What the clicks depend on: a weight for each dense feature, a score for each row
    of each table. Their sum for a random sample has a standard deviation of about 4."""
    random = np.random.default_rng(0)
    weights = random.normal(0, 2.83 / dense**0.5, dense)
    scores = [random.normal(0, 2.83 / len(sizes) ** 0.5, rows) for rows in sizes]
    return weights, *scores


def click_batches(
    batch: int, sizes: tuple[int, ...], dense: int, seed: int = 0
) -> Iterator[Batch]:
    """Dense features, an id for each table by Zipf's law, and clicks.

    A planted logistic teacher says how likely a click is; it is the same for all seeds.
    """
    weights, *scores = click_teacher(sizes, dense)
    random = np.random.default_rng(seed)
    while True:
        features = random.normal(size=(batch, dense)).astype(np.float32)
        ids = np.stack([zipf_ids(random, rows, batch) for rows in sizes], axis=1)
        logits = features @ weights
        logits += sum(score[ids[:, t]] for t, score in enumerate(scores))
        clicks = random.random(batch) < 1 / (1 + np.exp(-logits))
        yield {"dense": features, "ids": ids, "clicks": clicks.astype(np.float32)}


def click_shapes(batch: int, sizes: tuple[int, ...], dense: int) -> BatchShapes:
    """The shapes of what ``click_batches`` yields."""
    return {
        "dense": jax.ShapeDtypeStruct((batch, dense), np.float32),
        "ids": jax.ShapeDtypeStruct((batch, len(sizes)), np.int32),
        "clicks": jax.ShapeDtypeStruct((batch,), np.float32),
    }
