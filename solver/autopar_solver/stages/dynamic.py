"""The dynamic programme: the cheapest chain of stages within the devices.

``V[s][l][a][u]`` is the least that layers ``l`` to the last add in ``s`` stages, the
first of them on an option of link ``a``, with ``u`` devices of each group to spend:

    V[s][l][a][u] = min over stages (l, e, o) of link a
                    add[s] + min_b (cross[e][a][b] + V[s - 1][e][b][u - n(o)])

``s`` is part of the state because the memory of a stage depends on how many stages
follow. Devices are counted in the largest unit that all stages share.
"""

import dataclasses
import itertools
import math

import numpy as np

from autopar_solver.stages.relaxation import Chain
from autopar_solver.stages.terms import Terms


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
    terms: list[Terms]
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
    terms: list[Terms],
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
        usable = _undominated(budgets, usable, at.add)
        if not len(usable):
            break
        table = _extended(chain, budgets, behind, usable, at.add[usable])
        tables.usable.append(usable)
        tables.behind.append(behind)
        tables.values.append(float(table[0, :, budgets.size - 1].min()))
    return tables


def _undominated(budgets: Budgets, usable: np.ndarray, add: np.ndarray) -> np.ndarray:
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


def _extended(
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
