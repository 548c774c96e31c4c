"""Chooses how each gradient is sent, for layouts that are known.

The choice is a small program (`autopar_solver.selection`): least exposed and local
seconds under a budget of error. The search of layouts (`autopar.planner.solving`) has
each of its plans sent so, and proposes layouts by the prices of the best choice: with a
price on error and a weight on each second of the link, every gradient's best codec for
every pair of layouts is known, so the problem of the layouts stays what it was, with
other costs on the edges that carry gradients.
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
from autopar.layouts.summation import WITHIN_BYTES, Summation
from autopar.planner.candidate import Candidate
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

# Codecs that save less than this part of a step are not worth their error.
WORTHWHILE = 0.03
# No gradient may lose more than this many times the budget: what is left of it is not
# spent on a few small ones. In training they do not average out: on 100 steps of a
# character GPT, 6 % of the elements sent by `predicted` and `sign`, within a budget of
# 0.1, cost 0.09 nats a character (docs/record).
MOST_OF_BUDGET = 2.0

# name of a parameter -> codec -> relative error of its gradient, measured.
Errors = Mapping[str, Mapping[str, float]]

# Effective relative error of the whole gradient that ``auto`` allows. Of the codecs
# that were tried alone on three seeds, those below it (int8; int4 with rotation, .032)
# end within about one deviation of dense gradients' loss, those above it do not
# (docs/record): int4 in blocks of 256 without rotation, .061, takes a seventh
# more steps.
DEFAULT_BUDGET = 0.05
# Mode of a plan whose codecs were given gradient by gradient.
EDITED = "edited"
GIVEN_CODECS = "codecs as they were given"


@dataclasses.dataclass(frozen=True, slots=True)
class CodecRequest:
    """What was said about codecs.

    Attributes:
      mode: as of `PlanOptions.compression`.
      codec: that it names.
      budget: of error.
      sent: a plan whose codecs hold gradient by gradient.
      errors: measured relative errors, by gradient and codec.
      most: none of a gradient's may count for more.
    """

    mode: str
    codec: Codec | None
    budget: float
    sent: Plan | None
    errors: Errors
    most: float = math.inf

    @property
    def chooses(self) -> bool:
        """Whether codecs are to be chosen."""
        return self.sent is None and self.codec is None


def request_of(
    options: PlanOptions, sent: Plan | None = None, errors: Errors | None = None
) -> CodecRequest:
    """Reads the options.

    Args:
      options: hints and limits of planning.
      sent: a plan whose codecs hold gradient by gradient.
      errors: measured relative errors, by gradient and codec.
    """
    mode, given = options.compression, options.error_budget
    budget = DEFAULT_BUDGET if given is None else float(given)
    most = min(MOST_OF_BUDGET * budget, MOST_LOST)
    return CodecRequest(mode, parsed_codec(mode), budget, sent, errors or {}, most)


def sent_as_asked(
    analysis: Analysis, candidate: Candidate, request: CodecRequest
) -> Candidate:
    """Layouts with their gradients sent as is asked for.

    Raises:
      PlanError: the codec that was asked for can be used for no gradient.
      InputError: a codec does not keep to what is asked of its class.
    """
    mesh = candidate.pricer.mesh.axes
    found = sites(analysis, candidate.assignment, mesh, candidate.collectives)
    _check_codecs(found, request)
    if candidate.assignment.sums_each_microbatch:
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


def _as_they_are(
    candidate: Candidate, found: Sequence[Site], request: CodecRequest
) -> Sending:
    """Gradients that are summed in each microbatch, because whole ones do not fit.

    Raises:
      PlanError: codecs were asked for. They send sums of all microbatches.
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
    """Checks codecs of classes outside of the package on the first gradient of each."""
    asked = request.codec
    texts = offered_codecs() if asked is None else [format_codec(asked)]
    for codec in map(parse_codec, texts):
        if type(codec).is_of_package():
            continue
        taken = (s for s in found if s.compressible and not s.refuses(codec))
        for site in itertools.islice(taken, 1):
            way = site.flat
            check_codec(
                codec,
                way.local_shape,
                way.workers,
                scatter=way.scatter,
                name=site.name,
            )


def _uniform(candidate: Candidate, found: Sequence[Site], codec: Codec) -> Sending:
    """Every gradient by one codec, the small ones as they are.

    Raises:
      PlanError: the codec can be used for none of them.
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


def _choose_sending(
    candidate: Candidate, found: Sequence[Site], request: CodecRequest
) -> Sending:
    """The codecs that make the step fastest, within the budget."""
    errors = request.errors
    large = [s for s in found if s.compressible]
    nothing = judge_codecs(candidate, found, [""] * len(found), errors)
    if not large:
        return nothing
    known: dict[object, list[tuple[str, CodecOption]]] = {}
    rows: list[list[tuple[str, CodecOption]]] = []
    for site in large:
        # Gradients of one shape and place have the same prices.
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
    """How a gradient is sent that no codec was chosen for.

    Beside gradients with codecs it costs no message of its own to send it with them, in
    float32; so the compiler sums a large one that it sums in a narrower type.
    """
    narrow = site.compressible and site.itemsize < WITHIN_BYTES
    return "dense" if coded and not narrow else ""


def judge_codecs(
    candidate: Candidate, found: Sequence[Site], codecs: Sequence[str], errors: Errors
) -> Sending:
    """Returns what given codecs cost.

    Gradients that wait are summed once where several operators contribute. What is
    sent is charged by message, with and without codecs. A message holds all gradients
    of one codec, so nothing of it is sent before the backward pass has ended.
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
    """The cost of a step besides gradients with codecs, whose sums wait."""
    waiting = dataclasses.replace(candidate.assignment, codecs=dict(texts))
    return estimate(waiting, candidate.pricer).cost


@dataclasses.dataclass(frozen=True, slots=True)
class CodecOption:
    """One codec for one gradient, as the program that chooses sees it.

    Attributes:
      price: what it costs by itself.
      weighted_error: its squared error, times the gradient's elements.
      memory_bytes: what it keeps on one device.
      summation: how the devices share the work.
    """

    price: CodecPrice
    weighted_error: float
    memory_bytes: float
    summation: Summation


def _option(pricer: Pricer, site: Site, text: str, errors: Errors) -> CodecOption:
    """Prices a codec for a gradient, the fastest way; '' is what the compiler does."""
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
    """Returns the bytes that a codec keeps on a device, with the residual."""
    kind = "residual" if codec.feedback else "none"
    how = Gradient("", summation.local_shape, codec, Feedback(kind=kind))
    state = jax.eval_shape(lambda: init_state(how, summation.workers))
    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)))


def _allowed_codecs(
    pricer: Pricer, site: Site, request: CodecRequest
) -> list[tuple[str, CodecOption]]:
    """Returns the codecs that a gradient may be sent by, and their effects."""
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
        # Messages of many gradients leave when the last of them is complete.
        ready_s=(0.0,) * len(large),
        backward_s=0.0,
        error_budget=budget**2 * total,
        memory_bytes=column(lambda o: o.memory_bytes),
        memory_budget_bytes=max(0.0, left),
    )


def _felt_part(candidate: Candidate) -> float:
    """The part of the compiler's sums that lengthens a step; work hides the rest."""
    known = candidate.pricer.cluster.device.corrections
    backward = [t for t in candidate.timelines if t.role is Role.BACKWARD]
    sent = sum(t.communication_s for t in backward)
    exposed = sum(t.exposed_s(known.overlap) for t in backward)
    return (exposed + known.contention * (sent - exposed)) / sent if sent else 1.0


# Costs that differ by less, as a share of the backward pass and the cost together, are
# the same: the solver proves no more, and the smaller error is taken.
GAP = 1e-4


def with_less_error(
    problem: CodecSelection, answer: SelectionResult
) -> SelectionResult:
    """The choices with less error that cost the same, as far as the solver can tell.

    Gradient by gradient the option of least error is taken that costs no more by itself
    nor, with all others as they are, in the step.
    """
    most = answer.cost_s + GAP * (problem.backward_s + answer.cost_s)
    chosen, spent = list(answer.choices), answer.cost_s
    for site, errors in enumerate(problem.error):
        now, local, wire = chosen[site], problem.local_s[site], problem.wire_s[site]
        # Work that cannot hide behind the backward pass costs all of its time.
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
    """The prices of a second on the link and of an error at the best choice.

    Where that sends nothing, an error is free: the exact choice sees to the budget.
    Codecs that were asked for are used wherever they can be.
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
    """Writes down how each gradient is sent.

    Of a plan whose codecs hold, a gradient keeps all that it says. One that its codec
    cannot send here is sent as it is, with a warning.
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
    """A decision with what a plan says of it besides the codec."""
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
    """Says why gradients are sent so, and how many no codec can send.

    Args:
      parts: the stages, with their gradients sent.
      request: what was said about codecs.
      before_s: seconds of a step without codecs, in the best layouts known.
      after_s: seconds with them.
      more: what else is to be said of the step without codecs.
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
    """Warns where the codec that was asked for sends no gradient of any stage."""
    if request.codec is None or request.sent is not None or request.codec.lossless:
        return
    text = format_codec(request.codec)
    rows = [(a, c.assignment, c.sending) for a, c in parts if c.sending is not None]
    if not any(text in s.codecs for _, _, s in rows):
        warn_of_no_use([(a, layouts, s.sites) for a, layouts, s in rows], text)


def elements_of(sending: Sending) -> int:
    """Elements of all gradients."""
    return sum(math.prod(site.shape) for site in sending.sites)


def gradients_s(candidate: Candidate) -> float:
    """Seconds that the sums of gradients add to a step without codecs.

    What works on a sum that waits takes longer, for it is whole on each device. That is
    no part of sending it.
    """
    assert candidate.sending is not None
    texts = {site.value: "dense" for site in candidate.sending.sites}
    rest = _waiting_cost(candidate, texts)
    longer_s = rest.work_s - candidate.estimate.cost.work_s
    return candidate.plain_s - (step_s(rest) - longer_s)
