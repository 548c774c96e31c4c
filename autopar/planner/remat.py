"""Chooses how many layers compute their activations again, and what is kept of them.

The first layers compute again: what they keep is needed longest. The more of them do,
the less memory a plan needs and the more it computes. So the search looks for the
fewest layers with which a plan fits. It bisects, from the number on where a straight
line from what every plan needs without them to nothing meets the memory of a device:
with fewer layers a plan is not likely to fit. It goes on to more layers as long as
plans get faster: with memory to spare layouts may be faster, too.

Where a plan fits that computes nothing again, that plan is priced with all layers
computed again before other plans are looked for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, PlanError
from autopar.planner.kept_layouts import priced
from autopar.planner.options import PlanOptions, layers_asked
from autopar.plans import AS_WRITTEN, Plan, Rematerialisation
from autopar.progress import say
from autopar.steps.analysis import Analysis
from autopar.steps.remat import layer_starts, named_values, rematerialised
from autopar_passes.remat.levels import DOTS, FULL, NAMES

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
        options.count,
        couple=options.coupled == "microbatch",
    )


def _starts(analysis: Analysis, options: PlanOptions) -> tuple[int, ...]:
    couple = options.coupled == "microbatch"
    return layer_starts(analysis, options.count, couple=couple)


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
        # Bytes that every plan needs where none fits.
        self.needs: dict[str, float] = {}
        self.plans: dict[str, Plan] = {}
        # Seconds of a step by what its layouts were found for, and what it computes.
        self.priced: dict[tuple[str, str], float] = {}

    def run(self) -> None:
        self.tried("0")
        plain = self.best
        try:
            layers = len(_starts(self.analysis, self.options))
        except PlanError as error:
            say(f"nothing is computed again: {error}")
            return
        if plain is not None:
            self.beside(plain, layers)
            return
        least = 1
        for level in self.levels():
            first = self.fewest(level, least, layers)
            if first is None:
                if level == FULL:
                    break
                continue
            # What keeps more of each layer has to compute as many of them again.
            least = max(least, first) if level == FULL else least
            above = [k for k in _numbers(layers) if k > first]
            if self.may_gain(level, first):
                self.more(level, above)
            if self.best is self.plans.get(f"{layers - 1}:{level}"):
                self.more(level, above[::-1])

    def levels(self) -> list[str]:
        """What may be kept of a layer, the least first."""
        asked = self.options.microbatches
        count = asked if isinstance(asked, int) else 1
        couple = self.options.coupled == "microbatch"
        names = named_values(self.analysis, count, couple=couple)
        return [FULL, DOTS, *([NAMES + ",".join(names)] if names else [])]

    def beside(self, plain: Plan, layers: int) -> None:
        """Tries layers where a plan fits that computes nothing again.

        They may be faster where memory holds that plan back, or where it takes longer
        to write and read activations than to compute them.
        """
        held = not self.is_easy(plain)
        numbers = _numbers(layers)
        for level in self.levels():
            if held:
                self.more(level, numbers)
                self.more(level, numbers[::-1])
            elif self.is_faster(plain, f"{layers}:{level}"):
                self.more(level, numbers[::-1])

    def is_easy(self, plain: Plan) -> bool:
        """Whether memory does not hold back a plan that computes nothing again."""
        if _is_small(plain, self.cluster):
            return True
        roomy = _roomy(self.cluster)
        free = self.plan(roomy, dataclasses.replace(self.options, remat=0), False)
        return plain.predicted.step_s <= (1 + _GAP) * free.predicted.step_s

    def is_faster(self, plain: Plan, remat: str) -> bool:
        """Whether layers that are computed again make a plan faster that is kept."""
        return self.priced_s(plain, "0", remat) < self.priced_s(plain, "0", "0")

    def may_gain(self, level: str, first: int) -> bool:
        """Whether other layouts than fit with the fewest layers are faster.

        The plan with most layers has memory to spare. Where its layouts are no faster
        with the fewest layers, more of them only compute more.
        """
        few = f"{first}:{level}"
        many = max(
            (r for r in self.plans if r.partition(":")[2] == level),
            key=lambda r: int(r.partition(":")[0]),
        )
        if few == many:
            return False
        least, most = self.plans[few], self.plans[many]
        free_s = self.priced_s(most, many, few)
        return free_s < (1 - _GAP) * self.priced_s(least, few, few)

    def priced_s(self, plan: Plan, planned: str, other: str) -> float:
        """Seconds of a step in the layouts of a plan; 0: not found in time."""
        if (planned, other) not in self.priced:
            before, after = (
                as_asked(self.analysis, dataclasses.replace(self.options, remat=r))
                for r in (planned, other)
            )
            self.priced[planned, other] = _priced_s(plan, before, after, self.cluster)
        return self.priced[planned, other]

    def fewest(self, level: str, least: int, layers: int) -> int | None:
        """The fewest layers with which a plan fits, ``least`` or more; None: none.

        With more layers the plan needs less memory, but for the last layer: its
        activations are needed as soon as they are made.
        """
        top = max(layers - 1, least)
        if not self.tried(f"{top}:{level}"):
            top = layers
            if not self.tried(f"{top}:{level}"):
                return None
        few = self.too_few(top)
        return first_that(lambda n: self.tried(f"{n}:{level}"), least - 1, top, few)

    def too_few(self, layers: int) -> int:
        """With so many layers no plan fits if what is needed falls evenly with layers.

        It falls at most to nothing, so fewer of them cannot be enough.

        Args:
          layers: with which a plan fits.
        """
        need, limit = self.needs["0"], self.cluster.memory_bytes
        return math.floor((1 - limit / need) * layers) if need > limit else 0

    def more(self, level: str, numbers: Sequence[int]) -> None:
        """Tries numbers of layers as long as plans get faster."""
        for number in numbers:
            before, remat = self.best, f"{number}:{level}"
            if remat in self.known and before is not self.plans.get(remat):
                return
            self.tried(remat)
            if self.best is before and before is not self.plans.get(remat):
                return

    def tried(self, remat: str) -> bool:
        """Whether a plan fits; the fastest one is kept."""
        if remat not in self.known:
            self.known[remat] = self.fits(remat)
        return self.known[remat]

    def fits(self, remat: str) -> bool:
        asked = dataclasses.replace(self.options, remat=remat)
        try:
            found = self.plan(self.cluster, asked, False)
        except InfeasibleError as error:
            self.last, self.needs[remat] = remat, error.least_bytes
            return False
        self.plans[remat] = found
        before_s = math.inf if self.best is None else self.best.predicted.step_s
        if found.predicted.step_s < before_s:
            self.best = found
        return True


def may_gain(
    analysis: Analysis, cluster: Cluster, options: PlanOptions, plan: Plan, count: int
) -> bool:
    """Whether a plan with more microbatches may be faster than one with fewer.

    They need less memory. A plan that needs little of it is priced in more of them: in
    its own layouts, for others would have been taken already.

    Args:
      analysis: the step.
      cluster: what is planned for.
      options: those of the plan.
      plan: that with fewer microbatches.
      count: the larger number.
    """
    if not _is_small(plan, cluster) or plan.remat.layers or plan.gradients:
        return True
    # What is chosen of layers is none here; what is asked for stays.
    remat = 0 if options.remat == "auto" else options.remat
    before, after = (
        dataclasses.replace(options, microbatches=k, remat=remat)
        for k in (plan.microbatches, count)
    )
    try:
        steps = as_asked(analysis, before), as_asked(analysis, after)
    except PlanError:
        return True  # the search says why
    same_s = _priced_s(plan, steps[0], steps[0], cluster)
    return _priced_s(plan, *steps, cluster) < same_s


def _is_small(plan: Plan, cluster: Cluster) -> bool:
    """Whether a plan needs so little memory that memory does not hold it back."""
    return plan.predicted.peak_memory_bytes <= _EASY * cluster.memory_bytes


def _priced_s(
    plan: Plan, planned: Analysis, other: Analysis, cluster: Cluster
) -> float:
    """Seconds of another step in the layouts of a plan; 0: not found in time."""
    try:
        return priced(plan, planned, other, _roomy(cluster)).step_s
    except PlanError:
        return 0.0


def first_that(holds: Callable[[int], bool], low: int, high: int, few: int = 0) -> int:
    """The first number for which something holds that holds for all larger ones.

    What is left is bisected. Numbers up to ``few`` are asked for only if it holds for
    the number behind them.

    >>> first_that(lambda n: n >= 5, 0, 12, few=4)
    5

    Args:
      holds: is asked for few numbers between ``low`` and ``high``.
      low: it does not hold for this one.
      high: it holds for this one.
      few: it is not likely to hold for this one.
    """
    begin = min(max(few, low), high - 1)
    first = _bisected(holds, begin, high)
    if first > begin + 1 or begin == low or not holds(begin):
        return first
    return _bisected(holds, low, begin)


def _bisected(holds: Callable[[int], bool], low: int, high: int) -> int:
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _roomy(cluster: Cluster) -> Cluster:
    """A cluster whose devices hold whatever is planned for them."""
    device = dataclasses.replace(cluster.device, memory_bytes=_UNLIMITED)
    return dataclasses.replace(cluster, device=device)


def _numbers(layers: int) -> list[int]:
    """The numbers of layers that are tried: all of few, some of many."""
    apart = -(-layers // _TRIED)
    return sorted({*range(apart, layers + 1, apart), max(1, layers - 1), layers})
