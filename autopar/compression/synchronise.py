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

from autopar.compression.codecs.blocks import materialised
from autopar.compression.codecs.codec import Codec, CodecContext, Reduced, Rounds
from autopar.compression.codecs.quantise import without_server_feedback
from autopar.compression.exchange import Links, chunk_elements, exchange
from autopar.compression.feedback import Feedback, next_residuals, with_residual

State = dict[str, Any]

# Up to this number of chunks each is handled by a loop of its own.
_MOST_PIECES = 16
# The columns of the sums.
WANTED, ERROR, SENT, RESIDUAL, GRADIENT, NON_FINITE = range(6)


@dataclasses.dataclass(frozen=True, slots=True)
class Gradient:
    """How one gradient is summed.

    Attributes:
      name: of the parameter, for messages.
      shape: of the gradient on one device.
      codec: how it is sent.
      feedback: how the codec's error is fed back.
      scatter_dim: the dim of which worker i needs only the i-th part of the
        sum; None: all need the whole sum.
      seed: a number that no other gradient of the step has.
    """

    name: str
    shape: tuple[int, ...]
    codec: Codec
    feedback: Feedback = dataclasses.field(default_factory=Feedback)
    scatter_dim: int | None = None
    seed: int = 0

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
) -> tuple[list[jax.Array], list[State], jax.Array]:
    """Sums gradients over the workers.

    Args:
      gradients: how each is summed.
      partials: this worker's part of each, of any floating dtype.
      states: of `init_state` or the step before.
      links: the collectives over the workers.
      worker: number of this worker, int32 scalar.
      step: number of the step from 0, int32 scalar, the same on all workers.

    Returns:
      The sums in the partials' dtypes, whole or, where scattered, this worker's
      part; the new states; and float32 (number of gradients, 6) of this
      worker: the squared norms of what was to be sent, of its error, of what
      was sent, of the new residual and of the partial itself, and the number of
      elements of what was to be sent that are not finite. Where a codec fails on
      finite elements, those of its error count.

    Raises:
      ValueError: a partial does not fit its gradient; see `check_gradient`.
    """
    _check_call(gradients, partials, states, links.workers)
    entries = list(zip(gradients, partials, states, strict=True))
    live = [entry for entry in entries if entry[0].size]
    done = iter(_synchronise_some(live, links, jnp.int32(worker), jnp.int32(step)))
    results = [
        next(done) if entry[0].size else _nothing(*entry, links) for entry in entries
    ]
    totals = [total for total, _, _ in results]
    new_states = [state for _, state, _ in results]
    sums = [jnp.zeros((0, NON_FINITE + 1), jnp.float32)] + [
        row[None] for _, _, row in results
    ]
    return totals, new_states, jnp.concatenate(sums)


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
    """What the sums of `synchronise` say about the codecs.

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
) -> list[tuple[jax.Array, State, jax.Array]]:
    """Total, state and row of sums of each gradient; all have elements."""
    gradients = [gradient for gradient, _, _ in entries]
    # Computed once, however many loops read it: without the barriers each would add the
    # residual again, and transpose the gradient where a product left it transposed.
    partials = [materialised(partial) for _, partial, _ in entries]
    wanted = [
        _wanted(gradient, partial, state["residual"])
        for partial, (gradient, _, state) in zip(partials, entries, strict=True)
    ]
    chunks = [
        _to_chunks(gradient, values, links.workers)
        for gradient, values in zip(gradients, wanted, strict=True)
    ]
    rounds = [
        _start(gradient, values, state, links.workers, worker, step)
        for values, (gradient, _, state) in zip(chunks, entries, strict=True)
    ]
    reduced = exchange(rounds, links)
    errors = [
        _error(gradient, values, result.sent)
        for gradient, values, result in zip(gradients, chunks, reduced, strict=True)
    ]
    feedbacks = [gradient.feedback for gradient in gradients]
    residuals = next_residuals(feedbacks, errors, links, step)
    norms = [_squared_norm(values) for values in wanted]
    lost = [_squared_norm(error) for error in errors]
    bad = _non_finite(wanted, errors, [*norms, *lost])
    return [
        (
            _total(gradients[k], reduced[k], links.workers).astype(partials[k].dtype),
            {"residual": residuals[k], "codec": reduced[k].state},
            _sums(partials[k], wanted[k], errors[k], residuals[k], norms[k], bad[k]),
        )
        for k in range(len(gradients))
    ]


def _wanted(gradient: Gradient, partial: jax.Array, residual: Any) -> jax.Array:
    """What is to be sent, float32, computed once."""
    values = with_residual(partial, residual, gradient.feedback)
    return materialised(values) if gradient.feedback.active else values


def _error(gradient: Gradient, chunks: jax.Array, sent: jax.Array) -> jax.Array:
    """What was not sent, computed once; a codec that hands chunks on sends all."""
    if sent is chunks:
        return jnp.zeros(gradient.shape, jnp.float32)
    return materialised(_from_chunks(gradient, chunks - sent))


def _nothing(
    gradient: Gradient, partial: jax.Array, state: State, links: Links
) -> tuple[jax.Array, State, jax.Array]:
    """The same of a gradient without elements."""
    total = partial.reshape(_own_shape(gradient, links.workers))
    return total, state, jnp.zeros((NON_FINITE + 1,), jnp.float32)


def _start(
    gradient: Gradient,
    chunks: jax.Array,
    state: State,
    workers: int,
    worker: jax.Array,
    step: jax.Array,
) -> Rounds:
    context = CodecContext(
        workers=workers,
        worker=worker,
        step=step,
        seed=gradient.seed,
        shape=gradient.shape,
        size=gradient.size,
        scatter=gradient.scatter,
    )
    return gradient.codec.reduce(chunks, state["codec"], context)


def _to_chunks(gradient: Gradient, whole: jax.Array, workers: int) -> jax.Array:
    """A whole gradient as (n, c)."""
    if gradient.scatter_dim is not None:
        front = jnp.moveaxis(whole, gradient.scatter_dim, 0)
        return front.reshape(workers, -1)
    chunk = gradient.chunk(workers)
    flat = whole.reshape(-1)
    padding = workers * chunk - gradient.size
    if padding:
        # On a CPU a copy, where jnp.pad asks of each element where it lies.
        flat = jnp.concatenate((flat, jnp.zeros((padding,), flat.dtype)))
    return flat.reshape(workers, chunk)


def _from_chunks(gradient: Gradient, chunks: jax.Array) -> jax.Array:
    """(n, c) as a whole gradient."""
    dim = gradient.scatter_dim
    if dim is None:
        return _without_padding(chunks, gradient.size).reshape(gradient.shape)
    return _back(gradient.shape, dim, chunks)


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


def _back(shape: tuple[int, ...], dim: int, values: jax.Array) -> jax.Array:
    """Values in the order of a shape with ``dim`` in front, in its own order."""
    rest = shape[:dim] + shape[dim + 1 :]
    return jnp.moveaxis(values.reshape(shape[dim], *rest), 0, dim)


def _own_shape(gradient: Gradient, workers: int) -> tuple[int, ...]:
    """Shape of what a worker gets of the sum."""
    shape = list(gradient.shape)
    if gradient.scatter_dim is not None:
        shape[gradient.scatter_dim] //= workers
    return tuple(shape)


def _total(gradient: Gradient, reduced: Reduced, workers: int) -> jax.Array:
    if gradient.scatter_dim is None:
        return _from_chunks(gradient, reduced.total)
    shape = _own_shape(gradient, workers)
    return _back(shape, gradient.scatter_dim, reduced.total)


def _sums(
    partial: jax.Array,
    wanted: jax.Array,
    error: jax.Array,
    residual: Any,
    norm: jax.Array,
    non_finite: jax.Array,
) -> jax.Array:
    """The row of one gradient, float32 (6,)."""
    kept = jnp.zeros(()) if isinstance(residual, tuple) else _squared_norm(residual)
    return jnp.stack(
        (
            norm,
            _squared_norm(error),
            _squared_norm(wanted - error),
            kept,
            _squared_norm(partial),
            non_finite,
        )
    )


def _non_finite(
    wanted: Sequence[jax.Array],
    errors: Sequence[jax.Array],
    norms: Sequence[jax.Array],
) -> list[jax.Array]:
    """The number of elements of each that are not finite, float32.

    They are counted only where a squared norm is not finite either.

    Args:
      wanted: what is to be sent.
      errors: what of it was not.
      norms: the squared norms of both.
    """

    def none(arrays: Sequence[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        return [jnp.zeros((), jnp.float32) for _ in arrays]

    def counted(arrays: Sequence[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        return [unusable(values, error) for values, error in arrays]

    def unusable(values: jax.Array, error: jax.Array) -> jax.Array:
        own, lost = non_finite_elements(values), non_finite_elements(error)
        return jnp.where(own > 0, own, lost)

    if not wanted:
        return []
    good = jnp.all(jnp.isfinite(jnp.stack(norms)))
    return jax.lax.cond(good, none, counted, list(zip(wanted, errors, strict=True)))


def non_finite_elements(values: jax.Array) -> jax.Array:
    """The number of elements that are not finite, a float32 scalar."""
    return jnp.sum(~jnp.isfinite(values), dtype=jnp.float32)


def _squared_norm(values: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(values.astype(jnp.float32)))
