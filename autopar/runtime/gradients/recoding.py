"""Changes the codecs of a plan while training.

`Recoding` changes the codecs of a plan, and saves them in checkpoints. A checkpoint
holds a codec as an array with the bytes of its text, because every checkpoint library
can store arrays.

`Adoption` decides whether faster codecs are worth the compilation of their program. A
policy asks for faster codecs by `autopar.compression.policies.policy.Saving`, if the
codecs in use have no more error than the policy allows. If the program with the faster
codecs is not compiled already, it is compiled only if::

    saved_s steps + missed_s >= compile_s

Here ``saved_s`` is the predicted number of seconds that the change saves per step.
``steps`` is the number of steps for which the change is expected to stay. ``compile_s``
is the duration of the last compilation. ``missed_s`` is the number of seconds that
earlier steps would have saved by changes that were put off, counted since the last
compilation. It grows while a change is put off, so a change that the policy keeps
asking for is compiled at some time. Until then, the steps have lost no more seconds
than the compilation takes.
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

# Largest number of changed plans for which the original codecs are remembered.
PLANS = 64


class Recoding:
    """Changes the codecs of plans, and remembers the codecs of the original plans."""

    def __init__(self) -> None:
        """Creates the object without remembered plans."""
        self._planned: Recent[str, Mapping[str, str]] = Recent(PLANS)

    def change_codecs(
        self,
        plan: Plan,
        codecs: Mapping[str, str],
        *,
        lenient: bool = False,
        often: bool = False,
    ) -> Plan:
        """Returns the plan with other codecs for some gradients.

        Args:
          plan: the plan.
          codecs: name of a gradient -> its codec as text.
          lenient: whether a gradient keeps its old codec if the new codec cannot send
            this gradient; otherwise an error is raised.
          often: whether changed parameters of codecs become inputs of the program, if
            the codec allows this. Parameters that are inputs already stay inputs.

        Raises:
          PlanError: a name is not the name of a compressed gradient of the plan, or a
            codec is not known or cannot send its gradient.
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
        """The plan ``after``, with parameters of codecs as inputs of the program.

        Parameters that are inputs in ``before`` stay inputs.

        Args:
          before: the plan in use.
          after: the plan with other codecs.
          often: whether parameters that differ between the plans become inputs too.
        """
        wanted = families(before.gradients)
        if often:
            wanted |= changed_families(before.gradients, after.gradients)
        return adjusted_plan(after, wanted) if wanted else after

    def plan_as_used(self, plan: Plan, used: Plan) -> Plan:
        """Returns a plan with the codecs that another plan has been changed to.

        Gradients whose codecs have not been changed, and gradients that these codecs
        cannot send, keep the codecs of ``plan``.

        Args:
          plan: the plan for a batch of another shape.
          used: the plan of the step before.
        """
        changed = self._planned_of(used)
        known = {g.name: g for g in used.gradients if g.codec and g.name in changed}
        made: dict[str, GradientDecision] = {}
        for g in plan.gradients:
            wanted = known.get(g.name)
            if not g.codec or wanted is None or wanted.codec == g.codec:
                continue
            codec = parse_codec(wanted.codec)
            if not codec.check(g.local_shape, scatter=g.scatter):
                made[g.name] = with_codec(g, codec, feedback=wanted.feedback)
        if not made:
            return plan
        after = plan.with_gradients([made.get(g.name, g) for g in plan.gradients])
        new = self.with_inputs(used, after, often=False)
        return self._remember_decisions(plan, new.gradients)

    def plan_as_chosen(self, plan: Plan, chosen: Plan, *, often: bool) -> Plan:
        """Returns the plan with the codecs that were chosen for it anew.

        Args:
          plan: the plan.
          chosen: the same plan with other codecs.
          often: as for `change_codecs`.
        """
        new = self.with_inputs(plan, chosen, often=often)
        now = {g.name: g.codec for g in new.gradients}
        before = {g.name: g.codec for g in plan.gradients}
        changed = {name: x for name, x in before.items() if now.get(name, x) != x}
        if changed:
            self._planned.put(content_digest(new), changed | self._planned_of(plan))
        return new

    def plan_as_saved(self, plan: Plan, state: Any) -> Plan:
        """Returns the plan with the codecs that were saved with a state.

        The state holds two codecs of each gradient: the planned codec, and the codec in
        use when the state was saved. If the planned codec is equal to the codec of
        ``plan``, the gradient gets the codec in use. Otherwise the gradient keeps the
        codec of ``plan``.

        Raises:
          PlanError: a saved codec is not known.
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
        """Returns the texts to save for some gradients.

        Each gradient has three texts: the planned codec, the codec in use, and the
        limit of the codec (empty if the codec has no inputs).
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
        """Returns the plan with other decisions; remembers the original codecs.

        Returns ``plan`` itself if the decisions do not change.
        """
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
    """A decision with another codec, and with the bytes and the error of this codec.

    A gradient with a residual keeps the residual. So the residual is not lost if codecs
    with and without feedback alternate.

    Args:
      decision: the decision.
      codec: the new codec, which must be able to send the gradient.
      feedback: whether the gradient has a residual to keep.
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
    """Returns the bytes of a text as an array.

    An empty text becomes a blank, because checkpoints do not hold empty arrays.
    """
    return np.frombuffer((text or " ").encode(), np.uint8)


def _text(array: Any) -> str:
    return np.asarray(array, np.uint8).tobytes().decode().strip()


# Largest number of changes that are remembered.
CHANGES = 64


@dataclasses.dataclass(frozen=True, slots=True)
class CodecChange:
    """A change of codecs that a policy has requested.

    Attributes:
      step: number of steps that had run when the policy first asked for the change.
      codecs: name of a gradient -> its new codec.
      adopted: whether steps use the codecs from then on; if not, the change was put
        off.
      reason: why the change was adopted or put off, in words.
      saved_s: predicted seconds saved per step; 0 if no times were compared.
      steps: number of steps for which the change is expected to stay.
      missed_s: predicted seconds that earlier steps would have saved by changes that
        were put off.
      compile_s: duration of the last compilation of a program of the step, in seconds.
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
        """Whether the saved seconds are at least those of the compilation."""
        expected_s = self.saved_s * self.steps + self.missed_s
        return self.saved_s > 0 and expected_s >= self.compile_s


class Adoption:
    """The codec changes that a policy has requested, and the seconds lost by delays."""

    def __init__(self) -> None:
        """Creates the object without changes."""
        self._changes: deque[CodecChange] = deque(maxlen=CHANGES)
        self._missed_s = 0.0
        # The change that was put off last, if the policy still requests it; and the
        # step up to which the seconds that it would have saved are counted.
        self._waiting: CodecChange | None = None
        self._counted = 0

    @property
    def changes(self) -> tuple[CodecChange, ...]:
        """The latest changes, the newest last."""
        return tuple(self._changes)

    @property
    def waiting(self) -> Mapping[str, str]:
        """The codecs of the change that was put off; empty if none is still wanted."""
        return {} if self._waiting is None else self._waiting.codecs

    def count_missed(self, step: int) -> None:
        """Adds the seconds that steps up to number ``step`` would have saved."""
        if self._waiting is not None:
            steps = step - self._counted
            self._missed_s += max(0.0, self._waiting.saved_s) * steps
        self._counted = step

    def withdrawn(self) -> None:
        """Forgets the change that was put off; the policy no longer requests it."""
        self._waiting = None

    def follow(
        self, codecs: Mapping[str, str], *, compiled: bool, why: str = "asked for"
    ) -> None:
        """Records codecs that are used from now on, without comparing times.

        Args:
          codecs: name of a gradient -> its codec.
          compiled: whether the program with these codecs is already compiled.
          why: the reason, in words.
        """
        self._note(CodecChange(self._counted, codecs, adopted=True, reason=why))
        if not compiled:
            self._missed_s = 0.0

    def judge(
        self, codecs: Mapping[str, str], saved_s: float, steps: int, compile_s: float
    ) -> bool:
        """Decides whether codecs are used whose program is not compiled yet.

        Args:
          codecs: name of a gradient -> its codec.
          saved_s: predicted seconds that the codecs save per step.
          steps: number of steps for which the codecs are expected to stay.
          compile_s: expected seconds for the compilation of the program.
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
        # A change that is put off several times in a row is recorded only once.
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
    """Predicted seconds per step that other codecs of a plan save.

    Args:
      before: the plan in use.
      after: the same plan with other codecs.

    Raises:
      PlanError: the plan's mesh does not fit its cluster.
    """
    pricers = stage_pricers(before)
    return _codecs_s(before, pricers) - _codecs_s(after, pricers)


def _codecs_s(plan: Plan, pricers: Sequence[Pricer]) -> float:
    """Seconds per step for encoding, sending and decoding, on the slowest stage."""
    return max(
        sum(row.seconds for row in codec_rows(stage.gradients, pricer))
        for stage, pricer in zip(plan.stages, pricers, strict=True)
    )
