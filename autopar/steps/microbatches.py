"""The analyses of a step that runs in microbatches.

The forward and the backward pass run once for each microbatch, and the update runs
once. The step adds up the gradients of the microbatches (gradient accumulation), so
each gradient needs one sum over devices per step.

The module also makes the analysis of one replica, if the microbatches of a step are
distributed over several replicas.

Each replica has the whole program, with a loop over its own number of microbatches
(`autopar_passes.replay.replicas`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from fractions import Fraction

from autopar.errors import PlanError
from autopar.progress import say
from autopar.steps.analysis import Analysis, analyse_again
from autopar.steps.batch import batch_dims, batch_rows
from autopar.steps.padding import (
    padded_rows,
    padded_step,
    padded_whole,
    trace_rows,
)
from autopar_passes.graph.operators import Operator, OperatorGraph, users
from autopar_passes.jax_compat import is_ordered
from autopar_passes.microbatches.accumulate import accumulate_step
from autopar_passes.microbatches.facts import Microbatched, MicrobatchError
from autopar_passes.microbatches.find import split_step, unsplit
from autopar_passes.microbatches.one_row import of_one_row
from autopar_passes.program.equations import Program, walk
from autopar_passes.program.trace import TracedStep
from autopar_passes.rules import manual
from autopar_passes.sums.stacked import Deferral


def in_microbatches(
    analysis: Analysis, count: int, *, couple: bool = False
) -> Analysis:
    """Returns the analysis of a step that accumulates gradients over microbatches.

    The program takes the whole batch. It is planned and run like any other program.

    Args:
      analysis: the analysis of the step. If the step was split already, its analysis as
        the user wrote it is used.
      count: number of microbatches.
      couple: whether values that depend on several rows of the batch, such as batch
        statistics, may be computed from the rows of one microbatch only.

    Raises:
      PlanError: the step cannot be split in this way, with the reason.
    """
    whole = analysis.whole or analysis
    if count == 1:
        return padded_whole(whole)

    def make() -> Analysis:
        start = time.perf_counter()
        say(f"splitting the batch into {count} microbatches")
        found = _remember_split(whole, count, couple)
        traced = accumulate_step(padded_whole(whole, count).pytrees, found)
        return analyse_again(whole, traced, start, split=found, whole=whole)

    return whole.remember(("split", count, couple), make)


def one_microbatch(analysis: Analysis, count: int, *, couple: bool = False) -> Analysis:
    """Returns the analysis of one microbatch's program; its field ``split`` is set.

    Args:
      analysis: the analysis of the step. If the step was split already, its analysis as
        the user wrote it is used.
      count: number of microbatches. With 1, it is the program of the whole step.
      couple: see `in_microbatches`.

    Raises:
      PlanError: the step cannot be split in this way, with the reason.
    """
    whole = analysis.whole or analysis

    def make() -> Analysis:
        if count == 1:
            base = padded_whole(whole)
            found = unsplit(base.pytrees, base.graph, batch_dims(base.graph, 1))
            return dataclasses.replace(base, split=found, whole=whole)
        start = time.perf_counter()
        found = _remember_split(whole, count, couple)
        return analyse_again(whole, found.traced, start, split=found, whole=whole)

    return whole.remember(("one", count, couple), make)


def _remember_split(whole: Analysis, count: int, couple: bool) -> Microbatched:
    key = "rows", count, couple
    return whole.remember(key, lambda: split(whole, count, couple=couple))


def numbers_of_microbatches(analysis: Analysis) -> Iterator[int]:
    """Yields the powers of two (from 1) that divide the number of rows of the batch."""
    whole = analysis.whole or analysis
    rows = batch_rows(whole.graph)
    count = 1
    while count == 1 or (rows > 1 and rows % count == 0):
        yield count
        count *= 2


def split(analysis: Analysis, count: int, *, couple: bool = False) -> Microbatched:
    """Finds how a step is split into microbatches.

    Args:
      analysis: the analysis of the step on the whole batch.
      count: number of microbatches.
      couple: see `in_microbatches`.

    Raises:
      PlanError: the step cannot be split, with the reason.
    """
    name, rows = analysis.pytrees.name, batch_rows(analysis.graph)
    if rows % count:
        most = max(n for n in range(1, min(rows, count) + 1) if rows % n == 0)
        raise PlanError(
            f"{name}: the batch cannot be split into {count} microbatches: it has "
            f"{rows} rows, which {count} does not divide. Give a number that divides "
            f"the rows, such as microbatches={most}; for the last batch of an epoch, "
            "give last_batch='pad' or 'drop'."
        )
    base = padded_whole(analysis, count)
    padded = padded_rows(rows, analysis.row_multiple, count)
    try:
        micro = padded_step(analysis, Fraction(rows, count), Fraction(padded, count))
        try:
            return split_step(base.pytrees, micro, base.graph, count, couple=couple)
        except MicrobatchError:
            one = _one_row(analysis) if padded == count == rows else None
            if one is None:
                raise
            return split_step(base.pytrees, one, base.graph, count, couple=couple)
    except MicrobatchError as error:
        raise PlanError(
            f"{name}: the batch cannot be split into {count} microbatches with the "
            f"meaning of the step kept: {error}"
        ) from error


def _one_row(analysis: Analysis) -> TracedStep | None:
    """Returns the step on one row, in the form that it has on several rows.

    The result is None if it has no such form, or does not run on two rows.
    """
    rows = batch_rows(analysis.graph)
    try:
        two = trace_rows(analysis, 2)
        more = analysis.pytrees if rows > 2 else trace_rows(analysis, 4)
    except MicrobatchError:
        return None
    program = of_one_row(more.program, two.program, rows if rows > 2 else 4)
    return None if program is None else dataclasses.replace(two, program=program)


def over_microbatches(analysis: Analysis, found: Microbatched) -> Analysis:
    """Returns the analysis of a step whose passes run for each microbatch.

    The program stays that of one microbatch. The number of runs of each operator that
    runs once per microbatch is multiplied by the number of microbatches. A gradient
    that is accumulated over the microbatches may stay partial until the last one, so
    its sum over devices is computed once.

    Args:
      analysis: the analysis of the program of one microbatch, ``found.traced.program``.
      found: the split of the step into microbatches.
    """
    count = found.microbatches
    repeated = _repeated_equations(analysis.program, found.once)
    graph = dataclasses.replace(
        analysis.graph,
        operators=tuple(
            _times(op, count) if op.equation in repeated else op
            for op in analysis.graph.operators
        ),
        accumulated=_added_up(analysis.graph, found, repeated),
        microbatches=count,
    )
    return dataclasses.replace(
        analysis.with_operators(graph),
        deferrals=tuple(_waiting(d, graph) for d in analysis.deferrals),
    )


def _repeated_equations(program: Program, once: frozenset[int]) -> frozenset[int]:
    """The equations that run for each microbatch, with those in their regions."""
    found: set[int] = set()
    for eqn in program.body.equations:
        if eqn.index not in once:
            found.update(e.index for e in (eqn, *eqn.inner))
    return frozenset(found)


def _times(op: Operator, count: float) -> Operator:
    return dataclasses.replace(
        op,
        trips=op.trips * count,
        input_trips=tuple(trips * count for trips in op.input_trips),
    )


def _added_up(
    graph: OperatorGraph, found: Microbatched, repeated: frozenset[int]
) -> frozenset[int]:
    """Returns the values of this graph that are accumulated over microbatches."""
    made = {v for op in graph.operators if op.equation in repeated for v in op.outputs}
    return found.accumulated_values & made


def _waiting(deferral: Deferral, graph: OperatorGraph) -> Deferral:
    """Returns a deferral with sums once per step, if microbatches add up its values.

    If microbatches do not add up its values, the deferral is returned unchanged.

    The sum over devices is computed after the last microbatch. Operators of the update
    that read an accumulated value are therefore not part of the deferral.
    """
    if graph.accumulated.issuperset(deferral.ends):
        return dataclasses.replace(deferral, hoisted=True)
    if not graph.accumulated & deferral.members:
        return deferral
    return _until_added_up(deferral, graph) or deferral


def _until_added_up(deferral: Deferral, graph: OperatorGraph) -> Deferral | None:
    """The part of a deferral up to the accumulated values; None if one is missing."""
    following = users(graph.operators)
    members: set[int] = set()
    reach: list[tuple[int, tuple[int, ...]]] = []
    for maker in deferral.contributions:
        left, ends = list(graph.operators[maker].outputs), list[int]()
        while left:
            value = left.pop()
            members.add(value)
            if value in graph.accumulated:
                ends.append(value)
                continue
            found = following.get(value, ())
            after = {v for op in found for v in op.outputs if v in deferral.members}
            if value in deferral.ends or not after:
                return None
            left.extend(after - members)
        reach.append((maker, tuple(sorted(set(ends)))))
    gradient = bool(deferral.gradients)
    ends = sorted({v for _, own in reach for v in own})
    return Deferral(
        ends=tuple(ends),
        reach=tuple(reach),
        members=frozenset(members),
        hoisted=True,
        gradients=frozenset(ends) if gradient else frozenset(),
    )


def check_can_be_dealt_out(analysis: Analysis) -> None:
    """Checks that replicas may run unequal numbers of the microbatches of a step.

    Args:
      analysis: the analysis of the step in microbatches.

    Raises:
      PlanError: replicas may not run unequal numbers of microbatches, with the reason.
    """
    name = analysis.pytrees.name
    if analysis.split is None or analysis.pytrees.loop is None:
        raise PlanError(
            f"{name}: microbatches are dealt out to replicas of unequal devices, and "
            "the batch is not split. Say microbatches='auto', or a number."
        )
    repeated = [*walk(analysis.loop.regions[0])]
    if any(is_ordered(e.source) for e in repeated):
        raise PlanError(
            f"{name}: it calls the host in order, and replicas of unequal devices run "
            "at the same time. Give ordered=False."
        )
    if any(e.primitive == manual.PRIMITIVE for e in repeated):
        raise PlanError(
            f"{name}: it has a shard_map of its own, over all devices of a mesh; "
            "replicas of unequal devices each run a part of them."
        )


def with_turns(analysis: Analysis, turns: int) -> Analysis:
    """Returns the analysis of a replica that runs ``turns`` of a step's microbatches.

    The analysis differs from that of the whole step in the number of runs of the
    operators that run for each microbatch. The sizes of values stay the same.
    `autopar.cost.estimate` adds the sums over replicas that follow the loop.

    Args:
      analysis: the analysis of the step in microbatches.
      turns: the number of microbatches that the replica runs.
    """
    count, loop = analysis.microbatches, analysis.loop.index
    operators = tuple(
        _times(op, turns / count)
        if op.equation in analysis.loop_equations
        else _at_boundary(op, count, turns)
        if op.equation == loop
        else op
        for op in analysis.graph.operators
    )
    graph = dataclasses.replace(analysis.graph, operators=operators)
    replica = analysis.with_operators(graph)
    return dataclasses.replace(replica, turns=turns, counted=analysis)


def _at_boundary(op: Operator, count: int, turns: int) -> Operator:
    """Corrects the number of runs of an operator at the loop's boundary."""

    def trips(before: float) -> float:
        return float(turns) if before == count else before

    return dataclasses.replace(
        op, trips=trips(op.trips), input_trips=tuple(map(trips, op.input_trips))
    )
