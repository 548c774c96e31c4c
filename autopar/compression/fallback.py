"""In each step, sums gradients by the first of several codecs that sends enough of
them.

GraVAC (arXiv 2305.12201) compresses a gradient in two ways. In each step it sends the
smaller message if its gain (the fraction of the gradient's squared norm that it
carries) is large enough, and otherwise the larger message. In this module each choice
of codecs is a level, and one compiled program contains all levels. The program first
computes the gain of each level without sending gradients, and sums the gains'
numerators and denominators over the workers. Then one branch of a `jax.lax.switch`
sends the gradients: all workers have the same sums, so they take the same branch.

All levels use the same residuals. Each level has a codec state of its own, which does
not change in steps in which another level sends.

>>> Fallback(("int8:block=256", "bf16"), least_gain=0.75).codecs
('int8', 'bf16')
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.compression.codecs.registry import format_codec, parse_codec
from autopar.compression.exchange import RecordingLinks, WorkerLinks
from autopar.compression.gradient import Gradient, State, init_state
from autopar.compression.synchronise import SENT, WANTED, synchronise
from autopar_errors import InputError


@dataclasses.dataclass(frozen=True, slots=True)
class Fallback:
    """The codecs that a step uses if the plan's codecs send too little.

    Attributes:
      codecs: the codecs in the order in which the step tries them. The last one is used
        whatever it sends.
      least_gain: the fraction of the squared norm of the values to send that a codec
        must send to be used.
    """

    codecs: Sequence[str]
    least_gain: float

    def __post_init__(self) -> None:
        """Checks the options, and brings the codecs' texts into the form of reports."""
        codecs = (self.codecs,) if isinstance(self.codecs, str) else self.codecs
        texts = tuple(format_codec(parse_codec(text)) for text in codecs)
        object.__setattr__(self, "codecs", texts)
        if not texts:
            raise InputError(
                "Fallback: needs at least one codec to fall back to, such as 'bf16'."
            )
        if not (math.isfinite(self.least_gain) and self.least_gain >= 0):
            raise InputError(
                "Fallback: least_gain is the part of the squared norm that must be "
                f"sent, from 0 (always enough) on; got {self.least_gain}."
            )

    def levels_of(self, gradient: Gradient) -> tuple[Gradient, ...]:
        """The gradient with its own codec, and then with each codec of the fallback.

        If the gradient's own codec is lossless, the gradient has this codec on all
        levels. If any level needs a residual, the gradient has one on all levels.
        """
        if gradient.codec.lossless:
            return (gradient,) * (1 + len(self.codecs))
        codecs = [gradient.codec, *(parse_codec(text) for text in self.codecs)]
        feedback = gradient.feedback
        if not feedback.active and any(codec.feedback for codec in codecs):
            feedback = dataclasses.replace(feedback, kind="residual")
        return tuple(
            dataclasses.replace(gradient, codec=codec, feedback=feedback)
            for codec in codecs
        )


def init_level_states(
    levels: Sequence[Sequence[Gradient]], workers: int
) -> list[State]:
    """The states of one worker before the first step.

    Returns:
      For each gradient: ``residual``, which all levels use, and ``codec``, a tuple with
      the codec state of each level.

    Raises:
      InputError: the levels have different gradients.
    """
    _check_levels(levels)
    found = [[init_state(gradient, workers) for gradient in level] for level in levels]
    return [
        {"residual": states[0]["residual"], "codec": tuple(s["codec"] for s in states)}
        for states in zip(*found, strict=True)
    ]


def synchronise_levels(
    levels: Sequence[Sequence[Gradient]],
    partials: Sequence[jax.Array],
    states: Sequence[State],
    links: WorkerLinks,
    worker: jax.Array,
    step: jax.Array,
    threshold: float | jax.Array,
    judges: WorkerLinks | None = None,
) -> tuple[list[jax.Array], list[State], jax.Array, jax.Array]:
    """Sums gradients over the workers by the first level that sends enough.

    The gain of a level is ``sum |sent|^2 / sum |wanted|^2`` over all gradients and
    workers. What some codecs send depends on messages of other workers (PowerSGD's
    second round, a sketch). The gain of such a codec is computed as if all workers held
    the same gradient.

    Args:
      levels: the same gradients with different codecs, in the order to try. The last
        level is used if no other level has enough gain.
      partials: this worker's partial gradients.
      states: states from `init_level_states` or from the previous step.
      links: the collectives over the workers.
      worker: number of this worker, int32 scalar.
      step: number of the step from 0, int32 scalar, the same on all workers.
      threshold: the least gain, the same on all workers; 0.75 in the paper.
      judges: the collectives over all devices that must use the same level. They are
        more than ``links`` if some devices hold other parts of the gradients; default:
        ``links``.

    Returns:
      Totals, states and sums as `autopar.compression.synchronise.synchronise` returns
      them, and the level that was used, an int32 scalar. If partial gradients are not
      finite, the last level is used.

    Raises:
      InputError: the levels have different gradients, or a gradient cannot be summed.
    """
    _check_levels(levels)
    gains = level_gains(levels[:-1], partials, states, links, worker, step, judges)
    ok = jnp.append(gains >= threshold, True)
    level = jnp.argmax(ok).astype(jnp.int32)
    branches = [_branch(k, levels[k], links) for k in range(len(levels))]
    totals, new_states, sums = jax.lax.switch(
        level, branches, list(partials), list(states), jnp.int32(worker), step
    )
    return totals, new_states, sums, level


def level_gains(
    levels: Sequence[Sequence[Gradient]],
    partials: Sequence[jax.Array],
    states: Sequence[State],
    links: WorkerLinks,
    worker: jax.Array,
    step: jax.Array,
    judges: WorkerLinks | None = None,
) -> jax.Array:
    """The gain of each level over all workers, float32 (levels,); see
    `synchronise_levels`.
    """
    alone = RecordingLinks(links.workers)
    rows: list[jax.Array] = []
    for k, level in enumerate(levels):
        own = [_state_of(state, k) for state in states]
        sums = synchronise(level, partials, own, alone, worker, step)[2]
        rows.append(jnp.sum(sums, axis=0)[jnp.array([SENT, WANTED])])
    if not rows:
        return jnp.zeros((0,), jnp.float32)
    judges = judges or links
    sent, wanted = judges.all_reduce(jnp.stack(rows).reshape(-1)).reshape(-1, 2).T
    some = wanted > 0
    gains = jnp.where(some, sent / jnp.where(some, wanted, 1.0), 1.0)
    # This comparison is also false for NaN.
    return jnp.where(jnp.isfinite(wanted), gains, -1.0)


def _branch(
    k: int, level: Sequence[Gradient], links: WorkerLinks
) -> Callable[..., Any]:
    """Makes the branch that sums the gradients by one level."""

    def run(
        partials: list[jax.Array],
        states: list[State],
        worker: jax.Array,
        step: jax.Array,
    ) -> Any:
        own = [_state_of(state, k) for state in states]
        totals, after, sums = synchronise(level, partials, own, links, worker, step)
        merged = [
            {
                "residual": new["residual"],
                "codec": (*old["codec"][:k], new["codec"], *old["codec"][k + 1 :]),
            }
            for old, new in zip(states, after, strict=True)
        ]
        return totals, merged, sums

    return run


def _state_of(state: State, level: int) -> State:
    return {"residual": state["residual"], "codec": state["codec"][level]}


def _check_levels(levels: Sequence[Sequence[Gradient]]) -> None:
    if not levels:
        raise InputError("synchronise_levels: needs at least one level.")
    wanted = [_without_codec(gradient) for gradient in levels[0]]
    for k, level in enumerate(levels):
        if [_without_codec(gradient) for gradient in level] != wanted:
            raise InputError(
                "synchronise_levels: the levels must hold the same gradients with the "
                f"same feedback, and differ in their codecs alone; level {k} holds "
                f"{', '.join(g.name for g in level) or 'none'} and differs from level "
                "0; make it with dataclasses.replace(gradient, codec=...)."
            )


def _without_codec(gradient: Gradient) -> tuple[Any, ...]:
    return tuple(
        getattr(gradient, field.name)
        for field in dataclasses.fields(gradient)
        if field.name != "codec"
    )
