"""Compiles functions such as evaluation for a state with the shardings of the step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.errors import PlanError
from autopar.runtime import agreement, arguments, placement
from autopar.runtime.batch_rows import Rows, place_rows
from autopar.runtime.planned import PlannedStep
from autopar.runtime.recent import Recent
from autopar.runtime.stages.placing import place_arrays
from autopar.runtime.stages.transport import Links
from autopar.runtime.world import World
from autopar.steps.batch import rows_axes
from autopar_passes import jax_compat
from autopar_passes.graph.roles import InputRole
from autopar_passes.jax_meshes import off_mesh, without_mesh
from autopar_passes.program.calls import (
    NamedRoles,
    Parameters,
    ResultForm,
    StepCall,
    flat_function,
)
from autopar_passes.program.flatten import on_one_replica, unbound_axis
from autopar_passes.program.static_leaves import updating
from autopar_passes.program.trace import opened_within, step_name

P = ParamSpec("P")
R = TypeVar("R")

# The largest number of compiled functions that an `Evaluation` keeps: one for each form
# of call and each set of array shapes.
FUNCTIONS = 16


class Evaluation(Generic[P, R]):
    """A function compiled for arrays that have the shardings of a planned step.

    Arrays on the devices of the plan's mesh are not moved. All other arrays count as a
    batch. Their rows are split over the mesh axes that split the step's batch, as far
    as these axes divide the rows. No argument is donated. The compiler chooses the
    layouts inside the function. A collective over an axis name that no mesh binds sees
    one replica, as in a step.

    If the plan has several stages, each call copies the state from the stages and
    splits it over all devices.
    """

    def __init__(
        self,
        function: Callable[P, R],
        running: Callable[[], PlannedStep],
        world: Callable[[], World],
        dims: Callable[[], Mapping[str, int]] = dict,
        static: str | Collection[str] = (),
        whole: str | Sequence[str] = (),
    ) -> None:
        """See `ParallelStep.jit`, which creates evaluations.

        Args:
          function: the function; not a ``jax.pmap``, but the function inside it.
          running: returns the planned step in use, whose shardings the state has.
          world: returns the processes and devices of the step.
          dims: returns the dimensions of rows that callers of the step have stated, by
            path.
          static: names of static arguments.
          whole: names of arguments that each of several processes passes whole, besides
            those of the step.

        Raises:
          PlanError: the function is a ``jax.pmap``.
          TraceError: the function has no argument of a name that is given as static.
        """
        if jax_compat.is_pmapped(function):
            raise PlanError(
                f"{step_name(function)} is a jax.pmap: pass the function itself. "
                "Collectives over its axis may stay; it sees the whole batch."
            )
        functools.update_wrapper(self, function)
        self.__name__: str = step_name(function)
        self._function = function
        self._running = running
        self._world, self._dims = world, dims
        roles = NamedRoles.of(whole=whole)
        self._parameters = Parameters.of(function, static, roles)
        self._compiled: Recent[Hashable, tuple[Any, list[ResultForm]]] = Recent(
            FUNCTIONS
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the function; NNX objects among its arguments are updated.

        Raises:
          PlanError: the step has no plan yet.
        """
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs))):
            return self._function(*args, **kwargs)
        with without_mesh(), updating():
            call = opened_within(self._parameters, args, kwargs)
            arguments.check_alive(self.__name__, call)
            placed, names = self._place_call(call), list[str]()
            while True:
                function, results = self._compiled_function(call, names)
                try:
                    flat = function(*placed)
                    flat = placement.given_back(
                        flat, placement.home_of(call.arrays), ()
                    )
                    return results[-1].return_value(flat)
                except NameError as error:
                    found = unbound_axis(error)
                    if not found or found in names:
                        raise
                    names.append(found)

    def _compiled_function(
        self, call: StepCall, names: Sequence[str]
    ) -> tuple[Any, list[ResultForm]]:
        """Returns the compiled function, cached, and the forms of its results.

        Args:
          call: the call.
          names: names of axes of collectives in the function that no mesh binds. Each
            is bound with one replica. The first attempt has no names.
        """
        structs = arguments.abstract(call)
        key = arguments.signature(structs)
        found = None if names else self._compiled.get(key)
        if found is None:
            flat, results = flat_function(self._function, call.form)
            run = on_one_replica(flat, names) if names else flat
            run = off_mesh(run, structs.arrays, call.form.mesh)
            run.__name__ = run.__qualname__ = self.__name__
            found = self._compiled.put(key, (jax.jit(run), results))
        return found

    def _place_call(self, call: StepCall) -> list[Any]:
        """Returns the arrays of a call with shardings.

        A batch is split over the mesh axes that split the step's batch.
        """
        running, dims = self._running(), self._row_dims(call)
        paths, form = call.form.paths(call.arrays), running.analysis.pytrees.form
        if problem := call.form.roles.problem(dict.fromkeys(paths, ()), ()):
            raise PlanError(f"{self.__name__}: {problem}")
        counts = [
            1
            if form.roles.is_whole(path) or call.form.roles.is_whole(path)
            else self._world().process_count
            for path in paths
        ]
        if running.pipeline is not None:
            return spread(call.arrays, dims, counts, running.mesh, running.links)
        devices = set(running.mesh.devices.flat)
        axes = batch_axes(running)
        placed: list[Any] = [None] * len(call.arrays)
        rows: dict[int, Rows] = {}
        whole: dict[str, Any] = {}
        for k, x in enumerate(call.arrays):
            if isinstance(x, jax.Array) and x.sharding.device_set == devices:
                # The step returned its state on the mesh that the caller has set, if
                # any. This gives the state the shardings of the plan's mesh again.
                (placed[k],) = placement.given_back([x], running.mesh, ())
                continue
            shape = placement.global_shape(x, counts[k], dims[k])
            spec = _row_spec(running, shape, dims[k], axes)
            sharding = NamedSharding(running.mesh, spec)
            if shape != tuple(jax.numpy.shape(x)):
                rows[k] = Rows(x, shape, sharding)
                continue
            if placement.held_here(x, sharding):
                whole[paths[k]] = x
            placed[k] = placement.place(x, sharding)
        agreement.check_equal(self._world(), whole, first=False)
        for k, array in place_rows(rows).items():
            placed[k] = array
        return placed

    def _row_dims(self, call: StepCall) -> list[int]:
        """Returns the dimension of the rows of each array of a call, for a batch.

        It is that of the step's batch array with the same path, or else that of the
        step's batch arrays with as many dimensions.

        Raises:
          PlanError: batch arrays of the step with as many dimensions have their rows in
            different ones.
        """
        running, stated = self._running(), self._dims()
        graph, own = running.analysis.graph, set(running.mesh.devices.flat)
        known = {
            given.path: (
                len(graph.values[given.value].shape),
                stated.get(given.path, given.rows),
            )
            for given in graph.inputs
            if given.role is InputRole.BATCH and given.rows >= 0
        }
        if not any(dim for _, dim in known.values()):
            return [0] * len(call.arrays)
        several = self._world().process_count > 1
        out: list[int] = []
        for path, x in zip(call.form.paths(call.arrays), call.arrays, strict=True):
            rank = len(jax.numpy.shape(x))
            found = {dim for other, dim in known.values() if other == rank}
            if known.get(path, (-1, 0))[0] == rank:
                found = {known[path][1]}
            if len(found) > 1 and several and not _is_state(x, own):
                raise PlanError(
                    f"{self.__name__}: it is not known which dim of '{path}' has the "
                    "rows of the batch: arrays of the step's batch have them in dims "
                    f"{sorted(found)}. Name the argument and its parts as in the step."
                )
            out.append(min(found, default=0))
        return out


def _is_state(x: Any, own: set[Any]) -> bool:
    """Whether an array lies on devices of a plan, as the state does."""
    lies = isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)
    return lies and x.sharding.device_set <= own


def spread(
    arrays: Sequence[Any],
    row_dims: Sequence[int],
    counts: Sequence[int],
    mesh: Mesh,
    links: Links | None = None,
) -> list[Any]:
    """Splits arrays over all devices of a pipeline, for one program on all devices.

    Arrays on the devices of single stages are state. Each is split along its largest
    dim that the number of devices divides. All other arrays are split along their rows
    if the number of devices divides the rows.

    Args:
      arrays: state, and a batch of which each process holds its rows.
      row_dims: the dimension of the rows of each array, for a batch.
      counts: the number of processes among which the rows of each array are divided.
      mesh: all devices, along one axis.
      links: links to the other processes; None if there are none.
    """
    (axis,), count = mesh.axis_names, mesh.size
    own = set(mesh.devices.flat)
    shapes: list[tuple[int, ...]] = []
    wanted: list[NamedSharding] = []
    for x, rows, processes in zip(arrays, row_dims, counts, strict=True):
        state = _is_state(x, own)
        shape = tuple(jax.numpy.shape(x))
        shape = shape if state else placement.global_shape(x, processes, rows)
        dims = sorted(range(len(shape)), key=lambda d: -shape[d]) if state else [rows]
        fits = [d for d in dims if d < len(shape) and shape[d] % count == 0]
        names = [axis if fits[:1] == [d] else None for d in range(len(shape))]
        shapes.append(shape)
        wanted.append(NamedSharding(mesh, PartitionSpec(*names)))
    if links is None:
        return [placement.place(x, s) for x, s in zip(arrays, wanted, strict=True)]
    named = {f"array {k} of the call": x for k, x in enumerate(arrays)}
    return place_arrays(links, named, shapes, wanted, first=False)


def batch_axes(running: PlannedStep) -> tuple[str, ...]:
    """Returns the mesh axes that split the batch.

    If batch arrays are split over different axes, these are the axes of the array that
    is split over most axes.
    """
    found = rows_axes(running.analysis.graph, running.plan.inputs)
    return tuple(max(found, key=len, default=()))


def _row_spec(
    running: PlannedStep, shape: tuple[int, ...], dim: int, axes: tuple[str, ...]
) -> PartitionSpec:
    """Splits rows, in dimension ``dim``, over the first of the given mesh axes.

    The rows are split over the longest prefix of the axes whose product of sizes
    divides the number of rows.
    """
    sizes = running.plan.mesh["axes"]
    parts, used = 1, list[str]()
    for name in axes:
        if not shape or shape[dim] % (parts * sizes[name]):
            break
        parts *= sizes[name]
        used.append(name)
    return PartitionSpec(*[None] * dim, tuple(used)) if used else PartitionSpec()
