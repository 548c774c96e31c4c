"""The noise scale from the squared norms of partial gradients, averaged over steps.

A batch of M rows is split into n groups of equal size. With g_i the mean gradient of
group i and G the mean of all g_i::

    local = mean |g_i|^2        total = |G|^2
    sqr = (n total - local) / (n - 1)         an estimate of |E g|^2
    var = (local - total) M / (n - 1)         an estimate of the variance of the
                                              gradient of one row
    phi = var / sqr                           the noise scale, in rows

The formulas are those of Pollux (Qiao et al., OSDI 2021) and of McCandlish et al.
(arXiv 1812.06162). The formulas are linear in the norms. So gradients with different
numbers of groups can be estimated separately, and their estimates added up. ``sqr`` and
``var`` are averaged over steps with exponential weights: each step multiplies the old
averages by ``decay ** (M / M0)``. Each average is divided by the sum of its weights,
which corrects the bias towards zero.
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

# Number of steps from one measurement to the next, if a codec sends the gradients: a
# measurement then sends them a second time without the codec.
SPARSE = 32
# The same number among the first `SPARSE` steps, when the noise is not known yet.
EARLY = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoiseOptions:
    """How the noise of gradients is measured.

    Attributes:
      base_batch: number of rows, M0, of the batch that the learning rate was chosen
        for; None: the number of rows of the first batch.
      decay: factor by which a step with M0 rows multiplies the old averages.
      every: number of steps from one measurement to the next; None: 1 if no codec sends
        gradients. If codecs do, a measurement also sends these gradients without the
        codec, so only one step in 32 is measured, and one in 4 of the first 32.
      preconditioned: whether gradients are divided by the square root of the
        optimizer's second moments, like the updates of Adam and its variants.
    """

    base_batch: int | None = None
    decay: float = 0.999
    every: int | None = None
    preconditioned: bool = False

    def __post_init__(self) -> None:
        """Checks the ranges of the options."""
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
    """Converts the argument ``noise_scale=`` to options; None: nothing is measured.

    Raises:
      PlanError: the argument is neither a bool nor `NoiseOptions`.
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
    """The noise scale of the gradients, and the averages that it is computed from.

    Attributes:
      sqr: squared norm of the mean gradient.
      var: variance of the gradient of one row, summed over its elements.
      rows: number of rows, M, of the batch of the last step.
      groups: least number of groups, n, over all gradients.
      steps: number of measured steps in the averages.
      skipped: number of measured steps that are not in the averages because a gradient
        was not finite.
      biased: whether the estimate is biased. It is if a gradient has only one group and
        is compared with that of the step before, or if a gradient was not found.
      excess: average of the squared norm of the codecs' sum minus that of the exact
        sum. For unbiased codecs it is the squared error of the sum.
      local: mean of the squared norms of the groups' gradients in the last measured
        step.
      total: squared norm of the mean gradient in the last measured step.
      left_out: paths of the parameters whose gradients were not found.
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

        The noise scale is infinite if ``sqr`` is zero but ``var`` is not. It is NaN
        before the first measured step.
        """
        if math.isnan(self.sqr):
            return math.nan
        if self.var <= 0:
            return 0.0
        return self.var / self.sqr if self.sqr > 0 else math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """The numbers of groups and of rows.

    Attributes:
      counts: for each gradient the number of groups n; 1 if the gradient is compared
        with the gradient of the step before.
      rows: number of rows of the batch, M.
    """

    counts: tuple[int, ...]
    rows: int

    @property
    def alone(self) -> np.ndarray:
        """Whether each gradient has only one group, bool (gradients,)."""
        return np.asarray(self.counts) == 1


def estimates(norms: Any, groups: Groups) -> tuple[Any, Any]:
    """Returns ``sqr`` and ``var`` of one step.

    Args:
      norms: (gradients, 3). Column 0 is the sum over the groups of the squared norms of
        their partial gradients; these partial gradients add up to the gradient. Column
        1 is the squared norm of the gradient, column 2 the squared norm of the sum that
        the codec makes. If a gradient has only one group, its two groups are half the
        gradient of this step and half the gradient of the step before.
      groups: the number of groups of each gradient.
    """
    alone = groups.alone
    n = np.where(alone, 2, np.asarray(groups.counts)).astype(np.float32)
    rows = np.where(alone, 2, 1) * np.float32(groups.rows)
    local, total = n * norms[:, 0], norms[:, 1]
    sqr = (n * total - local) / (n - 1)
    var = (local - total) * rows / (n - 1)
    return sqr.sum(), var.sum()


# Names of the averages, and of the counters of steps.
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
      state: the averages before the step, made by `fresh` or by this function.
      norms: as for `estimates`.
      groups: the number of groups of each gradient.
      decay: factor by which a step with M0 rows multiplies the old averages.
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
    """Computes the noise scale from the averages.

    Args:
      state: the averages after the last step.
      groups: the number of groups of each gradient in the last step.
      left_out: paths of the parameters whose gradients were not found.
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
    """The gradients that are measured in a step, and the state that holds the averages.

    The state also holds the previous value of each gradient that has only one group.
    Such a gradient is compared with its value in the step before.

    Attributes:
      sources: the measured gradients, with their partial gradients.
      options: how the gradients are measured.
      everywhere: the sharding of the averages, with a copy on each device.
      homes: name of a gradient with only one group -> the sharding of its previous
        value.
      structs_of: name of a gradient with only one group -> shape and dtype.
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
        """The number of groups of each gradient."""
        counts = tuple(s.groups for s in self.sources.found)
        return Groups(counts, self.sources.rows)

    @property
    def alone(self) -> tuple[GradientSource, ...]:
        """The gradients with only one group, compared with the step before."""
        return tuple(s for s in self.sources.found if s.groups == 1)

    @property
    def every(self) -> int:
        """Number of steps from one measurement to the next."""
        return self.options.every or (SPARSE if self.coded else 1)

    def is_measured(self, step: jax.Array) -> jax.Array:
        """Whether a step is measured, a bool scalar.

        Args:
          step: number of the step, an int32 scalar.
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
        """Shapes and dtypes of the state."""
        return jax.eval_shape(self.create)

    def shardings(self) -> State:
        """The shardings of the state."""
        found = jax.tree.map(lambda _: self.everywhere, self.structs())
        return {**found, "previous": dict(self.homes)}

    def init(self) -> State:
        """The state before the first step, created in its shardings."""
        return jax.jit(self.create, out_shardings=self.shardings())()
