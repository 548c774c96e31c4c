"""Choices of codecs written into plans, and read back from plans that were edited."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

import msgspec

from autopar.compression.codecs.registry import parse_codec
from autopar.cost.certainty import interval_s
from autopar.errors import PlanError
from autopar.planner.candidate import Candidate, SearchResult
from autopar.planner.codecs.choose import CodecChoice, gradient_decisions, judged
from autopar.planner.codecs.request import EDITED
from autopar.planner.codecs.sites import Site, sites
from autopar.planner.record import make_plan
from autopar.plans import Compression, GradientDecision, Plan
from autopar.steps.analysis import Analysis

_GIVEN = "codecs as they were given"


def with_codecs(
    analysis: Analysis,
    result: SearchResult,
    choice: CodecChoice,
    compression: Compression,
) -> Plan:
    """The plan of a choice of codecs.

    Args:
      analysis: the step.
      result: the search for its layouts; what it found gives way to the choice.
      choice: the codecs, and the layouts that they were chosen with.
      compression: says why.
    """
    best = choice.candidate
    # Layouts and codecs are chosen in turns: no bound holds for both together.
    bounded = best is result.best and not any(choice.codecs)
    floor_s = result.floor_s if bounded else 0.0
    found = dataclasses.replace(result, best=best, floor_s=floor_s)
    plan = make_plan(analysis, found)
    gradients = gradient_decisions(choice)
    low_s, high_s = interval_s(choice.cost, best.pricer.cluster.device)
    predicted = msgspec.structs.replace(
        plan.predicted,
        step_s=choice.step_s,
        compute_s=choice.cost.work_s + choice.cost.contention_s,
        communication_s=choice.cost.communication_s + choice.cost.codec_s,
        hidden_s=choice.cost.cover_s,
        communication_bytes=choice.cost.communication_bytes,
        peak_memory_bytes=plan.predicted.peak_memory_bytes + choice.memory_bytes,
        low_s=low_s,
        high_s=high_s,
    )
    made = msgspec.structs.replace(
        plan.with_stage(gradients=gradients),
        predicted=predicted,
        worth=plan.worth and plan.worth.faster(best.step_s / choice.step_s),
        compression=compression,
    )
    return made.stamped()


def with_codecs_of(
    analysis: Analysis, result: SearchResult, plan: Plan, *, edited: bool
) -> Plan:
    """The plan of layouts that were found, with the codecs of a plan.

    Args:
      analysis: the step.
      result: the layouts.
      plan: says by what each gradient is sent.
      edited: whether its codecs were changed. Each must be as it says then;
        otherwise a gradient that its codec cannot send is sent as it is.

    Raises:
      PlanError: the codecs were changed, and do not fit the gradients.
    """
    if not plan.gradients:
        return make_plan(analysis, result)
    best = result.best
    found = sites(analysis, best.assignment, best.pricer.mesh.axes)
    given = {g.name: g for g in plan.gradients}
    if edited:
        _check_given(given, found)
    codecs = codecs_of(given, found)
    choice = judged(best, found, codecs, {})
    compression = plan.compression
    if edited:
        compression = Compression(mode=EDITED, metric=compression.metric, reason=_GIVEN)
    compression = msgspec.structs.replace(compression, error=choice.error)
    made = with_codecs(analysis, result, choice, compression)
    return made.with_stage(
        gradients=tuple(_kept(given.get(g.name), g) for g in made.gradients)
    ).stamped()


def as_sent(analysis: Analysis, result: SearchResult, plan: Plan) -> Plan:
    """The plan of layouts that were found, with a plan's codecs gradient by gradient.

    A gradient that its codec cannot send here is sent as it is, with a warning.
    """
    best, made = result.best, with_codecs_of(analysis, result, plan, edited=False)
    given = {g.name: g.codec for g in plan.gradients}
    other = [g.name for g in made.gradients if g.codec != given.get(g.name, g.codec)]
    if other:
        warnings.warn(
            f"the gradients of {', '.join(other[:4])} cannot be sent by the plan's "
            f"codecs on {best.pricer.cluster}; they are sent as they are.",
            stacklevel=2,
        )
    compression = msgspec.structs.replace(
        made.compression, mode=EDITED, error_budget=None, reason=_GIVEN
    )
    return msgspec.structs.replace(made, compression=compression).stamped()


def check_fits(best: Candidate) -> None:
    """Raises `PlanError` where given layouts need more memory than a device has."""
    have = best.pricer.cluster.memory_bytes
    if best.peak_memory_bytes > have:
        raise PlanError(
            f"these layouts need {best.peak_memory_bytes / 1e9:.3g} GB on each device "
            f"of {best.pricer.cluster}, which has {have / 1e9:.3g} GB. Let "
            "autopar.plan choose the layouts, or plan for more devices."
        )


def codecs_of(given: dict[str, GradientDecision], found: Sequence[Site]) -> list[str]:
    """The codec of each gradient; 'dense' where that of the plan cannot send it."""
    texts = [given[s.name].codec if s.name in given else "" for s in found]
    if not any(texts):
        return texts
    return [
        text if _sends(site, text, given) else "dense"
        for site, text in zip(found, texts, strict=True)
    ]


def _sends(site: Site, text: str, given: dict[str, GradientDecision]) -> bool:
    """Whether a gradient can be sent so; '' is possible where the plan says it."""
    return not site.refuses(parse_codec(text)) if text else site.name in given


def _check_given(given: dict[str, GradientDecision], found: Sequence[Site]) -> None:
    names = {site.name for site in found}
    if differ := sorted(names ^ set(given)):
        raise PlanError(
            f"gradients: the plan sums {len(names)} gradients over devices, the edited "
            f"plan names {len(given)}; only in one of them: {', '.join(differ[:4])}."
        )
    for site in found:
        decision = given[site.name]
        if (decision.value, decision.shape) != (site.value, site.shape):
            raise PlanError(
                f"gradients: '{site.name}' is value {site.value} of shape "
                f"{site.shape}, the edited plan says {decision.value} of shape "
                f"{decision.shape}."
            )
        _check_codec(site, decision.codec)


def _check_codec(site: Site, text: str) -> None:
    if not text:
        return
    try:
        why = site.refuses(parse_codec(text))
    except ValueError as error:
        raise PlanError(f"gradients: '{site.name}': {error}") from error
    if why:
        raise PlanError(
            f"gradients: '{site.name}' cannot be sent as '{text}': {why} Try another "
            "codec."
        )


def _kept(given: GradientDecision | None, made: GradientDecision) -> GradientDecision:
    """A decision with what the plan says besides the codec."""
    if given is None or given.codec != made.codec:
        return made
    return msgspec.structs.replace(
        made,
        feedback=given.feedback,
        average_every=given.average_every,
        bucket=given.bucket,
    )
