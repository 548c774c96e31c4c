"""Sums gradients over workers through codecs, with error feedback.

Everything runs on one device's arrays inside a fully manual `jax.shard_map`
(``check_vma=False``). The collectives of all gradients of a call are fused.

The states differ between workers; their global arrays need a leading dim over
the workers' axes, to which `init_state` gives the part of one worker.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compression.chunking import from_chunks, own_part, own_shape, to_chunks
from autopar.compression.codecs.blocks import materialised
from autopar.compression.codecs.codec import Codec, CodecContext, Reduced, Rounds
from autopar.compression.codecs.dense import Dense
from autopar.compression.codecs.quantise import without_server_feedback
from autopar.compression.exchange import Links, chunk_elements, exchange
from autopar.compression.feedback import Feedback, next_residuals, with_residual
from autopar.compression.joining import (
    Piece,
    cut,
    cut_states,
    grouped,
    joined,
    joined_states,
)
from autopar.compression.norms import Group, Sent, rows
from autopar.compression.signal import COLUMNS, signal_rows

State = dict[str, Any]

# The columns of the sums.
WANTED, ERROR, SENT, RESIDUAL, GRADIENT, NON_FINITE = range(6)


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
      ValueError: it cannot; the message says why.
    """
    where = f"gradient {gradient.name!r} of shape {gradient.shape}"
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{where}: only real floating-point gradients can be compressed, got "
            f"{jnp.dtype(dtype).name}; sum it with jax.lax.psum."
        )
    if workers < 1:
        raise ValueError(f"{where}: needs at least one worker, got {workers}.")
    dim = gradient.scatter_dim
    if dim is not None:
        if not 0 <= dim < len(gradient.shape):
            raise ValueError(f"{where}: there is no dim {dim} to scatter.")
        if gradient.shape[dim] % workers:
            raise ValueError(
                f"{where}: dim {dim} does not divide into {workers} equal parts; "
                "scatter another dim, or use scatter_dim=None."
            )
    if gradient.size:
        problem = gradient.codec.check(gradient.shape, scatter=gradient.scatter)
        if problem:
            raise ValueError(f"{where}: codec {gradient.codec.name}: {problem}")


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
        codec = without_server_feedback(codec)
    elements = workers * gradient.chunk(workers)
    residual: Any = ()
    if gradient.feedback.active:
        residual = jnp.zeros(gradient.shape, gradient.feedback.dtype)
    return {
        "residual": residual,
        "codec": codec.init(gradient.shape, elements, workers),
    }


def synchronise(
    gradients: Sequence[Gradient],
    partials: Sequence[jax.Array],
    states: Sequence[State],
    links: Links,
    worker: jax.Array,
    step: jax.Array,
    *,
    signals: bool = False,
    measured: jax.Array | None = None,
) -> tuple[list[jax.Array], list[State], jax.Array]:
    """Sums gradients over the workers.

    Args:
      gradients: how each is summed.
      partials: this worker's part of each, of any floating dtype.
      states: of `init_state` or the step before.
      links: the collectives over the workers.
      worker: number of this worker, int32 scalar.
      step: number of the step from 0, int32 scalar, the same on all workers.
      signals: whether the signal of what is sent is measured.
      measured: whether errors and norms are, a bool scalar; None: they are. What is
        not measured is `NOT_MEASURED`, but for the norms of what was to be sent. Where
        an element is not finite all are measured.

    Returns:
      The sums in the partials' dtypes, whole or, where scattered, this worker's
      part; the new states; and float32 (number of gradients, 6) of this
      worker: the squared norms of what was to be sent, of its error, of what
      was sent, of the new residual and of the partial itself, and the number of
      elements of what was to be sent that are not finite. Where a codec fails on
      finite elements those of its error count, where only the sum overflows its own.
      With ``signals`` four columns more (`autopar.compression.signal.signal_rows`).

    Raises:
      ValueError: a partial does not fit its gradient; see `check_gradient`.
    """
    _check_call(gradients, partials, states, links.workers)
    assert measured is None or not signals
    entries = list(zip(gradients, partials, states, strict=True))
    live = [k for k, entry in enumerate(entries) if entry[0].size]
    totals: list[jax.Array] = [_nothing(g, x, links) for g, x, _ in entries]
    new_states = list(states)
    columns = NON_FINITE + 1 + (COLUMNS if signals else 0)
    sums = jnp.zeros((len(entries), columns), jnp.float32)
    if live:
        given = [entries[k] for k in live]
        numbers = jnp.int32(worker), jnp.int32(step)
        made = _synchronise_some(given, links, *numbers, signals, measured)
        for k, total, state in zip(live, *made[:2], strict=True):
            totals[k], new_states[k] = total, state
        sums = sums.at[np.array(live)].set(made[2])
    return totals, new_states, sums


def restore_unless_finite(old: Any, new: Any, finite: jax.Array) -> Any:
    """Restores what a step carries when a gradient is not finite.

    Args:
      old: a tree of arrays, before the step.
      new: after it, a tree of the same structure, shapes and dtypes.
      finite: bool scalar, the same on all workers.

    Returns:
      ``new`` where the gradients are finite, else ``old``.
    """

    def chosen(new: Any, old: Any) -> Any:
        everywhere = jnp.broadcast_to(finite, jnp.shape(new))
        return jax.lax.select(everywhere, new, jnp.asarray(old))

    return jax.tree.map(chosen, new, old)


def _check_call(
    gradients: Sequence[Gradient],
    partials: Sequence[jax.Array],
    states: Sequence[State],
    workers: int,
) -> None:
    if not len(gradients) == len(partials) == len(states):
        raise ValueError(
            f"synchronise: got {len(gradients)} gradients, {len(partials)} partials "
            f"and {len(states)} states; each gradient needs one of each."
        )
    for gradient, partial in zip(gradients, partials, strict=True):
        if tuple(partial.shape) != gradient.shape:
            raise ValueError(
                f"synchronise: gradient {gradient.name!r} is of shape "
                f"{gradient.shape}, its partial of {tuple(partial.shape)}; the shape "
                "is the one on one device."
            )
        check_gradient(gradient, partial.dtype, workers)


def _synchronise_some(
    entries: Sequence[tuple[Gradient, jax.Array, State]],
    links: Links,
    worker: jax.Array,
    step: jax.Array,
    signals: bool,
    measured: jax.Array | None,
) -> tuple[list[jax.Array], list[State], jax.Array]:
    """Totals, states and sums of gradients that all have elements."""
    n, gradients = links.workers, [gradient for gradient, _, _ in entries]
    # Computed once, however many loops read it: without the barriers each would add the
    # residual again, and transpose the gradient where a product left it transposed.
    partials = [materialised(partial) for _, partial, _ in entries]
    wanted = [
        _wanted(gradient, partial, state["residual"])
        for partial, (gradient, _, state) in zip(partials, entries, strict=True)
    ]
    eager = measured is None
    groups = _encoded(entries, wanted, links, worker, step, eager=eager)
    made = {k: one for group in groups for k, one in group.members.items()}
    feedbacks = [gradient.feedback for gradient in gradients]
    errors = [made[k].error for k in range(len(entries))]
    residuals = next_residuals(feedbacks, errors, links, step)
    totals = [
        own_part(made[k].total, gradient.shape, gradient.scatter_dim, n).astype(
            partials[k].dtype
        )
        for k, gradient in enumerate(gradients)
    ]
    states = [
        {"residual": residuals[k], "codec": made[k].state} for k in range(len(entries))
    ]
    found = [
        Group(
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
    sums = rows(found, measured)[order]
    if signals:
        coded = {
            k: gradient.seed
            for k, gradient in enumerate(gradients)
            if not (gradient.scatter or isinstance(gradient.codec, Dense))
        }
        sent = [w - made[k].known_error for k, w in enumerate(wanted)]
        more = signal_rows(partials, sent, totals, coded, links, step)
        sums = jnp.concatenate((sums, more), axis=1)
    return totals, states, sums


@dataclasses.dataclass(frozen=True, slots=True)
class _Encoded:
    """The result of a codec for one gradient.

    Attributes:
      total: the sum, as of `Reduced`.
      error: what was not sent, of the gradient's shape; None: nobody needs it.
      state: the codec's new state.
    """

    total: jax.Array
    error: jax.Array | None
    state: Any

    @property
    def known_error(self) -> jax.Array:
        """The error, where it was asked for."""
        assert self.error is not None
        return self.error


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """The results of a codec for the k gradients of a group.

    Attributes:
      members: by number.
      sent: what was to be sent of them, and what was not.
      again: makes `sent` anew, of the gradients as they are in memory.
    """

    members: dict[int, _Encoded]
    sent: Sent
    again: Callable[[], Sent]


def _encoded(
    entries: Sequence[tuple[Gradient, jax.Array, State]],
    wanted: Sequence[jax.Array],
    links: Links,
    worker: jax.Array,
    step: jax.Array,
    *,
    eager: bool,
) -> list[_Group]:
    """Runs the codecs on all gradients; those of a group are encoded side by side.

    Errors are computed where they are fed back, or all if ``eager``.
    """
    n, gradients = links.workers, [gradient for gradient, _, _ in entries]
    pieces = [_piece(entry, n) for entry in entries]
    groups = grouped(pieces)
    whole = [pieces[group[0]].whole for group in groups]

    def side_by_side(i: int) -> jax.Array:
        chunks = [
            to_chunks(wanted[k], gradients[k].scatter_dim, n, pieces[k].chunk)
            for k in groups[i]
        ]
        return joined(chunks, whole=whole[i])

    given = [side_by_side(i) for i in range(len(groups))]
    rounds = [
        _rounds([entries[k] for k in group], values, n, worker, step)
        for group, values in zip(groups, given, strict=True)
    ]
    made = exchange(rounds, links)

    def sent_of(i: int, values: jax.Array) -> Sent:
        own, first = [entries[k] for k in groups[i]], wanted[groups[i][0]]
        exact = made[i].sent is given[i]
        return _sent(own, first, values, made[i], whole[i], exact=exact)

    out: list[_Group] = []
    for i, group in enumerate(groups):
        own, sent = [entries[k] for k in group], sent_of(i, given[i])

        def again(i: int = i) -> Sent:
            return sent_of(i, side_by_side(i))

        kept = eager or any(gradients[k].feedback.active for k in group)
        if kept:
            sent = sent.with_error()
        widths = [pieces[k].chunk for k in group]
        found = zip(
            cut(made[i].total, widths, whole=whole[i]),
            _errors(own, sent, widths, whole=whole[i]),
            cut_states(made[i].state, widths),
            strict=True,
        )
        each = [_Encoded(total, error, state) for total, error, state in found]
        members = dict(zip(group, each, strict=True))
        out.append(_Group(members, sent, (lambda s=sent: s) if kept else again))
    return out


def _rounds(
    group: Sequence[tuple[Gradient, jax.Array, State]],
    values: jax.Array,
    workers: int,
    worker: jax.Array,
    step: jax.Array,
) -> Rounds:
    """Begins to encode a group, (n, C)."""
    one, alone = group[0][0], len(group) == 1
    context = CodecContext(
        workers=workers,
        worker=worker,
        step=step,
        seed=one.seed,
        shape=one.shape if alone else (values.size,),
        size=one.size if alone else values.size,
        scatter=one.scatter,
    )
    state = joined_states([state["codec"] for _, _, state in group])
    return one.codec.reduce(values, state, context)


def _piece(entry: tuple[Gradient, jax.Array, State], workers: int) -> Piece:
    """A gradient as it is grouped with others."""
    gradient, partial, state = entry
    return Piece(
        codec=gradient.codec,
        size=gradient.size,
        chunk=gradient.chunk(workers),
        workers=workers,
        scatter=gradient.scatter,
        dtype=gradient.dtype or partial.dtype.name,
        state=bool(jax.tree.leaves(state["codec"])),
    )


def _sent(
    group: Sequence[tuple[Gradient, jax.Array, State]],
    wanted: jax.Array,
    values: jax.Array,
    made: Reduced,
    whole: bool,
    *,
    exact: bool,
) -> Sent:
    """Returns what was to be sent of a group, and how what was not is computed.

    Of one gradient in its own shape, without padding; of gradients that lie one behind
    the other as one row. With ``exact`` the codec hands on what it is given, so
    there is no error.
    """
    one, partial, _ = group[0]
    total = made.total.astype(one.dtype or partial.dtype)
    if len(group) == 1:

        def own_error() -> jax.Array:
            if exact:
                return jnp.zeros(one.shape, jnp.float32)
            return materialised(_from_chunks(one, values - made.understood))

        return Sent(wanted, own_error, total, (1,), part=one.scatter)
    count = len(values)
    widths = tuple(gradient.chunk(count) for gradient, _, _ in group)
    shape = (1, -1) if whole else values.shape
    if whole:
        widths = tuple(count * width for width in widths)
        total = total.reshape(shape)

    def error() -> jax.Array:
        if exact:
            return jnp.zeros_like(values).reshape(shape)
        return materialised(values - made.understood).reshape(shape)

    return Sent(values.reshape(shape), error, total, widths, part=one.scatter)


def _errors(
    group: Sequence[tuple[Gradient, jax.Array, State]],
    sent: Sent,
    widths: Sequence[int],
    *,
    whole: bool,
) -> Sequence[jax.Array | None]:
    """What was not sent of each gradient of a group, where it is known."""
    if callable(sent.error):
        return [None] * len(group)
    if len(group) == 1:
        return [sent.error]
    parts = cut(sent.error, widths, whole=whole)
    return [_from_chunks(g, x) for (g, _, _), x in zip(group, parts, strict=True)]


def _wanted(gradient: Gradient, partial: jax.Array, residual: Any) -> jax.Array:
    """Returns what is to be sent, float32, computed once."""
    values = with_residual(partial, residual, gradient.feedback)
    return materialised(values) if gradient.feedback.active else values


def _from_chunks(gradient: Gradient, chunks: jax.Array) -> jax.Array:
    return from_chunks(chunks, gradient.shape, gradient.scatter_dim)


def _nothing(gradient: Gradient, partial: jax.Array, links: Links) -> jax.Array:
    """The sum of a gradient without elements, and no other gradient's."""
    if gradient.size:
        return partial
    shape = own_shape(gradient.shape, gradient.scatter_dim, links.workers)
    return partial.reshape(shape)
