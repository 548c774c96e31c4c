"""Whether a study of other codecs, and of layouts for these codecs, pays off.

With dense gradients and a small batch, the fastest layouts may avoid sums of gradients:
devices exchange activations, or all devices compute the same. With codecs, or with a
larger batch, layouts that sum gradients may be faster. Planning other codecs for the
running layouts takes little time. Other layouts need a search.
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
    """How a loop is to continue.

    Attributes:
      busy: whether another way is still being prepared.
      studies: whether plans with other codecs are to be made first, because they may
        save more time than the planning takes.
      layouts: whether layouts are to be searched with these codecs, for the same
        reason.
      key: the way to continue with; None: the running way.
      decision: the comparison by this process; None: it has not compared, or the noise
        scale is not known yet.
    """

    busy: bool = False
    studies: bool = False
    layouts: bool = False
    key: Key | None = None
    decision: Decision | None = None


def agree_on_first(world: World, own: Said) -> Said:
    """The answer of the first process; it is busy as long as any process is busy.

    Measured seconds differ between processes. Therefore the first process decides for
    all processes.

    Args:
      world: the processes, which all call this function.
      own: the answer of this process.
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
    """The chosen way; None if it is the running way."""
    return _key(decision.chosen) if decision.changes else None


def with_key(decision: Decision, key: Key) -> Decision:
    """The comparison, with the first process's choice as the chosen way."""
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
    """Whether other codecs may save more time than their planning takes.

    Planning includes the compilation of a program.
    If the running way uses codecs, all allowed codecs are studied in any case.

    Args:
      ways: the ways to continue.
      made: the running way.
      times: the model of step times.
      decision: the comparison of ways; None: the noise scale is not known yet.
      rest_s: seconds that the rest of the job takes with the running way. A better way
        in ``decision`` shortens this time.
      horizon_s: seconds until the next expected change.
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
    """Whether codecs, and layouts for them, may save more time than their study takes.

    With the running layouts, codecs save at most the seconds of synchronisation.

    Args:
      ways: the ways to continue.
      made: the running way.
      sync_part: the fraction of a step's seconds that its synchronisation takes.
      spare_s: seconds until the next expected change or the end of the run.
      each_s: seconds to study a codec.
      once_s: additional seconds, independent of the number of codecs.
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
    """The facts for a decision; a thread may read them while steps run.

    A thread must not read a step's measurements meanwhile, because the step donates
    their arrays to the next step.

    Attributes:
      made: the running way, with its plan.
      way: the running way, with the measured error of its codecs.
      held: structs of the state's arrays, with their shardings.
      call: the arguments of the step, as structs.
      batch: position of the batch among the arguments.
    """

    made: PlannedWay
    way: Way
    held: tuple[Any, ...]
    call: StepCall
    batch: int

    def call_of(self, rows: int) -> StepCall:
        """The arguments of the step with another number of rows."""
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
    """The facts for a decision after a step.

    Args:
      step: the step.
      made: the running way, with its plan.
      way: the running way, with the measured error of its codecs.
      state: the state that the step returned.
      rest: arguments of the step after the state.
      named: keyword arguments of the step.
    """
    arguments = state if type(state) is tuple else (state,)
    call = changing_batches.call_of(step, (*arguments, *rest), named)
    leaves, _ = flat_state(state)
    held = tuple(
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves
    )
    return Now(made, way, held, call, len(arguments))


def with_rows(struct: Any, rows: int, wanted: int) -> Any:
    """The struct of a batch's array with another number of rows.

    Args:
      struct: the struct of the array; it is returned unchanged if it has no rows.
      rows: rows of the batch.
      wanted: rows of the result.
    """
    if not struct.shape or struct.shape[0] != rows:
        return struct
    shape = (wanted, *struct.shape[1:])
    return jax.ShapeDtypeStruct(shape, struct.dtype, weak_type=struct.weak_type)
