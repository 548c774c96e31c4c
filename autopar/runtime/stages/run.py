"""Runs one step of a pipeline: issues tasks, and moves values between stages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.runtime import placement
from autopar.runtime.gradients.sums import State
from autopar.runtime.stages.codecs import CodecStep
from autopar.runtime.stages.order import Issue, run_in_threads
from autopar.runtime.stages.outcome import Ran, told
from autopar.runtime.stages.pipeline import Call, Copy, Pipeline
from autopar.runtime.stages.stage import RESULT, Sent, TaskCode
from autopar.runtime.stages.transport import Route, Tag, on_device
from autopar_passes.stages.cut import Phase, TaskKey

# Values from other processes are asked for so many tasks ahead of the one that is
# issued, so that they travel while earlier tasks run.
_AHEAD = 2


def run_step(
    pipeline: Pipeline,
    step: Mapping[int, Any],
    microbatches: Sequence[Mapping[int, Any]],
    codecs: State | None = None,
) -> Ran:
    """Runs one step.

    Args:
      pipeline: the tasks.
      step: value of each input that is not split -> its array, on its owner. Of owners
        in other processes any placeholder.
      microbatches: for each, value of each split input -> its array, on its owner.
      codecs: the state of the codecs, where the pipeline has any.

    Raises:
      StageError: a task failed, or another process has ended.
      PlanError: another process has failed.
    """
    run = _Run(pipeline, len(microbatches))
    if pipeline.codecs is not None:
        assert codecs is not None
        run.codecs = CodecStep(pipeline.codecs, codecs, pipeline.links)
    links = pipeline.links
    with contextlib.nullcontext() if links is None else links.together(run.give_up):
        run.begin(step, microbatches)
        begin = time.perf_counter()
        run.issue_all()
        pipeline.issuing_s = time.perf_counter() - begin
    run.cross()
    for key, call in pipeline.calls.items():
        if key.phase is Phase.UPDATE:
            run.update(call)
    told = {**run.results, **run.told}
    return Ran(run.results, told, run.noise, run.codecs)


class _Run:
    """One step: the arrays of each stage by microbatch."""

    def __init__(self, pipeline: Pipeline, microbatches: int) -> None:
        self.pipeline = pipeline
        stages = range(len(pipeline.stages))
        self.step: list[dict[int, Any]] = [{} for _ in stages]
        self.micro: list[list[dict[int, Any]]] = [
            [{} for _ in range(microbatches)] for _ in stages
        ]
        self.sums: dict[int, dict[int, Any]] = {}
        self.results: dict[int, Any] = {}
        self.told: dict[int, Any] = {}
        # What tasks have measured of gradients, of each microbatch.
        self.noise: dict[TaskKey, list[Any]] = {key: [] for key in pipeline.noise}
        # Of other processes: what has been asked for, and what they were handed.
        self.asked: set[Tag] = set()
        self.handed: set[Tag] = set()
        self.reached = [0 for _ in stages]
        self.codecs: CodecStep | None = None

    def begin(
        self, step: Mapping[int, Any], microbatches: Sequence[Mapping[int, Any]]
    ) -> None:
        """Puts the inputs on the stages that read them, and starts the sums."""
        pipeline, owners = self.pipeline, self.pipeline.cut.owners
        for value, array in step.items():
            self.step[owners[value]][value] = array
        for number, given in enumerate(microbatches):
            for value, array in given.items():
                self.micro[owners[value]][number][value] = array
        for k, copy in enumerate(pipeline.copies):
            self.copy(("input", k), copy, self.step, step)
            for number, given in enumerate(microbatches):
                places = [arrays[number] for arrays in self.micro]
                self.copy(("input", k, number), copy, places, given)
        self.sums = {
            s: dict(zip(pipeline.sums[s], code(), strict=True))
            for s, code in pipeline.zeros.items()
            if pipeline.here(s)
        }
        for value in pipeline.outputs & step.keys():
            where = pipeline.stages[owners[value]].sharding(value)
            self.leave("input", owners[value], value, step[value], where, where)

    def issue_all(self) -> None:
        """Issues the tasks of all microbatches of this process's stages."""
        pipeline = self.pipeline
        if pipeline.threads is None:
            for issue in pipeline.order:
                if pipeline.here(issue.key.stage):
                    self.issue(issue)
            return
        own = [k for k in range(len(pipeline.stages)) if pipeline.here(k)]
        by_stage = [pipeline.by_stage[k] for k in own]
        run_in_threads(pipeline.threads, by_stage, self.issue, pipeline.waits_here)

    # What moves between stages.

    def copy(
        self,
        tag: Tag,
        copy: Copy,
        places: Sequence[dict[int, Any]],
        present: Collection[int],
    ) -> None:
        """Sends what a stage has to another one.

        Args:
          tag: names this transfer.
          copy: what is sent.
          places: the arrays of each stage.
          present: the values that there are; others are not of these places.
        """
        source, sent = places[copy.stage], copy.sent
        found = [k for k, v in enumerate(sent.values) if v in present]
        if not found:
            return
        if len(found) < len(sent.values):
            sent = Sent(
                sent.stage,
                tuple(sent.values[k] for k in found),
                tuple(sent.source[k] for k in found),
                tuple(sent.target[k] for k in found),
            )
        arrays = None
        if self.pipeline.here(copy.stage):
            arrays = [source[v] for v in sent.values]
            if len(found) == len(copy.sent.values):
                arrays = copy.layout(*arrays)
            elif not self.pipeline.here(sent.stage):
                arrays = jax.device_put(arrays, list(sent.source))
        self.send(tag, copy.stage, sent, arrays, places[sent.stage])

    def send(
        self,
        tag: Tag,
        stage: int,
        sent: Sent,
        arrays: Sequence[Any] | None,
        place: dict[int, Any],
    ) -> None:
        """Moves arrays of a stage to another, or to where they lie between steps.

        Args:
          tag: names this transfer.
          stage: where the arrays are.
          sent: what goes where.
          arrays: the arrays; None where the stage runs in another process.
          place: the arrays of the other stage.
        """
        pipeline = self.pipeline
        if sent.stage == RESULT:
            self.leave_all(tag, stage, sent, arrays)
        elif pipeline.here(stage) and pipeline.here(sent.stage):
            assert arrays is not None
            moved = jax.device_put(list(arrays), list(sent.target))
            place.update(zip(sent.values, moved, strict=True))
        elif pipeline.here(stage):
            assert arrays is not None
            assert pipeline.links is not None
            self.handed.add(tag)
            pipeline.links.offer(tag, arrays, self.routes(sent))
        elif pipeline.here(sent.stage):
            self.fetch(tag, stage, sent, place)

    def fetch(self, tag: Tag, stage: int, sent: Sent, place: dict[int, Any]) -> None:
        """Takes what a stage of another process sends."""
        links = self.pipeline.links
        assert links is not None
        self.asked.add(tag)
        process = self.pipeline.processes[stage]
        moved = links.fetch(process, tag, self.routes(sent))
        place.update(zip(sent.values, moved, strict=True))

    def routes(self, sent: Sent) -> list[Route]:
        """How the values of a transfer go to another process."""
        return [
            self.route(*way)
            for way in zip(sent.values, sent.source, sent.target, strict=True)
        ]

    def route(self, value: int, source: NamedSharding, target: NamedSharding) -> Route:
        """How a value goes to another process."""
        assert self.pipeline.links is not None
        found = self.struct(value)
        return self.pipeline.links.route(found.shape, found.dtype, source, target)

    def struct(self, value: int) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a value as it leaves its stage."""
        known = self.pipeline.cut.program.values[value]
        struct = jax.ShapeDtypeStruct(known.shape, known.dtype)
        together = self.pipeline.crossed.rows.get(value)
        if together is None or not self.crossing:
            return struct
        return jax.eval_shape(together, [struct] * self.pipeline.microbatches)

    @property
    def crossing(self) -> bool:
        """Whether microbatches have been put together."""
        return not self.micro

    def leave_all(
        self, tag: Tag, stage: int, sent: Sent, arrays: Sequence[Any] | None
    ) -> None:
        """Hands results of a stage to where they lie between steps."""
        if self.pipeline.links is None:
            assert arrays is not None
            moved = jax.device_put(list(arrays), list(sent.target))
            self.results.update(zip(sent.values, moved, strict=True))
            return
        for k, value in enumerate(sent.values):
            array = None if arrays is None else arrays[k]
            self.leave(tag, stage, value, array, sent.source[k], sent.target[k])

    def leave(
        self,
        tag: Any,
        stage: int,
        value: int,
        array: Any,
        source: NamedSharding,
        target: NamedSharding,
    ) -> None:
        """Hands a result to its owner, where it is state, and tells it to all."""
        pipeline = self.pipeline
        if pipeline.links is None:
            self.results[value] = (
                array if source == target else jax.device_put(array, target)
            )
            return
        owner = stage
        if value in pipeline.given:
            owner = pipeline.cut.owners[pipeline.given[value]]
        sent = Sent(owner, (value,), (source,), (target,))
        arrays = [array] if pipeline.here(stage) else None
        self.send(("result", tag, value), stage, sent, arrays, self.results)
        if not pipeline.here(owner):
            self.results[value] = placement.absent(self.struct(value), target)
        if value in pipeline.shown:
            self.told[value] = self.show(stage, value, array, source)

    def show(self, stage: int, value: int, array: Any, source: NamedSharding) -> Any:
        """A result on this process, whichever made it."""
        pipeline, links = self.pipeline, self.pipeline.links
        assert links is not None
        made = pipeline.processes[stage]
        if made != links.index:
            way = self.route(value, source, on_device(links.devices[links.index]))
            return links.fetch(made, ("shown", value, links.index), [way])[0]
        for process, device in enumerate(links.devices):
            if process != made:
                way = self.route(value, source, on_device(device))
                links.offer(("shown", value, process), [array], [way])
        return array

    # Tasks.

    def issue(self, issue: Issue) -> None:
        """Issues a task of the schedule."""
        if self.pipeline.links is not None:
            self.receive(issue.key.stage)
        self.task(self.pipeline.calls[issue.key], issue.microbatch)

    def receive(self, stage: int) -> None:
        """Asks other processes for what the next tasks of a stage read."""
        begin = self.reached[stage]
        self.reached[stage] = begin + 1
        for issue in self.pipeline.by_stage[stage][begin : begin + 1 + _AHEAD]:
            for maker in self.pipeline.waits_for[issue.key]:
                tag = _micro_tag(maker, stage, issue.microbatch)
                if self.pipeline.here(maker.stage) or tag in self.asked:
                    continue
                place = self.micro[stage][issue.microbatch]
                self.fetch(tag, maker.stage, self.sent(maker, stage), place)

    def sent(self, maker: TaskKey, stage: int) -> Sent:
        """What a task sends to a stage."""
        sends = self.pipeline.calls[maker].code.sent
        return next(sent for sent in sends if sent.stage == stage)

    def task(self, call: Call, number: int) -> None:
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
        made = self.measured(code, made)
        rest = self.hand_out(code, made, micro, number)
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

    def measured(self, code: TaskCode, made: Sequence[Any]) -> Sequence[Any]:
        """Keeps what a task measured of gradients; returns its other results."""
        if code.noise is None:
            return made
        self.noise[code.task.key].append(made[-1])
        return made[:-1]

    def hand_out(
        self, code: TaskCode, made: Sequence[Any], own: dict[int, Any], number: int
    ) -> int:
        """Keeps and sends results; returns where the running sums begin.

        Args:
          code: the task.
          made: what it returned.
          own: the arrays of its stage.
          number: the microbatch; -1: of the step.
        """
        count, key = len(code.outputs), code.task.key
        own.update(zip(code.outputs, made, strict=False))
        for sent in code.sent:
            end = count + len(sent.values)
            tag = _micro_tag(key, sent.stage, number)
            self.send(tag, key.stage, sent, made[count:end], self.place(sent, number))
            count = end
        return count

    def place(self, sent: Sent, number: int) -> dict[int, Any]:
        """The arrays of the stage that something is sent to."""
        if sent.stage == RESULT:
            return {}
        whole = self.step[sent.stage]
        return whole if number < 0 else self.micro[sent.stage][number]

    def update(self, call: Call) -> None:
        """Issues a task that runs once, or takes what another process makes by it."""
        code, key = call.code, call.code.task.key
        if not self.pipeline.here(key.stage):
            for sent in code.sent:
                tag = _micro_tag(key, sent.stage, -1)
                self.send(tag, key.stage, sent, None, self.place(sent, -1))
            return
        step, issued = self.step[key.stage], self.now()
        with told(key, -1):
            made = code.function(*(step[v] for v in code.inputs), *self.finite(code))
        self.record(code, -1, issued, made)
        made = self.measured(code, made)
        for value in code.donated:
            del step[value]
        self.hand_out(code, made, step, -1)

    def finite(self, code: TaskCode) -> list[Any]:
        """Whether all gradients are finite, for a task that restores state."""
        if not code.restores:
            return []
        assert self.codecs is not None
        return [self.codecs.finite[code.task.key.stage]]

    def cross(self) -> None:
        """Puts the values of microbatches together."""
        pipeline, crossed = self.pipeline, self.pipeline.crossed
        for stage in pipeline.finish:
            self.finish(stage)
        self.sums = {}
        if self.codecs is not None:
            self.codecs.decide()
        for stage, numbers in enumerate(self.micro):
            self.step[stage].update(
                (v, numbers[-1][v]) for v in crossed.same if v in numbers[-1]
            )
            for value, together in crossed.rows.items():
                if all(value in arrays for arrays in numbers):
                    found = [arrays[value] for arrays in numbers]
                    self.step[stage][value] = together(found)
        self.micro = []
        for k, copy in enumerate(pipeline.late_copies):
            self.copy(("late", k), copy, self.step, copy.sent.values)
        for value, stage in pipeline.unsummed:
            self.leave_unsummed(value, stage)

    def leave_unsummed(self, value: int, stage: int) -> None:
        """Hands on a result of microbatches that is not summed."""
        pipeline = self.pipeline
        _, target = pipeline.place(stage, value)
        array = self.step[stage].get(value)
        if pipeline.links is None:
            assert array is not None
            source = array.sharding
        else:
            source = NamedSharding(pipeline.stages[stage].mesh, PartitionSpec())
            array = None if array is None else jax.device_put(array, source)
        if value not in pipeline.given:
            target = source
        self.leave("unsummed", stage, value, array, source, target)

    def finish(self, stage: int) -> None:
        """Ends the sums of a stage, and sends them to whoever reads them."""
        pipeline, held = self.pipeline, self.pipeline.held[stage]
        made: Sequence[Any] | None = None
        if pipeline.here(stage):
            ended = self.ended(stage)
            self.step[stage].update(zip(held, ended, strict=False))
            made = ended
        count = len(held)
        for sent in pipeline.finish_sent[stage]:
            end = count + len(sent.values)
            arrays = None if made is None else made[count:end]
            tag = ("sum", stage, sent.stage)
            self.send(tag, stage, sent, arrays, self.place(sent, -1))
            count = end

    def ended(self, stage: int) -> list[Any]:
        """The values that the running sums of a stage are of."""
        finish, totals = self.pipeline.finish[stage], self.sums[stage].values()
        if self.pipeline.stages[stage].sums is None:
            return finish(*totals)
        assert self.codecs is not None
        made, *found = finish(*self.codecs.given(stage), *totals)
        self.codecs.summed(stage, *found)
        return made

    def give_up(self) -> None:
        """Hands others zeros for what this process failed to make, and asks no more."""
        pipeline, links = self.pipeline, self.pipeline.links
        assert links is not None
        for issue in pipeline.order:
            for sent in pipeline.calls[issue.key].code.sent:
                tag = _micro_tag(issue.key, sent.stage, issue.microbatch)
                mine = pipeline.here(issue.key.stage)
                theirs = not pipeline.here(sent.stage)
                if mine and theirs and tag not in self.handed:
                    links.give_up(tag, self.routes(sent))
                elif not mine and not theirs and tag not in self.asked:
                    process = pipeline.processes[issue.key.stage]
                    links.fetch(process, tag, self.routes(sent))


def _micro_tag(maker: TaskKey, stage: int, number: int) -> Tag:
    """Names what a task sends to a stage, of one microbatch."""
    return maker.phase.value, maker.stage, maker.number, stage, number
