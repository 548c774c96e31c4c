"""Chooses the codec of each gradient, for given layouts.

The choice is a small integer program (`autopar_solver.selection`). It minimises the
seconds for which a step waits for the links or runs codecs, within an error budget. The
search of layouts (`autopar.planner.solving`) chooses codecs in this way for each plan
that it tries. The search then solves the problem of the layouts again, with two prices
from the best choice so far: the seconds of a step that a unit of error is worth, and
the seconds of a step that each second on a link costs. At given prices, every gradient
has a best codec for every pair of layouts. So only the costs of edges that carry
gradients change in the problem of the layouts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import msgspec
import numpy as np

from autopar.compression.codecs.codec import Codec, check_codec
from autopar.compression.codecs.registry import (
    format_codec,
    offered_codecs,
    parse_codec,
)
from autopar.compression.gradient import MOST_LOST, Feedback, Gradient, init_state
from autopar.cost.breakdown import CostBreakdown, step_s
from autopar.cost.codecs import (
    CodecPrice,
    Prices,
    codec_price,
    collectives_s,
    compiler_price,
    route_of,
)
from autopar.cost.estimate import estimate
from autopar.cost.pricer import Pricer
from autopar.errors import PlanError
from autopar.layouts.gathering import GatherRequest
from autopar.layouts.summation import WITHIN_BYTES, Summation
from autopar.planner.candidate import Candidate
from autopar.planner.codecs.gathers import gather_error, gathers_asked
from autopar.planner.codecs.sites import (
    EARLY,
    Sending,
    Site,
    decision,
    left_to_compiler,
    sites,
    warn_of_no_use,
)
from autopar.planner.options import PlanOptions, parsed_codec
from autopar.plans import Compression, GradientDecision, Plan
from autopar.steps.analysis import Analysis
from autopar.units import seconds_text
from autopar_errors import warn_user
from autopar_passes.graph.roles import Role
from autopar_solver import (
    CodecSelection,
    SelectionResult,
    Status,
    fits_budgets,
    recompute,
    solve_relaxation,
    solve_selection,
)

# A codec that saves less than this fraction of a step is not worth its error.
WORTHWHILE = 0.03
# The *effective relative error* of a gradient is the L2 norm of a codec's error divided
# by that of the gradient, less the part that error feedback corrects later. The error
# of a single gradient may be at most this many times the budget of the whole gradient.
# Without this limit, the choice would spend the rest of the budget on large errors of a
# few small gradients. In training such large errors do not average out: on 100 steps of
# a character GPT, sending 6 % of the elements by `predicted` and `sign`, within a
# budget of 0.1, raised the loss by 0.09 nats a character (docs/record).
MOST_OF_BUDGET = 2.0

# Name of a parameter -> codec -> measured relative error of the parameter's gradient.
Errors = Mapping[str, Mapping[str, float]]

# Effective relative error of the whole gradient that ``auto`` allows. Each codec was
# tried by itself on three seeds (docs/record). With errors below this budget (int8;
# int4 with rotation, .032), the final loss is within about one standard deviation of
# the loss with dense gradients. With errors above this budget, the final loss is not
# that close: int4 in blocks of 256 without rotation, .061, needs a seventh more steps.
DEFAULT_BUDGET = 0.05
# Mode of a plan for which the user gave the codec of each gradient.
EDITED = "edited"
GIVEN_CODECS = "codecs as they were given"


@dataclasses.dataclass(frozen=True, slots=True)
class CodecRequest:
    """The user's request about codecs.

    Attributes:
      mode: the value of `PlanOptions.compression`.
      codec: the codec that `mode` names; None if it names none.
      budget: the largest effective relative error that the whole gradient may have.
      sent: a plan from which each gradient takes its codec, if there is one.
      errors: measured relative errors, by gradient and codec; others are predicted.
      most: upper limit of the effective relative error of each gradient.
      gathers: the request to encode gathers of parameters; None: they are exact.
    """

    mode: str
    codec: Codec | None
    budget: float
    sent: Plan | None
    errors: Errors
    most: float = math.inf
    gathers: GatherRequest | None = None

    @property
    def chooses(self) -> bool:
        """Whether the planner is to choose the codecs."""
        return self.sent is None and self.codec is None

    @property
    def names_codecs(self) -> bool:
        """Whether every gradient that can be sent by a named codec has to be.

        A plan of rows that have slots already leaves the gradients of their products to
        the compiler.
        """
        if self.sent is None:
            return self.codec is not None
        return not self.sent.row_capacity and any(g.codec for g in self.sent.gradients)

    def with_exact_gathers(self) -> CodecRequest:
        """The request with exact gathers; gradients keep their part of the budget."""
        return dataclasses.replace(self, gathers=None)


def worth_encoding(candidate: Candidate) -> bool:
    """Whether gathers of a candidate that the planner chose to encode save enough.

    They must shorten a step by a fraction of `WORTHWHILE`, as codecs of gradients.
    """
    asked, own = candidate.pricer.gathers, candidate.assignment
    if asked is None or not asked.chooses:
        return True
    exact = dataclasses.replace(own, gathers={})
    exact_s = step_s(estimate(exact, candidate.pricer).cost)
    return candidate.plain_s <= (1 - WORTHWHILE) * exact_s


def request_of(
    options: PlanOptions, sent: Plan | None = None, errors: Errors | None = None
) -> CodecRequest:
    """Reads the options.

    Of the error budget, gradients get what gathers leave: the squares of both errors
    add up to the square of the budget.

    Args:
      options: hints and limits of planning.
      sent: a plan from which each gradient takes its codec.
      errors: measured relative errors, by gradient and codec.
    """
    mode, given = options.compression, options.error_budget
    budget = DEFAULT_BUDGET if given is None else float(given)
    gathers = gathers_asked(options.gather_codecs, budget)
    if gathers is not None:
        budget = math.sqrt(max(0.0, budget**2 - gather_error(gathers) ** 2))
    most = min(MOST_OF_BUDGET * budget, MOST_LOST)
    codec = parsed_codec(mode)
    return CodecRequest(mode, codec, budget, sent, errors or {}, most, gathers)


def sent_as_asked(
    analysis: Analysis, candidate: Candidate, request: CodecRequest
) -> Candidate:
    """Returns a candidate whose gradients are sent as the request says.

    Raises:
      PlanError: no gradient can use the requested codec.
      InputError: a codec breaks the contract of its class.
    """
    mesh = candidate.pricer.mesh.axes
    found = sites(analysis, candidate.assignment, mesh, candidate.collectives)
    _check_codecs(found, request)
    layouts = candidate.assignment
    # Even if each replica sums its gradients in each microbatch, sums over replicas are
    # computed once per step, and codecs can send them.
    if layouts.sums_each_microbatch and not layouts.replicas:
        return dataclasses.replace(
            candidate, sending=_as_they_are(candidate, found, request)
        )
    if request.sent is not None:
        given = {g.name: g for g in request.sent.gradients}
        sending = judge_codecs(
            candidate, found, codecs_of(given, found), request.errors
        )
    elif request.codec is not None:
        sending = _uniform(candidate, found, request.codec)
    else:
        sending = _choose_sending(candidate, found, request)
    return dataclasses.replace(candidate, sending=sending)


def sent_alike(
    analysis: Analysis, candidate: Candidate, sending: Sending, errors: Errors
) -> Candidate:
    """Returns a candidate whose gradients use the codecs of another candidate.

    Args:
      analysis: the step.
      candidate: layouts, on other devices.
      sending: how the gradients of the same layouts are sent elsewhere.
      errors: measured relative errors, by gradient and codec.
    """
    mesh = candidate.pricer.mesh.axes
    found = sites(analysis, candidate.assignment, mesh, candidate.collectives)
    same = [
        dataclasses.replace(site, summations=(summation,)) if text else site
        for site, text, summation in zip(
            found, sending.codecs, sending.summations, strict=True
        )
    ]
    made = judge_codecs(candidate, same, sending.codecs, errors)
    return dataclasses.replace(candidate, sending=made)


def _as_they_are(
    candidate: Candidate, found: Sequence[Site], request: CodecRequest
) -> Sending:
    """Sends no gradient by a codec, because the plan sums gradients in each microbatch.

    A plan sums gradients over devices in each microbatch if unsummed gradients,
    accumulated over microbatches, do not fit the memory.

    Raises:
      PlanError: the user requested codecs, which can only send sums over all
        microbatches.
    """
    given = request.sent.gradients if request.sent is not None else ()
    if request.codec is not None or any(g.codec for g in given):
        raise PlanError(
            "gradients that codecs send are whole on each device until the last "
            "microbatch, and this plan sums them in each because whole ones do not "
            "fit. Give more memory or devices, or leave compression= out; in a plan "
            "that was edited, set sums_each_microbatch to false."
        )
    return judge_codecs(candidate, found, [""] * len(found), request.errors)


def _check_codecs(found: Sequence[Site], request: CodecRequest) -> None:
    """Checks the codecs that are not autopar's own, each on a gradient it can send."""
    asked = request.codec
    texts = offered_codecs() if asked is None else [format_codec(asked)]
    for codec in map(parse_codec, texts):
        if type(codec).is_of_package():
            continue
        taken = (s for s in found if s.compressible and not s.refuses(codec))
        for site in itertools.islice(taken, 1):
            way = site.flat
            check_codec(
                codec, way.local_shape, way.workers, scatter=way.scatter, name=site.name
            )


def _uniform(candidate: Candidate, found: Sequence[Site], codec: Codec) -> Sending:
    """Sends every large gradient by one codec, and small gradients without a codec.

    Raises:
      PlanError: no gradient can use the codec.
    """
    large = [s for s in found if s.compressible]
    refusals = {s.value: s.refuses(codec) for s in large}
    text = format_codec(codec)
    if large and all(refusals.values()):
        why = next(iter(refusals.values()))
        raise PlanError(
            f"compression={text!r} cannot be used for any gradient of this plan: "
            f"{why} Try another codec, or compression='auto'."
        )
    codecs = ["dense" if refusals.get(s.value, "small") else text for s in found]
    return judge_codecs(candidate, found, codecs, {})


def codecs_of(given: dict[str, GradientDecision], found: Sequence[Site]) -> list[str]:
    """The codec of each gradient; 'dense' if the plan's codec cannot send the
    gradient.
    """
    texts = [given[s.name].codec if s.name in given else "" for s in found]
    if not any(texts):
        return texts
    return [
        text if _sends(site, text, given) else "dense"
        for site, text in zip(found, texts, strict=True)
    ]


def _sends(site: Site, text: str, given: dict[str, GradientDecision]) -> bool:
    """Whether a codec can send a gradient; for '' whether the plan lists it."""
    return not site.refuses(parse_codec(text)) if text else site.name in given


def _choose_sending(
    candidate: Candidate, found: Sequence[Site], request: CodecRequest
) -> Sending:
    """Returns the codecs that make the step fastest, within the error budget."""
    errors = request.errors
    large = [s for s in found if s.compressible]
    nothing = judge_codecs(candidate, found, [""] * len(found), errors)
    if not large:
        return nothing
    known: dict[object, list[tuple[str, CodecOption]]] = {}
    rows: list[list[tuple[str, CodecOption]]] = []
    for site in large:
        # Gradients with the same shape and the same devices have the same costs.
        own = errors.get(site.name)
        key = site.name if own else (site.shape, site.summations, site.itemsize)
        if key not in known:
            known[key] = _allowed_codecs(candidate.pricer, site, request)
        rows.append(known[key])
    problem = _selection(candidate, found, large, rows, request.budget)
    answer = solve_selection(problem, seconds=2.0, gap=GAP)
    if answer.status not in (Status.OPTIMAL, Status.FEASIBLE):
        return dataclasses.replace(nothing, problem=problem)
    answer = with_less_error(problem, answer)
    chosen = {
        s.value: row[k][0]
        for s, row, k in zip(large, rows, answer.choices, strict=True)
    }
    coded = any(chosen.values())
    codecs = [chosen.get(s.value, "") or _rest_codec(s, coded=coded) for s in found]
    made = judge_codecs(candidate, found, codecs, errors)
    if candidate.plain_s - step_s(made.cost) < WORTHWHILE * candidate.plain_s:
        made = nothing
    return dataclasses.replace(made, problem=problem)


def _rest_codec(site: Site, *, coded: bool) -> str:
    """Decides how to send a gradient for which the integer program chose no codec.

    If other gradients have codecs, the gradient can join their messages in float32 and
    needs no message of its own. A large gradient that the compiler sums in a narrower
    type is left to the compiler.
    """
    narrow = site.compressible and site.itemsize < WITHIN_BYTES
    return "dense" if coded and not narrow else ""


def judge_codecs(
    candidate: Candidate, found: Sequence[Site], codecs: Sequence[str], errors: Errors
) -> Sending:
    """Returns the cost of sending gradients by given codecs.

    Several operators may contribute to a gradient whose sum is postponed; the gradient
    is summed once. The cost is computed for each message, with and without codecs. One
    message holds all gradients with the same codec, so it is sent after the backward
    pass has ended.
    """
    pricer = candidate.pricer
    mesh = pricer.mesh.axes
    options = zip(found, codecs, strict=True)
    after = [_option(pricer, s, c, errors) for s, c in options]
    before = [_option(pricer, s, "", errors) for s in found]
    texts = {s.value: c for s, c in zip(found, codecs, strict=True) if c}
    coded = [a for a, text in zip(after, codecs, strict=True) if text]
    taken = tuple(a.summation for a in after)
    cost = candidate.estimate.cost
    if texts:
        nbytes = 0.0
        for site, text, summation in zip(found, codecs, taken, strict=True):
            if text:
                made = decision(site, mesh, text, summation)
                nbytes += made.wire_bytes + made.within_bytes
        cost = _waiting_cost(candidate, texts) + CostBreakdown(
            codec_s=sum(a.price.local_s for a in coded),
            waiting_s=collectives_s(pricer, taken, codecs),
            codec_bytes=nbytes,
        )
    total = sum(math.prod(s.shape) for s in found)
    squared = sum(a.weighted_error for a in after)
    return Sending(
        sites=tuple(found),
        codecs=tuple(codecs),
        summations=taken,
        each_s=tuple(
            b.price.wire_s - a.price.wire_s - a.price.local_s
            for b, a in zip(before, after, strict=True)
        ),
        errors=tuple(a.price.error for a in after),
        error=math.sqrt(squared / total) if total else 0.0,
        memory_bytes=sum(a.memory_bytes for a in after),
        cost=cost,
    )


def _waiting_cost(candidate: Candidate, texts: Mapping[int, str]) -> CostBreakdown:
    """Returns the cost of a step without the sums of the gradients that have codecs."""
    waiting = dataclasses.replace(candidate.assignment, codecs=dict(texts))
    return estimate(waiting, candidate.pricer).cost


@dataclasses.dataclass(frozen=True, slots=True)
class CodecOption:
    """One codec for one gradient, as an option of the integer program of the choice.

    Attributes:
      price: the cost of the codec for this gradient alone, in seconds.
      weighted_error: the squared relative error of the codec, times the number of
        elements of the gradient.
      memory_bytes: bytes that the codec keeps on one device between steps.
      summation: how the devices share the work of the sum.
    """

    price: CodecPrice
    weighted_error: float
    memory_bytes: float
    summation: Summation


def _option(pricer: Pricer, site: Site, text: str, errors: Errors) -> CodecOption:
    """Computes the costs of a codec for a gradient; '' is the compiler's all-reduce.

    The devices share the work in the fastest way.
    """
    mesh = pricer.mesh.axes
    if not text:
        route = route_of(site.summations[-1], mesh)
        price = compiler_price(pricer, route, site.itemsize)
        return CodecOption(price, 0.0, 0.0, site.flat)
    error = errors.get(site.name, {}).get(text)
    prices = [
        (codec_price(pricer, route_of(summation, mesh), text, error), summation)
        for summation in site.summations
    ]
    price, summation = min(prices, key=lambda pair: pair[0].seconds)
    assert not price.refused, price.refused
    weighted = math.prod(site.shape) * price.counted_error**2
    kept = _state_bytes(summation, parse_codec(text))
    return CodecOption(price, weighted, kept, summation)


@functools.lru_cache(maxsize=1 << 14)
def _state_bytes(summation: Summation, codec: Codec) -> float:
    """Returns the bytes that a codec keeps on a device, including its residual."""
    kind = "residual" if codec.feedback else "none"
    how = Gradient("", summation.local_shape, codec, Feedback(kind=kind))
    state = jax.eval_shape(lambda: init_state(how, summation.workers))
    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)))


def _allowed_codecs(
    pricer: Pricer, site: Site, request: CodecRequest
) -> list[tuple[str, CodecOption]]:
    """Returns the codecs that may send a gradient, and their costs and errors."""
    known = [t for t in offered_codecs() if not site.refuses(parse_codec(t))]
    options = [
        (text, _option(pricer, site, text, request.errors)) for text in ("", *known)
    ]
    limit = math.prod(site.shape) * request.most**2
    return [(text, o) for text, o in options if o.weighted_error <= limit]


def _selection(
    candidate: Candidate,
    found: Sequence[Site],
    large: Sequence[Site],
    rows: Sequence[Sequence[tuple[str, CodecOption]]],
    budget: float,
) -> CodecSelection:
    pricer = candidate.pricer
    total = sum(math.prod(s.shape) for s in found)
    left = pricer.cluster.memory_bytes - candidate.peak_memory_bytes
    felt = _felt_part(candidate)

    def column(of: Callable[[CodecOption], float]) -> tuple[np.ndarray, ...]:
        return tuple(np.array([of(option) for _, option in row]) for row in rows)

    wire_s = column(lambda o: o.price.wire_s)
    for row, seconds in zip(rows, wire_s, strict=True):
        seconds[[not text for text, _ in row]] *= felt
    return CodecSelection(
        wire_s=wire_s,
        local_s=column(lambda o: o.price.local_s),
        error=column(lambda o: o.weighted_error),
        # A message of several gradients is sent when the last of them is complete.
        ready_s=(0.0,) * len(large),
        backward_s=0.0,
        error_budget=budget**2 * total,
        memory_bytes=column(lambda o: o.memory_bytes),
        memory_budget_bytes=max(0.0, left),
    )


def _felt_part(candidate: Candidate) -> float:
    """Returns the fraction of the compiler's all-reduces that lengthens a step.

    The other all-reduces overlap with work of the backward pass.
    """
    known = candidate.pricer.cluster.device.corrections
    backward = [t for t in candidate.timelines if t.role is Role.BACKWARD]
    sent = sum(t.communication_s for t in backward)
    exposed = sum(t.exposed_s(known.overlap) for t in backward)
    return (exposed + known.contention * (sent - exposed)) / sent if sent else 1.0


# Two costs count as equal if they differ by less than this fraction of the cost and the
# backward pass together, because the solver proves costs only to this precision. Among
# equal costs, the choice with the smaller error is taken.
GAP = 1e-4


def with_less_error(
    problem: CodecSelection, answer: SelectionResult
) -> SelectionResult:
    """Replaces choices by choices with less error and the same cost, within the
    solver's gap.

    Each gradient in turn takes the option with the least error for which the cost stays
    within the gap, while the other gradients keep their options.
    """
    most = answer.cost_s + GAP * (problem.backward_s + answer.cost_s)
    chosen, spent = list(answer.choices), answer.cost_s
    for site, errors in enumerate(problem.error):
        now, local, wire = chosen[site], problem.local_s[site], problem.wire_s[site]
        # Without a backward pass to overlap with, all seconds of a codec's work count.
        own = local if problem.backward_s else local + wire
        for k in np.argsort(errors, kind="stable").tolist():
            if errors[k] >= errors[now]:
                break
            if own[k] - own[now] > most - spent:
                continue
            trial = [*chosen[:site], k, *chosen[site + 1 :]]
            cost = recompute(problem, trial)
            if cost.cost_s <= most and fits_budgets(problem, cost):
                chosen, spent = trial, cost.cost_s
                break
    cost = recompute(problem, chosen)
    fields = {f.name: getattr(cost, f.name) for f in dataclasses.fields(cost)}
    return dataclasses.replace(answer, choices=tuple(chosen), **fields)


def prices_of(best: Candidate, request: CodecRequest) -> Prices:
    """Returns the prices of an error and of a second on the links, at the best choice.

    If the best choice sends no gradient by a codec, the price of an error is 0: the
    final choice of codecs keeps to the error budget anyway. A codec that the user named
    is used for every gradient that it can send.
    """
    if not request.chooses:
        given = request.sent.gradients if request.sent is not None else ()
        texts = {g.codec for g in given if g.codec}
        if request.sent is None and request.codec is not None:
            texts = {format_codec(request.codec)}
        return Prices(1.0, 0.0, tuple(sorted(texts)), {}, forced=True)
    codecs, known = offered_codecs(), dict(request.errors)
    problem = None if best.sending is None else best.sending.problem
    dual = None if problem is None else solve_relaxation(problem)
    if dual is None or dual.status is not Status.OPTIMAL:
        return Prices(1.0, 0.0, codecs, known, request.most)
    weights = dual.wire_weights
    weight = float(np.mean(weights)) if weights else 1.0
    return Prices(weight, dual.seconds_per_error, codecs, known, request.most)


def record_decisions(
    candidate: Candidate, request: CodecRequest
) -> tuple[GradientDecision, ...]:
    """Records how each gradient is sent.

    If the request takes the codecs from a plan, each gradient keeps its decision of
    that plan. A gradient that its codec cannot send under these layouts is sent without
    a codec, with a warning.
    """
    assert candidate.sending is not None
    made = candidate.sending.decisions(candidate.mesh.axes)
    if request.sent is None:
        return made
    given = {g.name: g for g in request.sent.gradients}
    same = [g.name in given and given[g.name].codec == g.codec for g in made]
    pairs = list(zip(made, same, strict=True))
    if other := [g.name for g, alike in pairs if g.name in given and not alike]:
        warn_user(
            f"the gradients of {', '.join(other[:4])} cannot be sent by the plan's "
            f"codecs on {candidate.pricer.cluster}; they are sent as they are."
        )
    return tuple(_as_before(given[g.name], g) if alike else g for g, alike in pairs)


def _as_before(given: GradientDecision, made: GradientDecision) -> GradientDecision:
    """Copies all fields of a plan's decision except the codec to a new decision."""
    return msgspec.structs.replace(
        made,
        feedback=given.feedback,
        average_every=given.average_every,
        bucket=given.bucket,
    )


def describe_compression(
    parts: Sequence[tuple[Analysis, Candidate]],
    request: CodecRequest,
    before_s: float,
    after_s: float,
    more: str = "",
) -> Compression:
    """Explains why these codecs were chosen, and how many gradients no codec can send.

    Args:
      parts: the stages, with the decisions on their gradients.
      request: the user's request about codecs.
      before_s: seconds of a step without codecs, in the best known layouts.
      after_s: seconds of a step with codecs.
      more: text that the reason states after the seconds of a step without codecs.
    """
    rows = [(a, c.assignment, c.sending) for a, c in parts if c.sending is not None]
    squares = sum(s.error**2 * elements_of(s) for _, _, s in rows)
    total = sum(elements_of(s) for _, _, s in rows)
    coded = any(s.has_codecs for _, _, s in rows)
    left = [left_to_compiler(a, layouts, s.sites) for a, layouts, s in rows]
    early = sum(len(groups.get(EARLY, ())) for groups in left) if coded else 0
    text = None if request.codec is None else format_codec(request.codec)
    step = f"a step of {seconds_text(before_s)}{more}"
    verbs = ("save", "saves") if after_s <= before_s else ("cost", "costs")
    saved = f"{seconds_text(abs(before_s - after_s))} of {step}"
    if not any(s.sites for _, _, s in rows):
        reason = "no gradient is summed over devices in a form that codecs could send"
    elif request.sent is not None:
        reason = GIVEN_CODECS
    elif text is not None:
        reason = f"asked for; {verbs[1]} {saved}"
    elif not coded:
        reason = (
            "dense: no codecs within the error budget save "
            f"{100 * WORTHWHILE:.0f}% of {step} after encoding and decoding"
        )
    else:
        reason = f"codecs {verbs[0]} {saved}"
    if early:
        reason += f"; {early} more are summed by the compiler: {EARLY}"
    if coded and any(a.row_capacity for a, _, _ in rows):
        reason += (
            "; those of products of rows that have slots are summed by the compiler: "
            "a loop over further rounds adds to them"
        )
    return Compression(
        mode=EDITED if request.sent is not None else request.mode,
        error_budget=request.budget if request.chooses else None,
        metric="root mean square over elements of each gradient's relative error",
        error=math.sqrt(squares / total) if total else 0.0,
        reason=reason,
    )


def warn_if_unused(
    parts: Sequence[tuple[Analysis, Candidate]], request: CodecRequest
) -> None:
    """Warns if the codec that the user requested sends no gradient of any stage."""
    if request.codec is None or request.sent is not None or request.codec.lossless:
        return
    text = format_codec(request.codec)
    rows = [(a, c.assignment, c.sending) for a, c in parts if c.sending is not None]
    if not any(text in s.codecs for _, _, s in rows):
        warn_of_no_use([(a, layouts, s.sites) for a, layouts, s in rows], text)


def elements_of(sending: Sending) -> int:
    """Returns the number of elements of all gradients together."""
    return sum(math.prod(site.shape) for site in sending.sites)


def gradients_s(candidate: Candidate) -> float:
    """Returns the seconds that sums of gradients add to a step without codecs.

    If the sum of a gradient is postponed, each device keeps its own summand until the
    sum.

    An operator on such a summand takes longer than on a shard of the sum, because the
    summand has the full size. This extra time is not included here, because the
    operator sends nothing.
    """
    assert candidate.sending is not None
    texts = {site.value: "dense" for site in candidate.sending.sites}
    rest = _waiting_cost(candidate, texts)
    longer_s = rest.work_s - candidate.estimate.cost.work_s
    return candidate.plain_s - (step_s(rest) - longer_s)
