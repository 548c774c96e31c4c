"""Divides the predicted seconds of a step among causes, such as single operators."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from autopar.cost.breakdown import CostBreakdown, step_s
from autopar.cost.estimate import StepEstimate, estimate
from autopar.cost.rows import exchange_s
from autopar.planner.scheme import is_repeated
from autopar.reports.explain import BoundPlan
from autopar.reports.table import collapse, template
from autopar.steps.program_text import array_name, operator_name
from autopar.terminal import columns, names_text
from autopar.units import seconds_text, share_text
from autopar_passes.graph.operators import Operator

OPERATOR, LAYER = "operator", "layer"
WAYS = (OPERATOR, LAYER)
OUTSIDE = "(no module)"
COMPUTE, AGAIN = "compute", "compute again"
HIDDEN, SLOWED, CODECS = "hidden beside work", "work slowed meanwhile", "codecs"
ROWS = "exchange of rows"
# Words that `jax.checkpoint` adds to the path of a module.
_REMAT = frozenset({"checkpoint", "rematted_computation"})
HEADING = ("what", "of", "in", "takes", "of the step")


@dataclasses.dataclass(frozen=True, slots=True)
class AttributedTime:
    """Seconds of a step with one cause.

    Attributes:
      what: the cause: ``compute``, ``compute again`` (work that rematerialisation
        repeats), the kind of a collective, or a cause of the whole step.
      names: names of the operators, arrays or layers.
      phase: forward, backward or update; '' for the whole step.
      seconds: the seconds; negative for time saved by overlap.
    """

    what: str
    names: tuple[str, ...]
    phase: str
    seconds: float

    @property
    def whole(self) -> bool:
        """Whether the seconds belong to the whole step rather than to a layer."""
        return not self.phase


def attribute(bound: BoundPlan, by: str) -> list[AttributedTime]:
    """Divides the seconds of a step among causes.

    The longest time comes first; causes of the whole step come last. Equal repeated
    layers share an entry. All entries add up to the predicted seconds of the step.

    Args:
      bound: the plan.
      by: ``operator`` or ``layer``.
    """
    found = estimate(bound.assignment, bound.pricer)
    groups: dict[tuple[str, str, str], list[tuple[str, float]]] = defaultdict(list)
    for what, phase, name, seconds in (
        *_work_parts(bound, found, by),
        *_message_parts(bound, found, by),
    ):
        groups[what, phase, template(name)].append((name, seconds))
    parts = [
        AttributedTime(
            what,
            tuple(sorted({name for name, _ in found})),
            phase,
            math.fsum(seconds for _, seconds in found),
        )
        for (what, phase, _), found in groups.items()
    ]
    parts.sort(key=lambda part: -part.seconds)
    return [*parts, *_of_the_whole(bound, found.cost)]


def _work_parts(
    bound: BoundPlan, found: StepEstimate, by: str
) -> Iterator[tuple[str, str, str, float]]:
    """Yields the work of each operator: cause, phase, name and seconds.

    The work of a class of equivalent operators is divided among its operators in
    proportion to their numbers of runs.
    """
    analysis, work = bound.analysis, found.work
    members: dict[int, list[Operator]] = defaultdict(list)
    for op in analysis.graph.operators:
        members[op.class_index].append(op)
    seconds = (work.planned_s + work.kernel_s).tolist()
    for member, own in zip(work.table.operators.tolist(), seconds, strict=True):
        for op in members[member] if own else ():
            name = operator_name(analysis, op.index) if by == OPERATOR else layer_of(op)
            what = AGAIN if is_repeated(op) else COMPUTE
            yield what, op.role.value, name, op.trips / analysis.trips[member] * own


def _message_parts(
    bound: BoundPlan, found: StepEstimate, by: str
) -> Iterator[tuple[str, str, str, float]]:
    """Yields the time of each collective: kind, phase, name and seconds."""
    sent = found.messages
    priced = zip(sent.collectives, sent.planned_s.tolist(), strict=True)
    crossing = ((c, c.seconds(bound.pricer)) for c in bound.crossing)
    for c, own in (*priced, *crossing):
        op = bound.analysis.graph.operators[c.operator]
        name = layer_of(op) if by == LAYER else array_name(bound.analysis, c.value)
        yield c.step.kind, op.role.value, name, own


def layer_of(op: Operator) -> str:
    """The path of the module that an operator belongs to.

    Words that JAX adds to the path are removed: the words of rematerialisation, the
    outermost module if rematerialisation repeats its name, and the formulas of einsums.
    """
    words = [word for word in op.module.split("/") if word and word not in _REMAT]
    words = [word for word in words if "->" not in word]
    if words[:1] == words[1:2]:
        words = words[1:]
    return "/".join(words) or OUTSIDE


def _of_the_whole(bound: BoundPlan, cost: CostBreakdown) -> Iterator[AttributedTime]:
    """Yields the seconds that belong to no layer.

    The seconds are those of the exchange of rows, of codecs, of communication that
    overlaps with work (negative), and of the slowdown of work by this communication.
    """
    if rows_s := exchange_s(bound.assignment, bound.pricer):
        yield AttributedTime(ROWS, (), "", rows_s)
    if cost.contention_s:
        yield AttributedTime(SLOWED, (), "", cost.contention_s)
    codecs_s = cost.codec_s  # of gathers only: the sums of gradients are dense here
    if coded := any(gradient.codec for gradient in bound.plan.gradients):
        codecs_s += bound.plan.predicted.step_s - step_s(cost)
        codecs_s -= math.fsum(c.seconds(bound.pricer) for c in bound.crossing)
    if codecs_s or coded:
        yield AttributedTime(CODECS, (), "", codecs_s)
    if hidden := min(cost.cover_s, cost.hideable_total_s):
        yield AttributedTime(HIDDEN, (), "", -hidden)


def step_of(parts: Sequence[AttributedTime]) -> float:
    """Seconds of the step: the sum of its parts."""
    return math.fsum(part.seconds for part in parts)


def part_lines(parts: Sequence[AttributedTime], top: int) -> list[str]:
    """The parts as a table; see `part_cells`."""
    return columns([HEADING, *part_cells(parts, top)], right=(3, 4))


def part_cells(parts: Sequence[AttributedTime], top: int) -> list[tuple[str, ...]]:
    """The rows of the table under `HEADING`.

    First come the longest layers or operators, then one row for all others, then the
    causes of the whole step, and last the step.

    Args:
      parts: all parts of the step.
      top: the most rows of layers or operators.
    """
    step = step_of(parts)
    own = [part for part in parts if not part.whole]
    rest = own[top:]
    shown = [*own[:top], *([_join(rest)] if rest else [])]
    shown += [part for part in parts if part.whole]
    last = ("step", "", "", seconds_text(step), share_text(1.0))
    return [*(_cells(part, step) for part in shown), last]


def _join(parts: Sequence[AttributedTime]) -> AttributedTime:
    return AttributedTime("the rest", (f"{len(parts)} rows",), "", step_of(parts))


def _cells(part: AttributedTime, step: float) -> tuple[str, ...]:
    share = part.seconds / step if step else 0.0
    text = share_text(abs(share))
    return (
        part.what,
        names_text(collapse(part.names)),
        part.phase,
        seconds_text(part.seconds),
        f"-{text}" if share < 0 else text,
    )
