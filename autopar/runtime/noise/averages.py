"""The noise scale from the squared norms of partial gradients, averaged over steps.

Of n groups of equal size with mean gradients g_i, which together are the M rows of a
batch, and G their mean::

    local = mean |g_i|^2        total = |G|^2
    sqr = (n total - local) / (n - 1)         an estimate of |E g|^2
    var = (local - total) M / (n - 1)         of the variance of one row's gradient
    phi = var / sqr                           the noise scale, in rows

The formulas are those of Pollux (Qiao et al., OSDI 2021) and of McCandlish et al.
(arXiv 1812.06162). They are linear in the norms, so gradients with different numbers of
groups are estimated apart and added up. The averages of ``sqr`` and ``var`` forget by
``decay ** (M / M0)`` a step and are divided by the weight that they have, which
corrects their bias towards zero.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import PlanError
from autopar.runtime.noise.sources import GradientSource, Sources

# Where a measurement sends gradients once more, as beside codecs: one step in so many.
SPARSE = 32
# Of the first `SPARSE` steps one in so many, as nothing is known of the noise yet.
EARLY = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoiseOptions:
    """How the noise of gradients is measured.

    Attributes:
      base_batch: rows of the batch that the learning rate was chosen for, M0; None:
        those of the first batch. Averages forget by ``decay`` in so many rows.
      decay: the part of the averages that a step with the base batch keeps.
      every: measure one step in so many; None: each step, but one in 32 where a
        gradient is sent by a codec, and one in 4 of the first 32. There a measurement
        also sends the gradient as it is.
      preconditioned: whether gradients are divided by the root of the optimizer's
        second moments, as the updates of Adam's family are.
    """

    base_batch: int | None = None
    decay: float = 0.999
    every: int | None = None
    preconditioned: bool = False

    def __post_init__(self) -> None:
        """Checks ranges."""
        for name in ("base_batch", "every"):
            number = getattr(self, name)
            known = isinstance(number, int) and not isinstance(number, bool)
            if number is not None and not (known and number >= 1):
                raise PlanError(
                    f"noise_scale: {name}={number!r}: expected a whole number of at "
                    "least 1, or None."
                )
        if not 0 <= self.decay < 1:
            raise PlanError(
                f"noise_scale: decay={self.decay!r}: expected a part of at least 0 and "
                "below 1, such as 0.999."
            )


def noise_options(given: Any) -> NoiseOptions | None:
    """Reads what was given as ``noise_scale=``; None: nothing is measured.

    Raises:
      PlanError: it is neither a flag nor options.
    """
    if isinstance(given, NoiseOptions):
        return given
    if isinstance(given, bool):
        return NoiseOptions() if given else None
    raise PlanError(
        f"parallelize: noise_scale={given!r}: expected True, False or "
        "autopar.goodput.NoiseOptions(...)."
    )


State = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """How noisy gradients are.

    Attributes:
      sqr: squared norm of the mean gradient.
      var: variance of the gradient of one row, summed over its elements.
      rows: rows of the batch that was measured last, M.
      groups: least number of groups that a gradient was seen in, n.
      steps: steps that the averages hold.
      skipped: steps that they do not, as a gradient was not finite.
      biased: whether a gradient was seen in one group alone and compared with that of
        the step before, or not at all.
      excess: by how much codecs enlarge the squared norm of the gradient, on average:
        for unbiased codecs the squared error of the sum that they make.
      local: mean of the groups' squared norms in the step measured last.
      total: squared norm of their mean in it.
      left_out: parameters whose gradients were not found.
    """

    sqr: float
    var: float
    rows: int
    groups: int
    steps: int
    skipped: int
    biased: bool
    excess: float
    local: float
    total: float
    left_out: tuple[str, ...] = ()

    @property
    def phi(self) -> float:
        """The noise scale in rows, var / sqr.

        Infinite where noise hides the mean gradient; not a number before the first step
        that was measured.
        """
        if math.isnan(self.sqr):
            return math.nan
        if self.var <= 0:
            return 0.0
        return self.var / self.sqr if self.sqr > 0 else math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """In how many groups gradients are seen.

    Attributes:
      counts: of each gradient, n; 1 where it is compared with that of the step before.
      rows: of the batch, M.
    """

    counts: tuple[int, ...]
    rows: int

    @property
    def alone(self) -> np.ndarray:
        """Which gradients are seen in one group alone, bool (gradients,)."""
        return np.asarray(self.counts) == 1


def estimates(norms: Any, groups: Groups) -> tuple[Any, Any]:
    """Returns ``sqr`` and ``var`` of one step.

    Args:
      norms: (gradients, 3): the sum over the groups of the squared norms of their
        partial gradients, which add up to the gradient; its squared norm; and that of
        what codecs made of it. One that is seen in one group alone counts as the halves
        of two steps' gradients.
      groups: the groups.
    """
    alone = groups.alone
    n = np.where(alone, 2, np.asarray(groups.counts)).astype(np.float32)
    rows = np.where(alone, 2, 1) * np.float32(groups.rows)
    local, total = n * norms[:, 0], norms[:, 1]
    sqr = (n * total - local) / (n - 1)
    var = (local - total) * rows / (n - 1)
    return sqr.sum(), var.sum()


# Names of the averages, and of the counts of steps.
_AVERAGES = ("weight", "sqr", "var", "excess", "local", "total")
_COUNTS = ("step", "steps", "skipped", "last")


def fresh(base_batch: float) -> State:
    """The averages before the first step, scalars."""
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    return {
        "base_batch": jnp.asarray(base_batch, jnp.float32),
        **dict.fromkeys(_AVERAGES, zero),
        **dict.fromkeys(_COUNTS, none),
    }


def update_averages(
    state: Mapping[str, Any],
    norms: jax.Array,
    groups: Groups,
    decay: float,
    measured: jax.Array,
) -> State:
    """The averages after a step.

    Args:
      state: of `fresh`, or after steps.
      norms: as of `estimates`.
      groups: the groups.
      decay: what the averages keep in a step with the base batch.
      measured: whether the norms were measured in this step.
    """
    finite = jnp.all(jnp.isfinite(norms))
    counts = measured & finite
    sqr, var = estimates(norms, groups)
    keep = jnp.float32(decay) ** (groups.rows / state["base_batch"])
    n = np.where(groups.alone, 2, np.asarray(groups.counts)).astype(np.float32)
    new = {
        "weight": keep * state["weight"] + (1 - keep),
        "sqr": keep * state["sqr"] + (1 - keep) * sqr,
        "var": keep * state["var"] + (1 - keep) * var,
        "excess": keep * state["excess"]
        + (1 - keep) * jnp.sum(norms[:, 2] - norms[:, 1]),
        "local": jnp.sum(n * norms[:, 0]),
        "total": jnp.sum(norms[:, 1]),
        "last": state["step"] + 1,
    }
    kept = {k: jnp.where(counts, x, state[k]) for k, x in new.items()}
    return {
        **kept,
        "base_batch": state["base_batch"],
        "step": state["step"] + 1,
        "steps": state["steps"] + counts,
        "skipped": state["skipped"] + (measured & ~finite),
    }


def noise_scale(
    state: Mapping[str, Any], groups: Groups, left_out: Sequence[str] = ()
) -> NoiseScale:
    """Reads the averages.

    Args:
      state: after steps.
      groups: those of the last step.
      left_out: parameters whose gradients were not found.
    """
    names = (*_AVERAGES, *_COUNTS)
    read = {name: float(np.asarray(state[name])) for name in names}
    weight = read["weight"]
    return NoiseScale(
        sqr=max(read["sqr"] / weight, 0.0) if weight else math.nan,
        var=max(read["var"] / weight, 0.0) if weight else math.nan,
        rows=groups.rows,
        groups=min(groups.counts),
        steps=int(read["steps"]),
        skipped=int(read["skipped"]),
        biased=bool(groups.alone.any() or left_out),
        excess=read["excess"] / weight if weight else math.nan,
        local=read["local"],
        total=read["total"],
        left_out=tuple(left_out),
    )


@dataclasses.dataclass(frozen=True)
class NoiseSpec:
    """What is measured of the gradients of a step, and the averages of it.

    Attributes:
      sources: the gradients.
      options: how they are measured.
      everywhere: where the averages lie.
      homes: name of a gradient that is compared with that of the step before -> where
        it lies in between.
      structs_of: name of such a gradient -> its shape.
      coded: gradients that codecs send.
    """

    sources: Sources
    options: NoiseOptions
    everywhere: Any
    homes: Mapping[str, Any]
    structs_of: Mapping[str, jax.ShapeDtypeStruct]
    coded: frozenset[int] = frozenset()

    @functools.cached_property
    def groups(self) -> Groups:
        """The groups of each gradient."""
        counts = tuple(s.groups for s in self.sources.found)
        return Groups(counts, self.sources.rows)

    @property
    def alone(self) -> tuple[GradientSource, ...]:
        """The gradients that are compared with those of the step before."""
        return tuple(s for s in self.sources.found if s.groups == 1)

    @property
    def every(self) -> int:
        """One step in so many is measured."""
        return self.options.every or (SPARSE if self.coded else 1)

    def is_measured(self, step: jax.Array) -> jax.Array:
        """Whether a step is measured, a bool scalar.

        Args:
          step: its number, an int32 scalar.
        """
        if self.every == 1:
            return jnp.bool_(True)
        due = step % self.every == 0
        if self.options.every is None:
            due |= (step < self.every) & (step % EARLY == 0)
        return due

    def create(self) -> State:
        """The state before the first step."""
        previous = {
            name: jnp.zeros(s.shape, s.dtype) for name, s in self.structs_of.items()
        }
        base = self.options.base_batch or self.sources.rows
        none = jnp.zeros((), jnp.int32)
        return {**fresh(base), "compared": none, "previous": previous}

    def structs(self) -> State:
        """Shapes of the state."""
        return jax.eval_shape(self.create)

    def shardings(self) -> State:
        """Where the state lies."""
        found = jax.tree.map(lambda _: self.everywhere, self.structs())
        return {**found, "previous": dict(self.homes)}

    def init(self) -> State:
        """The state before the first step, in its places."""
        return jax.jit(self.create, out_shardings=self.shardings())()
