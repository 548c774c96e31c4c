"""Computes lower bounds of chains of stages, with a price for each device.

A *chain* is a sequence of stages that covers all layers. Let each device of group ``g``
cost ``p[g]`` seconds, and let every stage be allowed at every position of the pipeline.
The cheapest chain is then a shortest path over the layers:

    min over chains of  sum add + sum cross + sum p[g(o)] n(o)   -   sum p[g] devices[g]

No chain whose stages fit on the devices together costs less, for any prices. A forward
and a backward pass over the layers also give the cheapest chain through every single
stage.

The lower bound of the time of a pipeline's step is a sum plus a maximum over its
stages.

For schedules with one chunk per stage, no pipeline takes less time than

    sum_i add[i] + sum_i cross[i] + max(max_i peak[i], max_i link[i])

All are in seconds. ``add`` is the time of the first microbatch's forward and backward
pass in the stage. ``cross`` is the time for which the first microbatch is sent between
two stages, forward and back. ``peak`` is the stage's work for the other microbatches
that remains after the first microbatch's backward pass. ``link`` is the time for which
the link still has to send the other microbatches. Let ``M`` be the number of
microbatches, and let a stage take ``f`` seconds for a forward pass, ``b`` for gradients
of inputs and ``w`` for gradients of weights. Let ``s`` be the number of stages from
this stage to the last, both included, and ``i`` the number of stages before it. Then:

    GPipe   add = f + b + w   peak = (M - 1) (f + b + w)
    1F1B    add = f + b + w   peak = (M - 1) (b + w) + (M - min(s, M)) f
    ZB-H1   add = f + b       peak = (M - 1) b + (M - min(s, M)) f + max(M - 1 - i, 0) w

The first stage also adds its work that runs once per step and, in ZB-H1, its last
``w``.
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
    """The data of a set of stages that shortest paths need.

    Attributes:
        layers: the number of layers.
        first: as in `Entries`, sorted.
        end: as in `Entries`.
        link: as in `Entries`.
        taken: ``[entries, groups]``, devices of each group.
        devices: ``[groups]``, the number of devices of each group.
        cross: ``[layers + 1, links, links]``, the seconds that a cut between two stages
          adds, by the links (`Entries.link`) of the stages before and after it.
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
        """The number of kinds of options that the tables of links distinguish."""
        return self.cross.shape[1]


def chain_of(
    entries: Entries, taken: np.ndarray, devices: np.ndarray, cross: np.ndarray
) -> Chain:
    """Builds the chain of a set of stages.

    Args:
        entries: the stages.
        taken: ``[options, groups]``, devices of each option.
        devices: ``[groups]``, the number of devices of each group.
        cross: ``[layers + 1, links, links]``, the seconds that a cut between two stages
          adds.
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
    """The costs of cheapest chains.

    Attributes:
        least: the cost of the cheapest chain.
        after: ``[layers + 1, links]``, the cost of the cheapest way to continue a chain
            after each layer, for each link of the stage that ends there. The crossing
            to the next stage is included.
    """

    least: float
    after: np.ndarray


def cheapest(chain: Chain, add: np.ndarray) -> Paths:
    """Computes the cheapest chain, and the cheapest continuations after each layer.

    ``add`` has the cost of each stage in seconds.
    """
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
    """``[layers + 1, links]``: the cost of the cheapest chain before each layer.

    The crossing to the next stage is included. The second index is the link of the next
    stage.
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
    """For each stage, the cost of the cheapest chain that contains the stage."""
    before = cheapest_before(chain, add)
    return before[chain.first, chain.link] + add + paths.after[chain.end, chain.link]


def add_prices(chain: Chain, add: np.ndarray, prices: np.ndarray) -> np.ndarray:
    """The costs of stages, including the prices of their devices."""
    return add + chain.taken @ prices


def best_prices(
    chain: Chain, add: np.ndarray, start: np.ndarray, rounds: int
) -> tuple[float, np.ndarray]:
    """A lower bound of all chains that fit on the devices, and the prices that give it.

    Prices are multiplied and divided by factors that come closer to 1 from round to
    round. Each round first changes all prices together. If there are several groups,
    each round then changes the price of each group separately.
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
    """Whether chains of the allowed stages may fit on the devices.

    Each stage takes a share of the devices of its group, 0 to 1. For a chain that fits,
    the shares of all stages add up to at most the number of groups.
    """
    share = (chain.taken / chain.devices).sum(axis=1)
    free = dataclasses.replace(
        chain, cross=np.where(np.isfinite(chain.cross), 0, np.inf)
    )
    least = cheapest(free, np.where(allowed, share, np.inf)).least
    return least <= len(chain.devices) * (1 + 1e-9)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTerms:
    """The terms of stages in the bound, for one position in the pipeline.

    Attributes:
        add: the seconds that each stage adds to the bound's sum; ``inf`` if the stage
          does not fit in memory.
        peak: the seconds that each stage has in the bound's maximum.
    """

    add: np.ndarray
    peak: np.ndarray


class StagePlace(NamedTuple):
    """The position of stages in a pipeline: one number, or one for each stage.

    ``later`` is the number of stages from this stage to the last. ``before`` is the
    number of stages before this stage, or an upper limit of that number.
    """

    later: int | np.ndarray
    before: int | np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutTerms:
    """The terms of cuts in the bound.

    Attributes:
        cross: ``[layers + 1, links, links]``, the seconds that a cut adds to the
            bound's sum; zero at both ends of the chain.
        link: the same shape, the seconds that a link has in the bound's maximum.
    """

    cross: np.ndarray
    link: np.ndarray


def crossings_of(
    problem: StageProblem, costs: LayerCosts, schedule: Schedule
) -> CutTerms:
    """The terms of all cuts between two layers under a schedule."""
    links = problem.num_links
    both = costs.forward_link_s + costs.backward_link_s
    if schedule.kind is ScheduleKind.GPIPE:
        slowest = both
    else:
        slowest = np.maximum(costs.forward_link_s, costs.backward_link_s)
    count = costs.microbatches
    cross, link = np.zeros((2, problem.num_layers + 1, links, links))
    cross[1:-1] = both + 2 * costs.latency_s
    # Zero times infinity is not a number, so missing links are set separately.
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
    """The terms of stages at one position of the pipeline.

    Args:
        entries: the stages.
        prices: the prices for the bound on the time of recomputation.
        schedule: a schedule with one chunk per stage.
        microbatches: the number of microbatches of a step.
        place: the position of the stages.
        kept: pairs of two numbers: of microbatches that a stage holds, and of
            microbatches that are pending
            (`autopar_solver.stages.schedules.play.Alive`).
    """
    again = least_recompute_s(entries, prices, kept)
    return StageTerms(
        add=least_add_s(entries, schedule) + again,
        peak=_peak_s(entries, again, schedule, microbatches, place),
    )


def least_add_s(entries: Entries, schedule: Schedule) -> np.ndarray:
    """The seconds that stages add to the bound's sum, without recomputation."""
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
    """The seconds that each stage has in the bound's maximum."""
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
    """Lower bounds of the terms at all positions of pipelines of up to ``most_stages``.

    Memory is counted for the last stage, which holds the fewest microbatches. Every
    stage before and after a stage has at least one layer, so the number of layers
    limits the number of stages on each side.
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
    """``[options, groups]``: the number of devices that an option takes of a group."""
    table = np.zeros((len(options), len(problem.groups)), np.int64)
    for row, number in enumerate(options):
        table[row, problem.options[number].group] = problem.options[number].devices
    return table
