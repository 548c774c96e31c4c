"""Sums over the elements of gradients that lie side by side, one of each gradient.

Legend: k gradients of c elements of a chunk each, C of all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """A group of gradients as it was to be sent, and the part that was not sent.

    Attributes:
      wanted: of one gradient any shape, of several (..., C).
      error: of the same shape.
      total: the sum, in the type in which it is read; of several (..., C).
      widths: elements along the last dim of each gradient, c.
      part: whether the total is only a part of the sum of what is wanted here.
    """

    wanted: jax.Array
    error: jax.Array
    total: jax.Array
    widths: tuple[int, ...]
    part: bool = False

    @property
    def unsure(self) -> bool:
        """Whether a total may be infinite although the norms here are finite.

        Where they are, the elements are so small that no sum of them overflows, unless
        its type has a smaller range than float32, or the sum is of other elements.
        """
        narrow = jnp.finfo(self.total.dtype).max < jnp.finfo(jnp.bfloat16).max
        return self.part or bool(narrow)

    def norms(self) -> jax.Array:
        """Squared norms of what was wanted, of the error and of the rest, (k, 3)."""
        sent = self.wanted - self.error
        return jnp.stack(
            [self._sum(jnp.square(x)) for x in (self.wanted, self.error, sent)], axis=1
        )

    def non_finite(self) -> jax.Array:
        """Elements that are not finite, (k,).

        Of what was wanted; where all of that are, of the error, and else of the total.
        """
        own, lost, over = map(self._count, (self.wanted, self.error, self.total))
        return jnp.where(own > 0, own, jnp.where(lost > 0, lost, over))

    def overflows(self) -> jax.Array:
        """Elements of the total that are not finite, (k,)."""
        return self._count(self.total)

    def _count(self, values: jax.Array) -> jax.Array:
        return self._sum((~jnp.isfinite(values)).astype(jnp.float32))

    def _sum(self, values: jax.Array) -> jax.Array:
        """The sum over each gradient's elements, (k,)."""
        count = len(self.widths)
        if count == 1:
            return jnp.sum(values)[None]
        unit = math.gcd(*self.widths)
        rows = values.reshape(-1, values.shape[-1] // unit, unit)
        blocks = [width // unit for width in self.widths]
        return jax.ops.segment_sum(
            jnp.sum(rows, axis=(0, 2)),
            np.repeat(np.arange(count, dtype=np.int32), blocks),
            count,
            indices_are_sorted=True,
        )


def non_finite(groups: Sequence[Sent], norms: Sequence[jax.Array]) -> list[jax.Array]:
    """`Sent.non_finite` of each group, looked for only where it can be other than 0.

    Args:
      groups: the groups.
      norms: `Sent.norms` of each.
    """
    if not groups:
        return []
    good = jnp.all(jnp.isfinite(jnp.concatenate(list(norms))))
    found = jax.lax.cond(
        good,
        lambda _: [jnp.zeros((len(g.widths),), jnp.float32) for g in groups],
        lambda arrays: [
            dataclasses.replace(g, wanted=w, error=e, total=t).non_finite()
            for g, (w, e, t) in zip(groups, arrays, strict=True)
        ],
        [(g.wanted, g.error, g.total) for g in groups],
    )
    return [
        jnp.where(bad > 0, bad, g.overflows()) if g.unsure else bad
        for g, bad in zip(groups, found, strict=True)
    ]


def squared_norm(values: jax.Array) -> jax.Array:
    """The sum of the squares, a float32 scalar."""
    return jnp.sum(jnp.square(values.astype(jnp.float32)))
