"""Splits a plan's cost into a sum over pairs of decisions and corrections.

The planner's problem has a cost for each node and for each edge between two nodes. Five
parts of a plan's cost belong to no pair:

* the latency of messages that several collectives share (`Collective.shared_s`);
* equal copies, which the program makes once although the problem charges each reader,
  and sums of which every reader keeps only a slice;
* sums in loops that cannot be deferred with their layouts, but are charged as if they
  were;
* communication that overlaps computation (`autopar.cost.overlap`);
* latency of messages between hosts with the rows of a batch, if arrays are split over
  different axes (`autopar.cost.rows`).

`pairwise_s` adds up the pairs from an assignment alone. `Corrections` contains the
difference to the whole cost.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from autopar.cost.breakdown import added_s, step_s
from autopar.cost.combining import ALONE, GATHERS, SUMS
from autopar.cost.compute import work_s
from autopar.cost.estimate import estimate
from autopar.cost.local import sent_bytes
from autopar.cost.pricer import Pricer
from autopar.cost.rows import exchange_s, rows_step
from autopar.cost.work import partial_runs, partial_work_s, share_of
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Layout
from autopar.layouts.strategies import layout_of
from autopar.steps.nodes import Node
from autopar.steps.uses import HomeValue, Use, times_made
from autopar_passes.graph.roles import InputRole


@dataclasses.dataclass(frozen=True, slots=True)
class Corrections:
    """The seconds by which the cost of a step differs from the sum over pairs.

    Attributes:
      messages_s: latency of messages that several collectives share.
      merged_s: the charges for equal copies that the program makes once, less the
        missing charges for sums in loops that cannot be deferred.
      hidden_s: communication that overlaps computation, less the slowdown that it
        causes.
      rows_s: latency of messages with rows that the pairs do not have.
    """

    messages_s: float
    merged_s: float
    hidden_s: float
    rows_s: float

    @property
    def total_s(self) -> float:
        """The difference between the cost and the sum over pairs."""
        return self.messages_s - self.merged_s - self.hidden_s + self.rows_s


def corrections(assignment: Assignment, pricer: Pricer) -> Corrections:
    """Returns the difference between the cost of a step and the sum over pairs.

    ``pairwise_s(...) + corrections(...).total_s`` is the time of a step. Without
    combined messages, merged copies and overlap, the two are equal.
    """
    found = estimate(assignment, pricer)
    shared_s = sum(c.shared_s(pricer) for c in found.messages.collectives)
    cost = found.cost
    hidden_s = added_s(cost) - step_s(cost)
    rows_s = exchange_s(assignment, pricer) - _rows_s(assignment, pricer)
    alone_s = added_s(cost) - shared_s - rows_s
    merged_s = pairwise_s(assignment, pricer) - alone_s
    return Corrections(shared_s, merged_s, hidden_s, rows_s)


def pairwise_s(assignment: Assignment, pricer: Pricer) -> float:
    """The seconds of all nodes and pairs of nodes: the planner's objective."""
    analysis = assignment.analysis
    work = paired_work_s(assignment, pricer)
    results = sum(
        _results_s(assignment, pricer, node) for node in analysis.contraction.nodes
    )
    reads = sum(_source_s(assignment, pricer, s) for s in analysis.sources.values())
    return work + results + reads + _rows_s(assignment, pricer)


def _rows_s(assignment: Assignment, pricer: Pricer) -> float:
    """The seconds of the batch's rows between hosts, as if one message had all."""
    graph, homes = assignment.graph, assignment.contraction.homes
    batch = [i for i in graph.inputs if i.role is InputRole.BATCH and i.rows >= 0]
    whole = sum(graph.values[given.value].nbytes for given in batch)
    out = 0.0
    for given in batch:
        layout = assignment.home_layout(given.value)
        step = rows_step(layout, given.rows, pricer)
        if step is not None and given.value in homes:
            nbytes = graph.values[given.value].nbytes
            out += pricer.packed.collective_s(step, nbytes, step.fraction * whole)
    return out


def paired_work_s(assignment: Assignment, pricer: Pricer) -> float:
    """The seconds of all operators, as if every sum in a loop could be deferred."""
    analysis, contraction = assignment.analysis, assignment.contraction
    device = pricer.cluster.device
    works = analysis.works(streamed=device.streams)
    out = 0.0
    for member, work in works.items():
        strategy = assignment.strategies[contraction.node_of[member]]
        own = contraction.node(work.op).members[member]
        parts = [pricer.group(strategy[f]) if f >= 0 else 1 for f in own]
        kernel_s = device.kernel_latency_s if work.kernel else 0.0
        once_s = float(work_s(work, np.array([parts], float), device)[0])
        out += analysis.trips[member] * (once_s + kernel_s)
    for (maker, member), trips in partial_runs(analysis, pricer).items():
        partial = assignment.partial(assignment.graph.operators[maker])
        strategy = assignment.strategies[contraction.node_of[member]]
        longer = partial_work_s(analysis, member, [strategy], [partial], pricer)
        out += trips * float(longer[0, 0])
    return out


def _results_s(assignment: Assignment, pricer: Pricer, node: Node) -> float:
    """The seconds of the collectives that complete the results of a node's sums."""
    analysis = assignment.analysis
    works = analysis.works(streamed=pricer.cluster.device.streams)
    out = 0.0
    for member in node.members:
        op = analysis.graph.operators[member]
        partial = assignment.partial(op)
        final = op.class_index in analysis.independent.summing
        together = SUMS if final else ALONE
        share = share_of(analysis, pricer, op.class_index)
        if node.kind != "contraction":
            if not partial or member not in works:
                continue
            for dims in op.rule.results:
                own = assignment.layout(op, dims)
                out += sum(
                    times
                    * pricer.reshard_s(
                        own, own, partial, "all", nbytes, together, share
                    )
                    for nbytes, times in analysis.sums[op.class_index]
                )
            continue
        for slot, value in enumerate(op.outputs):
            if value not in analysis.contraction.homes:
                continue
            own = assignment.layout(op, op.rule.results[slot])
            home = assignment.home_layout(value)
            whole = [(analysis.graph.values[value].nbytes, analysis.trips[member])]
            sums = analysis.sums[op.class_index] if slot == 0 else whole
            kind = op.rule.reduction
            out += sum(
                times
                * pricer.reshard_s(own, home, partial, kind, nbytes, together, share)
                for nbytes, times in sums
            )
    return out


def _source_s(assignment: Assignment, pricer: Pricer, source: HomeValue) -> float:
    """The seconds of resharding a value for its readers, through copies if any."""
    known = assignment.analysis.independent.gathered
    together = GATHERS if source.value_class[0] in known else ALONE
    rounds = pricer.cluster.device.rounds_operands
    nbytes = sent_bytes(assignment.analysis, source.example, rounds=rounds)
    home = assignment.home_layout(source.example)

    def moved_s(start: Layout, target: Layout) -> float:
        return pricer.reshard_s(start, target, (), "", nbytes, together)

    def layout(use: Use) -> Layout:
        return layout_of(assignment.strategies[use.node], use.dims)

    copied = {
        backward: assignment.copies[source.value_class, backward]
        for backward in (False, True)
        if (source.value_class, backward) in assignment.copies
    }
    if not copied:
        return sum(u.weight * moved_s(home, layout(u)) for u in source.foreign)
    out = 0.0
    for backward, choice in copied.items():
        uses = [u for u in source.foreign if u.backward is backward]
        if not choice.reuse:
            out += times_made(uses) * moved_s(home, choice.layout)
        out += sum(u.weight * moved_s(choice.layout, layout(u)) for u in uses)
    return out
