"""The running sums of a stage over microbatches: their start and their final values.

Two tasks of a stage may read the same gradient in the update. For example, clipping by
the global norm reads each gradient for the norm, and again when the norm over all
stages is known. If these tasks summed the gradient over devices, each of them would
communicate. So a value that several tasks read is summed over devices once, before
these tasks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.compilers.options import joined
from autopar.compression.codecs.blocks import WITH_BARRIERS
from autopar.compression.synchronise import NON_FINITE, restore_unless_finite
from autopar.layouts.layout import Axes
from autopar.runtime import placement
from autopar.runtime.gradients.state_restorer import Carried
from autopar.runtime.gradients.sums import GradientSums, StagedSums, State
from autopar.runtime.gradients.synchroniser import CodecSynchroniser
from autopar.runtime.noise.norms import take_with_norms
from autopar.runtime.stages.stage import Sent, Stage, sum_dtype, wide
from autopar.runtime.stages.transport import Links
from autopar.steps.sums import worth_a_codec
from autopar_passes.replay.run import PlainSums
from autopar_passes.stages.cut import Cut, Phase
from autopar_passes.sums.stacked import Stacked, stack


def zeros_code(stage: Stage, values: Sequence[int]) -> Any:
    """Returns a jitted function without arguments that returns running sums of zero."""
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
    """Returns a jitted function from running sums to their final values.

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
        compiler_options=joined(
            WITH_BARRIERS if stage.on_cpu else stage.room, stage.given, stage.platform
        ),
    )


def partials_code(stage: Stage, scales: Mapping[int, float]) -> Any:
    """Returns a jitted function from running sums to the partial gradients of a stage.

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


# Codecs in a pipeline: each stage sums its gradients by codecs once in a step.
#
# A stage sums its gradients after its last microbatch and before its update. When all
# stages have summed, it is known whether all gradients of the step are finite. If they
# are not, every stage restores its state and its residuals.


@dataclasses.dataclass(frozen=True, eq=False)
class StagedCodecs:
    """How the stages of a pipeline sum their gradients by codecs.

    Attributes:
      sums: the gradients of all stages.
      state: the state that a step restores if a gradient is not finite.
      stages: the stages on their devices.
      donate: whether a step reuses the memory of the state it is given.
    """

    sums: StagedSums
    state: tuple[Carried, ...]
    stages: tuple[Stage, ...]
    donate: bool = True

    @functools.cached_property
    def decide(self) -> Any:
        """A jitted function that returns whether all gradients of the step are finite.

        Its arguments are the telemetry and the levels of all stages, and the counters.
        It returns whether all gradients are finite, the joined telemetry and levels,
        and the new counters.
        """

        def decide_levels(rows: Any, levels: Any, step: Any, skipped: Any) -> Any:
            every = jnp.concatenate(rows)
            finite = jnp.all(every[:, NON_FINITE] == 0)
            return finite, every, jnp.concatenate(levels), step + 1, skipped + ~finite

        return jax.jit(decide_levels, out_shardings=self.sums.counter)

    @functools.cached_property
    def settle(self) -> Mapping[int, Any]:
        """Stage -> a jitted function that restores the codec state if needed.

        Its arguments are whether all gradients are finite, the old and the new state.
        """
        return {k: self._settle_code(part) for k, part in self.sums.stages.items()}

    def _settle_code(self, part: GradientSums) -> Any:
        return jax.jit(
            lambda finite, old, new: restore_unless_finite(old, new, finite),
            out_shardings=part.shardings()["gradients"],
            donate_argnums=(1,) if self.donate else (),
        )

    def names(self, stage: int) -> list[str]:
        """Returns the names of a stage's gradients."""
        found = self.sums.stages[stage].members.values()
        return [member.decision.name for member in found]

    def clear_cache(self) -> None:
        """Frees compiled code."""
        for code in (self.decide, *self.settle.values()):
            code.clear_cache()


@dataclasses.dataclass(frozen=True, slots=True)
class CodecOutcome:
    """The results of the codecs in one step.

    Attributes:
      state: the state for the next step.
      telemetry: one row for each gradient, float32 (gradients, 6 or 10).
      levels: the level that sent each gradient, one-hot, int32 (gradients, levels).
    """

    state: State
    telemetry: jax.Array
    levels: jax.Array


class CodecStep:
    """The state and the results of the codecs during one step."""

    def __init__(
        self,
        codecs: StagedCodecs,
        state: State,
        links: Links | None,
        due: Any = None,
    ) -> None:
        """Starts a step.

        Args:
          codecs: the codecs of the pipeline.
          state: the state from `StagedSums.init`, or after the step before.
          links: the connections to other processes; None: there is one process.
          due: bool scalar: whether this step measures the norms of gradients; None:
            every step does, or none.
        """
        self.codecs = codecs
        self.links = links
        self.state = state
        own = [k for k in codecs.sums.stages if self._here(k)]
        self.steps = self._hand_scalar(own, state["step"])
        self.due = {} if due is None else self._hand_scalar(own, due)
        self.new: dict[int, dict[str, Any]] = {}
        self.told: dict[int, tuple[Any, Any]] = {}
        # The stages whose telemetry has been sent to all processes.
        self.shared: set[int] = set()
        # Stage -> whether all gradients of the step are finite; empty before `decide`.
        self.finite: dict[int, Any] = {}
        self.counted: tuple[Any, ...] = ()

    def _here(self, stage: int) -> bool:
        links = self.links
        return links is None or links.index in self.codecs.stages[stage].processes

    def _hand_scalar(self, stages: Sequence[int], scalar: Any) -> dict[int, Any]:
        """Stage -> a scalar, copied to all devices of the stage."""
        where = [self.codecs.stages[k].everywhere for k in stages]
        return dict(zip(stages, placement.replicate_array(scalar, where), strict=True))

    def sum_inputs(self, stage: int, *, measured: bool) -> tuple[Any, ...]:
        """Returns the arguments of `finish_code` that come before the running sums.

        These arguments are the number of the step and the state of the stage's codecs.
        If norms are measured only in some steps, a third argument says whether this
        step is measured.
        """
        every = self.state["gradients"]
        found = self.steps[stage], {n: every[n] for n in self.codecs.names(stage)}
        return (*found, self.due[stage]) if measured and self.due else found

    def take_sums(
        self, stage: int, new: dict[str, Any], rows: Any, levels: Any
    ) -> None:
        """Keeps the results of a stage's codecs for `decide` and `finish`."""
        self.new[stage] = new
        self.told[stage] = rows, levels

    def decide(self) -> None:
        """Computes on every process whether all gradients are finite."""
        sums = self.codecs.sums
        pairs = [self._own_telemetry(stage) for stage in sums.stages]
        rows, levels = zip(*jax.device_put(pairs, sums.counter), strict=True)
        state = self.state
        finite, *counted = self.codecs.decide(
            list(rows), list(levels), state["step"], state["skipped"]
        )
        self.counted = tuple(counted)
        own = [k for k in range(len(self.codecs.stages)) if self._here(k)]
        self.finite = self._hand_scalar(own, finite)

    def give_up(self) -> None:
        """Sends zeros in place of telemetry that this process has not computed."""
        for stage in self.codecs.sums.stages:
            if stage not in self.shared:
                self._own_telemetry(stage)

    def _own_telemetry(self, stage: int) -> tuple[Any, Any]:
        """Telemetry and levels of a stage, copied to a device of this process."""
        if self.links is None:
            return self.told[stage]
        self.shared.add(stage)
        members = len(self.codecs.names(stage))
        sums, links = self.codecs.sums, self.links
        source = self.codecs.stages[stage].everywhere
        structs = {
            "telemetry": jax.ShapeDtypeStruct((members, sums.columns), jnp.float32),
            "levels": jax.ShapeDtypeStruct((members, sums.num_levels), jnp.int32),
        }
        told = self.told.get(stage, (None, None))
        rows, levels = (
            links.everywhere((name, stage), struct, source, array)
            for (name, struct), array in zip(structs.items(), told, strict=True)
        )
        return rows, levels

    def finish(self) -> CodecOutcome:
        """Restores the state if needed, and returns the results of the codecs."""
        gradients = dict(self.state["gradients"])
        for stage, new in self.new.items():
            old = {name: gradients[name] for name in new}
            settled = self.codecs.settle[stage](self.finite[stage], old, new)
            gradients.update(settled)
        telemetry, levels, step, skipped = self.counted
        state = {"step": step, "skipped": skipped, "gradients": gradients}
        return CodecOutcome(state, telemetry, levels)
