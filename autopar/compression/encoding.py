"""Runs the codecs of many gradients side by side, and knows what each sent.

Gradients of one codec are encoded as one array where they may: the same bytes are
sent, and a compiler has one loop to compile where it had one for each gradient. That is
most of what a step with codecs takes to compile. It costs copies of the gradients, so
large ones stay by themselves.

Gradients that all workers want whole, and that are sent as they are, may lie in any
order. These are mostly many small ones. They are laid one behind the other, so each is
a single slice of the sum. Of the others each chunk holds a part of every gradient.
Blocks could lie in any order as well: with int8 a step then compiled for a fifth less,
and took 10 % more CPU time.

Legend: n workers, c elements of a chunk of one gradient, C of all of a group; worker i
adds up the i-th chunks. ``dim`` is the dim of which worker i needs only the i-th part
of the sum; None: all need all.

Sums over the elements of gradients that lie side by side, one of each gradient.

Legend: k gradients of c elements of a chunk each, C of all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compression.codecs.blocks import add_barrier
from autopar.compression.codecs.codec import (
    AllReduce,
    Codec,
    CodecContext,
    Reduced,
    Rounds,
    begin_rounds,
)
from autopar.compression.exchange import WorkerLinks, exchange
from autopar.compression.gradient import Feedback, Gradient, State


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
        return squared_norms(self.wanted, self.widths)

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


def squared_norms(values: jax.Array, widths: Sequence[int]) -> jax.Array:
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


def telemetry_rows(
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


Shape = tuple[int, ...]

# Up to this number of chunks each is handled by a loop of its own.
_MOST_PIECES = 16


def to_chunks(whole: jax.Array, dim: int | None, workers: int, chunk: int) -> jax.Array:
    """A whole gradient as (n, c), with padding where its elements do not suffice."""
    if dim is not None:
        return jnp.moveaxis(whole, dim, 0).reshape(workers, -1)
    flat = whole.reshape(-1)
    padding = workers * chunk - whole.size
    if padding:
        # On a CPU a copy, where jnp.pad asks of each element where it lies.
        flat = jnp.concatenate((flat, jnp.zeros((padding,), flat.dtype)))
    return flat.reshape(workers, chunk)


def from_chunks(chunks: jax.Array, shape: Shape, dim: int | None) -> jax.Array:
    """(n, c), or all elements in one row, as a whole gradient."""
    if chunks.ndim == 1:
        return chunks.reshape(shape)
    if dim is None:
        return _without_padding(chunks, math.prod(shape)).reshape(shape)
    return _back(chunks, shape, dim)


def own_part(
    total: jax.Array, shape: Shape, dim: int | None, workers: int
) -> jax.Array:
    """What a worker gets of the sum, in its own shape.

    Args:
      total: chunks of the whole sum or, with ``dim``, the worker's own chunk.
      shape: of the whole gradient.
      dim: see the module.
      workers: number of workers.
    """
    if dim is None:
        return from_chunks(total, shape, None)
    return _back(total, own_shape(shape, dim, workers), dim)


def own_shape(shape: Shape, dim: int | None, workers: int) -> Shape:
    """Shape of what a worker gets of the sum."""
    return tuple(size // workers if k == dim else size for k, size in enumerate(shape))


def _without_padding(chunks: jax.Array, size: int) -> jax.Array:
    """The first ``size`` elements of (n, c).

    Row by row: XLA for CPUs merges a decoder with the one slice of all rows, and then
    divides for every element to find its row. That takes 2 to 3 times as long.
    """
    count, elements = chunks.shape
    if count > _MOST_PIECES:
        return chunks.reshape(-1)[:size]
    ends = [min(elements, size - k * elements) for k in range(count)]
    rows = [chunks[k, :end] for k, end in enumerate(ends) if end > 0]
    return jnp.concatenate(rows)


def _back(values: jax.Array, shape: Shape, dim: int) -> jax.Array:
    """Values in the order of a shape with ``dim`` in front, in its own order."""
    rest = shape[:dim] + shape[dim + 1 :]
    return jnp.moveaxis(values.reshape(shape[dim], *rest), 0, dim)


# Elements on one device of the largest gradient that is joined with others, and of all
# that are joined: 16 and 64 MB.
LARGEST = 1 << 22
MOST = 1 << 24


@dataclasses.dataclass(frozen=True, slots=True)
class CodecInput:
    """A gradient as its codec sees it.

    Attributes:
      codec: how it is sent.
      size: its number of elements on one device.
      chunk: elements of each of its chunks, c.
      workers: number of workers, n.
      scatter: whether each worker needs only its part of the sum.
      dtype: of the sum, as text.
      state: whether the codec keeps a state.
    """

    codec: Codec
    size: int
    chunk: int
    workers: int
    scatter: bool
    dtype: str
    state: bool = False

    @property
    def whole(self) -> bool:
        """Whether a group of such gradients is laid one behind the other."""
        return self.codec.linear and not self.scatter and not self.state

    @property
    def joins(self) -> bool:
        """Whether others may lie beside it: it has no padding, and whole blocks."""
        unit = self.codec.unit
        whole = self.chunk * self.workers == self.size
        return bool(unit) and whole and not self.chunk % unit and self.size <= LARGEST


def group_gradients(pieces: Sequence[CodecInput]) -> list[tuple[int, ...]]:
    """Numbers of the gradients that are encoded together, each in one group."""
    groups: list[list[int]] = []
    open_groups: dict[Any, list[int]] = {}
    for k, piece in enumerate(pieces):
        key = (piece.codec, piece.scatter, piece.dtype) if piece.joins else k
        group = open_groups.get(key)
        if group and sum(pieces[i].size for i in group) + piece.size <= MOST:
            group.append(k)
        else:
            groups.append([k])
            open_groups[key] = groups[-1]
    return [tuple(group) for group in groups]


def join_arrays(arrays: Sequence[jax.Array], *, whole: bool = False) -> jax.Array:
    """Arrays (..., c) side by side, (..., C).

    Args:
      arrays: the gradients or their states.
      whole: whether the arrays, (n, c), are laid one behind the other.
    """
    if len(arrays) == 1:
        return arrays[0]
    if whole:
        flat = jnp.concatenate([x.reshape(-1) for x in arrays])
        return add_barrier(flat).reshape(len(arrays[0]), -1)
    return add_barrier(jnp.concatenate(arrays, axis=-1))


def join_states(states: Sequence[Any]) -> Any:
    """The state of a group, of the states of its gradients' codecs."""
    return jax.tree.map(lambda *arrays: join_arrays(arrays), *states)


def cut(
    array: jax.Array, widths: Sequence[int], *, whole: bool = False
) -> list[jax.Array]:
    """The opposite of `join_arrays`: arrays (..., c) of (..., C), or flat ones.

    Args:
      array: of a group.
      widths: c of each gradient.
      whole: whether the gradients lie one behind the other; each is (n c,) then.
    """
    if len(widths) == 1:
        return [array]
    ends = list(itertools.accumulate(widths))[:-1]
    if whole:
        workers = array.size // sum(widths)
        return jnp.split(array.reshape(-1), [workers * end for end in ends])
    return jnp.split(array, ends, axis=-1)


def cut_states(state: Any, widths: Sequence[int]) -> list[Any]:
    """The opposite of `join_states`."""
    leaves, tree = jax.tree.flatten(state)
    rows = [cut(leaf, widths) for leaf in leaves]
    return [
        jax.tree.unflatten(tree, [row[k] for row in rows]) for k in range(len(widths))
    ]


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
    sent: SentGroup
    again: Callable[[], SentGroup]
    totals: Callable[[], Sequence[jax.Array]]


def encode_gradients(
    entries: Sequence[Entry],
    wanted: Sequence[jax.Array],
    links: WorkerLinks,
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
    groups = group_gradients(pieces)
    whole = [pieces[group[0]].whole for group in groups]

    def side_by_side(i: int) -> jax.Array:
        chunks = [
            to_chunks(wanted[k], gradients[k].scatter_dim, n, pieces[k].chunk)
            for k in groups[i]
        ]
        return join_arrays(chunks, whole=whole[i])

    def wanted_with_widths(
        i: int, values: jax.Array
    ) -> tuple[jax.Array, tuple[int, ...]]:
        own = [gradients[k] for k in groups[i]]
        return _wanted_with_widths(own, wanted[groups[i][0]], values, whole=whole[i])

    given = [side_by_side(i) for i in range(len(groups))]
    rounds = [
        _rounds([entries[k] for k in group], values, n, worker, step)
        for group, values in zip(groups, given, strict=True)
    ]
    if with_squares:
        own = [
            squared_norms(*wanted_with_widths(i, values))
            for i, values in enumerate(given)
        ]
        rounds.append(_sum_over_workers(jnp.concatenate(own)))
    made = exchange(rounds, links)

    def sent_of(i: int, values: jax.Array) -> SentGroup:
        own = [entries[k] for k in groups[i]]
        exact = made[i].sent is given[i]
        return _describe_sent(
            own, wanted_with_widths(i, values), values, made[i], exact=exact
        )

    out: list[EncodedGroup] = []
    for i, group in enumerate(groups):
        own, sent = [entries[k] for k in group], sent_of(i, given[i])

        widths = [pieces[k].chunk for k in group]

        def again(i: int = i) -> SentGroup:
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


def _sum_over_workers(values: jax.Array) -> Rounds:
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
    state = join_states([state["codec"] for _, _, state in group])
    names = ", ".join(gradient.name for gradient, _, _ in group)
    return begin_rounds(one.codec, values, state, context, names)


def _piece(entry: Entry, workers: int) -> CodecInput:
    """A gradient as it is grouped with others."""
    gradient, partial, state = entry
    return CodecInput(
        codec=gradient.codec,
        size=gradient.size,
        chunk=gradient.chunk(workers),
        workers=workers,
        scatter=gradient.scatter,
        dtype=gradient.dtype or partial.dtype.name,
        state=bool(jax.tree.leaves(state["codec"])),
    )


def _wanted_with_widths(
    group: Sequence[Gradient], wanted: jax.Array, values: jax.Array, *, whole: bool
) -> tuple[jax.Array, tuple[int, ...]]:
    """What was to be sent of a group, and the widths of its gradients; see `SentGroup`.

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


def _describe_sent(
    group: Sequence[Entry],
    laid: tuple[jax.Array, tuple[int, ...]],
    values: jax.Array,
    made: Reduced,
    *,
    exact: bool,
) -> SentGroup:
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
        lost = values - made.sent_array
        if len(group) == 1:
            lost = _from_chunks(one, lost)
        return add_barrier(lost).reshape(wanted.shape)

    make = made.again
    again = None if make is None else lambda: laid_out(make())
    total = laid_out(made.total)
    return SentGroup(wanted, error, total, widths, part=one.scatter, again=again)


def _errors(
    group: Sequence[Entry],
    sent: SentGroup,
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
