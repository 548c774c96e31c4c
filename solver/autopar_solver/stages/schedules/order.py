"""Builds the tables of the published schedules, for any number of microbatches.

- GPipe (Huang et al., 2019): all forward passes, then all backward passes.
- 1F1B (Narayanan et al., PipeDream-Flush, 2021): stage ``i`` of ``S`` begins with ``S -
  i - 1`` forward passes, and then alternates between forward and backward. At most ``S
  - i`` microbatches are alive: forward passes of which the backward pass has not ended.
- Interleaved 1F1B (Narayanan et al., Megatron-LM, 2021): each stage has several chunks,
  so all stages have work sooner, by a factor equal to the number of chunks.
- ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2023): the backward pass is split.
  Gradients of weights wait while gradients of inputs are sent to the previous stage.

A schedule's table lists the tasks of each stage in the order in which the stage runs
them.

Each stage runs on its own devices. With ``chunks`` chunks per stage, the chain of
layers is cut into ``chunks * stages`` *parts*: part ``k`` is chunk ``k // stages`` of
stage ``k % stages``. Part ``k`` sends activations to part ``k + 1``, and receives
gradients of activations from it.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

import numpy as np

from autopar_errors import InputError


class TaskKind(enum.IntEnum):
    """The computation of a task."""

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
    """A kind of schedule, and the number of chunks of each stage.

    Raises:
        InputError: there is no chunk, or several chunks without interleaving.

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
        """The name of the schedule in messages."""
        chunks = f" x{self.chunks}" if self.chunks > 1 else ""
        return self.kind.value + chunks

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and gradients of weights are separate tasks."""
        return self.kind is ScheduleKind.ZERO_BUBBLE


class ScheduleTask(NamedTuple):
    """One computation of one microbatch on one chunk of a stage."""

    kind: TaskKind
    microbatch: int
    chunk: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduleTable:
    """The tasks of each stage, in the order in which the stage runs them.

    Attributes:
        stages: the number of stages.
        microbatches: the number of microbatches of a step.
        chunks: the number of parts of the model that each stage has.
        orders: for each stage, int64 ``[tasks, 3]``: kind, microbatch and chunk of each
            task.
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
        """The tasks of one stage, in order."""
        rows = self.orders[stage].tolist()
        return tuple(ScheduleTask(TaskKind(kind), m, chunk) for kind, m, chunk in rows)

    def part(self, stage: int, chunk: int) -> int:
        """The part of the model that is a stage's chunk."""
        return chunk * self.stages + stage


def make_table(schedule: Schedule, stages: int, microbatches: int) -> ScheduleTable:
    """Builds the table of a schedule.

    Args:
        schedule: the schedule, with its number of chunks.
        stages: the number of stages.
        microbatches: the number of microbatches of a step; it may be less than
            ``stages``.

    Raises:
        InputError: there is no stage or no microbatch.

    >>> table = make_table(Schedule(ScheduleKind.ONE_F_ONE_B), 2, 2)
    >>> [f"{task.kind.name[0]}{task.microbatch}" for task in table.tasks(0)]
    ['F0', 'F1', 'B0', 'B1']
    """
    if stages < 1 or microbatches < 1:
        raise InputError(
            "make_table: stages and microbatches must be at least 1, got "
            f"{stages} and {microbatches}."
        )
    if schedule.kind is ScheduleKind.INTERLEAVED:
        order = _interleave
    elif schedule.kind is ScheduleKind.ZERO_BUBBLE:
        order = _zero_bubble
    elif schedule.kind is ScheduleKind.GPIPE:
        order = _gpipe
    else:
        order = _one_f_one_b
    return ScheduleTable(
        stages=stages,
        microbatches=microbatches,
        chunks=schedule.chunks,
        orders=tuple(
            order(stages, microbatches, schedule.chunks, stage)
            for stage in range(stages)
        ),
    )


def _tasks(kind: TaskKind, microbatches: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    kinds = np.full(len(microbatches), int(kind))
    return np.stack([kinds, microbatches, chunks], axis=1)


def _alternating(
    forwards: np.ndarray, backwards: np.ndarray, warm_up: int
) -> np.ndarray:
    """``warm_up`` forwards, then forward and backward in turns, then the rest."""
    late = len(forwards) - warm_up
    pairs = np.stack([forwards[warm_up:], backwards[:late]], axis=1)
    return np.concatenate([forwards[:warm_up], pairs.reshape(-1, 3), backwards[late:]])


def _gpipe(stages: int, microbatches: int, chunks: int, stage: int) -> np.ndarray:
    numbers, zeros = np.arange(microbatches), np.zeros(microbatches, np.int64)
    forwards = _tasks(TaskKind.FORWARD, numbers, zeros)
    return np.concatenate([forwards, _tasks(TaskKind.BACKWARD, numbers, zeros)])


def _one_f_one_b(stages: int, microbatches: int, chunks: int, stage: int) -> np.ndarray:
    numbers, zeros = np.arange(microbatches), np.zeros(microbatches, np.int64)
    return _alternating(
        _tasks(TaskKind.FORWARD, numbers, zeros),
        _tasks(TaskKind.BACKWARD, numbers, zeros),
        min(stages - stage - 1, microbatches),
    )


def _interleave(stages: int, microbatches: int, chunks: int, stage: int) -> np.ndarray:
    """The interleaved order: rounds of ``stages`` microbatches through all chunks.

    Megatron's order requires that ``microbatches`` is a multiple of ``stages``. For
    other numbers, the order is built for the next multiple, and the tasks of
    microbatches that do not exist are removed. The remaining tasks still have a valid
    order.
    """
    rounds = -(-microbatches // stages)
    place = np.arange(rounds * stages * chunks)
    number = place // (stages * chunks) * stages + place % stages
    chunk = place // stages % chunks
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages
    order = _alternating(
        _tasks(TaskKind.FORWARD, number, chunk),
        _tasks(TaskKind.BACKWARD, number, chunks - 1 - chunk),
        min(warm_up, len(place)),
    )
    return order[order[:, 1] < microbatches]


def _zero_bubble(stages: int, microbatches: int, chunks: int, stage: int) -> np.ndarray:
    """1F1B in which stage ``i`` delays gradients of weights by ``i`` microbatches.

    Each stage then has at most ``stages`` live microbatches, as many as the first stage
    has in 1F1B. Gradients of activations reach each stage without waiting for gradients
    of weights.
    """
    order = _one_f_one_b(stages, microbatches, chunks, stage)
    numbers = np.arange(microbatches)
    weights = _tasks(TaskKind.BACKWARD_WEIGHT, numbers, np.zeros_like(numbers))
    late = min(stage, microbatches)
    backward = order[:, 0] == TaskKind.BACKWARD
    order[backward, 0] = TaskKind.BACKWARD_INPUT
    before = np.flatnonzero(backward)[late:] + 1
    order = np.insert(order, before, weights[: microbatches - late], axis=0)
    return np.concatenate([order, weights[microbatches - late :]])
