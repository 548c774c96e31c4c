"""Codecs of gathers: which sharded parameters are gathered as codes.

A gather is encoded if all of this holds:

- It gathers a parameter, or an array that is computed from parameters alone, such as
  its cast or its slice for one iteration of a loop. So activations, rows of the batch
  and optimizer state are gathered as they are.
- The array is a real floating-point array that `worth_a_codec` accepts.
- No operator of the update reads a gathered copy, and the step returns none. So
  everything that is kept for the next step is computed from exact values.
- It runs over a mesh axis with slow links (`coded_axes`), and the codes have fewer
  bytes than the array.

The error of a coarse parameter counts as an equal relative error of its gradient, so
that one budget holds all errors of a step. This is an assumption: the gradient is a
function of the parameter, whose sensitivity is not known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import msgspec

from autopar.compression.codecs.registry import parse_codec
from autopar.compression.cut_codes import CutCode, gather_codec
from autopar.cost.codecs import local_s
from autopar.cost.pricer import CodedRate, Pricer
from autopar.errors import PlanError
from autopar.layouts.assignment import Assignment
from autopar.layouts.gathering import CodedGather, GatherCodec, GatherRequest
from autopar.layouts.layout import ReshardStep
from autopar.plans import Plan
from autopar.steps.analysis import Analysis
from autopar.steps.sums import worth_a_codec
from autopar.steps.uses import ValueClass, value_class
from autopar_errors import InputError
from autopar_passes.graph.roles import Role

# The codecs to choose from. int4 is left out: its error exceeds the default budget.
OFFERED = ("int8",)

# Why a gathered parameter stays exact, in the order in which reasons are found.
NO_PARAMETER = "no parameter"
SMALL = "a vector, or of few elements"
NOT_FLOATING = "not of real floating-point numbers"
UPDATED = "the update reads the gathered copy, which must be exact"
NO_FASTER = "codes are no faster over its links"
UPDATE = Role.UPDATE
_EXACT = "gathers: exact, because"


def check_gather_codec(text: str, what: str) -> None:
    """Checks that a text names a codec for gathers.

    Raises:
      PlanError: it does not.
    """
    try:
        gather_codec(text)
    except InputError as error:
        raise PlanError(f"{what}: {error}") from error


def gathers_asked(text: str, budget: float) -> GatherRequest | None:
    """Reads the option ``gather_codecs``; None: gathers are exact.

    Args:
      text: the option.
      budget: the largest relative error of a step.

    >>> gathers_asked("auto", 0.05)
    GatherRequest(codec='int8', chooses=True)
    >>> gathers_asked("auto", 0.001)
    """
    if text == "none":
        return None
    if text != "auto":
        return GatherRequest(text)
    fitting = [t for t in OFFERED if parse_codec(t).error((1, 1)) <= budget]
    return GatherRequest(fitting[-1], chooses=True) if fitting else None


def gathers_of(plan: Plan) -> GatherRequest | None:
    """The request to gather parameters by the codec of a plan."""
    used = (g.codec for stage in plan.stages for g in stage.gathers if g.codec)
    codec = next(used, "")
    return GatherRequest(codec) if codec else None


def why_none(plan: Plan, text: str, request: GatherRequest | None) -> str:
    """A line that says why a plan encodes no gather although it was asked to.

    Args:
      plan: the plan.
      text: the option ``gather_codecs``.
      request: what was read from the option.

    Returns:
      The line; '' if a gather is encoded, if exact gathers were asked for, or if the
      plan has such a line already.
    """
    gathers = [g for stage in plan.stages for g in stage.gathers]
    told = any(line.startswith(_EXACT) for line in plan.decided)
    if text == "none" or told or any(g.codec for g in gathers):
        return ""
    why = "; ".join(dict.fromkeys(g.reason for g in gathers))
    if len(plan.stages) > 1 or plan.replicas:
        why = "only plans of one stage without replicas encode them"
    elif request is None:
        why = "no codec is within error_budget"
    return f"{_EXACT} {why or 'no parameter is sharded over slow links'}"


def with_exact_gathers(plan: Plan) -> Plan:
    """The plan with a line that says that codes would save too little."""
    said = f"{_EXACT} codes would save less than 3 % of a step"
    return msgspec.structs.replace(plan, decided=(said, *plan.decided))


def gather_error(request: GatherRequest) -> float:
    """The relative error of parameters that are gathered as a request says."""
    return parse_codec(request.codec).error((1, 1))


def gather_rate(analysis: Analysis, pricer: Pricer, value: int) -> CodedRate | None:
    """The price of gathering a value as codes; None if it is gathered as it is.

    Args:
      analysis: the step.
      pricer: the mesh and cluster, with the request.
      value: the value.
    """
    if pricer.gathers is None or why_exact(analysis, value):
        return None
    axes = coded_axes(analysis, pricer, value)
    return _rate(analysis, pricer, value, axes) if axes else None


def _rate(
    analysis: Analysis, pricer: Pricer, value: int, axes: frozenset[int]
) -> CodedRate:
    assert pricer.gathers is not None
    text, known = pricer.gathers.codec, analysis.graph.values[value]
    code = CutCode(text, (1, known.size), str(known.dtype))
    device = pricer.cluster.device
    coding_s = local_s(parse_codec(text), tuple(known.shape), device) / 2
    return CodedRate(axes, code.nbytes / code.dense_bytes, coding_s)


def coded_axes(analysis: Analysis, pricer: Pricer, value: int) -> frozenset[int]:
    """The mesh axes over which a value's gathers are encoded.

    If the planner chooses, these are the axes along which a gather of the whole array
    is faster as codes, with the seconds of encoding and decoding. Otherwise they are
    the axes between hosts; if the mesh lies in one level of links, all axes.

    Args:
      analysis: the step.
      pricer: the mesh and cluster, with the request.
      value: the value.
    """
    assert pricer.gathers is not None
    used = [a for a, axis in enumerate(pricer.mesh.axes) if axis.size > 1]
    if not pricer.gathers.chooses:
        levels = {pricer.mesh.axes[a].level for a in used}
        last = max(levels, default=0) if len(levels) > 1 else len(pricer.cluster.levels)
        return frozenset(a for a in used if pricer.mesh.axes[a].level < last)
    nbytes = float(analysis.graph.values[value].nbytes)
    out: set[int] = set()
    for a in used:
        rate = _rate(analysis, pricer, value, frozenset({a}))
        step = ReshardStep("all_gather", (a,), 1.0, ())
        more_s = (1.0 + 1.0 / pricer.group((a,))) * rate.coding_s
        coded_s = pricer.collective_s(step, rate.ratio * nbytes) + more_s
        if coded_s < pricer.collective_s(step, nbytes):
            out.add(a)
    return frozenset(out)


def why_exact(analysis: Analysis, value: int) -> str:
    """Why a value cannot be gathered as codes, in any layout; '' if it can."""
    known = analysis.graph.values[value]
    maker = analysis.contraction.producer[value]
    if maker.class_index not in analysis.independent.parameters:
        return NO_PARAMETER
    if not jnp.issubdtype(known.dtype, jnp.floating):
        return NOT_FLOATING
    return "" if worth_a_codec(known.shape) else SMALL


def with_gathers(assignment: Assignment, pricer: Pricer) -> Assignment:
    """Returns an assignment with a codec for each gather that is to be encoded."""
    if pricer.gathers is None:
        return assignment
    analysis, text = assignment.analysis, pricer.gathers.codec
    found: dict[ValueClass, GatherCodec] = {}
    for key, (value, why) in gathered(assignment).items():
        axes = frozenset[int]() if why else coded_axes(analysis, pricer, value)
        if axes:
            found[key] = GatherCodec(text, axes)
    wanted = dataclasses.replace(assignment, gathers=found)
    used = {key: found[key] for key, gathers in encoded(wanted).items() if gathers}
    return dataclasses.replace(assignment, gathers=used)


def gathered(assignment: Assignment) -> dict[ValueClass, tuple[int, str]]:
    """The classes of parameters that are gathered.

    Returns:
      Class -> one of its values, and why its gathers stay exact in any case, or ''.
    """
    out: dict[ValueClass, tuple[int, str]] = {}
    for value, steps, role in _resharded(assignment):
        key = value_class(assignment.contraction, value)
        if any(step.kind == "all_gather" for step in steps):
            why = why_exact(assignment.analysis, value)
            if why == NO_PARAMETER or out.get(key, (0, ""))[1]:
                continue
            out[key] = value, why or (UPDATED if role is Role.UPDATE else "")
    return out


def encoded(assignment: Assignment) -> dict[ValueClass, list[CodedGather]]:
    """The encoded gathers of each value class under an assignment."""
    out: dict[ValueClass, list[CodedGather]] = {key: [] for key in assignment.gathers}
    for value, steps, _ in _resharded(assignment):
        layout, key = (
            assignment.home_layout(value),
            value_class(assignment.contraction, value),
        )
        for step in steps:
            gather = assignment.coded_gather(value, layout, step)
            if gather is not None and gather not in out[key]:
                out[key].append(gather)
            layout = step.layout
    return out


def _resharded(
    assignment: Assignment,
) -> Iterator[tuple[int, tuple[ReshardStep, ...], Role]]:
    """Yields the values that are resharded, the steps, and the role of the readers."""
    groups = assignment.analysis.readings.groups
    for group, ways in zip(groups, assignment.ways, strict=True):
        for (source, _), (steps, _) in zip(group.parts, ways, strict=True):
            if steps:
                yield source, steps, group.operator.role
    for position, value in enumerate(assignment.graph.outputs):
        layout = assignment.output(position)
        if value is not None and layout is not None:
            for source, wanted in assignment.required_layouts(value, layout):
                yield source, assignment.fetch_steps(source, wanted, True)[0], UPDATE
