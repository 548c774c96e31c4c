"""Sums over the elements of gradients that lie side by side, one of each gradient.

Legend: k gradients of c elements of a chunk each, C of all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compression.exchange import WorkerLinks
from autopar.compression.feedback import Feedback


@dataclasses.dataclass(frozen=True, slots=True)
class SentGroup:
    """A group of gradients as it was to be sent, and the part that was not sent.

    Attributes:
      wanted: of one gradient any shape, of several (..., C).
      error: of the same shape, or a function that makes it.
      total: the sum, in the type in which it is read; of several (..., C).
      widths: elements along the last dim of each gradient, c.
      part: whether the total is only a part of the sum of what is wanted here.
      again: makes the total anew, for a branch that is seldom taken: an array that a
        branch reads has to be in memory, also where it is not taken.
    """

    wanted: jax.Array
    error: jax.Array | Callable[[], jax.Array]
    total: jax.Array
    widths: tuple[int, ...]
    part: bool = False
    again: Callable[[], jax.Array] | None = None

    @property
    def unsure(self) -> bool:
        """Whether a total may be infinite although the norms here are finite.

        Where they are, the elements are so small that no sum of them overflows, unless
        its type has a smaller range than float32, or the sum is of other elements.
        """
        narrow = jnp.finfo(self.total.dtype).max < jnp.finfo(jnp.bfloat16).max
        return self.part or bool(narrow)

    @property
    def error_array(self) -> jax.Array:
        """The error as an array."""
        return self.error() if callable(self.error) else self.error

    def with_error(self) -> SentGroup:
        """The same, with the error computed."""
        return dataclasses.replace(self, error=self.error_array)

    def squares(self) -> jax.Array:
        """Squared norms of what was wanted, (k,)."""
        return squares(self.wanted, self.widths)

    def norms(self) -> jax.Array:
        """Squared norms of what was wanted, of the error and of the rest, (k, 3)."""
        lost = self.error_array
        sent = self.wanted - lost
        return jnp.stack(
            [self._sum(jnp.square(x)) for x in (self.wanted, lost, sent)], axis=1
        )

    def non_finite(self) -> jax.Array:
        """Elements of what was wanted that are not finite, else of the error, (k,)."""
        own, lost = self._count(self.wanted), self._count(self.error_array)
        return jnp.where(own > 0, own, lost)

    def overflows(self) -> jax.Array:
        """Elements of the total that are not finite, (k,)."""
        return self._count(self.total)

    def overflows_again(self) -> jax.Array:
        """`overflows`, in a branch that is seldom taken."""
        return self._count(self.again() if self.again else self.total)

    def _count(self, values: jax.Array) -> jax.Array:
        return self._sum((~jnp.isfinite(values)).astype(jnp.float32))

    def _sum(self, values: jax.Array) -> jax.Array:
        return _sum_each(values, self.widths)


def squares(values: jax.Array, widths: Sequence[int]) -> jax.Array:
    """Squared norms of gradients that lie as `SentGroup` says, (k,)."""
    return _sum_each(jnp.square(values), widths)


def _sum_each(values: jax.Array, widths: Sequence[int]) -> jax.Array:
    """The sum over each gradient's elements, (k,)."""
    count = len(widths)
    if count == 1:
        return jnp.sum(values)[None]
    unit = math.gcd(*widths)
    rows = values.reshape(-1, values.shape[-1] // unit, unit)
    blocks = [width // unit for width in widths]
    return jax.ops.segment_sum(
        jnp.sum(rows, axis=(0, 2)),
        np.repeat(np.arange(count, dtype=np.int32), blocks),
        count,
        indices_are_sorted=True,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class TelemetryGroup:
    """The k gradients of a group, as far as rows of telemetry need them.

    Attributes:
      sent: what was to be sent.
      again: makes the same anew, for a branch that is seldom taken: an array that a
        branch reads has to be in memory, also where it is not taken.
      sound: `autopar.compression.codecs.codec.Codec.sound`.
      feedbacks: of each gradient.
      partials: this worker's part of each.
      residuals: of each, () where there is none.
    """

    sent: SentGroup
    again: Callable[[], SentGroup]
    sound: bool
    feedbacks: Sequence[Feedback]
    partials: Sequence[jax.Array]
    residuals: Sequence[Any]

    def rows(self, norms: jax.Array, bad: jax.Array) -> jax.Array:
        """The rows, float32 (k, 6).

        Args:
          norms: `SentGroup.norms`.
          bad: number of elements that are not finite, (k,).
        """
        wanted, error, _ = norms.T
        kept, own = jnp.zeros_like(wanted), wanted
        if any(feedback.active for feedback in self.feedbacks):
            as_error = all(
                f.active and f.dtype == "float32" and not f.average_every
                for f in self.feedbacks
            )
            found = [
                jnp.zeros(()) if isinstance(x, tuple) else squared_norm(x)
                for x in self.residuals
            ]
            kept = error if as_error else jnp.stack(found)
            own = jnp.stack([squared_norm(x) for x in self.partials])
        return jnp.concatenate((norms, jnp.stack((kept, own, bad), axis=1)), axis=1)


# Stands for a norm that was not measured: no sum of squares is negative, and its sum
# with those of other workers is not finite.
NOT_MEASURED = -jnp.inf


@dataclasses.dataclass(frozen=True, slots=True)
class AllWorkers:
    """What makes rows those of all workers together.

    Attributes:
      links: the collectives over the workers.
      squares: `SentGroup.squares` of all groups, one behind the other, summed.
    """

    links: WorkerLinks
    squares: jax.Array


def summed_rows(own: jax.Array, links: WorkerLinks) -> jax.Array:
    """The sum of this worker's rows with those of the others."""
    with jax.named_scope("telemetry"):
        return links.all_reduce(own.ravel()).reshape(own.shape)


def rows(
    groups: Sequence[TelemetryGroup],
    measured: jax.Array | None,
    workers: AllWorkers | None = None,
) -> jax.Array:
    """The rows of telemetry of all groups, one behind the other, float32 (k, 6).

    Errors and norms take about as long as a codec itself, so a step may leave them
    out. Elements that are not finite are looked for in any case: in the squared norms
    of what is wanted, which are one pass, and in the sums of codecs that are not sound.

    Args:
      groups: the gradients.
      measured: whether errors and norms are measured, a bool scalar, the same on all
        workers; None: they are.
      workers: with it the rows are summed over the workers. Then ``measured`` is given,
        and no total is a part (`SentGroup.part`): it is the same on all workers, so all
        take the same branches.
    """

    def every() -> jax.Array:
        sent = [g.again().with_error() for g in groups]
        norms = [s.norms() for s in sent]
        bad = _non_finite(sent, norms)
        each = zip(groups, norms, bad, strict=True)
        own = jnp.concatenate([g.rows(norm, count) for g, norm, count in each])
        return summed_rows(own, workers.links) if workers else own

    if measured is None:
        found, sums = every(), []
    else:
        few = _rows_without_errors(
            workers.squares
            if workers
            else jnp.concatenate([g.sent.squares() for g in groups])
        )
        good = jnp.all(jnp.isfinite(few[:, 0]))
        found = jax.lax.cond(measured | ~good, every, lambda: few)
        sums = [squared_norm(g.sent.total) for g in groups if not g.sound]
    # Apart from the rest: what the branch above reads need not wait for the totals.
    norms = jnp.append(found[:, :3], jnp.array(sums))
    good = jnp.all(jnp.isfinite(norms) | (norms == NOT_MEASURED))
    over = _overflows([g.sent for g in groups], good)
    if workers:
        over = workers.links.workers * over
    bad = jnp.where(found[:, -1] > 0, found[:, -1], over)
    return found.at[:, -1].set(bad)


def _rows_without_errors(squares: jax.Array) -> jax.Array:
    """Rows of which only the norms of what was wanted are known."""
    unknown = jnp.full((len(squares), 4), NOT_MEASURED)
    return jnp.column_stack((squares, unknown, jnp.zeros_like(squares)))


def _non_finite(
    sent: Sequence[SentGroup], norms: Sequence[jax.Array]
) -> list[jax.Array]:
    """`SentGroup.non_finite` of each group, counted only where a norm is not finite."""
    good = jnp.all(jnp.isfinite(jnp.concatenate(list(norms))))
    return jax.lax.cond(
        good,
        lambda _: [jnp.zeros((len(g.widths),), jnp.float32) for g in sent],
        lambda arrays: [
            dataclasses.replace(g, wanted=wanted, error=error).non_finite()
            for g, (wanted, error) in zip(sent, arrays, strict=True)
        ],
        [(g.wanted, g.error_array) for g in sent],
    )


def _overflows(sent: Sequence[SentGroup], good: jax.Array) -> jax.Array:
    """Elements of all totals that are not finite, where they can be, (k,)."""
    found = jax.lax.cond(
        good,
        lambda: [jnp.zeros((len(g.widths),), jnp.float32) for g in sent],
        lambda: [g.overflows_again() for g in sent],
    )
    each = zip(sent, found, strict=True)
    return jnp.concatenate([g.overflows() if g.unsure else x for g, x in each])


def squared_norm(values: jax.Array) -> jax.Array:
    """The sum of the squares, a float32 scalar."""
    return jnp.sum(jnp.square(values.astype(jnp.float32)))
