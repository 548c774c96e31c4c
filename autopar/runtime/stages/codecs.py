"""Codecs of a pipeline: each stage sums its gradients by them once a step.

A stage sums behind its microbatches, before its update. Whether all gradients are
finite is known once all stages have summed; then state and residuals are kept, or
restored on every stage.
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
      state: what a step restores where a gradient is not finite.
      stages: the stages on their devices.
      donate: whether a step takes over the memory of its state.
    """

    sums: StagedSums
    state: tuple[Carried, ...]
    stages: tuple[Stage, ...]
    donate: bool = True

    @functools.cached_property
    def decide(self) -> Any:
        """A jitted function of all telemetry and levels, and of the counters."""

        def decide_levels(rows: Any, levels: Any, step: Any, skipped: Any) -> Any:
            every = jnp.concatenate(rows)
            finite = jnp.all(every[:, NON_FINITE] == 0)
            return finite, every, jnp.concatenate(levels), step + 1, skipped + ~finite

        return jax.jit(decide_levels, out_shardings=self.sums.counter)

    @functools.cached_property
    def settle(self) -> Mapping[int, Any]:
        """By stage, a jitted function of the verdict and the old and new state."""
        return {k: self._settle_code(part) for k, part in self.sums.stages.items()}

    def _settle_code(self, part: GradientSums) -> Any:
        return jax.jit(
            lambda finite, old, new: restore_unless_finite(old, new, finite),
            out_shardings=part.shardings()["gradients"],
            donate_argnums=(1,) if self.donate else (),
        )

    def names(self, stage: int) -> list[str]:
        """The gradients of a stage."""
        found = self.sums.stages[stage].members.values()
        return [member.decision.name for member in found]

    def clear_cache(self) -> None:
        """Frees compiled code."""
        for code in (self.decide, *self.settle.values()):
            code.clear_cache()


@dataclasses.dataclass(frozen=True, slots=True)
class CodecOutcome:
    """What the codecs of a step leave behind.

    Attributes:
      state: for the next step.
      telemetry: a row for each gradient, float32 (gradients, 6 or 10).
      levels: one at the level that each gradient took, int32 (gradients, levels).
    """

    state: State
    telemetry: jax.Array
    levels: jax.Array


class CodecStep:
    """The codecs' side of one step."""

    def __init__(
        self,
        codecs: StagedCodecs,
        state: State,
        links: Links | None,
        due: Any = None,
    ) -> None:
        """Starts with the state of the step before.

        Args:
          codecs: of the pipeline.
          state: of `StagedSums.init`, or after a step.
          links: to the other processes; None: there are none.
          due: whether gradients are measured; None: this is not asked.
        """
        self.codecs = codecs
        self.links = links
        self.state = state
        own = [k for k in codecs.sums.stages if self._here(k)]
        self.steps = self._hand_scalar(own, state["step"])
        self.due = {} if due is None else self._hand_scalar(own, due)
        self.new: dict[int, dict[str, Any]] = {}
        self.told: dict[int, tuple[Any, Any]] = {}
        # The stages whose telemetry has gone to all processes.
        self.shared: set[int] = set()
        # By stage, whether all gradients of the step are finite; once `decide` ran.
        self.finite: dict[int, Any] = {}
        self.counted: tuple[Any, ...] = ()

    def _here(self, stage: int) -> bool:
        links = self.links
        return links is None or links.index in self.codecs.stages[stage].processes

    def _hand_scalar(self, stages: Sequence[int], scalar: Any) -> dict[int, Any]:
        """A scalar of this process on all devices of its stages."""
        where = [self.codecs.stages[k].everywhere for k in stages]
        return dict(zip(stages, placement.replicate_array(scalar, where), strict=True))

    def sum_inputs(self, stage: int, *, measured: bool) -> tuple[Any, ...]:
        """What a stage sums its gradients with: the step's number, and its state.

        Where they are measured, whether they are in this step comes last, if not
        in all.
        """
        every = self.state["gradients"]
        found = self.steps[stage], {n: every[n] for n in self.codecs.names(stage)}
        return (*found, self.due[stage]) if measured and self.due else found

    def take_sums(
        self, stage: int, new: dict[str, Any], rows: Any, levels: Any
    ) -> None:
        """Takes what a stage has found; later `decide` looks at all of it."""
        self.new[stage] = new
        self.told[stage] = rows, levels

    def decide(self) -> None:
        """Finds on every process whether all gradients are finite."""
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
        """Hands others zeros for what this process failed to find."""
        for stage in self.codecs.sums.stages:
            if stage not in self.shared:
                self._own_telemetry(stage)

    def _own_telemetry(self, stage: int) -> tuple[Any, Any]:
        """Telemetry and levels of a stage, on a device of this process."""
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
        """The state for the next step, and what was sent."""
        gradients = dict(self.state["gradients"])
        for stage, new in self.new.items():
            old = {name: gradients[name] for name in new}
            settled = self.codecs.settle[stage](self.finite[stage], old, new)
            gradients.update(settled)
        telemetry, levels, step, skipped = self.counted
        state = {"step": step, "skipped": skipped, "gradients": gradients}
        return CodecOutcome(state, telemetry, levels)
