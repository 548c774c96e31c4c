"""Distributes a step's microbatches over replicas, which may get unequal numbers.

A replica is one position of the mesh's first axis, and holds the whole state. The loop
over microbatches runs inside a ``shard_map`` that is manual over the first axis only.
The plan's layouts therefore hold inside each replica as in a step without replicas.
Every replica has its own number of iterations. Collectives of an iteration stay within
a replica, so replicas need not be in the same iteration. After the loop the sums of all
replicas are added.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from autopar_passes import jax_compat
from autopar_passes.graph.operators import Operator
from autopar_passes.layouts import constrain
from autopar_passes.replay.values import Values
from autopar_passes.sums.stacked import sum_partials

# A function from the constants, carry and slices of one iteration to its new carry and
# the values that it stacks.
Turn = Callable[[Any, Any, Any], tuple[Any, Any]]
# A function that takes the position of a replica and the number of an iteration, and
# returns the number unchanged. To simulate slower devices, the function waits before it
# returns.
Wait = Callable[[Any, Any], Any]
# The mesh axis of the replicas.
AXIS = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Replicas:
    """The microbatches of each replica.

    Attributes:
      loop: index of the equation that loops over the microbatches.
      counts: the number of microbatches of each replica; the first replica has the
        first microbatches.
      wait: called at the beginning of each iteration, to simulate slower devices; None
        for no call.
      turns: a number of iterations that every replica runs in place of its number in
        ``counts``; None to use ``counts``. Audits set it, because they count the
        messages of one replica, and need a number that is known before the program
        runs.
    """

    loop: int
    counts: tuple[int, ...]
    wait: Wait | None = None
    turns: int | None = None

    def run(
        self,
        values: Values,
        turn: Turn,
        constants: Sequence[Any],
        carry: Sequence[Any],
        slices: Sequence[Any],
    ) -> tuple[list[Any], Any]:
        """Runs the loop on all replicas.

        Args:
          values: the values of the program, outside of the loop.
          turn: runs one microbatch.
          constants: the values that all iterations read.
          carry: the sums over iterations, zero at the beginning.
          slices: arrays with an entry for each microbatch, ``(count, ...)``.

        Returns the sums of each replica, ``(replicas, ...)``, and a tree of its stacked
        values, ``(replicas, count, ...)``, which are zero for the microbatches of other
        replicas.
        """
        mesh, axis = values.mesh, values.mesh.axis_names[AXIS]
        given_to_all = (constants, carry, slices)

        def replica(position: Any, *given: Any) -> Any:
            with _inside(values):
                ends = self._turns(turn, position[0], *given)
            return jax.tree.map(lambda x: jax.lax.expand_dims(x, (0,)), ends)

        return jax.shard_map(
            replica,
            mesh=mesh,
            in_specs=(PartitionSpec(axis), *(PartitionSpec(),) * 3),
            out_specs=PartitionSpec(axis),
            axis_names={axis},
            check_vma=False,
        )(np.arange(len(self.counts), dtype=np.int32), *map(list, given_to_all))

    def _turns(
        self, turn: Turn, position: Any, constants: Any, carry: Any, slices: Any
    ) -> tuple[list[Any], Any]:
        """Runs the iterations of one replica."""
        starts = [0, *itertools.accumulate(self.counts)]
        start = jnp.asarray(starts[:-1], jnp.int32)[position]
        end = jnp.asarray(starts[1:], jnp.int32)[position]
        buffers = jax.tree.map(
            lambda x: jnp.zeros((starts[-1], *x.shape), x.dtype),
            _stacked_shapes(turn, constants, carry, slices),
        )

        def body(state: Any) -> Any:
            number, carried, stacks = state
            if self.wait is not None:
                number = self.wait(position, number)
            # JAX makes constants part of the carry. Without the barrier, Shardy would
            # reshard the constants in each iteration to the last layout that the body
            # states for them.
            held = [jax.lax.optimization_barrier(x) for x in constants]
            carried, made = turn(held, carried, [_entry(x, number) for x in slices])
            made = jax.tree.map(_raw, made)
            stacks = jax.tree.map(
                lambda stack, x: jax.lax.dynamic_update_index_in_dim(
                    stack, x, number, 0
                ),
                stacks,
                made,
            )
            return number + 1, list(carried), stacks

        state = (start, list(carry), buffers)
        if self.turns is not None:
            counted = jax.lax.scan(
                lambda s, x: (body(s), x), state, None, length=self.turns
            )
            return counted[0][1:]
        _, ends, stacks = jax.lax.while_loop(lambda s: s[0] < end, body, state)
        return ends, stacks

    def add_up(self, values: Values, op: Operator, array: Any, dtype: Any) -> Any:
        """Adds one result of `run` over the replicas, in the layouts of the plan.

        If the plan defers the sum over the replicas, the result stays a stacked array,
        like any partial value.

        Args:
          values: the values of the program, outside of the loop.
          op: the operator that takes the result out of the loop.
          array: the result of all replicas, ``(replicas, ...)``; of random keys the raw
            words.
          dtype: the dtype of the result.
        """
        slot = 1 if op.kind == "carry" else 0
        value, plan, mesh = op.outputs[slot], values.plan, values.mesh
        partial = plan.partial_layout(value)
        if partial is None:
            layouts = plan.results(op, slot)
            first = layouts[0] if layouts else ((),) * (array.ndim - 1)
            array = constrain(array, mesh, ((AXIS,), *first))
            total = _total(array)
            if jax_compat.is_extended(dtype):
                return jax_compat.wrap_keys(total, dtype)
            return values.pin(total, layouts)
        axes, layout = partial
        within = tuple(a for a in axes if a != AXIS)
        if within:
            if op.kind == "stack_step":
                array = jnp.moveaxis(array, 2, 1)
            array = constrain(array, mesh, ((AXIS,), within, *layout))
            if AXIS not in axes:
                return values.defer(value, _total(array))
            array = array.reshape(-1, *array.shape[2:])
        return values.defer(value, array)


@contextlib.contextmanager
def _inside(values: Values) -> Generator[None]:
    """Makes the mesh of the surrounding ``shard_map`` the mesh of ``values``."""
    mesh, values.mesh = values.mesh, jax.sharding.get_abstract_mesh()
    try:
        yield
    finally:
        values.mesh = mesh


def side_by_side(stacks: Any) -> Any:
    """Joins the replicas of stacked arrays: ``(count, devices of all replicas, ...)``.

    Args:
      stacks: a tree of stacked arrays ``(replicas, count, devices of a replica, ...)``.
    """

    def join(x: Any) -> Any:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])

    return jax.tree.map(join, stacks)


def _entry(array: Any, number: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(array, number, 0, keepdims=False)


def _stacked_shapes(turn: Turn, constants: Any, carry: Any, slices: Any) -> Any:
    """Returns the shapes and dtypes of the values that an iteration stacks."""

    def make(held: Any, carried: Any, arrays: Any) -> Any:
        return jax.tree.map(_raw, turn(held, carried, [x[0] for x in arrays])[1])

    return jax.eval_shape(make, constants, carry, slices)


def _total(array: Any) -> Any:
    """The sum over replicas. Numbers with less than 32 bits are summed in 32 bits."""
    if array.dtype.itemsize >= np.dtype(np.float32).itemsize:
        return sum_partials(array)
    floating = jnp.issubdtype(array.dtype, jnp.floating)
    wide = jnp.float32 if floating else jnp.int32
    return sum_partials(array.astype(wide)).astype(array.dtype)


def _raw(array: Any) -> Any:
    """Returns the raw words of random keys, to be summed; other arrays unchanged."""
    extended = jax_compat.is_extended(array.dtype)
    return jax.random.key_data(array) if extended else array
