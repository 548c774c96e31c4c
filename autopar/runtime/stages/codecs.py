"""Codecs in a pipeline: each stage sums its gradients by codecs once in a step.

A stage sums its gradients after its last microbatch and before its update. When all
stages have summed, it is known whether all gradients of the step are finite. If they
are not, every stage restores its state and its residuals.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.compression.synchronise import NON_FINITE, restore_unless_finite
from autopar.runtime import placement
from autopar.runtime.gradients.state_restorer import Carried
from autopar.runtime.gradients.sums import GradientSums, StagedSums, State
from autopar.runtime.stages.stage import Stage
from autopar.runtime.stages.transport import Links


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
        """A jitted function that tells whether all gradients of the step are finite.

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
        """The names of a stage's gradients."""
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
        """The arguments of `finish_code` that come before the running sums.

        They are the number of the step and the state of the stage's codecs. If norms
        are measured only in some steps, a third one says whether this step is measured.
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
