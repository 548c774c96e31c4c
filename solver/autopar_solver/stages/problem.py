"""The inter-operator problem: a chain of layers on groups of devices.

A *submesh option* is a number of devices of one group, arranged as one logical mesh. A
pipeline cuts the chain of layers into parts, and assigns one submesh option to each of
its stages. A pipeline also selects the layers that recompute their activations in the
backward pass. The costs of a layer on an option depend on the number of microbatches,
so a problem has one `LayerCosts` for each number. The costs of a range of layers are
the sums of the layers' costs.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from autopar_errors import InputError
from autopar_solver.stages.schedules.play import Schedule
from autopar_solver.status import Status


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices of one kind.

    Attributes:
        devices: the number of devices in the group.
        memory_bytes: the memory of each device; ``inf`` for no limit.
    """

    devices: int
    memory_bytes: float = math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class SubmeshOption:
    """The devices of a stage, arranged as one logical mesh.

    Whenever the numbers of devices of some submeshes add up to at most the devices of a
    group, these submeshes must fit into the group without overlap. Powers of two within
    a host and whole hosts satisfy this condition.

    Attributes:
        group: the device group of the devices.
        devices: the number of devices.
        link: the index of this option in the tables of seconds between stages, such as
            ``LayerCosts.latency_s``.
        name: the name of the option in messages.
    """

    group: int
    devices: int
    link: int = 0
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCosts:
    """The costs of layers in a step with a given number of microbatches.

    Arrays are float64 ``[layers, options]``. Seconds and activation bytes are per
    microbatch, and all bytes are per device.

    Args:
        microbatches: the number of microbatches of a step.
        forward_s: seconds of the forward pass; ``inf`` forbids the option.
        backward_input_s: seconds to compute the gradients of inputs.
        backward_weight_s: seconds to compute the gradients of weights.
        step_s: seconds of the work that runs once per step: exposed gradient
            all-reduces and the update.
        resident_bytes: bytes of parameters, optimizer moments and gradients.
        activation_bytes: bytes of activations kept from the forward to the backward
            pass.
        boundary_bytes: bytes kept instead of ``activation_bytes`` if the layer
            recomputes its activations.
        recompute_s: seconds to recompute the activations; ``inf`` forbids
            recomputation.
        transient_bytes: further bytes that the layer needs while it runs.
        forward_link_s: ``[layers - 1, links, links]``, the seconds for which one
            microbatch's activations between layers ``i`` and ``i + 1`` occupy the link
            from a stage's devices to those of the next stage; ``inf`` if there is no
            link between the two options.
        backward_link_s: like ``forward_link_s``, for gradients of activations that are
            sent back. The index of the earlier stage comes first here too.
        latency_s: ``[links, links]``, the latency of a message in seconds.
        pending_bytes: bytes kept while the gradients of weights wait, if a schedule
            computes them as separate tasks; None for ``activation_bytes``.
        enter_s: for each layer, the seconds that a stage beginning with it adds to its
            forward pass, and also to its backward pass, such as receiving; None for no
            seconds.
        leave_s: like ``enter_s``, for a stage that ends with the layer.
    """

    microbatches: int
    forward_s: np.ndarray
    backward_input_s: np.ndarray
    backward_weight_s: np.ndarray
    step_s: np.ndarray
    resident_bytes: np.ndarray
    activation_bytes: np.ndarray
    boundary_bytes: np.ndarray
    recompute_s: np.ndarray
    transient_bytes: np.ndarray
    forward_link_s: np.ndarray
    backward_link_s: np.ndarray
    latency_s: np.ndarray
    pending_bytes: np.ndarray | None = None
    enter_s: np.ndarray | None = None
    leave_s: np.ndarray | None = None

    @property
    def pending(self) -> np.ndarray:
        """``pending_bytes``, or ``activation_bytes`` if it is None."""
        kept = self.pending_bytes
        return self.activation_bytes if kept is None else kept

    @property
    def enter(self) -> np.ndarray:
        """``enter_s``, or zeros if it is None."""
        return np.zeros_like(self.forward_s) if self.enter_s is None else self.enter_s

    @property
    def leave(self) -> np.ndarray:
        """``leave_s``, or zeros if it is None."""
        return np.zeros_like(self.forward_s) if self.leave_s is None else self.leave_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedParameter:
    """A parameter that two layers use, such as a tied embedding.

    A stage that holds one of the two layers but not the other exchanges the parameter's
    gradient once per step.

    Attributes:
        source: the layer whose ``resident_bytes`` include the parameter.
        target: the other layer.
        step_s: float64 ``[options]``, the seconds of this exchange of gradients, for
          each of the two stages.
        copy_bytes: ``[options]``, the bytes of memory of the parameter's copy on the
          target's stage.
    """

    source: int
    target: int
    step_s: np.ndarray
    copy_bytes: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageProblem:
    """A chain of layers, devices, and the choices that a plan may make.

    Args:
        name: the name of the problem in messages.
        groups: the device groups; a plan may leave devices unused.
        options: the submesh options; a pipeline may use groups in any order.
        costs: one entry for each allowed number of microbatches.
        schedules: the allowed schedules.
        shared: parameters that two layers use.
        blocking: whether a stage's devices cannot compute while they send.
        max_stages: the largest number of stages of a pipeline; None for no limit.

    Raises:
        InputError: an array has the wrong shape or values, or an index refers to a
            layer, group or option that does not exist. The message names it.
    """

    name: str = "stages"
    groups: tuple[DeviceGroup, ...]
    options: tuple[SubmeshOption, ...]
    costs: tuple[LayerCosts, ...]
    schedules: tuple[Schedule, ...]
    shared: tuple[SharedParameter, ...] = ()
    blocking: bool = False
    max_stages: int | None = None

    def __post_init__(self) -> None:
        """Checks shapes, values and references."""
        for field in ("groups", "options", "costs", "schedules"):
            if not getattr(self, field):
                raise InputError(f"{self.name}: {field} must not be empty.")
        _check_devices(self)
        for costs in self.costs:
            _check_costs(self, costs)
        counts = [costs.microbatches for costs in self.costs]
        if min(counts) < 1 or len(set(counts)) < len(counts):
            raise InputError(
                f"{self.name}: numbers of microbatches must be positive and differ, "
                f"got {counts}."
            )
        for shared in self.shared:
            _check_shared(self, shared)
        if self.max_stages is not None and self.max_stages < 1:
            raise InputError(
                f"{self.name}: max_stages must be at least 1, got {self.max_stages}."
            )

    @property
    def num_layers(self) -> int:
        """The number of layers of the chain."""
        return len(self.costs[0].forward_s)

    @property
    def num_links(self) -> int:
        """The number of rows in the tables of seconds between stages."""
        return 1 + max(option.link for option in self.options)

    def costs_of(self, microbatches: int) -> LayerCosts:
        """Returns the costs for a number of microbatches.

        Raises:
            InputError: the problem does not allow this number.
        """
        for costs in self.costs:
            if costs.microbatches == microbatches:
                return costs
        raise InputError(f"{self.name}: {microbatches} microbatches are not allowed.")

    def limit_bytes(self, option: int) -> float:
        """Returns the memory of each device of an option."""
        return self.groups[self.options[option].group].memory_bytes


def _check_devices(problem: StageProblem) -> None:
    for number, group in enumerate(problem.groups):
        if group.devices < 1 or not group.memory_bytes >= 0:
            raise InputError(
                f"{problem.name}: group {number} needs at least one device and memory "
                f"from 0 to inf, got {group.devices} and {group.memory_bytes}."
            )
    for number, option in enumerate(problem.options):
        known = 0 <= option.group < len(problem.groups)
        if not known or option.devices < 1 or option.link < 0:
            raise InputError(
                f"{problem.name}: option {number} must name a group, at least one "
                f"device and a link, got {option}."
            )


_MAY_FORBID = {"forward_s", "recompute_s", "forward_link_s", "backward_link_s"}


def _check_costs(problem: StageProblem, costs: LayerCosts) -> None:
    layers, links = problem.num_layers, problem.num_links
    between = (layers - 1, links, links)
    shapes = {
        "forward_link_s": between,
        "backward_link_s": between,
        "latency_s": (links, links),
    }
    where = f"{problem.name}: {costs.microbatches} microbatches"
    for field in dataclasses.fields(costs):
        array = getattr(costs, field.name)
        if array is None or field.name == "microbatches":
            continue
        shape = shapes.get(field.name, (layers, len(problem.options)))
        if array.shape != shape or layers < 1:
            raise InputError(
                f"{where}: {field.name} must have shape {shape}, got {array.shape}."
            )
        finite = field.name in _MAY_FORBID or np.isfinite(array).all()
        if not ((array >= 0).all() and finite):
            raise InputError(
                f"{where}: {field.name} must be numbers from 0 on, and finite unless "
                f"inf forbids something, got {array}."
            )


def _check_shared(problem: StageProblem, shared: SharedParameter) -> None:
    ends = (shared.source, shared.target)
    if not all(0 <= end < problem.num_layers for end in ends):
        raise InputError(f"{problem.name}: a shared parameter is of no layer: {ends}.")
    for field in ("step_s", "copy_bytes"):
        array = getattr(shared, field)
        good = array.shape == (len(problem.options),) and np.isfinite(array).all()
        if not (good and (array >= 0).all()):
            raise InputError(
                f"{problem.name}: {field} of the parameter that layers {ends} share "
                f"must be one number from 0 on per option, got {array}."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The choices of a pipeline plan.

    Attributes:
        microbatches: the number of microbatches of a step.
        schedule: the order in which stages compute microbatches.
        options: for each stage, its submesh option.
        cuts: the first layer of each part, and then the number of layers: part ``k``
            has the layers from ``cuts[k]`` up to, but not including, ``cuts[k + 1]``.
        recomputed: the layers whose activations are recomputed, in order.
    """

    microbatches: int
    schedule: Schedule
    options: tuple[int, ...]
    cuts: tuple[int, ...]
    recomputed: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """The number of stages; each stage has its own devices."""
        return len(self.options)

    def layers(self, stage: int) -> tuple[int, ...]:
        """Returns the layers of a stage, chunk after chunk."""
        parts = range(stage, len(self.cuts) - 1, self.stages)
        return tuple(
            layer
            for part in parts
            for layer in range(self.cuts[part], self.cuts[part + 1])
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCost:
    """The time and memory of a pipeline.

    Attributes:
        step_s: the makespan of the simulated schedule.
        bubble: for each stage, the share of the step in which the stage is idle, 0 to
            1.
        memory_bytes: for each stage, the peak memory of one device.
        limit_bytes: for each stage, the memory that one device has.
    """

    step_s: float
    bubble: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    limit_bytes: tuple[float, ...]

    @property
    def fits(self) -> bool:
        """Whether every stage fits in its memory, or exceeds it by rounding only."""
        pairs = zip(self.memory_bytes, self.limit_bytes, strict=True)
        return all(used <= limit * (1 + 1e-9) for used, limit in pairs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BindingMemory:
    """The memory need that makes every pipeline impossible.

    Attributes:
        first: the first layer of the range that fits on no option.
        last: the last layer of the range.
        option: the option whose memory the range exceeds by the smallest factor.
        least_bytes: the least memory that the range needs per device on this option.
        limit_bytes: the memory of a device of this option.
    """

    first: int
    last: int
    option: int
    least_bytes: float
    limit_bytes: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageSolution:
    """The pipeline that was found, and a proven lower bound of every pipeline's step.

    Attributes:
        pipeline: the best pipeline that was found; None if none was found.
        cost: the cost of the pipeline; None without a pipeline.
        bound_s: a lower bound of the seconds of every pipeline's step in the search
          space.
        status: how the solve ended.
        seconds: wall-clock time of the solve.
        binding: for the status ``INFEASIBLE``, the memory need that rules out every
            pipeline; None if too few devices or forbidden options rule them out.
    """

    pipeline: Pipeline | None
    cost: PipelineCost | None
    bound_s: float
    status: Status
    seconds: float
    binding: BindingMemory | None = None

    @property
    def step_s(self) -> float:
        """Seconds of the step; ``inf`` without a pipeline."""
        return math.inf if self.cost is None else self.cost.step_s

    @property
    def gap(self) -> float:
        """``step_s`` minus the bound, divided by ``step_s``."""
        if self.bound_s >= self.step_s:
            return 0.0
        return (self.step_s - self.bound_s) / max(self.step_s, 1e-300)
