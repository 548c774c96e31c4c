"""Measures the squared norms of gradients in a step of several pipeline stages.

A task is the work of one stage in one phase. The task that computes a gradient measures
the partial gradient of each microbatch. The first task that reads the summed gradient
measures the sum. After the step the few numbers of all tasks are added up.
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
from jax.sharding import NamedSharding, PartitionSpec

from autopar.errors import PlanError
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Axes
from autopar.planner.codecs.sites import updated_parameters
from autopar.runtime.noise.averages import (
    GradientSource,
    NoiseOptions,
    NoiseSpec,
    Sources,
    State,
    alone_in,
    bare_of,
    replicas_of,
    trained_paths,
    update_averages,
)
from autopar.runtime.noise.norms import NORMS, Norm, device_norms
from autopar.steps.stages import CutStep
from autopar_passes.microbatches.facts import Combine
from autopar_passes.stages.cut import Phase, Task, TaskKey

# Where norms are measured: in a task, or in a stage (by its number) when its codecs
# sum.
Place = TaskKey | int
Rows = Mapping[Place, Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class TaskNoise:
    """The norms that one task measures.

    Attributes:
      values: values of the task whose squared norms are wanted.
      summed: for each value the mesh axes over which partial sums are added up before
        the square.
    """

    values: tuple[int, ...]
    summed: tuple[tuple[int, ...], ...]

    def rows(self, assignment: Assignment, mesh: Any, arrays: Sequence[Any]) -> Any:
        """Each device's part of the norms, float32 (devices, values).

        Args:
          assignment: the layouts of the stage.
          mesh: the mesh of the stage.
          arrays: for each value the whole array, or its stacked partial sums.
        """
        wanted: list[Norm] = []
        for value, summed, array in zip(self.values, self.summed, arrays, strict=True):
            layout = assignment.home_layout(value)
            partial = assignment.partial_layout(value)
            if partial is not None and jnp.ndim(array) > len(layout):
                wanted.append(Norm(array, (partial[0], *partial[1]), summed))
            else:
                wanted.append(Norm(array, layout))
        return device_norms(mesh, wanted)


# The places to which a measured number is added: number of the gradient, the columns of
# its norms (`estimates`), and the factor.
Column = tuple[int, tuple[int, ...], float]


@dataclasses.dataclass(frozen=True)
class StagedNoise:
    """The noise measurement of a step of several stages.

    Attributes:
      spec: the gradients, and the averages.
      tasks: task -> the norms that it measures.
      sent: stage -> the gradients that its codecs send; each with the mesh axes that
        separate data replicas, whose devices work on different rows.
      columns: task or stage -> for each measured number, where it is added.
      meshes: the mesh of each stage.
    """

    spec: NoiseSpec
    tasks: Mapping[TaskKey, TaskNoise]
    sent: Mapping[int, Mapping[int, Axes]]
    columns: Mapping[Place, tuple[Column, ...]]
    meshes: Sequence[Any]

    @functools.cached_property
    def due(self) -> Any:
        """A jitted function of the step number: whether the step is measured."""
        return jax.jit(self.spec.is_measured)

    def state_after(self, state: State, rows: Mapping[Place, Any]) -> State:
        """Returns the state after a step.

        Args:
          state: the state before the step.
          rows: place -> the result of `added_up`, on a device of this process.
        """
        sums = [rows[place] for place in self.columns]
        return self._fold(state, jax.device_put(sums, self.spec.everywhere))

    def added_up(self, place: Place, rows: Sequence[Any]) -> jax.Array:
        """The norms of a task or stage, summed over microbatches and devices."""
        return self._codes[place](rows)

    def struct(self, place: Place) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of the result of `added_up`."""
        count = (
            len(self.tasks[place].values)
            if isinstance(place, TaskKey)
            else NORMS * len(self.sent[place])
        )
        return jax.ShapeDtypeStruct((count,), jnp.float32)

    def lies(self, place: Place) -> NamedSharding:
        """Returns the sharding of the result of `added_up`: each device has a copy."""
        stage = place.stage if isinstance(place, TaskKey) else place
        return NamedSharding(self.meshes[stage], PartitionSpec())

    @functools.cached_property
    def _codes(self) -> dict[Place, Any]:
        return {
            place: jax.jit(
                lambda rows: jnp.sum(jnp.stack(rows), axis=(0, 1)),
                out_shardings=self.lies(place),
            )
            for place in self.columns
        }

    @functools.cached_property
    def _fold(self) -> Any:
        return jax.jit(self._fold_sums)

    def _fold_sums(self, state: State, sums: Sequence[Any]) -> State:
        spec = self.spec
        norms = jnp.zeros((len(spec.sources.found), 3), jnp.float32)
        for columns, found in zip(self.columns.values(), sums, strict=True):
            for k, (gradient, of, share) in enumerate(columns):
                norms = norms.at[gradient, jnp.array(of, int)].add(share * found[k])
        due = spec.is_measured(state["step"])
        after = update_averages(state, norms, spec.groups, spec.options.decay, due)
        return {**after, "compared": state["compared"], "previous": {}}


def staged_noise(
    cut: CutStep,
    assignments: Sequence[Assignment],
    rows: int,
    options: NoiseOptions,
    device: Any,
    meshes: Sequence[Any],
    coded: frozenset[int],
) -> StagedNoise:
    """Returns the noise measurement of a step of several stages.

    Args:
      cut: the step cut into stages.
      assignments: the layouts of each stage.
      rows: number of rows of the whole batch, M.
      options: how gradients are measured.
      meshes: the mesh of each stage.
      device: the device for the averages.
      coded: gradients that codecs send.

    Raises:
      PlanError: no gradient has more than one group, or ``options`` ask for
        preconditioning.
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
    found: list[GradientSource] = []
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
    everywhere = jax.sharding.SingleDeviceSharding(device)
    spec = NoiseSpec(sources, options, everywhere, {}, {}, coded)
    return _noise_of_tasks(cut, assignments, makers, spec, meshes)


def _gradients(cut: CutStep) -> dict[int, str]:
    """Value of microbatches -> its parameter's name, if no other value updates it."""
    summed = [c.value for c in cut.found.crossings if c.combine in _SHARES]
    return alone_in(updated_parameters(cut.analysis.graph, summed))


# The ways to combine the values of microbatches that gradients may have.
_SHARES = (Combine.SUM, Combine.MEAN)


def _left_out(cut: CutStep, found: Sequence[GradientSource]) -> tuple[str, ...]:
    known = {source.name for source in found}
    return tuple(
        path for path in trained_paths(cut.analysis.graph) if path not in known
    )


def _reader(cut: CutStep, value: int) -> TaskKey | None:
    """Returns the first task that reads the sum of a gradient over all microbatches."""
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
) -> GradientSource:
    """Returns the source of a gradient that a task computes in each microbatch."""
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
    return GradientSource(
        name, value, replicas, workers * count, value, bare, -1, share
    )


def _noise_of_tasks(
    cut: CutStep,
    assignments: Sequence[Assignment],
    makers: Mapping[int, Task],
    spec: NoiseSpec,
    meshes: Sequence[Any],
) -> StagedNoise:
    """The measurement of each task and stage, and where each number is added."""
    values: dict[TaskKey, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
    columns: dict[Place, list[Column]] = defaultdict(list)
    sent: dict[int, dict[int, Axes]] = defaultdict(dict)
    for k, source in enumerate(spec.sources.found):
        key = makers[source.value].key
        partial = assignments[key.stage].partial_layout(source.bare)
        axes = () if partial is None else partial[0]
        summed = tuple(a for a in axes if a not in source.replicas)
        values[key].append((source.bare, summed))
        columns[key].append((k, (0,), source.share**2))
        if source.value in spec.coded:
            sent[key.stage][source.value] = source.replicas
            # A stage's codec sends the sum over all microbatches. The norm of this sum
            # before the codec is not that of a group, so its factor is zero.
            columns[key.stage] += [(k, (), 0.0), (k, (1,), 1.0), (k, (2,), 1.0)]
            continue
        reader = _reader(cut, source.value)
        assert reader is not None
        values[reader].append((source.value, ()))
        columns[reader].append((k, (1, 2), 1.0))
    tasks = {
        key: TaskNoise(tuple(v for v, _ in found), tuple(s for _, s in found))
        for key, found in values.items()
    }
    columned = {place: tuple(found) for place, found in columns.items()}
    return StagedNoise(spec, tasks, sent, columned, meshes)
