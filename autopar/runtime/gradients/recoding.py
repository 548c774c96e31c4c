"""Plans whose codecs are changed while training, and what of that is saved.

What is saved is plain data: a text is an array of its bytes, which every checkpoint
library can hold.

Decides when codecs that save time are worth the compilation of their program.

A policy answers with `autopar.compression.policies.policy.Saving` where the codecs in
use lose no more than it allows, and others would take less time. Their program, if it
is not compiled already, has to pay for its compilation::

    saved_s steps + missed_s >= compile_s

with ``saved_s`` the predicted seconds that a step saves, ``steps`` those for which the
change stays, ``compile_s`` what the last compilation took, and ``missed_s`` what steps
would have saved so far by changes that were put off, since the last that was compiled.
So a change that stays wanted is compiled in the end, though nobody knows how long it
stays: the steps before it have then lost no more than its compilation takes.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from autopar.compression.codecs.codec import Codec
from autopar.compression.codecs.registry import format_codec, parse_codec
from autopar.cost.pricer import Pricer
from autopar.errors import PlanError
from autopar.planner.codecs.adjusted import adjusted_plan, changed_families, families
from autopar.planner.codecs.sites import reprice_bytes
from autopar.planner.stages.submeshes import stage_pricers
from autopar.plans import GradientDecision, Plan
from autopar.reports.gradients import codec_rows
from autopar.runtime.agreement import content_digest
from autopar.runtime.recent import Recent
from autopar.units import seconds_text

# Plans with changed codecs of which is known what they were planned with.
PLANS = 64


class Recoding:
    """Changes the codecs of plans, and remembers what they were planned with."""

    def __init__(self) -> None:
        """Has changed none yet."""
        self._planned: Recent[str, Mapping[str, str]] = Recent(PLANS)

    def change_codecs(
        self,
        plan: Plan,
        codecs: Mapping[str, str],
        *,
        lenient: bool = False,
        often: bool = False,
    ) -> Plan:
        """The plan with other codecs for some gradients.

        Args:
          plan: the plan.
          codecs: name of a gradient -> its codec as text.
          lenient: whether a gradient that its codec cannot send stays as it is.
          often: whether parameters that are changed become inputs of the program, if
            they can be. Those that are inputs already stay so.

        Raises:
          PlanError: a name is none of its gradients, or a codec is not known or cannot
            send its gradient.
        """
        known = {g.name: g for g in plan.gradients if g.codec}
        if not isinstance(codecs, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(
                f"recode: expected a dictionary of parameters and codecs, or 'auto', "
                f"got {codecs!r}."
            )
        if codecs and not known:
            raise PlanError(
                "recode: this plan compresses no gradient. Plan with compression=, "
                "such as compression='auto'."
            )
        if unknown := sorted(set(codecs) - set(known)):
            raise PlanError(
                f"no compressed gradient named {', '.join(unknown[:4])}; the plan has "
                f"{', '.join(sorted(known)[:8])}."
            )
        made: dict[str, GradientDecision] = {}
        for name, text in codecs.items():
            codec, decision = (
                _parse_codec(f"recode: gradient '{name}'", text),
                known[name],
            )
            why = codec.check(decision.local_shape, scatter=decision.scatter)
            if why and not lenient:
                raise PlanError(
                    f"recode: gradient '{name}' cannot be sent as '{text}': {why} Try "
                    "another codec."
                )
            made[name] = decision if why else with_codec(decision, codec)
        after = tuple(made.get(g.name, g) for g in plan.gradients)
        new = self.with_inputs(plan, plan.with_gradients(after), often=often)
        return self._remember_decisions(plan, new.gradients)

    def with_inputs(self, before: Plan, after: Plan, *, often: bool) -> Plan:
        """A plan in which parameters that are or become inputs are so.

        Args:
          before: the plan in use.
          after: the plan with other codecs.
          often: whether those that differ become inputs.
        """
        wanted = families(before.gradients)
        if often:
            wanted |= changed_families(before.gradients, after.gradients)
        return adjusted_plan(after, wanted) if wanted else after

    def plan_as_saved(self, plan: Plan, state: Any) -> Plan:
        """The plan with the codecs that were saved with a state.

        A gradient that the plan sends as the plan did when the state was saved is sent
        as it was sent last. One that the plan sends otherwise stays so.

        Raises:
          PlanError: a codec is not known.
        """
        texts = state.get("codecs", {}) if isinstance(state, dict) else {}
        made: dict[str, GradientDecision] = {}
        limits: list[GradientDecision] = list(plan.gradients)
        for g in plan.gradients:
            if not g.codec or g.name not in texts:
                continue
            planned, sent = (_text(texts[g.name][key]) for key in ("planned", "sent"))
            if planned != g.codec:
                continue
            codec = _parse_codec(f"compression_state: gradient '{g.name}'", sent)
            if not codec.check(g.local_shape, scatter=g.scatter):
                kept = state["gradients"].get(g.name, {}).get("residual", ())
                made[g.name] = with_codec(
                    g, codec, feedback=not isinstance(kept, tuple)
                )
                limit = _text(texts[g.name].get("limit", ()))
                limits.append(msgspec.structs.replace(g, limit=limit))
        after = plan.with_gradients([made.get(g.name, g) for g in plan.gradients])
        new = adjusted_plan(after, families(limits))
        return self._remember_decisions(plan, new.gradients)

    def texts(self, plan: Plan, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Returns the codecs of some gradients to save: as planned, and as sent.

        With the limits of those that have inputs.
        """
        planned = self._planned_of(plan)
        known = {g.name: g for g in plan.gradients if g.codec}
        return {
            name: {
                "planned": _bytes(planned.get(name, known[name].codec)),
                "sent": _bytes(known[name].codec),
                "limit": _bytes(known[name].limit),
            }
            for name in names
            if name in known
        }

    def _remember_decisions(
        self, plan: Plan, after: tuple[GradientDecision, ...]
    ) -> Plan:
        """The plan with other decisions; itself if they are what it says."""
        if after == plan.gradients:
            return plan
        new = plan.with_gradients(after)
        before = {
            old.name: old.codec
            for old, made in zip(plan.gradients, after, strict=True)
            if old != made
        }
        self._planned.put(content_digest(new), before | self._planned_of(plan))
        return new

    def _planned_of(self, plan: Plan) -> dict[str, str]:
        return dict(self._planned.get(content_digest(plan)) or {})


def with_codec(
    decision: GradientDecision, codec: Codec, *, feedback: bool = False
) -> GradientDecision:
    """A decision with another codec, its bytes and its error those of the codec.

    A gradient that has a residual keeps it, so that nothing is lost where codecs
    with and without feedback take turns.

    Args:
      decision: the decision.
      codec: one that can send the gradient.
      feedback: whether there is a residual to be kept.
    """
    text, error = format_codec(codec), decision.error
    changed = msgspec.structs.replace(
        decision,
        codec=text,
        error=error if text == decision.codec else codec.error(decision.local_shape),
        limit="",
        room=1.0,
        feedback=decision.feedback or codec.feedback or feedback,
    )
    return reprice_bytes(changed)


def _parse_codec(where: str, text: str) -> Codec:
    try:
        return parse_codec(text)
    except (ValueError, TypeError, AttributeError) as error:
        raise PlanError(f"{where}: {error}") from error


def _bytes(text: str) -> np.ndarray:
    """Text as an array; a blank stands for none, as arrays of no size are not saved."""
    return np.frombuffer((text or " ").encode(), np.uint8)


def _text(array: Any) -> str:
    return np.asarray(array, np.uint8).tobytes().decode().strip()


# Most changes that are remembered.
CHANGES = 64


@dataclasses.dataclass(frozen=True, slots=True)
class CodecChange:
    """A change of codecs that a policy has asked for.

    Attributes:
      step: number of steps done when it was first asked for.
      codecs: by name of the gradient.
      adopted: whether steps use them from then on; else they were put off.
      reason: why, in words.
      saved_s: predicted seconds that a step saves; 0 where nothing is compared.
      steps: for which the change is expected to stay.
      missed_s: predicted seconds that steps before would have saved.
      compile_s: seconds that the last compilation of a program of the step took.
    """

    step: int
    codecs: Mapping[str, str]
    adopted: bool
    reason: str
    saved_s: float = 0.0
    steps: int = 0
    missed_s: float = 0.0
    compile_s: float = 0.0

    @property
    def pays(self) -> bool:
        """Whether what it saves reaches the time that its program takes to compile."""
        expected_s = self.saved_s * self.steps + self.missed_s
        return self.saved_s > 0 and expected_s >= self.compile_s


class Adoption:
    """The changes that a policy has asked for, and what steps miss by those put off."""

    def __init__(self) -> None:
        """Nothing has been asked for yet."""
        self._changes: deque[CodecChange] = deque(maxlen=CHANGES)
        self._missed_s = 0.0
        # The change that was put off last, if it is still wanted, and the step up to
        # which it has been counted.
        self._waiting: CodecChange | None = None
        self._counted = 0

    @property
    def changes(self) -> tuple[CodecChange, ...]:
        """The latest changes, the newest last."""
        return tuple(self._changes)

    @property
    def waiting(self) -> Mapping[str, str]:
        """The codecs that were put off and are still wanted."""
        return {} if self._waiting is None else self._waiting.codecs

    def count_missed(self, step: int) -> None:
        """Counts what the steps up to this one have missed."""
        if self._waiting is not None:
            steps = step - self._counted
            self._missed_s += max(0.0, self._waiting.saved_s) * steps
        self._counted = step

    def withdrawn(self) -> None:
        """The policy asks for nothing, or something else was decided."""
        self._waiting = None

    def follow(
        self, codecs: Mapping[str, str], *, compiled: bool, why: str = "asked for"
    ) -> None:
        """Notes codecs that are used from now on without being compared.

        Args:
          codecs: by name of the gradient.
          compiled: whether their program is there.
          why: the reason, in words.
        """
        self._note(CodecChange(self._counted, codecs, adopted=True, reason=why))
        if not compiled:
            self._missed_s = 0.0

    def judge(
        self, codecs: Mapping[str, str], saved_s: float, steps: int, compile_s: float
    ) -> bool:
        """Whether codecs whose program has to be compiled are used from now on.

        Args:
          codecs: by name of the gradient.
          saved_s: predicted seconds that they save in a step.
          steps: for which they are expected to stay.
          compile_s: seconds that their program is expected to take to compile.
        """
        asked = CodecChange(
            step=self._counted,
            codecs=codecs,
            adopted=False,
            reason="",
            saved_s=saved_s,
            steps=steps,
            missed_s=self._missed_s,
            compile_s=compile_s,
        )
        why = "pays for its compilation" if asked.pays else _why_not(asked)
        made = dataclasses.replace(asked, adopted=asked.pays, reason=why)
        self._note(made)
        if made.adopted:
            self._missed_s = 0.0
        return made.adopted

    def _note(self, change: CodecChange) -> None:
        last = self._waiting
        # What is asked for again and put off again is one change.
        if last is not None and not change.adopted and last.codecs == change.codecs:
            self._changes.remove(last)
            change = dataclasses.replace(change, step=last.step)
        self._changes.append(change)
        self._waiting = None if change.adopted else change


def _why_not(asked: CodecChange) -> str:
    if asked.saved_s <= 0:
        return "put off: no step is predicted to be faster"
    return (
        f"put off: saves {seconds_text(asked.saved_s)} in each of {asked.steps} steps, "
        f"{seconds_text(asked.missed_s)} in those before, and compiles for "
        f"{seconds_text(asked.compile_s)}"
    )


def saved_s(before: Plan, after: Plan) -> float:
    """Predicted seconds of a step that other codecs of a plan save.

    Args:
      before: the plan in use.
      after: the same with other codecs.

    Raises:
      PlanError: the plan's mesh is none of its cluster.
    """
    pricers = stage_pricers(before)
    return _codecs_s(before, pricers) - _codecs_s(after, pricers)


def _codecs_s(plan: Plan, pricers: Sequence[Pricer]) -> float:
    """Seconds of a step for encoding, sending and decoding, on the slowest stage."""
    return max(
        sum(row.seconds for row in codec_rows(stage.gradients, pricer))
        for stage, pricer in zip(plan.stages, pricers, strict=True)
    )
