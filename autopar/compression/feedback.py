"""Error feedback: what a codec dropped is sent later.

``e`` is a worker's residual, ``g`` its gradient, ``C`` the codec. In every step a
worker sends ``C(d)`` of ``d = g + decay * e`` and keeps ``e = d - C(d)`` (Seide et al.,
Interspeech 2014; Karimireddy et al., arXiv 1901.09847).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from autopar.compression.exchange import WorkerLinks
from autopar_errors import InputError

Kind = Literal["none", "residual"]
ResidualDtype = Literal["float32", "bfloat16"]

_KINDS = ("none", "residual")
_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, slots=True)
class Feedback:
    """The way in which a worker's error is fed back.

    Attributes:
      kind: none or residual; see the module.
      decay: factor of the residual; below 1 old errors fade, as LoCo does
        (arXiv 2407.04480, 0.8).
      average_every: the residuals are averaged over the workers every so many
        steps (arXiv 2008.05823); 0: never. A dense all-reduce.
      dtype: of the residual between steps.
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
        """Whether there is a residual at all."""
        return self.kind != "none"


# With feedback the error is not lost but late. The bound of SGD with feedback has
# the compressor's error as (1 - d) / d^2 with d = 1 - e^2, times the squares of
# learning rate and smoothness (S. P. Karimireddy et al., "Error Feedback Fixes
# SignSGD", ICML 2019, theorem II); this stands for that product's root. Assumed.
FEEDBACK_DISCOUNT = 0.25


def effective_error(error: float, *, feedback: bool) -> float:
    """The error that counts against a budget.

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
    """The array that a worker wants to send, ``d``, float32 of the gradient's shape."""
    wanted = gradient.astype(jnp.float32)
    if not feedback.active or feedback.decay == 0.0:
        return wanted
    return wanted + feedback.decay * residual.astype(jnp.float32)


def average_due(step: jax.Array, every: int) -> jax.Array:
    """Whether the residuals are averaged at the end of a step, a bool scalar.

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
    """The residuals that the next step starts with; () where there is none.

    Where averages are due, those of one period take one all-reduce.

    Args:
      feedbacks: of each gradient.
      errors: what was not sent of each, float32; None where it is not fed back.
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
    """The mean over the workers of each array, in one all-reduce."""
    flat = jnp.concatenate([a.astype(jnp.float32).reshape(-1) for a in own])
    mean = links.all_reduce(flat) / links.workers
    ends = list(itertools.accumulate(a.size for a in own))[:-1]
    return [
        part.reshape(array.shape).astype(array.dtype)
        for array, part in zip(own, jnp.split(mean, ends), strict=True)
    ]
