"""Chooses the layers of a stage that recompute their activations.

Let ``v[j]`` be the bytes that recomputing layer ``j`` saves for each microbatch that
the stage holds, and ``r[j]`` the seconds that recomputing it takes. If a stage exceeds
its memory by ``need`` bytes for each microbatch that it holds, its recomputation takes
at least

    minimise sum_(j in R) r[j]   subject to   sum_(j in R) v[j] >= need

In addition, every layer in ``R`` must fit while it runs. If layers could be recomputed
in part, linear duality would give the least seconds. They are a lower bound: ``sum_j
min(0, r[j] - p v[j]) + p need`` for every price ``p``. The best price is one of the
ratios ``r[j] / v[j]``. The sums over a range of layers are differences of prefix sums.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar_solver.stages.entries import Entries, can_recompute
from autopar_solver.stages.problem import LayerCosts, StageProblem

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
    """The bytes, per held microbatch, by which stages exceed their memory."""
    fixed = entries.resident_bytes + running - entries.limit_bytes * (1 + 1e-12)
    needs = np.full(len(entries), -np.inf)
    for held, pending in kept:
        over = fixed + held * entries.activation_bytes
        over = over + pending * entries.pending_bytes
        needs = np.maximum(needs, over / held if held else _never(over))
    return needs


def _never(over: np.ndarray) -> np.ndarray:
    """Infinite where a stage that holds no microbatch exceeds its memory."""
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
    """The bytes that must be saved for each microbatch that the stage holds."""
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
    """The least seconds if fractions of items could be taken.

    Items are taken in the order of their savings per second.
    """
    reached = np.cumsum(saving[item:])
    full = int(np.searchsorted(reached, need))
    if full >= len(reached):
        return float(seconds[item:].sum())
    before = float(reached[full - 1]) if full else 0.0
    share = (need - before) / saving[item + full]
    return float(seconds[item : item + full].sum() + share * seconds[item + full])
