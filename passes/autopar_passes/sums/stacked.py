"""Partial results as ordinary arrays, stacked along a leading dimension.

A value may be partial over mesh axes that have n devices together. Such a value is held
as an array ``(n, *shape)`` whose leading dimension is sharded over these axes. The
value is the sum over the leading dimension. The program can therefore state the layout
of a partial value, and devices communicate only when the sum is computed.

A *deferral* is a set of partial results, with the values at which their sums must be
computed. If the plan shards a factor that an operator contracts, each device has only a
*partial* result. The sum over devices may wait if the partial result only passes
through linear operators and is added up, in a loop or with other values. The sum is
then computed once, at the first reader that needs the whole value. A gradient is summed
by the collective that the plan chooses.

The program determines which deferrals exist (`autopar_passes.sums.find`). The layouts
of a plan determine whether the plan may use a deferral (`autopar.layouts.stacking`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from autopar_passes import jax_compat
from autopar_passes.graph.operators import OperatorGraph, producers, readers
from autopar_passes.layouts import Layout, constrain, on_shards, partition_spec
from autopar_passes.program.equations import Equation

# Operators whose results are partial if a factor that they reduce is sharded.
CONTRACTIONS = frozenset(
    {
        "dot_general", "reduce_sum", "conv_general_dilated", "scatter-add",
        "ragged_dot_in_blocks",
    }
)  # fmt: skip
# Operators that add their two operands.
ADDITIONS = frozenset({"add", "add_any"})
# Operators that are linear in all operands taken together.
ADDITIVE = ADDITIONS | {"sub", "concatenate"}
# Operators that are linear in their first operand. The other operands are parameters.
UNARY = frozenset(
    {
        "neg", "transpose", "reshape", "convert_element_type", "reduce_sum", "copy",
        "squeeze", "expand_dims", "rev", "slice", "split", "div",
    }
)  # fmt: skip

# Operators that only scale or cast an operand if all other operands are constants.
SCALING = frozenset({"mul", "div", "neg", "convert_element_type"})


Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Stacked:
    """A partial value: a stacked array ``(n, *shape)`` over n devices of ``axes``."""

    array: Any
    axes: Axes
    layout: Layout


def group_size(mesh: Any, axes: Axes) -> int:
    """Returns the number of devices in a group over mesh axes."""
    return math.prod(mesh.shape[mesh.axis_names[a]] for a in axes)


def stack(array: Any, axes: Axes, layout: Layout, mesh: Any) -> Stacked:
    """Makes a partial value of a stacked array, and states its layout."""
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
      operands: the operands of the equation.
      layouts: the layouts of the operands.
      result: the layout of the result, without the partial axes.
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
      function: takes the shards of the operands and returns one array.
      operands: the whole operands.
      layouts: the layouts of the operands.
      result: the layout of the result, without the stacked dimension.
      axes: the mesh axes over which the results are stacked.
      mesh: the mesh of the layouts.
    """
    made = partition_spec(mesh, (axes, *result))
    return on_shards(
        lambda *shards: function(*shards)[None], operands, layouts, made, mesh
    )


def lift(array: Any, axes: Axes, layout: Layout, mesh: Any) -> Stacked:
    """Turns a whole value into a partial value with the same sum.

    The group's first device holds the whole value, and the other devices hold zeros.
    """
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

    If an equation adds or selects stacked and whole operands, `lift` first turns the
    whole operands into stacked ones.

    Args:
      eqn: the equation.
      operands: the operands, stacked or whole.
      layouts: the layouts of the operands without the leading dimension; None for any
        layout.
      axes: the mesh axes over which the stacked operands are partial.
      mesh: the mesh of the layouts.
    """
    # The selector of a ``select_n`` is no stacked array: it is the same for every
    # slice.
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
    """Computes the sum that was deferred."""
    return sum_partials(partial.array)


def sum_partials(array: Any) -> Any:
    """Returns the sum over the stacked dimension."""
    zero = np.zeros((), array.dtype)
    return jax.lax.reduce(array, zero, jax.lax.add, (0,))


@dataclasses.dataclass(frozen=True, slots=True)
class Deferral:
    """Partial results whose sum over devices may be computed later.

    If the paths of several partial results meet, they belong to one deferral.

    Attributes:
      ends: the values at which the sums must be computed, in program order.
      reach: the operators that compute the partial results, each with the ends of its
        path.
      members: every value on a path, including the ends.
      hoisted: whether the deferral moves a sum over devices out of a loop that
        accumulates the partial results.
      gradients: the ends that the backward pass computes and the update reads, once per
        step.
    """

    ends: tuple[int, ...]
    reach: tuple[tuple[int, tuple[int, ...]], ...]
    members: frozenset[int]
    hoisted: bool
    gradients: frozenset[int]

    @property
    def contributions(self) -> tuple[int, ...]:
        """The operators that compute the partial results."""
        return tuple(op for op, _ in self.reach)

    def sharing(self, end: int) -> int:
        """Returns the number of operators that contribute to an end."""
        return sum(end in ends for _, ends in self.reach)


# Finds additions of partial results whose two all-reduces XLA combines into one.
#
# XLA turns the sum of two all-reduces into the all-reduce of a sum
# (``xla/service/all_reduce_reassociate.cc``, ``reduce_scatter_reassociate.cc`` in
# openxla/xla). For example, queries, keys and values give three gradients of the same
# input, and only the sum of the three crosses the links between devices. The two
# all-reduces must be over the same devices, and each must have only one reader. XLA
# moves operations between an all-reduce and the addition if they only change a shape.


_SHAPING = frozenset({"reshape", "transpose", "squeeze", "expand_dims", "copy"})


class Reassociation(NamedTuple):
    """An addition of two values whose all-reduces may be combined into one.

    Attributes:
      operator: the addition.
      summed: the two values that would be all-reduced: results of contractions, or of
        earlier additions of this kind.
      between: every value from ``summed`` (inclusive) to the operands of the addition.
    """

    operator: int
    summed: tuple[int, int]
    between: tuple[int, ...]


def reassociations(graph: OperatorGraph) -> tuple[Reassociation, ...]:
    """Returns the combinable additions of a program, in program order."""
    made_by, read_by = producers(graph.operators), readers(graph.operators)
    outputs = frozenset(graph.outputs)
    joined: set[int] = set()

    def way(value: int | None) -> tuple[int, ...]:
        """Returns the values from an operand back to the value that is all-reduced.

        The result is () if XLA cannot combine this all-reduce with that of the other
        operand: a value between them has other readers or is an output of the program,
        or an operation between them does more than change the shape.
        """
        out: list[int] = []
        while value is not None and value not in outputs:
            if len(read_by.get(value, ())) != 1:
                break
            out.append(value)
            op = made_by[value]
            contracts = op.kind in CONTRACTIONS and op.rule.reduction == "sum"
            if value in joined or (contracts and len(op.outputs) == 1):
                return tuple(out)
            if op.kind not in _SHAPING:
                break
            value = op.inputs[0]
        return ()

    found: list[Reassociation] = []
    for op in graph.operators:
        if op.kind not in ADDITIONS or len(op.inputs) != 2:
            continue
        one, other = (way(v) for v in op.inputs)
        if one and other:
            joined.add(op.outputs[0])
            summed = one[-1], other[-1]
            found.append(Reassociation(op.index, summed, (*one, *other)))
    return tuple(found)
