"""Everything about a step that does not depend on the cluster."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from autopar.planner.nodes import Contraction, contract
from autopar.planner.problem import Formulator
from autopar.planner.uses import Source, ValueClass, collect
from autopar_passes.graph.build import step_graph
from autopar_passes.graph.operators import OperatorGraph
from autopar_passes.program.trace import TracedStep, trace
from autopar_passes.sums.deferral import Deferral
from autopar_passes.sums.find import find_deferrals


@dataclasses.dataclass(frozen=True, slots=True)
class Analysis:
    """A traced step, its graph and its contraction; made once, used by every plan.

    Attributes:
      traced: the flat program and its pytrees.
      graph: the operator graph.
      contraction: the nodes with a choice.
      sources: who reads what.
      deferrals: the ways on which sums over devices may wait.
      formulator: builds the problem of any mesh.
      fingerprint: changes when the step does.
      trace_s: seconds of tracing.
      graph_s: seconds of building graph and contraction.
    """

    traced: TracedStep
    graph: OperatorGraph
    contraction: Contraction
    sources: dict[ValueClass, Source]
    deferrals: tuple[Deferral, ...]
    formulator: Formulator
    fingerprint: str
    trace_s: float
    graph_s: float


def analyse(step: Callable[..., Any], args: Sequence[Any]) -> Analysis:
    """Traces a step and contracts its graph.

    Args:
      step: the train step, in any of the forms of `autopar_passes.program.trace`.
      args: its arguments, arrays or ``ShapeDtypeStruct``s.
    """
    start = time.perf_counter()
    traced = trace(step, args)
    traced_at = time.perf_counter()
    graph = step_graph(traced)
    contraction = contract(graph)
    sources = collect(graph, contraction)
    deferrals = find_deferrals(traced.program, graph)
    formulator = Formulator(graph, contraction, sources, deferrals)
    return Analysis(
        traced,
        graph,
        contraction,
        sources,
        deferrals,
        formulator,
        fingerprint(traced, contraction, graph),
        traced_at - start,
        time.perf_counter() - traced_at,
    )


def fingerprint(
    traced: TracedStep, contraction: Contraction, graph: OperatorGraph
) -> str:
    """Returns 16 hex digits that name the step's operators, shapes and arguments."""
    digest = hashlib.sha256()
    for given, path in zip(graph.inputs, traced.input_paths, strict=True):
        value = graph.values[given.value]
        digest.update(f"{path}{value.shape}{value.dtype}{given.output}".encode())
    for op in graph.operators:
        digest.update(f"{op.kind}{op.inputs}{op.outputs}{op.trips}".encode())
    for node in contraction.nodes:
        digest.update(f"{node.kind}{node.root}{node.factors}".encode())
    return digest.hexdigest()[:16]
