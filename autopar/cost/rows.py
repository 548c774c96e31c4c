"""Prices the exchange of rows before a step.

Each host passes its own rows of the batch (`autopar.runtime.batch_rows`). If a plan
does not split the rows of an array over all hosts, hosts that work on the same rows
exchange them before the step. Nothing is exchanged of an array of which each host
has the rows that it needs. A host is assumed to be one process. One message carries
all arrays, and no work overlaps with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar.cost.collectives import collective_bytes
from autopar.cost.pricer import Pricer
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Axes, Layout, ReshardStep
from autopar.layouts.strategies import Space
from autopar.steps.analysis import Analysis
from autopar_passes.graph.operators import GraphInput, OperatorGraph
from autopar_passes.graph.roles import InputRole


def rows_step(layout: Layout, dim: int, pricer: Pricer) -> ReshardStep | None:
    """The all-gather of an array's rows between hosts; None if there is none.

    Args:
      layout: the array's layout under a plan.
      dim: the dimension of the rows.
      pricer: the mesh and cluster.
    """
    innermost = len(pricer.cluster.levels) - 1
    between = [
        a for a, x in enumerate(pricer.mesh.axes) if x.level < innermost and x.size > 1
    ]
    alike = tuple(a for a in between if a not in layout[dim])
    if not alike:
        return None
    parts = pricer.group(tuple(a for a in between if a in layout[dim]))
    return ReshardStep("all_gather", alike, 1.0 / parts, layout)


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """The message with the rows of all arrays that hosts exchange over the same axes.

    Attributes:
      axes: the mesh axes between hosts that need the same rows.
      paths: paths of the arrays.
      nbytes: bytes of the arrays that a device has afterwards.
    """

    axes: Axes
    paths: tuple[str, ...]
    nbytes: float

    def seconds(self, pricer: Pricer, scale: float = 1.0) -> float:
        """Seconds of the message with ``scale`` times the rows."""
        step = ReshardStep("all_gather", self.axes, 1.0, ())
        return pricer.packed.collective_s(step, scale * self.nbytes)

    def sent_bytes(self, pricer: Pricer) -> float:
        """Bytes that a device sends."""
        count = pricer.group(self.axes)
        return collective_bytes("all_gather", self.nbytes, count)


def exchanges(assignment: Assignment, pricer: Pricer) -> list[Exchange]:
    """The exchanges of rows before a step.

    Args:
      assignment: strategies as layouts.
      pricer: the mesh and cluster.
    """
    found: dict[Axes, list[tuple[str, float]]] = {}
    for given, nbytes in _batch(assignment.graph):
        layout = assignment.home_layout(given.value)
        step = rows_step(layout, given.rows, pricer)
        if step is not None:
            size = step.fraction * nbytes
            found.setdefault(step.axes, []).append((given.path, size))
    return [
        Exchange(axes, tuple(path for path, _ in arrays), sum(n for _, n in arrays))
        for axes, arrays in found.items()
    ]


def exchange_s(assignment: Assignment, pricer: Pricer, scale: float = 1.0) -> float:
    """Seconds of the exchange of rows in a step.

    Args:
      assignment: strategies as layouts.
      pricer: the mesh and cluster.
      scale: the number of samples in a step, divided by that number in the plan.
    """
    return sum(x.seconds(pricer, scale) for x in exchanges(assignment, pricer))


def exchange_seconds(
    analysis: Analysis, spaces: Sequence[Space], pricer: Pricer
) -> dict[int, np.ndarray]:
    """Seconds of the exchange of rows under each strategy of the nodes with a batch.

    Each array has a share of the latency, in proportion to its bytes.

    Args:
      analysis: the step.
      spaces: the strategies of each node.
      pricer: the mesh and cluster.

    Returns:
      Position of a node -> ``[strategies]``. Other nodes exchange nothing.
    """
    batch, judge = _batch(analysis.graph), pricer.packed
    whole = sum(nbytes for _, nbytes in batch)
    out: dict[int, np.ndarray] = {}
    for given, nbytes in batch:
        home = analysis.contraction.homes.get(given.value)
        if home is None:
            continue
        layouts = spaces[home.node].layouts(home.dims)
        total = out.setdefault(home.node, np.zeros(len(layouts)))
        for k, layout in enumerate(layouts):
            step = rows_step(layout, given.rows, pricer)
            if step is not None:
                total[k] += judge.collective_s(step, nbytes, step.fraction * whole)
    return out


def _batch(graph: OperatorGraph) -> list[tuple[GraphInput, int]]:
    """The arrays whose rows are divided among hosts, with their bytes."""
    return [
        (given, graph.values[given.value].nbytes)
        for given in graph.inputs
        if given.role is InputRole.BATCH and given.rows >= 0 and not given.at_hand
    ]
