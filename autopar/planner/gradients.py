"""The gradients that a plan sums over devices, and what each way to send them costs.

A gradient can be sent by a codec where its sum may wait
(`autopar.planner.deferred`): then each device holds its part of the sum whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import msgspec

from autopar.compression.codec import Codec
from autopar.compression.exchange import wire_bytes
from autopar.compression.registry import parse_codec
from autopar.cost.collectives import collective_bytes
from autopar.planner.analysis import Analysis
from autopar.planner.assignment import Assignment
from autopar.planner.deferred import stacking
from autopar.planner.layout import Axes, Layout, axes_of
from autopar.planner.nodes import Contraction
from autopar.planner.traffic import worth_a_codec
from autopar.plans import GradientDecision
from autopar_passes.graph import Operator, OperatorGraph
from autopar_passes.roles import InputRole, Role


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """A gradient whose sum over devices may be taken by a codec.

    Attributes:
      value: its value.
      name: path of its parameter.
      shape: of the whole gradient.
      local_shape: of what one device holds before it is summed.
      axes: mesh axes over which it is summed.
      workers: number of devices it is summed over.
      scatter: whether each needs only its part of the sum.
      ready: the operator that completes it.
      itemsize: bytes of an element in the program.
    """

    value: int
    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    axes: Axes
    workers: int
    scatter: bool
    ready: int
    itemsize: int

    @property
    def elements(self) -> int:
        """Number of elements on one device."""
        return math.prod(self.local_shape)

    @property
    def compressible(self) -> bool:
        """Whether it is large enough, and no vector."""
        return worth_a_codec(self.shape)

    def refuses(self, codec: Codec) -> str:
        """Why a codec cannot be used for it, or ''."""
        return codec.check(self.local_shape, scatter=self.scatter)


def sites(analysis: Analysis, assignment: Assignment) -> list[Site]:
    """Lists the gradients that codecs may send under an assignment, in program order.

    Those left out are summed by the compiler, as without a codec.
    """
    names = parameter_names(
        analysis.graph, analysis.contraction, gradients_of(analysis)
    )
    out: list[Site] = []
    for deferral in analysis.deferrals:
        if not deferral.gradients:
            continue
        way = stacking(assignment, deferral)
        if way is None:
            continue
        for value in deferral.ends:
            if value not in deferral.gradients:
                continue
            home = assignment.home_layout(value)
            out.append(
                _site(
                    analysis, assignment, value, names[value], way.strip(home), way.axes
                )
            )
    return out


def gradients_of(analysis: Analysis) -> list[int]:
    """The values that the update reads of the backward pass."""
    return [v for d in analysis.deferrals for v in d.ends if v in d.gradients]


def _site(
    analysis: Analysis,
    assignment: Assignment,
    value: int,
    name: str,
    layout: Layout,
    axes: Axes,
) -> Site:
    whole = analysis.graph.values[value]
    sizes = assignment.sizes
    local = tuple(
        size // math.prod(sizes[a] for a in split)
        for size, split in zip(whole.shape, layout, strict=True)
    )
    home = assignment.home_layout(value)
    return Site(
        value=value,
        name=name,
        shape=tuple(whole.shape),
        local_shape=local,
        axes=axes,
        workers=math.prod(sizes[a] for a in axes),
        scatter=scattered_dim(home, axes) is not None,
        ready=analysis.contraction.producer[value].index,
        itemsize=whole.nbytes // max(1, whole.size),
    )


def scattered_dim(home: Layout, axes: Axes) -> int | None:
    """The dim that all the axes of a sum split, behind whatever else splits it."""
    if not set(axes) <= axes_of(home):
        return None
    for dim, split in enumerate(home):
        if set(split[-len(axes) :]) == set(axes):
            return dim
    return None


def parameter_names(
    graph: OperatorGraph, contraction: Contraction, values: Sequence[int]
) -> dict[int, str]:
    """Names gradients by the parameter that they update.

    A gradient is followed through operators of the update that keep its shape, to
    the first parameter of that shape which comes back. One that is reached by no
    such way is named by the module that makes it.
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
    names: dict[int, str] = {}
    taken: set[str] = set()
    for value in values:
        name = _reached(graph, readers, targets, value)
        if not name or name in taken:
            op = contraction.producer[value]
            name = f"{op.module or op.kind}/gradient_{value}"
        taken.add(name)
        names[value] = name
    return names


def _reached(
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
            if op.role is not Role.UPDATE:
                continue
            for out in op.outputs:
                if out not in seen and graph.values[out].shape == shape:
                    seen.add(out)
                    left.append(out)
    return ""


def decision(site: Site, axis_names: Sequence[str], codec: str) -> GradientDecision:
    """Writes down how one gradient is sent; ``codec`` '' leaves it to the compiler."""
    kind = "reduce_scatter" if site.scatter else "all_reduce"
    nbytes = site.elements * site.itemsize
    dense = collective_bytes(kind, nbytes, site.workers)
    made = GradientDecision(
        name=site.name,
        value=site.value,
        shape=site.shape,
        local_shape=site.local_shape,
        axes=tuple(axis_names[a] for a in site.axes),
        workers=site.workers,
        scatter=site.scatter,
        codec=codec,
        feedback=bool(codec) and parse_codec(codec).feedback,
        dense_bytes=dense,
    )
    return repriced(made)


def repriced(made: GradientDecision) -> GradientDecision:
    """A decision with the bytes that its codec sends."""
    if not made.codec:
        return msgspec.structs.replace(made, wire_bytes=made.dense_bytes)
    sent = wire_bytes(
        parse_codec(made.codec), made.local_shape, made.workers, scatter=made.scatter
    )
    return msgspec.structs.replace(made, wire_bytes=sent)
