"""The running sums of a stage over microbatches: their start and their final values.

Updates may read a gradient in two tasks of a stage. For example, clipping by the global
norm reads each gradient for the norm, and again when the norm over all stages is known.
If these tasks summed the gradient over devices, each of them would do so. So a value
that several tasks read is summed over devices once, before them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.compression.codecs.blocks import WITH_BARRIERS
from autopar.layouts.layout import Axes
from autopar.runtime.gradients.synchroniser import CodecSynchroniser
from autopar.runtime.noise.norms import take_with_norms
from autopar.runtime.stages.stage import Sent, Stage, sum_dtype, wide
from autopar.steps.sums import worth_a_codec
from autopar_passes.replay.segments import PlainSums
from autopar_passes.stages.cut import Cut, Phase
from autopar_passes.sums.stacked import Stacked, stack


def zeros_code(stage: Stage, values: Sequence[int]) -> Any:
    """A jitted function without arguments that returns running sums of zero."""
    structs = [wide(stage.struct(v)) for v in values]
    return jax.jit(
        lambda: [jnp.zeros(s.shape, s.dtype) for s in structs],
        out_shardings=[s.sharding for s in structs],
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Ending:
    """Computes the final values of a stage's running sums.

    Attributes:
      stage: the stage.
      scales: value -> factor of its running sum.
      held: the values that updates of the stage read.
      sent: the values that are sent to other stages.
      measured: the gradients to measure; as for `finish_code`.
      sparse: whether only some steps are measured; as for `finish_code`.
    """

    stage: Stage
    scales: Mapping[int, float]
    held: Sequence[int]
    sent: Sequence[Sent]
    measured: Mapping[int, Axes]
    sparse: bool

    @functools.cached_property
    def structs(self) -> dict[int, jax.ShapeDtypeStruct]:
        return {v: self.stage.struct(v) for v in self.scales}

    def scale_total(self, value: int, total: Any) -> Any:
        factor = jnp.asarray(self.scales[value], total.dtype)
        found = total if self.scales[value] == 1 else total * factor
        return found.astype(self.structs[value].dtype)

    def whole(self, value: int, array: Any) -> Any:
        """Sums a value over devices."""
        after = self.stage.behind_codecs
        partial = after.assignment.partial_layout(value)
        if partial is None:
            return array
        waiting = stack(array, *partial, after.mesh)
        return PlainSums(after.assignment, after.mesh).take({value: waiting})[value]

    def partials(self, *totals: Any) -> dict[str, Any]:
        """Name -> partial gradient, for gradients that are large enough for a codec."""
        assert self.stage.sums is not None
        made = self.values(totals)
        return {
            m.decision.name: made[value]
            for value, m in self.stage.sums.members.items()
            if worth_a_codec(m.decision.shape)
        }

    def values(self, totals: Sequence[Any]) -> dict[int, Any]:
        known = dict(zip(self.scales, totals, strict=True))
        return {v: self.scale_total(v, total) for v, total in known.items()}

    def end_values(self, made: Mapping[int, Any]) -> list[Any]:
        wanted = {v for send in self.sent for v in send.values} | self.stage.early
        whole = {v: self.whole(v, made[v]) for v in made if v in wanted}
        held = [whole[v] if v in self.stage.early else made[v] for v in self.held]
        return [*held, *(whole[v] for send in self.sent for v in send.values)]

    def plain(self, *totals: Any) -> list[Any]:
        return self.end_values(self.values(totals))

    def sum_by_codecs(self, step: Any, states: Any, *rest: Any) -> Any:
        assert self.stage.sums is not None
        due, totals = (rest[0], rest[1:]) if self.sparse else (None, rest)
        codecs = CodecSynchroniser(self.stage.sums, {"step": step, "gradients": states})
        made = self.values(totals)
        whole, norms = self.by_codecs(codecs, made, due)
        ended = self.end_values(made | whole)
        return ended, codecs.new, codecs.telemetry(), codecs.taken_levels(), *norms

    def by_codecs(
        self, codecs: CodecSynchroniser, partials: Mapping[int, Any], due: Any
    ) -> tuple[dict[int, Any], list[Any]]:
        """Sums gradients by codecs, bucket by bucket.

        Returns the summed gradients, and a list with the norms of the measured
        gradients (empty if none is measured).
        """
        stage = self.stage
        assert stage.sums is not None
        whole: dict[int, Any] = {}
        norms: dict[int, Any] = {}
        for value in stage.sums.members:
            if value in whole:
                continue
            together, bucket = codecs.takes(value), dict[int, Stacked]()
            for member in stage.sums.members:
                if member in together:
                    partial = stage.assignment.partial_layout(member)
                    assert partial is not None
                    bucket[member] = stack(partials[member], *partial, stage.mesh)
            made, rows = take_with_norms(codecs, bucket, self.measured, due, {})
            whole |= made
            norms |= rows
        if not self.measured:
            return whole, []
        return whole, [jnp.concatenate([norms[v] for v in self.measured], axis=1)]

    @property
    def taken_places(self) -> list[int]:
        """Positions of the running sums whose memory the final values reuse."""
        return [
            k
            for k, (v, struct) in enumerate(self.structs.items())
            if v in self.held
            and v not in self.stage.coded_values | self.stage.early
            and sum_dtype(struct.dtype) == struct.dtype
        ]


def finish_code(
    stage: Stage,
    scales: Mapping[int, float],
    held: Sequence[int],
    sent: Sequence[Sent],
    measured: Mapping[int, Axes] | None,
    *,
    sparse: bool,
) -> Any:
    """A jitted function from running sums to their final values.

    Without codecs, the function takes the running sums and returns the values. With
    codecs, its first arguments are the number of the step and the state of the codecs.
    With ``sparse`` the next argument is a bool scalar: whether this step is measured.
    The function then returns the values, the new state, telemetry, the levels that sent
    the gradients, and the norms of the measured gradients.

    Args:
      stage: the stage.
      scales: value -> factor of its running sum.
      held: the values that updates of the stage read. They stay partial sums over
        devices, unless a codec sums them or several updates read them.
      sent: the values that are sent to other stages; they are summed over devices.
      measured: measured gradient that a codec sends -> the mesh axes that separate data
        replicas, whose devices work on different rows.
      sparse: whether only some steps are measured.
    """
    measured = measured or {}
    sparse = sparse and bool(measured)
    ending = _Ending(stage, scales, held, sent, measured, sparse)
    leave: Any = [
        *(stage.seen_by_updates.sharding(v) for v in held),
        *(where for send in sent for where in send.source),
    ]
    totals = [wide(struct).sharding for struct in ending.structs.values()]
    if stage.sums is None:
        return jax.jit(
            ending.plain,
            in_shardings=tuple(totals),
            out_shardings=leave,
            donate_argnums=tuple(ending.taken_places),
        )
    states = stage.sums.shardings()["gradients"]
    told = stage.everywhere
    return jax.jit(
        ending.sum_by_codecs,
        in_shardings=(None, states, *[None] * sparse, *totals),
        out_shardings=(leave, states, told, told, *[None] * bool(measured)),
        donate_argnums=tuple(k + 2 + sparse for k in ending.taken_places),
        # The barriers keep the compiler from computing the input of a codec again in
        # each loop that reads it.
        compiler_options=WITH_BARRIERS if stage.on_cpu else stage.options,
    )


def partials_code(stage: Stage, scales: Mapping[int, float]) -> Any:
    """A jitted function from running sums to the partial gradients of a stage.

    The function returns name of a gradient -> its partial gradients.

    Args:
      stage: the stage; it must have codecs.
      scales: value -> factor of its running sum.
    """
    ending = _Ending(stage, scales, (), (), {}, False)
    assert stage.sums is not None
    where = {
        m.decision.name: stage.sharding(value)
        for value, m in stage.sums.members.items()
        if worth_a_codec(m.decision.shape)
    }
    return jax.jit(ending.partials, out_shardings=where)


def summed_once(stage: Stage, cut: Cut, crossings: Collection[int]) -> Stage:
    """The stage, with the values that are summed over devices before tasks read them.

    Args:
      stage: a stage on its devices.
      cut: the tasks of all stages.
      crossings: values that are summed over microbatches.
    """
    updates = [
        task
        for task in cut.of_stage(stage.program.stage)
        if task.key.phase is Phase.UPDATE
    ]
    readers = Counter(v for task in updates for v, _ in task.inputs)
    due = stage.seen_by_updates.assignment.due
    early = frozenset(
        value
        for value, count in readers.items()
        if count > 1 and value in crossings and due(value) is not None
    )
    handed = frozenset(
        value for task in updates for value in task.outputs if due(value) is not None
    )
    return dataclasses.replace(stage, early=early, handed=handed)
