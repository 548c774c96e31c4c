"""Reads the arguments of a step's call: signatures, global shapes and batch rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from autopar.errors import PlanError
from autopar.plans import Plan
from autopar.runtime import agreement, placement
from autopar.runtime.recent import Recent
from autopar.runtime.world import World
from autopar_passes.graph.build import step_graph
from autopar_passes.program.calls import StepCall
from autopar_passes.program.static_leaves import struct_of
from autopar_passes.program.trace import trace_call


def signature(call: StepCall) -> Hashable:
    """Returns a key that is equal for calls that can share a plan.

    The key holds the form of the call, the shapes and the dtypes. Weak types are left
    out: `autopar.runtime.step_planner` compares the relevant weak types.
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
    process holds different rows, and all processes hold the same number of rows. An
    argument is state if the step returns some part of that argument.
    """

    def __init__(self, step: Callable[..., Any], capacity: int) -> None:
        """Remembers the batch rows of at most ``capacity`` signatures of calls."""
        self._step, self._capacity = step, capacity
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
                found = row_dims(self._step, local)
            rows = self._rows.put(key, found)
        whole = list(local.arrays)
        for k, dim in rows.items():
            whole[k] = _global(call.arrays[k], whole[k], world.process_count, dim)
        return dataclasses.replace(local, arrays=whole)


def named_shapes(call: StepCall) -> dict[str, tuple[int, ...]]:
    """Returns path -> shape of each array among the arguments."""
    paths = call.form.paths(call.arrays)
    shapes = [tuple(x.shape) for x in call.arrays]
    return dict(zip(paths, shapes, strict=True))


def row_dims(step: Callable[..., Any], call: StepCall) -> dict[int, int]:
    """Returns the position of each batch array -> the dimension of its rows."""
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
    """Returns the struct of a whole array, of which each process holds some rows."""
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
        # A deleted array still knows its shape.
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
