"""Sums gradients over workers by codecs, with error feedback.

All functions work on one device's arrays inside a fully manual `jax.shard_map`
(``check_vma=False``). The gradients of one call share collectives.

Each worker has its own state. So the global arrays of the states need a leading dim
that is sharded over the workers' mesh axes. `init_state` makes the state of one worker.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compression.codecs.blocks import add_barrier
from autopar.compression.codecs.registry import format_codec, parse_codec
from autopar.compression.encoding import (
    AllWorkers,
    EncodedGroup,
    Entry,
    TelemetryGroup,
    encode_gradients,
    own_part,
    own_shape,
    summed_rows,
    telemetry_rows,
)
from autopar.compression.exchange import RecordingLinks, WorkerLinks
from autopar.compression.gradient import (
    Gradient,
    State,
    check_gradient,
    init_state,
    next_residuals,
    with_residual,
)
from autopar_errors import InputError

# Measures how much of the true gradient compressed messages carry (their signal).
#
# A worker's gradient is the true gradient plus noise, and the noises of two workers
# are independent. So in the inner product of two workers' gradients, the noise has an
# expected value of zero. Let ``g`` be the true gradient, ``g_i`` the gradient of
# worker i, and ``c_i`` the values that it sends, including what comes from its
# residual. Let n be the number of workers. Then::
#
#     E sum_{i != j} <g_i, g_j> = n (n - 1) |g|^2
#     E sum_{i != j} <c_j, g_i> = n <sum_j E c_j, g> (n - 1) / n
#
# The second line divided by the first tells how much a step along the sent values
# helps, compared with a step along the true gradient. Values that are sent late count
# only as far as they agree with the present gradient. Let ``T`` be the sum of the
# values that all workers send. Then the second line is ``sum_i <T - c_i, g_i>``, and
# each worker can compute its own term.
#
# For the first line a worker would need the sum of all gradients, which it does not
# have. Therefore workers sum sketches of their gradients. For a sketch, the elements
# are multiplied by random signs, which are the same on all workers, and added up in
# `WIDTH` numbers (Charikar et al., ICALP 2002). The inner product of two sketches has
# the inner product of the gradients as its expected value over random signs. The
# variance of the inner product of two sketches is at most ``2 |g_i|^2 |g_j|^2 /
# WIDTH``.


WIDTH = 64
"""Numbers of a sketch. Each step sends 256 bytes of sketch for each gradient with a
codec.
"""

# Indices of columns in a row of telemetry, after the columns of
# `autopar.compression.synchronise`.
SENT_SIGNAL, SENT_SQUARE, DENSE_SIGNAL, DENSE_SQUARE = range(6, 10)
COLUMNS = 4


def sketch(values: jax.Array, seed: jax.Array) -> jax.Array:
    """Multiplies the elements of an array by random signs, and adds them up in `WIDTH`
    numbers.

    Args:
      values: an array of any shape.
      seed: uint32 scalar, the same on all workers.

    Returns:
      float32 (WIDTH,); an array with at most `WIDTH` elements is returned unchanged.
    """
    flat = values.astype(jnp.float32).reshape(-1)
    if flat.size <= WIDTH:
        return flat
    flat = jnp.where(_signs(flat.size, seed), flat, -flat)
    flat = jnp.pad(flat, (0, -flat.size % WIDTH))
    return jnp.sum(flat.reshape(-1, WIDTH), axis=0)


def signal_rows(
    partials: Sequence[jax.Array],
    sent: Sequence[jax.Array],
    totals: Sequence[jax.Array],
    seeds: Mapping[int, int],
    links: WorkerLinks,
    step: jax.Array,
) -> jax.Array:
    """The numbers of one worker for the signals; the caller adds them up over workers.

    Args:
      partials: this worker's gradients.
      sent: the sent values of each gradient, in the same shapes.
      totals: the sums of all workers' sent values, in the same shapes.
      seeds: number of a gradient to measure -> a seed that no other gradient has.
      links: the collectives over the workers.
      step: number of the step, int32 scalar.

    Returns:
      float32 (gradients, 4). The sums over workers are: the signal of the sent values,
      the squared norm of their sum, and the same two numbers for the dense gradients.
      Rows of gradients that ``seeds`` does not contain are NaN.
    """
    rows = jnp.full((len(partials), COLUMNS), jnp.nan, jnp.float32)
    if not seeds:
        return rows
    start = step.astype(jnp.uint32) * jnp.uint32(0x85EBCA6B)
    own = [sketch(partials[k], start + jnp.uint32(n)) for k, n in seeds.items()]
    ends = np.cumsum([x.size for x in own])[:-1].tolist()
    sums = jnp.split(links.all_reduce(jnp.concatenate(own)), ends)
    made = [
        _row(partials[k], sent[k], totals[k], mine, whole, links.workers)
        for k, mine, whole in zip(seeds, own, sums, strict=True)
    ]
    return rows.at[np.array(list(seeds))].set(jnp.stack(made))


def _row(
    partial: jax.Array,
    sent: jax.Array,
    total: jax.Array,
    own: jax.Array,
    whole: jax.Array,
    workers: int,
) -> jax.Array:
    """The four numbers in the row of one gradient."""
    total = total.astype(jnp.float32)
    return jnp.stack(
        [
            jnp.sum((total - sent) * partial.astype(jnp.float32)),
            jnp.sum(jnp.square(total)) / workers,
            jnp.sum((whole - own) * own),
            jnp.sum(jnp.square(whole)) / workers,
        ]
    )


def _signs(count: int, seed: jax.Array) -> jax.Array:
    """Random bits, bool (count,), by a 32-bit hash (Wellons, "hash-prospector")."""
    bits = jax.lax.iota(jnp.uint32, count) * jnp.uint32(0x9E3779B1) ^ seed
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return (bits ^ (bits >> 16)) < jnp.uint32(1 << 31)


# Indices of the columns in a row of telemetry.
WANTED, ERROR, SENT, RESIDUAL, GRADIENT, NON_FINITE = range(6)


@dataclasses.dataclass(frozen=True, slots=True)
class Synchronised:
    """The result of `synchronise`.

    Attributes:
      totals: the sums.
      states: the new states.
      sums: telemetry, as in the result of `synchronise`.
      again: a function that computes the totals again, for a branch that few steps
        take. If the branch read ``totals``, every step would have to keep them in
        memory.
    """

    totals: list[jax.Array]
    states: list[State]
    sums: jax.Array
    again: Callable[[], list[jax.Array]]


def synchronise(
    gradients: Sequence[Gradient],
    partials: Sequence[jax.Array],
    states: Sequence[State],
    links: WorkerLinks,
    worker: jax.Array,
    step: jax.Array,
    *,
    signals: bool = False,
    measured: jax.Array | None = None,
    summed: bool = False,
) -> tuple[list[jax.Array], list[State], jax.Array]:
    """Sums gradients over the workers.

    Args:
      gradients: settings of each gradient.
      partials: this worker's partial gradients, in any floating dtype.
      states: states from `init_state` or from the previous step.
      links: the collectives over the workers.
      worker: number of this worker, int32 scalar.
      step: number of the step from 0, int32 scalar, the same on all workers.
      signals: whether to measure the signal of the sent values
        (`autopar.compression.synchronise`).
      measured: whether to measure errors and norms, a bool scalar; None: yes. If false,
        only the norms of the values to send are measured, and the other columns are
        `NOT_MEASURED`; if an element is not finite, all columns are measured
        nevertheless.
      summed: whether telemetry is summed over the workers. In a step that does not
        measure, this sum joins the message of another sum, if there is one.

    Returns:
      The sums in the dtypes of the partial gradients (whole or, if scattered, this
      worker's part); the new states; and telemetry, float32 (number of gradients, 6).
      The telemetry is of this worker alone or, with ``summed``, the sum over all
      workers. The first five columns are squared norms: of the values to send, of their
      error, of the sent values, of the new residual and of the partial gradient. The
      sixth column is the number of non-finite elements of the values to send. If the
      values to send are finite, but a codec's error is not, it is the number of
      non-finite elements of the error. If only the sum overflows, it is the number of
      non-finite elements of the sum. With ``signals`` there are four more columns
      (`autopar.compression.synchronise.signal_rows`).

    Raises:
      InputError: a partial gradient cannot be summed; see `check_gradient`.
    """
    made = synchronise_repeatably(
        gradients, partials, states, links, worker, step,
        signals=signals, measured=measured, summed=summed,
    )  # fmt: skip
    return made.totals, made.states, made.sums


def synchronise_repeatably(
    gradients: Sequence[Gradient],
    partials: Sequence[jax.Array],
    states: Sequence[State],
    links: WorkerLinks,
    worker: jax.Array,
    step: jax.Array,
    *,
    signals: bool = False,
    measured: jax.Array | None = None,
    summed: bool = False,
) -> Synchronised:
    """Does the same as `synchronise`; the result has a function that computes the sums
    again.
    """
    _check_call(gradients, partials, states, links.workers)
    assert measured is None or not signals
    entries = list(zip(gradients, partials, states, strict=True))
    live = [k for k, entry in enumerate(entries) if entry[0].size]
    nothing: list[jax.Array] = [_nothing(g, x, links) for g, x, _ in entries]
    new_states = list(states)
    columns = NON_FINITE + 1 + (COLUMNS if signals else 0)
    sums = jnp.zeros((len(entries), columns), jnp.float32)
    if not live:
        return Synchronised(nothing, new_states, sums, lambda: nothing)
    given = [entries[k] for k in live]
    numbers = jnp.int32(worker), jnp.int32(step)
    made = _synchronise_some(given, links, *numbers, signals, measured, summed)
    for k, state in zip(live, made.states, strict=True):
        new_states[k] = state

    def among_all(totals: Sequence[jax.Array]) -> list[jax.Array]:
        known = dict(zip(live, totals, strict=True))
        return [known.get(k, empty) for k, empty in enumerate(nothing)]

    return Synchronised(
        among_all(made.totals),
        new_states,
        sums.at[np.array(live)].set(made.sums),
        lambda: among_all(made.again()),
    )


def restore_unless_finite(old: Any, new: Any, finite: jax.Array) -> Any:
    """Keeps the old values of a step's state if a gradient is not finite.

    Args:
      old: a tree of arrays from before the step.
      new: the tree after the step, with the same structure, shapes and dtypes.
      finite: bool scalar, the same on all workers.

    Returns:
      ``new`` if the gradients are finite, otherwise ``old``.
    """

    def select(new: Any, old: Any) -> Any:
        everywhere = jnp.broadcast_to(finite, jnp.shape(new))
        return jax.lax.select(everywhere, new, jnp.asarray(old))

    return jax.tree.map(select, new, old)


def _check_call(
    gradients: Sequence[Gradient],
    partials: Sequence[jax.Array],
    states: Sequence[State],
    workers: int,
) -> None:
    if not len(gradients) == len(partials) == len(states):
        raise InputError(
            f"synchronise: got {len(gradients)} gradients, {len(partials)} partials "
            f"and {len(states)} states; each gradient needs one of each."
        )
    for gradient, partial in zip(gradients, partials, strict=True):
        if tuple(partial.shape) != gradient.shape:
            raise InputError(
                f"synchronise: gradient {gradient.name!r} is of shape "
                f"{gradient.shape}, its partial of {tuple(partial.shape)}; the shape "
                "is the one on one device."
            )
        check_gradient(gradient, partial.dtype, workers)


def _synchronise_some(
    entries: Sequence[Entry],
    links: WorkerLinks,
    worker: jax.Array,
    step: jax.Array,
    signals: bool,
    measured: jax.Array | None,
    summed: bool,
) -> Synchronised:
    """Does `synchronise_repeatably` for gradients that all have at least one
    element.
    """
    n, gradients = links.workers, [gradient for gradient, _, _ in entries]
    # With the barriers, XLA computes these values once, however many loops read them.
    # Without them, each loop would add the residual again. If a matrix product left the
    # gradient transposed, each loop would also transpose it.
    partials = [add_barrier(partial) for _, partial, _ in entries]
    wanted = [
        _values_to_send(gradient, partial, state["residual"])
        for partial, (gradient, _, state) in zip(partials, entries, strict=True)
    ]
    eager = measured is None
    # If a total is scattered, workers have different parts of it, and would take
    # different branches of a conditional.
    together = summed and not eager and not any(g.scatter for g in gradients)
    groups, squares = encode_gradients(
        entries, wanted, links, worker, step, eager=eager, with_squares=together
    )
    made = {k: one for group in groups for k, one in group.members.items()}
    feedbacks = [gradient.feedback for gradient in gradients]
    errors = [made[k].error for k in range(len(entries))]
    residuals = next_residuals(feedbacks, errors, links, step)
    totals = _own_parts(entries, {k: one.total for k, one in made.items()}, n)
    states = [
        {"residual": residuals[k], "codec": made[k].state} for k in range(len(entries))
    ]
    found = [
        TelemetryGroup(
            group.sent,
            again=group.again,
            sound=gradients[next(iter(group.members))].codec.sound,
            feedbacks=[feedbacks[k] for k in group.members],
            partials=[partials[k] for k in group.members],
            residuals=[residuals[k] for k in group.members],
        )
        for group in groups
    ]
    order = np.argsort([k for group in groups for k in group.members])
    workers = None if squares is None else AllWorkers(links, squares)
    sums = telemetry_rows(found, measured, workers)[order]
    if signals:
        coded = {
            k: gradient.seed
            for k, gradient in enumerate(gradients)
            if not (gradient.scatter or gradient.codec.lossless)
        }
        sent = [w - made[k].known_error for k, w in enumerate(wanted)]
        more = signal_rows(partials, sent, totals, coded, links, step)
        sums = jnp.concatenate((sums, more), axis=1)
    if summed and not together:
        sums = summed_rows(sums, links)
    return Synchronised(totals, states, sums, lambda: _again(entries, groups, n))


def _again(
    entries: Sequence[Entry], groups: Sequence[EncodedGroup], workers: int
) -> list[jax.Array]:
    """Computes the totals again."""
    found: dict[int, jax.Array] = {}
    for group in groups:
        found.update(zip(group.members, group.totals(), strict=True))
    return _own_parts(entries, found, workers)


def _own_parts(
    entries: Sequence[Entry], totals: Mapping[int, jax.Array], workers: int
) -> list[jax.Array]:
    """The part of each total that this worker needs, by the gradient's index."""
    return [
        own_part(totals[k], g.shape, g.scatter_dim, workers).astype(partial.dtype)
        for k, (g, partial, _) in enumerate(entries)
    ]


def _values_to_send(gradient: Gradient, partial: jax.Array, residual: Any) -> jax.Array:
    """The values to send, float32; XLA computes them only once."""
    values = with_residual(partial, residual, gradient.feedback)
    return add_barrier(values) if gradient.feedback.active else values


def _nothing(gradient: Gradient, partial: jax.Array, links: WorkerLinks) -> jax.Array:
    """The sum of a gradient that has no elements."""
    if gradient.size:
        return partial
    shape = own_shape(gradient.shape, gradient.scatter_dim, links.workers)
    return partial.reshape(shape)


# In each step, sums gradients by the first of several codecs that sends enough of
# them.
#
# GraVAC (arXiv 2305.12201) compresses a gradient in two ways. In each step it sends the
# smaller message if its gain (the fraction of the gradient's squared norm that it
# carries) is large enough, and otherwise the larger message. In this module each choice
# of codecs is a level, and one compiled program contains all levels. The program first
# computes the gain of each level without sending gradients, and sums the gains'
# numerators and denominators over the workers. Then one branch of a `jax.lax.switch`
# sends the gradients: all workers have the same sums, so they take the same branch.
#
# All levels use the same residuals. Each level has a codec state of its own, which does
# not change in steps in which another level sends.
#
# >>> Fallback(("int8:block=256", "bf16"), least_gain=0.75).codecs
# ('int8', 'bf16')


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
    # If ``wanted`` is NaN or infinite, no level may count as good enough.
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
