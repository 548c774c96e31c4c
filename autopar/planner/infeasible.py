"""Explains why nothing fits the memory of a device."""

from __future__ import annotations

from autopar.cost.pricer import Pricer
from autopar.errors import InfeasibleError
from autopar.planner.problem import Formulation
from autopar.steps.analysis import Analysis
from autopar.steps.names import operator_name, operator_place
from autopar_passes.graph.roles import InputRole
from autopar_solver import explain_infeasibility

_LARGEST = 4


def infeasible(
    analysis: Analysis, pricer: Pricer, formulation: Formulation
) -> InfeasibleError:
    """Makes the error that names the binding memory and the nearest fixes."""
    found = explain_infeasibility(formulation.problem)
    op = analysis.graph.operators[min(found.time, len(analysis.graph.operators) - 1)]
    limit = pricer.cluster.memory_bytes
    lines = [
        f"no plan fits on {pricer.cluster} (mesh {pricer.mesh}): at "
        f"{operator_place(op)} every plan needs at least "
        f"{_gb(found.least_peak)} per device, the device has {_gb(limit)}.",
    ]
    largest: dict[int, float] = {}
    for term in found.terms:
        largest[term.node] = largest.get(term.node, 0.0) + term.least
    ranked = sorted(largest.items(), key=lambda item: -item[1])[:_LARGEST]
    names = [f"{_node(analysis, formulation, n)} {_gb(b)}" for n, b in ranked]
    lines.append(f"  largest: {'; '.join(names)}")
    lines.append(f"  try: {', or '.join(_fixes(analysis, pricer, found.least_peak))}")
    return InfeasibleError("\n".join(lines))


def _fixes(analysis: Analysis, pricer: Pricer, need: float) -> list[str]:
    limit = pricer.cluster.memory_bytes
    inputs = sum(analysis.graph.values[i.value].nbytes for i in analysis.graph.inputs)
    state = sum(
        analysis.graph.values[i.value].nbytes
        for i in analysis.graph.inputs
        if i.role is not InputRole.BATCH
    )
    factor = max(2, -(-int(need) // max(1, limit)))
    fixes = [f"{factor * pricer.cluster.num_devices} devices"]
    if need > 1.5 * inputs / pricer.cluster.num_devices:
        fixes.append("a smaller batch or jax.checkpoint around the layers")
    if state / pricer.cluster.num_devices > limit / 2:
        fixes.append("an optimizer with less state, such as adafactor or lion")
    fixes.append(f"devices with {_gb(1.05 * need)} (memory={_gb(1.05 * need)})")
    return fixes


def _node(analysis: Analysis, formulation: Formulation, node: int) -> str:
    count = len(analysis.contraction.nodes)
    if node >= count:
        copy = formulation.copies[node - count]
        root = copy.value_class[0]
        what = "copies of "
    else:
        root, what = analysis.contraction.nodes[node].root, ""
    op = analysis.graph.operators[root]
    known = op.kind == "input"
    return f"{what}{operator_name(analysis, root) if known else operator_place(op)}"


def _gb(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g}{unit}"
    return f"{nbytes:.0f}B"
