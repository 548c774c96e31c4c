"""The analysis of a step that runs once for each microbatch.

The forward and the backward pass of such a step run for each microbatch; its update
runs once. Gradients are added up, so their sums over devices are due once a step.
"""

from __future__ import annotations

import dataclasses

from autopar.steps.analysis import Analysis
from autopar.steps.uses import collect
from autopar_passes.graph.operators import Operator, OperatorGraph, producers
from autopar_passes.microbatches.microbatched import Microbatched
from autopar_passes.program.equations import Program, walk
from autopar_passes.sums.deferral import Deferral


def over_microbatches(analysis: Analysis, found: Microbatched) -> Analysis:
    """Returns the analysis of a step that runs for each of its microbatches.

    The program stays that of one microbatch. Operators of the part that runs for each
    have so many times their trips. A gradient that is added up over the microbatches
    may stay partial meanwhile, and its sum over devices is taken once.

    Args:
      analysis: of the program of one microbatch, ``found.traced.program``.
      found: how the step is split.
    """
    count = found.microbatches
    repeated = _repeated(analysis.program, found.once)
    graph = dataclasses.replace(
        analysis.graph,
        operators=tuple(
            _times(op, count) if op.equation in repeated else op
            for op in analysis.graph.operators
        ),
        accumulated=_added_up(analysis.graph, found, repeated),
        microbatches=count,
    )
    contraction = dataclasses.replace(
        analysis.contraction, producer=producers(graph.operators)
    )
    return dataclasses.replace(
        analysis,
        graph=graph,
        contraction=contraction,
        sources=collect(graph, contraction),
        deferrals=tuple(_waiting(d, graph) for d in analysis.deferrals),
    )


def _repeated(program: Program, once: frozenset[int]) -> frozenset[int]:
    """The equations that run for each microbatch, with those inside of them."""
    found: set[int] = set()
    for eqn in program.body.equations:
        if eqn.index not in once:
            found.add(eqn.index)
            for region in eqn.regions:
                found.update(inner.index for inner in walk(region))
    return frozenset(found)


def _times(op: Operator, count: int) -> Operator:
    return dataclasses.replace(
        op,
        trips=op.trips * count,
        input_trips=tuple(trips * count for trips in op.input_trips),
    )


def _added_up(
    graph: OperatorGraph, found: Microbatched, repeated: frozenset[int]
) -> frozenset[int]:
    """The values that are added up, of those that this graph makes."""
    made = {v for op in graph.operators if op.equation in repeated for v in op.outputs}
    return found.accumulated & made


def _waiting(deferral: Deferral, graph: OperatorGraph) -> Deferral:
    """The deferral, its sums taken once where all of them are added up before."""
    if not graph.accumulated.issuperset(deferral.ends):
        return deferral
    return dataclasses.replace(deferral, hoisted=True)
