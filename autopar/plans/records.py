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
    """How one gradient is summed over the devices that hold its summands.

    Attributes:
      name: path of the parameter.
      value: number of the gradient's value in the program.
      shape: shape of the whole gradient.
      local_shape: shape of the part that one device sends.
      axes: names of the mesh axes over which the gradient is sent.
      workers: number of devices along ``axes``.
      scatter: whether each of these devices needs only its part of the sum.
      within: names of the mesh axes over which the gradient is first summed without a
        codec. Each device along these axes then sends one part.
      keeps: whether the sum stays split over ``within``; otherwise the sum is gathered.
      codec: codec as text; '': the compiler sums the gradient.
      limit: if parameters of ``codec`` are inputs of the program, the codec as text for
        which the program is compiled; '' if all parameters are constants.
      room: the size of the send buffer, as a fraction of the bytes that ``limit``
        needs. All gradients of the bucket with the same limit share this buffer.
      feedback: whether the error of sending is added to the next step's gradient.
      average_every: number of steps after which residuals are averaged over the
        devices; 0: never.
      bucket: gradients of one bucket are sent together.
      dense_bytes: bytes that one device sends along ``axes`` without a codec.
      wire_bytes: bytes that one device sends along ``axes`` with the codec.
      within_bytes: bytes that one device sends along ``within``.
      error: expected relative error of the sent gradient, in the L2 norm.
      saved_s: seconds per step that the codec saves.
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
    """The reason for the choice of codecs.

    Attributes:
      mode: ``none``, ``auto``, or the codec that the user requested.
      error_budget: largest relative error of the whole gradient, in the
        optimizer's metric; None: unlimited.
      metric: the way in which errors of different gradients are added.
      error: the relative error of the choice in this metric.
      reason: the result in words.
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

    Part ``k`` of the model is on stage ``k % stages``. If there are as many parts as
    stages, each stage has one part. Seconds are per microbatch, except ``step_s``.

    Attributes:
      layers: for each layer, the number of the forward equation at which it begins, in
        the program of one microbatch.
      parts: the layer at which each part begins.
      homes: pytree path of each input of the step -> the stage that holds the input
        between steps.
      pieces: pytree path of an array of stacked layers -> the number of layers in each
        of its pieces. Pieces are inputs with their own paths, such as ``kernel@0:2``.
      recomputed: the layers that are rematerialised.
      forward_s: seconds of each part's forward pass.
      backward_s: seconds of each part's backward pass. If gradients of weights are
        separate tasks, only the gradients of inputs count here.
      weight_s: seconds of each part's gradients of weights, if these are separate
        tasks.
      forward_link_s: for each part except the last, the seconds for which activations
        occupy the link to the next part.
      backward_link_s: for each part except the last, the seconds for which cotangents
        occupy the link from the next part.
      latency_s: for each part except the last, the latency to the next part.
      step_s: seconds of the work that each stage does once a step.
      memory_bytes: the most bytes that a device of each stage holds at once.
      activation_bytes: for each part, the bytes of one microbatch that a device keeps
        from the forward to the backward pass.
      activation_codecs: for each part except the last, the codec of the activations
        that leave the part for another stage, as text; ``dense``: they are sent
        exactly. Empty: all are sent exactly.
      cotangent_codecs: for each part except the last, the codec of the cotangents that
        the next part sends back; as `activation_codecs`.
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
    activation_codecs: tuple[str, ...] = ()
    cotangent_codecs: tuple[str, ...] = ()


class Rematerialisation(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The rematerialisation of a plan of one stage.

    Layers are numbered from 0, in the order of the forward pass. By default the plan
    rematerialises only what the step's own ``jax.checkpoint``s do.

    Attributes:
      layers: numbers of the rematerialised layers.
      starts: for each layer, the number of the forward equation at which it begins, in
        the program of one microbatch; empty if no layer is rematerialised. All
        iterations of a loop over layers begin at the loop.
      level: the activations that are kept of a rematerialised layer: none (``full``),
        its matrix products and convolutions (``dots``), the results of its attention
        kernels (``kernels``), or values to which the step gives these names
        (``names=a,b``). With ``kernels``, the step's own ``jax.checkpoint``s keep the
        results of attention kernels, too.
      checkpoints: whether the step's own ``jax.checkpoint``s are kept.
    """

    layers: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    level: str = "full"
    checkpoints: bool = True


# No rematerialisation besides the step's own ``jax.checkpoint``s.
AS_WRITTEN = Rematerialisation()


class NodeDecision(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The choice of one node of the contracted graph.

    Attributes:
      name: module path and operator of the node's root.
      kind: ``input``, ``contraction`` or ``array``.
      factors: size of each factor.
      axes: names of the mesh axes that split each factor, major to minor.
      count: number of operators that share the decision.
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
      name: the operator that computes the value, and its output's position.
      backward: whether the backward readers share the copy.
      axes: the layout.
      reuse: whether the copy is the kept forward copy.
    """

    name: str
    producer: int
    slot: int
    backward: bool
    axes: Spec
    reuse: bool


# How devices share keys and values (`AttentionDecision.keys`).
RING, GATHER = "ring", "gather"


class AttentionDecision(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """How devices that split the sequence of an attention kernel share keys and values.

    Attributes:
      name: the kernel: module path and operator.
      node: position of its node in `StagePlan.nodes`.
      keys: ``ring``: keys and values travel around a ring of the devices. ``gather``:
        each device gathers them, and gradients are summed by a reduce-scatter.
    """

    name: str
    node: int
    keys: str


class GatherDecision(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """How a sharded parameter is gathered over slow links.

    Attributes:
      name: the operator that passes the parameter on.
      producer: number of this operator.
      slot: position of the parameter in the operator's results.
      codec: the codec as text; '': the gathers are exact.
      axes: names of the mesh axes; gathers over any of them are encoded.
      reason: why the gathers are exact; '' with a codec.
      wire_bytes: bytes that one device sends for the encoded gathers in a step.
      dense_bytes: bytes that it would send without the codec.
    """

    name: str
    producer: int
    slot: int
    codec: str
    axes: tuple[str, ...]
    reason: str = ""
    wire_bytes: float = 0.0
    dense_bytes: float = 0.0


class StagePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The work of one group of devices; a plan without a pipeline is one stage.

    Attributes:
      name: name of the stage for reports; the number of the stage is its position in
        `Plan.stages`.
      devices: positions in the cluster, in the order of the mesh.
      mesh: ``{"axes": {name: size}}``, outermost first.
      inputs: pytree path of each input -> its layout.
      outputs: pytree path of each output with its own layout -> the layout.
      nodes: decisions, in the order of the contracted graph.
      copies: decisions about shared copies.
      gradients: how each gradient is summed.
      gathers: the codecs of gathered parameters; empty: all are gathered as they are.
      attention: how devices share the keys and values of kernels whose sequence they
        split; a kernel without a decision passes them around a ring.
      rematerialisation: the modules whose results the plan rematerialises in the
        backward pass, for human readers; `Plan.remat` says which layers they belong to.
        If it is empty, the plan rematerialises nothing besides the step's own
        ``jax.checkpoint``s and the copies of arrays that are gathered again.
      sums_each_microbatch: whether gradients are summed over devices in each
        microbatch, and stored sharded. If False, each device accumulates its own
        summand until the last microbatch, if the layouts allow it.

    Raises:
      PlanError: there are no devices, a device is listed twice, or the mesh has another
        number of devices.
    """

    name: str
    devices: tuple[int, ...]
    mesh: dict[str, dict[str, int]]
    inputs: dict[str, Spec]
    outputs: dict[str, Spec]
    nodes: tuple[NodeDecision, ...]
    copies: tuple[CopyDecision, ...]
    gradients: tuple[GradientDecision, ...] = ()
    gathers: tuple[GatherDecision, ...] = ()
    attention: tuple[AttentionDecision, ...] = ()
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
    """The microbatches of one replica in a plan whose replicas differ, and their cost.

    Attributes:
      devices: description of the replica's devices, for human readers.
      microbatches: number of microbatches that the replica runs in a step.
      step_s: predicted seconds of a step on the replica, with the sums over replicas.
      peak_memory_bytes: the most bytes live at once on a device of the replica.
    """

    devices: str
    microbatches: int
    step_s: float = 0.0
    peak_memory_bytes: float = 0.0


def check_replicas(
    replicas: Sequence[ReplicaPlan], microbatches: int, stages: Sequence[StagePlan]
) -> None:
    """Checks the numbers of microbatches of the replicas against the rest of a plan.

    Args:
      replicas: replicas of the plan; empty: the plan has none.
      microbatches: number of microbatches of the plan.
      stages: stages of the plan.

    Raises:
      PlanError: the numbers do not add up to those of the plan, the mesh has another
        number of replicas, or a layout splits an array over replicas.
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


def _layouts(stage: StagePlan) -> Iterator[tuple[str, set[str]]]:
    """Yields the name of everything with a layout, and the axes that split it."""
    named = [*stage.inputs.items(), *stage.outputs.items()]
    named += [(n.name, n.axes) for n in (*stage.nodes, *stage.copies)]
    for owner, spec in named:
        yield owner, {axis for axes in spec for axis in axes}


# An axis counts as unused if it splits less than this fraction of the work. Where each
# process passes rows of its own, casts before the exchange of rows are split.
LEAST_SPLIT = 1e-3


class AxisUse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a plan uses one mesh axis.

    Attributes:
      name: name of the axis.
      size: number of devices along the axis.
      repeated: fraction of the seconds of work that all devices along the axis repeat,
        0 to 1.
      holds: whether the layout of some input, besides the batch, is sharded along the
        axis.
      sums_s: for an unused axis, the seconds of an all-reduce of all gradients over the
        axis, without codecs and in one message; 0 for a used axis.
      pays_bytes_per_s: for an unused axis, the bandwidth of its link from which these
        sums take fewer seconds than splitting the rows saves; 0 for a used axis, and if
        the latency alone takes longer.
    """

    name: str
    size: int
    repeated: float
    holds: bool
    sums_s: float = 0.0
    pays_bytes_per_s: float = 0.0

    @property
    def is_unused(self) -> bool:
        """Whether the axis splits at most `LEAST_SPLIT` of the work."""
        return self.size > 1 and self.repeated > 1.0 - LEAST_SPLIT

    unused = is_unused  # deprecated name, kept for one release

    @property
    def shortens(self) -> float:
        """The fraction by which the axis shortens the work of a step, 0 to 1.

        >>> AxisUse(name="data", size=8, repeated=0.0, holds=True).shortens
        0.875
        """
        without = self.repeated + self.size * (1.0 - self.repeated)
        return 1.0 - 1.0 / without


class Worth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How well a plan uses its cluster, as predicted by the cost model.

    Attributes:
      one_device_s: seconds of the whole step on a single device of the cluster's kind.
      one_device_bytes: the most bytes live at once on this single device.
      one_device_fits: whether a device has this memory.
      speed_up: ``one_device_s`` divided by the seconds of a step of the plan.
      model_flops: floating point operations of the step's matrix products and attention
        on the whole batch. Rematerialised work counts once. Attention counts in full,
        whatever its mask.
      mfu: model FLOPs utilisation: the time of ``model_flops`` at the devices' peak,
        divided by the time of the step.
      causal_mfu: as ``mfu``, but attention with a causal mask counts half.
      fused_saves_s: seconds of a step that a fused attention kernel would save, if the
        step computes attention without such a kernel.
      rows: rows of the batch in a step; 0 without a batch.
      tokens: tokens of the batch in a step; 0 if the batch holds no tokens.
      rows_per_s: rows per second.
      tokens_per_s: tokens per second.
      axes: the use of each mesh axis.
      scheme: the known parallelism scheme that the layouts resemble, with its axes.
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
        """Seconds of a step of the plan; 0 if unknown."""
        return self.one_device_s / self.speed_up if self.speed_up else 0.0

    @property
    def efficiency(self) -> float:
        """The speed-up divided by the number of devices."""
        return self.speed_up / self.devices

    @property
    def unused_axes(self) -> tuple[AxisUse, ...]:
        """The axes that split no operator's work."""
        return tuple(axis for axis in self.axes if axis.is_unused)

    unused = unused_axes  # deprecated name, kept for one release

    @property
    def needed_devices(self) -> int:
        """Number of devices with which the step would be equally fast.

        Axes that split nothing are left out. An axis that splits only stored arrays and
        no work is kept, because the plan may not fit without this axis.
        """
        idle = (axis.size for axis in self.unused_axes if not axis.holds)
        return self.devices // math.prod(idle)

    def faster(self, factor: float) -> Worth:
        """Returns the values for a step that takes ``1 / factor`` of the time."""
        return msgspec.structs.replace(
            self,
            speed_up=self.speed_up * factor,
            mfu=self.mfu * factor,
            causal_mfu=self.causal_mfu * factor,
            rows_per_s=self.rows_per_s * factor,
            tokens_per_s=self.tokens_per_s * factor,
        )
