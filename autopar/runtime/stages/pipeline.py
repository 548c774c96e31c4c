"""A pipeline on devices: issues a step's tasks, and moves values between stages."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autopar.runtime.stages.order import Issue
from autopar.runtime.stages.stage import (
    Stage,
    TaskCode,
    finish_code,
    task_code,
    zeros_code,
)
from autopar_passes.stages.cut import Cut, Phase, TaskKey

# Value of one microbatch, or (microbatch -1) of the step, on a stage.
_STEP = -1


@dataclasses.dataclass(frozen=True, slots=True)
class _Send:
    """Values that a task sends to a stage, and where they go there."""

    stage: int
    values: tuple[int, ...]
    shardings: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """A task with all that a step does around it, resolved once.

    Attributes:
      code: the compiled task.
      of_step: for each input, whether it is the step's and not a microbatch's.
      sends: what goes to other stages.
      last: the inputs that no later task of a microbatch reads.
    """

    code: TaskCode
    of_step: tuple[bool, ...]
    sends: tuple[_Send, ...]
    last: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crossed:
    """How values of microbatches become values of the step.

    Attributes:
      scales: value -> what the sum over microbatches is multiplied by.
      same: values that are equal in all microbatches; the last one's is taken.
      rows: value -> a function of the values of all microbatches.
    """

    scales: Mapping[int, float]
    same: frozenset[int]
    rows: Mapping[int, Callable[[list[Any]], Any]]


class Pipeline:
    """The tasks of a cut on stages; runs a step of them."""

    def __init__(
        self,
        cut: Cut,
        stages: Sequence[Stage],
        order: Sequence[Issue],
        crossed: Crossed,
        *,
        donate: bool = True,
    ) -> None:
        """Makes the code of all tasks; nothing is compiled yet.

        Args:
          cut: the tasks.
          stages: the stages on their devices.
          order: the tasks of all microbatches, in the order of issue.
          crossed: how microbatches are put together.
          donate: whether a step takes over the memory of its state.
        """
        self.cut = cut
        self.stages = tuple(stages)
        self.order = tuple(order)
        self.crossed = crossed
        self.microbatches = 1 + max(issue.microbatch for issue in order)
        self._donated = self._donations() if donate else {}
        self.calls = {key: self._call(key) for key in cut.tasks}
        self._sums = self._summed()
        self._zeros = {
            s: zeros_code(self.stages[s], values) for s, values in self._sums.items()
        }
        self._finish = {
            s: finish_code(self.stages[s], {v: crossed.scales[v] for v in values})
            for s, values in self._sums.items()
        }
        self._copies = self._shared_state()

    def _summed(self) -> dict[int, tuple[int, ...]]:
        """Stage -> the values that it adds up."""
        out: dict[int, dict[int, None]] = defaultdict(dict)
        for key, call in self.calls.items():
            out[key.stage].update(dict.fromkeys(call.code.accumulated))
        return {s: tuple(values) for s, values in out.items() if values}

    def _of_step(self, value: int, maker: TaskKey | None) -> bool:
        """Whether what a task of a microbatch reads is the same for all of them."""
        return maker is None and value not in self.cut.parts.flow.batch

    def _call(self, key: TaskKey) -> _Call:
        task, stage = self.cut.tasks[key], self.stages[key.stage]
        code = task_code(
            stage,
            task,
            accumulated=[v for v in task.outputs if v in self.crossed.scales],
            also=self._read_by_microbatches(key),
            donated=self._donated.get(key, ()),
        )
        update = key.phase is Phase.UPDATE
        of_step = tuple(update or self._of_step(v, m) for v, m in task.inputs)
        return _Call(code, of_step, self._sends(key), self._last(key))

    def _read_by_microbatches(self, key: TaskKey) -> frozenset[int]:
        """The values of a task that tasks of the same microbatch read."""
        return frozenset(
            value
            for other in self.cut.tasks.values()
            if other.key.phase is not Phase.UPDATE
            for value, maker in other.inputs
            if maker == key
        )

    def _sends(self, key: TaskKey) -> tuple[_Send, ...]:
        """What a task sends: values that tasks of other stages read."""
        out: dict[int, dict[int, None]] = defaultdict(dict)
        for other in self.cut.tasks.values():
            once = other.key.phase is Phase.UPDATE
            if other.key.stage == key.stage or once != (key.phase is Phase.UPDATE):
                continue
            for value, maker in other.inputs:
                if maker == key:
                    out[other.key.stage][value] = None
        return tuple(self._send(s, tuple(values)) for s, values in out.items())

    def _send(self, stage: int, values: tuple[int, ...]) -> _Send:
        shardings = tuple(self.stages[stage].sharding(v) for v in values)
        return _Send(stage, values, shardings)

    def _last(self, key: TaskKey) -> tuple[int, ...]:
        """The inputs of a microbatch that no later task of its stage reads."""
        if key.phase is Phase.UPDATE:
            return ()
        keys = [k for k in self.cut.tasks if k.stage == key.stage]
        later = keys[keys.index(key) + 1 :]
        read = {
            v
            for k in later
            if k.phase is not Phase.UPDATE
            for v, _ in self.cut.tasks[k].inputs
        }
        mine = self.cut.tasks[key]
        ends = [v for v, m in mine.inputs if not self._of_step(v, m)]
        return tuple(v for v in ends if v not in read)

    def _donations(self) -> dict[TaskKey, tuple[int, ...]]:
        """State whose next value a task makes, and that nothing reads later."""
        carried = self.cut.parts.flow.carried
        out: dict[TaskKey, tuple[int, ...]] = {}
        for stage in range(len(self.stages)):
            tasks = self.cut.of_stage(stage)
            for place, task in enumerate(tasks):
                if task.key.phase is not Phase.UPDATE:
                    continue
                later = {v for t in tasks[place + 1 :] for v, _ in t.inputs}
                out[task.key] = tuple(
                    v
                    for v, maker in task.inputs
                    if maker is None
                    and carried.get(v) in task.outputs
                    and v not in later
                    and self.cut.owners[v] == stage
                )
        return out

    def _shared_state(self) -> list[tuple[int, _Send]]:
        """Owner -> what it sends at the beginning: inputs that other stages read."""
        wanted: dict[tuple[int, int], dict[int, None]] = defaultdict(dict)
        for task in self.cut.tasks.values():
            for value, maker in task.inputs:
                if maker is None and value in self.cut.owners:
                    owner = self.cut.owners[value]
                    if owner != task.key.stage:
                        wanted[owner, task.key.stage][value] = None
        return [
            (owner, self._send(stage, tuple(values)))
            for (owner, stage), values in wanted.items()
        ]

    def compile(self) -> None:
        """Compiles all tasks."""
        for call in self.calls.values():
            call.code.compile()
        for code in self._zeros.values():
            code.lower().compile()

    def run(
        self, step: Mapping[int, Any], microbatches: Sequence[Mapping[int, Any]]
    ) -> dict[int, Any]:
        """Runs one step.

        Args:
          step: value of each input that is not split -> its array, on its owner.
          microbatches: for each, value of each split input -> its array, on its owner.

        Returns the values that leave the step.
        """
        run = _Run(self, step, microbatches)
        for issue in self.order:
            run.task(self.calls[issue.key], issue.microbatch)
        run.cross()
        for key, call in self.calls.items():
            if key.phase is Phase.UPDATE:
                run.task(call, _STEP)
        return run.results()

    def copies(self) -> list[tuple[int, _Send]]:
        """What owners of inputs send to others, per step or microbatch."""
        return self._copies

    def zeros(self) -> dict[int, list[Any]]:
        """Running sums of each stage, at zero."""
        return {stage: code() for stage, code in self._zeros.items()}

    def finished(self, stage: int, totals: Sequence[Any]) -> list[Any]:
        """The values of the step that running sums are of."""
        return self._finish[stage](*totals)

    def sums_of(self, stage: int) -> tuple[int, ...]:
        """The values that a stage adds up."""
        return self._sums.get(stage, ())


class _Run:
    """One step: the arrays of each stage by microbatch."""

    def __init__(
        self,
        pipeline: Pipeline,
        step: Mapping[int, Any],
        microbatches: Sequence[Mapping[int, Any]],
    ) -> None:
        self.pipeline = pipeline
        stages, owners = range(len(pipeline.stages)), pipeline.cut.owners
        self.step: list[dict[int, Any]] = [{} for _ in stages]
        self.micro: list[list[dict[int, Any]]] = [
            [{} for _ in microbatches] for _ in stages
        ]
        for value, array in step.items():
            self.step[owners[value]][value] = array
        for number, given in enumerate(microbatches):
            for value, array in given.items():
                self.micro[owners[value]][number][value] = array
        for owner, send in pipeline.copies():
            self.copy(self.step[owner], self.step[send.stage], send)
            for number in range(len(microbatches)):
                self.copy(
                    self.micro[owner][number], self.micro[send.stage][number], send
                )
        self.sums = {
            s: dict(zip(pipeline.sums_of(s), arrays, strict=True))
            for s, arrays in pipeline.zeros().items()
        }
        self.rows: dict[int, list[Any]] = defaultdict(list)

    def copy(
        self, source: Mapping[int, Any], target: dict[int, Any], send: _Send
    ) -> None:
        """Moves values from one stage to another, in the layout of the other."""
        pairs = [
            (v, source[v], s)
            for v, s in zip(send.values, send.shardings, strict=True)
            if v in source
        ]
        if pairs:
            values, arrays, shardings = zip(*pairs, strict=True)
            moved = jax.device_put(list(arrays), list(shardings))
            target.update(zip(values, moved, strict=True))

    def task(self, call: _Call, number: int) -> None:
        """Issues one task, and sends what others wait for."""
        code = call.code
        stage = code.task.key.stage
        step = self.step[stage]
        micro = step if number == _STEP else self.micro[stage][number]
        arguments = [
            step[v] if whole else micro[v]
            for v, whole in zip(code.inputs, call.of_step, strict=True)
        ]
        if code.accumulated:
            sums = self.sums[stage]
            arguments.extend(sums[v] for v in code.accumulated)
        made = code.function(*arguments)
        count = len(code.outputs)
        micro.update(zip(code.outputs, made, strict=False))
        if code.accumulated:
            self.sums[stage].update(zip(code.accumulated, made[count:], strict=True))
        for send in call.sends:
            target = self.step if number == _STEP else None
            place = target[send.stage] if target else self.micro[send.stage][number]
            self.copy(micro, place, send)
        for value in call.last:
            micro.pop(value, None)
        for value in code.donated:
            step.pop(value, None)

    def cross(self) -> None:
        """Puts the values of microbatches together."""
        crossed, owners = self.pipeline.crossed, self.pipeline.cut
        for stage, totals in self.sums.items():
            values = tuple(totals)
            made = self.pipeline.finished(stage, list(totals.values()))
            self.step[stage].update(zip(values, made, strict=True))
        self.sums = {}
        for stage, numbers in enumerate(self.micro):
            for value in crossed.same:
                if value in numbers[-1]:
                    self.step[stage][value] = numbers[-1][value]
            for value, together in crossed.rows.items():
                if all(value in arrays for arrays in numbers):
                    found = [arrays[value] for arrays in numbers]
                    self.step[stage][value] = together(found)
        self.micro = []
        self.send_crossings(owners)

    def send_crossings(self, cut: Cut) -> None:
        """Moves what updates of other stages read of the sums."""
        wanted: dict[tuple[int, int], dict[int, None]] = defaultdict(dict)
        for task in cut.tasks.values():
            if task.key.phase is not Phase.UPDATE:
                continue
            for value, maker in task.inputs:
                if maker is None or maker.phase is Phase.UPDATE:
                    continue
                if value not in self.step[task.key.stage]:
                    wanted[maker.stage, task.key.stage][value] = None
        for (source, target), values in wanted.items():
            shardings = tuple(self.pipeline.stages[target].sharding(v) for v in values)
            send = _Send(target, tuple(values), shardings)
            self.copy(self.step[source], self.step[target], send)

    def results(self) -> dict[int, Any]:
        """The values that leave the step, each from the stage that made it."""
        out: dict[int, Any] = {}
        for value in self.pipeline.cut.program.body.outputs:
            if not isinstance(value, int) or value in out:
                continue
            made = self.maker_of(value)
            for stage in [made, *range(len(self.step))]:
                if value in self.step[stage]:
                    out[value] = self.step[stage][value]
                    break
        return out

    def maker_of(self, value: int) -> int:
        """The stage that makes a value, or owns it."""
        for task in self.pipeline.cut.tasks.values():
            if value in task.outputs:
                return task.key.stage
        return self.pipeline.cut.owners.get(value, 0)
