"""The running sums of a stage: how they start, and the values that they end as.

An update that clips gradients by their norm reads each gradient twice on a stage: for
the norm, and when the norm of all stages is known. These are two tasks, and each would
take the sum over devices. A sum that several tasks read is taken once, by whoever hands
it to them.
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
    """A jitted function without arguments that starts running sums."""
    structs = [wide(stage.struct(v)) for v in values]
    return jax.jit(
        lambda: [jnp.zeros(s.shape, s.dtype) for s in structs],
        out_shardings=[s.sharding for s in structs],
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Ending:
    """How the running sums of a stage end.

    Attributes:
      stage: the stage.
      scales: value -> what its running sum is multiplied by.
      held: the values that its own updates read.
      sent: the values that go to other stages.
      measured: as of `finish_code`.
      sparse: likewise.
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
        """A value whose sum over devices is taken."""
        after = self.stage.behind_codecs
        partial = after.assignment.partial_layout(value)
        if partial is None:
            return array
        waiting = stack(array, *partial, after.mesh)
        return PlainSums(after.assignment, after.mesh).take({value: waiting})[value]

    def partials(self, *totals: Any) -> dict[str, Any]:
        """The partial gradients that are worth a codec, by name."""
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
        """The whole gradients, bucket by bucket, and the norms of those measured."""
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
        """The running sums whose memory the values take over."""
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
    measured: Mapping[int, Axes] | None = None,
    *,
    sparse: bool = False,
) -> Any:
    """A jitted function from running sums to the values that they are of.

    Where the stage has codecs it takes the number of the step and their state first,
    and returns the values, the new state, telemetry and the levels that were taken.
    What is measured of their gradients comes last; with ``sparse`` it takes whether the
    step is measured behind the state.

    Args:
      stage: the stage.
      scales: value -> what its running sum is multiplied by.
      held: the values that its own updates read, which stay partial over devices but
        for those that codecs sum, and those that several updates read.
      sent: the values that go to other stages, whose sums are taken here.
      measured: gradient that is measured, of those that codecs send -> the mesh axes
        whose devices hold parts of their own rows.
      sparse: whether not all steps are measured.
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
        # What a codec is to send is not computed again in each loop that reads it.
        compiler_options=WITH_BARRIERS if stage.on_cpu else stage.options,
    )


def partials_code(stage: Stage, scales: Mapping[int, float]) -> Any:
    """A jitted function from running sums to the partial gradients of a stage, by name.

    Args:
      stage: the stage, which has codecs.
      scales: value -> what its running sum is multiplied by.
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
    """The stage, with the sums that it takes before its tasks read them.

    Args:
      stage: a stage on its devices.
      cut: the tasks of all stages.
      crossings: values of microbatches that are added up.
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
