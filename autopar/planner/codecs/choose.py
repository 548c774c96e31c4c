"""Chooses how each gradient is sent, together with the layouts.

The choice for given layouts is a small program
(`autopar_solver.selection`): least exposed and local seconds under a budget of
error. Layouts are chosen with it by its prices: with a price on error and a
weight on each second of the link, every gradient's best codec for every pair of
layouts is known, so the problem of the layouts stays what it was, with other
costs on the edges that carry gradients. Its best plans are then judged by the
exact choice, and so is the plan that was best without codecs: what is returned is
never worse than choosing the layouts first and the codecs after.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import msgspec
import numpy as np

from autopar.cluster import MeshShape
from autopar.compression.codecs.codec import Codec
from autopar.compression.codecs.registry import (
    format_codec,
    offered_codecs,
    parse_codec,
)
from autopar.compression.feedback import Feedback
from autopar.compression.gradient import Gradient, init_state
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
from autopar.errors import InfeasibleError, PlanError
from autopar.layouts.summation import Summation
from autopar.planner.candidate import Candidate, SearchResult
from autopar.planner.codecs.left_out import EARLY, left_to_compiler
from autopar.planner.codecs.sites import Site, decision, sites
from autopar.planner.codecs.smaller_error import GAP, with_less_error
from autopar.planner.problem import Restriction
from autopar.planner.solving import HIDDEN, solve_mesh
from autopar.plans import Compression, GradientDecision
from autopar.steps.analysis import Analysis
from autopar_passes.graph.roles import Role
from autopar_solver import (
    CodecSelection,
    Status,
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
# Rounds of choosing layouts by the prices of the best choice so far.
ROUNDS = 2

# name of a parameter -> codec -> relative error of its gradient, measured.
Errors = Mapping[str, Mapping[str, float]]


@dataclasses.dataclass(frozen=True, slots=True)
class CodecChoice:
    """Codecs for one assignment.

    Attributes:
      candidate: the assignment.
      sites: its gradients.
      codecs: of each, '' where it is left to the compiler.
      saved_s: seconds of a step that they save.
      each_s: the same of each gradient.
      errors: relative error of each, in the L2 norm.
      summations: how the devices share the work of each.
      error: effective relative error of the whole gradient.
      memory_bytes: what the codecs keep on one device.
      rest: what the step costs besides gradients with codecs.
      coded: what sending these costs: messages, encoding and decoding.
      problem: the program that chose.
    """

    candidate: Candidate
    sites: tuple[Site, ...]
    codecs: tuple[str, ...]
    saved_s: float
    each_s: tuple[float, ...]
    errors: tuple[float, ...]
    summations: tuple[Summation, ...]
    error: float
    memory_bytes: float
    rest: CostBreakdown
    coded: CostBreakdown
    problem: CodecSelection | None

    @property
    def cost(self) -> CostBreakdown:
        """What a step costs."""
        return self.rest + self.coded

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.candidate.step_s - self.saved_s


def uniform(analysis: Analysis, candidate: Candidate, codec: Codec) -> CodecChoice:
    """Every gradient by one codec, the small ones as they are.

    Raises:
      PlanError: the codec can be used for none of them.
    """
    found = sites(analysis, candidate.assignment, candidate.pricer.mesh.axes)
    large = [s for s in found if s.compressible]
    refusals = {s.value: s.refuses(codec) for s in large}
    if large and all(refusals.values()):
        why = next(iter(refusals.values()))
        raise PlanError(
            f"compression={format_codec(codec)!r} cannot be used for any gradient of "
            f"this plan: {why} Try another codec, or compression='auto'."
        )
    text = format_codec(codec)
    codecs = ["dense" if refusals.get(s.value, "small") else text for s in found]
    return judged(candidate, found, codecs, {})


def judged(
    candidate: Candidate, found: Sequence[Site], codecs: Sequence[str], errors: Errors
) -> CodecChoice:
    """Returns the saving of given codecs.

    Gradients that wait are summed once where several operators contribute. What is
    sent is charged by message, with and without codecs. A message holds all gradients
    of one codec, so nothing of it is sent before the backward pass has ended.
    """
    pricer = candidate.pricer
    options = zip(found, codecs, strict=True)
    after = [_option(pricer, s, c, errors) for s, c in options]
    before = [_option(pricer, s, "", errors) for s in found]
    each = [
        b.price.wire_s - a.price.wire_s - a.price.local_s
        for b, a in zip(before, after, strict=True)
    ]
    texts = {s.value: c for s, c in zip(found, codecs, strict=True) if c}
    waiting = dataclasses.replace(candidate.assignment, codecs=texts, _known={})
    rest = estimate(waiting, pricer).cost
    coded = [a for a, text in zip(after, codecs, strict=True) if text]
    taken = [a.summation for a in after]
    sent = CostBreakdown(
        codec_s=sum(a.price.local_s for a in coded),
        waiting_s=collectives_s(pricer, taken, codecs),
        codec_bytes=sum(
            made.wire_bytes + made.within_bytes
            for s, text, summation in zip(found, codecs, taken, strict=True)
            if text
            for made in [decision(s, pricer.mesh.axes, text, summation)]
        ),
    )
    saved = candidate.step_s - step_s(rest + sent)
    total = sum(math.prod(s.shape) for s in found)
    squared = sum(a.weighted_error for a in after)
    return CodecChoice(
        candidate,
        tuple(found),
        tuple(codecs),
        saved,
        tuple(each),
        tuple(a.price.error for a in after),
        tuple(taken),
        math.sqrt(squared / total) if total else 0.0,
        sum(a.memory_bytes for a in after),
        rest,
        sent,
        None,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
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


def _option(pricer: Pricer, site: Site, text: str, errors: Errors) -> Option:
    """Prices a codec for a gradient, the fastest way; '' is what the compiler does."""
    mesh = pricer.mesh.axes
    if not text:
        route = route_of(site.summations[-1], mesh)
        price = compiler_price(pricer, route, site.itemsize)
        return Option(price, 0.0, 0.0, site.flat)
    error = errors.get(site.name, {}).get(text)
    prices = [
        (codec_price(pricer, route_of(summation, mesh), text, error), summation)
        for summation in site.summations
    ]
    price, summation = min(prices, key=lambda pair: pair[0].seconds)
    assert not price.refused, price.refused
    weighted = math.prod(site.shape) * price.counted_error**2
    kept = _state_bytes(summation, parse_codec(text))
    return Option(price, weighted, kept, summation)


@functools.lru_cache(maxsize=1 << 14)
def _state_bytes(summation: Summation, codec: Codec) -> float:
    """Returns the bytes that a codec keeps on a device, with the residual."""
    kind = "residual" if codec.feedback else "none"
    how = Gradient("", summation.local_shape, codec, Feedback(kind=kind))
    state = jax.eval_shape(lambda: init_state(how, summation.workers))
    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)))


def choose(
    analysis: Analysis,
    candidate: Candidate,
    budget: float,
    errors: Errors,
    *,
    most: float | None = None,
) -> CodecChoice:
    """The codecs that make a given assignment fastest, within the budget.

    Args:
      analysis: the step.
      candidate: the assignment.
      budget: of the error of all of its gradients together.
      errors: that were measured.
      most: largest error of one gradient; None: `MOST_OF_BUDGET`.
    """
    most = MOST_OF_BUDGET * budget if most is None else most
    found = sites(analysis, candidate.assignment, candidate.pricer.mesh.axes)
    large = [s for s in found if s.compressible]
    nothing = judged(candidate, found, [""] * len(found), errors)
    if not large:
        return nothing
    rows = [_allowed(candidate.pricer, site, most, errors) for site in large]
    problem = _selection(candidate, found, large, rows, budget)
    answer = solve_selection(problem, seconds=2.0, gap=GAP)
    if answer.status not in (Status.OPTIMAL, Status.FEASIBLE):
        return dataclasses.replace(nothing, problem=problem)
    answer = with_less_error(problem, answer)
    chosen = {
        s.value: row[k][0]
        for s, row, k in zip(large, rows, answer.choices, strict=True)
    }
    coded = any(chosen.values())
    rest = "dense" if coded else ""
    codecs = [chosen.get(s.value, "") or rest for s in found]
    made = judged(candidate, found, codecs, errors)
    made = dataclasses.replace(made, problem=problem)
    if made.saved_s < WORTHWHILE * candidate.step_s:
        return dataclasses.replace(nothing, problem=problem)
    return made


def _allowed(
    pricer: Pricer, site: Site, most: float, errors: Errors
) -> list[tuple[str, Option]]:
    """Returns the codecs that a gradient may be sent by, and their effects."""
    known = [t for t in offered_codecs() if not site.refuses(parse_codec(t))]
    options = [(text, _option(pricer, site, text, errors)) for text in ("", *known)]
    limit = math.prod(site.shape) * most**2
    return [(text, o) for text, o in options if o.weighted_error <= limit]


def _selection(
    candidate: Candidate,
    found: Sequence[Site],
    large: Sequence[Site],
    rows: Sequence[Sequence[tuple[str, Option]]],
    budget: float,
) -> CodecSelection:
    pricer = candidate.pricer
    total = sum(math.prod(s.shape) for s in found)
    left = pricer.cluster.memory_bytes - candidate.peak_memory_bytes
    felt = _felt_part(candidate)

    def column(of: Callable[[Option], float]) -> tuple[np.ndarray, ...]:
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
    known = candidate.pricer.cluster.device.calibrated
    backward = [t for t in candidate.timelines if t.role is Role.BACKWARD]
    sent = sum(t.communication_s for t in backward)
    exposed = sum(t.exposed_s(known.overlap) for t in backward)
    return (exposed + known.contention * (sent - exposed)) / sent if sent else 1.0


Restrictor = Callable[[Pricer], Restriction]


def joint(
    analysis: Analysis,
    result: SearchResult,
    *,
    budget: float,
    errors: Errors,
    seconds: float | None,
    restriction: Restrictor | None,
) -> tuple[CodecChoice, CodecChoice]:
    """The best layouts and codecs together, and the best when layouts come first."""
    known = [c for _, c in result.tried if c is not None]
    choices = [choose(analysis, c, budget, errors) for c in known]
    first = next(x for x in choices if x.candidate is result.best)
    best = min(choices, key=lambda c: c.step_s)
    meshes = [mesh for mesh, _ in result.tried]
    for _ in range(ROUNDS):
        prices = _prices(best, errors, budget)
        found = [
            choose(analysis, c, budget, errors)
            for mesh in meshes
            if (c := _solved(analysis, mesh, result, prices, seconds, restriction))
        ]
        better = min(found, key=lambda c: c.step_s, default=best)
        if better.step_s >= best.step_s * (1 - 1e-6):
            break
        best = better
        meshes = [best.candidate.pricer.mesh]
    return best, first


def joint_uniform(
    analysis: Analysis,
    result: SearchResult,
    codec: Codec,
    *,
    seconds: float | None,
    restriction: Restrictor | None,
) -> tuple[CodecChoice, CodecChoice]:
    """The best layouts when every gradient is sent by one codec, and the first best.

    Raises:
      PlanError: the codec can be used for no gradient of any of the plans.
    """
    prices = Prices(1.0, 0.0, (format_codec(codec),), {}, forced=True)
    first = uniform(analysis, result.best, codec)
    found = [first]
    for mesh, _ in result.tried:
        solved = _solved(analysis, mesh, result, prices, seconds, restriction)
        if solved is not None:
            with contextlib.suppress(PlanError):
                found.append(uniform(analysis, solved, codec))
    return min(found, key=lambda c: c.step_s), first


def _prices(best: CodecChoice, errors: Errors, budget: float) -> Prices:
    """Returns the prices of a second on the link and of an error at the best choice.

    Where that sends nothing, an error is free: the exact choice sees to the budget.
    """
    codecs, known, most = offered_codecs(), dict(errors), MOST_OF_BUDGET * budget
    dual = None if best.problem is None else solve_relaxation(best.problem)
    if dual is None or dual.status is not Status.OPTIMAL:
        return Prices(1.0, 0.0, codecs, known, most)
    weights = dual.wire_weights
    weight = float(np.mean(weights)) if weights else 1.0
    return Prices(weight, dual.seconds_per_error, codecs, known, most)


def _solved(
    analysis: Analysis,
    mesh: MeshShape,
    result: SearchResult,
    prices: Prices,
    seconds: float | None,
    restriction: Restrictor | None,
) -> Candidate | None:
    pricer = Pricer(result.best.pricer.cluster, mesh)
    limit = restriction(pricer) if restriction is not None else None
    known = [c.weights for m, c in result.tried if c is not None and m == mesh]
    try:
        return solve_mesh(
            analysis,
            pricer,
            limit,
            seconds,
            prices=prices,
            weights=known or (HIDDEN,),
        )
    except InfeasibleError:
        return None


def gradient_decisions(choice: CodecChoice) -> tuple[GradientDecision, ...]:
    """Writes a choice down."""
    mesh = choice.candidate.mesh.axes
    out: list[GradientDecision] = []
    for site, text, saved, error, summation in zip(
        choice.sites,
        choice.codecs,
        choice.each_s,
        choice.errors,
        choice.summations,
        strict=True,
    ):
        made = decision(site, mesh, text, summation)
        out.append(msgspec.structs.replace(made, error=error, saved_s=saved))
    return tuple(out)


def described(
    analysis: Analysis,
    choice: CodecChoice,
    first: CodecChoice,
    mode: str,
    budget: float | None,
) -> Compression:
    """Says why, and how many gradients no codec can send."""
    left = left_to_compiler(analysis, choice.candidate.assignment, choice.sites)
    early = len(left.get(EARLY, ())) if any(choice.codecs) else 0
    more = f"; {early} more are summed by the compiler: {EARLY}" if early else ""
    return Compression(
        mode=mode,
        error_budget=budget if mode == "auto" else None,
        metric="root mean square over elements of each gradient's relative error",
        error=choice.error,
        reason=_reason(choice, first, mode) + more,
    )


def _reason(choice: CodecChoice, first: CodecChoice, mode: str) -> str:
    step = choice.candidate.step_s
    if not choice.sites:
        return "no gradient is summed over devices in a form that codecs could send"
    if mode != "auto":
        return f"asked for; saves {_ms(choice.saved_s)} of a step of {_ms(step)}"
    if not any(choice.codecs):
        return (
            f"dense: sending gradients takes {_ms(_gradients_s(choice))} of a step of "
            f"{_ms(step)}; no "
            "codec within the error budget saves "
            f"{100 * WORTHWHILE:.0f}% of the step after encoding and decoding"
        )
    gain = first.step_s - choice.step_s
    moved = f", {_ms(gain)} of it by other layouts" if gain > 1e-9 else ""
    return (
        f"codecs save {_ms(choice.saved_s)} of a step of {_ms(step)} "
        f"({_ms(_gradients_s(choice))} of it gradients){moved}"
    )


def _gradients_s(choice: CodecChoice) -> float:
    """Seconds that the sums of gradients add to a step without codecs.

    What works on a sum that waits takes longer, for it is whole on each device. That is
    no part of sending it.
    """
    candidate = choice.candidate
    texts = {site.value: "dense" for site in choice.sites}
    waiting = dataclasses.replace(candidate.assignment, codecs=texts, _known={})
    rest = estimate(waiting, candidate.pricer).cost
    longer_s = rest.work_s - candidate.cost.work_s
    return candidate.step_s - (step_s(rest) - longer_s)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
