"""A pipeline on devices: issues a step's tasks, and moves values between stages."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from autopar.errors import StageError
from autopar.runtime.stages.order import Issue, run_in_threads
from autopar.runtime.stages.recording import Recorder
from autopar.runtime.stages.stage import (
    RESULT,
    Sent,
    Stage,
    TaskCode,
    finish_code,
    layout_code,
    task_code,
    zeros_code,
)
from autopar_passes.stages.cut import Cut, Phase, Task, TaskKey


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crossed:
    """How values of microbatches become values of the step.

    Attributes:
      scales: value -> what the sum over microbatches is multiplied by.
      same: values that are equal in all microbatches; the last one's is taken.
      rows: value -> a function of the values of all microbatches, in order.
    """

    scales: Mapping[int, float]
    same: frozenset[int]
    rows: Mapping[int, Callable[[list[Any]], Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """A task with what a step does around it, resolved once.

    Attributes:
      code: the task as code.
      of_step: for each input, whether it is the step's and not a microbatch's.
      last: the inputs of a microbatch that no later task of the stage reads.
    """

    code: TaskCode
    of_step: tuple[bool, ...]
    last: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Copy:
    """What a stage sends of what it has: inputs of the step, or crossings.

    Attributes:
      stage: the stage.
      sent: what goes where.
      layout: lays the values as they are sent.
    """

    stage: int
    sent: Sent
    layout: Any


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
        wait_s: Callable[[TaskKey], float] | None = None,
    ) -> None:
        """Makes the code of all tasks; nothing is compiled yet.

        Args:
          cut: the tasks.
          stages: the stages on their devices.
          order: the tasks of all microbatches, in the order of issue.
          crossed: how microbatches are put together.
          donate: whether a step takes over the memory of its state.
          wait_s: seconds that a task takes at least, for experiments with devices that
            are slower than those at hand.
        """
        self.recorder: Recorder | None = None
        # Seconds in which the last step issued the tasks of its microbatches.
        self.issuing_s = 0.0
        # CPUs run small programs and callbacks where they are issued: a thread for
        # each stage keeps one from waiting for another.
        platform = stages[0].mesh.devices.flat[0].platform
        self.threads = (
            ThreadPoolExecutor(len(stages), "stage") if platform == "cpu" else None
        )
        self.by_stage = [
            [issue for issue in order if issue.key.stage == stage]
            for stage in range(len(stages))
        ]
        self.wait_s = wait_s
        self.cut = cut
        self.stages = tuple(stages)
        self.order = tuple(order)
        self.crossed = crossed
        leaving = cut.program.body.outputs
        self.outputs = frozenset(v for v in leaving if isinstance(v, int))
        self.microbatches = 1 + max(issue.microbatch for issue in order)
        self._given = {v: i for i, v in cut.parts.flow.carried.items()}
        self._donated = self._donations() if donate else {}
        self.calls = {key: self._call(task) for key, task in cut.tasks.items()}
        self.sums = self._summed()
        self.held = {s: self._held(s) for s in self.sums}
        self.finish_sent = {
            s: self._crossing_sends(s, values) for s, values in self.sums.items()
        }
        self.zeros = {
            s: zeros_code(self.stages[s], values) for s, values in self.sums.items()
        }
        self.finish = {
            s: finish_code(
                self.stages[s],
                {v: crossed.scales[v] for v in values},
                self.held[s],
                self.finish_sent[s],
            )
            for s, values in self.sums.items()
        }
        self.copies = tuple(self._copied(cut.owners.items(), self._input_readers()))
        self.late_copies = self._late_copies()
        self.waits_for = {
            key: tuple({m for _, m in task.inputs if m and m.stage != key.stage})
            for key, task in cut.tasks.items()
        }

    # What each task takes and gives.

    def _call(self, task: Task) -> _Call:
        key = task.key
        summed = tuple(v for v in task.outputs if v in self.crossed.scales)
        code = task_code(
            self.stages[key.stage],
            task,
            accumulated=summed,
            outputs=self._kept(task),
            sent=self._sends(task),
            received=self._received(task),
            donated=self._donated.get(key, ()),
        )
        update = key.phase is Phase.UPDATE
        batch = self.cut.parts.flow.batch
        of_step = tuple(
            update or (maker is None and v not in batch) for v, maker in task.inputs
        )
        return _Call(code, of_step, self._last(task))

    def _readers(self, task: Task, stage: int) -> set[int]:
        """What tasks of a stage read of a task, microbatch by microbatch or once."""
        once = task.key.phase is Phase.UPDATE
        return {
            value
            for other in self.cut.of_stage(stage)
            if (other.key.phase is Phase.UPDATE) is once
            for value, maker in other.inputs
            if maker == task.key
        }

    def _kept(self, task: Task) -> tuple[int, ...]:
        """The outputs of a task that stay on its stage as they are."""
        read = self._readers(task, task.key.stage)
        if task.key.phase is not Phase.UPDATE:
            read |= {*self.crossed.same, *self.crossed.rows}
        return tuple(v for v in task.outputs if v in read)

    def _sends(self, task: Task) -> tuple[Sent, ...]:
        """What a task sends to the tasks of other stages."""
        out: list[Sent] = []
        for stage in range(len(self.stages)):
            if stage == task.key.stage:
                continue
            read = self._readers(task, stage)
            values = tuple(v for v in task.outputs if v in read)
            if values:
                out.append(self._sent(task.key.stage, stage, values))
        if task.key.phase is Phase.UPDATE:
            out.extend(self._leaving(task.key.stage, task.outputs))
        return tuple(out)

    def _leaving(self, stage: int, values: Iterable[int]) -> Iterator[Sent]:
        """The values that leave the step, as they lie between steps."""
        outputs = self.outputs
        found = tuple(v for v in values if v in outputs)
        if found:
            where = [self._place(stage, v) for v in found]
            source, target = zip(*where, strict=True)
            yield Sent(RESULT, found, source, target)

    def _place(self, stage: int, value: int) -> tuple[Any, Any]:
        """Where a result lies on the stage that makes it, and between steps."""
        given = self._given.get(value)
        if given is None:
            where = self.stages[stage].home(value)
            return where, where
        owner = self.cut.owners[given]
        home = self.stages[owner].sharding(given)
        if owner == stage:
            return home, home
        return self.stages[stage].home(value), home

    def _sent(self, source: int, target: int, values: Sequence[int]) -> Sent:
        here, there = self.stages[source], self.stages[target]
        return Sent(
            target,
            tuple(values),
            tuple(here.wire(v, there) for v in values),
            tuple(there.wire(v, here) for v in values),
        )

    def _received(self, task: Task) -> dict[int, Any]:
        """Inputs of a task that come from other stages -> where they lie then."""
        here = self.stages[task.key.stage]
        out: dict[int, Any] = {}
        for value, maker in task.inputs:
            source = maker.stage if maker else self.cut.owners[value]
            if source != task.key.stage:
                out[value] = here.wire(value, self.stages[source])
        return out

    def _last(self, task: Task) -> tuple[int, ...]:
        """The inputs of a microbatch that no later task of its stage reads."""
        if task.key.phase is Phase.UPDATE:
            return ()
        tasks = self.cut.of_stage(task.key.stage)
        later = tasks[tasks.index(task) + 1 :]
        read = {v for t in later for v, _ in t.inputs}
        batch = self.cut.parts.flow.batch
        mine = {v for v, maker in task.inputs if maker is not None or v in batch}
        return tuple(v for v in mine if v not in read)

    def _donations(self) -> dict[TaskKey, tuple[int, ...]]:
        """State whose next value a task makes, and that nothing reads later."""
        carried, owners = self.cut.parts.flow.carried, self.cut.owners
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
                    and owners[v] == stage
                )
        return out

    # What goes from the microbatches to what runs once.

    def _summed(self) -> dict[int, tuple[int, ...]]:
        """Stage -> the values that it adds up."""
        out: dict[int, dict[int, None]] = defaultdict(dict)
        for key, call in self.calls.items():
            out[key.stage].update(dict.fromkeys(call.code.accumulated))
        return {s: tuple(values) for s, values in out.items() if values}

    def _crossing_readers(self, stage: int) -> dict[int, set[int]]:
        """Crossing that a stage makes -> the stages whose updates read it."""
        out: dict[int, set[int]] = defaultdict(set)
        for task in self.cut.tasks.values():
            if task.key.phase is not Phase.UPDATE:
                continue
            for value, maker in task.inputs:
                micro = maker is not None and maker.phase is not Phase.UPDATE
                if micro and maker.stage == stage:
                    out[value].add(task.key.stage)
        return out

    def _held(self, stage: int) -> tuple[int, ...]:
        """The sums that updates of the same stage read."""
        readers = self._crossing_readers(stage)
        return tuple(v for v in self.sums[stage] if stage in readers.get(v, ()))

    def _crossing_sends(self, stage: int, values: Sequence[int]) -> tuple[Sent, ...]:
        """The sums that go to other stages, and those that leave the step."""
        readers = self._crossing_readers(stage)
        out: list[Sent] = []
        for target in range(len(self.stages)):
            wanted = [v for v in values if target in readers.get(v, ())]
            if target != stage and wanted:
                out.append(self._sent(stage, target, wanted))
        out.extend(self._leaving(stage, values))
        return tuple(out)

    def _input_readers(self) -> dict[int, set[int]]:
        """Input of the step -> the stages that read it."""
        out: dict[int, set[int]] = defaultdict(set)
        for task in self.cut.tasks.values():
            for value, maker in task.inputs:
                if maker is None:
                    out[value].add(task.key.stage)
        return out

    def _copied(
        self, owners: Iterable[tuple[int, int]], readers: Mapping[int, set[int]]
    ) -> list[_Copy]:
        """What goes from the stages that have values to others that read them."""
        wanted: dict[tuple[int, int], list[int]] = defaultdict(list)
        for value, owner in owners:
            for stage in sorted(readers.get(value, set()) - {owner}):
                wanted[owner, stage].append(value)
        out: list[_Copy] = []
        for (owner, stage), values in wanted.items():
            sent = self._sent(owner, stage, values)
            out.append(_Copy(owner, sent, layout_code(sent.source)))
        return out

    def _late_copies(self) -> tuple[_Copy, ...]:
        """Crossings that are not summed and that updates of other stages read."""
        out: list[_Copy] = []
        for stage in range(len(self.stages)):
            readers = self._crossing_readers(stage)
            rest = {v: r for v, r in readers.items() if v not in self.crossed.scales}
            out.extend(self._copied([(v, stage) for v in rest], rest))
        return tuple(out)

    def unsummed(self, step: Sequence[Mapping[int, Any]]) -> dict[int, Any]:
        """The results of microbatches that are not summed, as they lie afterwards."""
        out: dict[int, Any] = {}
        outputs = self.outputs
        for value in outputs & {*self.crossed.same, *self.crossed.rows}:
            for stage, arrays in enumerate(step):
                if value in arrays and value not in out:
                    if value in self._given:
                        _, where = self._place(stage, value)
                        out[value] = jax.device_put(arrays[value], where)
                    else:
                        out[value] = arrays[value]
        return out

    def compile(self) -> None:
        """Compiles all tasks."""
        for call in self.calls.values():
            call.code.compile()

    def clear_cache(self) -> None:
        """Frees compiled code."""
        for call in self.calls.values():
            call.code.function.clear_cache()
        for code in (*self.zeros.values(), *self.finish.values()):
            code.clear_cache()

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
        begin = time.perf_counter()
        if self.threads is None:
            for issue in self.order:
                run.task(self.calls[issue.key], issue.microbatch)
        else:
            run_in_threads(self.threads, self.by_stage, run.issue, self.waits_for)
        self.issuing_s = time.perf_counter() - begin
        run.cross()
        for key, call in self.calls.items():
            if key.phase is Phase.UPDATE:
                run.update(call)
        return run.results


@contextlib.contextmanager
def told(key: TaskKey, number: int) -> Generator[None]:
    """Says which task an error came from.

    Raises:
      StageError: something is raised inside.
    """
    try:
        yield
    except Exception as error:
        which = "" if number < 0 else f" of microbatch {number}"
        raise StageError(
            f"stage {key.stage}, {key.phase.value}{which} (part {key.number}): "
            f"{type(error).__name__}: {error}"
        ) from error


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
        for copy in pipeline.copies:
            self.copy(copy, self.step)
            for number in range(len(microbatches)):
                self.copy(copy, [arrays[number] for arrays in self.micro])
        self.sums = {
            s: dict(zip(pipeline.sums[s], code(), strict=True))
            for s, code in pipeline.zeros.items()
        }
        self.results = {v: step[v] for v in pipeline.outputs if v in step}

    def copy(self, copy: _Copy, places: Sequence[dict[int, Any]]) -> None:
        """Sends what a stage has to another one."""
        source, sent = places[copy.stage], copy.sent
        here = [k for k, v in enumerate(sent.values) if v in source]
        if len(here) == len(sent.values):
            laid = copy.layout(*(source[v] for v in sent.values))
            self.send(sent, laid, places[sent.stage])
            return
        for k in here:
            moved = jax.device_put(source[sent.values[k]], sent.target[k])
            places[sent.stage][sent.values[k]] = moved

    def send(self, sent: Sent, arrays: Sequence[Any], place: dict[int, Any]) -> None:
        """Moves arrays to another stage, or to where they lie between steps."""
        moved = jax.device_put(list(arrays), list(sent.target))
        place = self.results if sent.stage == RESULT else place
        place.update(zip(sent.values, moved, strict=True))

    def issue(self, issue: Issue) -> None:
        """Issues a task of the schedule."""
        self.task(self.pipeline.calls[issue.key], issue.microbatch)

    def task(self, call: _Call, number: int) -> None:
        """Issues a task of a microbatch, and sends what others wait for."""
        code, stage = call.code, call.code.task.key.stage
        step, micro = self.step[stage], self.micro[stage][number]
        arguments = [
            step[v] if whole else micro[v]
            for v, whole in zip(code.inputs, call.of_step, strict=True)
        ]
        if code.accumulated:
            sums = self.sums[stage]
            arguments.extend(sums[v] for v in code.accumulated)
        begin, issued = time.perf_counter(), self.now()
        with told(code.task.key, number):
            made = code.function(*arguments)
        if (wait_s := self.pipeline.wait_s) is not None:
            jax.block_until_ready(made)
            rest = begin + wait_s(code.task.key) - time.perf_counter()
            time.sleep(max(0.0, rest))
        self.record(code, number, issued, made)
        rest = self.hand_out(code, made, micro, lambda s: self.micro[s][number])
        if code.accumulated:
            self.sums[stage].update(zip(code.accumulated, made[rest:], strict=True))
        for value in call.last:
            micro.pop(value, None)

    def now(self) -> float:
        """Seconds since the step began, if somebody watches."""
        recorder = self.pipeline.recorder
        return 0.0 if recorder is None else recorder.now()

    def record(self, code: TaskCode, number: int, issued_s: float, made: Any) -> None:
        """Tells whoever watches that a task was issued."""
        if (recorder := self.pipeline.recorder) is not None:
            makers = {m for _, m in code.task.inputs if m is not None}
            recorder.issued(code.task.key, number, issued_s, made, tuple(makers))

    def hand_out(
        self,
        code: TaskCode,
        made: Sequence[Any],
        own: dict[int, Any],
        other: Callable[[int], dict[int, Any]],
    ) -> int:
        """Keeps and sends results; returns where the running sums begin."""
        count = len(code.outputs)
        own.update(zip(code.outputs, made, strict=False))
        for sent in code.sent:
            end = count + len(sent.values)
            place = other(sent.stage) if sent.stage != RESULT else {}
            self.send(sent, made[count:end], place)
            count = end
        return count

    def update(self, call: _Call) -> None:
        """Issues a task that runs once."""
        code, step = call.code, self.step[call.code.task.key.stage]
        issued = self.now()
        with told(code.task.key, -1):
            made = code.function(*(step[v] for v in code.inputs))
        self.record(code, -1, issued, made)
        for value in code.donated:
            del step[value]
        self.hand_out(code, made, step, lambda s: self.step[s])

    def cross(self) -> None:
        """Puts the values of microbatches together."""
        pipeline, crossed = self.pipeline, self.pipeline.crossed
        for stage, totals in self.sums.items():
            made = pipeline.finish[stage](*totals.values())
            held = pipeline.held[stage]
            self.step[stage].update(zip(held, made, strict=False))
            count = len(held)
            for sent in pipeline.finish_sent[stage]:
                end = count + len(sent.values)
                place = self.step[sent.stage] if sent.stage != RESULT else {}
                self.send(sent, made[count:end], place)
                count = end
        self.sums = {}
        for stage, numbers in enumerate(self.micro):
            self.step[stage].update(
                (v, numbers[-1][v]) for v in crossed.same if v in numbers[-1]
            )
            for value, together in crossed.rows.items():
                if all(value in arrays for arrays in numbers):
                    found = [arrays[value] for arrays in numbers]
                    self.step[stage][value] = together(found)
        self.micro = []
        for copy in pipeline.late_copies:
            self.copy(copy, self.step)
        self.results.update(pipeline.unsummed(self.step))
