"""A gradient that is summed through a codec, and its state before the first step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from autopar.compression.codecs.codec import Codec, chunk_elements
from autopar.compression.feedback import Feedback
from autopar_errors import InputError

State = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Gradient:
    """The way in which one gradient is summed.

    Attributes:
      name: of the parameter, for messages.
      shape: of the gradient on one device.
      codec: how it is sent.
      feedback: how the codec's error is fed back.
      scatter_dim: the dim of which worker i needs only the i-th part of the
        sum; None: all need the whole sum.
      seed: a number that no other gradient of the step has.
      dtype: in which the sum is read, as text; '': that of the partial.
    """

    name: str
    shape: tuple[int, ...]
    codec: Codec
    feedback: Feedback = dataclasses.field(default_factory=Feedback)
    scatter_dim: int | None = None
    seed: int = 0
    dtype: str = ""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def scatter(self) -> bool:
        """Whether each worker needs only its own part of the sum."""
        return self.scatter_dim is not None

    def chunk(self, workers: int) -> int:
        """Elements of one chunk."""
        return chunk_elements(self.codec, self.size, workers, scatter=self.scatter)


def check_gradient(gradient: Gradient, dtype: Any, workers: int) -> None:
    """Checks that a gradient can be summed as it says.

    Raises:
      InputError: it cannot; the message says why.
    """
    where = f"gradient {gradient.name!r} of shape {gradient.shape}"
    if not jnp.issubdtype(dtype, jnp.floating):
        raise InputError(
            f"{where}: only real floating-point gradients can be compressed, got "
            f"{jnp.dtype(dtype).name}; sum it with jax.lax.psum."
        )
    if workers < 1:
        raise InputError(f"{where}: needs at least one worker, got {workers}.")
    dim = gradient.scatter_dim
    if dim is not None:
        if not 0 <= dim < len(gradient.shape):
            raise InputError(f"{where}: there is no dim {dim} to scatter.")
        if gradient.shape[dim] % workers:
            raise InputError(
                f"{where}: dim {dim} does not divide into {workers} equal parts; "
                "scatter another dim, or use scatter_dim=None."
            )
    if gradient.size:
        problem = gradient.codec.check(gradient.shape, scatter=gradient.scatter)
        if problem:
            raise InputError(f"{where}: codec {gradient.codec.name}: {problem}")


def init_state(gradient: Gradient, workers: int) -> State:
    """The state of one worker before the first step.

    Returns:
      ``residual``: zeros of the gradient's shape in the feedback's dtype, or
      (); ``codec``: the state of the codec.
    """
    if not gradient.size:
        return {"residual": (), "codec": ()}
    codec = gradient.codec
    if gradient.scatter:
        codec = codec.for_scattered_sum()
    elements = workers * gradient.chunk(workers)
    residual: Any = ()
    if gradient.feedback.active:
        residual = jnp.zeros(gradient.shape, gradient.feedback.dtype)
    return {
        "residual": residual,
        "codec": codec.init(gradient.shape, elements, workers),
    }
