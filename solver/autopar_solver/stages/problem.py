"""The inter-operator problem: a chain of layers on groups of devices.

A *submesh option* is a number of devices of one group, laid out as one logical mesh. A
pipeline cuts the chain into parts, gives each device group of its schedule one option,
and says which layers compute their activations again in the backward pass. What a
layer costs on an option depends on the number of microbatches, so that there is one
`LayerCosts` for each number. Costs of layers add; nothing is solved for a range.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from autopar_errors import InputError
from autopar_solver.stages.schedules.order import Schedule
from autopar_solver.status import Status


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices of one kind.

    Attributes:
        devices: how many there are.
        memory_bytes: what each of them holds; ``inf`` for no limit.
    """

    devices: int
    memory_bytes: float = math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class SubmeshOption:
    """A stage's devices, as one logical mesh.

    Submeshes of the options that a plan uses must fit beside each other whenever their
    numbers add up to no more than the group has; powers of two within a host and whole
    hosts do.

    Attributes:
        group: which device group they are of.
        devices: how many they are.
        link: row and column of this option in the tables of links.
        name: how messages call it.
    """

    group: int
    devices: int
    link: int = 0
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCosts:
    """What layers cost when a step has a given number of microbatches.

    Arrays are float64 ``[layers, options]``. Seconds and activations are those of one
    microbatch, bytes those of one device.

    Args:
        microbatches: how many microbatches a step has.
        forward_s: seconds of the forward pass; ``inf`` forbids the option.
        backward_input_s: seconds of the gradients of inputs.
        backward_weight_s: seconds of the gradients of weights.
        step_s: seconds once a step: exposed sums of gradients and the update.
        resident_bytes: parameters, moments and gradients.
        activation_bytes: what is kept from the forward to the backward pass.
        boundary_bytes: what is kept where the layer computes its activations again.
        recompute_s: seconds of computing them again; ``inf`` forbids it.
        transient_bytes: what the layer needs beside all that while it runs.
        forward_link_s: ``[layers - 1, links, links]``, for how long the activations
            between layers ``i`` and ``i + 1`` occupy the link from a stage's option to
            the next one's; ``inf`` where no link is.
        backward_link_s: the same for cotangents on their way back; indexed like
            ``forward_link_s``, the earlier stage first.
        latency_s: ``[links, links]``, what a message takes besides.
        pending_bytes: what is kept while gradients of weights wait, where they are
            tasks of their own; None for ``activation_bytes``.
        enter_s: what a stage adds to its forward, and again to its backward, when it
            begins with the layer; None for nothing.
        leave_s: the same, when it ends with the layer.
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
        """``pending_bytes``, activations where it is None."""
        kept = self.pending_bytes
        return self.activation_bytes if kept is None else kept

    @property
    def enter(self) -> np.ndarray:
        """``enter_s``, zeros where it is None."""
        return np.zeros_like(self.forward_s) if self.enter_s is None else self.enter_s

    @property
    def leave(self) -> np.ndarray:
        """``leave_s``, zeros where it is None."""
        return np.zeros_like(self.forward_s) if self.leave_s is None else self.leave_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedParameter:
    """A parameter that two layers use, such as a tied embedding.

    Device groups that hold one of the layers, but not the other, exchange its gradient
    once a step.

    Attributes:
        source: the layer whose ``resident_bytes`` include the parameter.
        target: the other layer.
        step_s: float64 ``[options]``, what the exchange takes either group.
        copy_bytes: ``[options]``, the copy that the target's group then keeps.
    """

    source: int
    target: int
    step_s: np.ndarray
    copy_bytes: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageProblem:
    """A chain of layers, devices, and what a plan may choose.

    Args:
        name: how messages call this problem.
        groups: the device groups; a plan need not use all devices.
        options: the submesh options; the pipeline may order groups as it likes.
        costs: one for each number of microbatches that is allowed.
        schedules: which schedules are allowed.
        shared: parameters that two layers use.
        blocking: whether a stage sends instead of computing, not beside it.
        max_stages: the most device groups of a pipeline; None for no limit.

    Raises:
        InputError: an array has the wrong shape or values, or something refers to
            what does not exist; the message names it.
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
        """The length of the chain."""
        return len(self.costs[0].forward_s)

    @property
    def num_links(self) -> int:
        """How many kinds of ends of links the tables tell apart."""
        return 1 + max(option.link for option in self.options)

    def costs_of(self, microbatches: int) -> LayerCosts:
        """The costs for a number of microbatches.

        Raises:
            InputError: the problem does not allow this number.
        """
        for costs in self.costs:
            if costs.microbatches == microbatches:
                return costs
        raise InputError(f"{self.name}: {microbatches} microbatches are not allowed.")

    def limit_bytes(self, option: int) -> float:
        """The memory of each device of an option."""
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
    """What a plan chooses.

    Attributes:
        microbatches: how many microbatches a step has.
        schedule: who computes what when.
        options: by device group of the pipeline, its submesh option.
        cuts: where parts begin, and where the last one ends: part ``k`` has the layers
            from ``cuts[k]`` up to ``cuts[k + 1]``.
        recomputed: the layers whose activations are computed again, in order.
    """

    microbatches: int
    schedule: Schedule
    options: tuple[int, ...]
    cuts: tuple[int, ...]
    recomputed: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """The number of device groups."""
        return len(self.options)

    def layers(self, stage: int) -> tuple[int, ...]:
        """The layers of a device group, chunk after chunk."""
        parts = range(stage, len(self.cuts) - 1, self.stages)
        return tuple(
            layer
            for part in parts
            for layer in range(self.cuts[part], self.cuts[part + 1])
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCost:
    """What a pipeline costs.

    Attributes:
        step_s: the makespan of its schedule, as played.
        bubble: by device group, the share of the step in which it waits.
        memory_bytes: by device group, the most that one of its devices holds.
        limit_bytes: by device group, what one of its devices can hold.
    """

    step_s: float
    bubble: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    limit_bytes: tuple[float, ...]

    @property
    def fits(self) -> bool:
        """Whether every device group fits in its memory, rounding aside."""
        pairs = zip(self.memory_bytes, self.limit_bytes, strict=True)
        return all(used <= limit * (1 + 1e-9) for used, limit in pairs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BindingMemory:
    """The memory that no pipeline gets around.

    Attributes:
        first: the first layer of the range that fits on no option.
        last: its last layer.
        option: the option on which it needs least, relative to the limit.
        least_bytes: what it needs there at least.
        limit_bytes: what a device has there.
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
        pipeline: None without one.
        cost: what it costs; None without one.
        bound_s: no pipeline of the space takes less.
        status: how the solve ended.
        seconds: wall-clock time of the solve.
        binding: where the status is ``INFEASIBLE``, the memory that binds; None if
            devices or forbidden options do.
    """

    pipeline: Pipeline | None
    cost: PipelineCost | None
    bound_s: float
    status: Status
    seconds: float
    binding: BindingMemory | None = None

    @property
    def step_s(self) -> float:
        """Seconds of the step; infinite without a pipeline."""
        return math.inf if self.cost is None else self.cost.step_s

    @property
    def gap(self) -> float:
        """How far the step can be from the shortest one, relative to it."""
        if self.bound_s >= self.step_s:
            return 0.0
        return (self.step_s - self.bound_s) / max(self.step_s, 1e-300)
