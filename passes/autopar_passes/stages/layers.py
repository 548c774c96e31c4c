"""Clusters the forward equations of a microbatch's program into a chain of layers.

Layers have about equal FLOPs, and little crosses from one to the next. Where a stretch
of the forward pass repeats, there is one layer for each repeat. Nothing is read from
names.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from autopar_passes.graph.operators import OperatorGraph, update_equations
from autopar_passes.graph.roles import Role
from autopar_passes.program.equations import Equation, Program, walk
from autopar_passes.stages.chain import cut_chain
from autopar_passes.stages.flow import Flow

# Boundaries that are tried for each layer; of those with as much work before them, the
# one that least crosses.
_TRIED = 8
# A repeated stretch sets the number of layers if it has this share of the FLOPs.
_REPEATED = 0.5
# Layers of a program in which nothing repeats.
_DEFAULT = 16


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardChain:
    """The forward equations that run in one part, as a chain.

    Attributes:
      equations: their indices, in program order.
      work: float64 ``[equations]``, FLOPs of each.
      crossing: float64 ``[equations]``, bytes of the values that earlier ones make and
        that each or later ones read, each value counted once.
      classes: of the operators of each.
    """

    equations: tuple[int, ...]
    work: np.ndarray
    crossing: np.ndarray
    classes: tuple[tuple[int, ...], ...]


def top_level(program: Program) -> dict[int, int]:
    """Index of an equation, within loops too -> that of its top-level equation."""
    return {
        inner.index: eqn.index
        for eqn in program.body.equations
        for inner in (eqn, *_within(eqn))
    }


def _within(eqn: Equation) -> list[Equation]:
    return [inner for region in eqn.regions for inner in walk(region)]


def forward_chain(
    program: Program, graph: OperatorGraph, batch: Collection[int]
) -> ForwardChain:
    """The forward pass as a chain.

    Args:
      program: one microbatch's program.
      graph: its operator graph.
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
    """Bytes that cross the boundary before each equation of a chain."""
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
      graph: its operator graph.
      batch: input values that are split into microbatches.
      layers: how many; None: as many as repeats, or `_DEFAULT` where nothing repeats.
      most: never more than these.

    Returns:
      The index of the forward equation at which each layer begins, ascending; empty
      where no forward equation depends on both state and batch.
    """
    chain = forward_chain(program, graph, batch)
    if not chain.equations:
        return ()
    wanted = min(most, layer_count(chain, most) if layers is None else layers)
    units = _boundaries(chain, wanted)
    repeats = _repeats(chain)
    if repeats is not None:
        units = _aligned(chain, units, _phase(chain, repeats))
    return tuple(chain.equations[k] for k in _cut(chain, units, wanted))


def _cut(chain: ForwardChain, units: np.ndarray, layers: int) -> list[int]:
    """The places at which layers begin, of those in ``units``."""
    starts = cut_chain(
        np.add.reduceat(chain.work, units),
        chain.crossing[units],
        max(1, min(layers, len(units))),
    )
    return [int(units[s]) for s in starts]


def layer_count(chain: ForwardChain, most: int) -> int:
    """The number of layers: repeats, and what has as much work beside them.

    Args:
      chain: the forward pass.
      most: never more than these; several repeats then make a layer.
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
    """The repeated stretch that has most work.

    Attributes:
      count: how often it repeats.
      inside: of each equation, whether it belongs to a repeat.
    """

    count: int
    inside: np.ndarray


def _repeats(chain: ForwardChain) -> _Repeats | None:
    """Finds what repeats; None: no repeated stretch has `_REPEATED` of the work."""
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
    """Where to cut all repeats, each at the same place.

    Where least crosses; of several such places the first, so that no repeat is parted.
    What stands behind the last repeat may begin as a repeat does.
    """
    places: dict[int, list[int]] = {}
    for k, found in enumerate(chain.classes):
        places.setdefault(min(found, default=-1), []).append(k)
    among = (repeats.count, repeats.count + 1)
    whole = [np.array(p) for p in places.values() if len(p) in among]
    return min(whole, key=lambda p: (float(chain.crossing[p[1:]].mean()), p[0]))


def _aligned(chain: ForwardChain, units: np.ndarray, phase: np.ndarray) -> np.ndarray:
    """Boundaries that cut repeats at one place only.

    Args:
      chain: the forward pass.
      units: the boundaries that may be tried elsewhere.
      phase: where repeats are cut.
    """
    length = int(np.diff(phase).max(initial=1))
    elsewhere = (units <= phase[0]) | (units >= phase[-1] + length)
    behind = np.array([k for k in (phase[-1] + length,) if k < len(chain.work)], int)
    return np.unique(np.concatenate(([0], units[elsewhere], phase, behind)))


def _boundaries(chain: ForwardChain, layers: int) -> np.ndarray:
    """The equations before which a cut is tried: `_TRIED` for each layer.

    Of the boundaries with about as much work before them, the one that least crosses.
    """
    before = np.concatenate(([0.0], np.cumsum(chain.work)[:-1]))
    total = before[-1] + chain.work[-1] or 1.0
    bins = np.floor(before / total * _TRIED * layers).astype(int)
    order = np.lexsort((np.arange(len(bins)), chain.crossing, bins))
    first = np.unique(bins[order], return_index=True)[1]
    found = np.sort(order[first])
    return found if found.size and found[0] == 0 else np.append(0, found)
