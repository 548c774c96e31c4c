"""Clusters the forward equations of a microbatch's program into a chain of layers.

Layers have about equal FLOPs, and few bytes cross from one layer to the next. If part
of the forward pass is repeated, each repeat becomes one layer. The clustering does not
use names.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from autopar_errors import InputError
from autopar_passes.graph.operators import OperatorGraph, update_equations
from autopar_passes.graph.roles import Role
from autopar_passes.program.equations import Program
from autopar_passes.stages.parts import Flow

# Cuts a chain of units, such as operators, into stretches of about equal work, at
# boundaries that few bytes cross. The stretches minimise
#
#     sum over stretches of (work / mean)^2
#         + WEIGHT * sum over cuts of crossing / typical
#
# Here ``mean`` is the work of the whole chain divided by the number of stretches, and
# ``typical`` is the median of the bytes that cross a boundary. The squares are least if
# all stretches have the same work. A boundary with fewer crossing bytes may be worth
# some imbalance of work.

# The WEIGHT of the formula above. With 0, only the work counts. With 2, the formula may
# merge two stretches to save a boundary with typical bytes.
WEIGHT = 0.5


def stretch_cost(work: np.ndarray, mean: float) -> np.ndarray:
    """Returns the cost of stretches by their work, without their boundaries."""
    return (work / mean) ** 2


def boundary_cost(crossing: np.ndarray) -> np.ndarray:
    """Returns the cost of a cut at each boundary.

    Args:
      crossing: float64 ``[units]``, bytes that cross the boundary before each unit.
    """
    known = crossing[1:]
    known = known[known > 0]
    typical = float(np.median(known)) if known.size else 1.0
    return WEIGHT * crossing / typical


def chain_cost(work: np.ndarray, crossing: np.ndarray, starts: Sequence[int]) -> float:
    """Returns the cost of given stretches, which `cut_chain` minimises.

    Args:
      work: float64 ``[units]``, the work of each unit.
      crossing: float64 ``[units]``, bytes that cross the boundary before each unit.
      starts: the unit at which each stretch begins; the first is 0.
    """
    mean = float(work.sum()) / len(starts) or 1.0
    stretches = np.add.reduceat(np.asarray(work, np.float64), list(starts))
    cuts = boundary_cost(np.asarray(crossing, np.float64))[list(starts[1:])]
    return float(stretch_cost(stretches, mean).sum() + cuts.sum())


def _costs(work: np.ndarray, crossing: np.ndarray, stretches: int) -> np.ndarray:
    """Returns ``[i, j]``: the cost of units i to j - 1, with the cut before them."""
    running = np.concatenate(([0.0], np.cumsum(work, dtype=np.float64)))
    mean = running[-1] / stretches or 1.0
    costs = stretch_cost(running[None, :] - running[:, None], mean)
    begin = np.append(boundary_cost(np.asarray(crossing, np.float64)), 0.0)
    begin[0] = 0.0
    costs += begin[:, None]
    costs[np.tril_indices(len(work) + 1)] = np.inf
    return costs


def cut_chain(
    work: np.ndarray, crossing: np.ndarray, stretches: int
) -> tuple[int, ...]:
    """Cuts a chain into a number of stretches.

    Args:
      work: float64 ``[units]``, the work of each unit, such as its FLOPs.
      crossing: float64 ``[units]``, bytes that cross the boundary before each unit; the
        first entry is not used.
      stretches: the number of stretches, from 1 to the number of units.

    Returns:
      The unit at which each stretch begins; the first is 0.

    Raises:
      InputError: there are fewer units than stretches, or ``stretches`` is below 1.

    >>> cut_chain(np.ones(4), np.array([0.0, 9.0, 1.0, 9.0]), 2)
    (0, 2)
    """
    units = len(work)
    if not 1 <= stretches <= units:
        raise InputError(
            f"cut_chain: {units} units make 1 to {units} stretches, not {stretches}."
        )
    costs = _costs(work, crossing, stretches)
    best = costs[0].copy()
    chosen: list[np.ndarray] = []
    for _ in range(stretches - 1):
        totals = best[:, None] + costs
        source = totals.argmin(axis=0)
        best = totals[source, np.arange(units + 1)]
        chosen.append(source)
    starts, end = [], units
    for source in reversed(chosen):
        end = int(source[end])
        starts.append(end)
    return (0, *reversed(starts))


# Number of boundaries per layer that are tried. Among boundaries with about the same
# work before them, the one that the fewest bytes cross is tried.
_TRIED = 8
# A repeated part of the program sets the number of layers if it has this share of the
# FLOPs.
_REPEATED = 0.5
# Number of layers of a program without repeats.
_DEFAULT = 16


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardChain:
    """The forward equations that belong to parts, as a chain.

    Attributes:
      equations: the indices of the equations, in program order.
      work: float64 ``[equations]``, FLOPs of each equation.
      crossing: float64 ``[equations]``, bytes of the values that earlier equations
        compute and that this or later equations read, each value counted once.
      classes: the classes of the operators of each equation.
    """

    equations: tuple[int, ...]
    work: np.ndarray
    crossing: np.ndarray
    classes: tuple[tuple[int, ...], ...]


def top_level(program: Program) -> dict[int, int]:
    """Index of an equation, at any depth -> index of its top-level equation."""
    return {
        inner.index: eqn.index
        for eqn in program.body.equations
        for inner in (eqn, *eqn.inner)
    }


def forward_chain(
    program: Program, graph: OperatorGraph, batch: Collection[int]
) -> ForwardChain:
    """Builds the chain of the forward pass.

    Args:
      program: one microbatch's program.
      graph: the operator graph of the program.
      batch: input values that are split into microbatches.
    """
    once = update_equations(program, graph)
    flow = Flow(program, graph, frozenset(batch), once)
    chain = [
        index
        for index in flow.equations
        if flow.roles[index] is Role.FORWARD and index not in flow.free
    ]
    place = {index: k for k, index in enumerate(chain)}
    above = top_level(program)
    work = np.zeros(len(chain))
    classes: list[list[int]] = [[] for _ in chain]
    for op in graph.operators:
        k = place.get(above.get(op.equation, -1))
        if k is not None:
            work[k] += op.flops * op.trips
            classes[k].append(op.class_index)
    return ForwardChain(
        tuple(chain),
        work,
        _crossing(flow, chain, place),
        tuple(tuple(found) for found in classes),
    )


def _crossing(flow: Flow, chain: Sequence[int], place: Mapping[int, int]) -> np.ndarray:
    """Returns the bytes that cross the boundary before each equation of a chain."""
    change = np.zeros(len(chain) + 1)
    for k, index in enumerate(chain):
        for value in flow.equations[index].outputs:
            readers = flow.readers.get(value, ())
            last = max((place.get(r, -1) for r in readers), default=-1)
            if last > k:
                change[k + 1] += flow.value(value).nbytes
                change[last + 1] -= flow.value(value).nbytes
    return np.cumsum(change)[:-1]


def cluster_layers(
    program: Program,
    graph: OperatorGraph,
    *,
    batch: Collection[int],
    layers: int | None = None,
    most: int = 256,
) -> tuple[int, ...]:
    """Clusters the forward pass into layers.

    Args:
      program: one microbatch's program.
      graph: the operator graph of the program.
      batch: input values that are split into microbatches.
      layers: the number of layers; None for the number of repeats, or `_DEFAULT` if
        nothing is repeated.
      most: the largest number of layers.

    Returns:
      The index of the forward equation at which each layer begins, ascending; empty
      if no forward equation depends on both state and batch.
    """
    chain = forward_chain(program, graph, batch)
    if not chain.equations:
        return ()
    wanted = min(most, layer_count(chain, most) if layers is None else layers)
    units = _boundaries(chain, wanted)
    repeats = _repeats(chain)
    if repeats is not None:
        units = _align(chain, units, _phase(chain, repeats))
    return tuple(chain.equations[k] for k in _cut(chain, units, wanted))


def _cut(chain: ForwardChain, units: np.ndarray, layers: int) -> list[int]:
    """Chooses, from ``units``, the places at which layers begin."""
    starts = cut_chain(
        np.add.reduceat(chain.work, units),
        chain.crossing[units],
        max(1, min(layers, len(units))),
    )
    return [int(units[s]) for s in starts]


def layer_count(chain: ForwardChain, most: int) -> int:
    """The number of layers: one per repeat, and one per large part outside the repeats.

    Args:
      chain: the forward pass.
      most: the largest number of layers. If repeats exceed it, several form a layer.
    """
    repeats = _repeats(chain)
    heavy = int((chain.work > chain.work.sum() / (4 * _DEFAULT)).sum())
    if repeats is None:
        return max(1, min(most, _DEFAULT, heavy))
    count, inside = repeats.count, repeats.inside
    each = float(chain.work[inside].sum()) / count
    here = np.flatnonzero(inside)
    beside = (chain.work[: here[0]], chain.work[here[-1] + 1 :])
    extra = sum(float(work.sum()) >= 0.5 * each for work in beside)
    together = -(-count // max(1, most - extra))
    return -(-count // together) + extra


@dataclasses.dataclass(frozen=True, eq=False)
class _Repeats:
    """The repeated part with the most work.

    Attributes:
      count: the number of repeats.
      inside: for each equation, whether it belongs to a repeat.
    """

    count: int
    inside: np.ndarray


def _repeats(chain: ForwardChain) -> _Repeats | None:
    """Finds the repeated part; None if no part has `_REPEATED` of the work."""
    runs = Counter(c for found in chain.classes for c in set(found))
    times = np.array(
        [max((runs[c] for c in found), default=1) for found in chain.classes]
    )
    counts = sorted({int(t) for t in times if t > 1})
    if not counts:
        return None
    work = {c: float(chain.work[times == c].sum()) for c in counts}
    count = max(counts, key=lambda c: work[c])
    if work[count] < _REPEATED * chain.work.sum():
        return None
    return _Repeats(count, times == count)


def _phase(chain: ForwardChain, repeats: _Repeats) -> np.ndarray:
    """Returns the cuts between repeats, at the same place of each repeat.

    The place is the one with the fewest crossing bytes. If several places are equal,
    the first is taken: the equations after the last repeat may begin like a repeat, and
    a later place would divide the last repeat.
    """
    places: dict[int, list[int]] = {}
    for k, found in enumerate(chain.classes):
        places.setdefault(min(found, default=-1), []).append(k)
    among = (repeats.count, repeats.count + 1)
    whole = [np.array(p) for p in places.values() if len(p) in among]
    return min(whole, key=lambda p: (float(chain.crossing[p[1:]].mean()), p[0]))


def _align(chain: ForwardChain, units: np.ndarray, phase: np.ndarray) -> np.ndarray:
    """Returns the boundaries to try, with all repeats cut at the same place.

    Args:
      chain: the forward pass.
      units: the boundaries that may be tried outside of the repeats.
      phase: the places at which repeats are cut.
    """
    length = int(np.diff(phase).max(initial=1))
    elsewhere = (units <= phase[0]) | (units >= phase[-1] + length)
    behind = np.array([k for k in (phase[-1] + length,) if k < len(chain.work)], int)
    return np.unique(np.concatenate(([0], units[elsewhere], phase, behind)))


def _boundaries(chain: ForwardChain, layers: int) -> np.ndarray:
    """Returns the equations before which a cut is tried: `_TRIED` for each layer.

    Among boundaries with about the same work before them, the boundary with the fewest
    crossing bytes is chosen.
    """
    before = np.concatenate(([0.0], np.cumsum(chain.work)[:-1]))
    total = before[-1] + chain.work[-1] or 1.0
    bins = np.floor(before / total * _TRIED * layers).astype(int)
    order = np.lexsort((np.arange(len(bins)), chain.crossing, bins))
    first = np.unique(bins[order], return_index=True)[1]
    found = np.sort(order[first])
    return found if found.size and found[0] == 0 else np.append(0, found)
