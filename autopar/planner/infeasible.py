"""Explains why no plan fits the memory of a device, and which changes would make a plan
fit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from autopar.cost.pricer import Pricer
from autopar.errors import InfeasibleError
from autopar.planner.memory_terms import fixed_bytes, least_terms
from autopar.planner.problem import Formulation
from autopar.steps.analysis import Analysis
from autopar.steps.program_text import operator_name, operator_place
from autopar.units import rounded_cluster
from autopar_passes.graph.roles import InputRole
from autopar_solver import ShardingProblem, explain_infeasibility

_LARGEST = 4
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
# Memory sizes for which `advise` checks that a plan is found, as multiples. They are
# multiples of the memory that every plan needs or of the available memory, whichever is
# larger.
_FACTORS = (1.02, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)


def infeasible(
    analysis: Analysis, pricer: Pricer, formulation: Formulation
) -> InfeasibleError:
    """Makes the error of one mesh; the error names the arrays that exceed the
    memory.
    """
    found = explain_infeasibility(_relaxed_problem(analysis, pricer, formulation))
    op = analysis.graph.operators[min(found.time, len(analysis.graph.operators) - 1)]
    limit = pricer.cluster.memory_bytes
    fixed = fixed_bytes(analysis, pricer)
    least = found.least_peak + fixed
    there = (
        f"at {operator_place(op)} every plan needs at least {_down(least)} per device"
    )
    has = f"the device has {size_text(limit)}"
    reason = f"{there}, {has}"
    if least <= limit:
        reason = (
            f"{has}; {there}, and no choice of layouts was found that stays below that "
            "limit at every moment"
        )
    where = f"{rounded_cluster(pricer.cluster)} (mesh {pricer.mesh.label})"
    lines = [f"no plan fits on {where}: {reason}."]
    largest: dict[int, float] = {}
    numbers: dict[int, int] = {}
    for term in found.terms:
        largest[term.node] = largest.get(term.node, 0.0) + term.least
        numbers[term.node] = numbers.get(term.node, 0) + (term.least > 0)
    ranked = sorted(largest.items(), key=lambda item: -item[1])[:_LARGEST]
    names = [
        f"{_node(analysis, formulation, n)} {_together(numbers[n])}{size_text(b)}"
        for n, b in ranked
    ]
    if fixed > 0:
        names.append(f"products' work space {size_text(fixed)}")
    lines.append(f"  largest: {'; '.join(names)}")
    state, count = _state_bytes(analysis), pricer.mesh.num_devices
    lines.append(
        f"  state: {size_text(state)}, which is {size_text(state / count)} per device "
        f"where it is split over all {count}"
    )
    error = InfeasibleError("\n".join(lines))
    error.least_bytes = least
    return error


def _relaxed_problem(
    analysis: Analysis, pricer: Pricer, formulation: Formulation
) -> ShardingProblem:
    """Returns the problem with only the memory terms that hold for every choice.

    The peak memory of its solution is a lower bound of the memory of every plan.
    """
    terms = least_terms(analysis, pricer, formulation.spaces)
    return dataclasses.replace(formulation.problem, memory=terms)


def advise(
    analysis: Analysis,
    pricer: Pricer,
    failure: InfeasibleError,
    least: float,
    plans: Callable[[int], bool],
    untried: Sequence[str] = (),
) -> InfeasibleError:
    """Adds advice to the error, such as a memory size of a device that is enough.

    The search has found a plan for the memory size that the advice names.

    Args:
      analysis: the step.
      pricer: prices on the mesh.
      failure: the error of the mesh, from `infeasible`.
      least: bytes on each device that every plan needs, on any mesh.
      plans: whether the search finds a plan for a given number of bytes of memory.
      untried: options that would lower the memory for activations.
    """
    limit = pricer.cluster.memory_bytes
    enough = next((n for n in _sizes(max(least, limit)) if plans(n)), None)
    if enough is None:
        memory = f"more memory than {_down(least)} per device, which is a lower bound"
    else:
        memory = f"memory={size_text(enough)}, for which a plan was found"
    fixes = [memory, *_unchecked_fixes(analysis, pricer, least, untried)]
    error = InfeasibleError(f"{failure}\n  try: {'; or '.join(fixes)}")
    error.least_bytes, error.enough_bytes = least, enough
    return error


def _sizes(start: float) -> Iterator[int]:
    """Memory sizes to try, each rounded to the three digits that are printed."""
    for factor in _FACTORS:
        yield round_up(factor * start)


def round_up(nbytes: float) -> int:
    """Rounds a memory size up to three digits, as printed.

    >>> size_text(round_up(23_012_345))
    '23.1MB'
    """
    unit = next((size for _, size in _UNITS if nbytes >= size), 1.0)
    digits = 10.0 ** (math.floor(math.log10(nbytes / unit)) - 2)
    return round(math.ceil(nbytes / unit / digits) * digits * unit)


def _unchecked_fixes(
    analysis: Analysis, pricer: Pricer, need: float, untried: Sequence[str]
) -> list[str]:
    """Yields advice that lowers the memory needed; it may not lower it enough."""
    cluster = pricer.cluster
    limit = cluster.memory_bytes
    inputs = sum(
        analysis.graph.values[i.value].device_nbytes for i in analysis.graph.inputs
    )
    fixes: list[str] = []
    if need > 1.5 * inputs / cluster.num_devices:
        options = f"{', '.join(untried)} or " if untried else ""
        fixes.append(f"{options}a smaller batch")
    factor = max(2, -(-int(need) // max(1, limit)))
    pinned = " with these options" if untried else ""
    fixes.append(f"more devices, at least {factor * cluster.num_devices}{pinned}")
    if _state_bytes(analysis) / cluster.num_devices > limit / 2:
        fixes.append("an optimizer with less state, such as adafactor or lion")
    return fixes


def _state_bytes(analysis: Analysis) -> float:
    """Returns the bytes of all inputs except the batch."""
    return sum(
        analysis.graph.values[i.value].device_nbytes
        for i in analysis.graph.inputs
        if i.role is not InputRole.BATCH
    )


def _together(number: int) -> str:
    """Returns the text ``and 3 like it`` for an entry of 4 equal arrays.

    One node of the problem represents the same array in all equal layers.
    """
    return f"and {number - 1} like it " if number > 1 else ""


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


def size_text(nbytes: float, space: str = "") -> str:
    """Formats bytes with three digits and a unit, so that ``memory=`` accepts the text.

    Args:
      nbytes: number of bytes.
      space: text between the number and the unit.
    """
    for unit, size in _UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.3g}{space}{unit}"
    return f"{nbytes:.0f}{space}B"


def _down(nbytes: float) -> str:
    """Returns a lower bound of bytes as text, rounded down."""
    unit = next((size for _, size in _UNITS if nbytes >= size), 1.0)
    if nbytes < 1:
        return "0B"
    digits = 10.0 ** (math.floor(math.log10(nbytes / unit)) - 2)
    return size_text(math.floor(nbytes / unit / digits + 1e-9) * digits * unit)
