"""Chooses how the stages of a pipeline send their gradients.

A stage sums its gradients after its last microbatch. So the codecs of a stage shorten
the step only if this stage ends last. The error budget applies to the gradient of all
stages together. The choice has two steps. First, the best codecs of each stage are
computed under several budgets for this stage; each result is an option of the stage.
Then one option of each stage is chosen such that the last stage ends earliest. Among
equally fast choices, the choice with the least error is taken.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from autopar.compression.codecs.registry import format_codec
from autopar.errors import PlanError
from autopar.planner.candidate import Candidate
from autopar.planner.codecs.choose import (
    WORTHWHILE,
    CodecRequest,
    describe_compression,
    elements_of,
    judge_codecs,
    record_decisions,
    sent_as_asked,
)
from autopar.planner.codecs.sites import Sending, sites, updated_parameters
from autopar.planner.stages.stage_costs import StageCosts
from autopar.planner.stages.submeshes import one_stage
from autopar.plans import Compression, GradientDecision, Plan
from autopar.steps.analysis import Analysis
from autopar.steps.stages import CutStep
from autopar_passes.graph.operators import OperatorGraph
from autopar_solver import ScheduleTable, play

# Error budgets of one stage, as multiples of the whole gradient's budget. A stage may
# have a larger error if other stages have smaller errors.
_PARTS = (0.0, 0.25, 0.5, 0.71, 1.0, 1.41, 2.0)

# The stages as candidates, with their codecs.
Choices = tuple[Candidate, ...]
# A function that returns the seconds of a step with given codecs of each stage.
StepSeconds = Callable[[Sequence[Candidate]], float]


@dataclasses.dataclass(frozen=True)
class StagedChoice:
    """Codecs of all stages.

    Attributes:
      choices: the candidate of each stage, with codecs.
      costs: the costs of the pipeline's tasks with these codecs.
      compression: text with the reason for the choice.
      requests: the user's request about the codecs of each stage.
    """

    choices: Choices
    costs: StageCosts
    compression: Compression
    requests: tuple[CodecRequest, ...]

    def decisions(self, graph: OperatorGraph) -> list[tuple[GradientDecision, ...]]:
        """For each stage, how each gradient is summed; all gradients have different
        names.

        Args:
          graph: graph of one microbatch's program, with the updates of all stages.
        """
        parts = zip(
            gradient_names(graph, self.choices),
            map(record_decisions, self.choices, self.requests),
            strict=True,
        )
        return [
            tuple(
                msgspec.structs.replace(g, name=name)
                for name, g in zip(names, made, strict=True)
            )
            for names, made in parts
        ]


def gradient_names(
    graph: OperatorGraph, choices: Sequence[Candidate]
) -> list[list[str]]:
    """Returns, for each stage, the name of each gradient in the plan of all stages.

    If several stages have a gradient of the same name, the number of the stage is
    appended to the name.

    Args:
      graph: graph of one microbatch's program, with the updates of all stages.
      choices: the stages, with their gradients.
    """
    every = [sending_of(choice).sites for choice in choices]
    known = updated_parameters(graph, [site.value for own in every for site in own])
    names = [[known[site.value] or site.name for site in own] for own in every]
    counts = Counter(name for own in names for name in own)
    return [
        [f"{name} (stage {k})" if counts[name] > 1 else name for name in own]
        for k, own in enumerate(names)
    ]


def sending_of(choice: Candidate) -> Sending:
    """How a stage sends its gradients."""
    assert choice.sending is not None
    return choice.sending


def choose_staged(
    cut: CutStep,
    found: Sequence[Candidate],
    memory: Sequence[float],
    costs: StageCosts,
    table: ScheduleTable,
    request: CodecRequest,
) -> StagedChoice:
    """Chooses the codecs of all stages.

    Args:
      cut: the step as stages.
      found: the layouts of each stage.
      memory: bytes that a device of each stage holds without codecs.
      costs: cost of the pipeline without codecs.
      table: schedule of the pipeline.
      request: the user's request about codecs.

    Raises:
      PlanError: no stage can use the requested codec.
    """
    held = [
        dataclasses.replace(candidate, peak_memory_bytes=nbytes)
        for candidate, nbytes in zip(found, memory, strict=True)
    ]

    def seconds(choices: Sequence[Candidate]) -> float:
        return play(table, with_codecs(costs, choices).tasks).makespan_s

    once = list(map(summed_once, cut.stages))
    nothing = without_codecs(cut, held)
    requests = (request,) * len(nothing)
    if request.sent is not None:
        requests = _by_site(cut.analysis.graph, nothing, request, request.sent)
    if request.chooses:
        choices = _within_budget(once, nothing, table, costs, request, seconds)
    else:
        choices = _as_asked(once, nothing, requests)
    parts = list(zip(once, choices, strict=True))
    why = describe_compression(parts, request, seconds(nothing), seconds(choices))
    return StagedChoice(choices, with_codecs(costs, choices), why, requests)


def without_codecs(cut: CutStep, found: Sequence[Candidate]) -> Choices:
    """Returns the stages with the gradients that codecs could send, and without codecs.

    Args:
      cut: the step as stages.
      found: the layouts of each stage.
    """
    return tuple(map(_nothing, map(summed_once, cut.stages), found))


def _by_site(
    graph: OperatorGraph, choices: Choices, request: CodecRequest, sent: Plan
) -> tuple[CodecRequest, ...]:
    """Returns the request for each stage, with the stage's names for gradients."""
    given = {g.name: g for g in sent.gradients}
    requests: list[CodecRequest] = []
    for names, choice in zip(gradient_names(graph, choices), choices, strict=True):
        pairs = zip(names, sending_of(choice).sites, strict=True)
        own = [
            msgspec.structs.replace(given[name], name=site.name)
            for name, site in pairs
            if name in given
        ]
        alone = one_stage(sent, 0).with_gradients(own)
        requests.append(dataclasses.replace(request, sent=alone))
    return tuple(requests)


def with_codecs(costs: StageCosts, choices: Sequence[Candidate]) -> StageCosts:
    """Returns a pipeline's costs with codecs, which change the work of each step."""
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
    """Returns an analysis in which codecs may send only accumulated gradients."""
    added = analysis.graph.accumulated
    deferrals = tuple(
        d if added.issuperset(d.ends) else dataclasses.replace(d, gradients=frozenset())
        for d in analysis.deferrals
    )
    return dataclasses.replace(analysis, deferrals=deferrals)


def _nothing(analysis: Analysis, candidate: Candidate) -> Candidate:
    """Returns a stage without codecs: the compiler sums its gradients."""
    mesh = candidate.pricer.mesh.axes
    found = sites(analysis, candidate.assignment, mesh, candidate.collectives)
    sending = judge_codecs(candidate, found, [""] * len(found), {})
    return dataclasses.replace(candidate, sending=sending)


def _as_asked(
    analyses: Sequence[Analysis], nothing: Choices, requests: Sequence[CodecRequest]
) -> Choices:
    """Sends gradients by the requested codec, in all stages that can use it.

    Raises:
      PlanError: no stage can use the codec.
    """
    out: list[Candidate] = []
    failed: list[PlanError] = []
    for analysis, none, request in zip(analyses, nothing, requests, strict=True):
        try:
            out.append(sent_as_asked(analysis, none, request))
        except PlanError as error:
            failed.append(error)
            out.append(none)
    codec = requests[0].codec
    if failed and codec is not None:
        text = format_codec(codec)
        if not any(text in sending_of(choice).codecs for choice in out):
            raise failed[0]
    return tuple(out)


def _within_budget(
    analyses: Sequence[Analysis],
    nothing: Choices,
    table: ScheduleTable,
    costs: StageCosts,
    request: CodecRequest,
    seconds: StepSeconds,
) -> Choices:
    """Chooses codecs that make the step fastest, within the whole gradient's budget."""
    budgets = [
        dataclasses.replace(request, budget=part * request.budget) for part in _PARTS
    ]
    options: list[list[Candidate]] = []
    known: dict[object, list[Candidate]] = {}
    for analysis, none in zip(analyses, nothing, strict=True):
        key = (analysis.fingerprint, id(none.pricer), none.peak_memory_bytes)
        if key not in known:
            known[key] = [none, *(sent_as_asked(analysis, none, b) for b in budgets)]
        # Equal stages have the same choices.
        same = [dataclasses.replace(none, sending=c.sending) for c in known[key]]
        options.append(same)
    ends = play(table, costs.tasks).ends_s
    last = [float(max(e, default=0.0)) for e in ends]
    best = _fastest(options, last, costs, request.budget)
    if seconds(best) > (1 - WORTHWHILE) * seconds(nothing):
        return nothing
    return best


def _fastest(
    options: Sequence[Sequence[Candidate]],
    last: Sequence[float],
    costs: StageCosts,
    budget: float,
) -> Choices:
    """Chooses one option of each stage such that the last stage ends earliest, within
    the budget.

    Args:
      options: the options of each stage; the first option has no error.
      last: when the last task of each stage ends, in seconds from the start of the
        step.
      costs: cost of the pipeline without codecs.
      budget: error budget of the whole gradient.
    """
    ends = [
        [end + max(0.0, float(costs.tasks.step_s[k]) - o.saved_s) for o in row]
        for k, (row, end) in enumerate(zip(options, last, strict=True))
    ]
    elements = sum(elements_of(sending_of(row[0])) for row in options)
    most = budget**2 * elements * (1 + 1e-9)
    for limit in sorted({end for row in ends for end in row}):
        taken: list[Candidate] = []
        for row, own in zip(options, ends, strict=True):
            fits = [o for o, end in zip(row, own, strict=True) if end <= limit]
            if not fits:
                break
            taken.append(min(fits, key=_squared_error))
        complete = len(taken) == len(options)
        if complete and sum(map(_squared_error, taken)) <= most:
            return tuple(taken)
    return tuple(row[0] for row in options)


def _squared_error(choice: Candidate) -> float:
    """Returns the gradients' squared relative error times their number of elements."""
    sending = sending_of(choice)
    return sending.error**2 * elements_of(sending)
