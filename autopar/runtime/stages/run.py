"""Runs one step of a pipeline: issues tasks, and moves values between stages.

To issue a task means to call its compiled function; the devices may run it later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.errors import StageError
from autopar.runtime import placement
from autopar.runtime.gradients.sums import State
from autopar.runtime.noise.staged import Place
from autopar.runtime.stages.order import Issue, run_in_threads
from autopar.runtime.stages.pipeline import (
    Call,
    Ran,
    StageCopy,
    StagePipeline,
    name_task,
    task_error,
)
from autopar.runtime.stages.running_sums import CodecStep
from autopar.runtime.stages.stage import RESULT, Sent, TaskCode
from autopar.runtime.stages.transport import Fetched, Route, Tag, meeting
from autopar_passes.program.equations import Equation
from autopar_passes.stages.cut import Phase, TaskKey, equations_of

# The arrays of one step of a pipeline, and how they move between stages.


class Transfers:
    """Holds the arrays of each stage during one step, and moves them between stages."""

    def __init__(self, pipeline: StagePipeline, microbatches: int) -> None:
        """Starts a step without arrays.

        Args:
          pipeline: the tasks.
          microbatches: number of microbatches.
        """
        self.pipeline = pipeline
        stages = range(len(pipeline.stages))
        self.step: list[dict[int, Any]] = [{} for _ in stages]
        self.micro: list[list[dict[int, Any]]] = [
            [{} for _ in range(microbatches)] for _ in stages
        ]
        self.sums: dict[int, dict[int, Any]] = {}
        self.results: dict[int, Any] = {}
        self.told: dict[int, Any] = {}
        # Task or stage -> the norms that it has measured, one entry per call.
        places = () if pipeline.noise is None else pipeline.noise.columns
        self.noise: dict[Place, list[Any]] = {place: [] for place in places}
        # Tasks that call host callbacks: the task, the microbatch, and a result to wait
        # for.
        self.watched: list[tuple[Call, int, Sequence[Any]]] = []
        # Task -> one of its results, which `settle` waits for if tasks must run alone.
        # No other task reuses this result's memory.
        self.latest: dict[TaskKey, Any] = {}
        # Transfers that were requested from other processes, and transfers that were
        # offered to them.
        self.asked: dict[Tag, Fetched] = {}
        self.handed: set[Tag] = set()
        self.reached = [0 for _ in stages]
        self.codecs: CodecStep | None = None
        # Whether this process has failed. It then sends zeros to other processes.
        self.failed = False

    def makes(self, stage: int) -> bool:
        """Whether this process runs a stage and has not failed."""
        return self.pipeline.here(stage) and not self.failed

    def copy(
        self,
        tag: Tag,
        copy: StageCopy,
        places: Sequence[dict[int, Any]],
        present: Collection[int],
    ) -> None:
        """Sends values of a stage to another stage.

        Args:
          tag: names this transfer.
          copy: the values to send.
          places: the arrays of each stage.
          present: the values to send now; the other values of ``copy`` are skipped.
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
        if self.makes(copy.stage):
            arrays = [source[v] for v in sent.values]
            if len(found) == len(copy.sent.values):
                arrays = copy.layout(*arrays)
            elif not self.alone(copy.stage, sent.stage):
                arrays = jax.device_put(arrays, list(sent.source))
            if not self.alone(copy.stage, sent.stage):
                # Another process may fetch the arrays at any time of the step. But
                # before that, a later task may reuse the memory of its inputs, and the
                # caller may free the step's inputs.
                arrays = [x.copy() for x in arrays]
        self.send(tag, copy.stage, sent, arrays, places[sent.stage])

    def send(
        self,
        tag: Tag,
        stage: int,
        sent: Sent,
        arrays: Sequence[Any] | None,
        place: dict[int, Any],
    ) -> None:
        """Moves arrays to another stage, or to their sharding between steps.

        Args:
          tag: names this transfer.
          stage: the stage that has the arrays.
          sent: the values, and the stage that receives them.
          arrays: the arrays; None if ``stage`` runs in another process.
          place: the arrays of the receiving stage; the moved arrays are added to it.
        """
        pipeline, links = self.pipeline, self.pipeline.links
        if sent.stage == RESULT:
            self.leave_all(tag, stage, sent, arrays)
        elif self.failed:
            self.release(tag, stage, sent)
        elif self.alone(stage, sent.stage):
            assert arrays is not None
            place.update(zip(sent.values, sent.land_arrays(arrays), strict=True))
        elif pipeline.here(stage) or pipeline.here(sent.stage):
            assert links is not None
            routes = self.routes(sent)
            if arrays is not None:
                self.handed.add(tag)
                links.offer(tag, arrays, routes)
            if pipeline.here(sent.stage):
                if tag not in self.asked:
                    self.asked[tag] = links.fetch(tag, routes)
                moved = links.land_pieces(routes, self.asked[tag], arrays)
                place.update(zip(sent.values, moved, strict=True))

    def alone(self, stage: int, other: int) -> bool:
        """Whether two stages run in this process and in no other."""
        pipeline = self.pipeline
        if pipeline.links is None:
            return True
        found = pipeline.processes[stage] | pipeline.processes[other]
        return found == frozenset({pipeline.links.index})

    def release(self, tag: Tag, stage: int, sent: Sent) -> None:
        """Completes a transfer in a process that has failed.

        The failed process sends zeros to the receiver, and ignores the arrays that it
        receives.
        """
        links, pipeline = self.pipeline.links, self.pipeline
        assert links is not None
        if pipeline.here(stage) and tag not in self.handed:
            links.offer(tag, None, self.routes(sent))
        if pipeline.here(sent.stage) and tag not in self.asked:
            self.asked[tag] = links.fetch(tag, self.routes(sent))

    def routes(self, sent: Sent) -> list[Route]:
        """Returns the routes of the values of a transfer to another process."""
        links, out = self.pipeline.links, list[Route]()
        assert links is not None
        for value, source, target in zip(
            sent.values, sent.source, sent.target, strict=True
        ):
            code = sent.codes.get(value)
            found = self.struct(value) if code is None else code.struct
            out.append(links.route(found.shape, found.dtype, source, target))
        return out

    def struct(self, value: int) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of a value when its stage sends it."""
        known = self.pipeline.cut.program.values[value]
        struct = jax.ShapeDtypeStruct(known.shape, known.dtype)
        together = self.pipeline.crossed.rows.get(value)
        if together is None or not self.crossing:
            return struct
        return jax.eval_shape(together, [struct] * self.pipeline.microbatches)

    @property
    def crossing(self) -> bool:
        """Whether the values of microbatches have been combined."""
        return not self.micro

    def leave_all(
        self, tag: Tag, stage: int, sent: Sent, arrays: Sequence[Any] | None
    ) -> None:
        """Moves results of a stage to their shardings between steps."""
        if self.pipeline.links is None:
            assert arrays is not None
            self.results.update(zip(sent.values, sent.land_arrays(arrays), strict=True))
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
        """Moves a result to its sharding between steps.

        State goes to the stage that owns it. Results in `StagePipeline.shown` are also
        copied to all processes.
        """
        pipeline = self.pipeline
        if pipeline.links is None:
            self.results[value] = (
                array if source == target else jax.device_put(array, target)
            )
            return
        owner = stage
        if value in pipeline.given:
            owner = pipeline.cut.owners[pipeline.given[value]]
        arrays = [array] if self.makes(stage) else None
        if source == target:
            if arrays is not None:
                self.results[value] = array
        else:
            sent = Sent(owner, (value,), (source,), (target,))
            self.send(("result", tag, value), stage, sent, arrays, self.results)
        if not pipeline.here(owner):
            self.results[value] = placement.absent(self.struct(value), target)
        if value in pipeline.shown:
            self.told[value] = self.show(stage, value, array, source)

    def show(self, stage: int, value: int, array: Any, source: NamedSharding) -> Any:
        """Copies a result to this process from the process that computed it."""
        links = self.pipeline.links
        assert links is not None
        tag = ("shown", value)
        if tag in self.handed:
            return array
        self.handed.add(tag)
        given = array if self.makes(stage) else None
        found = links.everywhere(tag, self.struct(value), source, given)
        return array if self.alone(stage, stage) else found

    def leave_unsummed(self, value: int, stage: int) -> None:
        """Moves an unsummed result of microbatches to its sharding between steps."""
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


# A stage requests from other processes the inputs of this many tasks ahead, so that the
# transfers overlap with earlier tasks.
_AHEAD = 2


def run_step(
    pipeline: StagePipeline,
    step: Mapping[int, Any],
    microbatches: Sequence[Mapping[int, Any]],
    codecs: State | None,
    due: Any,
) -> Ran:
    """Runs one step.

    Args:
      pipeline: the tasks.
      step: value of each input that all microbatches share -> its array on the stage
        that owns it. If the stage is in another process, the array may be any
        placeholder.
      microbatches: one mapping for each microbatch: value of each input that is split
        into microbatches -> its array on the stage that owns it.
      codecs: the state of the codecs; None if the pipeline has no codecs.
      due: bool scalar: whether the noise of this step is measured; None unless codecs
        send measured gradients and only some steps are measured.

    Raises:
      StageError: a task failed, or another process has ended.
      PlanError: another process has failed.
    """
    run = _Run(pipeline, len(microbatches))
    if pipeline.codecs is not None:
        assert codecs is not None
        run.codecs = CodecStep(pipeline.codecs, codecs, pipeline.links, due)
    run.microbatches(step, microbatches, "running a step")
    give_up = run.give_up_rest
    what = "updating the state"
    with meeting(pipeline.links, None if pipeline.joint else give_up, what):
        run.together(run.end)
    told = {**run.results, **run.told}
    return Ran(run.results, told, run.noise, run.codecs)


def partial_gradients(
    pipeline: StagePipeline,
    step: Mapping[int, Any],
    microbatches: Sequence[Mapping[int, Any]],
) -> dict[str, Any]:
    """Name of a gradient that codecs could send -> its partial gradients.

    The state is not updated, and no argument is donated. Gradients of stages in other
    processes are left out.

    Args:
      pipeline: the tasks.
      step: as for `run_step`.
      microbatches: as for `run_step`.
    """
    run = _Run(pipeline, len(microbatches))
    run.microbatches(step, microbatches, "trying codecs")
    found: dict[str, Any] = {}
    for stage, code in pipeline.partials.items():
        if pipeline.here(stage):
            found |= code(*run.sums[stage].values())
    return found


class _Run(Transfers):
    """Runs the tasks of one step, and holds the arrays of each stage meanwhile."""

    def begin(
        self, step: Mapping[int, Any], microbatches: Sequence[Mapping[int, Any]]
    ) -> None:
        """Copies inputs to the stages that read them, and zeroes the running sums."""
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
        for own, numbers in zip(self.step, self.micro, strict=True):
            for arrays in numbers:
                arrays.update(own)  # a task reads its inputs from one mapping
        self.sums = {
            s: dict(zip(pipeline.sums[s], code(), strict=True))
            for s, code in pipeline.zeros.items()
            if pipeline.here(s)
        }
        for value in pipeline.outputs & step.keys():
            where = pipeline.stages[owners[value]].sharding(value)
            self.leave("input", owners[value], value, step[value], where, where)

    def microbatches(
        self, step: Mapping[int, Any], given: Sequence[Mapping[int, Any]], what: str
    ) -> None:
        """Runs the tasks of all microbatches.

        Args:
          step: as for `run_step`.
          given: as ``microbatches`` for `run_step`.
          what: description of the work, for error messages.

        Raises:
          StageError: a task failed, or another process has ended.
        """
        pipeline = self.pipeline
        with meeting(pipeline.links, None if pipeline.joint else self.give_up, what):
            self.together(lambda: self.begin(step, given))
            begin = time.perf_counter()
            try:
                self.issue_all()
            except StageError:
                if pipeline.links is None:
                    self.settle()  # raises the error of an earlier task, if one failed
                raise
            pipeline.issuing_s = time.perf_counter() - begin
            self.settle()

    def together(self, work: Callable[[], None]) -> None:
        """Runs ``work``, in which this process may wait for others in collectives.

        On CPUs, if a stage runs on several processes, ``work`` runs in a thread, so
        that the main thread notices if another process is lost.
        """
        pipeline = self.pipeline
        if not pipeline.joint or pipeline.threads is None:
            work()
            return
        assert pipeline.links is not None
        pipeline.links.wait_for(pipeline.threads.submit(work).result)

    def issue_all(self) -> None:
        """Issues the tasks of all microbatches of this process's stages."""
        pipeline = self.pipeline
        pipeline.issued.clear()
        pipeline.inside.clear()
        if pipeline.threads is None:
            for issue in pipeline.order:
                if pipeline.here(issue.key.stage):
                    self.issue(issue)
            return
        links, by_stage = pipeline.links, pipeline.turns
        if links is None:
            run_in_threads(pipeline.threads, by_stage, self.issue)
        else:
            run_in_threads(pipeline.threads, by_stage, self.issue, join=links.wait_for)

    def settle(self) -> None:
        """Waits for tasks that call host callbacks, or that must run alone.

        A host callback may fail when the devices run its task, after the task was
        issued. The state of the step is then still valid: either no update has been
        issued, or updates do not reuse the memory of the state.

        Raises:
          StageError: a task failed.
        """
        links = self.pipeline.links
        if not self.watched and not self.pipeline.alone:
            return
        self.wait_all() if links is None else links.wait_for(self.wait_all)

    def wait_all(self) -> None:
        """Waits for all watched tasks, and for all tasks if they must run alone."""
        for call, number, made in self.watched:
            self.wait(call, number, made)
        if self.pipeline.alone:
            made = [*self.latest.values(), self.sums, self.results]
            jax.block_until_ready(made)

    def wait(self, call: Call, number: int, made: Sequence[Any]) -> None:
        """Waits for results of a task.

        Raises:
          StageError: the task failed.
        """
        try:
            jax.block_until_ready(made) if made else jax.effects_barrier()
        except Exception as error:
            key = call.code.task.key
            raise task_error(key, number, error, self.operators(call.code)) from error

    def end(self) -> None:
        """Combines the values of the microbatches, and issues the updates."""
        self.cross()
        self.watched = []
        for key, call in self.pipeline.calls.items():
            if key.phase is Phase.UPDATE:
                self.update(call)
        self.settle()

    # Tasks.

    def issue(self, issue: Issue) -> None:
        """Issues a task of the schedule."""
        if self.pipeline.links is not None:
            self.receive(issue.key.stage)
        with self.pipeline.running(issue):
            self.task(self.pipeline.calls[issue.key], issue.microbatch)

    def receive(self, stage: int) -> None:
        """Requests the inputs of a stage's next tasks from other processes."""
        begin = self.reached[stage]
        self.reached[stage] = begin + 1
        for issue in self.pipeline.by_stage[stage][begin : begin + 1 + _AHEAD]:
            for maker in self.pipeline.waits_for[issue.key]:
                tag = _micro_tag(maker, stage, issue.microbatch)
                if self.pipeline.here(maker.stage) or tag in self.asked:
                    continue
                place = self.micro[stage][issue.microbatch]
                self.send(tag, maker.stage, self.sent_to(maker, stage), None, place)

    def sent_to(self, maker: TaskKey, stage: int) -> Sent:
        """Returns the values that a task sends to a stage."""
        sends = self.pipeline.calls[maker].code.sent
        return next(sent for sent in sends if sent.stage == stage)

    def task(self, call: Call, number: int) -> None:
        """Issues a task of a microbatch, and sends results to other stages."""
        code, key = call.code, call.code.task.key
        micro, begin = self.micro[key.stage][number], time.perf_counter()
        issued, made = self.now(), self.call_task(call, number)
        if (wait_s := self.pipeline.wait_s) is not None:
            jax.block_until_ready(made)
            rest = begin + wait_s(key) - time.perf_counter()
            time.sleep(max(0.0, rest))
        self.record(code, number, issued, made)
        made = self.keep_measured(code, made)
        rest = self.hand_out(code, made, micro, number)
        if rest and self.pipeline.alone:
            self.latest[key] = _smallest(made[:rest])
        if call.calls_back:
            self.watch(call, number, made, rest)
        if code.accumulated:
            self.sums[key.stage].update(zip(code.accumulated, made[rest:], strict=True))
        for value in call.last:
            micro.pop(value, None)

    def watch(self, call: Call, number: int, made: Sequence[Any], rest: int) -> None:
        """Keeps one result of a task, which tells `settle` whether the task failed.

        The smallest result is kept, because it stays in memory until the last task of
        the microbatches is issued. Running sums cannot be kept, because the next
        microbatch reuses their memory. If the task only computes running sums, this
        method waits for the task at once.
        """
        if rest:
            kept = _smallest(made[:rest])
            self.watched.append((call, number, [kept]))
        else:
            self.wait(call, number, made)

    def call_task(self, call: Call, number: int) -> Sequence[Any]:
        """Calls the function of a task for a microbatch, and returns its results.

        Raises:
          StageError: the call failed.
        """
        code, key = call.code, call.code.task.key
        if call.idle:
            return ()
        arguments = call.inputs(self.micro[key.stage][number])
        if code.accumulated:
            arguments += call.totals(self.sums[key.stage])
        try:
            return code.function(*arguments)
        except Exception as error:
            raise task_error(key, number, error, self.operators(code)) from error

    def operators(self, code: TaskCode) -> tuple[Equation, ...]:
        """Returns the equations of a task."""
        return equations_of(self.pipeline.cut.program, code.task)

    def now(self) -> float:
        """Returns the seconds since the step began; 0 without a recorder."""
        recorder = self.pipeline.recorder
        return 0.0 if recorder is None else recorder.now()

    def record(self, code: TaskCode, number: int, issued_s: float, made: Any) -> None:
        """Tells the recorder, if there is one, that a task was issued."""
        if (recorder := self.pipeline.recorder) is not None:
            makers = {m for _, m in code.task.inputs if m is not None}
            recorder.issued(code.task.key, number, issued_s, made, tuple(makers))

    def keep_measured(self, code: TaskCode, made: Sequence[Any]) -> Sequence[Any]:
        """Keeps the norms that a task measured, and returns its other results."""
        if code.noise is None:
            return made
        self.noise[code.task.key].append(made[-1])
        return made[:-1]

    def hand_out(
        self, code: TaskCode, made: Sequence[Any], own: dict[int, Any], number: int
    ) -> int:
        """Keeps the results that the stage needs, and sends results to other stages.

        Args:
          code: the task.
          made: the results of the task.
          own: the arrays of the task's stage.
          number: number of the microbatch; -1: the task runs once in the step.

        Returns:
          The position of the first running sum in ``made``.
        """
        count, key = len(code.outputs), code.task.key
        own.update(zip(code.outputs, made, strict=False))
        for sent in code.sent:
            end = count + len(sent.values)
            tag = _micro_tag(key, sent.stage, number)
            for value, array in zip(sent.values, made[count:end], strict=True):
                if value in self.pipeline.kept_codes:
                    own[~value] = array
            self.send(tag, key.stage, sent, made[count:end], self.place(sent, number))
            count = end
        return count

    def place(self, sent: Sent, number: int) -> dict[int, Any]:
        """Returns the arrays of the stage that receives ``sent``."""
        if sent.stage == RESULT:
            return {}
        whole = self.step[sent.stage]
        return whole if number < 0 else self.micro[sent.stage][number]

    def update(self, call: Call) -> None:
        """Issues a task that runs once, or receives results from another process."""
        code, key = call.code, call.code.task.key
        if not self.makes(key.stage):
            for sent in code.sent:
                tag = _micro_tag(key, sent.stage, -1)
                self.send(tag, key.stage, sent, None, self.place(sent, -1))
            return
        step, issued = self.step[key.stage], self.now()
        try:
            with self.pipeline.running(Issue(key, -1)):
                made = code.function(*call.inputs(step), *self.finite(code))
        except Exception as error:
            raise task_error(key, -1, error, self.operators(code)) from error
        self.record(code, -1, issued, made)
        made = self.keep_measured(code, made)
        if made and self.pipeline.alone:
            self.latest[key] = _smallest(made)
        if call.calls_back:
            self.watch(call, -1, made, len(made))
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
        """Combines the values of microbatches to values of the step."""
        pipeline, crossed = self.pipeline, self.pipeline.crossed
        for stage in pipeline.finish:
            self.finish(stage)
        self.sums = {}
        if self.codecs is not None:
            self.codecs.give_up() if self.failed else self.codecs.decide()
        for stage, numbers in enumerate(self.micro):
            self.step[stage].update(
                (v, numbers[-1][v]) for v in crossed.same if v in numbers[-1]
            )
            for value, together in crossed.rows.items():
                if all(value in arrays for arrays in numbers):
                    found = [arrays[value] for arrays in numbers]
                    self.step[stage][value] = together(found)
        self.micro = []
        self.gather()
        for k, copy in enumerate(pipeline.late_copies):
            self.copy(("late", k), copy, self.step, copy.sent.values)
        for value, stage in pipeline.unsummed:
            self.leave_unsummed(value, stage)

    def gather(self) -> None:
        """Passes arrays with the rows of all microbatches to updates that read them."""
        pipeline, gathered = self.pipeline, self.pipeline.cut.parts.gathered
        for value, crossing in gathered.items():
            owner = pipeline.cut.owners[value]
            if self.makes(owner):
                where = pipeline.stages[owner].sharding(value)
                rows = jax.device_put(self.step[owner][crossing], where)
                self.step[owner][value] = rows
        for k, copy in enumerate(pipeline.copies):
            self.copy(("gathered", k), copy, self.step, gathered)

    def finish(self, stage: int) -> None:
        """Finishes the running sums of a stage, and sends them to their readers."""
        pipeline, held = self.pipeline, self.pipeline.held[stage]
        made: Sequence[Any] | None = None
        if self.makes(stage):
            with name_task(TaskKey(Phase.UPDATE, stage, 0), -1):
                ended = self.end_sums(stage)
            self.step[stage].update(zip(held, ended, strict=False))
            made = ended
        count = len(held)
        for sent in pipeline.finish_sent[stage]:
            end = count + len(sent.values)
            arrays = None if made is None else made[count:end]
            tag = ("sum", stage, sent.stage)
            self.send(tag, stage, sent, arrays, self.place(sent, -1))
            count = end

    def end_sums(self, stage: int) -> list[Any]:
        """The final values of a stage's running sums, scaled and summed by codecs."""
        finish, totals = self.pipeline.finish[stage], self.sums[stage].values()
        if self.pipeline.stages[stage].sums is None:
            return finish(*totals)
        assert self.codecs is not None
        noise = self.pipeline.noise
        measured = noise is not None and stage in noise.sent
        given = self.codecs.sum_inputs(stage, measured=measured)
        made, new, rows, levels, *norms = finish(*given, *totals)
        self.codecs.take_sums(stage, new, rows, levels)
        if norms:
            self.noise[stage] += norms
        return made

    def give_up_rest(self) -> None:
        """Like `give_up`, for the work after the microbatches."""
        self.failed, self.micro = True, []
        self.end()

    def give_up(self) -> None:
        """Sends zeros for values that this process failed to compute.

        Other processes then do not wait for these values.
        """
        pipeline = self.pipeline
        for issue in pipeline.order:
            for sent in pipeline.calls[issue.key].code.sent:
                tag = _micro_tag(issue.key, sent.stage, issue.microbatch)
                if sent.stage != RESULT:
                    self.release(tag, issue.key.stage, sent)


def _smallest(arrays: Sequence[Any]) -> Any:
    """Returns the array with the fewest bytes.

    >>> _smallest([memoryview(b"abc"), memoryview(b"d")]).nbytes
    1
    """
    return min(arrays, key=lambda x: x.nbytes)


def _micro_tag(maker: TaskKey, stage: int, number: int) -> Tag:
    """Returns the tag of the values that a task sends to a stage for one microbatch."""
    return maker.phase.value, maker.stage, maker.number, stage, number
