"""Finds how a step is split into microbatches, or why it cannot be."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar_passes.graph.operators import OperatorGraph, update_equations
from autopar_passes.microbatches.classes import SAME, Kind
from autopar_passes.microbatches.facts import Facts, facts
from autopar_passes.microbatches.follow import Follower
from autopar_passes.microbatches.microbatched import (
    Combine,
    Crossing,
    Microbatched,
    MicrobatchError,
    Rows,
)
from autopar_passes.microbatches.operators import Grouped, is_float
from autopar_passes.microbatches.pairs import Pair, paired, place
from autopar_passes.microbatches.rewrite import Rewritten, rewritten
from autopar_passes.program.building import needed
from autopar_passes.program.equations import Equation, Program, Region, walk
from autopar_passes.program.trace import TracedStep

_COMBINED = {
    Kind.SAME: Combine.SAME,
    Kind.LOCAL: Combine.MEAN,
    Kind.SUM: Combine.SUM,
    Kind.ROWS: Combine.ROWS,
}


def microbatched(
    whole: TracedStep,
    micro: TracedStep,
    graph: OperatorGraph,
    count: int,
    *,
    couple: bool = False,
) -> Microbatched:
    """Says how a step is split into microbatches with its meaning kept.

    Args:
      whole: the step on the whole batch.
      micro: the same step on the rows of one microbatch.
      graph: the operator graph of the whole step.
      count: number of microbatches.
      couple: whether what couples the rows of a batch may be computed from those of
        each microbatch alone. Statistics of batch normalisation always are.

    Raises:
      MicrobatchError: it cannot be split.
    """
    pair = paired(whole.program, micro.program, count)
    if not any(pair.has_rows(v) for v in pair.whole.body.inputs):
        raise MicrobatchError("no argument has rows of a batch.")
    known, hoisted = facts(pair, graph), frozenset[int]()
    while True:
        follower, unit = _followed(pair, known, couple=couple, hoisted=hoisted)
        made = rewritten(pair, follower.known.edits, follower.once)
        again = _made_twice(pair, follower, made)
        if not again:
            break
        hoisted |= again
    first = pair.micro.num_arguments
    behind = first + made.number + len(made.ahead)
    return Microbatched(
        microbatches=count,
        traced=_traced(micro, made),
        once=frozenset(follower.once),
        crossings=_crossings(pair, follower),
        batch=_batch(pair, unit) | _rows_ahead(pair, follower, made),
        number=first if made.number else None,
        ahead=_ahead(pair, made),
        given=tuple(range(first + made.number, behind)),
        gathered={behind + k: v for k, v in enumerate(made.gathered)},
        local=tuple(follower.local),
    )


def unsplit(
    whole: TracedStep, graph: OperatorGraph, dims: Mapping[int, int]
) -> Microbatched:
    """A step whose batch is one microbatch.

    Args:
      whole: the step.
      graph: its operator graph.
      dims: flat input of the batch -> the dimension of its rows.
    """
    body = whole.program.body
    # A callback without results stands in no part's way.
    told = (e.index for e in body.equations if e.source.effects and not e.outputs)
    once = update_equations(whole.program, graph).union(told)
    made = {v for e in body.equations if e.index not in once for v in e.outputs}
    read = [*body.outputs]
    for eqn in body.equations:
        if eqn.index in once:
            read.extend(eqn.inputs)
    crossings = tuple(
        Crossing(v, Combine.SUM if whole.program.values[v].floating else Combine.SAME)
        for v in dict.fromkeys(a for a in read if isinstance(a, int) and a in made)
    )
    return Microbatched(
        microbatches=1,
        traced=whole,
        once=once,
        crossings=crossings,
        batch={k: Rows(dim) for k, dim in dims.items()},
    )


def _followed(
    pair: Pair, known: Facts, *, couple: bool, hoisted: frozenset[int]
) -> tuple[Follower, int]:
    """The classes of all values, and how many rows are dealt out together."""
    unit = 1
    while True:
        follower = Follower(pair, known, unit, couple=couple, hoisted=hoisted)
        try:
            follower.run()
        except Grouped as grouped:
            unit *= grouped.args[0]
            _check_unit(pair, unit)
        else:
            return follower, unit


def _rows_ahead(pair: Pair, follower: Follower, made: Rewritten) -> dict[int, Rows]:
    """Where the rows are of what is computed from the whole batch and dealt out."""
    first = pair.micro.num_arguments + made.number
    return {
        first + k: Rows(pair.dims[v], max(1, follower.known.of_whole(v).inner))
        for k, v in enumerate(made.ahead[: made.parts])
        if pair.has_rows(v)
    }


def _made_twice(pair: Pair, follower: Follower, made: Rewritten) -> frozenset[int]:
    """The equations that are computed ahead anyway, and should be nowhere else.

    In each microbatch they would draw something else, or make rows that are put
    together again behind the last one.
    """
    folded = {index for index, _ in follower.known.edits.folded}
    handed = set(_handed_on(pair, follower)) - follower.known.edits.replaced
    ahead = needed(pair.whole.body.equations, made.ahead)
    return frozenset(
        eqn.index
        for eqn in ahead
        if eqn.index not in follower.hoisted
        and not (
            folded.isdisjoint(
                {eqn.index, *(e.index for r in eqn.regions for e in walk(r))}
            )
            and handed.isdisjoint(eqn.outputs)
        )
    )


def _check_unit(pair: Pair, unit: int) -> None:
    for value in pair.micro.body.inputs:
        rows = (
            pair.micro.values[value].shape[pair.dims[value]]
            if pair.has_rows(value)
            else 0
        )
        if rows % unit:
            raise MicrobatchError(
                f"{unit} rows belong together, and a microbatch would have {rows}."
            )


def _batch(pair: Pair, unit: int) -> dict[int, Rows]:
    return {
        k: Rows(pair.dims[v], unit)
        for k, v in enumerate(pair.micro.body.inputs[: pair.micro.num_arguments])
        if pair.has_rows(v)
    }


def _traced(micro: TracedStep, made: Rewritten) -> TracedStep:
    """The step on one microbatch, with names for the inputs that were added."""
    number = ("microbatch",) if made.number else ()
    given = (f"whole batch/{k}" for k in range(len(made.ahead)))
    gathered = (f"all microbatches/{k}" for k in range(len(made.gathered)))
    paths = (*micro.input_paths, *number, *given, *gathered)
    return dataclasses.replace(micro, program=made.program, input_paths=paths)


def _ahead(pair: Pair, made: Rewritten) -> Program | None:
    """The program of what is computed from the whole batch."""
    if not made.ahead:
        return None
    whole = pair.whole
    equations = needed(whole.body.equations, made.ahead)
    region = Region(whole.body.inputs, equations, made.ahead)
    return Program(whole.values, region, whole.constants)


def _handed_on(pair: Pair, follower: Follower) -> dict[int, Equation]:
    """The values of microbatches that are used after all of them, and their makers."""
    made = {
        v: eqn
        for eqn in pair.micro.body.equations
        if eqn.index not in follower.once
        for v in eqn.outputs
    }
    read = list(pair.micro.body.outputs)
    for eqn in pair.micro.body.equations:
        if eqn.index in follower.once:
            read.extend(eqn.inputs)
    return {a: made[a] for a in read if isinstance(a, int) and a in made}


def _crossings(pair: Pair, follower: Follower) -> tuple[Crossing, ...]:
    """How the values of microbatches that are used after all of them are combined."""
    found: list[Crossing] = []
    for value, maker in _handed_on(pair, follower).items():
        split = follower.known.classes[value]
        if value in follower.known.edits.replaced | follower.known.edits.counted:
            split = SAME  # The whole value is there already.
        combine = _COMBINED.get(split.kind)
        dtype = pair.micro.values[value].dtype
        if combine is None or (combine is Combine.MEAN and not is_float(dtype)):
            raise MicrobatchError(
                f"{place(maker)} makes a result of each microbatch that is no "
                "part of one of the whole batch."
            )
        rows = Rows(pair.dims[value], max(1, split.inner))
        found.append(
            Crossing(value, combine, rows if combine is Combine.ROWS else None)
        )
    return tuple(found)
