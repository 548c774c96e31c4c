"""What a decision of a loop is made on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from autopar.goodput.choice import Way
from autopar.goodput.ways import PlannedWay
from autopar.runtime import changing_batches
from autopar.runtime.creation import flat_state
from autopar.runtime.parallel_step import ParallelStep
from autopar_passes.program.calls import StepCall


@dataclasses.dataclass(frozen=True, slots=True)
class Now:
    """What a decision is made on; a thread may read it while steps go on.

    What a step measures may not be read then: its arrays are handed on to the next one.

    Attributes:
      made: the way that runs.
      way: the same with what its codecs were measured to err.
      held: structs of the state's arrays, with where they lie.
      call: the arguments of the step, structs.
      batch: position of the batch among them.
    """

    made: PlannedWay
    way: Way
    held: tuple[Any, ...]
    call: StepCall
    batch: int

    def call_of(self, rows: int) -> StepCall:
        """The arguments with another number of rows."""
        owners = self.call.form.argument_of(self.call.arrays)
        arrays = [
            with_rows(x, self.made.key.rows, rows) if owner == self.batch else x
            for x, owner in zip(self.call.arrays, owners, strict=True)
        ]
        return dataclasses.replace(self.call, arrays=arrays)


def now_of(
    step: ParallelStep[..., Any],
    made: PlannedWay,
    way: Way,
    state: Any,
    rest: Sequence[Any],
    named: Mapping[str, Any],
) -> Now:
    """What a decision is made on after a step.

    Args:
      step: the step.
      made: the way that runs.
      way: what is known of it.
      state: that the step returned.
      rest: what it took after the state.
      named: what it took by name.
    """
    arguments = state if type(state) is tuple else (state,)
    call = changing_batches.call_of(step, (*arguments, *rest), named)
    leaves, _ = flat_state(state)
    held = tuple(
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves
    )
    return Now(made, way, held, call, len(arguments))


def with_rows(struct: Any, rows: int, wanted: int) -> Any:
    """The struct of an array of a batch with another number of rows.

    Args:
      struct: of an array; one that has no rows stays.
      rows: of the batch.
      wanted: rows of the result.
    """
    if not struct.shape or struct.shape[0] != rows:
        return struct
    shape = (wanted, *struct.shape[1:])
    return jax.ShapeDtypeStruct(shape, struct.dtype, weak_type=struct.weak_type)
