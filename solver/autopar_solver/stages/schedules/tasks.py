"""A schedule's table: which tasks each device group runs, in which order.

A *device group* runs one stage. With ``chunks`` parts a group, the chain of layers is
cut into ``chunks * stages`` *parts*: part ``k`` is chunk ``k // stages`` of group
``k % stages``. Part ``k`` sends activations to part ``k + 1``, and gets cotangents
from it.
"""

import dataclasses
import enum
from typing import NamedTuple

import numpy as np

from autopar_errors import InputError


class TaskKind(enum.IntEnum):
    """What a task computes."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3


class ScheduleKind(enum.Enum):
    """The published schedules."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """A kind of schedule, and how many chunks each device group has.

    Raises:
        InputError: there are no chunks, or several without interleaving.

    >>> Schedule(ScheduleKind.INTERLEAVED, 2).name
    'interleaved x2'
    """

    kind: ScheduleKind
    chunks: int = 1

    def __post_init__(self) -> None:
        """Checks the number of chunks."""
        if self.chunks < 1:
            raise InputError(f"Schedule: chunks must be at least 1, got {self.chunks}.")
        if self.chunks > 1 and self.kind is not ScheduleKind.INTERLEAVED:
            raise InputError(
                f"Schedule: {self.kind.value} has one chunk a group, got "
                f"{self.chunks}: use ScheduleKind.INTERLEAVED for more."
            )

    @property
    def name(self) -> str:
        """How messages call it."""
        chunks = f" x{self.chunks}" if self.chunks > 1 else ""
        return self.kind.value + chunks

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are tasks of their own."""
        return self.kind is ScheduleKind.ZERO_BUBBLE


class ScheduleTask(NamedTuple):
    """One computation of one microbatch on one chunk of a device group."""

    kind: TaskKind
    microbatch: int
    chunk: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduleTable:
    """Each device group's tasks in the order in which it runs them.

    Attributes:
        stages: the number of device groups.
        microbatches: how many microbatches a step has.
        chunks: how many parts of the model each group has.
        orders: by group, int64 ``[tasks, 3]``: kind, microbatch and chunk.
    """

    stages: int
    microbatches: int
    chunks: int
    orders: tuple[np.ndarray, ...]

    @property
    def parts(self) -> int:
        """The number of parts of the model."""
        return self.stages * self.chunks

    def tasks(self, stage: int) -> tuple[ScheduleTask, ...]:
        """The tasks of one device group, in order."""
        rows = self.orders[stage].tolist()
        return tuple(ScheduleTask(TaskKind(kind), m, chunk) for kind, m, chunk in rows)

    def part(self, stage: int, chunk: int) -> int:
        """The part of the model that a group's chunk is."""
        return chunk * self.stages + stage
