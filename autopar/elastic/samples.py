"""Gets the batch of a step from the user's source of samples.

The *position* of a step is the number of its first sample.

A source is a function ``source(position, rows)``. The function returns ``rows``
samples, beginning with sample number ``position``. A run counts samples and not
batches. So after a change of the plan, the batch size or the processes, it continues
with the next sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from autopar.errors import PlanError
from autopar.runtime import placement
from autopar.runtime.planned import PlannedStep
from autopar.runtime.world import World

Source = Callable[[int, int], Any]
Others = Callable[[int], Sequence[Any] | Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Samples:
    """A source of samples, with the batch size of the run.

    Attributes:
      source: returns samples.
      batch: samples of a step, over all processes.
      others: function from the number of a step to the arguments of the step after the
        batch, in order or by name.
      first: offset added to ``step * batch`` to get the position of a step; not 0 if
        the batch size has changed.
    """

    source: Source
    batch: int
    others: Others
    first: int = 0

    def position(self, step: int) -> int:
        """Number of the first sample of a step."""
        return self.first + step * self.batch

    def gone_on(self, step: int, position: int) -> Samples:
        """A copy in which ``step`` begins at the sample ``position``."""
        return dataclasses.replace(self, first=position - step * self.batch)

    def resize(self, step: int, batch: int) -> Samples:
        """A copy with another batch size, from ``step`` on."""
        first = self.position(step) - step * batch
        return dataclasses.replace(self, batch=batch, first=first)

    def arguments(
        self, step: int, world: World, known: tuple[Any, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a step after the state, in order and by name.

        Args:
          step: number of the step.
          world: the processes.
          known: shapes and row dimensions of the batch's arrays (`planned_batch`).
            None: they are not known, and the result contains the whole batch.
        """
        position = self.position(step)
        structs, dims = known or (None, None)
        if structs is None:
            batch = self._ask(position, self.batch, dims)
        elif _on_stages(structs, world):
            each = self.batch // world.process_count
            batch = self._ask(position + world.process_index * each, each, dims)
        else:
            batch = self._own(position, structs, dims)
        return self._beside(step, batch)

    def part(
        self, step: int, part: int, parts: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a step after the state, with one of equal parts of its rows.

        Args:
          step: number of the step.
          part: number of the part.
          parts: number of parts.

        Raises:
          PlanError: the rows have no such equal parts.
        """
        each, rest = divmod(self.batch, parts)
        if rest:
            raise PlanError(
                f"batch={self.batch} rows cannot be divided among {parts} processes; "
                "choose a multiple."
            )
        return self._beside(step, self._ask(self.position(step) + part * each, each))

    def _beside(self, step: int, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A batch, and the arguments of a step after it."""
        rest = self.others(step)
        if isinstance(rest, Mapping):
            return (batch,), dict(rest)
        return (batch, *rest), {}

    def _ask(self, position: int, rows: int, dims: Any = None) -> Any:
        """Calls the source, and checks what it returns.

        Args:
          position: number of the first sample to read.
          rows: number of samples.
          dims: for each array, the dimension that counts samples; None: not known yet.

        Raises:
          PlanError: the source returned another number of samples.
        """
        try:
            batch = self.source(position, rows)
        except (StopIteration, EOFError, IndexError) as error:
            raise PlanError(
                f"source({position}, {rows}) raised {type(error).__name__}: it has no "
                "such samples. End the run before them (steps= or samples=), or begin "
                "again from the first."
            ) from error
        if not jax.tree.leaves(batch):
            raise PlanError(
                f"source({position}, {rows}) returned {batch!r}, which holds no array; "
                f"it must return {rows} samples. End the run before them (steps= or "
                "samples=) where there are no more."
            )
        places = iter(jax.tree.leaves(dims))
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            shape, dim = np.shape(leaf), next(places, None)
            if shape and rows not in (shape if dim is None else shape[dim : dim + 1]):
                raise PlanError(
                    f"source({position}, {rows}) returned {shape[dim or 0]} rows in "
                    f"'{jax.tree_util.keystr(path)}', dimension {dim or 0} of "
                    f"{shape}; it must return {rows}. Where rows lie in another "
                    "dimension, name it: autopar.parallelize(step, batch_argnames=...)."
                )
        return batch

    def _own(self, position: int, structs: Any, dims: Any) -> Any:
        """The batch as global arrays; asks the source only for this process's rows."""
        wanted = list(zip(jax.tree.leaves(structs), jax.tree.leaves(dims), strict=True))
        ranges = sorted({r for x, dim in wanted for r in _row_ranges(x, dim)})
        parts = {r: self._ask(position + r[0], r[1] - r[0], dims) for r in ranges}
        leaves = {r: jax.tree.leaves(part) for r, part in parts.items()}
        made = [_global_array(k, x, dim, leaves) for k, (x, dim) in enumerate(wanted)]
        return jax.tree.unflatten(jax.tree.structure(structs), made)


def batch_structs(planned: PlannedStep, argument: int) -> Any:
    """Shape, dtype and sharding of each array of a batch, over all processes.

    Args:
      planned: the step under a plan.
      argument: position of the batch among the step's arguments.
    """
    graph, form = planned.analysis.graph, planned.analysis.pytrees.form
    values = [graph.values[given.value] for given in graph.inputs]
    structs = [
        jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding)
        for v, sharding in zip(values, planned.in_shardings, strict=True)
    ]
    return form.fixed.join(structs)[argument]


def planned_batch(planned: PlannedStep, argument: int, world: World) -> tuple[Any, Any]:
    """Shapes of a batch (`batch_structs`), and each array's dimension of samples.

    With a single process, the shapes are None. The dimension is 0 for an array without
    a dimension of samples.

    Args:
      planned: the step under a plan.
      argument: position of the batch among the step's arguments.
      world: the processes.
    """
    alone, analysis = world.process_count == 1, planned.analysis
    dims = [max(given.rows, 0) for given in analysis.graph.inputs]
    structs = None if alone else batch_structs(planned, argument)
    return structs, analysis.pytrees.form.fixed.join(dims)[argument]


def placed_rest(planned: PlannedStep, first: int, rest: Sequence[Any]) -> list[Any]:
    """Arguments as global arrays that every process holds as a whole.

    Args:
      planned: the step under a plan.
      first: position of the first of ``rest`` among the step's arguments.
      rest: the arguments.
    """
    return [
        jax.tree.map(
            lambda x, s: placement.place(x, s.sharding) if np.ndim(x) else x,
            given,
            batch_structs(planned, first + k),
        )
        for k, given in enumerate(rest)
    ]


def _on_stages(structs: Any, world: World) -> bool:
    """Whether only some stages, and so only some processes, read the batch.

    Each process then reads the same number of rows from the source, and sends them to
    the processes that need them.
    """
    places = [x.sharding.device_set for x in jax.tree.leaves(structs)]
    return any(
        {d.process_index for d in p} != set(range(world.process_count)) for p in places
    )


def _row_ranges(struct: Any, dim: int) -> set[tuple[int, int]]:
    """The ranges of rows of a batch array that this process's devices hold."""
    if not struct.shape:
        return set()
    index = struct.sharding.addressable_devices_indices_map(struct.shape)
    return {x[dim].indices(struct.shape[dim])[:2] for x in index.values()}


def _global_array(
    k: int, struct: Any, dim: int, leaves: Mapping[tuple[int, int], Sequence[Any]]
) -> Any:
    """Makes a global array of the batch from the rows that this process has read."""
    if not struct.shape:
        return next(iter(leaves.values()))[k]

    def part(index: Any) -> Any:
        begin, end, _ = index[dim].indices(struct.shape[dim])
        own = (*index[:dim], slice(None), *index[dim + 1 :])
        return np.asarray(leaves[begin, end][k])[own]

    return jax.make_array_from_callback(struct.shape, struct.sharding, part)


def others_of(given: Any) -> Others:
    """Makes a function from a step's number to the step's arguments after the batch."""
    if given is None:
        return lambda step: ()
    return cast("Others", given) if callable(given) else lambda step: given
