"""Runs the codecs of many gradients side by side, and knows what each sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.compression.chunking import from_chunks, to_chunks
from autopar.compression.codecs.blocks import materialised
from autopar.compression.codecs.codec import (
    AllReduce,
    CodecContext,
    Reduced,
    Rounds,
)
from autopar.compression.exchange import Links, exchange
from autopar.compression.gradient import Gradient, State
from autopar.compression.joining import (
    Piece,
    cut,
    cut_states,
    grouped,
    joined,
    joined_states,
)
from autopar.compression.norms import Sent, squares

# A gradient, this worker's part of it, and its state.
Entry = tuple[Gradient, jax.Array, State]


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
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
class EncodedGroup:
    """The results of a codec for the k gradients of a group.

    Attributes:
      members: by number.
      sent: what was to be sent of them, and what was not.
      again: makes `sent` anew, of the gradients as they are in memory.
      totals: makes the members' totals anew, in their order (`Reduced.again`).
    """

    members: dict[int, Encoded]
    sent: Sent
    again: Callable[[], Sent]
    totals: Callable[[], Sequence[jax.Array]]


def encoded(
    entries: Sequence[Entry],
    wanted: Sequence[jax.Array],
    links: Links,
    worker: jax.Array,
    step: jax.Array,
    *,
    eager: bool,
    with_squares: bool = False,
) -> tuple[list[EncodedGroup], jax.Array | None]:
    """Runs the codecs on all gradients; those of a group are encoded side by side.

    Errors are computed where they are fed back, or all if ``eager``.

    Returns:
      The groups, and with ``with_squares`` the squared norms of what all workers
      wanted, in the order of the groups' members: they travel with the first messages
      that are summed.
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

    def laid(i: int, values: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
        own = [gradients[k] for k in groups[i]]
        return _laid(own, wanted[groups[i][0]], values, whole=whole[i])

    given = [side_by_side(i) for i in range(len(groups))]
    rounds = [
        _rounds([entries[k] for k in group], values, n, worker, step)
        for group, values in zip(groups, given, strict=True)
    ]
    if with_squares:
        own = [squares(*laid(i, values)) for i, values in enumerate(given)]
        rounds.append(_summed(jnp.concatenate(own)))
    made = exchange(rounds, links)

    def sent_of(i: int, values: jax.Array) -> Sent:
        own = [entries[k] for k in groups[i]]
        exact = made[i].sent is given[i]
        return _sent(own, laid(i, values), values, made[i], exact=exact)

    out: list[EncodedGroup] = []
    for i, group in enumerate(groups):
        own, sent = [entries[k] for k in group], sent_of(i, given[i])

        widths = [pieces[k].chunk for k in group]

        def again(i: int = i) -> Sent:
            return sent_of(i, side_by_side(i))

        def totals(i: int = i, widths: Sequence[int] = widths) -> Sequence[jax.Array]:
            make = made[i].again
            return cut(make() if make else made[i].total, widths, whole=whole[i])

        kept = eager or any(gradients[k].feedback.active for k in group)
        if kept:
            sent = sent.with_error()
        found = zip(
            cut(made[i].total, widths, whole=whole[i]),
            _errors(own, sent, widths, whole=whole[i]),
            cut_states(made[i].state, widths),
            strict=True,
        )
        each = [Encoded(total, error, state) for total, error, state in found]
        members = dict(zip(group, each, strict=True))
        anew = (lambda s=sent: s) if kept else again
        out.append(EncodedGroup(members, sent, anew, totals))
    return out, made[-1].total if with_squares else None


def _summed(values: jax.Array) -> Rounds:
    """Asks for the sum of values over the workers, as a codec of one round."""
    total = yield AllReduce(values)
    return Reduced(total, values, ())


def _rounds(
    group: Sequence[Entry],
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


def _piece(entry: Entry, workers: int) -> Piece:
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


def _laid(
    group: Sequence[Gradient], wanted: jax.Array, values: jax.Array, *, whole: bool
) -> tuple[jax.Array, tuple[int, ...]]:
    """What was to be sent of a group, and the widths of its gradients; see `Sent`.

    Of one gradient in its own shape, without padding; of gradients that lie one behind
    the other as one row.

    Args:
      group: the gradients.
      wanted: of the first, in its own shape.
      values: chunks of all, (n, C).
      whole: whether they lie one behind the other.
    """
    if len(group) == 1:
        return wanted, (1,)
    count = len(values)
    widths = tuple(gradient.chunk(count) for gradient in group)
    if not whole:
        return values, widths
    return values.reshape(1, -1), tuple(count * width for width in widths)


def _sent(
    group: Sequence[Entry],
    laid: tuple[jax.Array, tuple[int, ...]],
    values: jax.Array,
    made: Reduced,
    *,
    exact: bool,
) -> Sent:
    """Returns what was to be sent of a group, and how what was not is computed.

    With ``exact`` the codec hands on what it is given, so there is no error.
    """
    one, partial, _ = group[0]
    wanted, widths = laid

    def laid_out(total: jax.Array) -> jax.Array:
        total = total.astype(one.dtype or partial.dtype)
        apart = len(group) > 1 and wanted.shape != values.shape
        return total.reshape(wanted.shape) if apart else total

    def error() -> jax.Array:
        if exact:
            return jnp.zeros(wanted.shape, jnp.float32)
        lost = values - made.understood
        if len(group) == 1:
            lost = _from_chunks(one, lost)
        return materialised(lost).reshape(wanted.shape)

    make = made.again
    again = None if make is None else lambda: laid_out(make())
    total = laid_out(made.total)
    return Sent(wanted, error, total, widths, part=one.scatter, again=again)


def _errors(
    group: Sequence[Entry],
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


def _from_chunks(gradient: Gradient, chunks: jax.Array) -> jax.Array:
    return from_chunks(chunks, gradient.shape, gradient.scatter_dim)
