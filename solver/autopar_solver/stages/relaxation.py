"""Bounds chains of stages by prices on devices.

With ``p[g]`` seconds for each device of group ``g``, and all stages allowed at every
place of the pipeline, the cheapest chain is a shortest path over the layers:

    min over chains of  sum add + sum cross + sum p[g(o)] n(o)   -   sum p[g] devices[g]

No chain whose stages fit beside each other adds up to less, whatever the prices. Two
passes also give the cheapest chain through every single stage.
"""

import dataclasses

import numpy as np

from autopar_solver.stages.entries import Entries


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
