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

For the first stage, ``add`` also includes the work that the stage does once per step
and, in ZB-H1, the stage's last ``w``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar_solver.stages.entries import Entries, can_recompute, kept_microbatches
from autopar_solver.stages.problem import LayerCosts, StageProblem
from autopar_solver.stages.schedules.play import Schedule, ScheduleKind

# Chooses the layers of a stage that recompute their activations.
#
# Let ``v[j]`` be the bytes that recomputing layer ``j`` saves for each microbatch that
# the stage holds, and ``r[j]`` the seconds that recomputing it takes. If a stage
# exceeds its memory by ``need`` bytes for each microbatch that it holds, its
# recomputation takes at least
#
#     minimise sum_(j in R) r[j]   subject to   sum_(j in R) v[j] >= need
#
# In addition, every layer in ``R`` must fit while it runs. If layers could be
# recomputed in part, linear duality would give the least seconds. For every
# price ``p``, ``sum_j min(0, r[j] - p v[j]) + p need`` is a lower bound of these least
# seconds. The best price is one of the ratios ``r[j] / v[j]``. The sums over a range of
# layers are differences of prefix sums.


MAX_PRICES = 8
"""Number of prices that the bound tries; more kinds of layers are sampled."""

MAX_LABELS = 4096
"""Number of partial choices that are compared; few kinds of layers need far fewer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecomputePrices:
    """The prices ``p`` of the module's bound, and prefix sums of it over layers.

    Attributes:
        price: ``[prices, options]``, seconds per byte.
        sums: ``[prices, layers + 1, options]``, prefix sums of ``min(0, r - p v)``.
    """

    price: np.ndarray
    sums: np.ndarray


def recompute_prices(costs: LayerCosts) -> RecomputePrices:
    """Uses the layers' ratios of seconds to bytes, or a sample of them, as prices."""
    again = can_recompute(costs)
    saving = np.where(again, costs.activation_bytes - costs.boundary_bytes, 0.0)
    seconds = np.where(again, costs.recompute_s, 0.0)
    columns = [
        _sample(seconds[again[:, o], o] / saving[again[:, o], o])
        for o in range(again.shape[1])
    ]
    count = max(1, *(len(column) for column in columns))
    # The same price may occur several times. An option on which no layer can be
    # recomputed has the price 0.
    filled = [np.resize(c if len(c) else np.zeros(1), count) for c in columns]
    price = np.stack(filled, axis=1)
    reduced = np.minimum(0.0, seconds - price[:, None] * saving)
    start = np.zeros((count, 1, again.shape[1]))
    sums = np.concatenate([start, np.cumsum(reduced, axis=1)], axis=1)
    return RecomputePrices(price=price, sums=sums)


def _sample(ratios: np.ndarray) -> np.ndarray:
    ratios = np.unique(ratios)
    if len(ratios) <= MAX_PRICES:
        return ratios
    return ratios[np.linspace(0, len(ratios) - 1, MAX_PRICES).round().astype(int)]


def least_recompute_s(
    entries: Entries, prices: RecomputePrices, kept: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Each stage's lower bound of seconds of recomputation; ``inf`` if none fits.

    Args:
        entries: the stages.
        prices: the prices of the problem's layers.
        kept: pairs of two numbers: of microbatches that are held, and of microbatches
            that are pending (`autopar_solver.stages.schedules.play.Alive`).
    """
    needs = _needs(entries, entries.running_bytes, kept)
    over = np.flatnonzero(needs > 0)
    seconds = np.zeros(len(entries))
    if not len(over):
        return seconds
    few = entries.keep(over)
    need = _needs(few, few.again_bytes, kept)
    first, end, option = few.first, few.end, few.option
    best = np.zeros(len(over))
    for price, sums in zip(prices.price, prices.sums, strict=True):
        with np.errstate(invalid="ignore"):
            bound = sums[end, option] - sums[first, option] + price[option] * need
        best = np.fmax(best, bound)
    seconds[over] = np.where(need <= few.saving_bytes * (1 + 1e-9), best, np.inf)
    return seconds


def _needs(
    entries: Entries, running: np.ndarray, kept: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Returns the bytes, per held microbatch, by which stages exceed their memory."""
    fixed = entries.resident_bytes + running - entries.limit_bytes * (1 + 1e-12)
    needs = np.full(len(entries), -np.inf)
    for held, pending in kept:
        over = fixed + held * entries.activation_bytes
        over = over + pending * entries.pending_bytes
        needs = np.maximum(needs, over / held if held else _never(over))
    return needs


def _never(over: np.ndarray) -> np.ndarray:
    """Returns infinity for a stage that can hold no microbatch at all, else 0."""
    return np.where(over > 0, np.inf, -np.inf)


@dataclasses.dataclass(frozen=True, slots=True)
class Recomputed:
    """The layers of a stage that are recomputed, and the time of their recomputation.

    Attributes:
        layers: the layers, in order.
        seconds: seconds of one microbatch.
        least_s: a lower bound of the seconds of every choice that fits; equal to
            ``seconds`` if the choice is proved best.
    """

    layers: tuple[int, ...]
    seconds: float
    least_s: float


def choose_recomputed(
    problem: StageProblem,
    costs: LayerCosts,
    layers: Sequence[int],
    option: int,
    fixed: Sequence[tuple[float, float]],
    weights: Sequence[int] | None = None,
) -> Recomputed | None:
    """Chooses the layers whose recomputation makes a stage fit in the least time.

    The result is None if no choice makes the stage fit.

    The search compares partial choices and is exact. If more than ``MAX_LABELS``
    partial choices remain, the search keeps the best of them, and lowers
    `Recomputed.least_s` so that it holds for the dropped ones too.

    Args:
        problem: the problem of the stage.
        costs: the costs of the layers.
        layers: the layers of the stage.
        option: the submesh option of the stage.
        fixed: pairs of bytes and a number of microbatches. For each pair, the stage
            holds the bytes in any case, plus the activations of that number of
            microbatches.
        weights: for each layer, the factor by which the stage holds more microbatches
            of it than ``fixed`` says; None for a factor of 1.
    """
    rows = np.array(layers)
    weight = np.ones(len(rows)) if weights is None else np.array(weights, np.float64)
    activations = costs.activation_bytes[rows, option]
    transient = costs.transient_bytes[rows, option]
    room = problem.limit_bytes(option) * (1 + 1e-12)
    total = float(weight @ activations)

    def need(running: float) -> float:
        return max(_need(kept + running - room, times, total) for kept, times in fixed)

    least = float(transient.max())
    if need(least) <= 0:
        return Recomputed((), 0.0, 0.0)
    can = np.flatnonzero(can_recompute(costs)[rows, option] & (weight > 0))
    saving = weight[can] * (activations - costs.boundary_bytes[rows, option])[can]
    seconds = costs.recompute_s[rows[can], option]
    running = (transient + activations)[can]
    best: Recomputed | None = None
    for area in np.unique(running):
        inside = running <= area
        cutoff = np.inf if best is None else best.seconds
        needed = need(max(least, float(area)))
        found = _cover(saving[inside], seconds[inside], needed, cutoff)
        if found is not None:
            places = can[inside][found[0]]
            spent = float(costs.recompute_s[rows[places], option].sum())
            bound = found[1] if best is None else min(found[1], best.least_s)
            best = Recomputed(tuple(sorted(rows[places].tolist())), spent, bound)
    return best


def _need(over: float, times: float, activations: float) -> float:
    """Returns the bytes that must be saved for each microbatch that the stage holds."""
    if times:
        return over / times + activations
    return float(_never(np.array(over)))


def _cover(
    saving: np.ndarray, seconds: np.ndarray, need: float, cutoff: float
) -> tuple[list[int], float] | None:
    """Items whose savings reach the need in least seconds; a bound of the seconds.

    The result is None if the need cannot be reached in less than ``cutoff`` seconds.
    Labels are partial choices. A label is dropped if another label saves at least as
    many bytes in no more seconds, or if it cannot lead to fewer seconds than the best
    choice.
    """
    order = np.argsort(seconds / saving, kind="stable")
    saving, seconds = saving[order], seconds[order]
    rest = np.append(np.cumsum(saving[::-1])[::-1], 0.0)
    if rest[0] < need * (1 - 1e-12):
        return None
    best, bound, picked = cutoff, np.inf, None
    labels: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for item in range(len(saving) + 1):
        alive: list[tuple[float, float, tuple[int, ...]]] = []
        for saved, spent, chosen in labels:
            if saved >= need * (1 - 1e-12):
                if spent < best:
                    best, picked = spent, chosen
            elif item < len(saving) and saved + rest[item] >= need * (1 - 1e-12):
                least = spent + _relaxed_s(saving, seconds, item, need - saved)
                if least < best:
                    taken = (
                        saved + saving[item],
                        spent + seconds[item],
                        (*chosen, item),
                    )
                    alive.extend([(saved, spent, chosen), taken])
        labels = _drop_dominated(alive)
        if len(labels) > MAX_LABELS:
            lost = labels[MAX_LABELS:]
            bound = min(
                bound,
                *(
                    spent
                    + _relaxed_s(saving, seconds, item + 1, max(0.0, need - saved))
                    for saved, spent, _ in lost
                ),
            )
            labels = labels[:MAX_LABELS]
    if picked is None:
        return None
    return [int(order[item]) for item in picked], min(best, bound)


def _drop_dominated(
    labels: list[tuple[float, float, tuple[int, ...]]],
) -> list[tuple[float, float, tuple[int, ...]]]:
    """Sorts labels by seconds.

    Keeps labels that save more bytes than all before them.
    """
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for label in sorted(labels, key=lambda label: (label[1], -label[0])):
        if not kept or label[0] > kept[-1][0]:
            kept.append(label)
    return kept


def _relaxed_s(
    saving: np.ndarray, seconds: np.ndarray, item: int, need: float
) -> float:
    """Returns the least seconds if fractions of items could be taken.

    Items are taken in the order of their savings per second.
    """
    reached = np.cumsum(saving[item:])
    full = int(np.searchsorted(reached, need))
    if full >= len(reached):
        return float(seconds[item:].sum())
    before = float(reached[full - 1]) if full else 0.0
    share = (need - before) / saving[item + full]
    return float(seconds[item : item + full].sum() + share * seconds[item + full])


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
    """Returns the costs of stages, including the prices of their devices."""
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
    """Returns the terms of all cuts between two layers under a schedule."""
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
    """Returns the terms of stages at one position of the pipeline.

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
    """Returns the seconds that stages add to the bound's sum, without recomputation."""
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
    """Returns the seconds that each stage has in the bound's maximum."""
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
