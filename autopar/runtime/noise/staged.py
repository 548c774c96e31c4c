"""What is measured of gradients in a step of several pipeline stages.

The tasks that make a gradient measure each microbatch's part of it, and the first task
that reads it whole measures the sum. A few numbers of each task are added up after the
step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.errors import PlanError
from autopar.layouts.assignment import Assignment
from autopar.planner.codecs.sites import updated_parameters
from autopar.runtime.noise.averages import Groups, State, fresh, updated
from autopar.runtime.noise.norms import Norm, device_norms
from autopar.runtime.noise.options import NoiseOptions
from autopar.runtime.noise.sources import (
    Source,
    Sources,
    alone_in,
    bare_of,
    replicas_of,
    trained,
)
from autopar.steps.stages import CutStep
from autopar_passes.microbatches.microbatched import Combine
from autopar_passes.stages.cut import Phase, Task, TaskKey

Rows = Mapping[TaskKey, Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class TaskNoise:
    """What one task measures.

    Attributes:
      values: arrays of the task whose squared norms are wanted.
      summed: of each, the mesh axes whose partial sums are added up before.
    """

    values: tuple[int, ...]
    summed: tuple[tuple[int, ...], ...]

    def rows(self, assignment: Assignment, mesh: Any, arrays: Sequence[Any]) -> Any:
        """Each device's part of the norms, float32 (devices, values).

        Args:
          assignment: the layouts of the stage.
          mesh: its devices.
          arrays: of the values, whole or with their partial sums.
        """
        wanted: list[Norm] = []
        for value, summed, array in zip(self.values, self.summed, arrays, strict=True):
            layout = assignment.home_layout(value)
            partial = assignment.stacked(value)
            if partial is not None and jnp.ndim(array) > len(layout):
                wanted.append(Norm(array, (partial[0], *partial[1]), summed))
            else:
                wanted.append(Norm(array, layout))
        return device_norms(mesh, wanted)


@dataclasses.dataclass(frozen=True)
class StagedNoise:
    """What is measured in a step of several stages.

    Attributes:
      sources: the gradients.
      options: how they are measured.
      tasks: what each task measures.
      columns: of each task, for each of its values: the gradient, whether it is the
        whole one, and what its norm is multiplied by.
      device: where the averages lie.
    """

    sources: Sources
    options: NoiseOptions
    tasks: Mapping[TaskKey, TaskNoise]
    columns: Mapping[TaskKey, tuple[tuple[int, bool, float], ...]]
    device: Any

    @functools.cached_property
    def groups(self) -> Groups:
        """The groups of each gradient."""
        counts = tuple(s.groups for s in self.sources.found)
        return Groups(counts, self.sources.rows)

    def create(self) -> State:
        """The state before the first step; no gradient is compared with another's."""
        base = self.options.base_batch or self.sources.rows
        compared = jnp.zeros((), jnp.int32)
        return {**fresh(base), "compared": compared, "previous": {}}

    def structs(self) -> State:
        """Shapes of the state."""
        return jax.eval_shape(self.create)

    def shardings(self) -> State:
        """Where the state lies: on the first device of the pipeline."""
        where = jax.sharding.SingleDeviceSharding(self.device)
        return jax.tree.map(lambda _: where, self.structs())

    def init(self) -> State:
        """The state before the first step, in its place."""
        return jax.device_put(self.create(), self.shardings())

    def updated(self, state: State, rows: Rows) -> State:
        """The state after a step.

        Args:
          state: before it.
          rows: what each task measured, of each microbatch.
        """
        keys = list(self.tasks)
        sums = [_added_up(list(rows[key])) for key in keys]
        moved = jax.device_put(sums, jax.sharding.SingleDeviceSharding(self.device))
        return self._fold(state, moved)

    @functools.cached_property
    def _fold(self) -> Any:
        return jax.jit(self._folded)

    def _folded(self, state: State, sums: Sequence[Any]) -> State:
        norms = jnp.zeros((len(self.sources.found), 3), jnp.float32)
        for key, found in zip(self.tasks, sums, strict=True):
            for k, (gradient, whole, share) in enumerate(self.columns[key]):
                column = slice(1, 3) if whole else slice(0, 1)
                norms = norms.at[gradient, column].add(share * found[k])
        every = self.options.every or 1
        measured = state["step"] % every == 0
        after = updated(state, norms, self.groups, self.options.decay, measured)
        return {**after, "compared": state["compared"], "previous": {}}


@jax.jit
def _added_up(rows: Sequence[jax.Array]) -> jax.Array:
    """The sums over microbatches and devices."""
    return jnp.sum(jnp.stack(rows), axis=(0, 1))


def staged_noise(
    cut: CutStep,
    assignments: Sequence[Assignment],
    rows: int,
    options: NoiseOptions,
    device: Any,
) -> StagedNoise:
    """Says what is measured in a step of several stages.

    Args:
      cut: the step as stages.
      assignments: the layouts of each stage.
      rows: of the whole batch, M.
      options: how it is measured.
      device: where the averages are to lie.

    Raises:
      PlanError: nothing can be measured, or gradients are to be preconditioned.
    """
    if options.preconditioned:
        raise PlanError(
            "noise_scale: preconditioned=True is not there for plans of several "
            "stages. Leave it out, or plan with stages=1."
        )
    makers = {
        value: task
        for key, task in cut.cut.tasks.items()
        if key.phase is not Phase.UPDATE
        for value in task.outputs
    }
    found: list[Source] = []
    for value, name in _gradients(cut).items():
        task = makers.get(value)
        if task is None or _reader(cut, value) is None:
            continue
        source = _source(cut, assignments[task.key.stage], task, value, name, rows)
        if source.groups > 1:
            found.append(source)
    if not rows or not found:
        raise PlanError(
            "noise_scale: the plan has one microbatch and no data replicas in its "
            "stages, so there is nothing to compare. Plan with microbatches= of at "
            "least 2."
        )
    sources = Sources(tuple(found), _left_out(cut, found), rows)
    tasks, columns = _measured(cut, assignments, makers, sources)
    return StagedNoise(sources, options, tasks, columns, device)


def _gradients(cut: CutStep) -> dict[int, str]:
    """The values of microbatches that alone update a parameter."""
    summed = [c.value for c in cut.found.crossings if c.combine in _SHARES]
    return alone_in(updated_parameters(cut.analysis.graph, summed))


# What a microbatch's value is multiplied by: nothing, or it is a mean.
_SHARES = (Combine.SUM, Combine.MEAN)


def _left_out(cut: CutStep, found: Sequence[Source]) -> tuple[str, ...]:
    known = {source.name for source in found}
    return tuple(path for path in trained(cut.analysis.graph) if path not in known)


def _reader(cut: CutStep, value: int) -> TaskKey | None:
    """The first task that reads a gradient whole."""
    for key, task in cut.cut.tasks.items():
        if key.phase is Phase.UPDATE and value in (v for v, _ in task.inputs):
            return key
    return None


def _source(
    cut: CutStep,
    assignment: Assignment,
    task: Task,
    value: int,
    name: str,
    rows: int,
) -> Source:
    """A gradient that one task makes, microbatch by microbatch."""
    count = cut.found.microbatches
    replicas = replicas_of(assignment, value)
    workers = math.prod(assignment.sizes[a] for a in replicas)
    if rows % (workers * count):
        replicas, workers = (), 1
    bare = bare_of(assignment, value)
    if assignment.contraction.producer[bare].equation not in task.equations:
        bare = value
    means = {c.value for c in cut.found.crossings if c.combine is Combine.MEAN}
    share = 1.0 / count if value in means else 1.0
    return Source(name, value, replicas, workers * count, value, bare, -1, share)


def _measured(
    cut: CutStep,
    assignments: Sequence[Assignment],
    makers: Mapping[int, Task],
    sources: Sources,
) -> tuple[dict[TaskKey, TaskNoise], dict[TaskKey, tuple[Any, ...]]]:
    """What each task measures, and which gradient each number belongs to."""
    values: dict[TaskKey, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
    columns: dict[TaskKey, list[tuple[int, bool, float]]] = defaultdict(list)
    for k, source in enumerate(sources.found):
        key = makers[source.value].key
        partial = assignments[key.stage].stacked(source.bare)
        axes = () if partial is None else partial[0]
        summed = tuple(a for a in axes if a not in source.replicas)
        values[key].append((source.bare, summed))
        columns[key].append((k, False, source.share**2))
        reader = _reader(cut, source.value)
        assert reader is not None
        values[reader].append((source.value, ()))
        columns[reader].append((k, True, 1.0))
    tasks = {
        key: TaskNoise(tuple(v for v, _ in found), tuple(s for _, s in found))
        for key, found in values.items()
    }
    return tasks, {key: tuple(found) for key, found in columns.items()}
