"""A pipeline, what it costs, and the result of a solve."""

import dataclasses
import math

from autopar_solver.stages.schedules.tasks import Schedule
from autopar_solver.status import Status


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
