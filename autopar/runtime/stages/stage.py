"""A stage of a pipeline on its devices: layouts of values, and compiled tasks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autopar.compilers.options import CompilerOptions, CompilerValue, joined
from autopar.layouts.assignment import Assignment, kept_layout
from autopar.layouts.pieces import wire_layout
from autopar.runtime.compiler import compile_lowered
from autopar.runtime.gradients.state_restorer import Carried, StateRestorer, Verdict
from autopar.runtime.gradients.sums import GradientSums
from autopar.runtime.noise.staged import TaskNoise
from autopar.steps.stages import ArrayCode
from autopar_passes.jax_compat import copier, is_extended
from autopar_passes.layouts import Layout, mesh_sharding
from autopar_passes.replay.run import PlainSums, replay_segment
from autopar_passes.stages.cut import Phase, StageProgram, Task, equations_of
from autopar_passes.sums import stacked

# Used in place of a stage number as the receiver of values that leave the step.
RESULT = -1


@dataclasses.dataclass(frozen=True)
class Sent:
    """Values that are sent to another stage, with their shardings on both stages.

    Attributes:
      stage: the stage that receives, or `RESULT`.
      values: the values.
      source: the sharding of each value on the stage that sends.
      target: the sharding of each value on the stage that receives.
      codes: value -> its code, for values that are sent encoded. Their shardings are
        those of the encoded arrays.
    """

    stage: int
    values: tuple[int, ...]
    source: tuple[NamedSharding, ...]
    target: tuple[NamedSharding, ...]
    codes: Mapping[int, ArrayCode] = dataclasses.field(
        default_factory=dict[int, ArrayCode]
    )

    def encode(self, arrays: Sequence[Any], masks: Mapping[int, Any]) -> list[Any]:
        """Encodes the arrays of the values that have codes, within a program.

        Each device encodes its part of the array, so the array is first resharded to
        the layout in which it is sent.

        Args:
          arrays: the arrays.
          masks: value -> the code that is its mask, for values with a mask.
        """
        return [
            code.encode(
                jax.lax.with_sharding_constraint(array, sharding), masks.get(value)
            )
            if (code := self.codes.get(value))
            else array
            for value, array, sharding in zip(
                self.values, arrays, self.source, strict=True
            )
        ]

    @functools.cached_property
    def moves(self) -> tuple[int, ...]:
        """The positions of the values whose source and target shardings differ."""
        pairs = enumerate(zip(self.source, self.target, strict=True))
        return tuple(k for k, (source, target) in pairs if source != target)

    @functools.cached_property
    def _copies(self) -> dict[tuple[Any, ...], Callable[[list[Any]], list[Any]]]:
        """Shapes and dtypes of arrays -> the function that copies them."""
        return {}

    def land_arrays(self, arrays: Sequence[Any]) -> list[Any]:
        """Copies arrays from their source shardings to their target shardings."""
        out = list(arrays)
        given = [out[k] for k in self.moves]
        if given:
            kinds = tuple((x.shape, x.dtype) for x in given)
            copy = self._copies.get(kinds)
            if copy is None:
                copy = self._copies[kinds] = self._copy(given)
            for k, array in zip(self.moves, copy(given), strict=True):
                out[k] = array
        return out

    def _copy(self, arrays: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        """A function that copies arrays of these shapes to the target shardings."""
        source = [self.source[k] for k in self.moves]
        target = [self.target[k] for k in self.moves]
        alike = (
            not is_extended(x.dtype) and same_parts(x.shape, old, new)
            for x, old, new in zip(arrays, source, target, strict=True)
        )
        if all(alike):
            return copier(source, target)
        return lambda arrays: jax.device_put(arrays, target)


def same_parts(
    shape: tuple[int, ...], source: NamedSharding, target: NamedSharding
) -> bool:
    """Whether two shardings have the same list of shards.

    Device number k of the one sharding must have the same part of the array as device
    number k of the other, in the same kind of memory.

    Args:
      shape: shape of the array.
      source: one sharding.
      target: the other sharding, of the same or of other devices.
    """
    old, new = (s.devices_indices_map(shape).values() for s in (source, target))
    return source.memory_kind == target.memory_kind and list(old) == list(new)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A pipeline stage: its program, its layouts and its devices.

    Attributes:
      program: the program of the step, and the equations of the stage.
      assignment: the layouts of the values.
      mesh: the devices of the stage.
      room: compiler options that limit memory
        (`autopar.compilers.targets.room_options`).
      given: compiler options of the plan.
      sums: the gradients that the stage sums by codecs; None: no gradients.
      early: running sums that are summed over devices right after the last microbatch,
        before several updates read them.
      handed: results of updates that are summed over devices before other tasks read
        them.
    """

    program: StageProgram
    assignment: Assignment
    mesh: Mesh
    room: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    given: CompilerOptions = dataclasses.field(default_factory=dict[str, CompilerValue])
    sums: GradientSums | None = None
    early: frozenset[int] = frozenset()
    handed: frozenset[int] = frozenset()

    @property
    def platform(self) -> str:
        """JAX's name of the platform of the mesh; '' if the mesh has no devices."""
        mesh = self.mesh
        here = not isinstance(mesh, AbstractMesh)
        return mesh.devices.flat[0].platform if here else ""

    @property
    def on_cpu(self) -> bool:
        """Whether the mesh has devices and they are CPUs."""
        return self.platform == "cpu"

    @property
    def options(self) -> dict[str, CompilerValue] | None:
        """The compiler options for the programs of the stage."""
        needed = {} if self.on_cpu else self.room
        return joined(needed, self.given, self.platform)

    @property
    def coded_values(self) -> frozenset[int]:
        """The values that the stage sums by codecs."""
        return frozenset() if self.sums is None else frozenset(self.sums.members)

    @functools.cached_property
    def processes(self) -> frozenset[int]:
        """The processes that have devices of the stage; {0} without devices."""
        if isinstance(self.mesh, AbstractMesh):
            return frozenset({0})
        return frozenset(d.process_index for d in self.mesh.devices.flat)

    @functools.cached_property
    def everywhere(self) -> NamedSharding:
        """The sharding of an array that all devices of the stage hold as a whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def behind_codecs(self) -> Stage:
        """Returns the stage after its codecs have summed gradients over devices."""
        return self._with(self.coded_values)

    @functools.cached_property
    def seen_by_updates(self) -> Stage:
        """Returns the stage as its updates see it.

        Gradients summed by codecs and the running sums in ``early`` are no longer
        partial sums over devices.
        """
        return self._with(self.coded_values | self.early)

    def updating(self, task: Task) -> Stage:
        """Returns the stage as one update sees it.

        In addition to `seen_by_updates`, results of other updates in ``handed`` are no
        longer partial sums over devices.
        """
        mine = self.handed - set(task.outputs)
        return (
            self._with(self.coded_values | self.early | mine)
            if mine
            else self.seen_by_updates
        )

    def _with(self, whole: frozenset[int]) -> Stage:
        """Returns the stage with values marked as already summed over devices."""
        if not whole:
            return self
        after = dataclasses.replace(self.assignment, settled=whole)
        return dataclasses.replace(self, assignment=after)

    def sharding(self, value: int) -> NamedSharding:
        """The sharding of a value on this stage; partial sums have a leading dim."""
        return self._shardings(value)

    def home(self, value: int) -> NamedSharding:
        """Returns the sharding of a value on this stage after its sum over devices."""
        layout = self.assignment.home_layout(value)
        return mesh_sharding(self.mesh, layout)

    @functools.cached_property
    def _shardings(self) -> Callable[[int], NamedSharding]:
        return functools.cache(
            lambda value: mesh_sharding(self.mesh, self._layout(value))
        )

    def _layout(self, value: int) -> Layout:
        partial = self.assignment.partial_layout(value)
        if partial is None:
            return kept_layout(self.assignment, value)
        axes, layout = partial
        return (axes, *layout)

    def wire(
        self, value: int, other: Stage, code: ArrayCode | None = None
    ) -> NamedSharding:
        """The sharding on this stage in which a value is sent to or from another stage.

        See `wire_layout`. If the value has a code, the sharding is that of the encoded
        array.
        """
        mine = kept_layout(self.assignment, value)
        theirs = kept_layout(other.assignment, value)
        sizes = self.assignment.sizes, other.assignment.sizes
        layout = wire_layout(mine, sizes[0], theirs, sizes[1])
        return mesh_sharding(self.mesh, layout if code is None else layout[: code.lead])

    def struct(self, value: int) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of a value on this stage."""
        known = self.program.program.values[value]
        partial, shape = self.assignment.partial_layout(value), known.shape
        if partial is not None:
            shape = (math.prod(self.assignment.sizes[a] for a in partial[0]), *shape)
        return jax.ShapeDtypeStruct(shape, known.dtype, sharding=self.sharding(value))


@dataclasses.dataclass(frozen=True)
class TaskCode:
    """A task as a compiled function.

    Attributes:
      task: the equations of the task, its inputs and its outputs.
      inputs: the values that the function takes as first arguments.
      accumulated: values that the function adds to running sums. The running sums are
        arguments after the inputs. They are returned after the values of ``sent``.
      outputs: the values that the function returns first, for its own stage.
      sent: the values that the function returns after ``outputs``, for other stages.
      donated: the inputs whose memory the function reuses.
      function: the jitted function.
      in_structs: shapes and shardings of the arguments.
      noise: the norms that the function measures and returns as its last result; None:
        no norms.
      restores: state that the function restores if a gradient of the step is not
        finite. If there is such state, the last argument is a bool scalar: whether all
        gradients are finite.
    """

    task: Task
    inputs: tuple[int, ...]
    accumulated: tuple[int, ...]
    outputs: tuple[int, ...]
    sent: tuple[Sent, ...]
    donated: tuple[int, ...]
    function: Any
    in_structs: tuple[jax.ShapeDtypeStruct, ...]
    noise: TaskNoise | None = None
    restores: tuple[Carried, ...] = ()

    def compile(self) -> None:
        """Compiles the function, so that the first call does not compile it."""
        compile_lowered(self.function.lower(*self.in_structs))


def sum_dtype(dtype: Any) -> Any:
    """The dtype of a running sum over microbatches: floats have at least float32."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if narrow else dtype


def task_code(
    stage: Stage,
    task: Task,
    *,
    accumulated: Sequence[int],
    outputs: Sequence[int],
    sent: Sequence[Sent],
    received: Mapping[int, NamedSharding] | None,
    codes: Mapping[int, ArrayCode],
    masks: Mapping[int, int],
    kept: Mapping[int, jax.ShapeDtypeStruct],
    donated: Sequence[int],
    noise: TaskNoise | None,
    restores: Sequence[Carried],
) -> TaskCode:
    """Makes a jitted function of a task.

    Args:
      stage: the stage.
      task: a task of the stage.
      accumulated: values of the task that are added to running sums.
      outputs: values of the task that its own stage keeps.
      sent: values of the task that are sent to other stages.
      received: input from another stage -> the sharding in which it arrives.
      codes: input from another stage -> its code, for inputs that arrive encoded.
      masks: value that the task receives or sends encoded -> the input that is the mask
        of its code.
      kept: the inputs that are codes which the stage has sent, with their shardings.
      donated: inputs whose memory the function reuses.
      noise: the norms that the function measures; None: no norms.
      restores: state that the function restores if a gradient is not finite.
    """
    update = task.key.phase is Phase.UPDATE
    stage = stage.updating(task) if update else stage
    inputs = tuple(v for v, _ in task.inputs)
    outside = [v for send in sent for v in send.values]
    seen = () if noise is None else noise.values
    run = replay_segment(
        stage.program.program,
        stage.assignment.graph,
        stage.assignment,
        stage.mesh,
        equations=equations_of(stage.program.program, task),
        inputs=[v for v in inputs if v not in kept],
        outputs=(*outputs, *outside, *accumulated, *seen),
        whole=stage.handed,
    )
    now, whole = PlainSums(stage.assignment, stage.mesh), len(outputs) + len(outside)
    leaving = _Leaving(stage, (None,) * len(outputs) + tuple(outside), now)
    arrive = {v: stage.sharding(v) for v in inputs if v not in kept}
    arrive |= received or {}

    def masks_of(given: Sequence[Any]) -> dict[int, Any]:
        arrays = dict(zip(inputs, given, strict=True))
        return {value: arrays[mask] for value, mask in masks.items()}

    def leaves(made: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        every, found = leaving(made), masks_of(given)
        out, begin = every[: len(outputs)], len(outputs)
        for send in sent:
            out += send.encode(every[begin : begin + len(send.values)], found)
            begin += len(send.values)
        return out

    def decoded(given: Sequence[Any]) -> list[Any]:
        found = masks_of(given)
        return [
            jax.lax.with_sharding_constraint(
                codes[v].decode(x, found.get(v)), arrive[v]
            )
            if v in codes
            else x
            for v, x in zip(inputs, given, strict=True)
            if v not in kept
        ]

    state = {c.new: c for c in restores}
    restored = {k: state[v] for k, v in enumerate((*outputs, *outside)) if v in state}

    def run_update(given: Sequence[Any], finite: Sequence[Any]) -> list[Any]:
        if not restores:
            return run(*given, synchroniser=now)
        known = dict(zip(inputs, given, strict=True))
        early = frozenset(c.new for c in restores if c.new is not None)
        restorer = StateRestorer(Verdict(*finite), restored, known, early)
        return restorer.finish(
            run(*given, synchroniser=now, made=restorer.replace_made)
        )

    def function(*arguments: Any) -> list[Any]:
        given, before = arguments[: len(inputs)], arguments[len(inputs) :]
        if update:
            made = run_update(given, before)
            return [*leaves(made, given), *measure_arrays(made[whole:])]
        made = run(*decoded(given))
        added = [
            total + value.astype(total.dtype)
            for total, value in zip(before, made[whole:], strict=False)
        ]
        rest = made[whole + len(added) :]
        return [*leaves(made, given), *added, *measure_arrays(rest)]

    def measure_arrays(arrays: Sequence[Any]) -> list[Any]:
        if noise is None:
            return []
        return [noise.rows(stage.assignment, stage.mesh, arrays)]

    function.__name__ = function.__qualname__ = task_name(task)
    structs = [
        kept[v]
        if v in kept
        else (codes[v].struct if v in codes else stage.struct(v)).update(
            sharding=arrive[v]
        )
        for v in inputs
    ]
    totals = [wide(stage.struct(v)) for v in accumulated]
    if restores:
        everywhere = NamedSharding(stage.mesh, PartitionSpec())
        totals.append(jax.ShapeDtypeStruct((), jnp.bool_, sharding=everywhere))
    places = {v: k for k, v in enumerate(inputs)}
    jitted = jax.jit(
        function,
        in_shardings=[s.sharding for s in (*structs, *totals)],
        out_shardings=[
            *(
                stage.home(v) if v in stage.handed else stage.sharding(v)
                for v in outputs
            ),
            *(where for send in sent for where in send.source),
            *(s.sharding for s in totals[: len(accumulated)]),
            *_rows_sharding(stage, noise),
        ],
        donate_argnums=(
            *(places[v] for v in donated),
            *range(len(inputs), len(inputs) + len(accumulated)),
        ),
        compiler_options=stage.options,
    )
    return TaskCode(
        task,
        inputs,
        tuple(accumulated),
        tuple(outputs),
        tuple(sent),
        tuple(donated),
        jitted,
        (*structs, *totals),
        noise,
        tuple(restores),
    )


@dataclasses.dataclass(frozen=True)
class _Leaving:
    """Sums results of a task over devices before they are sent to other stages.

    Results that stay on the stage may be partial sums, because later tasks of the stage
    sum them. The receiving stage treats each received value as the complete sum, so the
    sum must be computed before sending.

    Attributes:
      stage: the stage of the task.
      values: the results of the task; None stands for a result that stays.
      now: the function that sums stacked partial sums over devices.
    """

    stage: Stage
    values: tuple[int | None, ...]
    now: PlainSums

    def __call__(self, made: Sequence[Any]) -> list[Any]:
        return [
            self._leave_value(*pair) for pair in zip(self.values, made, strict=False)
        ]

    def _leave_value(self, value: int | None, array: Any) -> Any:
        if value is None or value in self.stage.handed:
            return array
        partial = self.stage.assignment.partial_layout(value)
        if partial is None:
            return array
        held = stacked.stack(array, *partial, self.stage.mesh)
        return self.now.take({value: held})[value]


def _rows_sharding(stage: Stage, noise: TaskNoise | None) -> list[NamedSharding]:
    """The sharding of the norms that a task measures: one row on each device."""
    if noise is None:
        return []
    return [NamedSharding(stage.mesh, PartitionSpec(stage.mesh.axis_names))]


def task_name(task: Task) -> str:
    """Returns the name of a task in profiles."""
    key = task.key
    words = "_".join(key.phase.value.split())
    kind = "level" if key.phase is Phase.UPDATE else "part"
    return f"stage_{key.stage}_{words}_{kind}_{key.number}"


def wide(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of the running sum of a value."""
    return struct.update(dtype=sum_dtype(struct.dtype))


def layout_code(shardings: Sequence[NamedSharding]) -> Any:
    """Returns a jitted function that reshards arrays on the devices of a stage."""
    return jax.jit(lambda *arrays: list(arrays), out_shardings=list(shardings))
