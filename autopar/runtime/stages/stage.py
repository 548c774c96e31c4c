"""A stage of a pipeline on its devices: layouts of values, and tasks as code."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from autopar.layouts.assignment import Assignment
from autopar_passes.layouts import Layout, partition_spec
from autopar_passes.replay.segments import Later, Now, replay_segment
from autopar_passes.stages.cut import Phase, StageProgram, Task, equations_of


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage on its devices.

    Attributes:
      program: all its equations.
      assignment: the layouts of its values.
      mesh: its devices.
      options: of the compiler.
    """

    program: StageProgram
    assignment: Assignment
    mesh: Mesh
    options: Mapping[str, str] | None = None

    def sharding(self, value: int) -> NamedSharding:
        """Where a value lies on this stage, with its partial sums if it has any."""
        return self._shardings(value)

    @functools.cached_property
    def _shardings(self) -> Callable[[int], NamedSharding]:
        return functools.cache(
            lambda value: NamedSharding(
                self.mesh, partition_spec(self.mesh, self._layout(value))
            )
        )

    def _layout(self, value: int) -> Layout:
        partial = self.assignment.stacked(value)
        if partial is None:
            return self.assignment.home_layout(value)
        axes, layout = partial
        return (axes, *layout)

    def struct(self, value: int) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of a value on this stage."""
        known = self.program.program.values[value]
        partial = self.assignment.stacked(value)
        shape = known.shape
        if partial is not None:
            sizes = [self.assignment.sizes[a] for a in partial[0]]
            shape = (functools.reduce(lambda a, b: a * b, sizes, 1), *shape)
        return jax.ShapeDtypeStruct(shape, known.dtype, sharding=self.sharding(value))


@dataclasses.dataclass(frozen=True)
class TaskCode:
    """A task as a compiled function.

    Attributes:
      task: its equations, and what goes in and out.
      inputs: the values that the function takes.
      accumulated: values that it adds to running sums, which it takes behind the
        inputs and returns behind the outputs.
      outputs: the values that it returns as they are.
      donated: the inputs whose memory it takes over.
      function: the jitted function of inputs and sums.
      in_structs: shapes and shardings of its arguments.
    """

    task: Task
    inputs: tuple[int, ...]
    accumulated: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...]
    function: Any
    in_structs: tuple[jax.ShapeDtypeStruct, ...]

    def compile(self) -> None:
        """Compiles the function; a call then finds it."""
        self.function.lower(*self.in_structs).compile()


def sum_dtype(dtype: Any) -> Any:
    """The dtype in which values of microbatches are added up: float32 at least."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if narrow else dtype


def task_code(
    stage: Stage,
    task: Task,
    *,
    accumulated: Sequence[int] = (),
    also: Collection[int] = (),
    donated: Sequence[int] = (),
) -> TaskCode:
    """Makes a task of a stage a jitted function.

    Args:
      stage: the stage.
      task: which of its tasks.
      accumulated: values of the task that are added to running sums.
      also: those of them that it returns as they are, too.
      donated: inputs whose memory the function takes over.
    """
    inputs = tuple(v for v, _ in task.inputs)
    sums = tuple(v for v in task.outputs if v in set(accumulated))
    outputs = tuple(v for v in task.outputs if v not in sums or v in also)
    run = replay_segment(
        stage.program.program,
        stage.assignment.graph,
        stage.assignment,
        stage.mesh,
        equations=equations_of(stage.program.program, task),
        inputs=inputs,
        outputs=(*outputs, *sums),
    )
    taken = Now if task.key.phase is Phase.UPDATE else None

    def function(*arguments: Any) -> list[Any]:
        given, before = arguments[: len(inputs)], arguments[len(inputs) :]
        synchroniser = taken(stage.assignment, stage.mesh) if taken else Later()
        made = run(*given, synchroniser=synchroniser)
        added = [
            total + value.astype(total.dtype)
            for total, value in zip(before, made[len(outputs) :], strict=True)
        ]
        return [*made[: len(outputs)], *added]

    function.__name__ = function.__qualname__ = task_name(task)
    structs = [stage.struct(v) for v in inputs]
    totals = [_wide(stage.struct(v)) for v in sums]
    places = {v: k for k, v in enumerate(inputs)}
    jitted = jax.jit(
        function,
        in_shardings=[s.sharding for s in (*structs, *totals)],
        out_shardings=[stage.sharding(v) for v in (*outputs, *sums)],
        donate_argnums=(
            *(places[v] for v in donated),
            *range(len(inputs), len(inputs) + len(sums)),
        ),
        compiler_options=dict(stage.options) if stage.options else None,
    )
    return TaskCode(
        task, inputs, sums, outputs, tuple(donated), jitted, (*structs, *totals)
    )


def task_name(task: Task) -> str:
    """What profiles call a task."""
    key = task.key
    words = "_".join(key.phase.value.split())
    kind = "level" if key.phase is Phase.UPDATE else "part"
    return f"stage_{key.stage}_{words}_{kind}_{key.number}"


def _wide(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        struct.shape, sum_dtype(struct.dtype), sharding=struct.sharding
    )


def zeros_code(stage: Stage, values: Sequence[int]) -> Any:
    """A jitted function without arguments that starts running sums."""
    structs = [_wide(stage.struct(v)) for v in values]
    return jax.jit(
        lambda: [jnp.zeros(s.shape, s.dtype) for s in structs],
        out_shardings=[s.sharding for s in structs],
    )


def finish_code(stage: Stage, scales: Mapping[int, float]) -> Any:
    """A jitted function from running sums to the values that they are of.

    Args:
      stage: the stage.
      scales: value -> what its sum is multiplied by.
    """
    structs = [stage.struct(v) for v in scales]

    def finish(*totals: Any) -> list[Any]:
        return [
            (total if scale == 1 else total * jnp.asarray(scale, total.dtype)).astype(
                struct.dtype
            )
            for total, scale, struct in zip(
                totals, scales.values(), structs, strict=True
            )
        ]

    return jax.jit(
        finish,
        out_shardings=[s.sharding for s in structs],
        donate_argnums=tuple(range(len(structs))),
    )
