"""Data for the examples: text that ships with Python, and images made by a formula.

Nothing is downloaded. Both iterators are endless, and the same seed gives the same
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
