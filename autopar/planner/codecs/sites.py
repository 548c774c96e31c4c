"""The gradients that a plan sums over devices, and how they are sent.

A codec can send a gradient if the all-reduce of the gradient may be postponed
(`autopar.layouts.stacking`). Until the all-reduce, each device holds its own summand of
the gradient in full size.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Collection, Generator, Mapping, Sequence

import msgspec

from autopar.cluster.mesh import MeshAxis
from autopar.compression.codecs.codec import Codec
from autopar.compression.codecs.registry import parse_codec
from autopar.cost.breakdown import CostBreakdown
from autopar.cost.codecs import route_of
from autopar.cost.collectives import collective_bytes
from autopar.cost.combining import SUMS
from autopar.cost.traffic import Collective
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Axes
from autopar.layouts.summation import Summation, summations
from autopar.plans import GradientDecision
from autopar.steps.analysis import Analysis
from autopar.steps.nodes import Contraction
from autopar.steps.sums import SMALLEST, worth_a_codec
from autopar_errors import warn_user
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.sums.stacked import Deferral
from autopar_solver import CodecSelection


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """A gradient whose sum over devices a codec may compute.

    Attributes:
      value: number of the gradient's value in the graph.
      name: path of the parameter that the gradient updates.
      shape: of the whole gradient.
      axes: mesh axes over which the gradient is summed.
      summations: the ways in which the devices can share the work; the first way sums
        over all links at once.
      ready: the operator that completes the gradient in the backward pass.
      itemsize: bytes per element of the gradient that the compiler sums, in the dtype
        of the sum. If several operators contribute to the gradient, their bytes are
        added.
    """

    value: int
    name: str
    shape: tuple[int, ...]
    axes: Axes
    summations: tuple[Summation, ...]
    ready: int
    itemsize: float

    @property
    def flat(self) -> Summation:
        """The way that sums over all links at once."""
        return self.summations[0]

    @property
    def compressible(self) -> bool:
        """Whether the gradient is large enough for a codec, and is not a vector."""
        return worth_a_codec(self.shape)

    def refuses(self, codec: Codec) -> str:
        """Says why the gradient cannot use a codec; '' if the gradient can."""
        found = [codec.check(w.local_shape, scatter=w.scatter) for w in self.summations]
        return "" if not all(found) else found[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Sending:
    """How the gradients are sent under given layouts, and the cost of a step with these
    codecs.

    Attributes:
      sites: the gradients.
      codecs: the codec of each gradient; '' if the compiler sums the gradient.
      summations: for each gradient, how the devices share the work of its sum.
      each_s: for each gradient, the seconds of a step that its codec saves.
      errors: relative error of each gradient, the L2 norm of the error divided by that
        of the gradient.
      error: effective relative error of the whole gradient
        (`autopar.planner.codecs.choose`).
      memory_bytes: bytes that codecs keep on one device between steps.
      cost: cost of a step, including the time to send gradients by codecs.
      problem: the integer program of the choice; None: there was no choice to make.
    """

    sites: tuple[Site, ...]
    codecs: tuple[str, ...]
    summations: tuple[Summation, ...]
    each_s: tuple[float, ...]
    errors: tuple[float, ...]
    error: float
    memory_bytes: float
    cost: CostBreakdown
    problem: CodecSelection | None = None

    @property
    def has_codecs(self) -> bool:
        """Whether a codec sends any gradient."""
        return any(self.codecs)

    def decisions(self, mesh: Sequence[MeshAxis]) -> tuple[GradientDecision, ...]:
        """Records how each gradient is sent.

        Args:
          mesh: the axes of the mesh.
        """
        columns = (self.sites, self.codecs, self.summations, self.errors, self.each_s)
        return tuple(
            msgspec.structs.replace(
                decision(site, mesh, text, summation), error=error, saved_s=saved_s
            )
            for site, text, summation, error, saved_s in zip(*columns, strict=True)
        )


def sites(
    analysis: Analysis,
    assignment: Assignment,
    mesh: Sequence[MeshAxis],
    collectives: Sequence[Collective],
) -> list[Site]:
    """Lists the gradients that codecs may send under an assignment, in program order.

    The compiler sums all other gradients.

    Args:
      analysis: the step.
      assignment: its layouts.
      mesh: the axes of the mesh.
      collectives: the collectives of a step without codecs.
    """
    names = parameter_names(
        analysis.graph, analysis.contraction, gradients_of(analysis)
    )
    summed = {c.value: c.nbytes * c.trips for c in collectives if c.step.kind in SUMS}
    out: list[Site] = []
    for deferral in analysis.deferrals:
        if not deferral.gradients:
            continue
        held = assignment.stack(deferral)
        itemsize = _summed_itemsize(analysis.graph, deferral, held, summed)
        out += [
            Site(
                value=value,
                name=names[value],
                shape=(shape := tuple(analysis.graph.values[value].shape)),
                axes=held[value].axes,
                summations=summations(
                    shape, assignment.home_layout(value), held[value].axes, mesh
                ),
                ready=analysis.contraction.producer[value].index,
                itemsize=itemsize,
            )
            for value in deferral.ends
            if value in deferral.gradients and value in held
        ]
    return out


def _summed_itemsize(
    graph: OperatorGraph,
    deferral: Deferral,
    held: Collection[int],
    summed: Mapping[int, float],
) -> float:
    """Bytes per element that a step without codecs sums for a deferral's final values.

    Args:
      graph: the operators.
      deferral: the postponed sum of the gradients.
      held: the values of the deferral that stay partial.
      summed: bytes that the sum of each value moves in a step without codecs.
    """
    ends = [graph.values[v] for v in deferral.ends]
    nbytes = sum(summed.get(v, 0.0) for v in held)
    # If an operator outside of the deferral takes the sums, the bytes of the final
    # values are counted instead.
    return (nbytes or sum(v.nbytes for v in ends)) / max(1, sum(v.size for v in ends))


def gradients_of(analysis: Analysis) -> list[int]:
    """Returns the values of the backward pass that the optimizer update reads."""
    return [v for d in analysis.deferrals for v in d.ends if v in d.gradients]


def parameter_names(
    graph: OperatorGraph, contraction: Contraction, values: Sequence[int]
) -> dict[int, str]:
    """Names gradients by the parameter that they update.

    A gradient is followed through operators that keep its shape, to the first parameter
    of this shape that the step returns. If no parameter is reached, the gradient is
    named after the module that computes it.
    """
    names: dict[int, str] = {}
    taken: set[str] = set()
    for value, name in updated_parameters(graph, values).items():
        if not name or name in taken:
            op = contraction.producer[value]
            name = f"{op.module or op.kind}/gradient_{value}"
        taken.add(name)
        names[value] = name
    return names


def updated_parameters(graph: OperatorGraph, values: Sequence[int]) -> dict[int, str]:
    """The parameter that each gradient updates, found as in `parameter_names`; '' if
    none is found.
    """
    readers: dict[int, list[Operator]] = {}
    for op in graph.operators:
        for v in op.inputs:
            if v is not None:
                readers.setdefault(v, []).append(op)
    targets = {
        graph.outputs[i.output]: i.path
        for i in graph.inputs
        if i.output >= 0 and i.role is InputRole.PARAMETER
    }
    return {value: _reached_path(graph, readers, targets, value) for value in values}


def _reached_path(
    graph: OperatorGraph,
    readers: dict[int, list[Operator]],
    targets: dict[int | None, str],
    value: int,
) -> str:
    shape = graph.values[value].shape
    seen, left = {value}, [value]
    while left:
        current = left.pop(0)
        if current in targets:
            return targets[current]
        for op in readers.get(current, []):
            if op.role is Role.FORWARD:
                continue
            for out in op.outputs:
                if out not in seen and graph.values[out].shape == shape:
                    seen.add(out)
                    left.append(out)
    return ""


def decision(
    site: Site, mesh: Sequence[MeshAxis], codec: str, summation: Summation
) -> GradientDecision:
    """Records how one gradient is sent.

    Args:
      site: the gradient.
      mesh: the axes of the mesh.
      codec: the codec as text; '': the compiler sums the gradient.
      summation: how the devices share the work of the sum.
    """
    route = route_of(summation, mesh)
    made = GradientDecision(
        name=site.name,
        value=site.value,
        shape=site.shape,
        local_shape=summation.local_shape,
        axes=tuple(mesh[a].name for a in sorted(summation.axes)),
        workers=summation.workers,
        scatter=summation.scatter,
        within=tuple(mesh[a].name for a in summation.within),
        keeps=summation.keeps,
        codec=codec,
        feedback=bool(codec) and parse_codec(codec).feedback,
        dense_bytes=collective_bytes(
            route.kind, summation.elements * site.itemsize, summation.workers
        ),
        within_bytes=sum((m.sent for m in route.within_messages), 0.0),
    )
    return reprice_bytes(made)


def reprice_bytes(made: GradientDecision) -> GradientDecision:
    """Returns a decision whose bytes are those that its codec sends."""
    if not made.codec:
        return msgspec.structs.replace(made, wire_bytes=made.dense_bytes)
    codec = parse_codec(made.codec)
    sent = codec.wire_bytes(made.local_shape, made.workers, scatter=made.scatter)
    return msgspec.structs.replace(made, wire_bytes=sent)


UNSUMMED = "not summed over devices"
EARLY = "their sums cannot wait for the update"
SMALL = f"a vector, or of fewer than {SMALLEST} elements"

_REMEDIES = {
    UNSUMMED: "under these layouts each device computes the gradients of what it "
    "holds. A gradient is summed over devices only if they split the batch, and each "
    "holds the whole parameter, as with pins={path: PartitionSpec()}",
    EARLY: "they are summed as without a codec (page 'Gradient compression' of the "
    "documentation, 'What is not compressed')",
}

# The most names of gradients that a warning lists for one reason.
_NAMES = 3

_TOLD = contextvars.ContextVar("told", default=True)


@contextlib.contextmanager
def without_warnings() -> Generator[None]:
    """A context in which codecs that send no gradient cause no warnings.

    The planner uses this context to try codecs that the user has not requested.
    """
    token = _TOLD.set(False)
    try:
        yield
    finally:
        _TOLD.reset(token)


def left_to_compiler(
    analysis: Analysis, assignment: Assignment, found: Sequence[Site]
) -> dict[str, list[str]]:
    """Returns the gradients that no codec can send under an assignment, by reason.

    Args:
      analysis: the step.
      assignment: its layouts.
      found: the gradients that codecs may send (`sites`).
    """
    values = gradients_of(analysis)
    names = parameter_names(analysis.graph, analysis.contraction, values)
    known = {site.value for site in found}
    out: dict[str, list[str]] = {UNSUMMED: [], EARLY: []}
    for deferral in analysis.deferrals:
        makers = [analysis.graph.operators[c] for c in deferral.contributions]
        summed = assignment.replicas or any(map(assignment.partial_of, makers))
        for value in deferral.ends:
            if value in deferral.gradients and value not in known:
                out[EARLY if summed else UNSUMMED].append(names[value])
    return {reason: group for reason, group in out.items() if group}


def warn_of_no_use(
    stages: Sequence[tuple[Analysis, Assignment, Sequence[Site]]], text: str
) -> None:
    """Warns that the requested codec sends no gradient, with reasons by group.

    Args:
      stages: the analysis, layouts and gradients of each stage of the plan.
      text: the codec.
    """
    if not _TOLD.get():
        return
    groups: dict[str, list[str]] = {}
    for analysis, assignment, found in stages:
        for why, names in left_to_compiler(analysis, assignment, found).items():
            groups.setdefault(why, []).extend(names)
        for site in found:
            why = site.refuses(parse_codec(text)) if site.compressible else SMALL
            groups.setdefault(why, []).append(site.name)
    said = [
        f"\n  {reason} ({len(names)}): "
        + ", ".join(names[:_NAMES])
        + (", ..." if len(names) > _NAMES else "")
        + (f"\n    {_REMEDIES[reason]}" if reason in _REMEDIES else "")
        for reason, names in groups.items()
    ]
    why = "".join(said) or " the step has none that is summed."
    warn_user(
        f"compression={text!r} is used for no gradient:{why}\n"
        "  try: compression='none', as there is nothing for a codec to send."
    )
