"""Chooses the codecs of a run's first step, before its program is compiled.

Nothing was measured yet. Seconds of steps are those of plans, within what they may err,
and the noise scale may be anything: other codecs are taken where they finish more under
every noise scale. With no noise an unbiased codec of error w on K workers is worth
1 / (1 + w / K) of a row, with noise alone 1 / (1 + w)
(`autopar.goodput.efficiency`). So codecs that err little are taken at once where links
are slow, and others only once the noise is known.
"""

from __future__ import annotations

import dataclasses
import math

from autopar.goodput.agreeing import Said, agreed, key_of
from autopar.goodput.choice import Decision, PhiRange, decide
from autopar.goodput.following import Following
from autopar.goodput.now import Now
from autopar.goodput.studies import worth_studying
from autopar.goodput.throughput import Throughput
from autopar.goodput.ways import Ways
from autopar.runtime.world import World


def chosen(
    world: World,
    ways: Ways,
    now: Now,
    following: Following,
    *,
    horizon_s: float,
    rest_s: float,
) -> Said:
    """The codecs to begin with, if choosing them pays; the same on all processes.

    Args:
      world: the processes, which all call this.
      ways: the ways to go on.
      now: the way that would run, and its arguments.
      following: how the batch follows.
      horizon_s: seconds until something changes.
      rest_s: seconds that the job takes without other codecs.
    """
    # To choose one, or to look for its layouts, takes no longer than the first plan.
    each_s, terms = now.made.plan.seconds.total, now.made.curve.terms()
    part = 0.0 if terms is None else Throughput().sync_part(terms)
    spare_s = min(horizon_s, rest_s)
    worth = worth_studying(ways, now.made, part, spare_s=spare_s, each_s=each_s)
    worth = agreed(world, worth)
    if not worth.studies:
        return Said()
    ways.study(now.made, layouts=worth.layouts)
    decision = first_decision(ways, now, following, horizon_s, rest_s)
    return agreed(world, Said(key=key_of(decision), decision=decision))


def first_decision(
    ways: Ways, now: Now, following: Following, horizon_s: float, rest_s: float
) -> Decision:
    """Compares the codecs for the base batch.

    Args:
      ways: the ways to go on, which have studied the layouts.
      now: the way that would run, and its arguments.
      following: how the batch follows.
      horizon_s: seconds until something changes.
      rest_s: seconds that the job takes without other codecs.
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
