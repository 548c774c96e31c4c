"""Reads the arguments of a step's call: signatures, global shapes and batch rows."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from autopar.errors import PlanError, TraceError
from autopar.plans import Plan
from autopar.runtime import agreement, placement
from autopar.runtime.planned import PlannedStep
from autopar.runtime.recent import Recent
from autopar.runtime.world import World
from autopar.steps.batch import check_has_rows
from autopar_passes.graph.build import step_graph
from autopar_passes.program.calls import StepCall
from autopar_passes.program.static_leaves import struct_of
from autopar_passes.program.trace import trace_call


def signature(call: StepCall) -> Hashable:
    """Returns a key that is equal for calls that can share a plan.

    The key holds the form of the call, the shapes and the dtypes. It leaves out weak
    types, because `autopar.runtime.step_planner` compares those that matter.
    """
    arrays = tuple((tuple(x.shape), _text(x.dtype)) for x in call.arrays)
    return call.form, arrays


@functools.cache
def _text(dtype: Any) -> str:
    """Returns the name of a dtype; cached because NumPy computes it slowly."""
    return str(dtype)


def abstract(call: StepCall) -> StepCall:
    """Returns the call with a struct in place of each array."""
    return dataclasses.replace(call, arrays=[struct_of(x) for x in call.arrays])


class BatchArguments:
    """Finds the global shapes of a call's arguments.

    In a program of several processes, the state, random keys and frozen arrays are
    either global arrays or have the same values on every process. Of a batch, each
    process holds different rows, and all processes hold the same number of rows; of
    arrays that are named whole, each process holds all rows. An argument is state if
    the step returns some part of that argument.

    The dimension of the rows is that in which an array differs from the global shape
    that the caller has stated (by a struct, or by a plan). If none is stated, it is the
    dimension that grows with the batch. In a program that treats two dimensions alike,
    this is the first of them, which need not be the caller's.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        capacity: int,
        stated: Mapping[str, Sequence[int]],
    ) -> None:
        """Remembers the batch rows of at most ``capacity`` signatures of calls.

        Args:
          step: the train step.
          capacity: number of signatures.
          stated: path of an array -> its global shape, as far as the caller said so.
        """
        self._step, self._capacity = step, capacity
        self._stated = {path: tuple(shape) for path, shape in stated.items()}
        self.dims: dict[str, int] = {}
        self._rows: Recent[Hashable, dict[int, int]] = Recent(capacity)
        # Signature -> whether the processes have compared the shapes of such a call. A
        # comparison is a collective, so all processes must make the same comparisons.
        self._checked: Recent[Hashable, bool] = Recent(capacity)

    def enter(self) -> None:
        """Forgets which signatures were compared; called when the processes change."""
        self._checked = Recent(self._capacity)

    def structs(self, call: StepCall, world: World) -> StepCall:
        """Returns the call with a ``ShapeDtypeStruct`` of global shape for each array.

        Raises:
          PlanError: processes pass batches of different shapes.
        """
        with agreement.tell_errors(world, "reading the arguments"):
            local = abstract(call)
        if world.process_count == 1:
            return local
        key = signature(local)
        rows = self._rows.get(key)
        if not self._checked.get(key):
            agreement.check_rows(world, named_shapes(local))
            self._checked.put(key, True)
        if rows is None:
            with agreement.tell_errors(world, "tracing the step"):
                found = self._row_dims(call, local, world.process_count)
            found = self._as_stated(call, found, world.process_count)
            rows = self._rows.put(key, found)
        whole, paths = list(local.arrays), call.form.paths(local.arrays)
        for k, dim in rows.items():
            if call.form.roles.is_whole(paths[k]):
                continue
            whole[k] = _global(call.arrays[k], whole[k], world.process_count, dim)
        return dataclasses.replace(local, arrays=whole)

    def _row_dims(
        self, call: StepCall, local: StepCall, process_count: int
    ) -> dict[int, int]:
        """Returns the dimension of the rows of each batch array, by array position.

        If some arrays are named whole, the step is traced with the global shapes of the
        others, as far as they are known: rows of one process do not fit whole arrays.

        Raises:
          TraceError: the step cannot be traced.
        """
        paths, joined = call.form.paths(call.arrays), list(local.arrays)
        own = [k for k, path in enumerate(paths) if not call.form.roles.is_whole(path)]
        if len(own) == len(paths):
            return row_dims(self._step, local)
        for k in own:
            x = call.arrays[k]
            dim = self._stated_dim(paths[k], x, process_count)
            if dim is not None:
                joined[k] = _global(x, joined[k], process_count, dim)
        try:
            return row_dims(self._step, dataclasses.replace(local, arrays=joined))
        except TraceError as error:
            if error.__cause__ is None:  # the names are wrong, not the rows
                raise
            names = ", ".join(map(repr, call.form.roles.whole))
            raise TraceError(
                f"{error}\n"
                "  if these are numbers of rows: a process passes all rows of "
                f"whole_argnames={names}, but only its own rows of other arrays\n"
                "  try: name all arrays of the batch, or state the shapes of the whole "
                "batch by step.init(..., batch=) with ShapeDtypeStructs"
            ) from error

    def _stated_dim(self, path: str, array: Any, process_count: int) -> int | None:
        """The dimension in which an array differs from the stated shape, if it does."""
        shape, stated = tuple(np.shape(array)), self._stated.get(path, ())
        if not isinstance(array, jax.ShapeDtypeStruct) and len(stated) == len(shape):
            for dim in range(len(shape)):
                grown = placement.global_shape(array, process_count, dim)
                if grown == stated != shape:
                    self.dims[path] = dim
        return self.dims.get(path)

    def _as_stated(
        self, call: StepCall, found: Mapping[int, int], process_count: int
    ) -> dict[int, int]:
        """Returns the dimensions of rows, corrected by stated global shapes.

        Args:
          call: the call; structs among its arrays state global shapes.
          found: position of a batch array -> the dimension that grows with the batch.
          process_count: number of processes.
        """
        paths, out = call.form.paths(call.arrays), dict(found)
        for k in found:
            path, shape = paths[k], tuple(np.shape(call.arrays[k]))
            if isinstance(call.arrays[k], jax.ShapeDtypeStruct):
                if self._stated.get(path) != shape:
                    self._stated[path] = shape
                    self._rows = Recent(self._capacity)
                continue
            dim = self._stated_dim(path, call.arrays[k], process_count)
            out[k] = found[k] if dim is None else dim
        return out


def named_shapes(call: StepCall) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each array among the arguments, by the array's path."""
    paths = call.form.paths(call.arrays)
    shapes = [tuple(x.shape) for x in call.arrays]
    return dict(zip(paths, shapes, strict=True))


def row_dims(step: Callable[..., Any], call: StepCall) -> dict[int, int]:
    """Returns the dimension of the rows of each batch array, by array position."""
    check_has_rows(step, call)
    traced = trace_call(step, call)
    owners = call.form.argument_of(call.arrays)
    state = {owners[k] for k in traced.carried}
    inputs = step_graph(traced).inputs
    return {
        k: given.rows
        for k, given in enumerate(inputs)
        if given.rows >= 0 and owners[k] not in state
    }


def _global(leaf: Any, struct: Any, process_count: int, dim: int) -> Any:
    """Returns the global shape of an array of which each process has some rows."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return struct
    shape = placement.global_shape(leaf, process_count, dim)
    return struct.update(shape=shape)


def check_alive(name: str, call: StepCall) -> None:
    """Checks that no array of a call was donated to an earlier call, which freed it.

    Raises:
      PlanError: an array was donated.
    """
    gone = [
        k
        for k, x in enumerate(call.arrays)
        if isinstance(x, jax.Array) and x.is_deleted()
    ]
    if gone:
        # JAX keeps the shape of a deleted array, so the error can name it.
        paths = call.form.paths(call.arrays)
        raise PlanError(
            f"{name}: '{paths[gone[0]]}'{_more(gone)} was consumed by an earlier call: "
            "a step consumes the state that it is given, to reuse its memory. Pass the "
            "state that the last call returned, or keep the old one with "
            "parallelize(donate=False)."
        )


def _more(found: Sequence[Any]) -> str:
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""


def check_shapes(name: str, plan: Plan, leaves: Sequence[Any]) -> None:
    """Checks that a state has the shapes of a plan's first inputs.

    Raises:
      PlanError: a shape differs.
    """
    planned = list(plan.written_shapes.items())[: len(leaves)]
    for (path, shape), leaf in zip(planned, leaves, strict=False):
        if tuple(shape) != tuple(leaf.shape):
            raise PlanError(
                f"{name}: the plan belongs to another step: its '{path}' has shape "
                f"{tuple(shape)}, the created state's leaf has {tuple(leaf.shape)}. "
                "Make a new plan with autopar.plan."
            )


# Batches with fewer rows than planned, such as the last batch of an epoch.


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
      processes: number of processes that the rows are divided among; 1 if each process
        has all rows.
    """

    given: int
    planned: int
    dims: dict[int, int]
    processes: int


def fewer_rows(
    call: StepCall, running: PlannedStep, process_count: int
) -> BatchRows | None:
    """Returns the rows of a call if they are fewer than the running step's; else None.

    All batch arrays must have fewer rows in the same ratio, and everything else must be
    as in the calls that the step was planned for. For any other call the result is
    None.
    """
    analysis = running.analysis
    if analysis.pytrees.form != call.form:
        return None
    differ: dict[int, tuple[int, int, int]] = {}
    for k, (x, given) in enumerate(
        zip(call.arrays, analysis.graph.inputs, strict=True)
    ):
        want, have = analysis.graph.values[given.value].shape, tuple(np.shape(x))
        dim = given.rows if given.output < 0 else -1
        if dim >= 0 and len(have) == len(want) and not placement.is_global(x):
            whole = have == tuple(want) or call.form.roles.is_whole(given.path)
            parts = 1 if whole else process_count
            if _but(have, dim) != _but(want, dim):
                return None
            if have[dim] * parts != want[dim]:
                differ[k] = have[dim], want[dim] // parts, parts
        elif have != tuple(want):
            return None
    if not differ:
        return None
    given, planned, processes = next(iter(differ.values()))
    alike = all(a * planned == b * given for a, b, _ in differ.values())
    if not alike or not 0 < given < planned:
        return None
    dims = {k: analysis.graph.inputs[k].rows for k in differ}
    return BatchRows(given, planned, dims, processes)


def fit_rows(
    call: StepCall, running: PlannedStep, how: LastBatch, process_count: int
) -> StepCall:
    """Drops or repeats rows of a call that has fewer rows than planned.

    Args:
      call: the call with fewer rows.
      running: the running step.
      how: what to do with the rows; ``run`` changes nothing.
      process_count: number of processes; all processes hold equally many rows.

    Raises:
      PlanError: no row would be left.
    """
    rows, plan = fewer_rows(call, running, process_count), running.plan
    if rows is None or how == "run":
        return call
    if how == "pad":
        wanted = rows.planned
        said = f"the last row is repeated {rows.planned - rows.given} times"
    else:
        parts = _split(call, rows, plan)
        wanted = rows.given * rows.processes // parts * parts // rows.processes
        said = f"{rows.given - wanted} of them are dropped"
        if not wanted:
            raise PlanError(
                f"a batch of {rows.given * rows.processes} rows is smaller than the "
                f"{parts} parts into which the plan splits a batch, so "
                "last_batch='drop' would leave no row. Leave this batch out, or give "
                "last_batch='run' or 'pad'."
            )
    if wanted == rows.given:
        return call
    warnings.warn(
        f"a batch of {rows.given} rows, where {rows.planned} were planned for: {said} "
        f"(last_batch={how!r}).",
        stacklevel=4,
    )
    arrays = list(call.arrays)
    for k, dim in rows.dims.items():
        size = arrays[k].shape[dim] * wanted // rows.given
        arrays[k] = resize_rows(arrays[k], size, dim)
    return dataclasses.replace(call, arrays=arrays)


def _split(call: StepCall, rows: BatchRows, plan: Plan) -> int:
    """Returns the number of equal parts into which the plan splits the batch's rows:
    microbatches, times the shards of each.
    """
    paths = call.form.paths(call.arrays)
    shards = 1
    for k, dim in rows.dims.items():
        axes = dict(plan.home_axes[plan.home(paths[k])])
        names = plan.home_spec(paths[k])[dim]
        shards = max(shards, math.prod(axes[name] for name in names))
    return plan.microbatches * shards


def resize_rows(array: Any, size: int, dim: int) -> Any:
    """Returns the first ``size`` rows; if there are fewer, repeats the last row."""
    xp = jax.numpy if isinstance(array, jax.Array) else np
    places = np.minimum(np.arange(size), array.shape[dim] - 1)
    return xp.take(array, places, axis=dim)


def _but(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """Returns a shape without one of its dims."""
    return (*shape[:dim], *shape[dim + 1 :])
