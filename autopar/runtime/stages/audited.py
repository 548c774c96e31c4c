"""The programs of a pipeline for an audit, and the bytes that its stages exchange."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh

from autopar.plans import Plan
from autopar.runtime.planned import lowering_platform
from autopar.runtime.stages.pipeline import StageCopy, StagePipeline
from autopar.runtime.stages.stage import RESULT, Sent, Stage, wide
from autopar_passes.jax_compat import itemsize, lowered_without_devices
from autopar_passes.stages.cut import Phase


@dataclasses.dataclass(frozen=True, slots=True)
class AuditedProgram:
    """A program of a stage.

    Attributes:
      stage: the stage.
      lowered: JAX's ``Lowered``.
      times: how often it runs in a step.
    """

    stage: int
    lowered: Any
    times: int


def programs(pipeline: StagePipeline, plan: Plan) -> Iterator[AuditedProgram]:
    """The programs that communicate within a stage, lowered.

    They are its tasks, the ends of its running sums, and what lays values as they are
    sent; not what deals a batch out to microbatches.

    Args:
      pipeline: the tasks (`autopar.runtime.stages.planned.audited_pipeline`).
      plan: its plan.

    Raises:
      PlanError: no platform has all kernels of a stage.
    """
    kind, count = plan.cluster.read().device.kind, pipeline.microbatches

    def lower_times(
        stage: int, function: Any, structs: Any, times: int
    ) -> AuditedProgram:
        return AuditedProgram(
            stage,
            _lower_function(pipeline.stages[stage], function, structs, kind),
            times,
        )

    for key, call in pipeline.calls.items():
        if not call.idle:
            times = 1 if key.phase is Phase.UPDATE else count
            yield lower_times(
                key.stage, call.code.function, call.code.in_structs, times
            )
    for stage, finish in pipeline.finish.items():
        yield lower_times(stage, finish, _end_structs(pipeline, stage), 1)
    batch = pipeline.cut.parts.flow.batch
    for copy in (*pipeline.copies, *pipeline.late_copies):
        own = pipeline.stages[copy.stage]
        times = count if batch.issuperset(copy.sent.values) else 1
        yield lower_times(copy.stage, _lay_copy(own, copy), _read(own, copy), times)


def _end_structs(pipeline: StagePipeline, stage: int) -> list[Any]:
    """What the end of a stage's running sums takes."""
    own = pipeline.stages[stage]
    totals: list[Any] = [wide(own.struct(v)) for v in pipeline.sums[stage]]
    if own.sums is None:
        return totals
    state, where = own.sums.structs(), own.sums.shardings()
    placed = jax.tree.map(
        lambda s, lies: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=lies),
        state["gradients"],
        where["gradients"],
    )
    return [state["step"], placed, *totals]


def _lay_copy(stage: Stage, copy: StageCopy) -> Any:
    """Lays values as they are sent, from where they lie on their stage."""
    values = copy.sent.values
    return jax.jit(
        lambda *arrays: list(arrays),
        in_shardings=[stage.sharding(v) for v in values],
        out_shardings=list(copy.sent.source),
    )


def _read(stage: Stage, copy: StageCopy) -> list[Any]:
    return [stage.struct(v) for v in copy.sent.values]


def _lower_function(stage: Stage, function: Any, structs: Any, kind: str) -> Any:
    if not isinstance(stage.mesh, AbstractMesh):
        return function.lower(*structs)
    bare = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), structs)
    platform = lowering_platform(stage.assignment.graph, kind)
    with lowered_without_devices():
        return function.trace(*bare).lower(lowering_platforms=(platform,))


def sent_between(
    pipeline: StagePipeline, names: Mapping[Phase | None, str], batch: str
) -> dict[tuple[int, int, str], float]:
    """Bytes that one device of a stage sends to other stages in a step.

    Args:
      pipeline: the tasks.
      names: phase -> what its results are called; None: of all others.
      batch: what rows of the batch are called that later stages read.
    """
    out: dict[tuple[int, int, str], float] = defaultdict(float)
    count, split = pipeline.microbatches, pipeline.cut.parts.flow.batch

    def add(stage: int, sent: Sent, what: Callable[[int], str], times: int) -> None:
        for value, target in zip(sent.values, sent.target, strict=True):
            other = _receiver(pipeline, stage, sent, value)
            if other != stage:
                nbytes = _shard_bytes(pipeline, value, target)
                out[stage, other, what(value)] += times * nbytes

    for key, call in pipeline.calls.items():
        name = names.get(key.phase, names[None])
        times = 1 if key.phase is Phase.UPDATE else count
        for sent in call.code.sent:
            add(key.stage, sent, lambda _, name=name: name, times)
    for stage, every in pipeline.finish_sent.items():
        for sent in every:
            add(stage, sent, lambda _: names[None], 1)
    for copy in pipeline.copies:
        rows = [v for v in copy.sent.values if v in split]
        for value, target in zip(copy.sent.values, copy.sent.target, strict=True):
            alone = Sent(copy.sent.stage, (value,), (target,), (target,))
            what, times = (batch, count) if value in rows else (names[None], 1)
            add(copy.stage, alone, lambda _, what=what: what, times)
    for copy in pipeline.late_copies:
        add(copy.stage, copy.sent, lambda _: names[None], 1)
    return dict(out)


def _receiver(pipeline: StagePipeline, stage: int, sent: Sent, value: int) -> int:
    """The stage that a value goes to; its own where it stays."""
    if sent.stage != RESULT:
        return sent.stage
    given = pipeline.given.get(value)
    return stage if given is None else pipeline.cut.owners[given]


def _shard_bytes(pipeline: StagePipeline, value: int, sharding: Any) -> float:
    """Bytes of a value on one device."""
    known = pipeline.cut.program.values[value]
    size = math.prod(sharding.shard_shape(tuple(known.shape)))
    rows = pipeline.microbatches if value in pipeline.crossed.rows else 1
    return float(rows * size * itemsize(known.dtype))
