"""The cost model's estimates for a plan, as lines of golden files."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from figures import digest, digest_all, row

from autopar.cost.breakdown import CostBreakdown, added_s, exposed_s, interval_s, step_s
from autopar.cost.codecs import Prices
from autopar.cost.estimate import StepEstimate, estimate
from autopar.cost.pricer import Pricer
from autopar.cost.traffic import messages
from autopar.layouts.assignment import Assignment
from autopar.planner.memory_terms import fixed_bytes, least_terms
from autopar.planner.problem import Formulation, Within, formulate, small_state
from autopar.planner.recipes import (
    has_context,
    least_bytes,
    recipes,
    restriction_of,
)
from autopar.planner.scheme import axis_uses, name_of, split_of, worth_of
from autopar.planner.weights import HIDDEN, plane_of
from autopar.steps.analysis import Analysis

# Factors of the batch and numbers of microbatches other than the planned ones.
_OTHERS = ((1.0, 1), (2.0, 1), (1.0, 2), (4.0, 8))


def estimate_lines(assignment: Assignment, pricer: Pricer) -> Iterator[str]:
    found = estimate(assignment, pricer)
    yield from cost_lines(found.cost, pricer)
    yield row(
        "seconds",
        {f"{rows:g}/{count}": found.seconds(rows, count) for rows, count in _OTHERS},
        micro=found.microbatch_s(),
        micro_half=found.microbatch_s(0.5),
        accumulate=found.accumulate_s,
    )
    yield from message_lines(found)
    yield from timeline_lines(found)
    yield from memory_lines(found)
    work = found.work
    yield row(
        "work",
        planned=digest(work.planned_s),
        kernels=digest(work.kernel_s),
        half=digest(work.seconds(np.array([0.5]))),
    )
    worth = worth_of(found, step_s(found.cost))
    yield row("worth", fields_of(worth))
    for axis, use in enumerate(axis_uses(assignment, work, pricer)):
        split = split_of(assignment, work.table.works, axis)
        of_work = dict(sorted(split.work.items()))
        yield row("axis", fields_of(use), **of_work, named=name_of(split))
    known = pricer.cluster.device.corrections
    places = assignment.analysis.positions
    plane = plane_of(places, step_s(found.cost), found.timelines, known)
    slopes = digest(plane.slopes(0.7))
    yield row("plane", base=plane.base_s, kinds=digest(plane.kinds), slopes=slopes)


def fields_of(record: object) -> dict[str, object]:
    """The plain fields of a struct, by name."""
    fields = getattr(record, "__struct_fields__", ())
    return {name: getattr(record, name) for name in fields if name != "axes"}


def cost_lines(cost: CostBreakdown, pricer: Pricer) -> Iterator[str]:
    given = {k: v for k, v in dataclasses.asdict(cost).items() if v}
    seconds = {k: v for k, v in given.items() if k.endswith("_s")}
    yield row("cost", seconds)
    yield row("bytes", {k: v for k, v in given.items() if k not in seconds})
    yield row(
        "step",
        step=step_s(cost),
        exposed=exposed_s(cost),
        added=added_s(cost),
        held=cost.held_bytes,
        sent=cost.communication_bytes,
        between=interval_s(cost, pricer.cluster.device),
    )


def message_lines(found: StepEstimate) -> Iterator[str]:
    """A line for each kind of collective and its mesh axes."""
    sent, pricer = found.messages, found.pricer
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = collections.defaultdict(list)
    for number, c in enumerate(sent.collectives):
        groups[c.step.kind, c.step.axes].append(number)
    for (kind, axes), numbers in sorted(groups.items()):
        own = [sent.collectives[k] for k in numbers]
        yield row(
            "message",
            kind=kind,
            axes="+".join(pricer.mesh.names[a] for a in axes),
            arrays=len(own),
            trips=sum(c.trips for c in own),
            size=sum(c.size for c in own),
            messages=len({c.message for c in own if c.message >= 0}),
            whole=sum(c.message_bytes for c in own),
            sent=sent.sent_bytes[numbers].sum(),
            s=sent.planned_s[numbers].sum(),
            least=sent.bytes_s[numbers].sum(),
            shared=sum(c.shared_s(pricer) for c in own),
            once=int(sent.once[numbers].sum()),
            hideable=int(sent.hideable[numbers].sum()),
            beside=int(sent.beside[numbers].sum()),
            ready=sum(c.ready for c in own),
        )
    numbers = messages(pricer, sent.collectives, found.assignment)
    yield row("combined", dict(sorted(numbers.items())))
    yield row("alone", dict(sorted(messages(pricer, sent.collectives).items())))


def timeline_lines(found: StepEstimate) -> Iterator[str]:
    share = found.pricer.cluster.device.corrections.overlap
    for line in found.timelines:
        tight = line.tightest(0.5)
        yield row(
            line.role.value,
            sends=line.communication_s,
            exposed=line.exposed_s(share),
            half=line.exposed_s(0.5),
            least=line.least_s(0.5),
            after=line.after_s,
            tight=(tight.first, tight.last),
            work=digest(line.work),
        )
        for part in line.parts:
            cuts = [*part.waits(), *filter(None, [part.last_sums(0.5)])]
            yield row(
                "part",
                at=part.key[1],
                exposed=part.exposed_s(0.5),
                gathers=digest(part.gathers),
                sums=digest(part.sums),
                needs=digest(part.needs),
                cuts=digest_all([c.gathers, *c.moved, *c.work, c.needs] for c in cuts),
            )


def memory_lines(found: StepEstimate) -> Iterator[str]:
    live = found.live
    peaks = {f"{r:g}/{n}": live.peak_bytes(r, n) for r, n in _OTHERS}
    yield row("peak", peaks, work=live.workspace_bytes, chip=live.on_chip_bytes)
    yield row("at peak", live.at_peak())
    yield row("held", live.held_bytes())
    yield row(
        "arrays",
        bytes=digest(live.nbytes),
        first=digest(live.first),
        last=digest(live.last),
        line=digest(live.timeline(2.0, 2)),
        room=live.room_bytes,
        gaps=digest(live.gaps),
    )


CODECS = ("int8", "powersgd:rank=4", "topk")


def problem_lines(analysis: Analysis, pricer: Pricer, *, coded: bool) -> Iterator[str]:
    """Digests of the planner's problem on a mesh, also of problems with codecs."""
    memory = float(pricer.cluster.memory_bytes)
    small = small_state(analysis.graph, analysis.contraction, memory)
    made = formulate(analysis, pricer, None, memory, None, HIDDEN, small)
    yield from _problem_lines("problem", made)
    terms = made.problem.memory
    yield row(
        "memory",
        small=len(small),
        fixed=fixed_bytes(analysis, pricer),
        usage=digest_all(t.usage for t in terms),
        starts=digest([t.start for t in terms]),
        ends=digest([t.end for t in terms]),
    )
    least = least_terms(analysis, pricer, made.spaces)
    yield row("least", usage=digest_all(t.usage for t in least))
    context = {"context": True} if has_context(analysis) else {}
    for recipe in recipes(len(pricer.sizes), **context):
        rule = restriction_of(analysis, recipe, pricer)
        left = made.within(analysis, Within(None, rule)).problem
        yield row(
            "rule",
            name=recipe.name,
            strategies=digest(left.num_strategies),
            nodes=digest_all(left.node_costs),
            least=least_bytes(analysis, rule, pricer),
        )
    for forced in (False, True) if coded else ():
        prices = Prices(0.7, 1e-9, CODECS, {}, 0.5, forced)
        made = formulate(analysis, pricer, None, None, prices)
        yield from _problem_lines("coded", made)


def _problem_lines(title: str, made: Formulation) -> Iterator[str]:
    problem = made.problem
    yield row(
        title,
        strategies=digest(problem.num_strategies),
        nodes=digest_all(problem.node_costs),
        own=digest_all(made.own),
        edges=digest_all(problem.edge_costs),
        whole=digest_all(made.whole),
        parts=digest_all(made.parts),
        copies=digest([c.node for c in made.copies]),
    )


def text(lines: Iterator[str] | Sequence[str]) -> str:
    return "\n".join(lines)
