"""Lays the meshes of a plan over devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from autopar.errors import PlanError
from autopar.plans import Plan
from autopar.runtime.world import World, grid


def stage_meshes(plan: Plan, devices: Sequence[Any] | None = None) -> list[Mesh]:
    """Lays the mesh of each stage over its devices.

    Args:
      plan: the plan.
      devices: those of the cluster, by position; default: those of `World.current`.

    Raises:
      PlanError: there are fewer devices than the plan has.
    """
    found = list(World.current().devices if devices is None else devices)
    need = 1 + max(d for stage in plan.stages for d in stage.devices)
    if len(found) < need:
        raise PlanError(
            f"the plan is for {need} devices ({_text(plan)}), and there are "
            f"{len(found)} to run it on. Plan for autopar.Cluster.local(), or simulate "
            f"devices with XLA_FLAGS=--xla_force_host_platform_device_count={need}."
        )
    out: list[Mesh] = []
    for stage in plan.stages:
        laid = grid([found[d] for d in stage.devices], stage.axis_sizes)
        out.append(_mesh(laid, stage.axis_names))
    return out


def device_mesh(plan: Plan, devices: Sequence[Any] | None = None) -> Mesh:
    """`stage_meshes` of a plan of one stage.

    Raises:
      PlanError: the plan has several stages, or there are too few devices.
    """
    assert plan.stage
    return stage_meshes(plan, devices)[0]


def abstract_mesh(plan: Plan) -> AbstractMesh:
    """The mesh of a plan of one stage without devices, enough to lower and audit."""
    kinds = (AxisType.Auto,) * len(plan.axis_sizes)
    return AbstractMesh(plan.axis_sizes, plan.axis_names, axis_types=kinds)


def home_meshes(plan: Plan, own: Sequence[Mesh]) -> list[Mesh]:
    """The meshes that state lies on between steps, in the order of `Plan.home_axes`.

    They are those of the stages, and that of all stages where the plan has one.

    Args:
      plan: the plan.
      own: the meshes of its stages.
    """
    axes = plan.home_axes
    if len(axes) == len(own):
        return list(own)
    laid = np.stack([mesh.devices for mesh in own])
    return [*own, _mesh(laid, tuple(name for name, _ in axes[-1]))]


def _mesh(laid: np.ndarray, names: tuple[str, ...]) -> Mesh:
    return Mesh(laid, names, axis_types=(AxisType.Auto,) * laid.ndim)


def _text(plan: Plan) -> str:
    if len(plan.stages) > 1:
        return f"{len(plan.stages)} stages"
    return " ".join(f"{k}={v}" for k, v in plan.mesh["axes"].items())
