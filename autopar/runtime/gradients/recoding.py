"""Plans whose codecs are changed while training, and what of that is saved.

What is saved is plain data: a text is an array of its bytes, which every checkpoint
library can hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from autopar.compression.codecs.codec import Codec
from autopar.compression.codecs.registry import format_codec, parse_codec
from autopar.errors import PlanError
from autopar.planner.codecs.adjusted import adjusted_plan, changed_families, families
from autopar.planner.codecs.sites import reprice_bytes
from autopar.plans import GradientDecision, Plan
from autopar.runtime.agreement import content_digest
from autopar.runtime.recent import Recent

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
    """A decision with another codec, its bytes counted anew.

    A gradient that has a residual keeps it, so that nothing is lost where codecs
    with and without feedback take turns.

    Args:
      decision: the decision.
      codec: one that can send the gradient.
      feedback: whether there is a residual to be kept.
    """
    changed = msgspec.structs.replace(
        decision,
        codec=format_codec(codec),
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
