"""Searches the pipelines of one schedule and one number of microbatches.

The lower bound of a pipeline's step is a sum over its stages plus a maximum over its
stages and links (`relaxation`). Prices of devices give a lower bound for all chains of
stages, and rule out stages that no better pipeline uses. A dynamic programme then
solves the remaining problem exactly. For every chain that the dynamic programme finds,
the layers to recompute are chosen. The chain's schedule is simulated if the chain may
be better than the incumbent.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from autopar_solver.clock import Clock
from autopar_solver.stages.completion import PipelineIncumbent, complete_pipeline
from autopar_solver.stages.entries import Entries, build_entries, kept_microbatches
from autopar_solver.stages.problem import LayerCosts, Pipeline, StageProblem
from autopar_solver.stages.relaxation import (
    Chain,
    CutTerms,
    RecomputePrices,
    StagePlace,
    StageTerms,
    add_prices,
    best_prices,
    chain_of,
    cheapest,
    cheapest_before,
    choose_recomputed,
    crossings_of,
    device_table,
    fits_devices,
    least_add_s,
    loosest_terms,
    recompute_prices,
    terms_at,
    through,
)
from autopar_solver.stages.schedules.play import Schedule

# Minimises the sum of two terms, of which one is a maximum, by dividing the range in
# which the maximum can lie.
#
# ``least(peak)`` is the least sum over choices whose maximum is at most ``peak``, or a
# lower bound of that sum. ``least`` never grows as ``peak`` grows. A choice with its
# maximum in the interval ``(low, high]`` costs at least ``least(high) + low``. The
# interval with the least bound is halved again and again, until every bound reaches the
# cutoff.


class Answer(NamedTuple):
    """The least sum under a limit of the maximum, and the maximum of a choice.

    ``value`` is the least sum of all choices (here: chains of stages) whose maximum is
    at most the limit. ``peak`` is the maximum of a choice with this sum. If no such
    choice is known, ``peak`` is the limit.
    """

    value: float
    peak: float


class BoundInterval(NamedTuple):
    """A lower bound for choices with a maximum above ``low`` and at most ``high``."""

    bound: float
    low: float
    high: float
    value: float


def cut_intervals(
    least: Callable[[float], Answer],
    low: float,
    high: float,
    cutoff: Callable[[], float],
    most: int,
    beside: int = 0,
) -> tuple[float, list[BoundInterval]]:
    """Computes a lower bound for all choices with a maximum above ``low``.

    Args:
        least: the least sum under a limit of the maximum; ``inf`` if there is no
            choice.
        low: a lower bound of every choice's maximum.
        high: choices with a maximum above ``high`` are ignored.
        cutoff: bounds above the cutoff are ignored. The cutoff may fall over time.
        most: the largest number of limits to try.
        beside: the number of limits that are still tried after a choice is known whose
            cost equals the bound. These limits cannot raise the bound, but may find
            other choices.

    Returns:
        A lower bound of the sum plus the maximum, and the intervals whose bounds are
        below the cutoff. If there is no such interval or choice, the bound is the
        cutoff.
    """
    open_ = list[BoundInterval]()
    closed = math.inf

    def add(answer: Answer, low: float, high: float) -> None:
        """Adds the interval below the maximum of ``answer``.

        ``answer`` is also best under every limit from its own maximum to ``high``, so
        that part of the range needs no further search.
        """
        nonlocal closed
        if answer.value == math.inf:
            return
        if answer.peak < high or answer.peak <= low:
            closed = min(closed, answer.value + max(answer.peak, low))
        top = min(answer.peak, high)
        if top > low:
            interval = BoundInterval(answer.value + low, low, top, answer.value)
            heapq.heappush(open_, interval)

    add(least(high), low, high)
    for _ in range(most):
        if not open_ or open_[0].bound >= cutoff():
            break
        if open_[0].bound >= closed:
            beside -= 1
            if beside < 0:
                break
        bound, low, high, value = heapq.heappop(open_)
        middle = (low + high) / 2
        if not low < middle < high:
            closed = min(closed, bound)
            continue
        heapq.heappush(open_, BoundInterval(value + middle, middle, high, value))
        add(least(middle), low, middle)
    left = [interval for interval in open_ if interval.bound < cutoff()]
    bound = min([closed, cutoff(), *(interval.bound for interval in left)])
    return bound, left


# A dynamic programme finds the cheapest chain of stages that fits on the devices.
#
# ``V[s][l][a][u]`` is the least cost that layers ``l`` to the last add in ``s`` stages.
# The first of these stages uses an option of link ``a``, and ``u`` devices of each
# group are available::
#
#     V[s][l][a][u] = min over stages (l, e, o) of link a
#                     add[s] + min_b (cross[e][a][b] + V[s - 1][e][b][u - n(o)])
#
# ``s`` is part of the state because the memory of a stage depends on the number of
# stages after it. The unit in which devices are counted is the largest number that
# divides the number of devices of every stage.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Budgets:
    """The states of available devices, and the transition of each stage between states.

    Attributes:
        size: the number of states. In the last state all devices are available.
        kind: ``[entries]``; stages that take the same devices have the same kind.
        after: ``[kinds, size]``, the state after a stage of this kind took its devices;
            ``size`` if there are not enough devices.
        range_: ``[entries]``; stages with the same layers and link have the same
            number.
        group: ``[kinds]``, the device group of each kind. The kinds of a group are
            sorted by their number of devices.
    """

    size: int
    kind: np.ndarray
    after: np.ndarray
    range_: np.ndarray
    group: np.ndarray


def num_states(chain: Chain) -> int:
    """Returns the number of states of available devices."""
    return math.prod((_sizes(chain)).tolist())


def budgets_of(chain: Chain) -> Budgets:
    """Counts the devices of each group in the largest possible unit."""
    sizes = _sizes(chain)
    kinds, kind = np.unique(chain.taken // _units(chain), axis=0, return_inverse=True)
    count = int(sizes.prod())
    states = np.stack(np.unravel_index(np.arange(count), sizes), axis=1)
    left = states[None] - kinds[:, None]
    strides = np.append(np.cumprod(sizes[:0:-1])[::-1], 1)
    after = np.where((left >= 0).all(axis=2), left @ strides, count)
    layers = chain.first * (chain.layers + 1) + chain.end
    ranges = np.unique(layers * chain.links + chain.link, return_inverse=True)[1]
    return Budgets(
        size=count,
        kind=kind.reshape(-1),
        after=after,
        range_=ranges.reshape(-1),
        group=kinds.argmax(axis=1),
    )


def _units(chain: Chain) -> np.ndarray:
    return np.maximum(np.gcd.reduce(chain.taken, axis=0), 1)


def _sizes(chain: Chain) -> np.ndarray:
    return chain.devices // _units(chain) + 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tables:
    """The tables of the dynamic programme for one limit of the maximum.

    Attributes:
        chain: the stages.
        budgets: the states of available devices.
        terms: the costs that stages add, by number of stages from the last.
        usable: the stages that are allowed, by number of stages from the last.
        behind: by number of stages from the last, ``[layers + 1, links, size + 1]``:
            the cost of the cheapest way to continue the chain after a layer, including
            the crossing to the next stage.
        values: the cost of the cheapest chain for each number of stages, in ascending
            order of this number.
    """

    chain: Chain
    budgets: Budgets
    terms: list[StageTerms]
    usable: list[np.ndarray]
    behind: list[np.ndarray]
    values: list[float]

    def walk(self, stages: int) -> tuple[int, ...]:
        """Returns the cheapest chain of so many stages, first stage to last."""
        chain, layer, link = self.chain, 0, 0
        state, chosen = self.budgets.size - 1, list[int]()
        for place in range(stages - 1, -1, -1):
            usable = self.usable[place]
            here = usable[chain.first[usable] == layer]
            after = self.budgets.after[self.budgets.kind[here], state]
            rest = self.behind[place][chain.end[here], chain.link[here], after]
            cross = chain.cross[layer, link, chain.link[here]]
            best = int(np.argmin(self.terms[place].add[here] + rest + cross))
            chosen.append(int(here[best]))
            state = int(after[best])
            layer, link = int(chain.end[chosen[-1]]), int(chain.link[chosen[-1]])
        return tuple(chosen)


def solve_tables(
    chain: Chain,
    budgets: Budgets,
    terms: list[StageTerms],
    link: np.ndarray,
    peak: float,
    room: np.ndarray,
) -> Tables:
    """Fills the tables for each number of stages for which terms are given.

    Args:
        chain: the stages.
        budgets: the states of available devices.
        terms: the costs that stages add, by number of stages from the last.
        link: ``[layers + 1, links, links]``, the seconds that each link needs for the
            microbatches after the first.
        peak: the limit of every stage's and every link's maximum.
        room: ``[entries]``, the largest cost that a stage and the chain after it may
            add. Chains that add more are ignored, and their value may be infinite.
    """
    cross = np.where(link <= peak, chain.cross, np.inf)
    chain = dataclasses.replace(chain, cross=cross)
    tables = Tables(
        chain=chain, budgets=budgets, terms=terms, usable=[], behind=[], values=[]
    )
    table = np.full((chain.layers + 1, chain.links, budgets.size + 1), np.inf)
    table[chain.layers, :, : budgets.size] = 0.0
    for at in terms:
        behind = _behind(cross, table)
        usable = np.flatnonzero(np.isfinite(at.add) & (at.peak <= peak))
        least = behind[chain.end[usable], chain.link[usable], budgets.size - 1]
        least = least + at.add[usable]
        usable = usable[np.isfinite(least) & (least <= room[usable])]
        usable = _drop_dominated(budgets, usable, at.add)
        if not len(usable):
            break
        table = _extend(chain, budgets, behind, usable, at.add[usable])
        tables.usable.append(usable)
        tables.behind.append(behind)
        tables.values.append(float(table[0, :, budgets.size - 1].min()))
    return tables


def _drop_dominated(
    budgets: Budgets, usable: np.ndarray, add: np.ndarray
) -> np.ndarray:
    """Drops stages if the same layers on fewer devices do not cost more."""
    if not len(usable):
        return usable
    ranges, kinds = budgets.range_[usable], budgets.kind[usable]
    least = np.full((int(budgets.range_.max()) + 1, len(budgets.group)), np.inf)
    np.minimum.at(least, (ranges, kinds), add[usable])
    for group in np.unique(budgets.group):
        columns = np.flatnonzero(budgets.group == group)
        fewer = np.minimum.accumulate(least[:, columns], axis=1)[:, :-1]
        own = least[:, columns[1:]]
        least[:, columns[1:]] = np.where(own < fewer, own, -np.inf)
    # Dropped entries hold -inf, which equals no cost.
    return usable[add[usable] == least[ranges, kinds]]


def _behind(cross: np.ndarray, table: np.ndarray) -> np.ndarray:
    """``min_b (cross[e][a][b] + V[e][b][u])``."""
    if cross.shape[1] == 1:
        return cross[:, 0, :, None] + table
    best = np.full_like(table, np.inf)
    for link in range(cross.shape[2]):
        np.minimum(best, cross[:, :, link, None] + table[:, link, None], out=best)
    return best


def _extend(
    chain: Chain,
    budgets: Budgets,
    behind: np.ndarray,
    usable: np.ndarray,
    add: np.ndarray,
) -> np.ndarray:
    """Computes ``V[s]`` from ``behind``, which is computed from ``V[s - 1]``."""
    width = budgets.size + 1
    new = np.full_like(behind, np.inf)
    rows = chain.end[usable] * chain.links + chain.link[usable]
    group = chain.first[usable] * chain.links + chain.link[usable]
    kind = budgets.kind[usable]
    flat, target = behind.reshape(-1, width), new.reshape(-1, width)
    order = np.argsort(kind, kind="stable")
    rows, group, kind, add = rows[order], group[order], kind[order], add[order]
    starts = np.flatnonzero(np.diff(kind * len(flat) + group, prepend=-1))
    values = flat[rows]
    values += add[:, None]
    least = np.minimum.reduceat(values, starts, axis=0)
    at, kinds = group[starts], kind[starts]
    bounds = np.searchsorted(kinds, np.arange(len(budgets.after) + 1)).tolist()
    for number, (low, high) in enumerate(itertools.pairwise(bounds)):
        if low < high:
            # All these stages take the same devices, so only the cheapest of them
            # matters.
            own = least[low:high][:, budgets.after[number]]
            here = at[low:high]
            target[here, : budgets.size] = np.minimum(target[here, :-1], own)
    return new


MOST_CELLS = 40_000_000
"""Limit of the cells of all tables together; larger spaces only get a bound."""

LIMITS = 40
"""Number of limits of the maximum under which a space's programme is solved."""

BESIDE = 4
"""Number of further limits after the bound is known, to find other pipelines."""

EACH = 6
"""Number of limits for each number of stages, for schedules that need exact counts."""

CORRECTIONS = 12
"""Number of corrections of costs under one limit before the bound is accepted."""

ROUNDS = 10
"""Number of updates that compute the first prices of devices."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineSpace:
    """The pipelines of one schedule and one number of microbatches.

    Attributes:
        problem: the problem of the pipelines.
        costs: the layers' costs for the number of microbatches.
        schedule: a schedule with one chunk per stage.
        entries: stages that a better pipeline may use.
        prices: prices for the bound on the cost of recomputation.
        chain: the stages as edges of a shortest-path problem over the layers.
        crossings: the costs that cuts between stages add.
        most_stages: the largest number of stages of a pipeline.
        low: a lower bound, for every pipeline, of the maximum in the module's bound
          (`relaxation`).
    """

    problem: StageProblem
    costs: LayerCosts
    schedule: Schedule
    entries: Entries
    prices: RecomputePrices
    chain: Chain
    crossings: CutTerms
    most_stages: int
    low: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bounded:
    """A space of pipelines, with the bounds that prices of devices give.

    Attributes:
        space: stages that are possible below the cutoff.
        bound_s: a lower bound of every pipeline's time.
        loosest: lower bounds of each stage's terms, valid at every position of a
            pipeline.
        intervals: the intervals in which the maximum of a better pipeline can lie.
        price: ``[groups]``, the price of one device, in seconds.
    """

    space: PipelineSpace
    bound_s: float
    loosest: StageTerms
    intervals: list[BoundInterval]
    price: np.ndarray


def most_stages(problem: StageProblem) -> int:
    """The largest number of stages that layers, devices and the problem allow."""
    fewest = [
        min((o.devices for o in problem.options if o.group == number), default=math.inf)
        for number in range(len(problem.groups))
    ]
    room = sum(
        int(group.devices // least)
        for group, least in zip(problem.groups, fewest, strict=True)
    )
    given = problem.num_layers if problem.max_stages is None else problem.max_stages
    return min(problem.num_layers, room, given)


def bound_space(
    problem: StageProblem, costs: LayerCosts, schedule: Schedule, cutoff_s: float
) -> Bounded | None:
    """Bounds a space by prices; None if all its pipelines are above the cutoff."""
    entries = build_entries(problem, costs, cutoff_s)
    stages = most_stages(problem)
    if not len(entries) or not stages:
        return None
    prices = recompute_prices(costs)
    count = costs.microbatches
    layers = problem.num_layers
    loosest = loosest_terms(entries, prices, schedule, count, layers, stages)
    fits = np.isfinite(loosest.add)
    entries = entries.keep(fits)
    loosest = StageTerms(add=loosest.add[fits], peak=loosest.peak[fits])
    crossings = crossings_of(problem, costs, schedule)
    taken = device_table(problem, range(len(problem.options)))
    devices = np.array([group.devices for group in problem.groups])
    chain = chain_of(entries, taken, devices, crossings.cross)
    low = _least_peak(chain, loosest)
    if low == math.inf:
        return None
    space = PipelineSpace(
        problem=problem,
        costs=costs,
        schedule=schedule,
        entries=entries,
        prices=prices,
        chain=chain,
        crossings=crossings,
        most_stages=stages,
        low=low,
    )
    return _priced_space(space, loosest, cutoff_s)


def _least_peak(chain: Chain, terms: StageTerms) -> float:
    """A lower bound of every pipeline's maximum; ``inf`` if no stages fit together."""
    low, high = 0.0, float(terms.peak.max(initial=0.0))
    if not len(terms.peak) or not fits_devices(chain, terms.peak <= high):
        return math.inf
    if fits_devices(chain, terms.peak <= 0):
        return 0.0
    for _ in range(12):
        middle = (low + high) / 2
        if fits_devices(chain, terms.peak <= middle):
            high = middle
        else:
            low = middle
    return low


def _priced_space(
    space: PipelineSpace, loosest: StageTerms, cutoff_s: float
) -> Bounded | None:
    chain, high = space.chain, float(loosest.peak.max())
    total = cheapest(chain, loosest.add).least
    if total == math.inf:
        return None
    guess = total / chain.devices / len(chain.devices)
    first, price = best_prices(chain, loosest.add, guess, ROUNDS)

    def least(peak: float) -> Answer:
        add = np.where(loosest.peak <= peak, loosest.add, np.inf)
        if peak >= high:
            return Answer(first, peak)
        return Answer(best_prices(chain, add, price, 2)[0], peak)

    top = max(high, space.low, float(np.max(_finite(space.crossings.link))))
    bound, intervals = cut_intervals(least, space.low, top, lambda: cutoff_s, 10)
    if bound >= cutoff_s:
        return None
    intervals = intervals or [BoundInterval(bound, space.low, top, first)]
    return Bounded(
        space=space, bound_s=bound, loosest=loosest, intervals=intervals, price=price
    )


def _finite(array: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(array), array, 0.0)


def search_space(
    bounded: Bounded, incumbent: PipelineIncumbent, gap: float, clock: Clock
) -> float:
    """Searches a space for better pipelines; returns a lower bound of their steps.

    Args:
        bounded: the space to search.
        incumbent: receives the pipelines that are found.
        gap: improvements below this share are ignored.
        clock: the time limit. When time runs out, the bound so far is returned.
    """
    cutoff = incumbent.step_s * (1 - gap)
    if bounded.bound_s >= cutoff or clock.left_s <= 0:
        return bounded.bound_s
    space, _ = fixed_space(bounded, cutoff)
    if not len(space.entries):
        return cutoff
    cells = num_states(space.chain) * (space.problem.num_layers + 1)
    cells *= space.chain.links * space.most_stages
    if cells > MOST_CELLS:
        return bounded.bound_s
    programme = _Programme(space, incumbent, gap, clock)
    low = min(interval.low for interval in bounded.intervals)
    return max(bounded.bound_s, min(programme.lower_bound(low), incumbent.step_s))


def fixed_space(bounded: Bounded, cutoff: float) -> tuple[PipelineSpace, StageTerms]:
    """Drops the stages whose cheapest pipeline costs the cutoff or more."""
    space, loosest = bounded.space, bounded.loosest
    if cutoff == math.inf:
        return space, loosest
    devices = float(space.chain.devices @ bounded.price)
    kept = np.zeros(len(space.entries), bool)
    for interval in bounded.intervals:
        allowed = loosest.peak <= interval.high
        add = np.where(allowed, loosest.add, np.inf)
        add = add_prices(space.chain, add, bounded.price)
        paths = cheapest(space.chain, add)
        least = through(space.chain, add, paths) - devices
        kept |= least + np.maximum(interval.low, loosest.peak) < cutoff
    entries = space.entries.keep(kept)
    taken = device_table(space.problem, range(len(space.problem.options)))
    chain = chain_of(entries, taken, space.chain.devices, space.chain.cross)
    terms = StageTerms(add=loosest.add[kept], peak=loosest.peak[kept])
    return dataclasses.replace(space, entries=entries, chain=chain), terms


class _Programme:
    """The dynamic programme of a space.

    The programme begins with lower bounds of stages' costs, and replaces them by exact
    costs where needed.
    """

    def __init__(
        self,
        space: PipelineSpace,
        incumbent: PipelineIncumbent,
        gap: float,
        clock: Clock,
    ) -> None:
        """Prepares the programme without solving it."""
        self.space = space
        self.incumbent = incumbent
        self.gap = gap
        self.clock = clock
        self.budgets: Budgets = budgets_of(space.chain)
        self.least_add = least_add_s(space.entries, space.schedule)
        before = cheapest_before(space.chain, self.least_add)
        before = before[space.entries.first, space.entries.link]
        # Stages that no chain reaches get a price of 0 here; they cannot change the
        # result.
        self.taken = space.low + np.where(np.isfinite(before), before, 0.0)

    def cutoff(self) -> float:
        """Returns the cost at and above which pipelines are ignored."""
        return self.incumbent.step_s * (1 - self.gap)

    def lower_bound(self, low: float) -> float:
        """Returns a lower bound of all pipelines of the space."""
        most = self.space.most_stages
        places = _Places(self, None)
        bound = places.bound_at(range(1, most + 1), low)
        if not self.space.schedule.splits_backward or bound >= self.cutoff():
            return bound
        # Under ZB-H1 the memory for activations depends on the total number of stages.
        least = self.cutoff()
        known = [
            (places.known_bound(count, low), count) for count in range(1, most + 1)
        ]
        for value, stages in sorted(known):
            if value >= min(least, self.cutoff()):
                break
            exact = _Places(self, stages)
            least = min(least, exact.bound_at(range(stages, stages + 1), low))
        return max(bound, least)


class _Places:
    """The costs that stages add at each position of the pipeline."""

    def __init__(self, programme: _Programme, stages: int | None) -> None:
        """Prepares terms for ``stages`` stages; None for bounds for any number."""
        self.programme = programme
        self.space = programme.space
        self.stages = stages
        self.terms = list[StageTerms]()
        self.solved = list[tuple[float, list[float]]]()
        most = self.space.most_stages if stages is None else stages
        for later in range(1, most + 1):
            self.terms.append(self._terms(later))

    def _later_kept(self, later: int) -> list[tuple[int, int]]:
        stages = later if self.stages is None else self.stages
        count = self.space.costs.microbatches
        return kept_microbatches(self.space.schedule, count, later, stages)

    def _terms(self, later: int) -> StageTerms:
        space, count = self.space, self.space.costs.microbatches
        before: int | np.ndarray
        if self.stages is None:
            before = np.minimum(space.entries.first, space.most_stages - later)
        else:
            before = self.stages - later
        if later > count and not space.schedule.splits_backward:
            return self.terms[-1]
        place, kept = StagePlace(later, before), self._later_kept(later)
        return terms_at(space.entries, space.prices, space.schedule, count, place, kept)

    def bound_at(self, counts: range, low: float) -> float:
        """A lower bound of the pipelines whose number of stages is in ``counts``."""
        link = self.space.crossings.link
        high = max(low, float(link[np.isfinite(link)].max()))
        high = max([high, *(float(at.peak.max()) for at in self.terms)])
        high = min(high, self.programme.cutoff())
        limits, beside = (LIMITS, BESIDE) if self.stages is None else (EACH, 0)
        cutoff = self.programme.cutoff
        return cut_intervals(
            lambda x: self._least(counts, x), low, high, cutoff, limits, beside
        )[0]

    def known_bound(self, stages: int, low: float) -> float:
        """Returns a lower bound for ``stages`` stages, from the limits tried so far."""
        bound = math.inf
        for peak, values in sorted(self.solved):
            if stages <= len(values):
                bound = min(bound, values[stages - 1] + low)
            low = peak
        return bound

    def _tables(self, peak: float) -> Tables:
        """Fills the tables for one limit of the maximum."""
        space, budgets = self.space, self.programme.budgets
        # The factor keeps pipelines whose cost rounding would raise just above the
        # cutoff.
        room = self.programme.cutoff() * (1 + 1e-9) - self.programme.taken
        tables = solve_tables(
            space.chain, budgets, self.terms, space.crossings.link, peak, room
        )
        self.solved.append((peak, tables.values))
        return tables

    def _least(self, counts: range, peak: float) -> Answer:
        """Solves the programme under one limit, with exact costs of the best chain.

        The costs of stages begin as lower bounds. The programme is solved again until
        the best chain has no stage whose cost is only a bound.
        """
        answer = Answer(math.inf, peak)
        for _ in range(CORRECTIONS):
            values = (tables := self._tables(peak)).values
            ranked = sorted(
                (value, count)
                for count, value in enumerate(values, start=1)
                if count in counts and value < math.inf
            )
            answer = Answer(ranked[0][0] if ranked else math.inf, peak)
            if not ranked or self.programme.clock.left_s <= 0:
                return answer
            changed = False
            for value, count in ranked[:3]:
                if value < self.programme.cutoff():
                    changed |= self._try(tables.walk(count))
            if not changed:
                value, count = ranked[0]
                return Answer(value, self._peak(tables.walk(count)))
        return answer

    def _peak(self, chosen: tuple[int, ...]) -> float:
        """Returns the maximum over the stages and links of a chain."""
        entries, link = self.space.entries, self.space.crossings.link
        peaks = [
            float(terms.peak[entry])
            for terms, entry in zip(self.terms, reversed(chosen), strict=False)
        ]
        links = [
            float(link[entries.end[a], entries.link[a], entries.link[b]])
            for a, b in itertools.pairwise(chosen)
        ]
        return max([*peaks, *links])

    def _try(self, chosen: tuple[int, ...]) -> bool:
        """Offers a chain to the incumbent.

        Returns whether a stage costs more than its bound.
        """
        space, entries = self.space, self.space.entries
        changed = False
        for later, entry in enumerate(reversed(chosen), start=1):
            changed |= self._correct(later, entry)
        pipeline = complete_pipeline(
            space.problem,
            Pipeline(
                microbatches=space.costs.microbatches,
                schedule=space.schedule,
                options=tuple(int(entries.option[entry]) for entry in chosen),
                cuts=(0, *(int(entries.end[entry]) for entry in chosen)),
            ),
        )
        if pipeline is not None:
            self.programme.incumbent.offer(pipeline)
        return changed

    def _correct(self, later: int, entry: int) -> bool:
        """Replaces a stage's bound by its exact cost; returns whether the cost rose."""
        space, entries = self.space, self.space.entries
        resident = float(entries.resident_bytes[entry])
        pending = float(entries.pending_bytes[entry])
        found = choose_recomputed(
            space.problem,
            space.costs,
            range(int(entries.first[entry]), int(entries.end[entry])),
            int(entries.option[entry]),
            [
                (resident + wait * pending, held)
                for held, wait in self._later_kept(later)
            ],
        )
        terms, least = self.terms[later - 1], float(self.programme.least_add[entry])
        add = math.inf if found is None else least + found.least_s
        more = add - float(terms.add[entry])
        if more <= 1e-9 * abs(least):
            return False
        terms.add[entry] = add
        if found is not None:
            terms.peak[entry] += (space.costs.microbatches - 1) * more
        return True
