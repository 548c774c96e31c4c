"""Bounds chains of stages by prices on devices.

With ``p[g]`` seconds for each device of group ``g``, and all stages allowed at every
place of the pipeline, the cheapest chain is a shortest path over the layers:

    min over chains of  sum add + sum cross + sum p[g(o)] n(o)   -   sum p[g] devices[g]

No chain whose stages fit beside each other adds up to less, whatever the prices. Two
passes also give the cheapest chain through every single stage.

The lower bound of a pipeline's step as a sum and a maximum over its stages.

For schedules with one chunk, no pipeline takes less than

    sum_i add[i] + sum_i cross[i] + max(max_i peak[i], max_i link[i])

``add`` is what the first microbatch takes through the stage and back, ``cross`` what it
takes between stages. ``peak`` is what the stage has left to do for the other
microbatches once the first comes back; ``link`` is what the link has left to carry.
With ``M`` microbatches, ``f``, ``b`` and ``w`` the seconds of a stage, ``s`` stages
from it to the last and ``i`` before it:

    GPipe   add = f + b + w   peak = (M - 1) (f + b + w)
    1F1B    add = f + b + w   peak = (M - 1) (b + w) + (M - min(s, M)) f
    ZB-H1   add = f + b       peak = (M - 1) b + (M - min(s, M)) f + max(M - 1 - i, 0) w

The first stage adds what it does once a step and, in ZB-H1, its last ``w``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar_solver.stages.entries import Entries, kept_microbatches
from autopar_solver.stages.problem import LayerCosts, StageProblem
from autopar_solver.stages.recompute import RecomputePrices, least_recompute_s
from autopar_solver.stages.schedules.order import Schedule, ScheduleKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """What shortest paths need of a set of stages.

    Attributes:
        layers: the number of layers.
        first: as in `Entries`, sorted.
        end: as in `Entries`.
        link: as in `Entries`.
        taken: ``[entries, groups]``, devices of each group.
        devices: ``[groups]``, how many there are.
        cross: ``[layers + 1, links, links]``.
    """

    layers: int
    first: np.ndarray
    end: np.ndarray
    link: np.ndarray
    taken: np.ndarray
    devices: np.ndarray
    cross: np.ndarray

    @property
    def links(self) -> int:
        """The number of kinds of ends of links."""
        return self.cross.shape[1]


def chain_of(
    entries: Entries, taken: np.ndarray, devices: np.ndarray, cross: np.ndarray
) -> Chain:
    """The chain of some stages.

    Args:
        entries: the stages.
        taken: ``[options, groups]``, devices of each option.
        devices: ``[groups]``, how many there are.
        cross: ``[layers + 1, links, links]``.
    """
    return Chain(
        layers=len(cross) - 1,
        first=entries.first,
        end=entries.end,
        link=entries.link,
        taken=taken[entries.option],
        devices=devices,
        cross=cross,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Paths:
    """Cheapest chains.

    Attributes:
        least: the cheapest of all.
        after: ``[layers + 1, links]``, the cheapest end of a chain behind each layer,
            its first crossing included, by the link that it comes from.
    """

    least: float
    after: np.ndarray


def cheapest(chain: Chain, add: np.ndarray) -> Paths:
    """The cheapest chain, and the cheapest ends, at given costs of stages."""
    after = np.full((chain.layers + 1, chain.links), np.inf)
    after[chain.layers] = 0.0
    begins = np.searchsorted(chain.first, np.arange(chain.layers + 1))
    for layer in range(chain.layers - 1, -1, -1):
        low, high = begins[layer], begins[layer + 1]
        if low == high:
            continue
        costs = add[low:high] + after[chain.end[low:high], chain.link[low:high]]
        if chain.links == 1:
            after[layer] = costs.min() + chain.cross[layer, 0, 0]
            continue
        own = np.full(chain.links, np.inf)
        np.minimum.at(own, chain.link[low:high], costs)
        after[layer] = (chain.cross[layer] + own[None]).min(axis=1)
    return Paths(least=float(after[0].min()), after=after)


def cheapest_before(chain: Chain, add: np.ndarray) -> np.ndarray:
    """``[layers + 1, links]``: the cheapest begin of a chain before each layer.

    The crossing to the layer's own stage is included, by the link that this one has.
    """
    order = np.argsort(chain.end, kind="stable")
    first, link = chain.first[order], chain.link[order]
    begins = np.searchsorted(chain.end[order], np.arange(chain.layers + 2))
    before = np.full((chain.layers + 1, chain.links), np.inf)
    before[0] = 0.0
    for end in range(1, chain.layers):
        low, high = begins[end], begins[end + 1]
        if low == high:
            continue
        costs = add[order[low:high]] + before[first[low:high], link[low:high]]
        own = np.full(chain.links, np.inf)
        np.minimum.at(own, link[low:high], costs)
        before[end] = (chain.cross[end] + own[:, None]).min(axis=0)
    return before


def through(chain: Chain, add: np.ndarray, paths: Paths) -> np.ndarray:
    """By stage, the cheapest chain that has it."""
    before = cheapest_before(chain, add)
    return before[chain.first, chain.link] + add + paths.after[chain.end, chain.link]


def add_prices(chain: Chain, add: np.ndarray, prices: np.ndarray) -> np.ndarray:
    """What stages add, their devices paid for."""
    return add + chain.taken @ prices


def best_prices(
    chain: Chain, add: np.ndarray, start: np.ndarray, rounds: int
) -> tuple[float, np.ndarray]:
    """A bound of chains that fit beside each other, and the prices that give it.

    Prices are multiplied and divided by steps that shrink: first all of them together,
    then, where there are several groups, each on its own.
    """
    best = _chain_bound(chain, add, start)
    prices = start
    if not np.isfinite(best):
        return best, prices
    step = 4.0
    for _ in range(rounds):
        for group in range(-1, len(start) if len(start) > 1 else 0):
            for factor in (step, 1 / step):
                tried = prices.copy()
                tried[slice(None) if group < 0 else group] *= factor
                bound = _chain_bound(chain, add, tried)
                if bound > best:
                    best, prices = bound, tried
                    break
        step = step**0.7
    return best, prices


def _chain_bound(chain: Chain, add: np.ndarray, prices: np.ndarray) -> float:
    least = cheapest(chain, add_prices(chain, add, prices)).least
    return least - float(chain.devices @ prices)


def fits_devices(chain: Chain, allowed: np.ndarray) -> bool:
    """Whether chains of the allowed stages may fit: shares of all groups add up to
    no more than there are groups.
    """
    share = (chain.taken / chain.devices).sum(axis=1)
    free = dataclasses.replace(
        chain, cross=np.where(np.isfinite(chain.cross), 0, np.inf)
    )
    least = cheapest(free, np.where(allowed, share, np.inf)).least
    return least <= len(chain.devices) * (1 + 1e-9)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTerms:
    """What stages add to the bound, at one place in the pipeline.

    Attributes:
        add: what each stage adds; ``inf`` where it does not fit.
        peak: what its own maximum is.
    """

    add: np.ndarray
    peak: np.ndarray


class StagePlace(NamedTuple):
    """Where stages stand in a pipeline; each number, or one for each stage.

    ``later`` counts stages from this one to the last, ``before`` those before it, or
    the most that there can be.
    """

    later: int | np.ndarray
    before: int | np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutTerms:
    """What cuts add to the bound.

    Attributes:
        cross: ``[layers + 1, links, links]``; zero at both ends of the chain.
        link: the same shape, what a link has left to carry.
    """

    cross: np.ndarray
    link: np.ndarray


def crossings_of(
    problem: StageProblem, costs: LayerCosts, schedule: Schedule
) -> CutTerms:
    """The crossings of a chain under a schedule."""
    links = problem.num_links
    both = costs.forward_link_s + costs.backward_link_s
    if schedule.kind is ScheduleKind.GPIPE:
        slowest = both
    else:
        slowest = np.maximum(costs.forward_link_s, costs.backward_link_s)
    count = costs.microbatches
    cross, link = np.zeros((2, problem.num_layers + 1, links, links))
    cross[1:-1] = both + 2 * costs.latency_s
    # Zero times infinity is not a number: where no link is, none is.
    link[1:-1] = np.where(np.isfinite(slowest), slowest, 0.0) * (count - 1)
    link[1:-1][~np.isfinite(slowest)] = np.inf
    return CutTerms(cross=cross, link=link)


def terms_at(
    entries: Entries,
    prices: RecomputePrices,
    schedule: Schedule,
    microbatches: int,
    place: StagePlace,
    kept: Sequence[tuple[int, int]],
) -> StageTerms:
    """What stages add when they stand at one place of the pipeline.

    Args:
        entries: the stages.
        prices: for the bound on what they compute again.
        schedule: one with one chunk.
        microbatches: how many microbatches a step has.
        place: where they stand.
        kept: microbatches that they hold and that are pending, in pairs.
    """
    again = least_recompute_s(entries, prices, kept)
    return StageTerms(
        add=least_add_s(entries, schedule) + again,
        peak=_peak_s(entries, again, schedule, microbatches, place),
    )


def least_add_s(entries: Entries, schedule: Schedule) -> np.ndarray:
    """What stages add that compute nothing again."""
    add, last = entries.forward_s + entries.backward_s, entries.step_s
    if schedule.splits_backward:
        last = last + entries.weight_s
    else:
        add = add + entries.weight_s
    return add + np.where(entries.first == 0, last, 0.0)


def _peak_s(
    entries: Entries,
    again: np.ndarray,
    schedule: Schedule,
    microbatches: int,
    place: StagePlace,
) -> np.ndarray:
    """The maximum's term of each stage."""
    others = microbatches - 1
    peak = others * (entries.backward_s + np.where(np.isfinite(again), again, 0.0))
    if schedule.splits_backward:
        peak = peak + np.maximum(others - place.before, 0) * entries.weight_s
    else:
        peak = peak + others * entries.weight_s
    if schedule.kind is ScheduleKind.GPIPE:
        return peak + others * entries.forward_s
    begun = np.minimum(place.later, microbatches)
    return peak + (microbatches - begun) * entries.forward_s


def loosest_terms(
    entries: Entries,
    prices: RecomputePrices,
    schedule: Schedule,
    microbatches: int,
    layers: int,
    most_stages: int,
) -> StageTerms:
    """Terms that no place in a pipeline of up to ``most_stages`` stages undercuts.

    Memory is counted as at the end of the pipeline, where least is alive. Every stage
    before and behind has a layer, which bounds how many there are.
    """
    kept = kept_microbatches(schedule, microbatches, 1, 1)
    loose = terms_at(entries, prices, schedule, microbatches, StagePlace(1, 0), kept)
    place = StagePlace(
        later=np.minimum(1 + layers - entries.end, most_stages),
        before=np.minimum(entries.first, most_stages - 1),
    )
    nothing = np.zeros(len(entries))
    peak = _peak_s(entries, nothing, schedule, microbatches, place)
    return StageTerms(add=loose.add, peak=peak)


def device_table(problem: StageProblem, options: Sequence[int]) -> np.ndarray:
    """``[options, groups]``: how many devices of each group an option takes."""
    table = np.zeros((len(options), len(problem.groups)), np.int64)
    for row, number in enumerate(options):
        table[row, problem.options[number].group] = problem.options[number].devices
    return table
