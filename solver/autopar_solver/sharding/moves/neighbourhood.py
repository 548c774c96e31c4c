"""Searches large neighbourhoods: chooses again for one connected part after another."""

import math

import numpy as np

from autopar_solver.clock import Clock
from autopar_solver.ilp.highs import Backend, StopCriteria
from autopar_solver.sharding.bounds.dual import Dual
from autopar_solver.sharding.moves.local_search import Position
from autopar_solver.sharding.moves.part import solve_part

FIRST_PAIRS, LEAST_PAIRS, MOST_PAIRS = 30_000, 500, 200_000
"""Pairs of strategies in a part: at first, at least, at most."""

PART_SECONDS, PAIR_SECONDS, MOST_BRANCHES = 0.02, 3e-5, 200
"""What a part takes, roughly, and its limit, where time is only counted."""

FAST_SECONDS, SLOW_SECONDS = 0.3, 2.0
"""Parts solved faster grow; slower ones are cut off and shrink."""


class NeighbourhoodSearch:
    """Improves the choices of one field, part by part."""

    def __init__(self, dual: Dual, backend: Backend, seed: int = 0) -> None:
        """Parts are drawn from where the choices disagree with the dual."""
        self.dual = dual
        self.backend = backend
        self.random = np.random.default_rng(seed)
        self.pairs = FIRST_PAIRS

    def improve(
        self,
        choices: np.ndarray,
        cutoff: float,
        clock: Clock,
        enough: float = -math.inf,
    ) -> np.ndarray:
        """Runs until the clock is out; the result fits and costs at most as much.

        Args:
            choices: that fit.
            cutoff: costs from here on are of no interest.
            clock: when to stop.
            enough: a cost at which nothing better is needed.
        """
        field, links = self.dual.field, self.dual.messages.links
        position = Position(field, choices, links)
        cost = field.cost(choices)
        while clock.left_s > 0.05 and cost > enough:
            kept = self._keep_better(position, min(cutoff, cost))
            members = self._members(position, kept)
            begin = clock.left_s
            seconds = min(SLOW_SECONDS, clock.left_s)
            counted = clock.counted
            stop = StopCriteria(
                None if counted else seconds,
                1e-7 * abs(cost),
                min(cost, cutoff),
                MOST_BRANCHES if counted else None,
            )
            rows = np.flatnonzero(self.dual.best_prices)
            answer = solve_part(
                position, members, kept, self.backend, stop, tuple(rows.tolist())
            )
            clock.tick(PART_SECONDS + PAIR_SECONDS * answer.pairs)
            self._adapt(begin - clock.left_s, answer.finished)
            if answer.choices is not None and field.memory.fits(answer.choices):
                found = field.cost(answer.choices)
                if found < cost:
                    cost = found
                    position = Position(field, answer.choices, links)
            if len(members) == field.num_nodes and answer.finished:
                break
        return position.choices

    def _keep_better(self, position: Position, cost: float) -> np.ndarray:
        field = self.dual.field
        kept = self.dual.bounds < cost
        kept[field.offsets[:-1] + position.choices] = True
        return kept

    def _members(self, position: Position, kept: np.ndarray) -> np.ndarray:
        """Grows a part from a node drawn by how far its choice is from the dual's."""
        field = self.dual.field
        sizes = np.add.reduceat(kept, field.offsets[:-1], dtype=np.int64)
        rises = self.dual.rises[field.offsets[:-1] + position.choices]
        weight = np.where(sizes > 1, rises + 1e-3 * rises.mean() + 1e-300, 0.0)
        if not weight.any():
            weight = np.ones(field.num_nodes)
        seed = int(self.random.choice(field.num_nodes, p=weight / weight.sum()))
        return self._grow(seed, sizes, position)

    def _grow(self, seed: int, sizes: np.ndarray, position: Position) -> np.ndarray:
        inside, border, pairs = {seed}, [seed], 0
        while border and pairs < self.pairs:
            # Mostly breadth first, with some chance of another way.
            pick = 0 if self.random.random() < 0.8 else -1
            k = border.pop(pick)
            for m, _ in position.links[k]:
                if m in inside:
                    continue
                inside.add(m)
                border.append(m)
                pairs += sum(
                    int(sizes[m] * sizes[n])
                    for n, _ in position.links[m]
                    if n in inside
                )
                if pairs >= self.pairs:
                    break
        return np.array(sorted(inside))

    def _adapt(self, seconds: float, finished: bool) -> None:
        if not finished:
            self.pairs = max(int(self.pairs * 0.7), LEAST_PAIRS)
        elif seconds < FAST_SECONDS:
            self.pairs = min(int(self.pairs * 1.2), MOST_PAIRS)
