"""Whether it pays to find out what other codecs, and layouts with them, would save.

Layouts that are the fastest with dense gradients and a small batch may be chosen to
avoid sums of gradients: activations are exchanged, or all devices do the same. With
codecs, or with a larger batch, layouts that sum gradients may be faster. Other codecs
for the layouts that run are chosen in little time, other layouts take a search.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from autopar.goodput.choice import Decision, Judged, Way
from autopar.goodput.throughput import Throughput
from autopar.goodput.ways import Key, PlannedWay, Ways
from autopar.runtime import changing_batches
from autopar.runtime.agreement import exchange_data
from autopar.runtime.creation import flat_state
from autopar.runtime.parallel_step import ParallelStep
from autopar.runtime.world import World
from autopar_passes.program.calls import StepCall


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """How a loop is to go on.

    Attributes:
      busy: whether another way is still being prepared.
      studies: whether other codecs are to be chosen first, as they may save more than
        that takes.
      layouts: whether other layouts are looked for with them, for the same reason.
      key: the way to go on by; None: as it is.
      decision: what this process has compared; None: nothing, or the noise is not known
        yet.
    """

    busy: bool = False
    studies: bool = False
    layouts: bool = False
    key: Key | None = None
    decision: Decision | None = None


def agree_on_first(world: World, own: Said) -> Said:
    """What the first process says; it is busy as long as any is.

    Measured seconds differ between processes, so only one can decide.

    Args:
      world: the processes, which all call this.
      own: what this process would say.
    """
    if world.process_count == 1:
        return own
    key = None if own.key is None else dataclasses.asdict(own.key)
    data = json.dumps([own.busy, own.studies, own.layouts, key]).encode()
    every: list[Any] = [
        json.loads(x) for x in exchange_data(world, "choosing the batch", data)
    ]
    _, studies, layouts, key = every[0]
    found = None if key is None else Key(**key)
    return Said(any(x[0] for x in every), studies, layouts, found, own.decision)


def key_of(decision: Decision) -> Key | None:
    """The way that was chosen; None: the one that runs."""
    return _key(decision.chosen) if decision.changes else None


def with_key(decision: Decision, key: Key) -> Decision:
    """The comparison with the way that the first process has chosen."""
    found = next((x for x in decision.compared if _key(x) == key), decision.chosen)
    return dataclasses.replace(decision, chosen=found)


def _key(judged: Judged) -> Key:
    way = judged.way
    return Key(way.rows, way.microbatches, way.codecs)


def worth_now(
    ways: Ways,
    made: PlannedWay,
    times: Throughput,
    decision: Decision | None,
    *,
    rest_s: float,
    horizon_s: float,
) -> Said:
    """Whether other codecs may save more than choosing and compiling them takes.

    With codecs the others are always compared.

    Args:
      ways: the ways to go on.
      made: the way that runs.
      times: what was measured of steps.
      decision: what was compared; None: the noise is not known yet.
      rest_s: seconds that the job takes as it goes on now. Its end comes sooner by what
        is known to be better.
      horizon_s: seconds until something changes.
    """
    found = Said()
    if decision is not None:
        best, compile_s = decision.chosen, ways.step.preparation.compile_s
        found = worth_studying(
            ways,
            made,
            times.sync_part(best.way.terms),
            spare_s=min(rest_s / max(best.least, 1.0), horizon_s),
            each_s=compile_s,
            once_s=compile_s,
        )
    if not any(g.codec for g in made.plan.gradients):
        return found
    return dataclasses.replace(found, studies=ways.count_unstudied(made) > 0)


def worth_studying(
    ways: Ways,
    made: PlannedWay,
    sync_part: float,
    *,
    spare_s: float,
    each_s: float,
    once_s: float = 0.0,
) -> Said:
    """Whether codecs, and layouts with them, may save more than finding them takes.

    In the layouts that run, codecs save at most the synchronisation.

    Args:
      ways: the ways to go on.
      made: the way that runs.
      sync_part: the part of a step's seconds that its synchronisation takes.
      spare_s: seconds until something changes or the run ends.
      each_s: seconds that a codec takes to be studied.
      once_s: seconds that are paid besides.
    """
    unknown, searches = ways.count_unstudied(made), ways.searches(made)
    cost_s = unknown * each_s + once_s
    search_s = searches * made.plan.seconds.total
    layouts = False
    if searches:
        lost = max(made.curve.lost_part(rows) for rows in (made.key.rows, ways.most))
        layouts = lost * spare_s > cost_s + search_s
    codecs = unknown > 0 and sync_part * spare_s > cost_s
    return Said(studies=layouts or codecs, layouts=layouts)


@dataclasses.dataclass(frozen=True, slots=True)
class Now:
    """What a decision is made on; a thread may read it while steps go on.

    What a step measures may not be read then: its arrays are handed on to the next one.

    Attributes:
      made: the way that runs.
      way: the same with what its codecs were measured to err.
      held: structs of the state's arrays, with where they lie.
      call: the arguments of the step, structs.
      batch: position of the batch among them.
    """

    made: PlannedWay
    way: Way
    held: tuple[Any, ...]
    call: StepCall
    batch: int

    def call_of(self, rows: int) -> StepCall:
        """The arguments with another number of rows."""
        owners = self.call.form.argument_of(self.call.arrays)
        arrays = [
            with_rows(x, self.made.key.rows, rows) if owner == self.batch else x
            for x, owner in zip(self.call.arrays, owners, strict=True)
        ]
        return dataclasses.replace(self.call, arrays=arrays)


def now_of(
    step: ParallelStep[..., Any],
    made: PlannedWay,
    way: Way,
    state: Any,
    rest: Sequence[Any],
    named: Mapping[str, Any],
) -> Now:
    """What a decision is made on after a step.

    Args:
      step: the step.
      made: the way that runs.
      way: what is known of it.
      state: that the step returned.
      rest: what it took after the state.
      named: what it took by name.
    """
    arguments = state if type(state) is tuple else (state,)
    call = changing_batches.call_of(step, (*arguments, *rest), named)
    leaves, _ = flat_state(state)
    held = tuple(
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves
    )
    return Now(made, way, held, call, len(arguments))


def with_rows(struct: Any, rows: int, wanted: int) -> Any:
    """The struct of an array of a batch with another number of rows.

    Args:
      struct: of an array; one that has no rows stays.
      rows: of the batch.
      wanted: rows of the result.
    """
    if not struct.shape or struct.shape[0] != rows:
        return struct
    shape = (wanted, *struct.shape[1:])
    return jax.ShapeDtypeStruct(shape, struct.dtype, weak_type=struct.weak_type)
