"""The cost of an assignment as values, without a problem or a solver."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from autopar.cost.breakdown import FIELDS, CostBreakdown
from autopar.cost.items import CostItem, Paid, items
from autopar.cost.pricer import Pricer
from autopar.cost.scaling import item_pieces
from autopar.layouts.assignment import Assignment


def evaluate(assignment: Assignment, pricer: Pricer) -> CostBreakdown:
    """Returns what one step costs under an assignment.

    Args:
      assignment: strategies as layouts.
      pricer: the mesh and cluster.
    """
    return total(items(assignment, pricer))


def total(found: Iterable[CostItem]) -> CostBreakdown:
    """Adds the costs of items, field by field; an item has few that are not 0."""
    terms: dict[str, list[float]] = {name: [] for name in FIELDS}
    known: dict[int, tuple[CostBreakdown, list[tuple[str, float]]]] = {}
    for item in found:
        cost = item.cost
        # Items that are alike share one value, which is kept here while it is known.
        if id(cost) not in known:
            amounts = [(name, getattr(cost, name)) for name in FIELDS]
            known[id(cost)] = cost, [pair for pair in amounts if pair[1]]
        for name, amount in known[id(cost)][1]:
            terms[name].append(amount)
    return CostBreakdown(**{name: sum(own, 0.0) for name, own in terms.items()})


@dataclasses.dataclass(frozen=True, slots=True)
class CostParts:
    """The cost of a step by what it grows with.

    The cost of a step with a batch of ``n`` times the planned one in each of ``k``
    microbatches is about ``k * (n * per_batch + per_microbatch) +
    per_synchronisation``: exactly so between the bends of rooflines and collectives,
    which `autopar.cost.scaling` keeps.

    Attributes:
      per_batch: what grows with the samples, for the planned batch.
      per_microbatch: what every microbatch pays whatever its size: starts of
        kernels, gathers of parameters, weights read from memory.
      per_synchronisation: what is paid once in a step: sums of gradients, the
        update.
    """

    per_batch: CostBreakdown
    per_microbatch: CostBreakdown
    per_synchronisation: CostBreakdown

    @property
    def step(self) -> CostBreakdown:
        """The whole step at the planned batch, in one microbatch."""
        return self.per_batch + self.per_microbatch + self.per_synchronisation


def cost_parts(assignment: Assignment, pricer: Pricer) -> CostParts:
    """Splits the cost of a step into what it grows with, at the planned batch."""
    batch, micro, once = CostBreakdown(), CostBreakdown(), CostBreakdown()
    for item in items(assignment, pricer):
        if item.paid is Paid.SYNCHRONISATION:
            once = once + item.cost
            continue
        fixed = _fixed_part(assignment, pricer, item)
        starts = CostBreakdown(
            kernel_s=item.cost.kernel_s,
            waiting_latency_s=item.cost.waiting_latency_s,
            hideable_latency_s=item.cost.hideable_latency_s,
        )
        rest = item.cost + starts * -1.0
        micro = micro + starts + rest * fixed
        batch = batch + rest * (1.0 - fixed)
    return CostParts(batch, micro, once)


def _fixed_part(assignment: Assignment, pricer: Pricer, item: CostItem) -> float:
    """The part of an item, without latencies, that the batch does not change."""
    p = item_pieces(assignment, pricer, item).at(1.0)
    starts_s = item.cost.kernel_s
    if item.collective is not None:
        starts_s += item.cost.waiting_latency_s + item.cost.hideable_latency_s
    seconds = sum(p) - starts_s
    return min(1.0, max(0.0, (p[0] - starts_s) / seconds)) if seconds > 0 else 1.0
