"""Searches the pipelines of one schedule and one number of microbatches.

Bounds come from `terms`: a sum and a maximum. Prices on devices bound all chains
(`relaxation`), and remove stages that no better pipeline has. The dynamic programme
(`dynamic`) is exact on what is left. Every chain that it finds is given the layers it
must compute again, and is played if it may be better than the incumbent.
"""

import dataclasses
import itertools
import math

import numpy as np

from autopar_solver.clock import Clock
from autopar_solver.stages.dynamic import (
    Budgets,
    Tables,
    budgets_of,
    num_states,
    solve_tables,
)
from autopar_solver.stages.entries import Entries, build_entries, kept_microbatches
from autopar_solver.stages.incumbent import Incumbent
from autopar_solver.stages.intervals import Answer, Interval, cut_intervals
from autopar_solver.stages.problem import LayerCosts, StageProblem
from autopar_solver.stages.recompute import (
    RecomputePrices,
    choose_recomputed,
    recompute_prices,
)
from autopar_solver.stages.relaxation import (
    Chain,
    best_prices,
    chain_of,
    cheapest,
    fits_devices,
    priced,
    through,
)
from autopar_solver.stages.schedules.tasks import Schedule
from autopar_solver.stages.solution import Pipeline
from autopar_solver.stages.terms import (
    Crossings,
    Terms,
    crossings_of,
    device_table,
    loosest_terms,
    terms_at,
)

MOST_CELLS = 40_000_000
"""Cells of all tables together; larger programmes are left to the bound."""

ROUNDS = 10
"""How often the first prices on devices are changed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Space:
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
    crossings: Crossings
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

    space: Space
    bound_s: float
    loosest: Terms
    intervals: list[Interval]
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
    loosest = loosest_terms(entries, prices, schedule, count, stages)
    fits = np.isfinite(loosest.add)
    entries = entries.keep(fits)
    loosest = Terms(add=loosest.add[fits], peak=loosest.peak[fits])
    crossings = crossings_of(problem, costs, schedule)
    taken = device_table(problem, range(len(problem.options)))
    devices = np.array([group.devices for group in problem.groups])
    chain = chain_of(entries, taken, devices, crossings.cross)
    low = _least_peak(chain, loosest)
    if low == math.inf:
        return None
    space = Space(
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


def _least_peak(chain: Chain, terms: Terms) -> float:
    """A bound of every pipeline's maximum; ``inf`` if no stages fit beside each other."""
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


def _priced_space(space: Space, loosest: Terms, cutoff_s: float) -> Bounded | None:
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
    intervals = intervals or [Interval(bound, space.low, top, first)]
    return Bounded(
        space=space, bound_s=bound, loosest=loosest, intervals=intervals, price=price
    )


def _finite(array: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(array), array, 0.0)


def search_space(
    bounded: Bounded, incumbent: Incumbent, gap: float, clock: Clock
) -> float:
    """Looks for better pipelines; returns a bound of all of them.

    Args:
        bounded: where to look.
        incumbent: gets the pipelines that are found.
        gap: what is better by less than this share does not matter.
        clock: when to stop; what is known then is the bound.
    """
    cutoff = incumbent.step_s * (1 - gap)
    if bounded.bound_s >= cutoff:
        return bounded.bound_s
    space = _fixed(bounded, cutoff)
    if not len(space.entries):
        return cutoff
    cells = num_states(space.chain) * (space.problem.num_layers + 1)
    cells *= space.chain.links * space.most_stages
    if cells > MOST_CELLS:
        return bounded.bound_s
    programme = _Programme(space, incumbent, gap, clock)
    low = min(interval.low for interval in bounded.intervals)
    return max(bounded.bound_s, min(programme.bound(low), incumbent.step_s))


def _fixed(bounded: Bounded, cutoff: float) -> Space:
    """Without stages whose cheapest pipeline is not below the cutoff."""
    space, loosest = bounded.space, bounded.loosest
    if cutoff == math.inf:
        return space
    devices = float(space.chain.devices @ bounded.price)
    kept = np.zeros(len(space.entries), bool)
    for interval in bounded.intervals:
        allowed = loosest.peak <= interval.high
        add = np.where(allowed, loosest.add, np.inf)
        add = priced(space.chain, add, bounded.price)
        paths = cheapest(space.chain, add)
        least = through(space.chain, add, paths) - devices
        kept |= least + np.maximum(interval.low, loosest.peak) < cutoff
    entries = space.entries.keep(kept)
    taken = device_table(space.problem, range(len(space.problem.options)))
    chain = chain_of(entries, taken, space.chain.devices, space.chain.cross)
    return dataclasses.replace(space, entries=entries, chain=chain)


class _Programme:
    """The dynamic programme of a space, with costs that grow exact where it matters."""

    def __init__(
        self, space: Space, incumbent: Incumbent, gap: float, clock: Clock
    ) -> None:
        """Nothing is solved yet."""
        self.space = space
        self.incumbent = incumbent
        self.gap = gap
        self.clock = clock
        self.budgets: Budgets = budgets_of(space.chain)
        self.exact: dict[tuple[int, tuple[tuple[int, int], ...]], tuple[int, ...]] = {}

    def cutoff(self) -> float:
        """What is above it does not matter."""
        return self.incumbent.step_s * (1 - self.gap)

    def bound(self, low: float) -> float:
        """A bound of all pipelines of the space."""
        space = self.space
        if not space.schedule.splits_backward:
            terms = self._terms(space.most_stages, None)
            return self._cut(terms, range(1, space.most_stages + 1), low)
        bounds = [self.cutoff()]
        for stages in range(1, space.most_stages + 1):
            terms = self._terms(stages, stages)
            bounds.append(self._cut(terms, [stages], low))
        return min(bounds)

    def _terms(self, count: int, stages: int | None) -> list[Terms]:
        """By number of stages from the last, with arrays that may be corrected."""
        space, terms = self.space, list[Terms]()
        for later in range(1, count + 1):
            same = later > space.costs.microbatches and stages is None
            if same:
                terms.append(terms[-1])
                continue
            terms.append(
                terms_at(
                    space.entries,
                    space.prices,
                    space.schedule,
                    space.costs.microbatches,
                    later,
                    count if stages is None else stages,
                )
            )
        return terms

    def _cut(
        self, terms: list[Terms], counts: "range | list[int]", low: float
    ) -> float:
        """Bounds pipelines of some numbers of stages."""
        link = self.space.crossings.link
        high = max(low, float(link[np.isfinite(link)].max()))
        high = max([high, *(float(at.peak.max()) for at in terms)])
        high = min(high, self.cutoff())

        def least(peak: float) -> Answer:
            return self._least(terms, counts, peak)

        return cut_intervals(least, low, high, self.cutoff, 40)[0]

    def _least(
        self, terms: list[Terms], counts: "range | list[int]", peak: float
    ) -> Answer:
        """Solves for a limit until the best chain's costs are exact."""
        while True:
            tables = solve_tables(
                self.space.chain, self.budgets, terms, self.space.crossings.link, peak
            )
            ranked = sorted(
                (tables.values[count - 1], count)
                for count in counts
                if count <= len(tables.values) and tables.values[count - 1] < math.inf
            )
            if not ranked or self.clock.left <= 0:
                return Answer(ranked[0][0] if ranked else math.inf, peak)
            changed = False
            for place, (value, count) in enumerate(ranked[:3]):
                if value < self.cutoff() and self._try(tables, count) and not place:
                    changed = True
            if not changed:
                value, count = ranked[0]
                return Answer(value, self._peak(tables, count))

    def _peak(self, tables: Tables, count: int) -> float:
        """The maximum of the cheapest chain of so many stages."""
        entries, link = self.space.entries, self.space.crossings.link
        chosen = tables.walk(count)
        peaks = [
            float(tables.terms[count - 1 - place].peak[entry])
            for place, entry in enumerate(chosen)
        ]
        ends = itertools.pairwise(chosen)
        links = [
            float(link[entries.end[a], entries.link[a], entries.link[b]])
            for a, b in ends
        ]
        return max([*peaks, *links])

    def _try(self, tables: Tables, count: int) -> bool:
        """Offers a chain; whether a stage turned out to cost more than its bound."""
        space, chosen = self.space, tables.walk(count)
        again, changed, fits = list[int](), False, True
        for place, entry in enumerate(chosen):
            later = count - place
            kept = kept_microbatches(
                space.schedule, space.costs.microbatches, later, count
            )
            terms = tables.terms[later - 1]
            layers, more = self._recomputed(terms, entry, kept)
            changed |= more
            fits &= layers is not None
            again.extend(layers or ())
        if fits:
            options = tuple(int(space.entries.option[entry]) for entry in chosen)
            ends = (int(space.entries.end[entry]) for entry in chosen)
            self.incumbent.offer(
                Pipeline(
                    microbatches=space.costs.microbatches,
                    schedule=space.schedule,
                    options=options,
                    cuts=(0, *ends),
                    recomputed=tuple(again),
                )
            )
        return changed

    def _recomputed(
        self, terms: Terms, entry: int, kept: list[tuple[int, int]]
    ) -> tuple[tuple[int, ...] | None, bool]:
        """The layers of a stage that compute again, and whether that was unknown."""
        space, entries = self.space, self.space.entries
        pending = float(entries.pending_bytes[entry])
        resident = float(entries.resident_bytes[entry])
        found = choose_recomputed(
            space.problem,
            space.costs,
            range(int(entries.first[entry]), int(entries.end[entry])),
            int(entries.option[entry]),
            [(resident + waiting * pending, held) for held, waiting in kept],
        )
        add = float(entries.forward_s[entry] + entries.backward_s[entry])
        if not space.schedule.splits_backward or entries.first[entry] == 0:
            add += float(entries.weight_s[entry])
        if entries.first[entry] == 0:
            add += float(entries.step_s[entry])
        least = math.inf if found is None else add + found.least_s
        more = least - float(terms.add[entry])
        changed = more > 1e-9 * abs(add)
        if changed:
            terms.add[entry] = least
            if least < math.inf:
                terms.peak[entry] += (space.costs.microbatches - 1) * more
        return None if found is None else found.layers, changed
