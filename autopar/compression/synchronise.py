"""Sums gradients over workers through codecs, with error feedback.

Everything runs on one device's arrays inside a fully manual `jax.shard_map`
(``check_vma=False``). The collectives of all gradients of a call are fused.

The states differ between workers; their global arrays need a leading dim over
the workers' axes, to which `init_state` gives the part of one worker.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
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
from autopar.compression.norms import Sent, non_finite, squared_norm
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
    entries = list(zip(gradients, partials, states, strict=True))
    live = [k for k, entry in enumerate(entries) if entry[0].size]
    totals: list[jax.Array] = [_nothing(g, x, links) for g, x, _ in entries]
    new_states = list(states)
    columns = NON_FINITE + 1 + (COLUMNS if signals else 0)
    sums = jnp.zeros((len(entries), columns), jnp.float32)
    if live:
        given = [entries[k] for k in live]
        numbers = jnp.int32(worker), jnp.int32(step)
        made = _synchronise_some(given, links, *numbers, signals)
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


def report(sums: jax.Array) -> dict[str, jax.Array]:
    """Reads the sums of `synchronise` as a report about the codecs.

    Args:
      sums: (..., 6), of one worker or summed over workers and steps.

    Returns:
      ``relative_error``: of what was sent, in the L2 norm; ``gain``: the share
      of the squared norm that was sent, GraVAC's compression gain (arXiv
      2305.12201) with the residual counted in; ``residual_norm``: L2 norm of the
      residual; ``gradient_norm``: that of the gradient without it; ``non_finite``:
      number of elements. Each of shape (...). Where nothing was to be sent the
      error is 0 and the gain 1; where its norm is not finite both are NaN.
    """
    wanted = sums[..., WANTED]
    some = wanted != 0
    safe = jnp.where(some & jnp.isfinite(wanted), wanted, jnp.nan)
    return {
        "relative_error": jnp.where(some, jnp.sqrt(sums[..., ERROR] / safe), 0.0),
        "gain": jnp.where(some, sums[..., SENT] / safe, 1.0),
        "residual_norm": jnp.sqrt(sums[..., RESIDUAL]),
        "gradient_norm": jnp.sqrt(sums[..., GRADIENT]),
        "non_finite": sums[..., NON_FINITE],
    }


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
    groups = _encoded(entries, wanted, links, worker, step)
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
    rows = [_rows(group, feedbacks, partials, residuals) for group in groups]
    order = np.argsort([k for group in groups for k in group.members])
    sums = jnp.concatenate(rows)[order]
    if signals:
        coded = {
            k: gradient.seed
            for k, gradient in enumerate(gradients)
            if not (gradient.scatter or isinstance(gradient.codec, Dense))
        }
        sent = [w - made[k].error for k, w in enumerate(wanted)]
        found = signal_rows(partials, sent, totals, coded, links, step)
        sums = jnp.concatenate((sums, found), axis=1)
    return totals, states, sums


@dataclasses.dataclass(frozen=True, slots=True)
class _Encoded:
    """The result of a codec for one gradient.

    Attributes:
      total: the sum, as of `Reduced`.
      error: what was not sent, of the gradient's shape.
      state: the codec's new state.
    """

    total: jax.Array
    error: jax.Array
    state: Any


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """The results of a codec for the k gradients of a group.

    Attributes:
      members: by number.
      norms: squared norms, wanted, of the error and sent, (k, 3).
      non_finite: number of elements that are not finite, (k,).
    """

    members: dict[int, _Encoded]
    norms: jax.Array
    non_finite: jax.Array


def _encoded(
    entries: Sequence[tuple[Gradient, jax.Array, State]],
    wanted: Sequence[jax.Array],
    links: Links,
    worker: jax.Array,
    step: jax.Array,
) -> list[_Group]:
    """Runs the codecs on all gradients; those of a group are encoded side by side."""
    n, gradients = links.workers, [gradient for gradient, _, _ in entries]
    pieces = [_piece(entry, n) for entry in entries]
    chunks = [
        to_chunks(w, g.scatter_dim, n, piece.chunk)
        for g, w, piece in zip(gradients, wanted, pieces, strict=True)
    ]
    groups = grouped(pieces)
    whole = [pieces[group[0]].whole for group in groups]
    given = [
        joined([chunks[k] for k in group], whole=one)
        for group, one in zip(groups, whole, strict=True)
    ]
    rounds = [
        _rounds([entries[k] for k in group], values, n, worker, step)
        for group, values in zip(groups, given, strict=True)
    ]
    made = exchange(rounds, links)
    sent = [
        _sent([entries[k] for k in group], wanted[group[0]], values, reduced, one)
        for group, values, reduced, one in zip(groups, given, made, whole, strict=True)
    ]
    norms = [one.norms() for one in sent]
    bad = non_finite(sent, norms)
    out: list[_Group] = []
    for i, group in enumerate(groups):
        widths = [pieces[k].chunk for k in group]
        found = zip(
            [gradients[k] for k in group],
            cut(made[i].total, widths, whole=whole[i]),
            cut(sent[i].error, widths, whole=whole[i]),
            cut_states(made[i].state, widths),
            strict=True,
        )
        each = [
            _Encoded(
                total, error if len(group) == 1 else _from_chunks(one, error), state
            )
            for one, total, error, state in found
        ]
        members = dict(zip(group, each, strict=True))
        out.append(_Group(members, norms[i], bad[i]))
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
) -> Sent:
    """Returns what was to be sent of a group and what was not, computed once.

    Of one gradient in its own shape, without padding; of gradients that lie one behind
    the other as one row.
    """
    one, partial, _ = group[0]
    total = made.total.astype(one.dtype or partial.dtype)
    if len(group) == 1:
        error = _error(one, values, made.sent)
        return Sent(wanted, error, total, (1,), part=one.scatter)
    # An array that a codec hands on as it is has no error.
    if made.sent is values:
        error = jnp.zeros_like(values)
    else:
        error = materialised(values - made.sent)
    count = len(values)
    widths = tuple(gradient.chunk(count) for gradient, _, _ in group)
    if not whole:
        return Sent(values, error, total, widths, part=one.scatter)
    wanted, error, total = (x.reshape(1, -1) for x in (values, error, total))
    return Sent(wanted, error, total, tuple(count * width for width in widths))


def _wanted(gradient: Gradient, partial: jax.Array, residual: Any) -> jax.Array:
    """Returns what is to be sent, float32, computed once."""
    values = with_residual(partial, residual, gradient.feedback)
    return materialised(values) if gradient.feedback.active else values


def _error(gradient: Gradient, chunks: jax.Array, sent: jax.Array) -> jax.Array:
    """Returns what was not sent; a codec that hands chunks on sends all."""
    if sent is chunks:
        return jnp.zeros(gradient.shape, jnp.float32)
    return materialised(_from_chunks(gradient, chunks - sent))


def _from_chunks(gradient: Gradient, chunks: jax.Array) -> jax.Array:
    return from_chunks(chunks, gradient.shape, gradient.scatter_dim)


def _nothing(gradient: Gradient, partial: jax.Array, links: Links) -> jax.Array:
    """The sum of a gradient without elements, and no other gradient's."""
    if gradient.size:
        return partial
    shape = own_shape(gradient.shape, gradient.scatter_dim, links.workers)
    return partial.reshape(shape)


def _rows(
    group: _Group,
    feedbacks: Sequence[Feedback],
    partials: Sequence[jax.Array],
    residuals: Sequence[Any],
) -> jax.Array:
    """The rows of sums of a group's gradients, float32 (k, 6)."""
    wanted, error, _ = group.norms.T
    kept, own = jnp.zeros_like(wanted), wanted
    if any(feedbacks[k].active for k in group.members):
        as_error = all(
            f.active and f.dtype == "float32" and not f.average_every
            for f in (feedbacks[k] for k in group.members)
        )
        norms = [
            jnp.zeros(())
            if isinstance(residuals[k], tuple)
            else squared_norm(residuals[k])
            for k in group.members
        ]
        kept = error if as_error else jnp.stack(norms)
        own = jnp.stack([squared_norm(partials[k]) for k in group.members])
    columns = jnp.stack((kept, own, group.non_finite), axis=1)
    return jnp.concatenate((group.norms, columns), axis=1)
