"""A planned step as a compiled JAX function."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from autopar.compression.fallback import Fallback
from autopar.errors import PlanError
from autopar.layouts.assignment import Assignment
from autopar.planner.record import restore
from autopar.plans import Plan
from autopar.runtime.gradients.probing import partial_gradients
from autopar.runtime.gradients.restoring import Keeper
from autopar.runtime.gradients.sums import (
    StepSynchroniser,
    Synchronisation,
    synchronisation,
)
from autopar.steps.analysis import Analysis
from autopar_passes.layouts import partition_spec
from autopar_passes.replay.run import replay

# Compiler options that keep optimization barriers to the end on CPUs.
WITH_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}


def device_mesh(plan: Plan, devices: Sequence[Any] | None = None) -> Mesh:
    """Lays the plan's mesh over devices (default: the first of `jax.devices`).

    Raises:
      PlanError: there are fewer devices than the mesh has.
    """
    found = list(jax.devices() if devices is None else devices)
    need = math.prod(plan.axis_sizes)
    if len(found) < need:
        raise PlanError(
            f"the plan is for {need} devices ({_mesh_text(plan)}), this process sees "
            f"{len(found)}. Plan for autopar.Cluster.local(), or simulate devices with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={need}."
        )
    grid = np.array(found[:need], dtype=object).reshape(plan.axis_sizes)
    return Mesh(grid, plan.axis_names, axis_types=(AxisType.Auto,) * grid.ndim)


def abstract_mesh(plan: Plan) -> AbstractMesh:
    """The plan's mesh without devices, enough to lower and audit."""
    kinds = (AxisType.Auto,) * len(plan.axis_sizes)
    return AbstractMesh(plan.axis_sizes, plan.axis_names, axis_types=kinds)


def _mesh_text(plan: Plan) -> str:
    return " ".join(f"{k}={v}" for k, v in plan.mesh["axes"].items())


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedStep:
    """The flat step under a plan.

    Attributes:
      analysis: the step.
      plan: the plan.
      assignment: the plan as layouts.
      mesh: the mesh it runs on (abstract when only lowered).
      function: the jitted function of the flat arguments; with a
        synchronisation it takes its state behind them, and returns the flat
        results, the new state, and of each gradient the sums and 1 at the level
        that was taken.
      synchronisation: how gradients are summed, None: all by the compiler.
      gradients: the jitted function of the flat arguments to the partial gradients
        that are worth a codec; compiled if it is called.
    """

    analysis: Analysis
    plan: Plan
    assignment: Assignment
    mesh: Any
    function: Callable[..., Any]
    synchronisation: Synchronisation | None = None
    gradients: Callable[..., dict[str, Any]] | None = None

    @property
    def in_shardings(self) -> list[NamedSharding]:
        """Sharding of each flat argument."""
        return _in_shardings(self.analysis, self.assignment, self.mesh)

    def lower(self) -> Any:
        """Returns JAX's ``Lowered`` of the planned program."""
        graph = self.analysis.graph
        structs: list[Any] = [
            jax.ShapeDtypeStruct(
                graph.values[i.value].shape, graph.values[i.value].dtype
            )
            for i in graph.inputs
        ]
        if self.synchronisation is not None:
            structs.append(self.synchronisation.structs())
        traced = self.function.trace(*structs)  # pyright: ignore[reportFunctionMemberAccess]
        if isinstance(self.mesh, AbstractMesh):
            return traced.lower(lowering_platforms=("cpu",))
        return traced.lower()


def planned_step(
    analysis: Analysis,
    plan: Plan,
    mesh: Any,
    *,
    donate: bool = True,
    gradients: Callable[..., dict[str, Any]] | None = None,
    fallback: Fallback | None = None,
) -> PlannedStep:
    """Builds the jitted function of a planned step.

    Args:
      analysis: the step the plan was made for.
      plan: the plan.
      mesh: from `device_mesh` or `abstract_mesh`.
      donate: whether the carried state is consumed by the call.
      gradients: that of a step that differs in the codecs alone.
      fallback: by what a step is sent in which the plan's codecs send too little.

    Raises:
      PlanError: the plan belongs to another step.
    """
    assignment = restore(analysis, plan)
    run = replay(analysis.program, analysis.graph, assignment, mesh)
    carried = tuple(sorted(analysis.carried)) if donate else ()
    outputs = [
        _sharding(mesh, assignment.output(k))
        for k in range(len(analysis.graph.outputs))
    ]
    inputs: list[Any] = _in_shardings(analysis, assignment, mesh)
    found = synchronisation(assignment, plan, mesh, fallback)
    if found is None:
        function = jax.jit(
            run,
            in_shardings=inputs,
            out_shardings=outputs,
            donate_argnums=carried,
            compiler_options=_compiler_options(assignment, mesh),
        )
        return PlannedStep(analysis, plan, assignment, mesh, function)
    state = found.shardings()
    function = jax.jit(
        _synchronised(run, found, analysis, assignment),
        in_shardings=[*inputs, state],
        out_shardings=(outputs, state, None, None),
        donate_argnums=(*carried, len(inputs)) if donate else (),
        compiler_options=_compiler_options(assignment, mesh, codecs=True),
    )
    if gradients is None:
        until, shardings = partial_gradients(run, found)
        gradients = jax.jit(
            until,
            in_shardings=inputs,
            out_shardings=shardings,
            compiler_options=_compiler_options(assignment, mesh),
        )
    return PlannedStep(analysis, plan, assignment, mesh, function, found, gradients)


def _synchronised(
    run: Callable[..., list[Any]],
    how: Synchronisation,
    analysis: Analysis,
    assignment: Assignment,
) -> Callable[..., Any]:
    """A step whose gradients are summed by codecs.

    Where a gradient is not finite, what is carried stays as it was: the step
    leaves no trace but the count of such elements in its sums.
    """

    def step(*arguments: Any) -> Any:
        *flat, state = arguments
        synchroniser = StepSynchroniser(how, state)
        keeper = Keeper(synchroniser, analysis, assignment, flat)
        out = run(*flat, synchroniser=synchroniser, made=keeper.made)
        out = keeper.finish(out)
        after, sums = synchroniser.finish()
        return out, after, sums, synchroniser.taken()

    return step


def _compiler_options(
    assignment: Assignment, mesh: Any, *, codecs: bool = False
) -> dict[str, str] | None:
    """Keeps the barriers of a program on CPUs, where it has any that matter.

    XLA's CPU pipeline drops optimization barriers before it merges equal
    expressions and loops: what was to be computed again is kept instead, and what
    was to be computed once, such as what a codec is to send, is computed again in
    each loop that reads it.
    """
    if isinstance(mesh, AbstractMesh) or mesh.devices.flat[0].platform != "cpu":
        return None
    barrier = any(
        op.kind == "optimization_barrier" for op in assignment.graph.operators
    )
    again = any(
        backward and not choice.reuse
        for (_, backward), choice in assignment.copies.items()
    )
    return WITH_BARRIERS if barrier or again or codecs else None


def _sharding(mesh: Any, layout: Any) -> NamedSharding | None:
    if layout is None:
        return None
    return NamedSharding(mesh, partition_spec(mesh, layout))


def _in_shardings(
    analysis: Analysis, assignment: Assignment, mesh: Any
) -> list[NamedSharding]:
    return [
        NamedSharding(mesh, partition_spec(mesh, assignment.home_layout(i.value)))
        for i in analysis.graph.inputs
    ]
