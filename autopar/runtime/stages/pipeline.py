"""A pipeline on devices: the compiled code of its tasks, and their transfers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import re
from collections import defaultdict
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

import jax
from jax.sharding import AbstractMesh

from autopar.errors import StageError
from autopar.runtime.gradients.state_restorer import Carried
from autopar.runtime.noise.staged import Rows, StagedNoise
from autopar.runtime.stages.order import Issue, turns
from autopar.runtime.stages.running_sums import (
    CodecStep,
    StagedCodecs,
    finish_code,
    partials_code,
    summed_once,
    zeros_code,
)
from autopar.runtime.stages.stage import (
    RESULT,
    Sent,
    Stage,
    TaskCode,
    layout_code,
    task_code,
)
from autopar.runtime.stages.transport import Links
from autopar.runtime.threads import Threads
from autopar.steps.stages import ArrayCode
from autopar_passes.jax_compat import source_line
from autopar_passes.program.equations import Equation
from autopar_passes.stages.cut import Cut, Phase, Task, TaskKey, equations_of

_ENCOUNTERED = re.compile(r"encountered in (\w+)")
# Largest number of source lines that an error names for one operator.
_MOST_LINES = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """The results of a step.

    Attributes:
      state: value -> its array, for values that leave the step, in the sharding that
        they have between steps.
      told: value -> its array in this process, for results that every process receives.
      noise: the norms of gradients that tasks measured.
      codecs: the codecs in this step; None if the pipeline has no codecs.
    """

    state: dict[int, Any]
    told: dict[int, Any]
    noise: Rows
    codecs: CodecStep | None = None


@contextlib.contextmanager
def name_task(key: TaskKey, number: int) -> Generator[None]:
    """Adds the name of a task to errors that are raised inside.

    Args:
      key: the task.
      number: number of the microbatch; -1: the task runs once in the step.

    Raises:
      StageError: the code inside raised an error.
    """
    try:
        yield
    except Exception as error:
        raise task_error(key, number, error) from error


def task_error(
    key: TaskKey, number: int, error: Exception, operators: Iterable[Equation] = ()
) -> StageError:
    """The error of a task, with the source line of the failed operator if it is known.

    Args:
      key: the task.
      number: number of the microbatch; -1: the task runs once in the step.
      error: the original error.
      operators: the equations of the task.
    """
    which = "" if number < 0 else f" of microbatch {number}"
    return StageError(
        f"stage {key.stage}, {key.phase.value}{which} (part {key.number}): "
        f"{type(error).__name__}: {error}{_lines(error, operators)}"
    )


def calls_back(equations: Iterable[Equation]) -> bool:
    """Whether equations, or equations in their regions, call host callbacks."""
    return any(
        eqn.source.effects
        or eqn.primitive == "pure_callback"
        or any(calls_back(region.equations) for region in eqn.regions)
        for eqn in equations
    )


def _lines(error: Exception, operators: Iterable[Equation]) -> str:
    """Returns the source lines of the operator that produced a non-finite number.

    With ``jax_debug_nans`` JAX runs the task again operator by operator. The error
    names the first operator that computes a non-finite number.
    """
    found = _ENCOUNTERED.search(str(error))
    if found is None or not isinstance(error, FloatingPointError):
        return ""
    named = [e for e in operators if e.primitive == found[1]]
    lines = dict.fromkeys(line for e in named if (line := source_line(e.source)))
    return f" ({', '.join(list(lines)[:_MOST_LINES])})" if lines else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crossed:
    """How the values of single microbatches become values of the whole step.

    Attributes:
      scales: value -> factor of its sum over microbatches.
      same: values that are equal in all microbatches; the step uses the value of the
        last microbatch.
      rows: value -> a function that joins the values of all microbatches, in order.
    """

    scales: Mapping[int, float]
    same: frozenset[int]
    rows: Mapping[int, Callable[[list[Any]], Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A task with its precomputed inputs.

    Attributes:
      code: the compiled code of the task.
      last: the inputs of a microbatch that no later task of the stage reads; their
        memory can be freed afterwards.
      inputs: a function that selects the inputs of the task from the arrays that its
        stage holds.
      totals: a function that selects the running sums to which the task adds.
      calls_back: whether the task calls host callbacks; these may fail after the task
        was issued.
    """

    code: TaskCode
    last: tuple[int, ...]
    inputs: Callable[[Mapping[int, Any]], tuple[Any, ...]]
    totals: Callable[[Mapping[int, Any]], tuple[Any, ...]]
    calls_back: bool = False

    @property
    def idle(self) -> bool:
        """Whether the task has no results."""
        code = self.code
        made = (code.outputs, code.sent, code.accumulated, code.noise)
        return not any(made) and code.task.key.phase is not Phase.UPDATE


@dataclasses.dataclass(frozen=True, slots=True)
class StageCopy:
    """Values that a stage sends to another stage without computing them in a task.

    The values are inputs of the step, or crossings: values of microbatches that are
    used after all microbatches.

    Attributes:
      stage: the stage that sends.
      sent: the values, and the stage that receives them.
      layout: a function that reshards the values to the layout in which they are sent.
    """

    stage: int
    sent: Sent
    layout: Any


class StagePipeline:
    """The tasks of a step on the devices of its stages; `run.run_step` runs a step."""

    def __init__(
        self,
        cut: Cut,
        stages: Sequence[Stage],
        order: Sequence[Issue],
        crossed: Crossed,
        *,
        donate: bool = True,
        wait_s: Callable[[TaskKey], float] | None = None,
        links: Links | None = None,
        shown: Collection[int] = (),
        noise: StagedNoise | None = None,
        codecs: StagedCodecs | None = None,
        codes: Mapping[int, ArrayCode] | None = None,
        masks: Mapping[int, int] | None = None,
    ) -> None:
        """Makes the code of all tasks, without compiling it.

        Args:
          cut: the tasks.
          stages: the stages on their devices.
          order: the tasks of all microbatches, in the order of issue.
          crossed: how the values of microbatches are combined.
          donate: whether a step reuses the memory of the state it is given.
          wait_s: task -> the least number of seconds that it takes, to simulate slower
            devices in experiments.
          links: the connections to other processes that run stages; None: all stages
            run in this process.
          shown: results that every process receives; other results stay on their stage.
          noise: the noise measurement; None: no norms are measured.
          codecs: how stages sum gradients by codecs; None: no stage has codecs.
          codes: value -> its code, for values of microbatches that tasks send to other
            stages encoded; None: no value is encoded.
          masks: cotangent -> the activation whose code is the mask of its code.
        """
        self.codes = {} if codes is None else dict(codes)
        self.masks = {} if masks is None else dict(masks)
        # The values whose codes their stage keeps, because its backward tasks need them
        # as masks. In these tasks' inputs, the code of value v is ~v.
        self.kept_codes = frozenset(
            ~v for task in cut.tasks.values() for v, _ in task.inputs if v < 0
        )
        self.links = links
        self.codecs = codecs
        self.shown = frozenset(shown)
        self.noise = noise
        first = _first_device(stages[0])
        self.processes = tuple(stage.processes for stage in stages)
        # Whether a stage runs on several processes. Its programs span these processes,
        # so all of them must issue programs in the same order.
        self.joint = any(len(found) > 1 for found in self.processes)
        # Object that records each issued task (benchmarks/task_times.py), or None.
        self.recorder: Any = None
        # Seconds that the last step needed to issue the tasks of its microbatches.
        self.issuing_s = 0.0
        # For `progress`: each stage of this process -> the task that was issued last;
        # and the stages that are issuing a task now.
        self.issued: dict[int, Issue] = {}
        self.inside: set[int] = set()
        # CPUs run small programs and callbacks in the thread that issues them. So each
        # stage has a thread, and stages do not wait for each other.
        on_cpu = first is not None and first.platform == "cpu"
        count = 1 if self.joint else len(stages)
        self.threads = Threads(count, "stage") if on_cpu else None
        # On CPUs, collectives over the same devices cannot be distinguished, and
        # programs of different threads run in any order. So while a stage of several
        # processes runs, no other collective may run that could have the same devices.
        self.alone = self.joint and on_cpu
        self.by_stage = [
            [issue for issue in order if issue.key.stage == stage]
            for stage in range(len(stages))
        ]
        self.wait_s = wait_s
        self.cut = cut
        self.stages = tuple(summed_once(s, cut, crossed.scales) for s in stages)
        self.order = tuple(order)
        self.crossed = crossed
        leaving = cut.program.body.outputs
        self.outputs = frozenset(v for v in leaving if isinstance(v, int))
        self.microbatches = 1 + max(issue.microbatch for issue in order)
        self.given = {v: i for i, v in cut.parts.flow.carried_values.items()}
        self.restored = {} if codecs is None else self._restored_state(codecs.state)
        self._calling = frozenset(
            key
            for key, task in cut.tasks.items()
            if calls_back(equations_of(cut.program, task))
        )
        # An update that calls a host function may fail. The old state must therefore
        # stay in memory until the update has ended.
        fails = any(key.phase is Phase.UPDATE for key in self._calling)
        self._donated = self._donations() if donate and not fails else {}
        self.calls = {key: self._call(task) for key, task in cut.tasks.items()}
        self.sums = self._summed_values()
        self.held = {s: self._held_sums(s) for s in self.sums}
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
                {} if noise is None else noise.sent.get(s, {}),
                sparse=noise is not None and noise.spec.every > 1,
            )
            for s, values in self.sums.items()
        }
        self.partials = {
            s: partials_code(self.stages[s], {v: crossed.scales[v] for v in values})
            for s, values in self.sums.items()
            if self.stages[s].sums is not None
        }
        self.copies = tuple(
            self._copies_between(cut.owners.items(), self._input_readers())
        )
        self.late_copies = self._late_copies()
        self.waits_for = {
            key: tuple({m for _, m in task.inputs if m and m.stage != key.stage})
            for key, task in cut.tasks.items()
        }
        here = [stage for stage in range(len(stages)) if self.here(stage)]
        self.turns = turns(
            order,
            [here] if self.joint else [[stage] for stage in here],
            {
                key: [m for m in makers if self.here(m.stage)]
                for key, makers in self.waits_for.items()
            },
        )
        self.unsummed = tuple(self._results_not_summed())

    def here(self, stage: int) -> bool:
        """Whether a stage runs in this process."""
        return self.links is None or self.links.index in self.processes[stage]

    @contextlib.contextmanager
    def running(self, issue: Issue) -> Generator[None]:
        """Records that a task is being issued; CPUs may also run it during the call."""
        stage = issue.key.stage
        self.issued[stage] = issue
        self.inside.add(stage)
        yield
        self.inside.discard(stage)

    def progress(self) -> dict[str, Any]:
        """Returns the task that this process has issued last; any thread may call this.

        Devices may run a task later than it is issued, so the task may not have begun.
        If the call of the task has not returned, there are two possible reasons: the
        task runs inside the call (small programs of CPUs, host callbacks), or the call
        waits for space in the device's queue.

        Returns:
          A dictionary, empty before the first task. ``task`` is the name of the task.
          ``number`` is its number in the order of the schedule, from 1; tasks after the
          microbatches have numbers above ``of``. ``of`` is the number of tasks.
          ``left`` is the number of tasks that the stage has not issued yet. ``inside``
          is true if the call of the task has not returned.
        """
        issued = [self._progress_of(*x) for x in list(self.issued.items())]
        inside = [x for x in issued if x["inside"]]
        return min(inside or issued, key=lambda x: x["number"], default={})

    @functools.cached_property
    def _numbers(self) -> dict[tuple[str, int, int, int], int]:
        """Phase, stage, part and microbatch of each task -> number of the task."""
        return {
            (i.key.phase.value, i.key.stage, i.key.number, i.microbatch): k
            for k, i in enumerate(self.order, 1)
        }

    def _progress_of(self, stage: int, issue: Issue) -> dict[str, Any]:
        """The entries of `progress` for the task that a stage has issued last."""
        key, own, of = issue.key, self.by_stage[stage], len(self.order)
        found = {"task": f"stage {stage} {key.phase.value}", "number": of + 1}
        left = 0
        if issue.microbatch >= 0:
            name = key.phase.value, stage, key.number, issue.microbatch
            found = {
                "task": f"{found['task']} {issue.microbatch}",
                "number": self._numbers[name],
            }
            left = len(own) - 1 - own.index(issue)
        return {**found, "of": of, "left": left, "inside": stage in self.inside}

    # Inputs and results of each task.

    def _call(self, task: Task) -> Call:
        key = task.key
        summed = tuple(v for v in task.outputs if v in self.crossed.scales)
        code = task_code(
            self.stages[key.stage],
            task,
            accumulated=summed,
            outputs=self._kept_outputs(task),
            sent=self._sends(task),
            received=self._received_inputs(task),
            codes=self._received_codes(task),
            masks=self._task_masks(task),
            kept=self._kept_structs(task),
            donated=self._donated.get(key, ()),
            noise=None if self.noise is None else self.noise.tasks.get(key),
            restores=self.restored.get(key, ()),
        )
        return Call(
            code,
            self._last(task),
            _taker(code.inputs),
            _taker(summed),
            key in self._calling,
        )

    def _readers(self, task: Task, stage: int) -> set[int]:
        """Returns the results of a task that tasks of a stage read directly.

        Tasks of microbatches and tasks that run once also read each other's results,
        but only through crossings: values that are combined over microbatches, or
        passed to updates. Crossings do not count here.
        """
        once = task.key.phase is Phase.UPDATE
        return {
            value
            for other in self.cut.of_stage(stage)
            if (other.key.phase is Phase.UPDATE) is once
            for value, maker in other.inputs
            if maker == task.key
        }

    def _kept_outputs(self, task: Task) -> tuple[int, ...]:
        """Returns the outputs of a task that its own stage keeps."""
        read = self._readers(task, task.key.stage)
        if task.key.phase is not Phase.UPDATE:
            read |= {*self.crossed.same, *self.crossed.rows}
        return tuple(v for v in task.outputs if v in read)

    def _sends(self, task: Task) -> tuple[Sent, ...]:
        """Returns the values that a task sends to other stages, or out of the step."""
        out: list[Sent] = []
        for stage in range(len(self.stages)):
            if stage == task.key.stage:
                continue
            read = self._readers(task, stage)
            values = tuple(v for v in task.outputs if v in read)
            if values:
                out.append(self._make_sent(task.key.stage, stage, values, self.codes))
        if task.key.phase is Phase.UPDATE:
            out.extend(self._leaving(task.key.stage, task.outputs))
        return tuple(out)

    def _leaving(self, stage: int, values: Iterable[int]) -> Iterator[Sent]:
        """Returns the values that leave the step, in their shardings between steps."""
        outputs = self.outputs
        found = tuple(v for v in values if v in outputs)
        if found:
            where = [self.place(stage, v) for v in found]
            source, target = zip(*where, strict=True)
            yield Sent(RESULT, found, source, target)

    def place(self, stage: int, value: int) -> tuple[Any, Any]:
        """Returns a result's shardings on the stage computing it, and between steps."""
        given = self.given.get(value)
        if given is None:
            where = self.stages[stage].home(value)
            return where, where
        owner = self.cut.owners[given]
        home = self.stages[owner].sharding(given)
        if owner == stage:
            return home, home
        return self.stages[stage].home(value), home

    def _make_sent(
        self,
        source: int,
        target: int,
        values: Sequence[int],
        codes: Mapping[int, ArrayCode] | None = None,
    ) -> Sent:
        here, there = self.stages[source], self.stages[target]
        own = {v: codes[v] for v in values if v in codes} if codes else {}
        return Sent(
            target,
            tuple(values),
            tuple(here.wire(v, there, own.get(v)) for v in values),
            tuple(there.wire(v, here, own.get(v)) for v in values),
            own,
        )

    def _received_codes(self, task: Task) -> dict[int, ArrayCode]:
        """Returns the codes of the inputs that arrive encoded from another stage."""
        return {
            value: self.codes[value]
            for value, maker in task.inputs
            if value in self.codes and maker and maker.stage != task.key.stage
        }

    def _task_masks(self, task: Task) -> dict[int, int]:
        """Returns, for values of a task, the input that is the mask of their code."""
        inputs, out = dict(task.inputs), dict[int, int]()
        for value, activation in self.masks.items():
            if value in task.outputs:
                out[value] = activation
            elif value in inputs and ~activation in inputs:
                out[value] = ~activation
        return out

    def _kept_structs(self, task: Task) -> dict[int, jax.ShapeDtypeStruct]:
        """Returns the inputs of a task that are codes which its stage has sent."""
        return {
            value: self.codes[~value].struct.update(sharding=self.kept_sharding(~value))
            for value, _ in task.inputs
            if value < 0
        }

    def kept_sharding(self, value: int) -> Any:
        """The sharding of a sent code on the stage that keeps it."""
        keys = {
            (maker.stage, key.stage)
            for key, task in self.cut.tasks.items()
            for v, maker in task.inputs
            if v == value and maker is not None and maker.stage != key.stage
        }
        ((source, target),) = keys
        return self.stages[source].wire(value, self.stages[target], self.codes[value])

    def _received_inputs(self, task: Task) -> dict[int, Any]:
        """Returns, for each input from another stage, the sharding of its arrival."""
        here, codes = self.stages[task.key.stage], self._received_codes(task)
        out: dict[int, Any] = {}
        for value, maker in task.inputs:
            source = maker.stage if maker else self.cut.owners[value]
            if source != task.key.stage:
                other = self.stages[source]
                out[value] = here.wire(value, other, codes.get(value))
        return out

    def _last(self, task: Task) -> tuple[int, ...]:
        """Returns the inputs of a microbatch that no later task of its stage reads."""
        if task.key.phase is Phase.UPDATE:
            return ()
        tasks = self.cut.of_stage(task.key.stage)
        later = tasks[tasks.index(task) + 1 :]
        read = {v for t in later for v, _ in t.inputs}
        batch = self.cut.parts.flow.batch
        # Updates read the rows of all microbatches joined, on the stage that computes
        # them. So these rows must be kept until the end.
        read |= {
            v
            for v, maker in task.inputs
            if maker is not None
            and maker.stage == task.key.stage
            and (v in self.crossed.same or v in self.crossed.rows)
        }
        mine = {v for v, maker in task.inputs if maker is not None or v in batch}
        return tuple(v for v in mine if v not in read)

    def _restored_state(
        self, state: Iterable[Carried]
    ) -> dict[TaskKey, tuple[Carried, ...]]:
        """Update -> the state that it restores itself.

        An update can restore state if it reads the old value and computes the new
        value.
        """
        known = {c.new: c for c in state if c.alone}
        out: dict[TaskKey, tuple[Carried, ...]] = {}
        for key, task in self.cut.tasks.items():
            read = {v for v, maker in task.inputs if maker is None}
            found = [known[v] for v in task.outputs if v in known]
            if key.phase is Phase.UPDATE:
                out[key] = tuple(c for c in found if c.old in read)
        return out

    @property
    def late(self) -> tuple[Carried, ...]:
        """State that is restored at the end of a step, not by an update."""
        if self.codecs is None:
            return ()
        done = {c.new for found in self.restored.values() for c in found}
        return tuple(c for c in self.codecs.state if c.new not in done)

    def _donations(self) -> dict[TaskKey, tuple[int, ...]]:
        """Update -> the inputs whose memory it reuses.

        An update can reuse the memory of state whose next value it computes, and that
        no later task reads.
        """
        carried, owners = self.cut.parts.flow.carried_values, self.cut.owners
        out: dict[TaskKey, tuple[int, ...]] = {}
        for stage in range(len(self.stages)):
            tasks = self.cut.of_stage(stage)
            for place, task in enumerate(tasks):
                if task.key.phase is not Phase.UPDATE:
                    continue
                later = {v for t in tasks[place + 1 :] for v, _ in t.inputs}
                later |= {c.old for c in self.late}
                out[task.key] = tuple(
                    v
                    for v, maker in task.inputs
                    if maker is None
                    and carried.get(v) in task.outputs
                    and v not in later
                    and owners[v] == stage
                )
        return out

    # Crossings: values that tasks of microbatches compute, and that tasks which run
    # once in the step (such as updates) read.

    def _summed_values(self) -> dict[int, tuple[int, ...]]:
        """Stage -> the values that it sums over microbatches."""
        out: dict[int, dict[int, None]] = defaultdict(dict)
        for key, call in self.calls.items():
            out[key.stage].update(dict.fromkeys(call.code.accumulated))
        return {s: tuple(values) for s, values in out.items() if values}

    def _crossing_readers(self, stage: int) -> dict[int, set[int]]:
        """Crossing value of a stage -> the stages whose updates read the value."""
        out: dict[int, set[int]] = defaultdict(set)
        for task in self.cut.tasks.values():
            if task.key.phase is not Phase.UPDATE:
                continue
            for value, maker in task.inputs:
                if maker is None or maker.phase is Phase.UPDATE:
                    continue
                if maker.stage == stage:
                    out[value].add(task.key.stage)
        return out

    def _held_sums(self, stage: int) -> tuple[int, ...]:
        """Returns the running sums of a stage that its own updates read."""
        readers = self._crossing_readers(stage)
        return tuple(v for v in self.sums[stage] if stage in readers.get(v, ()))

    def _crossing_sends(self, stage: int, values: Sequence[int]) -> tuple[Sent, ...]:
        """Returns the transfers of running sums to other stages, or out of the step."""
        readers = self._crossing_readers(stage)
        out: list[Sent] = []
        for target in range(len(self.stages)):
            wanted = [v for v in values if target in readers.get(v, ())]
            if target != stage and wanted:
                out.append(self._make_sent(stage, target, wanted))
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

    def _copies_between(
        self, owners: Iterable[tuple[int, int]], readers: Mapping[int, set[int]]
    ) -> list[StageCopy]:
        """Returns the copies of values from their owners to stages that read them."""
        wanted: dict[tuple[int, int], list[int]] = defaultdict(list)
        for value, owner in owners:
            for stage in sorted(readers.get(value, set()) - {owner}):
                wanted[owner, stage].append(value)
        out: list[StageCopy] = []
        for (owner, stage), values in wanted.items():
            sent = self._make_sent(owner, stage, values)
            out.append(StageCopy(owner, sent, layout_code(sent.source)))
        return out

    def _late_copies(self) -> tuple[StageCopy, ...]:
        """Returns the copies of crossings that are not summed over microbatches.

        Tasks of microbatches on one stage compute such a value, and an update on
        another stage reads it.
        """
        out: list[StageCopy] = []
        for stage in range(len(self.stages)):
            readers = self._crossing_readers(stage)
            rest = {v: r for v, r in readers.items() if v not in self.crossed.scales}
            out.extend(self._copies_between([(v, stage) for v in rest], rest))
        return tuple(out)

    def _results_not_summed(self) -> Iterator[tuple[int, int]]:
        """Unsummed results that microbatches compute, with their stages."""
        found: set[int] = set()
        wanted = self.outputs & {*self.crossed.same, *self.crossed.rows}
        for key, task in self.cut.tasks.items():
            if key.phase is not Phase.UPDATE:
                for value in task.outputs:
                    if value in wanted and value not in found:
                        found.add(value)
                        yield value, key.stage

    def compile(self) -> None:
        """Compiles the tasks of this process's stages."""
        for key, call in self.calls.items():
            if self.here(key.stage):
                call.code.compile()

    def clear_cache(self) -> None:
        """Frees compiled code."""
        for call in self.calls.values():
            call.code.function.clear_cache()
        codes = (self.zeros, self.finish, self.partials)
        for code in (code for by_stage in codes for code in by_stage.values()):
            code.clear_cache()
        if self.codecs is not None:
            self.codecs.clear_cache()


def _taker(keys: Sequence[int]) -> Callable[[Mapping[int, Any]], tuple[Any, ...]]:
    """A function that returns the values of a mapping for ``keys``, in order."""
    if len(keys) > 1:
        return operator.itemgetter(*keys)
    return lambda arrays: tuple(arrays[k] for k in keys)


def _first_device(stage: Stage) -> Any:
    """Returns the first device of a stage; None if the mesh has no devices."""
    abstract = isinstance(stage.mesh, AbstractMesh)
    return None if abstract else stage.mesh.devices.flat[0]
