"""Runs steps whose gradients are sent by codecs, and reports what they did."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from autopar.compression.codecs.registry import parse_codec
from autopar.compression.exchange import wire_bytes
from autopar.compression.policies.policy import (
    GradientReport,
    MeasuredErrors,
    Observation,
    Policy,
    ProbingPolicy,
)
from autopar.compression.synchronise import (
    ERROR,
    GRADIENT,
    NON_FINITE,
    RESIDUAL,
    SENT,
    WANTED,
)
from autopar.errors import PlanError
from autopar.planner.codecs.sites import repriced
from autopar.plans import GradientDecision, Plan
from autopar.runtime import agreement
from autopar.runtime.gradients.codec_state import (
    carry_over,
    check_fits,
    restored,
)
from autopar.runtime.gradients.probing import ProbePrograms, measure_errors
from autopar.runtime.gradients.sums import GradientSums, Member, State
from autopar.runtime.planned import PlannedStep
from autopar.runtime.world import World


class CodecRun:
    """The codecs' side of a planned step: their state, telemetry and policy."""

    def __init__(self, policy: Policy | None) -> None:
        """Starts without state; the first step makes it."""
        self.policy = policy
        self._state: State | None = None
        self._saved: Any = None
        self._owner: GradientSums | None = None
        self._telemetry: Any = None
        self._level: Any = None
        self._taken: Any = None
        # Whether the next step is the first to be counted.
        self._count_anew = True
        self._planned: PlannedStep | None = None
        self._since = 0.0
        self._steps = 0
        self._done = 0
        self._measured: dict[str, MeasuredErrors] = {}
        self._probes = ProbePrograms()

    @property
    def state(self) -> State | None:
        """A copy of the state after the last step; None before the first.

        A copy, because the next step consumes the state itself.
        """
        if self._state is None:
            return self._saved
        return jax.tree.map(jnp.copy, self._state)

    def restore(self, state: Any) -> None:
        """Takes a saved state; the next step places it."""
        self._saved, self._state, self._owner = state, None, None

    def start_anew(self) -> None:
        """Forgets what steps have left; what was assigned and not yet used stays."""
        if self._state is not None:
            self._state, self._owner = None, None

    def check(self, sums: GradientSums | None) -> None:
        """Checks that the state can be carried over to another plan.

        It is carried over when a step runs: codecs that are chosen before then (see
        `ParallelStep.recode`) may keep a residual that the plan's own would drop.

        Raises:
          PlanError: the state does not fit the plan's gradients.
        """
        if sums is not None and self._state is not None:
            check_fits(self._state, sums)

    def run(
        self, planned: PlannedStep, placed: Sequence[Any], world: World
    ) -> list[Any]:
        """Runs one step and keeps the codecs' new state."""
        sums = planned.sums
        assert sums is not None
        state = self._state_for(sums)
        probes = self.policy.probes if isinstance(self.policy, ProbingPolicy) else ()
        if probes and self._observed(self._done + 1):
            self._measure(probes, planned, placed, state, world)
        # A program that runs for the first time is compiled first.
        new = self._planned is not planned
        flat, self._state, self._telemetry, self._level = planned.function(
            *placed, state
        )
        self._count(sums, new)
        self._planned = planned
        self._done += 1
        if new:
            jax.block_until_ready(self._telemetry)
            self._since, self._steps = time.perf_counter(), 0
        else:
            self._steps += 1
        return flat

    def _count(self, sums: GradientSums, new: bool) -> None:
        """Counts the levels that steps take, on the devices: none waits for it."""
        if sums.fallback is not None:
            anew = new or self._count_anew
            self._taken = self._level if anew else _add(self._taken, self._level)
            self._count_anew = False

    def _observed(self, done: int) -> bool:
        """Whether the policy looks at a step."""
        return self.policy is not None and done % max(1, self.policy.every) == 0

    def _measure(
        self,
        probes: Sequence[str],
        planned: PlannedStep,
        placed: Sequence[Any],
        state: State,
        world: World,
    ) -> None:
        """Finds what codecs would lose in the step to come; its time is not counted."""
        assert planned.gradients is not None
        assert planned.sums is not None
        jax.block_until_ready(self._telemetry)
        begin = time.perf_counter()
        partials = planned.gradients(*placed)
        self._measured = measure_errors(
            planned.sums, partials, state, probes, world, self._probes
        )
        self._since += time.perf_counter() - begin

    def _state_for(self, sums: GradientSums) -> State:
        if self._owner is not sums:
            if self._state is not None:
                self._state = carry_over(self._state, sums)
            elif self._saved is not None:
                self._state = restored(self._saved, sums)
            else:
                self._state = sums.init()
            self._saved, self._owner = None, sums
        assert self._state is not None
        return self._state

    def report(self) -> dict[str, GradientReport]:
        """The telemetry of the last step, by parameter.

        Raises:
          PlanError: no step has run yet.
        """
        if self._planned is None:
            raise PlanError("telemetry: no step has run yet.")
        telemetry = np.asarray(self._telemetry, dtype=float)
        sums = self._planned.sums
        assert sums is not None
        reports = {
            m.decision.name: _report(m.decision, row)
            for m, row in zip(sums.members.values(), telemetry, strict=True)
        }
        return self._with_levels(sums, reports) if sums.fallback else reports

    def _with_levels(
        self, sums: GradientSums, reports: dict[str, GradientReport]
    ) -> dict[str, GradientReport]:
        """Reports with the levels that were taken, and what the last one sent."""
        last = np.argmax(np.asarray(self._level), axis=1)
        counts = np.asarray(self._taken)
        found: dict[str, GradientReport] = {}
        for member, level, count in zip(
            sums.members.values(), last.tolist(), counts.tolist(), strict=True
        ):
            report = reports[member.decision.name]
            found[member.decision.name] = dataclasses.replace(
                report,
                wire_bytes=_wire_bytes(member, level),
                level=level,
                taken=tuple(count),
            )
        return found

    def finite(self) -> bool:
        """Whether every gradient of the last step was finite."""
        return not np.asarray(self._telemetry)[:, NON_FINITE].any()

    def advise(self, world: World) -> Mapping[str, str] | None:
        """What the policy wants from the next step on; None: no change."""
        if self.policy is None or not self._observed(self._done):
            return None
        finite, gradients = self.finite(), self.report()
        seconds = (time.perf_counter() - self._since) / max(1, self._steps)
        seconds = agreement.shared_number(world, seconds)
        self._since, self._steps = time.perf_counter(), 0
        if not finite:
            bad = [n for n, r in gradients.items() if not np.isfinite(r.norm)]
            warnings.warn(
                f"step {self._done}: the gradients of {', '.join(bad[:4])} are not "
                "finite; the step was skipped and the state kept.",
                stacklevel=3,
            )
        measured, self._measured = self._measured, {}
        self._count_anew = True
        seen = Observation(self._done, seconds, gradients, finite, measured)
        return self.policy.observe(seen)


@jax.jit
def _add(counts: jax.Array, more: jax.Array) -> jax.Array:
    return counts + more


def _wire_bytes(member: Member, level: int) -> float:
    """Bytes that one device sends by a level."""
    if level == 0:
        return member.decision.wire_bytes
    gradient = member.levels[level]
    return wire_bytes(
        gradient.codec,
        gradient.shape,
        member.summation.workers,
        scatter=gradient.scatter,
    )


def _report(decision: GradientDecision, row: np.ndarray) -> GradientReport:
    wanted = float(row[WANTED])
    return GradientReport(
        codec=decision.codec,
        elements=int(np.prod(decision.shape)),
        wire_bytes=decision.wire_bytes,
        dense_bytes=decision.dense_bytes,
        norm=float(np.sqrt(wanted)),
        relative_error=float(np.sqrt(row[ERROR] / wanted)) if wanted > 0 else 0.0,
        gain=float(row[SENT] / wanted) if wanted > 0 else 1.0,
        residual_norm=float(np.sqrt(row[RESIDUAL])),
        gradient_norm=float(np.sqrt(row[GRADIENT])),
    )


def recoded(plan: Plan, codecs: Mapping[str, str]) -> Plan:
    """The plan with other codecs for some gradients.

    Raises:
      PlanError: a name is none of its gradients.
    """
    known = {g.name for g in plan.gradients if g.codec}
    if unknown := sorted(set(codecs) - known):
        raise PlanError(
            f"no compressed gradient named {', '.join(unknown[:4])}; the plan has "
            f"{', '.join(sorted(known)[:8])}."
        )
    return plan.with_stage(
        gradients=tuple(
            with_codec(g, codecs[g.name]) if g.name in codecs else g
            for g in plan.gradients
        ),
    )


def with_codec(decision: GradientDecision, text: str) -> GradientDecision:
    """A decision with another codec, its bytes counted anew.

    A gradient that has a residual keeps it, so that nothing is lost where codecs
    with and without feedback take turns; one that the codec cannot send stays as
    it is.
    """
    codec = parse_codec(text)
    if codec.check(decision.local_shape, scatter=decision.scatter):
        return decision
    feedback = decision.feedback or codec.feedback
    changed = msgspec.structs.replace(decision, codec=text, feedback=feedback)
    return repriced(changed)
