"""Batches with fewer rows than planned, such as the last batch of an epoch."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from autopar.plans import Plan
from autopar.runtime import placement
from autopar.runtime.planned import PlannedStep
from autopar_passes.program.calls import StepCall

# What to do with a batch of fewer rows than planned. "run": split it over the largest
# number of devices that divides the rows. "drop": drop rows until the plan's number of
# parts divides the rest. "pad": repeat the last row.
LastBatch = Literal["run", "drop", "pad"]


@dataclasses.dataclass(frozen=True, slots=True)
class BatchRows:
    """The number of rows of a call, and of the running step.

    Attributes:
      given: number of rows of the call's batch, in this process.
      planned: number of rows that the step was planned for, in this process.
      dims: position of a batch array -> the dim of its rows.
    """

    given: int
    planned: int
    dims: dict[int, int]


def fewer_rows(
    call: StepCall, running: PlannedStep, process_count: int
) -> BatchRows | None:
    """Returns the rows of a call that has fewer rows than the running step.

    None for any other call. All batch arrays must have fewer rows in the same ratio.
    Everything else must be as in the calls that the step was planned for.
    """
    analysis = running.analysis
    if analysis.pytrees.form != call.form:
        return None
    differ: dict[int, tuple[int, int]] = {}
    for k, (x, given) in enumerate(
        zip(call.arrays, analysis.graph.inputs, strict=True)
    ):
        want, have = analysis.graph.values[given.value].shape, tuple(np.shape(x))
        dim = given.rows if given.output < 0 else -1
        if dim >= 0 and len(have) == len(want) and not placement.is_global(x):
            parts = process_count if have != tuple(want) else 1
            if _but(have, dim) != _but(want, dim):
                return None
            if have[dim] * parts != want[dim]:
                differ[k] = have[dim], want[dim] // parts
        elif have != tuple(want):
            return None
    if not differ:
        return None
    given, planned = next(iter(differ.values()))
    alike = all(a * planned == b * given for a, b in differ.values())
    if not alike or not 0 < given < planned:
        return None
    dims = {k: analysis.graph.inputs[k].rows for k in differ}
    return BatchRows(given, planned, dims)


def fit_rows(
    call: StepCall, running: PlannedStep, how: LastBatch, process_count: int
) -> StepCall:
    """Drops or repeats rows of a call that has fewer rows than planned.

    Args:
      call: the call.
      running: the running step.
      how: what to do with the rows; ``run`` changes nothing.
      process_count: number of processes; all processes hold equally many rows.
    """
    rows, plan = fewer_rows(call, running, process_count), running.plan
    if rows is None or how == "run":
        return call
    if how == "pad":
        wanted = rows.planned
        said = f"the last row is repeated {rows.planned - rows.given} times"
    else:
        parts = _split(call, rows, plan)
        wanted = rows.given * process_count // parts * parts // process_count
        said = (
            f"{rows.given - wanted} of them are dropped"
            if wanted
            else f"fewer than the {parts} parts of a batch, so all are kept"
        )
    if wanted == rows.given:
        return call
    warnings.warn(
        f"a batch of {rows.given} rows, where {rows.planned} were planned for: {said} "
        f"(last_batch={how!r}).",
        stacklevel=4,
    )
    if not wanted:
        return call
    arrays = list(call.arrays)
    for k, dim in rows.dims.items():
        size = arrays[k].shape[dim] * wanted // rows.given
        arrays[k] = _resize_rows(arrays[k], size, dim)
    return dataclasses.replace(call, arrays=arrays)


def _split(call: StepCall, rows: BatchRows, plan: Plan) -> int:
    """Returns the number of parts into which the plan splits the batch's rows."""
    paths = call.form.paths(call.arrays)
    axes = plan.mesh["axes"]
    found = 1
    for k, dim in rows.dims.items():
        split = 1
        for name in plan.inputs[paths[k]][dim]:
            split *= axes[name]
        found = max(found, split)
    return found


def _resize_rows(array: Any, size: int, dim: int) -> Any:
    """Returns the first ``size`` rows; repeats the last row if there are fewer."""
    xp = jax.numpy if isinstance(array, jax.Array) else np
    places = np.minimum(np.arange(size), array.shape[dim] - 1)
    return xp.take(array, places, axis=dim)


def _but(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """Returns a shape without one of its dims."""
    return (*shape[:dim], *shape[dim + 1 :])
