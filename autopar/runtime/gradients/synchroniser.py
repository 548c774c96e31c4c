"""Sums stacked partial gradients through codecs while a planned step runs.

The replay of a step passes stacked partial gradients to a `CodecSynchroniser`. The
synchroniser sums a bucket of gradients in one `jax.shard_map` that is manual over all
mesh axes. A *bucket* is a set of gradients that share messages. Because the `shard_map`
is manual, a gradient that is sharded over other axes is never gathered, and only
payloads of codecs cross the slow links.

Fast links may carry float32 instead of payloads. Then the partial gradients are first
summed over the fast links (reduce-scatter), and after that over the slow links by
codecs. At the end an all-gather over the fast links restores the whole sums. The
gradients of a bucket share one message on the fast links.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autopar.compression.codecs.blocks import add_barrier
from autopar.compression.exchange import MeshLinks
from autopar.compression.gradient import Gradient
from autopar.compression.synchronise import (
    NON_FINITE,
    WANTED,
    Synchronised,
    restore_unless_finite,
    synchronise_levels,
    synchronise_repeatably,
)
from autopar.layouts.summation import Summation
from autopar.runtime.gradients.sums import GradientSums, Member, State
from autopar_passes.layouts import constrain, partition_spec
from autopar_passes.sums.stacked import Stacked


def sum_within(
    summations: Sequence[Summation],
    partials: Sequence[jax.Array],
    names: tuple[str, ...],
) -> list[jax.Array]:
    """Reduce-scatters partial gradients over the devices of fast links.

    Runs inside a manual `jax.shard_map`.

    Args:
      summations: how each gradient is summed; all over the same mesh axes.
      partials: this device's partial sum of each gradient.
      names: the mesh axes of the fast links; with () the partial sums are returned
        unchanged.

    Returns:
      The part of each sum that this device computed, of shape `Summation.local_shape`.
      The dtype is float32 unless ``names`` is ().
    """
    if not names:
        return list(partials)
    devices = jax.lax.axis_size(names)
    rows = [
        _rows(summation, partial.astype(jnp.float32), devices)
        for summation, partial in zip(summations, partials, strict=True)
    ]
    widths = [row.shape[1] for row in rows]
    whole = jax.lax.psum_scatter(
        jnp.concatenate(rows, axis=1), names, scatter_dimension=0, tiled=True
    )
    parts = _cut(whole.reshape(-1), widths)
    return [
        _back(summation, part)
        for summation, part in zip(summations, parts, strict=True)
    ]


def gather_within(
    summations: Sequence[Summation], totals: Sequence[jax.Array], names: tuple[str, ...]
) -> list[jax.Array]:
    """All-gathers sums over the fast links.

    A sum whose `Summation.keeps` is true stays split over the devices of the fast
    links.

    Args:
      summations: as for `sum_within`.
      totals: this device's part of each sum.
      names: as for `sum_within`.
    """
    out = list(totals)
    wanted = (
        [k for k, summation in enumerate(summations) if not summation.keeps]
        if names
        else []
    )
    if not wanted:
        return out
    parts = [
        jnp.moveaxis(totals[k], summations[k].dim, 0).astype(jnp.float32)
        for k in wanted
    ]
    flat = jnp.concatenate([part.reshape(-1) for part in parts])
    rows = jax.lax.all_gather(flat, names, axis=0, tiled=False)
    ends = list(itertools.accumulate(part.size for part in parts))[:-1]
    for k, part, row in zip(wanted, parts, jnp.split(rows, ends, axis=1), strict=True):
        front = row.reshape(-1, *part.shape[1:])
        out[k] = jnp.moveaxis(front, 0, summations[k].dim)
    return out


def _rows(summation: Summation, partial: jax.Array, devices: int) -> jax.Array:
    """A partial gradient as a matrix with one row for each device of the fast links."""
    front = jnp.moveaxis(partial, summation.dim, 0)
    if summation.interleaved:
        outer = (summation.workers, devices, -1, *front.shape[1:])
        front = jnp.swapaxes(front.reshape(outer), 0, 1)
    return front.reshape(devices, -1)


def _back(summation: Summation, flat: jax.Array) -> jax.Array:
    """Reshapes a row to `Summation.local_shape`."""
    shape = summation.local_shape
    front = (shape[summation.dim], *shape[: summation.dim], *shape[summation.dim + 1 :])
    return jnp.moveaxis(flat.reshape(front), 0, summation.dim)


def _cut(flat: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
    ends = list(itertools.accumulate(widths))[:-1]
    return jnp.split(flat, ends)


Arrays = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """A measurement of a bucket of gradients, on the arrays of one device.

    The measurement runs in the `jax.shard_map` that sums the bucket. There, the inputs
    of a codec and its received payloads are in memory, so a measurement in a branch
    (``lax.cond``) can read them. A step that does not take the branch stores nothing
    for the measurement.

    Attributes:
      look: the function that measures. Its arguments are this device's shards of
        ``given``, the partial gradients on this device, and a function that returns the
        sums in the layouts of `Member.result`. It returns a row, (1, k).
      given: other arrays that ``look`` reads.
      specs: partition specs of ``given``.
      seldom: whether ``look`` reads the sums only in a branch that few steps take. This
        branch then computes the sums again.
    """

    look: Callable[[Any, Arrays, Callable[[], Arrays]], jax.Array]
    given: Any
    specs: Any
    seldom: bool


class CodecSynchroniser:
    """The synchroniser of one trace of a step (`autopar_passes.replay.values`)."""

    def __init__(self, sums: GradientSums, state: State) -> None:
        """Starts a step with the state of the step before."""
        self.sums = sums
        self.state = state
        self.new: dict[str, Any] = {}
        # Name of a gradient -> its row of telemetry, added up over the devices.
        self.rows: dict[str, jax.Array] = {}
        # Name of a gradient -> number of the level whose codec has sent it.
        self.levels: dict[str, jax.Array] = {}
        self._totals: jax.Array | None = None

    def takes(self, value: int) -> frozenset[int]:
        """See `autopar_passes.replay.values.Synchroniser`."""
        return self.sums.together(value)

    def take(self, partials: dict[int, Stacked]) -> dict[int, Any]:
        """See `autopar_passes.replay.values.Synchroniser`."""
        return self.take_measured(partials, None)[0]

    def take_measured(
        self, partials: dict[int, Stacked], measure: Measure | None
    ) -> tuple[dict[int, Any], Any]:
        """Like `take`, and measures the bucket.

        Args:
          partials: value of each gradient of the bucket -> its stacked partial
            gradients.
          measure: the measurement; None: nothing is measured.

        Returns:
          The sums, and the measured rows of all devices, (devices, k).
        """
        members = [self.sums.members[v] for v in partials]
        mesh = self.sums.mesh
        states = [self.state["gradients"][m.decision.name] for m in members]
        state_specs = [self.sums.specs(m) for m in members]

        counters = {k: x for k, x in self.state.items() if k in ("step", "due")}

        def bucket(now: Any, arrays: Any, before: Any, given: Any) -> Any:
            looked = measure and functools.partial(measure.look, given)
            seldom = measure is not None and measure.seldom
            return _sum_bucket(
                self.sums, members, now, arrays, before, looked, seldom=seldom
            )

        totals, after, rows, level, seen = jax.shard_map(
            bucket,
            mesh=mesh,
            in_specs=(
                PartitionSpec(),
                [partition_spec(mesh, m.stacked) for m in members],
                state_specs,
                measure and measure.specs,
            ),
            out_specs=(
                [partition_spec(mesh, m.result) for m in members],
                state_specs,
                PartitionSpec(),
                PartitionSpec(),
                PartitionSpec(mesh.axis_names),
            ),
            check_vma=False,
        )(
            counters,
            [x.array for x in partials.values()],
            states,
            measure and measure.given,
        )
        for k, member in enumerate(members):
            self.new[member.decision.name] = after[k]
            self.levels[member.decision.name] = level
            self.rows[member.decision.name] = rows[k]
        made = {
            v: constrain(totals[k], mesh, m.home)
            for k, (v, m) in enumerate(zip(partials, members, strict=True))
        }
        return made, seen

    @property
    def _names(self) -> list[str]:
        return [m.decision.name for m in self.sums.members.values()]

    @property
    def complete(self) -> bool:
        """Whether all gradients have been summed."""
        return len(self.new) == len(self.sums.members)

    @property
    def finite(self) -> jax.Array:
        """Whether all gradients are finite, a bool scalar; requires `complete`."""
        return jnp.all(self.telemetry()[:, NON_FINITE] == 0)

    def finish(self) -> tuple[State, jax.Array]:
        """The state for the next step, and a row of telemetry for each gradient.

        If a gradient is not finite, the state of the gradients is restored, and the
        step is counted as skipped.

        Returns:
          The state, and telemetry, float32 (gradients, 6 or 10), with the columns of
          `autopar.compression.synchronise.synchronise`.
        """
        old = {name: self.state["gradients"][name] for name in self._names}
        new = {name: self.new[name] for name in self._names}
        gradients = restore_unless_finite(old, new, self.finite)
        after = {
            "step": self.state["step"] + 1,
            "skipped": self.state["skipped"] + ~self.finite,
            "gradients": gradients,
        }
        if (due := self.state.get("due")) is not None:
            after["due"] = jnp.where(due == 0, self.sums.every, due) - 1
        return after, self.telemetry()

    def telemetry(self) -> jax.Array:
        """Telemetry, float32 (gradients, 6 or 10); requires `complete`."""
        if self._totals is None:
            self._totals = jnp.stack([self.rows[name] for name in self._names])
        return self._totals

    def taken_levels(self) -> jax.Array:
        """The level that sent each gradient, one-hot, int32 (gradients, levels)."""
        levels = jnp.stack([self.levels[name] for name in self._names])
        return jax.nn.one_hot(levels, self.sums.num_levels, dtype=jnp.int32)


def _spoilt(rows: jax.Array) -> jax.Array:
    """Returns terms that restore a NaN or an infinity which a codec may have lost.

    A codec may turn a NaN or an infinity into a finite number. A step that checks its
    gradients must still find it. So the term of each gradient is added to all elements
    of its sum. The term is NaN if a partial gradient has a NaN, infinite if a partial
    gradient only has an infinity, and zero otherwise.

    Args:
      rows: telemetry of k gradients, summed over the devices.

    Returns:
      The terms, float32 (k,).
    """
    kind = jnp.where(jnp.isnan(rows[:, WANTED]), jnp.nan, jnp.inf)
    # The barrier makes the compiler compute the terms once. Without it, each loop that
    # reads a term would compute it again.
    return add_barrier(jnp.where(rows[:, NON_FINITE] > 0, kind, 0.0))


def _sum_bucket(
    sums: GradientSums,
    members: Sequence[Member],
    counters: Mapping[str, Any],
    arrays: Sequence[Any],
    before: Sequence[State],
    look: Callable[..., jax.Array] | None,
    *,
    seldom: bool,
) -> tuple[list[Any], list[State], Any, jax.Array, jax.Array | None]:
    """Sums a bucket on one device's arrays.

    Args:
      sums: the sums of the step.
      members: the gradients of the bucket.
      counters: ``step`` of the state, and ``due`` if the state has it.
      arrays: this device's partial gradients.
      before: the states of the gradients.
      look: measures the partial gradients and the sums; see `Measure`.
      seldom: as in `Measure`.

    Returns:
      The sums, the new states, telemetry summed over all devices, the number of the
      level that was sent, and the measured row.
    """
    mesh_names = sums.mesh.axis_names
    summation = members[0].summation
    names = tuple(mesh_names[a] for a in summation.axes)
    links = MeshLinks(names, summation.workers)
    worker = jax.lax.axis_index(names)
    gradients = [m.gradient for m in members]
    states = [_local(g, s) for g, s in zip(gradients, before, strict=True)]
    fast = tuple(mesh_names[a] for a in summation.within)
    summations = [m.summation for m in members]
    parts = [x[0] for x in arrays]
    if look is not None:
        # Because of the barrier, the codecs and the measurement (in a branch) read the
        # same arrays. Without the barrier, XLA would copy the arrays for the branch.
        parts = [add_barrier(x) for x in parts]
    partials = sum_within(summations, parts, fast)
    together = sums.fallback is None and set(names) == set(mesh_names)
    made, level = _sum_coded_bucket(
        sums, members, partials, states, links, worker, counters, together=together
    )
    rows = made.sums
    if not together:
        with jax.named_scope("telemetry"):
            rows = jax.lax.psum(rows, mesh_names)
    spoilt = _spoilt(rows)

    def whole(totals: Sequence[Any]) -> list[Any]:
        # `total` is written to memory in any case, so adding the term here costs no
        # pass over memory. If the term were added later, each operator that reads the
        # sum would add it again.
        gathered = gather_within(summations, totals, fast)
        each = zip(gathered, spoilt, arrays, strict=True)
        return [(total + term).astype(x.dtype) for total, term, x in each]

    totals = whole(made.totals)
    seen = None
    if look is not None:
        seen = look(parts, lambda: whole(made.again()) if seldom else totals)
    kept = [_global(s, old) for s, old in zip(made.states, before, strict=True)]
    return totals, kept, rows, level, seen


def _sum_coded_bucket(
    sums: GradientSums,
    members: Sequence[Member],
    partials: Sequence[Any],
    states: Sequence[State],
    links: MeshLinks,
    worker: Any,
    counters: Mapping[str, Any],
    *,
    together: bool,
) -> tuple[Synchronised, jax.Array]:
    """Sums a bucket by the plan's codecs, or by the codecs of the fallback.

    With ``together`` the links connect all devices of the mesh, and telemetry is summed
    in the messages of the gradients.

    All devices of the mesh use the same level. A bucket may have gradients that are
    sharded over other axes, and gradients with copies on these axes. The copies must
    stay equal, so their devices cannot use different levels.
    """
    step = counters["step"]
    if sums.fallback is None:
        due = counters.get("due")
        found = synchronise_repeatably(
            [m.gradient for m in members],
            partials,
            states,
            links,
            worker,
            step,
            signals=sums.signals,
            measured=None if due is None else due == 0,
            summed=together,
        )
        return found, jnp.int32(0)
    levels = list(zip(*(m.levels for m in members), strict=True))
    names = sums.mesh.axis_names
    everyone = MeshLinks(names, math.prod(sums.mesh.shape.values()))
    totals, after, rows, level = synchronise_levels(
        levels,
        partials,
        states,
        links,
        worker,
        step,
        sums.fallback.least_gain,
        everyone,
    )
    return Synchronised(totals, after, rows, lambda: totals), level


def _local(gradient: Gradient, state: State) -> State:
    """One device's state, without the leading dims over workers and devices."""
    return {
        "residual": jax.tree.map(
            lambda x: x[0].reshape(gradient.shape), state["residual"]
        ),
        "codec": jax.tree.map(lambda x: x[0], state["codec"]),
    }


def _global(state: State, like: State) -> State:
    """Adds the leading dims that `_local` removes."""
    return jax.tree.map(lambda new, old: new[None].reshape(old.shape), state, like)
