"""Decides whether planning with other codecs, and other layouts, pays off.

If gradients are sent without codecs and the batch is small, the fastest layouts may
avoid sums of gradients: devices exchange activations, or all devices compute the same.
With codecs, or with a larger batch, layouts that sum gradients may be faster. It takes
little time to plan other codecs for the layouts in use. It takes longer to search for
other layouts. A way is one choice of batch size, number of microbatches and codecs
(`autopar.goodput.choice.Way`); the running way is the choice in use.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from autopar.goodput.choice import Decision, Judged, PhiRange, Way, decide
from autopar.goodput.following import Following
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
    """What a training loop does next.

    Attributes:
      busy: whether another way is still being planned or compiled.
      studies: whether the loop first makes plans with other codecs, because they may
        save more time than the planning takes.
      layouts: whether the loop also searches other layouts for these codecs, for the
        same reason.
      key: the way to change to; None: the running way stays.
      decision: how this process compared the ways; None: it has not compared them, or
        the noise scale is not known yet.
    """

    busy: bool = False
    studies: bool = False
    layouts: bool = False
    key: Key | None = None
    decision: Decision | None = None


def agree_on_first(world: World, own: Said) -> Said:
    """What the first process decided.

    If any process is still planning or compiling, the result is busy.

    Processes measure different step times. Therefore the first process decides for all
    processes.

    Args:
      world: the processes, which all call this function.
      own: what this process would do.
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
    """The decision, with the choice of the first process as the chosen way."""
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
    """Whether other codecs may save more time than it takes to plan them.

    The time to plan includes the compilation of a program. If the running way uses
    codecs, plans with all other allowed codecs are made in any case.

    Args:
      ways: lists and plans the choices of batch, microbatches and codecs.
      made: the running way.
      times: predicts step times.
      decision: how the ways compare; None: the noise scale is not known yet.
      rest_s: seconds that the rest of the job takes with the running way. If
        ``decision`` chose a faster way, less time is assumed.
      horizon_s: seconds until the next expected change of devices.
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
    """Whether other codecs and layouts may save more time than it takes to plan them.

    If layouts stay, codecs save at most the seconds in which devices exchange
    gradients.

    Args:
      ways: lists and plans the choices of batch, microbatches and codecs.
      made: the running way.
      sync_part: the fraction of a step's seconds in which devices wait for the exchange
        of gradients.
      spare_s: seconds until the next expected change of devices or the end of the run;
        a saving counts only in this time.
      each_s: seconds to plan with one codec.
      once_s: further seconds, whatever the number of codecs.
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
    """What a decision depends on; another thread may read it while steps run.

    Another thread must not read the arrays of a step's measurements, because the
    training loop donates them to the next step.

    Attributes:
      made: the running way, with its plan.
      way: the running way, with the measured error of its codecs.
      held: a `jax.ShapeDtypeStruct` of each array of the state, with its sharding.
      call: the arguments of the step, as `jax.ShapeDtypeStruct`.
      batch: position of the batch among the arguments.
    """

    made: PlannedWay
    way: Way
    held: tuple[Any, ...]
    call: StepCall
    batch: int

    def call_of(self, rows: int) -> StepCall:
        """The arguments of the step for a batch with this number of rows."""
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
    """Collects what a decision after a step depends on.

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
    """Shape and dtype of a batch's array after its number of rows has changed.

    Args:
      struct: shape and dtype of the array. The struct is returned unchanged if its
        first dimension does not have ``rows`` elements.
      rows: rows of the batch.
      wanted: rows of the result.
    """
    if not struct.shape or struct.shape[0] != rows:
        return struct
    shape = (wanted, *struct.shape[1:])
    return jax.ShapeDtypeStruct(shape, struct.dtype, weak_type=struct.weak_type)


# Chooses the codecs of a run's first step, before its program is compiled.
#
# At this time no step has been measured. Step times are the plans' predictions with
# their uncertainty, and the noise scale is unknown. Codecs other than the user's are
# chosen only if they finish more work whatever the noise scale is. With an unbiased
# codec of squared error w on K workers, the progress per row is multiplied by 1 / (1 +
# w / K) if gradients have no noise, and by 1 / (1 + w) if they consist of noise only
# (`autopar.goodput.choice`). Therefore codecs with a small w are chosen before the
# first step if links are slow. Codecs with a larger w are chosen only after the noise
# has been measured.


def choose_first(
    world: World,
    ways: Ways,
    now: Now,
    following: Following,
    *,
    horizon_s: float,
    rest_s: float,
) -> Said:
    """The codecs for the first step, if a change pays off; equal on all processes.

    Args:
      world: the processes, which all call this function.
      ways: lists and plans the choices of batch, microbatches and codecs.
      now: the way that runs if no other codecs are chosen, and the step's arguments.
      following: the settings of the loop.
      horizon_s: seconds until the next expected change of devices.
      rest_s: seconds that the job takes if the codecs stay.
    """
    # Planning one codec, or searching layouts for it, takes at most as long as the
    # first plan took.
    each_s, terms = now.made.plan.seconds.total, now.made.curve.terms()
    part = 0.0 if terms is None else Throughput().sync_part(terms)
    spare_s = min(horizon_s, rest_s)
    worth = worth_studying(ways, now.made, part, spare_s=spare_s, each_s=each_s)
    worth = agree_on_first(world, worth)
    if not worth.studies:
        return Said()
    ways.study(now.made, layouts=worth.layouts)
    decision = first_decision(ways, now, following, horizon_s, rest_s)
    return agree_on_first(world, Said(key=key_of(decision), decision=decision))


def first_decision(
    ways: Ways, now: Now, following: Following, horizon_s: float, rest_s: float
) -> Decision:
    """Compares the allowed codecs at the base batch size.

    Args:
      ways: lists and plans the choices, after `Ways.study` has planned other codecs.
      now: the way that runs if no other codecs are chosen, and the step's arguments.
      following: the settings of the loop.
      horizon_s: seconds until the next expected change of devices.
      rest_s: seconds that the job takes if the codecs stay.
    """
    own, base = now.made.key, following.base_batch
    found = ways.others(now.made, now.held, own.microbatches)
    others = [
        dataclasses.replace(way, cost_s=0.0)
        for key, way in found.items()
        if (key.rows, key.microbatches) == (own.rows, own.microbatches)
    ]
    return decide(
        now.way,
        others,
        Throughput(),
        PhiRange(float(base), 0.0, math.inf),
        base_batch=base,
        horizon_s=horizon_s,
        rest_s=rest_s,
        sigmas=following.sigmas,
    )
