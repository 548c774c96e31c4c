"""Searches the pipelines of one schedule and one number of microbatches.

Bounds come from `terms`: a sum and a maximum. Prices on devices bound all chains
(`relaxation`), and remove stages that no better pipeline has. The dynamic programme
(`dynamic`) is exact on what is left. Every chain that it finds is given the layers it
must compute again, and is played if it may be better than the incumbent.
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
from autopar_solver.stages.problem import (
    LayerCosts,
    Pipeline,
    StageProblem,
)
from autopar_solver.stages.recompute import (
    RecomputePrices,
    choose_recomputed,
    recompute_prices,
)
from autopar_solver.stages.relaxation import (
    Chain,
    CutTerms,
    StagePlace,
    StageTerms,
    add_prices,
    best_prices,
    chain_of,
    cheapest,
    cheapest_before,
    crossings_of,
    device_table,
    fits_devices,
    least_add_s,
    loosest_terms,
    terms_at,
    through,
)
from autopar_solver.stages.schedules.order import Schedule

# Minimises a sum and a maximum together by cutting the maximum's range.
#
# ``least(peak)`` is the least sum over choices whose maximum is at most ``peak``, or a
# bound of it; it falls as ``peak`` grows. Choices with their maximum in an interval
# ``(low, high]`` come to no less than ``least(high) + low``. The interval of least
# bound is halved until no bound is left below what is known.


class Answer(NamedTuple):
    """The least sum under a limit, and the maximum of a choice that has it.

    Without such a choice, ``peak`` is the limit itself.
    """

    value: float
    peak: float


class BoundInterval(NamedTuple):
    """Choices whose maximum is above ``low`` and at most ``high`` are bounded."""

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
    """Bounds all choices with a maximum above ``low``.

    Args:
        least: the least sum under a limit; ``inf`` if there is no choice.
        low: every choice's maximum is at least this.
        high: choices with a larger one do not matter.
        cutoff: bounds above it do not matter; it may fall.
        most: how many limits to try.
        beside: how many of them once a choice is known that has the bound: they no
            longer raise it, but may come upon other choices.

    Returns:
        A bound of the sum and the maximum, and the intervals that are still below the
        cutoff. The bound is at most the cutoff, where nothing is below it.
    """
    open_ = list[BoundInterval]()
    closed = math.inf

    def add(answer: Answer, low: float, high: float) -> None:
        """Choices in ``[answer.peak, high]`` are done; those below are open."""
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


# The dynamic programme: the cheapest chain of stages within the devices.
#
# ``V[s][l][a][u]`` is the least that layers ``l`` to the last add in ``s`` stages, the
# first of them on an option of link ``a``, with ``u`` devices of each group to spend:
#
#     V[s][l][a][u] = min over stages (l, e, o) of link a
#                     add[s] + min_b (cross[e][a][b] + V[s - 1][e][b][u - n(o)])
#
# ``s`` is part of the state because the memory of a stage depends on how many stages
# follow. Devices are counted in the largest unit that all stages share.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Budgets:
    """The states of devices, and where each stage leads from each of them.

    Attributes:
        size: the number of states; the last is all devices.
        kind: ``[entries]``, stages that take the same devices share one.
        after: ``[kinds, size]``, the state after a stage took its devices; ``size``
            where there are not enough.
        range_: ``[entries]``, stages of the same layers and link share one.
        group: ``[kinds]``, which device group the kinds take; kinds of a group are in
            the order of their devices.
    """

    size: int
    kind: np.ndarray
    after: np.ndarray
    range_: np.ndarray
    group: np.ndarray


def num_states(chain: Chain) -> int:
    """How many states of devices there are."""
    return math.prod((_sizes(chain)).tolist())


def budgets_of(chain: Chain) -> Budgets:
    """Counts devices in the largest unit of each group."""
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
    """The programme's tables for one limit of the maximum.

    Attributes:
        chain: the stages.
        budgets: the states of their devices.
        terms: what stages add, by number of stages from the last.
        usable: by number of stages from the last, which stages are allowed there.
        behind: the same, ``[layers + 1, links, size + 1]``: the cheapest end of the
            chain behind a layer, its first crossing included.
        values: by number of stages, fewest first, what the cheapest chain adds.
    """

    chain: Chain
    budgets: Budgets
    terms: list[StageTerms]
    usable: list[np.ndarray]
    behind: list[np.ndarray]
    values: list[float]

    def walk(self, stages: int) -> tuple[int, ...]:
        """The stages of the cheapest chain of so many, first to last."""
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
    """Fills the tables, for all numbers of stages there are terms for.

    Args:
        chain: the stages.
        budgets: the states of their devices.
        terms: by number of stages from the last, what stages add there.
        link: ``[layers + 1, links, links]``, what links have left to carry.
        peak: no stage's and no link's maximum may be more.
        room: ``[entries]``, what a stage and the chain behind it may add; chains that
            add more do not matter, and their value may be infinite.
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
    """Without stages that add no less than one of the same layers on fewer devices."""
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
    # Nothing equals what was marked as dominated.
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
    """``V[s]`` from what is behind, which is made of ``V[s - 1]``."""
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
            # All of them take the same devices: once for the least is enough.
            own = least[low:high][:, budgets.after[number]]
            here = at[low:high]
            target[here, : budgets.size] = np.minimum(target[here, :-1], own)
    return new


MOST_CELLS = 40_000_000
"""Cells of all tables together; larger programmes are left to the bound."""

LIMITS = 40
"""How many limits of the maximum the programme is solved for, of each space."""

BESIDE = 4
"""How many of them when the bound is known, to come upon other pipelines."""

EACH = 6
"""How many limits for each number of stages, where a schedule needs that."""

CORRECTIONS = 12
"""How often costs are made exact under one limit before the bound is taken."""

ROUNDS = 10
"""How often the first prices on devices are changed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineSpace:
    """The pipelines of one schedule and one number of microbatches.

    Attributes:
        problem: whose pipelines they are.
        costs: for the number of microbatches.
        schedule: one with one chunk.
        entries: stages that a better pipeline may have.
        prices: for the bound on what they compute again.
        chain: the stages as shortest paths see them.
        crossings: what cuts add.
        most_stages: the most stages of a pipeline.
        low: no pipeline's maximum is below.
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
    """A space, and what prices on devices say of it.

    Attributes:
        space: stages that are possible below the cutoff.
        bound_s: no pipeline takes less.
        loosest: terms that no place in the pipeline undercuts.
        intervals: where the maximum of a better pipeline lies.
        price: ``[groups]``, seconds per device.
    """

    space: PipelineSpace
    bound_s: float
    loosest: StageTerms
    intervals: list[BoundInterval]
    price: np.ndarray


def most_stages(problem: StageProblem) -> int:
    """The most stages that layers, devices and the problem allow."""
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
    """Bounds a space by prices; None if nothing in it can be below the cutoff."""
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
    """A bound of every pipeline's maximum; ``inf`` if no stages fit together."""
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
    """Looks for better pipelines; returns a bound of all of them.

    Args:
        bounded: where to look.
        incumbent: gets the pipelines that are found.
        gap: what is better by less than this share does not matter.
        clock: when to stop; what is known then is the bound.
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
    """Without stages whose cheapest pipeline is not below the cutoff."""
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
    """The dynamic programme of a space, with costs that grow exact where it matters."""

    def __init__(
        self,
        space: PipelineSpace,
        incumbent: PipelineIncumbent,
        gap: float,
        clock: Clock,
    ) -> None:
        """Nothing is solved yet."""
        self.space = space
        self.incumbent = incumbent
        self.gap = gap
        self.clock = clock
        self.budgets: Budgets = budgets_of(space.chain)
        self.least_add = least_add_s(space.entries, space.schedule)
        before = cheapest_before(space.chain, self.least_add)
        before = before[space.entries.first, space.entries.link]
        # Stages that no chain reaches do no harm.
        self.taken = space.low + np.where(np.isfinite(before), before, 0.0)

    def cutoff(self) -> float:
        """What is above it does not matter."""
        return self.incumbent.step_s * (1 - self.gap)

    def lower_bound(self, low: float) -> float:
        """A bound of all pipelines of the space."""
        most = self.space.most_stages
        places = _Places(self, None)
        bound = places.bound_at(range(1, most + 1), low)
        if not self.space.schedule.splits_backward or bound >= self.cutoff():
            return bound
        # What ZB-H1 keeps, and when, depends on the number of all stages.
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
    """What stages add at each place of the pipeline."""

    def __init__(self, programme: _Programme, stages: int | None) -> None:
        """Of pipelines of so many stages; None for all, with terms of none undercut."""
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
        """Bounds pipelines of some numbers of stages."""
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
        """What the limits that were tried say of pipelines of so many stages."""
        bound = math.inf
        for peak, values in sorted(self.solved):
            if stages <= len(values):
                bound = min(bound, values[stages - 1] + low)
            low = peak
        return bound

    def _tables(self, peak: float) -> Tables:
        """The programme for one limit of the maximum."""
        space, budgets = self.space, self.programme.budgets
        # Without the rounding, what is just at the cutoff could be lost.
        room = self.programme.cutoff() * (1 + 1e-9) - self.programme.taken
        tables = solve_tables(
            space.chain, budgets, self.terms, space.crossings.link, peak, room
        )
        self.solved.append((peak, tables.values))
        return tables

    def _least(self, counts: range, peak: float) -> Answer:
        """Solves for a limit until the best chain's costs are exact."""
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
        """The maximum of a chain."""
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
        """Offers a chain; whether a stage turned out to cost more than its bound."""
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
        """Replaces what a stage adds by the exact number; whether that is more."""
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
