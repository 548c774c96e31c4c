"""Makes settings of codecs inputs of the program, for the gradients of a plan.

A policy can change such a setting without compiling the program again
(`autopar.compression.adjusting`). A *decision* says how one gradient is sent. Codecs of
one *family* differ only in such settings.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec

from autopar.compression.adjusting import (
    Adjustable,
    Adjusted,
    family_of,
    fits,
    limit_of,
    room_for,
)
from autopar.compression.codecs.codec import Codec
from autopar.compression.codecs.registry import format_codec, parse_codec
from autopar.errors import PlanError
from autopar.planner.codecs.sites import reprice_bytes
from autopar.plans import GradientDecision, Plan

Decisions = Sequence[GradientDecision]


def codec_of(decision: GradientDecision) -> Codec:
    """Returns the codec that the compiled program has for a gradient.

    The bytes of the gradient in the decision are those that this codec sends.
    """
    if not decision.limit:
        return parse_codec(decision.codec)
    return Adjustable(parse_codec(decision.limit), decision.room)


def families(decisions: Decisions) -> set[Codec]:
    """Returns the families of codecs whose settings are inputs of the program."""
    limits = [parse_codec(g.limit) for g in decisions if g.limit]
    return {f for limit in limits if (f := family_of(limit)) is not None}


def changed_families(before: Decisions, after: Decisions) -> set[Codec]:
    """Returns the families of those codecs that a plan changes for a gradient."""
    known = {g.name: g for g in before}
    out: set[Codec] = set()
    for new in after:
        old = known.get(new.name, new)
        family = _family(new)
        if family is not None and family == _family(old) and old.codec != new.codec:
            out.add(family)
    return out


def adjust_inputs(
    decisions: Decisions, wanted: Iterable[Codec]
) -> tuple[GradientDecision, ...]:
    """Returns decisions in which exactly the codecs of the wanted families take inputs.

    The program sends messages of fixed sizes. Each gradient gets a part of its message
    in proportion to the bytes that its current settings need.
    """
    made = [_constant(g) for g in decisions]
    for family in wanted:
        numbers = [k for k, g in enumerate(made) if _family(g) == family]
        if not numbers:
            continue
        limit = limit_of([parse_codec(made[k].codec) for k in numbers])
        groups: dict[Any, list[int]] = defaultdict(list)
        for k in numbers:
            groups[_together(made[k])].append(k)
        for group in groups.values():
            new = _with_limit([made[k] for k in group], limit)
            for k, decision in zip(group, new, strict=True):
                made[k] = decision
    return tuple(made)


def adjusted_plan(plan: Plan, wanted: Collection[Codec]) -> Plan:
    """A plan with `adjust_inputs` applied to the decisions of each stage separately."""
    made = [adjust_inputs(stage.gradients, wanted) for stage in plan.stages]
    return plan.with_gradients([g for stage in made for g in stage])


def check_rooms(decisions: Decisions) -> None:
    """Checks that the gradients' bytes fit the program's messages of fixed size.

    Raises:
      PlanError: a gradient does not fit.
    """
    groups: dict[Any, list[GradientDecision]] = defaultdict(list)
    for g in decisions:
        if g.limit:
            groups[_together(g), g.limit, g.room].append(g)
    for (_, text, room), group in groups.items():
        limit = parse_codec(text)
        same = all(_family(g) == family_of(limit) for g in group)
        largest = limit_of([parse_codec(g.codec) for g in group]) if same else limit
        small = same and _size(largest) > _size(limit)
        if not same or small or not fits(_gradients(group), limit, room):
            first = group[0]
            raise PlanError(
                f"gradient '{first.name}': '{first.codec}' does not fit the limit "
                f"'{text}' and the room {room:.3g} that the plan states. Take limit "
                "and room out of its gradients."
            )


def program_plan(plan: Plan) -> Plan:
    """The part of a plan that determines its program, without the codecs' inputs."""
    return plan.with_gradients(
        [
            msgspec.structs.replace(g, codec=g.limit, wire_bytes=0.0, error=0.0)
            if g.limit
            else g
            for g in plan.gradients
        ]
    )


def _constant(decision: GradientDecision) -> GradientDecision:
    if not decision.limit:
        return decision
    return reprice_bytes(msgspec.structs.replace(decision, limit="", room=1.0))


def _with_limit(group: Decisions, limit: Codec) -> list[GradientDecision]:
    room = room_for(_gradients(group), limit)
    there = math.fsum(_nbytes(g, Adjustable(limit, room)) for g in group)
    used = math.fsum(g.wire_bytes for g in group)
    return [
        msgspec.structs.replace(
            g,
            limit=format_codec(limit),
            room=room,
            wire_bytes=g.wire_bytes * there / used if used else 0.0,
        )
        for g in group
    ]


def _nbytes(decision: GradientDecision, codec: Codec) -> float:
    shape, scatter = decision.local_shape, decision.scatter
    return codec.wire_bytes(shape, decision.workers, scatter=scatter)


def _gradients(group: Decisions) -> list[Adjusted]:
    return [
        Adjusted(parse_codec(g.codec), g.local_shape, g.workers, g.scatter)
        for g in group
    ]


def _family(decision: GradientDecision) -> Codec | None:
    return family_of(parse_codec(decision.codec)) if decision.codec else None


def _size(codec: Codec) -> float:
    return getattr(codec, codec.sized)


def _together(decision: GradientDecision) -> tuple[Any, ...]:
    """Returns a key that is equal for gradients whose encoded data share a message."""
    g = decision
    return g.bucket, g.axes, g.within, g.workers, g.scatter
