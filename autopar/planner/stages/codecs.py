"""Chooses how the stages of a pipeline send their gradients.

A stage sums its gradients behind its last microbatch, so what its codecs save shortens
the step where it is the last to end. The error budget is that of the whole gradient.
For each stage the best codecs under several budgets of its own are known; of these are
taken those with which the last stage ends first, and of those the ones that lose least.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from autopar.compression.codecs.registry import format_codec
from autopar.errors import PlanError
from autopar.planner.candidate import Candidate
from autopar.planner.codecs.choose import (
    MOST_OF_BUDGET,
    WORTHWHILE,
    CodecChoice,
    choose,
    gradient_decisions,
    judged,
    uniform,
)
from autopar.planner.codecs.left_out import EARLY, left_to_compiler, warn_of_no_use
from autopar.planner.codecs.request import EDITED, CodecRequest
from autopar.planner.codecs.sites import sites, updated_parameters
from autopar.planner.codecs.written import codecs_of
from autopar.planner.stages.stage_costs import StageCosts
from autopar.plans import Compression, GradientDecision
from autopar.steps.analysis import Analysis
from autopar_passes.graph.operators import OperatorGraph
from autopar_solver import ScheduleTable, play

# Budgets of one stage, in parts of the whole gradient's. A stage may lose more where
# others lose less.
_PARTS = (0.0, 0.25, 0.5, 0.71, 1.0, 1.41, 2.0)
_METRIC = "root mean square over elements of each gradient's relative error"

Choices = tuple[CodecChoice, ...]
# Seconds of a step with the codecs of each stage.
StepSeconds = Callable[[Sequence[CodecChoice]], float]


@dataclasses.dataclass(frozen=True)
class StagedChoice:
    """Codecs of all stages.

    Attributes:
      choices: of each stage.
      costs: what the pipeline costs with them.
      compression: says why.
    """

    choices: Choices
    costs: StageCosts
    compression: Compression

    def decisions(self, graph: OperatorGraph) -> list[tuple[GradientDecision, ...]]:
        """By stage, how each gradient is summed; no two have one name.

        Args:
          graph: of one microbatch's program, with the updates of all stages.
        """
        values = [site.value for choice in self.choices for site in choice.sites]
        names = updated_parameters(graph, values)
        made = [
            [
                msgspec.structs.replace(g, name=names[g.value] or g.name)
                for g in gradient_decisions(choice)
            ]
            for choice in self.choices
        ]
        counts = Counter(g.name for stage in made for g in stage)
        return [
            tuple(
                msgspec.structs.replace(g, name=f"{g.name} (stage {k})")
                if counts[g.name] > 1
                else g
                for g in stage
            )
            for k, stage in enumerate(made)
        ]


def choose_staged(
    analyses: Sequence[Analysis],
    found: Sequence[Candidate],
    memory: Sequence[float],
    costs: StageCosts,
    table: ScheduleTable,
    request: CodecRequest,
) -> StagedChoice:
    """Chooses the codecs of all stages.

    Args:
      analyses: of each stage.
      found: the layouts of each stage.
      memory: bytes that a device of each stage holds without codecs.
      costs: what the pipeline costs without codecs.
      table: its schedule.
      request: what was said about codecs.

    Raises:
      PlanError: the codec that was asked for can be used in no stage.
    """
    once = [summed_once(analysis) for analysis in analyses]
    held = [
        dataclasses.replace(candidate, peak_memory_bytes=nbytes)
        for candidate, nbytes in zip(found, memory, strict=True)
    ]

    def seconds(choices: Sequence[CodecChoice]) -> float:
        return play(table, with_codecs(costs, choices).tasks).makespan_s

    if request.sent is not None:
        choices = _as_sent(once, held, request)
    elif request.codec is not None:
        choices = _uniform(once, held, request)
    else:
        choices = _within_budget(once, held, table, costs, request, seconds)
    compression = _described(once, choices, costs, seconds, request)
    return StagedChoice(choices, with_codecs(costs, choices), compression)


def with_codecs(costs: StageCosts, choices: Sequence[CodecChoice]) -> StageCosts:
    """What a pipeline costs with codecs: they change what a stage does once a step."""
    saved = [choice.saved_s for choice in choices]
    tasks = dataclasses.replace(
        costs.tasks, step_s=np.maximum(0.0, costs.tasks.step_s - np.array(saved))
    )
    return dataclasses.replace(
        costs,
        tasks=tasks,
        sent_bytes=tuple(choice.cost.communication_bytes for choice in choices),
    )


def summed_once(analysis: Analysis) -> Analysis:
    """A stage whose gradients are those that it adds up over microbatches."""
    added = analysis.graph.accumulated
    deferrals = tuple(
        d if added.issuperset(d.ends) else dataclasses.replace(d, gradients=frozenset())
        for d in analysis.deferrals
    )
    return dataclasses.replace(analysis, deferrals=deferrals)


def _nothing(analysis: Analysis, candidate: Candidate) -> CodecChoice:
    """A stage whose gradients the compiler sums."""
    found = sites(analysis, candidate.assignment, candidate.pricer.mesh.axes)
    return judged(candidate, found, [""] * len(found), {})


def _as_sent(
    analyses: Sequence[Analysis], found: Sequence[Candidate], request: CodecRequest
) -> Choices:
    """The codecs of a plan, gradient by gradient; others are sent as they are."""
    assert request.sent is not None
    given = {g.name: g for g in request.sent.gradients}
    out: list[CodecChoice] = []
    for analysis, candidate in zip(analyses, found, strict=True):
        own = sites(analysis, candidate.assignment, candidate.pricer.mesh.axes)
        out.append(judged(candidate, own, codecs_of(given, own), request.errors))
    return tuple(out)


def _uniform(
    analyses: Sequence[Analysis], found: Sequence[Candidate], request: CodecRequest
) -> Choices:
    """One codec for the gradients of all stages that it can send.

    Raises:
      PlanError: there are none.
    """
    assert request.codec is not None
    out: list[CodecChoice] = []
    failed: list[PlanError] = []
    for analysis, candidate in zip(analyses, found, strict=True):
        choice = _nothing(analysis, candidate)
        try:
            choice = uniform(analysis, candidate, request.codec)
        except PlanError as error:
            failed.append(error)
        out.append(choice)
    text = format_codec(request.codec)
    if failed and not any(text in choice.codecs for choice in out):
        raise failed[0]
    return tuple(out)


def warn_of_unused(
    analyses: Sequence[Analysis], choice: StagedChoice, request: CodecRequest
) -> None:
    """Warns where the codec that was asked for sends no gradient of any stage."""
    text = "dense" if request.codec is None else format_codec(request.codec)
    if text == "dense" or any(text in own.codecs for own in choice.choices):
        return
    pairs = zip(analyses, choice.choices, strict=True)
    warn_of_no_use([(a, c.candidate.assignment, c.sites) for a, c in pairs], text)


def _within_budget(
    analyses: Sequence[Analysis],
    found: Sequence[Candidate],
    table: ScheduleTable,
    costs: StageCosts,
    request: CodecRequest,
    seconds: StepSeconds,
) -> Choices:
    """The codecs that make the step fastest, the whole gradient within its budget."""
    nothing = tuple(map(_nothing, analyses, found))
    options: list[list[CodecChoice]] = []
    known: dict[object, list[CodecChoice]] = {}
    for analysis, candidate, none in zip(analyses, found, nothing, strict=True):
        key = (analysis.fingerprint, id(candidate.pricer), candidate.peak_memory_bytes)
        if key not in known:
            known[key] = [none, *_under_budgets(analysis, candidate, request)]
        options.append([_of(candidate, choice) for choice in known[key]])
    ends = play(table, costs.tasks).ends_s
    last = [float(max(e, default=0.0)) for e in ends]
    best = _fastest(options, last, costs, request.budget)
    if seconds(best) > (1 - WORTHWHILE) * seconds(nothing):
        return nothing
    return best


def _of(candidate: Candidate, choice: CodecChoice) -> CodecChoice:
    """A choice that was made for an equal stage."""
    return dataclasses.replace(choice, candidate=candidate)


def _under_budgets(
    analysis: Analysis, candidate: Candidate, request: CodecRequest
) -> list[CodecChoice]:
    """The best codecs of a stage under budgets of its own."""
    most = MOST_OF_BUDGET * request.budget
    return [
        choose(analysis, candidate, part * request.budget, request.errors, most=most)
        for part in _PARTS
    ]


def _fastest(
    options: Sequence[Sequence[CodecChoice]],
    last: Sequence[float],
    costs: StageCosts,
    budget: float,
) -> Choices:
    """One option of each stage: the last stage to end ends first, within the budget.

    Args:
      options: of each stage; the first loses nothing.
      last: when the last task of each stage ends.
      costs: what the pipeline costs without codecs.
      budget: of the error of the whole gradient.
    """
    ends = [
        [end + max(0.0, float(costs.tasks.step_s[k]) - o.saved_s) for o in row]
        for k, (row, end) in enumerate(zip(options, last, strict=True))
    ]
    most = budget**2 * sum(_elements(row[0]) for row in options) * (1 + 1e-9)
    for limit in sorted({end for row in ends for end in row}):
        taken: list[CodecChoice] = []
        for row, own in zip(options, ends, strict=True):
            fits = [o for o, end in zip(row, own, strict=True) if end <= limit]
            if not fits:
                break
            taken.append(min(fits, key=_squared_error))
        complete = len(taken) == len(options)
        if complete and sum(map(_squared_error, taken)) <= most:
            return tuple(taken)
    return tuple(row[0] for row in options)


def _elements(choice: CodecChoice) -> int:
    return sum(math.prod(site.shape) for site in choice.sites)


def _squared_error(choice: CodecChoice) -> float:
    """The squared error of a stage, times its elements."""
    return choice.error**2 * _elements(choice)


def _described(
    analyses: Sequence[Analysis],
    choices: Choices,
    costs: StageCosts,
    seconds: StepSeconds,
    request: CodecRequest,
) -> Compression:
    """Says why, and how many gradients no codec can send."""
    total = sum(map(_elements, choices))
    error = math.sqrt(sum(map(_squared_error, choices)) / total) if total else 0.0
    left = [
        left_to_compiler(analysis, choice.candidate.assignment, choice.sites)
        for analysis, choice in zip(analyses, choices, strict=True)
    ]
    coded = any(any(choice.codecs) for choice in choices)
    early = sum(len(groups.get(EARLY, ())) for groups in left) if coded else 0
    more = f"; {early} more are summed by the compiler: {EARLY}" if early else ""
    automatic = request.mode == "auto" and request.sent is None
    return Compression(
        mode=EDITED if request.sent is not None else request.mode,
        error_budget=request.budget if automatic else None,
        metric=_METRIC,
        error=error,
        reason=_reason(analyses, choices, seconds, request) + more,
    )


def _reason(
    analyses: Sequence[Analysis],
    choices: Choices,
    seconds: StepSeconds,
    request: CodecRequest,
) -> str:
    if not any(choice.sites for choice in choices):
        return "no gradient is summed over devices in a form that codecs could send"
    if request.sent is not None:
        return "codecs as they were given"
    candidates = [choice.candidate for choice in choices]
    before_s = seconds([*map(_nothing, analyses, candidates)])
    saved = f"{1e3 * (before_s - seconds(choices)):.3g} ms"
    step = f"{1e3 * before_s:.3g} ms"
    if request.mode != "auto":
        return f"asked for; saves {saved} of a step of {step}"
    if not any(any(choice.codecs) for choice in choices):
        return (
            f"dense: no codecs within the error budget save {100 * WORTHWHILE:.0f}% of "
            f"a step of {step} after encoding and decoding"
        )
    return f"codecs save {saved} of a step of {step}"
