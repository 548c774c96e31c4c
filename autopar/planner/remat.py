"""Chooses how many layers compute their activations again, and what is kept of them.

The first layers compute again: what they keep is needed longest. The more of them do,
the less memory a plan needs and the more it computes. So the search looks for the
fewest layers with which a plan fits, by bisection, and goes on to more of them as long
as plans get faster: with memory to spare layouts may be faster, too.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, PlanError
from autopar.planner.option_checks import layers_asked
from autopar.planner.options import PlanOptions
from autopar.plans import AS_WRITTEN, Plan, Rematerialisation
from autopar.progress import say
from autopar.steps.analysis import Analysis
from autopar.steps.remat import layer_starts, rematerialised
from autopar_passes.remat.levels import DOTS, FULL

# Plans a step on a cluster; the last argument is that of `plan_analysis`, ``advise``.
Planner = Callable[[Cluster, PlanOptions, bool], Plan]
# Numbers of layers that are tried of each level, at most and about.
_TRIED = 8
# A plan that needs less than this part of the memory is not held back by it.
_EASY = 0.5
# A plan slower by less than this part is as fast: the solver's own gap.
_GAP = 0.005
# Bytes of a device that holds whatever is planned for it.
_UNLIMITED = 10**18


def wanted(analysis: Analysis, options: PlanOptions) -> Rematerialisation:
    """What the options say to compute again; for ``auto``, what the step says alone.

    Args:
      analysis: the step.
      options: with a number of microbatches.

    Raises:
      PlanError: the step has not so many layers, or none that can be computed again.
    """
    if options.remat in (None, "auto"):
        return AS_WRITTEN
    if options.remat == "none":
        return Rematerialisation(checkpoints=False)
    count, level = layers_asked(options.remat)
    if count == 0:
        return AS_WRITTEN
    starts = _starts(analysis, options)
    if count is not None and count > len(starts):
        raise PlanError(
            f"remat={options.remat!r}: the step has {len(starts)} layers. Give fewer, "
            "or 'all'."
        )
    layers = range(len(starts) if count is None else count)
    return Rematerialisation(layers=tuple(layers), starts=starts, level=level)


def as_asked(analysis: Analysis, options: PlanOptions) -> Analysis:
    """The step in the microbatches, and with the layers computed again, of options.

    Raises:
      PlanError: it cannot be split or rewritten so.
    """
    return rematerialised(
        analysis,
        wanted(analysis, options),
        int(options.microbatches or 1),
        couple=options.coupled == "microbatch",
    )


def _starts(analysis: Analysis, options: PlanOptions) -> tuple[int, ...]:
    couple = options.coupled == "microbatch"
    return layer_starts(analysis, int(options.microbatches or 1), couple=couple)


def fastest(
    analysis: Analysis,
    cluster: Cluster,
    options: PlanOptions,
    plan: Planner,
    *,
    advise: bool = True,
) -> Plan:
    """The plan with the layers computed again that is fastest of what fits.

    Args:
      analysis: the step.
      cluster: what is planned for.
      options: with a number of microbatches.
      plan: plans the step for other options, with a number of layers.
      advise: as for `autopar.planner.search.search`.

    Raises:
      InfeasibleError: no plan fits; that of the most layers.
      PlanError: the batch cannot be split, or a pin does not fit.
    """
    search = _Search(analysis, cluster, options, plan)
    search.run()
    if search.best is None:
        # It failed before, and says now what would be enough.
        return plan(cluster, dataclasses.replace(options, remat=search.last), advise)
    return search.best


class _Search:
    def __init__(
        self, analysis: Analysis, cluster: Cluster, options: PlanOptions, plan: Planner
    ) -> None:
        self.analysis = analysis
        self.cluster = cluster
        self.options = options
        self.plan = plan
        self.best: Plan | None = None
        # What needed least memory of what did not fit.
        self.last: str | int = 0
        self.known: dict[str, bool] = {}

    def run(self) -> None:
        self.tried("0")
        plain = self.best
        if plain is not None and self.is_easy(plain):
            return
        try:
            layers = len(_starts(self.analysis, self.options))
        except PlanError as error:
            say(f"nothing is computed again: {error}")
            layers = 0
        least = 1
        for level in (FULL, DOTS) if layers else ():
            numbers = [k for k in _numbers(layers) if k >= least]
            first = self.fewest(level, numbers) if plain is None else -1
            if first is None:
                break
            least = max(least, numbers[first]) if plain is None else 1
            self.more(level, numbers[first + 1 :])
        if plain is None and self.best is not None:
            self.closer(self.best.remat)

    def is_easy(self, plain: Plan) -> bool:
        """Whether memory does not hold back a plan that computes nothing again."""
        if plain.predicted.peak_memory_bytes <= _EASY * self.cluster.memory_bytes:
            return True
        device = dataclasses.replace(self.cluster.device, memory_bytes=_UNLIMITED)
        roomy = dataclasses.replace(self.cluster, device=device)
        free = self.plan(roomy, dataclasses.replace(self.options, remat=0), False)
        return plain.predicted.step_s <= (1 + _GAP) * free.predicted.step_s

    def fewest(self, level: str, numbers: Sequence[int]) -> int | None:
        """Position of the fewest layers with which a plan fits; None: none does.

        With more layers the plan needs less memory, but for the last layer: its
        activations are needed as soon as they are made.
        """
        low, high = 0, len(numbers) - 1
        for top in dict.fromkeys((max(0, high - 1), high)):
            if self.tried(f"{numbers[top]}:{level}"):
                high = top
                break
        else:
            return None
        return self.first(level, numbers, low, high)

    def first(self, level: str, numbers: Sequence[int], low: int, high: int) -> int:
        """Position of the first number of layers from ``low`` on that fits.

        The one at ``high`` is known to fit, and is not tried.
        """
        return bisect.bisect_left(
            numbers, True, low, high, key=lambda k: self.tried(f"{k}:{level}")
        )

    def more(self, level: str, numbers: Sequence[int]) -> None:
        """Tries more layers as long as plans get faster."""
        for number in numbers:
            before = self.best
            self.tried(f"{number}:{level}")
            if self.best is before:
                return

    def closer(self, found: Rematerialisation) -> None:
        """Tries the numbers of layers between one that fits and one that does not."""
        high = len(found.layers)
        tried = [k for k in range(high) if f"{k}:{found.level}" in self.known]
        self.first(found.level, range(high), max(tried, default=0) + 1, high)

    def tried(self, remat: str) -> bool:
        """Whether a plan fits; the fastest one is kept."""
        if remat not in self.known:
            self.known[remat] = self.fits(remat)
        return self.known[remat]

    def fits(self, remat: str) -> bool:
        asked = dataclasses.replace(self.options, remat=remat)
        try:
            found = self.plan(self.cluster, asked, False)
        except InfeasibleError:
            self.last = remat
            return False
        before_s = math.inf if self.best is None else self.best.predicted.step_s
        if found.predicted.step_s < before_s:
            self.best = found
        return True


def _numbers(layers: int) -> list[int]:
    """The numbers of layers that are tried: all of few, some of many."""
    apart = -(-layers // _TRIED)
    return sorted({*range(apart, layers + 1, apart), max(1, layers - 1), layers})
