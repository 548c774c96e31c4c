"""A stage of a plan: devices, their mesh, and what every array does on it."""

from __future__ import annotations

import math

import msgspec

from autopar.errors import PlanError
from autopar.plans.gradients import GradientDecision
from autopar.plans.specs import Spec


class NodeDecision(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The choice of one node of the contracted graph.

    Attributes:
      name: module path and operator of its root.
      kind: ``input``, ``contraction`` or ``array``.
      factors: size of each factor.
      axes: names of the mesh axes given to each factor, major to minor.
      count: how many operators share the decision.
    """

    name: str
    kind: str
    factors: tuple[int, ...]
    axes: Spec
    count: int = 1


class CopyDecision(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The layout of a value's shared copy.

    Attributes:
      name: the operator that makes the value, and its output's position.
      backward: whether the backward readers share it.
      axes: the layout.
      reuse: whether it is the forward copy, kept.
    """

    name: str
    producer: int
    slot: int
    backward: bool
    axes: Spec
    reuse: bool


class StagePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The work of one group of devices; a plan without a pipeline is one stage.

    Attributes:
      name: what people call it; its number is its position in `Plan.stages`.
      devices: positions in the cluster, in the order of the mesh.
      mesh: ``{"axes": {name: size}}``, outermost first.
      inputs: pytree path of each input -> its layout.
      outputs: pytree path of each output with a layout of its own.
      nodes: decisions, in the order of the contracted graph.
      copies: decisions about shared copies.
      gradients: how each gradient is summed.
      rematerialisation: the modules whose results the plan computes again in the
        backward pass, for people; `Plan.remat` says which layers they belong to.
        Empty: only what the step itself computes again, by ``jax.checkpoint``, and
        copies whose decision is not to be kept.

    Raises:
      PlanError: there are no devices, one stands twice, or the mesh has another
        number of them.
    """

    name: str
    devices: tuple[int, ...]
    mesh: dict[str, dict[str, int]]
    inputs: dict[str, Spec]
    outputs: dict[str, Spec]
    nodes: tuple[NodeDecision, ...]
    copies: tuple[CopyDecision, ...]
    gradients: tuple[GradientDecision, ...] = ()
    rematerialisation: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks the devices and the mesh over them."""
        if not self.devices:
            raise PlanError(f"stage '{self.name}' has no devices.")
        if len(set(self.devices)) < len(self.devices) or min(self.devices) < 0:
            raise PlanError(
                f"stage '{self.name}': devices are different positions in the "
                f"cluster, from 0, not {self.devices}."
            )
        axes = self.mesh.get("axes", {})
        if set(self.mesh) != {"axes"} or any(size < 1 for size in axes.values()):
            raise PlanError(
                f"stage '{self.name}': its mesh is {self.mesh}; write it like "
                '{"axes": {"data": 2, "tensor": 4}}.'
            )
        if not axes or math.prod(axes.values()) != len(self.devices):
            raise PlanError(
                f"stage '{self.name}': its mesh {axes} has "
                f"{math.prod(axes.values())} devices, and the stage has "
                f"{len(self.devices)}."
            )

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the mesh axes, outermost first."""
        return tuple(self.mesh["axes"])

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Sizes of the mesh axes, outermost first."""
        return tuple(self.mesh["axes"].values())
