"""Runs the codecs of many gradients together, and computes what was sent of each
gradient and with which error.

Gradients with the same codec are joined to one array and encoded together (as a group)
if possible. This does not change the bytes that are sent. But the compiler has one loop
to compile instead of one per gradient, and these loops take most of the compile time of
a step with codecs. Joining copies the gradients, so large gradients are not joined.

There are two ways to join gradients. A *chunk* is the part of a gradient that one
worker sums. Gradients that are sent without a codec, and whose whole sum every worker
needs, are concatenated, so that each gradient is a single slice of the sum. In all
other groups, each chunk of the group holds a part of every gradient. Blockwise codecs
would also allow concatenation. With int8 this reduced the compile time of a step by a
fifth, but increased the CPU time of the step by 10 %.

In shapes: n workers, c elements of a chunk of one gradient, C elements of a chunk of a
whole group. Worker i sums the i-th chunks of all workers. ``dim`` is the dim along
which worker i needs only the i-th part of the sum; None: every worker needs the whole
sum.

Some functions compute one sum over elements for each gradient of a group.

In these functions a group has k gradients. A chunk of the group has c elements of each
gradient, and C elements in total.
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
    """The values of a group of gradients before encoding, with the error of sending
    them.

    Attributes:
      wanted: the values to send; any shape for one gradient, (..., C) for several.
      error: the error in the shape of ``wanted``, or a function that computes it.
      total: the decoded sum over the workers, in the dtype in which the program reads
        it; (..., C) for several gradients.
      widths: for each gradient, its number of elements along the last dim, c.
      part: whether the total is only this worker's part of the sum over workers.
      again: computes the total again, for a branch that few steps take. If the branch
        read ``total``, every step would have to keep the total in memory.
    """

    wanted: jax.Array
    error: jax.Array | Callable[[], jax.Array]
    total: jax.Array
    widths: tuple[int, ...]
    part: bool = False
    again: Callable[[], jax.Array] | None = None

    @property
    def unsure(self) -> bool:
        """Whether the total may be infinite although the norms of the values are
        finite.

        If the norms are finite, the elements are usually so small that their sum cannot
        overflow. There are two exceptions: the dtype of the total has a smaller range
        than float32, or the total is a sum of other elements than ``wanted``.
        """
        narrow = jnp.finfo(self.total.dtype).max < jnp.finfo(jnp.bfloat16).max
        return self.part or bool(narrow)

    @property
    def error_array(self) -> jax.Array:
        """The error as an array."""
        return self.error() if callable(self.error) else self.error

    def with_error(self) -> SentGroup:
        """This object after the error has been computed."""
        return dataclasses.replace(self, error=self.error_array)

    def squares(self) -> jax.Array:
        """Squared norms of the values to send, (k,)."""
        return squared_norms(self.wanted, self.widths)

    def norms(self) -> jax.Array:
        """For each gradient the squared norms of the values to send, of the error, and
        of the sent values, (k, 3).
        """
        lost = self.error_array
        sent = self.wanted - lost
        return jnp.stack(
            [self._sum(jnp.square(x)) for x in (self.wanted, lost, sent)], axis=1
        )

    def non_finite(self) -> jax.Array:
        """For each gradient the number of non-finite elements in the values to send,
        (k,); if there are none, the number in the error.
        """
        own, lost = self._count(self.wanted), self._count(self.error_array)
        return jnp.where(own > 0, own, lost)

    def overflows(self) -> jax.Array:
        """Number of elements of the total that are not finite, (k,)."""
        return self._count(self.total)

    def overflows_again(self) -> jax.Array:
        """`overflows`, computed again for a branch that few steps take."""
        return self._count(self.again() if self.again else self.total)

    def _count(self, values: jax.Array) -> jax.Array:
        return self._sum((~jnp.isfinite(values)).astype(jnp.float32))

    def _sum(self, values: jax.Array) -> jax.Array:
        return _sum_each(values, self.widths)


def squared_norms(values: jax.Array, widths: Sequence[int]) -> jax.Array:
    """Squared norms of gradients that are joined as in `SentGroup`, (k,)."""
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
    """What is needed to compute the telemetry of a group's k gradients.

    Attributes:
      sent: the group before encoding, and its error.
      again: computes ``sent`` again, for a branch that few steps take. If the branch
        read ``sent``, every step would have to keep its arrays in memory.
      sound: whether the codec's sum is finite if its inputs are (`Codec.sound`).
      feedbacks: error feedback of each gradient.
      partials: this worker's partial gradients, before the sum over workers.
      residuals: residual of each gradient; () without a residual.
    """

    sent: SentGroup
    again: Callable[[], SentGroup]
    sound: bool
    feedbacks: Sequence[Feedback]
    partials: Sequence[jax.Array]
    residuals: Sequence[Any]

    def rows(self, norms: jax.Array, bad: jax.Array) -> jax.Array:
        """The telemetry of the gradients, six numbers for each, float32 (k, 6).

        Args:
          norms: `SentGroup.norms`.
          bad: for each gradient the number of elements that are not finite, (k,).
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


# Stands for a norm that was not measured. It is negative, so no sum of squares has this
# value. Its sum over workers is not finite.
NOT_MEASURED = -jnp.inf


@dataclasses.dataclass(frozen=True, slots=True)
class AllWorkers:
    """What is needed to sum telemetry over all workers.

    Attributes:
      links: the collectives over the workers.
      squares: `SentGroup.squares` of all groups, concatenated, and already summed over
        the workers.
    """

    links: WorkerLinks
    squares: jax.Array


def summed_rows(own: jax.Array, links: WorkerLinks) -> jax.Array:
    """Sums rows of telemetry over all workers."""
    with jax.named_scope("telemetry"):
        return links.all_reduce(own.ravel()).reshape(own.shape)


def telemetry_rows(
    groups: Sequence[TelemetryGroup],
    measured: jax.Array | None,
    workers: AllWorkers | None = None,
) -> jax.Array:
    """The rows of telemetry of the gradients of all groups, float32 (k, 6).

    To compute errors and norms takes about as long as the codec itself, so a step may
    leave them out. But every step looks for non-finite elements: in the squared norms
    of the values to send, which takes one pass over them, and in the totals of codecs
    whose sum may overflow (`Codec.sound` is false).

    Args:
      groups: the gradients.
      measured: whether this step computes errors and norms, a bool scalar, equal on all
        workers; None: yes.
      workers: if given, the rows are summed over the workers. Then ``measured`` must be
        given, too, and every total must be whole (`SentGroup.part` is false). So the
        totals are equal on all workers, and all workers take the same branches.
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
    # The totals are checked in a separate branch, because the branch above need not
    # wait for the totals.
    norms = jnp.append(found[:, :3], jnp.array(sums))
    good = jnp.all(jnp.isfinite(norms) | (norms == NOT_MEASURED))
    over = _overflows([g.sent for g in groups], good)
    if workers:
        over = workers.links.workers * over
    bad = jnp.where(found[:, -1] > 0, found[:, -1], over)
    return found.at[:, -1].set(bad)


def _rows_without_errors(squares: jax.Array) -> jax.Array:
    """Rows of telemetry that hold only the norms of the values to send."""
    unknown = jnp.full((len(squares), 4), NOT_MEASURED)
    return jnp.column_stack((squares, unknown, jnp.zeros_like(squares)))


def _non_finite(
    sent: Sequence[SentGroup], norms: Sequence[jax.Array]
) -> list[jax.Array]:
    """`SentGroup.non_finite` of each group. Non-finite elements are counted only if a
    norm is not finite.
    """
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
    """For each gradient the number of non-finite elements of its total, (k,). Elements
    are counted only in totals that can have non-finite elements (`SentGroup.unsure`).
    """
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

# If there are at most this many chunks, the program has a separate loop for each.
_MOST_PIECES = 16


def to_chunks(whole: jax.Array, dim: int | None, workers: int, chunk: int) -> jax.Array:
    """Splits a whole gradient into chunks (n, c), with padding at the end if needed."""
    if dim is not None:
        return jnp.moveaxis(whole, dim, 0).reshape(workers, -1)
    flat = whole.reshape(-1)
    padding = workers * chunk - whole.size
    if padding:
        # On a CPU, a concatenation is a plain copy, while jnp.pad computes the position
        # of each element.
        flat = jnp.concatenate((flat, jnp.zeros((padding,), flat.dtype)))
    return flat.reshape(workers, chunk)


def from_chunks(chunks: jax.Array, shape: Shape, dim: int | None) -> jax.Array:
    """Makes a whole gradient from chunks (n, c), or from one row with all elements."""
    if chunks.ndim == 1:
        return chunks.reshape(shape)
    if dim is None:
        return _without_padding(chunks, math.prod(shape)).reshape(shape)
    return _back(chunks, shape, dim)


def own_part(
    total: jax.Array, shape: Shape, dim: int | None, workers: int
) -> jax.Array:
    """The part of the sum that a worker needs, in the shape of this part.

    Args:
      total: all chunks of the sum or, with ``dim``, only the worker's own chunk.
      shape: shape of the whole gradient.
      dim: the dim along which the sum is scattered, or None (module docstring).
      workers: number of workers.
    """
    if dim is None:
        return from_chunks(total, shape, None)
    return _back(total, own_shape(shape, dim, workers), dim)


def own_shape(shape: Shape, dim: int | None, workers: int) -> Shape:
    """Shape of the part of the sum that a worker needs."""
    return tuple(size // workers if k == dim else size for k, size in enumerate(shape))


def _without_padding(chunks: jax.Array, size: int) -> jax.Array:
    """The first ``size`` elements of (n, c).

    The function slices each row separately. If it sliced all rows at once, XLA for CPUs
    would fuse the decoder with the slice, and divide for every element to find its row.
    This takes 2 to 3 times as long.
    """
    count, elements = chunks.shape
    if count > _MOST_PIECES:
        return chunks.reshape(-1)[:size]
    ends = [min(elements, size - k * elements) for k in range(count)]
    rows = [chunks[k, :end] for k, end in enumerate(ends) if end > 0]
    return jnp.concatenate(rows)


def _back(values: jax.Array, shape: Shape, dim: int) -> jax.Array:
    """Moves the leading dim back to the position ``dim``."""
    rest = shape[:dim] + shape[dim + 1 :]
    return jnp.moveaxis(values.reshape(shape[dim], *rest), 0, dim)


# A gradient with more bytes than `LARGEST` (16 MB) on one device is not joined with
# others. All gradients of a group together have at most the second number of bytes (64
# MB).
LARGEST = 1 << 22
MOST = 1 << 24


@dataclasses.dataclass(frozen=True, slots=True)
class CodecInput:
    """The properties of a gradient that decide with which others it can be encoded.

    Attributes:
      codec: codec of the gradient.
      size: number of elements on one device.
      chunk: elements of each chunk, c.
      workers: number of workers, n.
      scatter: whether each worker needs only its part of the sum.
      dtype: dtype of the sum over workers, as text.
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
        """Whether such gradients are concatenated one after the other in a group."""
        return self.codec.linear and not self.scatter and not self.state

    @property
    def joins(self) -> bool:
        """Whether the gradient may be joined with others: its chunks must consist of
        whole units of the codec, without padding.
        """
        unit = self.codec.unit
        whole = self.chunk * self.workers == self.size
        return bool(unit) and whole and not self.chunk % unit and self.size <= LARGEST


def group_gradients(pieces: Sequence[CodecInput]) -> list[tuple[int, ...]]:
    """Divides gradients into groups that are encoded together.

    Returns their indices.
    """
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
    """Joins arrays (..., c) along the last dim to (..., C).

    Args:
      arrays: the gradients or their states.
      whole: whether the arrays (n, c) are flattened and concatenated one after the
        other.
    """
    if len(arrays) == 1:
        return arrays[0]
    if whole:
        flat = jnp.concatenate([x.reshape(-1) for x in arrays])
        return add_barrier(flat).reshape(len(arrays[0]), -1)
    return add_barrier(jnp.concatenate(arrays, axis=-1))


def join_states(states: Sequence[Any]) -> Any:
    """Joins the codec states of a group's gradients to the group's state."""
    return jax.tree.map(lambda *arrays: join_arrays(arrays), *states)


def cut(
    array: jax.Array, widths: Sequence[int], *, whole: bool = False
) -> list[jax.Array]:
    """Undoes `join_arrays`: splits (..., C) into arrays (..., c), or into flat arrays.

    Args:
      array: array of a group.
      widths: for each gradient its number c.
      whole: whether the gradients were concatenated one after the other. Each result
        then has the shape (n c,).
    """
    if len(widths) == 1:
        return [array]
    ends = list(itertools.accumulate(widths))[:-1]
    if whole:
        workers = array.size // sum(widths)
        return jnp.split(array.reshape(-1), [workers * end for end in ends])
    return jnp.split(array, ends, axis=-1)


def cut_states(state: Any, widths: Sequence[int]) -> list[Any]:
    """Undoes `join_states`."""
    leaves, tree = jax.tree.flatten(state)
    rows = [cut(leaf, widths) for leaf in leaves]
    return [
        jax.tree.unflatten(tree, [row[k] for row in rows]) for k in range(len(widths))
    ]


# A gradient's settings, this worker's partial gradient, and its state.
Entry = tuple[Gradient, jax.Array, State]


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """What a codec computed for one gradient.

    Attributes:
      total: the sum over the workers, as in `Reduced.total`.
      error: the error of sending, in the gradient's shape; None: the error is not
        needed.
      state: the codec's new state.
    """

    total: jax.Array
    error: jax.Array | None
    state: Any

    @property
    def known_error(self) -> jax.Array:
        """The error, which must have been requested."""
        assert self.error is not None
        return self.error


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedGroup:
    """What a codec computed for the k gradients of a group.

    Attributes:
      members: indices of the group's gradients.
      sent: the group before encoding, and its error.
      again: computes ``sent`` again from the gradients in memory.
      totals: computes the members' totals again, in their order (`Reduced.again`).
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
    """Encodes, sends and sums all gradients, group by group.

    Errors are computed only for gradients with error feedback or, with ``eager``, for
    all gradients.

    Returns:
      The results of the groups. With ``with_squares``, also the squared norms of the
      values to send, summed over all workers, in the order of the groups' members;
      otherwise None. The norms need no message of their own: they are added to the
      first messages that are summed.
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
    """Requests the sum of values over the workers, as a codec with one round would."""
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
    """The properties of a gradient that decide its group."""
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
    """The values to send of a group, and each gradient's number of elements per row.

    A single gradient keeps its own shape, without padding. Concatenated gradients form
    one row.

    Args:
      group: the gradients.
      wanted: the values to send of the group's first gradient, in its own shape.
      values: the chunks of all gradients of the group, (n, C).
      whole: whether the gradients are concatenated one after the other.
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
    """Makes the `SentGroup` of a group, with a function that computes the error.

    If ``exact``, the codec sends the values unchanged, so there is no error.
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
    """The error of each gradient of a group; None if it was not computed."""
    if callable(sent.error):
        return [None] * len(group)
    if len(group) == 1:
        return [sent.error]
    parts = cut(sent.error, widths, whole=whole)
    return [_from_chunks(g, x) for (g, _, _), x in zip(group, parts, strict=True)]


def _from_chunks(gradient: Gradient, chunks: jax.Array) -> jax.Array:
    return from_chunks(chunks, gradient.shape, gradient.scatter_dim)
