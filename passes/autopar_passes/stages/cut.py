"""Cuts a microbatch's program into the tasks of pipeline stages.

A task is a set of equations of one stage that runs as a unit. A *part* is a run of
layers, and a stage has one or more parts. A task is the forward pass of a part, the
backward pass of a part, or one level of the update: equations that run once, after all
microbatches, and read only earlier levels. A backward pass may be two tasks: the
gradients of inputs and the gradients of weights. Tasks read values of other tasks.
Values that cross stages are sent.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from autopar_passes.graph.roles import Role
from autopar_passes.graph.verify import GraphError
from autopar_passes.program.equations import Equation, Program, Region, reads
from autopar_passes.stages.parts import CutError, Parts


class Phase(enum.Enum):
    """The kind of work of a task."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "gradients of inputs"
    BACKWARD_WEIGHT = "gradients of weights"
    UPDATE = "update"


# Free equations (`autopar_passes.stages.parts`) with these operators keep their results
# for the backward pass; others are recomputed there.
_COSTLY = frozenset({"random_bits", "dot_general", "conv_general_dilated", "sort"})


@dataclasses.dataclass(frozen=True, slots=True)
class TaskKey:
    """Identifies a task: its phase, its stage, and its part or level of the update."""

    phase: Phase
    stage: int
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """Equations that run as a unit on one stage.

    Attributes:
      key: identifies the task.
      equations: the indices of the equations, in program order.
      inputs: the values that the task reads and does not compute, each with the task
        that computes it; None stands for an input of the program.
      outputs: the values that other tasks read, or that leave the step.
    """

    key: TaskKey
    equations: tuple[int, ...]
    inputs: tuple[tuple[int, TaskKey | None], ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Cut:
    """A microbatch's program as tasks of stages.

    Attributes:
      parts: the part of each equation.
      stage_of: part -> stage.
      crossings: the values that microbatches compute and that equations which run once
        read.
      tasks: all tasks: forward tasks in the order of parts, backward tasks in the
        reverse order, update tasks by level.
    """

    parts: Parts
    stage_of: tuple[int, ...]
    crossings: frozenset[int]
    tasks: dict[TaskKey, Task]

    @property
    def program(self) -> Program:
        """One microbatch's program."""
        return self.parts.flow.program

    @property
    def stages(self) -> int:
        """The number of stages."""
        return 1 + max(self.stage_of)

    def of_stage(self, stage: int) -> list[Task]:
        """Returns the tasks of a stage."""
        return [t for key, t in self.tasks.items() if key.stage == stage]

    @functools.cached_property
    def owners(self) -> dict[int, int]:
        """Maps each input of the program to the stage that keeps it between steps.

        State that several stages read, and small state, also has exactly one owner. An
        input that is not state belongs to the first stage that reads it.
        """
        readers: dict[int, int] = {}
        for task in self.tasks.values():
            for value, _ in task.inputs:
                known = readers.get(value, task.key.stage)
                readers[value] = min(known, task.key.stage)
        homes = self.parts.homes
        return {
            given.value: self.stage_of[homes[given.value]]
            if given.value in homes
            else readers.get(given.value, 0)
            for given in self.parts.flow.graph.inputs
        }


def cut(
    parts: Parts,
    stage_of: Sequence[int],
    crossings: Collection[int],
    *,
    split_backward: bool = False,
    recomputed: Collection[int] = (),
) -> Cut:
    """Cuts a program into tasks.

    Args:
      parts: the part of each equation (`autopar_passes.stages.parts.parts_of`).
      stage_of: part -> stage.
      crossings: values of microbatches that leave the step, or that equations which run
        once read.
      split_backward: whether the gradients of weights are separate tasks.
      recomputed: forward equations whose results are recomputed by the backward pass of
        their part.

    Raises:
      CutError: stages are not numbered from 0, or a task would depend on a later task.
    """
    if len(stage_of) != parts.count or set(stage_of) != set(range(max(stage_of) + 1)):
        raise CutError(f"{parts.count} parts cannot be on stages {tuple(stage_of)}.")
    cutter = _Cutter(
        parts, tuple(stage_of), frozenset(crossings), frozenset(recomputed)
    )
    tasks = cutter.tasks(split_backward)
    return Cut(parts, tuple(stage_of), frozenset(crossings), tasks)


class _Cutter:
    """Groups equations into tasks, and finds the values that tasks exchange."""

    def __init__(
        self,
        parts: Parts,
        stage_of: tuple[int, ...],
        crossings: frozenset[int],
        recomputed: frozenset[int],
    ) -> None:
        self.parts = parts
        self.flow = parts.flow
        self.stage_of = stage_of
        self.crossings = crossings
        self.recomputed = recomputed
        program = self.flow.program
        self.leaving = {v for v in program.body.outputs if isinstance(v, int)}
        self.leaving.update(parts.gathered.values())
        # Every task has access to the program's constants.
        self.constants = tuple(program.constant_arrays)
        self.order = {index: k for k, index in enumerate(self.flow.equations)}
        # Equation -> the task that runs it; free equations have no entry.
        self.owner: dict[int, TaskKey] = {}
        # Maps a free equation to the forward tasks that send its results to other
        # tasks.
        self.kept: dict[int, set[TaskKey]] = defaultdict(set)

    def tasks(self, split_backward: bool) -> dict[TaskKey, Task]:
        groups = self.groups(split_backward)
        full: dict[TaskKey, list[int]] = {}
        for key, group in groups.items():
            full[key] = self.with_free(key, group)
        inputs = {key: self.inputs(key, full[key]) for key in full}
        wanted: dict[TaskKey, dict[int, None]] = defaultdict(dict)
        for found in inputs.values():
            for value, maker in found:
                if maker is not None:
                    wanted[maker][value] = None
        out: dict[TaskKey, Task] = {}
        for key, equations in full.items():
            made = self.made_values(key, equations)
            outputs = (v for v in made if v in self.leaving or v in wanted[key])
            out[key] = Task(key, tuple(equations), tuple(inputs[key]), tuple(outputs))
        return out

    def made_values(self, key: TaskKey, equations: Iterable[int]) -> list[int]:
        """Returns the values that a task computes for other tasks, in program order."""
        found: list[int] = []
        for index in equations:
            own = self.owner.get(index) == key or key in self.kept.get(index, ())
            if own:
                found.extend(self.flow.equations[index].outputs)
        return found

    def forward_key(self, part: int) -> TaskKey:
        return TaskKey(Phase.FORWARD, self.stage_of[part], part)

    def groups(self, split_backward: bool) -> dict[TaskKey, list[int]]:
        """Returns the equations of each task, without those that may be repeated.

        Several tasks may run an equation that is free (`autopar_passes.stages.parts`).
        """
        flow, parts = self.flow, self.parts
        by_part: dict[tuple[Role, int], list[int]] = defaultdict(list)
        for index in flow.equations:
            if index in parts.part:
                by_part[flow.roles[index], parts.part[index]].append(index)
        out: dict[TaskKey, list[int]] = {}
        for part in range(parts.count):
            out[self.forward_key(part)] = by_part[Role.FORWARD, part]
        for part in reversed(range(parts.count)):
            found = by_part[Role.BACKWARD, part]
            stage = self.stage_of[part]
            if not split_backward:
                out[TaskKey(Phase.BACKWARD, stage, part)] = found
                continue
            first = self.sent_on(part, found)
            out[TaskKey(Phase.BACKWARD_INPUT, stage, part)] = [
                i for i in found if i in first
            ]
            out[TaskKey(Phase.BACKWARD_WEIGHT, stage, part)] = [
                i for i in found if i not in first
            ]
        out.update(self.updates(by_part))
        for key, group in out.items():
            self.owner.update(dict.fromkeys(group, key))
        self.make_crossings(out)
        return {key: group for key, group in out.items() if group or _always(key)}

    def sent_on(self, part: int, equations: Sequence[int]) -> set[int]:
        """The backward equations that backward passes of earlier parts depend on."""
        flow, within = self.flow, set(equations)
        needed: set[int] = set()
        for index in reversed(equations):
            for value in flow.equations[index].outputs:
                for reader in flow.readers.get(value, ()):
                    away = (
                        reader in self.parts.part
                        and flow.roles[reader] is Role.BACKWARD
                        and self.parts.part[reader] != part
                    )
                    if away or (reader in needed and reader in within):
                        needed.add(index)
        return needed

    def updates(
        self, by_part: dict[tuple[Role, int], list[int]]
    ) -> Iterator[tuple[TaskKey, list[int]]]:
        """Yields the equations that run once, by stage and level."""
        flow, part = self.flow, self.parts.part
        level: dict[int, int] = {}
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index in flow.equations:
            if index not in part or flow.roles[index] is not Role.UPDATE:
                continue
            stage = self.stage_of[part[index]]
            level[index] = max(
                (
                    level[m] + (self.stage_of[part[m]] != stage)
                    for m in self.makers_behind(index)
                    if m in level
                ),
                default=0,
            )
            groups[level[index], stage].append(index)
        for number, stage in sorted(groups):
            key = TaskKey(Phase.UPDATE, stage, number)
            yield key, groups[number, stage]

    def makers_behind(self, index: int) -> Iterator[int]:
        """Yields fixed equations that an equation reads, also through free ones."""
        for value in reads(self.flow.equations[index]):
            maker = self.flow.maker.get(value)
            if maker in self.parts.part:
                yield maker
            elif maker is not None:
                yield from self.makers_behind(maker)

    def make_crossings(self, groups: dict[TaskKey, list[int]]) -> None:
        """Assigns crossings that free equations compute to the last forward task.

        Results of the step that free equations compute are assigned to level 0 of the
        update.
        """
        flow = self.flow
        last = self.forward_key(self.parts.count - 1)
        for value in sorted(self.leaving | self.crossings):
            maker = flow.maker.get(value)
            if maker is None or maker in self.parts.part:
                continue
            key = last
            if flow.roles[maker] is Role.UPDATE or value not in self.crossings:
                key = TaskKey(Phase.UPDATE, self.stage_of[0], 0)
                groups.setdefault(key, [])
            groups[key].append(maker)
            self.owner[maker] = key

    def with_free(self, key: TaskKey, equations: Iterable[int]) -> list[int]:
        """The equations of a task and the free equations that it runs, in order."""
        found = set(equations)
        left = list(found)
        while left:
            for value in reads(self.flow.equations[left.pop()]):
                maker = self.flow.maker.get(value)
                if maker is None or maker in found or not self.runs_here(key, maker):
                    continue
                found.add(maker)
                left.append(maker)
        if key.phase is Phase.FORWARD:
            for index in found:
                if self.costly(index):
                    self.kept[index].add(key)
        return sorted(found, key=self.order.__getitem__)

    def runs_here(self, key: TaskKey, maker: int) -> bool:
        """Whether a task recomputes the results of an equation of another task."""
        if maker in self.parts.part:
            again = key.phase in _BACKWARD and maker in self.recomputed
            return again and self.parts.part[maker] == key.number
        value = self.flow.equations[maker].outputs[0]
        if key.phase is Phase.UPDATE and value in self.crossings:
            return False
        if key.phase not in _BACKWARD:
            return True
        forward = self.forward_key(key.number)
        return not (self.costly(maker) and forward in self.kept.get(maker, ()))

    def costly(self, index: int) -> bool:
        """Whether a free equation costs too much to be recomputed."""
        eqn = self.flow.equations[index]
        inner = any(r.equations for r in eqn.regions)
        return index in self.flow.free and (inner or eqn.primitive in _COSTLY)

    def inputs(
        self, key: TaskKey, equations: Sequence[int]
    ) -> list[tuple[int, TaskKey | None]]:
        """Returns values that a task only reads, each with the task computing it."""
        flow = self.flow
        own = {v for index in equations for v in flow.equations[index].outputs}
        own.update(self.constants)
        out: dict[int, TaskKey | None] = {}
        for index in equations:
            for value in reads(flow.equations[index]):
                if value in own or value in out:
                    continue
                maker = flow.maker.get(value)
                if maker is None:
                    out[value] = None
                elif maker in self.owner:
                    out[value] = self.owner[maker]
                else:
                    out[value] = self.forward_key(key.number)
        return list(out.items())


_BACKWARD = (Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)


def _always(key: TaskKey) -> bool:
    """Whether every schedule contains the task, even if the task is empty."""
    return key.phase is not Phase.UPDATE


@dataclasses.dataclass(frozen=True, slots=True)
class StageProgram:
    """All equations of a stage as one program.

    Attributes:
      stage: the number of the stage.
      program: a program whose inputs are state, batch and received values.
      given: the inputs of the whole program that are the first arguments.
      received: the values of other stages that the stage reads, the last arguments.
      carried: argument -> output that is the argument's next value.
      once: indices of the equations that run once.
    """

    stage: int
    program: Program
    given: tuple[int, ...]
    received: tuple[int, ...]
    carried: dict[int, int]
    once: frozenset[int]


def stage_program(found: Cut, stage: int) -> StageProgram:
    """Joins the tasks of a stage into one program.

    Args:
      found: the tasks.
      stage: the number of the stage.
    """
    flow, whole = found.parts.flow, found.program
    wanted = {i for t in found.of_stage(stage) for i in t.equations}
    equations = tuple(e for e in whole.body.equations if e.index in wanted)
    made = {v for e in equations for v in e.outputs}
    read = {v for e in equations for v in reads(e)} - made
    arguments = whole.body.inputs[: whole.num_arguments]
    outputs = _leaving(found, stage, made)
    given = tuple(
        v
        for v in arguments
        if v in read or (v in flow.carried_values and flow.carried_values[v] in outputs)
    )
    received = tuple(sorted(read - set(arguments) - whole.constant_arrays.keys()))
    held = {v: x for v, x in whole.constant_arrays.items() if v in read}
    body = Region((*given, *received, *held), equations, tuple(outputs))
    places = {v: k for k, v in enumerate(outputs)}
    carried = {
        k: places[flow.carried_values[v]]
        for k, v in enumerate(given)
        if flow.carried_values.get(v) in places and found.owners[v] == stage
    }
    program = Program(whole.values, body, tuple(held.values()))
    return StageProgram(stage, program, given, received, carried, flow.once & wanted)


def _leaving(found: Cut, stage: int, made: Collection[int]) -> tuple[int, ...]:
    """Returns the values that a stage sends to other stages, or that leave the step."""
    wanted = {
        value
        for task in found.tasks.values()
        if task.key.stage != stage
        for value, maker in task.inputs
        if maker is not None and maker.stage == stage
    }
    outputs = found.program.body.outputs
    wanted |= {v for v in outputs if isinstance(v, int)} & {
        v for t in found.of_stage(stage) for v in t.outputs
    }
    return tuple(sorted(wanted & set(made)))


def equations_of(program: Program, task: Task) -> tuple[Equation, ...]:
    """Returns the equations of a task, in program order."""
    wanted = set(task.equations)
    return tuple(e for e in program.body.equations if e.index in wanted)


def verify_cut(found: Cut) -> None:
    """Checks the tasks of a program against the program.

    Every equation that a result depends on must run in a task. An equation that is not
    free must run in exactly one task, unless it is a recomputed forward equation. A
    task may read inputs of the program, and values of tasks that precede it in every
    schedule.

    Raises:
      GraphError: a check failed; the message names the problem.
    """
    for problem in _problems(found):
        raise GraphError(f"the cut into {found.stages} stages is wrong: {problem}.")


def _problems(found: Cut) -> Iterator[str]:
    yield from _missing(found)
    for task in found.tasks.values():
        yield from _reads(found, task.key)


def _missing(found: Cut) -> Iterator[str]:
    flow = found.parts.flow
    runs = Counter(i for t in found.tasks.values() for i in t.equations)
    again = {
        i
        for t in found.tasks.values()
        if t.key.phase is Phase.FORWARD
        for i in t.equations
    }
    for index, eqn in flow.equations.items():
        alone = index not in flow.free and index not in again
        if index in found.parts.part and not runs[index]:
            yield f"equation {index} ({eqn.primitive}) is in no task"
        if alone and runs[index] > 1:
            yield f"equation {index} ({eqn.primitive}) is in {runs[index]} tasks"
    for value in found.program.body.outputs:
        maker = flow.maker.get(value) if isinstance(value, int) else None
        if maker is not None and not any(
            value in t.outputs for t in found.tasks.values()
        ):
            yield f"result {value} leaves no task"


def _reads(found: Cut, key: TaskKey) -> Iterator[str]:
    flow, task = found.parts.flow, found.tasks[key]
    known = {v for v, _ in task.inputs} | set(found.program.body.inputs)
    for index in task.equations:
        eqn = flow.equations[index]
        for value in reads(eqn):
            if value not in known:
                yield f"{key} reads value {value} before it is made"
        known.update(eqn.outputs)
    for value in task.outputs:
        if value not in known:
            yield f"{key} does not make its output {value}"
    for value, maker in task.inputs:
        if maker is None:
            continue
        if maker not in found.tasks or value not in found.tasks[maker].outputs:
            yield f"{key} reads value {value}, which {maker} does not hand out"
        elif not always_before(maker, key):
            yield f"{key} waits for value {value} of {maker}, which comes later"


def always_before(one: TaskKey, other: TaskKey) -> bool:
    """Whether a task of a microbatch precedes another task in every schedule."""
    return _order(one) < _order(other)


def _order(key: TaskKey) -> tuple[int, int, int]:
    match key.phase:
        case Phase.FORWARD:
            return 0, key.number, 0
        case Phase.BACKWARD | Phase.BACKWARD_INPUT:
            return 1, -key.number, 0
        case Phase.BACKWARD_WEIGHT:
            return 1, -key.number, 1
        case _:
            return 2, key.number, key.stage
