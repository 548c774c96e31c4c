"""How replicas divide the arguments of a step, and join its results."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from autopar.errors import PlanError, RunError
from autopar.runtime import arguments
from autopar_passes.program.calls import StepCall
from autopar_passes.program.static_leaves import Static


def opened(
    call: StepCall, arrays: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, by position and by name, with other arrays."""
    joined = call.form.fixed.join(arrays)
    args = tuple(x.value if isinstance(x, Static) else x for x in joined)
    split = len(args) - len(call.form.keywords)
    return args[:split], dict(zip(call.form.keywords, args[split:], strict=True))


def rows_of(array: Any, dim: int, part: int, count: int) -> Any:
    """One of ``count`` equal parts of an array's rows."""
    size = array.shape[dim] // count
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.update(shape=(*array.shape[:dim], size, *array.shape[dim + 1 :]))
    if count == 1:
        return array
    index = [slice(None)] * array.ndim
    index[dim] = slice(part * size, (part + 1) * size)
    return array[tuple(index)]


def fit_rows(
    name: str,
    call: StepCall,
    rows: Mapping[int, int],
    counts: Mapping[int, int],
    how: str,
) -> StepCall:
    """A call whose rows divide among the replicas: with others dropped or repeated.

    Args:
      name: the name of the step, for errors and warnings.
      call: the call.
      rows: position of an array -> the dimension of its rows.
      counts: position of an array -> the number of replicas that share its rows.
      how: as ``last_batch`` of `autopar.parallelize`; ``run`` changes nothing.

    Raises:
      PlanError: the rows do not divide, and are not dropped or repeated.
    """
    sizes = {k: call.arrays[k].shape[dim] for k, dim in rows.items()}
    uneven = [k for k, size in sizes.items() if size % counts[k]]
    if not uneven:
        return call
    # Arrays may have several rows for each sample: all keep the same samples.
    first = min(uneven, key=lambda k: sizes[k])
    size, count = sizes[first], counts[first]
    wanted = size // count * count + (count if how == "pad" else 0)
    made = {k: n * wanted // size for k, n in sizes.items()}
    fits = all(made[k] * size == n * wanted for k, n in sizes.items())
    if how == "run" or not wanted or not fits or any(made[k] % counts[k] for k in made):
        path = call.form.paths(call.arrays)[first]
        raise PlanError(
            f"{name}: '{path}' has {size} rows, which do not divide among {count} "
            "replicas; choose a multiple, or last_batch='drop' or 'pad' for the last "
            "batch of an epoch."
        )
    said = (
        f"{size - wanted} of them are dropped"
        if how == "drop"
        else f"the last row is repeated {wanted - size} times"
    )
    warnings.warn(
        f"{name}: a batch of {size} rows for {count} replicas: {said} "
        f"(last_batch={how!r}).",
        stacklevel=4,
    )
    arrays = list(call.arrays)
    for k, dim in rows.items():
        arrays[k] = arguments.resize_rows(arrays[k], made[k], dim)
    return dataclasses.replace(call, arrays=arrays)


def check_alive(name: str, state: Any) -> None:
    """Checks that no array of a state was donated to an earlier call, which freed it.

    Raises:
      PlanError: an array was donated.
    """
    if not _has_donated(state):
        return
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(x, jax.Array) and x.is_deleted():
            raise PlanError(
                f"{name}: the LocalState{jax.tree_util.keystr(path)} was consumed by "
                "an earlier call, to reuse its memory. Pass the state that the last "
                "call returned, or keep the old one with local_steps(donate=False)."
            )


def check_kept(name: str, state: Any, error: Exception) -> None:
    """Checks that a step that failed has not consumed a part of its state.

    Raises:
      RunError: it has.
    """
    if _has_donated(state):
        raise RunError(
            f"{name}: the step failed after a part of the LocalState was consumed, so "
            f"this state is gone: {error}\n"
            "  try: go on from a checkpoint, or keep the state that a step is given "
            "with local_steps(donate=False)."
        ) from error


def _has_donated(state: Any) -> bool:
    """Whether an array of a state was donated, which freed it."""
    leaves = jax.tree.leaves(state)
    return any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)


def split_result(name: str, out: Any, state: Any) -> tuple[Any, tuple[Any, ...] | None]:
    """The new state in a step's result, and the other results; None without others.

    Raises:
      PlanError: the result does not begin with the state.
    """
    wanted = jax.tree.structure(state)
    if jax.tree.structure(out) == wanted:
        return out, None
    if isinstance(out, tuple):
        if type(state) is tuple:
            new, others = out[: len(state)], out[len(state) :]
        else:
            new, others = out[0], out[1:]
        if jax.tree.structure(new) == wanted:
            return new, others
    raise PlanError(
        f"{name}: local steps need a step that returns its new state first, as in "
        "`return state, loss`."
    )


def join_results(results: Sequence[tuple[Any, ...] | None]) -> tuple[Any, ...] | None:
    """The results of a step from those of each replica of this process."""
    first = results[0]
    if len(results) == 1 or first is None:
        return first
    return jax.tree.map(_join_values, *results)


def _join_values(*values: Any) -> Any:
    """The mean of floating-point scalars; other arrays get a leading dim."""
    if not all(isinstance(x, jax.Array) for x in values):
        return values[0]
    near = [jax.device_put(x, next(iter(values[0].devices()))) for x in values]
    stacked = jax.numpy.stack(near)
    scalar = not values[0].shape
    if scalar and jax.numpy.issubdtype(stacked.dtype, jax.numpy.floating):
        return jax.numpy.mean(stacked)
    return stacked
