"""How a gradient is summed by a codec, with error feedback.

With error feedback, a worker sends in later steps what a codec did not send in a step.

Let ``e`` be a worker's residual, ``g`` its gradient and ``C`` the codec. In every step
a worker computes ``d = g + decay * e``, sends ``C(d)``, and keeps the new residual ``e
= d - C(d)`` (Seide et al., Interspeech 2014; Karimireddy et al., arXiv 1901.09847).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from autopar.compression.codecs.codec import Codec, chunk_elements
from autopar.compression.exchange import WorkerLinks
from autopar_errors import InputError

Kind = Literal["none", "residual"]
ResidualDtype = Literal["float32", "bfloat16"]

_KINDS = ("none", "residual")
_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, slots=True)
class Feedback:
    """Settings of error feedback.

    Attributes:
      kind: ``none``, or ``residual`` as in the module docstring.
      decay: factor of the old residual in each step. With a factor below 1, old errors
        lose weight, as in LoCo (arXiv 2407.04480), which uses 0.8.
      average_every: after every this many steps, a dense all-reduce averages the
        residuals over the workers (arXiv 2008.05823); 0: never.
      dtype: dtype of the residual between steps.
    """

    kind: Kind = "none"
    decay: float = 1.0
    average_every: int = 0
    dtype: ResidualDtype = "float32"

    def __post_init__(self) -> None:
        """Checks the fields."""
        if self.kind not in _KINDS:
            raise InputError(
                f"Feedback: kind must be one of {', '.join(_KINDS)}, got {self.kind!r}."
            )
        if self.dtype not in _DTYPES:
            raise InputError(
                f"Feedback: dtype must be one of {', '.join(_DTYPES)}, got "
                f"{self.dtype!r}."
            )
        if not (math.isfinite(self.decay) and 0.0 <= self.decay <= 1.0):
            raise InputError(f"Feedback: decay must be in 0..1, got {self.decay}.")
        if self.average_every < 0:
            raise InputError(
                f"Feedback: average_every must be 0 (never) or a number of steps, got "
                f"{self.average_every}."
            )
        if self.kind == "none" and self.average_every:
            raise InputError(
                "Feedback: average_every needs a residual; use kind='residual'."
            )

    @property
    def active(self) -> bool:
        """Whether there is error feedback."""
        return self.kind != "none"


# With error feedback the error of a codec is delayed, not lost. For a codec of relative
# error e, the convergence bound of SGD with feedback contains the factor (1 - d) / d^2
# with d = 1 - e^2, multiplied by the squares of the learning rate and of the smoothness
# constant (S. P. Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019, theorem
# II). The number below is an assumption about the product of these two.
FEEDBACK_DISCOUNT = 0.25

# The largest relative error (in the L2 norm) of a useful codec: with it, a step sends
# only a fifth of the gradient's squared norm. ``compression="auto"`` never chooses a
# codec with a larger error, and a run that uses one warns.
MOST_LOST = 0.9


def effective_error(error: float, *, feedback: bool) -> float:
    """The relative error of a codec that counts against an error budget.

    Error feedback sends a part of the error later, so that less of it counts.

    >>> effective_error(0.5, feedback=False)
    0.5
    >>> round(effective_error(0.5, feedback=True), 4)
    0.1667
    """
    if not feedback:
        return error
    return min(error, FEEDBACK_DISCOUNT * error / max(1e-9, 1 - error * error))


def with_residual(
    gradient: jax.Array, residual: jax.Array, feedback: Feedback
) -> jax.Array:
    """What a worker has to send, ``d`` (module docstring), float32 in the gradient's
    shape.
    """
    wanted = gradient.astype(jnp.float32)
    if not feedback.active or feedback.decay == 0.0:
        return wanted
    return wanted + feedback.decay * residual.astype(jnp.float32)


def average_due(step: jax.Array, every: int) -> jax.Array:
    """Whether this step ends with averaging the residuals, a bool scalar.

    Algorithm 1 of arXiv 2008.05823 averages at the start of step ``t`` when
    ``(t + 1) % p == 0``; the end of step ``step`` is the start of ``step + 1``.
    """
    return (step + 2) % every == 0


def next_residuals(
    feedbacks: Sequence[Feedback],
    errors: Sequence[jax.Array | None],
    links: WorkerLinks,
    step: jax.Array,
) -> list[Any]:
    """The residuals at the start of the next step; () for a gradient without a
    residual.

    If the step ends with averaging, one all-reduce averages all residuals with the same
    ``average_every``.

    Args:
      feedbacks: settings of error feedback for each gradient.
      errors: the error of each gradient, float32; None for a gradient without error
        feedback.
      links: the collectives over the workers.
      step: number of the step, an int32 scalar, the same on all workers.
    """
    out: list[Any] = [
        () if error is None or not feedback.active else error.astype(feedback.dtype)
        for feedback, error in zip(feedbacks, errors, strict=True)
    ]
    for every in sorted({f.average_every for f in feedbacks} - {0}):
        members = [k for k, f in enumerate(feedbacks) if f.average_every == every]
        averaged = jax.lax.cond(
            average_due(step, every),
            lambda own: _average(own, links),
            lambda own: own,
            [out[k] for k in members],
        )
        for k, residual in zip(members, averaged, strict=True):
            out[k] = residual
    return out


def _average(own: list[jax.Array], links: WorkerLinks) -> list[jax.Array]:
    """Averages each array over the workers, by one all-reduce for all arrays."""
    flat = jnp.concatenate([a.astype(jnp.float32).reshape(-1) for a in own])
    mean = links.all_reduce(flat) / links.workers
    ends = list(itertools.accumulate(a.size for a in own))[:-1]
    return [
        part.reshape(array.shape).astype(array.dtype)
        for array, part in zip(own, jnp.split(mean, ends), strict=True)
    ]


State = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Gradient:
    """Settings for summing one gradient over the workers.

    Attributes:
      name: name of the parameter, for error messages.
      shape: shape of the gradient on one device.
      codec: codec of the gradient.
      feedback: settings of error feedback.
      scatter_dim: the dim along which worker i needs only the i-th part of the sum;
        None: every worker needs the whole sum.
      seed: a number that no other gradient of the step has.
      dtype: dtype in which the program reads the sum, as text; '': the dtype of the
        partial gradient.
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
        """Number of elements of one chunk."""
        return chunk_elements(self.codec, self.size, workers, scatter=self.scatter)


def check_gradient(gradient: Gradient, dtype: Any, workers: int) -> None:
    """Checks that a gradient can be summed with its settings.

    Raises:
      InputError: the gradient cannot be summed; the message says why.
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
      ``residual``: zeros in the gradient's shape and the dtype of `Feedback`, or ()
        without error feedback; ``codec``: the state of the codec.
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
