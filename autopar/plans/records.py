"""The records of a plan's parts: stages, replicas, pipelines, gradients and gains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from autopar.errors import PlanError
from autopar.plans.specs import Spec


class GradientDecision(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The way in which one gradient is summed over the devices that hold parts of it.

    Attributes:
      name: path of the parameter.
      value: number of the gradient's value in the program.
      shape: of the whole gradient.
      local_shape: of the part of it that one device sends.
      axes: names of the mesh axes over which it is sent.
      workers: number of devices along them.
      scatter: whether each of them needs only its part of the sum.
      within: names of the mesh axes over which it is summed before, as it is; each
        device along them then sends a part.
      keeps: whether the sum stays split over these; it is gathered otherwise.
      codec: how it is sent, as text; '' leaves it to the compiler.
      limit: the codec, as text, that the program is compiled for where parameters of
        ``codec`` are inputs of it; '' where all are constants.
      room: part of the limit's bytes that is sent, for all gradients of the bucket with
        that limit together.
      feedback: whether what was not sent is added to the next step's gradient.
      average_every: steps between averages of the residuals over the devices; 0:
        never.
      bucket: gradients of one bucket are sent together.
      dense_bytes: bytes that one device sends along ``axes`` without a codec.
      wire_bytes: bytes that one device sends along ``axes`` with it.
      within_bytes: bytes that one device sends along ``within``.
      error: expected relative error of what is sent, in the L2 norm.
      saved_s: seconds a step that the codec saves.
    """

    name: str
    value: int
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    axes: tuple[str, ...]
    workers: int
    scatter: bool = False
    within: tuple[str, ...] = ()
    keeps: bool = False
    codec: str = ""
    limit: str = ""
    room: float = 1.0
    feedback: bool = False
    average_every: int = 0
    bucket: int = 0
    dense_bytes: float = 0.0
    wire_bytes: float = 0.0
    within_bytes: float = 0.0
    error: float = 0.0
    saved_s: float = 0.0


class Compression(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Why gradients are sent as they are.

    Attributes:
      mode: ``none``, ``auto``, or the codec that was asked for.
      error_budget: largest relative error of the whole gradient, in the
        optimizer's metric; None: unlimited.
      metric: how errors of different gradients add up.
      error: the relative error of the choice, in that metric.
      reason: the outcome in words.
    """

    mode: str = "none"
    error_budget: float | None = None
    metric: str = ""
    error: float = 0.0
    reason: str = ""


class PipelineData(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """How a step is cut into the stages of a plan.

    Part ``k`` of the model is on stage ``k % stages``; with as many parts as stages
    each stage has one. Seconds are those of one microbatch, but for ``step_s``.

    Attributes:
      layers: the forward equation of one microbatch's program at which each layer
        begins, by its number.
      parts: the layer at which each part begins.
      homes: pytree path of each input of the step -> the stage that has it between
        steps.
      pieces: pytree path of an array of stacked layers -> how many of them each of its
        pieces has. Pieces are inputs with paths of their own, such as ``kernel@0:2``.
      recomputed: the layers whose activations the backward pass computes again.
      forward_s: seconds of each part's forward pass.
      backward_s: seconds of each part's backward pass, or of its gradients of inputs
        where those of weights are tasks of their own.
      weight_s: seconds of each part's gradients of weights where they are.
      forward_link_s: for how long activations occupy the link from each part but the
        last to the next.
      backward_link_s: the same for cotangents, from the next part.
      latency_s: the latency between each part but the last and the next.
      step_s: seconds of what each stage does once a step.
      memory_bytes: the most that a device of each stage holds at once.
      activation_bytes: what a device of each part keeps of one microbatch from its
        forward to its backward pass.
    """

    layers: tuple[int, ...]
    parts: tuple[int, ...]
    homes: dict[str, int] = {}
    pieces: dict[str, tuple[int, ...]] = {}
    recomputed: tuple[int, ...] = ()
    forward_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] = ()
    weight_s: tuple[float, ...] = ()
    forward_link_s: tuple[float, ...] = ()
    backward_link_s: tuple[float, ...] = ()
    latency_s: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    memory_bytes: tuple[float, ...] = ()
    activation_bytes: tuple[float, ...] = ()


class Rematerialisation(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """What the backward pass of a plan of one stage computes again.

    Layers have numbers from 0, in the order of the forward pass. The default is what
    the step itself says by ``jax.checkpoint``.

    Attributes:
      layers: those whose activations are computed again.
      starts: the forward equation of one microbatch's program at which each layer
        begins, by its number; empty where no layer is computed again. The iterations of
        a loop over layers all begin at the loop.
      level: what is kept of such a layer: nothing (``full``), its matrix products and
        convolutions (``dots``), or the values that the step names so (``names=a,b``).
      checkpoints: whether the step's own ``jax.checkpoint``s hold.
    """

    layers: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    level: str = "full"
    checkpoints: bool = True


# What the step itself says.
AS_WRITTEN = Rematerialisation()


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
      sums_each_microbatch: whether gradients are summed over devices in each
        microbatch, and kept split; else each device keeps its own part of the sum until
        the last microbatch, where the layouts allow it.

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
    sums_each_microbatch: bool = False

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


class ReplicaPlan(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """What one replica runs.

    Attributes:
      devices: what its devices are, for people.
      microbatches: how many it runs in a step.
      step_s: seconds that a step should take it, with the sums over replicas.
      peak_memory_bytes: most bytes live at once on one of its devices.
    """

    devices: str
    microbatches: int
    step_s: float = 0.0
    peak_memory_bytes: float = 0.0


def check_replicas(
    replicas: Sequence[ReplicaPlan], microbatches: int, stages: Sequence[StagePlan]
) -> None:
    """Checks how many microbatches each replica runs against the rest of a plan.

    Args:
      replicas: of the plan; empty: it has none.
      microbatches: of the plan.
      stages: of the plan.

    Raises:
      PlanError: they do not add up, there is another number of replicas than the mesh
        has, or a layout splits an array over replicas.
    """
    if not replicas:
        return
    counts = tuple(r.microbatches for r in replicas)
    if len(stages) > 1 or len(counts) < 2 or min(counts) < 1:
        raise PlanError(
            f"replicas of {counts} microbatches: a plan of one stage may have two "
            "replicas or more, each with a microbatch at least."
        )
    if sum(counts) != microbatches:
        raise PlanError(
            f"replicas of {counts} microbatches have {sum(counts)} together, and the "
            f"plan has {microbatches}."
        )
    (stage,) = stages
    name, size = stage.axis_names[0], stage.axis_sizes[0]
    if size != len(counts):
        raise PlanError(
            f"replicas of {counts} microbatches: the first axis of the mesh, "
            f"'{name}', is that of the replicas, and has {size} positions."
        )
    for owner, axes in _layouts(stage):
        if name in axes:
            raise PlanError(
                f"'{owner}' is split over '{name}', the axis of the replicas, each of "
                "which needs all of it."
            )
    if any(g.codec for g in stage.gradients):
        raise PlanError(
            "a plan with replicas sends gradients as they are, and this one has codecs."
        )


def _layouts(stage: StagePlan) -> Iterator[tuple[str, set[str]]]:
    """Yields the name of all that has a layout, and the axes that split it."""
    named = [*stage.inputs.items(), *stage.outputs.items()]
    named += [(n.name, n.axes) for n in (*stage.nodes, *stage.copies)]
    for owner, spec in named:
        yield owner, {axis for axes in spec for axis in axes}


# An axis over which less than this part of the work is split is as good as unused.
LEAST_SPLIT = 1e-6


class AxisUse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan makes of one mesh axis.

    Attributes:
      name: of the axis.
      size: number of devices along it.
      repeated: part of the seconds of work that all devices along it do alike, 0 to 1.
      holds: whether parts of an input lie on different devices along it.
      sums_s: seconds in which the gradients of all parameters would be summed over an
        unused axis, as they are and in one message; 0 for a used one.
    """

    name: str
    size: int
    repeated: float
    holds: bool
    sums_s: float = 0.0

    @property
    def unused(self) -> bool:
        """Whether no operator's work is split over it."""
        return self.size > 1 and self.repeated > 1.0 - LEAST_SPLIT

    @property
    def shortens(self) -> float:
        """The part by which the axis shortens the work of a step, 0 to 1.

        >>> AxisUse(name="data", size=8, repeated=0.0, holds=True).shortens
        0.875
        """
        without = self.repeated + self.size * (1.0 - self.repeated)
        return 1.0 - 1.0 / without


class Worth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan makes of its cluster, as the cost model predicts it.

    Attributes:
      one_device_s: seconds of the whole step on one device of the kind.
      one_device_bytes: most bytes live at once there.
      one_device_fits: whether a device has so much memory.
      speed_up: ``one_device_s`` over the seconds of a step of the plan.
      model_flops: floating point operations of the step's matrix products and attention
        on the whole batch. What is computed again counts once, and attention in full,
        whatever its mask.
      mfu: model FLOPs utilisation: the time of these at the devices' peak, over the
        time of the step.
      causal_mfu: the same where attention with a causal mask counts half.
      fused_saves_s: seconds of a step that a fused kernel of attention would save where
        the step writes its attention out.
      rows: rows of the batch in a step; 0 where there is no batch.
      tokens: tokens of the batch in a step; 0 where the batch holds none.
      rows_per_s: rows a second.
      tokens_per_s: tokens a second.
      axes: the use of each mesh axis.
      scheme: the known scheme that the layouts resemble, over which axes.
    """

    one_device_s: float
    one_device_bytes: float
    one_device_fits: bool
    speed_up: float
    model_flops: float
    mfu: float
    rows: int
    tokens: int
    rows_per_s: float
    tokens_per_s: float
    axes: tuple[AxisUse, ...]
    scheme: str
    causal_mfu: float = 0.0
    fused_saves_s: float = 0.0

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def step_s(self) -> float:
        """Seconds of a step of the plan; 0 where nothing is known."""
        return self.one_device_s / self.speed_up if self.speed_up else 0.0

    @property
    def efficiency(self) -> float:
        """The speed-up over the number of devices."""
        return self.speed_up / self.devices

    @property
    def unused(self) -> tuple[AxisUse, ...]:
        """The axes over which no operator's work is split."""
        return tuple(axis for axis in self.axes if axis.unused)

    @property
    def needed_devices(self) -> int:
        """Number of devices on which the step would be as fast.

        Axes that split nothing are left out. One that splits what is held, and no
        work, is not: without it the plan may not fit.
        """
        idle = (axis.size for axis in self.unused if not axis.holds)
        return self.devices // math.prod(idle)

    def faster(self, factor: float) -> Worth:
        """The same where a step takes a part of the time, ``1 / factor``."""
        return msgspec.structs.replace(
            self,
            speed_up=self.speed_up * factor,
            mfu=self.mfu * factor,
            causal_mfu=self.causal_mfu * factor,
            rows_per_s=self.rows_per_s * factor,
            tokens_per_s=self.tokens_per_s * factor,
        )
