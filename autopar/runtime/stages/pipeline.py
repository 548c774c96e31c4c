"""A pipeline on devices: the code of its tasks, and what they hand to each other."""

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

from jax.sharding import AbstractMesh

from autopar.errors import StageError
from autopar.runtime.gradients.state_restorer import Carried
from autopar.runtime.noise.staged import Rows, StagedNoise
from autopar.runtime.stages.codecs import CodecStep, StagedCodecs
from autopar.runtime.stages.order import Issue, turns
from autopar.runtime.stages.running_sums import (
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
from autopar_passes.jax_compat import source_line
from autopar_passes.program.equations import Equation
from autopar_passes.stages.cut import Cut, Phase, Task, TaskKey, equations_of

_ENCOUNTERED = re.compile(r"encountered in (\w+)")
# An operator may occur in many lines; so many are named.
_MOST_LINES = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """What a step leaves behind.

    Attributes:
      state: the values that leave the step, where they lie between steps.
      told: those that all processes are told, where each can read them.
      noise: what tasks measured of gradients.
      codecs: the codecs' side of the step, where the pipeline has any.
    """

    state: dict[int, Any]
    told: dict[int, Any]
    noise: Rows
    codecs: CodecStep | None = None


@contextlib.contextmanager
def name_task(key: TaskKey, number: int) -> Generator[None]:
    """Says which task an error came from.

    Args:
      key: the task.
      number: the microbatch; -1: of the step.

    Raises:
      StageError: something is raised inside.
    """
    try:
        yield
    except Exception as error:
        raise task_error(key, number, error) from error


def task_error(
    key: TaskKey, number: int, error: Exception, operators: Iterable[Equation] = ()
) -> StageError:
    """The error of a task, with the operator that it came from if that is known.

    Args:
      key: the task.
      number: the microbatch; -1: of the step.
      error: what was raised.
      operators: the equations of the task.
    """
    which = "" if number < 0 else f" of microbatch {number}"
    return StageError(
        f"stage {key.stage}, {key.phase.value}{which} (part {key.number}): "
        f"{type(error).__name__}: {error}{_lines(error, operators)}"
    )


def calls_back(equations: Iterable[Equation]) -> bool:
    """Whether equations call functions of the host, also within their regions."""
    return any(
        eqn.source.effects
        or eqn.primitive == "pure_callback"
        or any(calls_back(region.equations) for region in eqn.regions)
        for eqn in equations
    )


def _lines(error: Exception, operators: Iterable[Equation]) -> str:
    """The lines of the operator that made a number that is not finite.

    Under ``jax_debug_nans`` JAX runs the task again by operators, and names the first
    that does so.
    """
    found = _ENCOUNTERED.search(str(error))
    if found is None or not isinstance(error, FloatingPointError):
        return ""
    named = [e for e in operators if e.primitive == found[1]]
    lines = dict.fromkeys(line for e in named if (line := source_line(e.source)))
    return f" ({', '.join(list(lines)[:_MOST_LINES])})" if lines else ""


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
class Call:
    """A task with what a step does around it, resolved once.

    Attributes:
      code: the task as code.
      last: the inputs of a microbatch that no later task of the stage reads.
      inputs: takes what the task reads from the arrays of its stage.
      totals: takes the running sums that it adds to.
      calls_back: whether it calls functions of the host, which may fail later.
    """

    code: TaskCode
    last: tuple[int, ...]
    inputs: Callable[[Mapping[int, Any]], tuple[Any, ...]]
    totals: Callable[[Mapping[int, Any]], tuple[Any, ...]]
    calls_back: bool = False

    @property
    def idle(self) -> bool:
        """Whether the task makes nothing."""
        code = self.code
        made = (code.outputs, code.sent, code.accumulated, code.noise)
        return not any(made) and code.task.key.phase is not Phase.UPDATE


@dataclasses.dataclass(frozen=True, slots=True)
class StageCopy:
    """What a stage sends of what it has: inputs of the step, or crossings.

    Attributes:
      stage: the stage.
      sent: what goes where.
      layout: lays the values as they are sent.
    """

    stage: int
    sent: Sent
    layout: Any


class StagePipeline:
    """The tasks of a cut on stages; `run.run_step` runs a step of them."""

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
          links: to the other processes that have stages; None: there are none.
          shown: results that every process is told; others stay on their stage.
          noise: what is measured of gradients; None: nothing.
          codecs: how stages sum gradients by codecs; None: none does.
        """
        self.links = links
        self.codecs = codecs
        self.shown = frozenset(shown)
        self.noise = noise
        first = _first_device(stages[0])
        self.processes = tuple(stage.processes for stage in stages)
        # A stage of several processes runs one program on all of them, so that all
        # issue their programs in one order.
        self.joint = any(len(found) > 1 for found in self.processes)
        # Told of each task that is issued (benchmarks/task_times.py); None: nobody.
        self.recorder: Any = None
        # Seconds in which the last step issued the tasks of its microbatches.
        self.issuing_s = 0.0
        # For who watches the run: the task of each stage here that was issued last,
        # and the stages of which one is being issued.
        self.issued: dict[int, Issue] = {}
        self.inside: set[int] = set()
        # CPUs run small programs and callbacks where they are issued: a thread for
        # each stage keeps one from waiting for another.
        on_cpu = first is not None and first.platform == "cpu"
        count = 1 if self.joint else len(stages)
        self.threads = Threads(count, "stage") if on_cpu else None
        # On CPUs a collective is known by its devices alone, and programs of different
        # threads run in any order. Nothing else that processes do together may run
        # beside a stage of several of them: it could be of the same devices.
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
        # An update that calls the host may fail, so the state has to stay till its end.
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
        """Notes that a task is being issued; CPUs may run it meanwhile."""
        stage = issue.key.stage
        self.issued[stage] = issue
        self.inside.add(stage)
        yield
        self.inside.discard(stage)

    def progress(self) -> dict[str, Any]:
        """Which task this process is in; any thread may ask.

        Devices run tasks later than they are issued, so the last one that was issued
        need not have begun. One whose call has not returned runs in the call, as small
        programs of CPUs and functions of the host do, or waits for room in a queue.

        Returns:
          ``task``, its name; ``number``, from 1 in the order of the schedule, above
          ``of`` for what follows the microbatches; ``of``, the number of tasks;
          ``left``, how many its stage has not issued; and ``inside``, whether its call
          has not returned. Empty before the first task.
        """
        issued = [self._issued(*x) for x in list(self.issued.items())]
        inside = [x for x in issued if x["inside"]]
        return min(inside or issued, key=lambda x: x["number"], default={})

    @functools.cached_property
    def _numbers(self) -> dict[tuple[str, int, int, int], int]:
        """Phase, stage, part and microbatch of each task -> its number."""
        return {
            (i.key.phase.value, i.key.stage, i.key.number, i.microbatch): k
            for k, i in enumerate(self.order, 1)
        }

    def _issued(self, stage: int, issue: Issue) -> dict[str, Any]:
        """The task that a stage has issued last."""
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

    # What each task takes and gives.

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
        """What tasks of a stage read of a task, microbatch by microbatch or once."""
        once = task.key.phase is Phase.UPDATE
        return {
            value
            for other in self.cut.of_stage(stage)
            if (other.key.phase is Phase.UPDATE) is once
            for value, maker in other.inputs
            if maker == task.key
        }

    def _kept_outputs(self, task: Task) -> tuple[int, ...]:
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
                out.append(self._make_sent(task.key.stage, stage, values))
        if task.key.phase is Phase.UPDATE:
            out.extend(self._leaving(task.key.stage, task.outputs))
        return tuple(out)

    def _leaving(self, stage: int, values: Iterable[int]) -> Iterator[Sent]:
        """The values that leave the step, as they lie between steps."""
        outputs = self.outputs
        found = tuple(v for v in values if v in outputs)
        if found:
            where = [self.place(stage, v) for v in found]
            source, target = zip(*where, strict=True)
            yield Sent(RESULT, found, source, target)

    def place(self, stage: int, value: int) -> tuple[Any, Any]:
        """Where a result lies on the stage that makes it, and between steps."""
        given = self.given.get(value)
        if given is None:
            where = self.stages[stage].home(value)
            return where, where
        owner = self.cut.owners[given]
        home = self.stages[owner].sharding(given)
        if owner == stage:
            return home, home
        return self.stages[stage].home(value), home

    def _make_sent(self, source: int, target: int, values: Sequence[int]) -> Sent:
        here, there = self.stages[source], self.stages[target]
        return Sent(
            target,
            tuple(values),
            tuple(here.wire(v, there) for v in values),
            tuple(there.wire(v, here) for v in values),
        )

    def _received_inputs(self, task: Task) -> dict[int, Any]:
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
        # Rows are put together where they are made, after all microbatches.
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
        """State that an update has before and after it, and restores itself."""
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
        """State that is restored at the end of a step."""
        if self.codecs is None:
            return ()
        done = {c.new for found in self.restored.values() for c in found}
        return tuple(c for c in self.codecs.state if c.new not in done)

    def _donations(self) -> dict[TaskKey, tuple[int, ...]]:
        """State whose next value a task makes, and that nothing reads later."""
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

    # What goes from the microbatches to what runs once.

    def _summed_values(self) -> dict[int, tuple[int, ...]]:
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
                if maker is None or maker.phase is Phase.UPDATE:
                    continue
                if maker.stage == stage:
                    out[value].add(task.key.stage)
        return out

    def _held_sums(self, stage: int) -> tuple[int, ...]:
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
        """What goes from the stages that have values to others that read them."""
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
        """Crossings that are not summed and that updates of other stages read."""
        out: list[StageCopy] = []
        for stage in range(len(self.stages)):
            readers = self._crossing_readers(stage)
            rest = {v: r for v, r in readers.items() if v not in self.crossed.scales}
            out.extend(self._copies_between([(v, stage) for v in rest], rest))
        return tuple(out)

    def _results_not_summed(self) -> Iterator[tuple[int, int]]:
        """Results of microbatches that are not summed, each with its stage."""
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
    """A function from a mapping to its values of some keys, in order."""
    if len(keys) > 1:
        return operator.itemgetter(*keys)
    return lambda arrays: tuple(arrays[k] for k in keys)


def _first_device(stage: Stage) -> Any:
    """The first device of a stage; None of one that is not to run."""
    abstract = isinstance(stage.mesh, AbstractMesh)
    return None if abstract else stage.mesh.devices.flat[0]
