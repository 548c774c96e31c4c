"""Whether it pays to find out what other codecs, and layouts with them, would save.

Layouts that are the fastest with dense gradients and a small batch may be chosen to
avoid sums of gradients: activations are exchanged, or all devices do the same. With
codecs, or with a larger batch, layouts that sum gradients may be faster. Other codecs
for the layouts that run are chosen in little time, other layouts take a search.
"""

from __future__ import annotations

import dataclasses

from autopar.goodput.agreeing import Said
from autopar.goodput.choice import Decision
from autopar.goodput.throughput import Throughput
from autopar.goodput.ways import PlannedWay, Ways


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
