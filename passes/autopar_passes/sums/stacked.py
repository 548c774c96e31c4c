"""Partial results as ordinary arrays: one slice of a leading dimension each.

A value that is partial over mesh axes of together n devices is held as an array
``(n, *shape)`` whose leading dimension is split over those axes; the value is
the sum over that dimension. So a partial value has a layout that the program
can state, and nothing is communicated until the sum is taken.

A deferral: partial results and the values where their sums are due.

An operator that contracts a factor which the plan splits leaves a *partial*
result on each device. Where that result only flows through linear operators and
is added up, in a loop or with others, the sum over devices may wait. It is taken
once, at the first reader that needs the whole value; a gradient is sent in the
form that the plan wants.

The program alone decides which deferrals exist (`autopar_passes.sums.find`);
whether a plan may use one depends on its layouts (`autopar.layouts.stacking`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar_passes import jax_compat
from autopar_passes.layouts import Layout, automatic_axes, constrain, partition_spec
from autopar_passes.program.equations import Equation

# Operators that make partial results when a factor they reduce is split.
CONTRACTIONS = frozenset(
    {"dot_general", "reduce_sum", "conv_general_dilated", "scatter-add"}
)
# The sum of their two operands.
ADDITIONS = frozenset({"add", "add_any"})
# Linear in every operand together.
ADDITIVE = ADDITIONS | {"sub", "concatenate"}
# Linear in their first operand, the others only say how.
UNARY = frozenset(
    {
        "neg", "transpose", "reshape", "convert_element_type", "reduce_sum", "copy",
        "squeeze", "expand_dims", "rev", "slice", "split", "div",
    }
)  # fmt: skip
# They scale by a constant where all operands but one are constants.
SCALING = frozenset({"mul", "div", "neg", "convert_element_type"})


Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Stacked:
    """A partial value: ``array`` is ``(n, *shape)``, n devices of ``axes``."""

    array: Any
    axes: Axes
    layout: Layout


def group_size(mesh: Any, axes: Axes) -> int:
    """Returns the number of devices of a group over mesh axes."""
    return math.prod(mesh.shape[mesh.axis_names[a]] for a in axes)


def stack(array: Any, axes: Axes, layout: Layout, mesh: Any) -> Stacked:
    """States the layout of a stacked array."""
    return Stacked(constrain(array, mesh, (axes, *layout)), axes, layout)


def contribute(
    eqn: Equation,
    operands: Sequence[Any],
    layouts: Sequence[Layout],
    result: Layout,
    axes: Axes,
    mesh: Any,
) -> Any:
    """Runs a contraction shard by shard and stacks the partial results.

    Args:
      eqn: the equation, whose parameters do not depend on the operands' sizes.
      operands: what it reads.
      layouts: of the operands.
      result: layout of the result, apart from what is partial.
      axes: the mesh axes over which the result is partial.
      mesh: the mesh of the layouts.
    """

    def run(*shards: Any) -> Any:
        (out,) = jax_compat.bind(eqn.source, *shards)
        return out

    return stack_partials(run, operands, layouts, result, axes, mesh)


def stack_partials(
    function: Callable[..., Any],
    operands: Sequence[Any],
    layouts: Sequence[Layout],
    result: Layout,
    axes: Axes,
    mesh: Any,
) -> Any:
    """Runs a function on each device's shards and stacks what the devices return.

    Args:
      function: of the shards of the operands; returns one array.
      operands: the whole operands.
      layouts: of the operands.
      result: layout of the result, apart from the stacked dimension.
      axes: the mesh axes over which the results are stacked.
      mesh: the mesh of the layouts.
    """
    return jax.shard_map(
        lambda *shards: function(*shards)[None],
        mesh=mesh,
        in_specs=tuple(partition_spec(mesh, layout) for layout in layouts),
        out_specs=partition_spec(mesh, (axes, *result)),
        axis_names=automatic_axes(mesh),
        check_vma=False,
    )(*operands)


def lift(array: Any, axes: Axes, layout: Layout, mesh: Any) -> Stacked:
    """Returns a whole value as a partial one: a group's first device holds it."""
    n = group_size(mesh, axes)
    array = jnp.asarray(array)
    first = jax.lax.broadcasted_iota(np.int32, (n, *array.shape), 0) == 0
    whole = jax.lax.broadcast_in_dim(
        array, (n, *array.shape), tuple(range(1, array.ndim + 1))
    )
    zero = jax.lax.full_like(whole, 0)
    return stack(jax.lax.select(first, whole, zero), axes, layout, mesh)


def linear(
    eqn: Equation,
    operands: Sequence[Any],
    layouts: Sequence[Layout | None],
    axes: Axes,
    mesh: Any,
) -> list[Any]:
    """Runs an equation that is linear in its stacked operands on each slice.

    In a sum of stacked and whole operands, or a choice of them, the whole ones are
    lifted.

    Args:
      eqn: the equation.
      operands: what it reads, stacked or whole.
      layouts: of the operands, apart from the leading dimension; None: as it comes.
      axes: the mesh axes over which the stacked operands are partial.
      mesh: the mesh of the layouts.
    """
    # What selects is whole: it says the same of every slice.
    whole = 1 if eqn.primitive == "select_n" else 0
    if eqn.primitive in ADDITIVE or whole:
        operands = [
            x
            if isinstance(x, Stacked) or k < whole
            else lift(x, axes, layout or ((),) * jnp.ndim(x), mesh)
            for k, (x, layout) in enumerate(zip(operands, layouts, strict=True))
        ]
    in_axes = [0 if isinstance(x, Stacked) else None for x in operands]
    arrays = [x.array if isinstance(x, Stacked) else x for x in operands]
    bind = functools.partial(jax_compat.bind, eqn.source)
    return jax.vmap(bind, in_axes=in_axes)(*arrays)


def total(partial: Stacked) -> Any:
    """Takes the sum that was deferred."""
    return sum_partials(partial.array)


def sum_partials(array: Any) -> Any:
    """Returns the sum over the stacked dimension."""
    zero = np.zeros((), array.dtype)
    return jax.lax.reduce(array, zero, jax.lax.add, (0,))


@dataclasses.dataclass(frozen=True, slots=True)
class Deferral:
    """Partial results whose sum over devices may be taken later.

    The paths of several partial results belong to one deferral where they meet.

    Attributes:
      ends: the values whose sums are due, in program order.
      reach: the operators that make the partial results, each with the ends that
        its result flows into.
      members: every value on a path, the ends among them.
      hoisted: whether a sum would otherwise be taken more often, in a loop that
        accumulates it.
      gradients: those ends that the update reads of the backward pass, once in a
        step.
    """

    ends: tuple[int, ...]
    reach: tuple[tuple[int, tuple[int, ...]], ...]
    members: frozenset[int]
    hoisted: bool
    gradients: frozenset[int]

    @property
    def contributions(self) -> tuple[int, ...]:
        """The operators that make the partial results."""
        return tuple(op for op, _ in self.reach)

    def sharing(self, end: int) -> int:
        """Returns how many operators contribute to an end."""
        return sum(end in ends for _, ends in self.reach)
