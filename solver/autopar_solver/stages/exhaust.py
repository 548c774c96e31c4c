"""Goes through every chain of a space that may be better, where these are few.

The bound of a space can be below its best pipeline, because it knows only some chains
of tasks. What the bound leaves open is settled by playing every pipeline below it.
"""

from __future__ import annotations

import numpy as np

from autopar_solver.clock import Clock
from autopar_solver.stages.completion import PipelineIncumbent, complete_pipeline
from autopar_solver.stages.problem import (
    Pipeline,
)
from autopar_solver.stages.relaxation import (
    cheapest,
)
from autopar_solver.stages.search import Bounded, fixed_space


class Allowance:
    """How many more stages may be tried."""

    def __init__(self, left: int) -> None:
        """Starts with so many."""
        self.left = left

    def spend(self, count: int) -> bool:
        """Takes some away; whether there were enough."""
        self.left -= count
        return self.left >= 0


def exhaust_space(
    bounded: Bounded,
    incumbent: PipelineIncumbent,
    gap: float,
    allowance: Allowance,
    clock: Clock,
) -> bool:
    """Plays every pipeline that may be below the incumbent; whether none was left out.

    Args:
        bounded: the space.
        incumbent: gets the pipelines that are found.
        gap: what is better by less than this share does not matter.
        allowance: how many stages may be tried, for all spaces together.
        clock: when to stop.
    """
    return _Chains(bounded, incumbent, gap, allowance, clock).extend((), 0, 0.0, 0.0)


class _Chains:
    """A depth-first search over the stages of a space."""

    def __init__(
        self,
        bounded: Bounded,
        incumbent: PipelineIncumbent,
        gap: float,
        allowance: Allowance,
        clock: Clock,
    ) -> None:
        """Removes stages that cannot be part of anything better."""
        self.space, self.terms = fixed_space(bounded, incumbent.step_s * (1 - gap))
        self.incumbent, self.gap = incumbent, gap
        self.allowance, self.clock = allowance, clock
        chain = self.space.chain
        self.after = cheapest(chain, self.terms.add).after
        self.begins = np.searchsorted(chain.first, np.arange(chain.layers + 1))

    def extend(
        self, chosen: tuple[int, ...], layer: int, add: float, peak: float
    ) -> bool:
        """Goes through the ends of a chain that covers the layers before ``layer``."""
        chain, entries = self.space.chain, self.space.entries
        if layer == chain.layers:
            self._offer(chosen)
            return True
        if len(chosen) == self.space.most_stages:
            return True
        low, high = self.begins[layer], self.begins[layer + 1]
        here = np.arange(low, high)
        cross = np.zeros(len(here))
        if chosen:
            cross = chain.cross[layer, chain.link[chosen[-1]], chain.link[here]]
        used = chain.taken[list(chosen)].sum(axis=0)
        fits = (used + chain.taken[here] <= chain.devices).all(axis=1)
        adds = add + cross + self.terms.add[here]
        peaks = np.maximum(peak, self.terms.peak[here])
        bounds = adds + self.after[chain.end[here], chain.link[here]]
        bounds = np.where(fits, bounds + np.maximum(peaks, self.space.low), np.inf)
        for place in np.argsort(bounds, kind="stable").tolist():
            if bounds[place] >= self.incumbent.step_s * (1 - self.gap):
                break
            if not self.allowance.spend(1) or self.clock.left_s <= 0:
                return False
            entry = int(here[place])
            end = int(entries.end[entry])
            done = self.extend(
                (*chosen, entry), end, float(adds[place]), float(peaks[place])
            )
            if not done:
                return False
        return True

    def _offer(self, chosen: tuple[int, ...]) -> None:
        entries = self.space.entries
        pipeline = complete_pipeline(
            self.space.problem,
            Pipeline(
                microbatches=self.space.costs.microbatches,
                schedule=self.space.schedule,
                options=tuple(int(entries.option[entry]) for entry in chosen),
                cuts=(0, *(int(entries.end[entry]) for entry in chosen)),
            ),
        )
        if pipeline is not None:
            self.incumbent.offer(pipeline)
