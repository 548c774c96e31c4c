"""Pollux: a genetic search for the allocation with the highest mean speed-up.

Qiao et al., "Pollux: Co-adaptive cluster scheduling for goodput-optimized deep
learning", OSDI 2021. A job's speed-up is its goodput divided by its goodput on a fair
share of the devices. If the job moves, the speed-up is multiplied by a factor below 1.
The fitness of an allocation is the power mean, with exponent -1, of the jobs'
speed-ups. The search uses crossover, mutation and repair.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autopar.scheduler.jobs import Allocation, Curve, Decisions, JobView, Reason, Views
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.base import Adapts

_POPULATION = 100
_GENERATIONS = 100
_SMALL = 1e-3


class Pollux:
    """Searches in each round, starting from states that the last search kept."""

    name = "pollux"
    adapts: Adapts = "batch"
    oracle = False

    def __init__(self, seed: int = 0, generations: int = _GENERATIONS) -> None:
        """Starts without allocations of a previous search."""
        self._random = np.random.default_rng(seed)
        self._generations = generations
        self._states = np.zeros((0, 0, 0), np.int64)
        self._names: list[str] = []
        # Job -> its curve, and its goodputs by numbers of nodes and devices.
        self._tables: dict[str, tuple[Curve, np.ndarray]] = {}

    def decide(
        self,
        now_s: float,
        jobs: Views,
        nodes: Nodes,
        current: Mapping[str, Allocation],
    ) -> Decisions:
        """The fittest allocation that the search found."""
        del now_s
        order = sorted(jobs.values(), key=lambda v: (v.served_device_s, v.submitted_s))
        base = np.zeros((len(order), len(nodes.devices)), np.int64)
        for row, view in enumerate(order):
            for node in current.get(view.name, ()):
                base[row, node] += 1
        search = _Search(self._random, order, nodes, base, self._speedups(order, nodes))
        states = search.run(self._carry_over(order, base), self._generations)
        self._states, self._names = states, [view.name for view in order]
        best = states[0]
        chosen = {
            view.name: tuple(np.repeat(np.arange(len(row)), row).tolist())
            for view, row in zip(order, best, strict=True)
            if row.any()
        }
        return Decisions(
            allocations=chosen, reasons=_reasons(search, order, base, best)
        )

    def _carry_over(self, order: list[JobView], base: np.ndarray) -> np.ndarray:
        """The allocations kept by the last search, with a row for each present job."""
        if self._states.shape[2] != base.shape[1]:
            return base[None]
        states = np.zeros((len(self._states), *base.shape), np.int64)
        rows = {name: row for row, name in enumerate(self._names)}
        for row, view in enumerate(order):
            if view.name in rows:
                states[:, row] = self._states[:, rows[view.name]]
        return np.concatenate([base[None], states])

    def _speedups(self, order: list[JobView], nodes: Nodes) -> np.ndarray:
        """Speed-ups over a fair share, by job, number of nodes and of devices."""
        wide, most = len(nodes.devices), nodes.total
        fair = -(-nodes.total // len(order))
        found = np.zeros((len(order), wide + 1, most + 1))
        for row, view in enumerate(order):
            known = self._tables.get(view.name)
            limit = min(_most_devices(view), most)
            # Both numbers change if a node leaves or joins.
            shape = wide + 1, limit + 1
            if known is None or known[0] is not view.curve or known[1].shape != shape:
                known = view.curve, _goodputs(view.curve, wide, limit)
                self._tables[view.name] = known
            share = view.curve.goodput(np.array([1]), np.array([min(fair, view.most)]))
            found[row, :, : limit + 1] = known[1] / max(float(share[0]), 1e-12)
        names = {view.name for view in order}
        self._tables = {k: v for k, v in self._tables.items() if k in names}
        return found


def _most_devices(view: JobView) -> int:
    """The most devices for a job: twice as many as it has ever run on."""
    return min(max(2 * view.tried, 1), view.most)


def _goodputs(curve: Curve, nodes: int, devices: int) -> np.ndarray:
    """Goodput by numbers of nodes and devices; shape (nodes + 1, devices + 1)."""
    n, r = np.meshgrid(np.arange(nodes + 1), np.arange(devices + 1), indexing="ij")
    possible = (n >= 1) & (n <= r)
    found = np.zeros(n.shape)
    found[possible] = curve.goodput(n[possible], r[possible])
    return found


def _reasons(
    search: _Search, order: list[JobView], base: np.ndarray, best: np.ndarray
) -> tuple[Reason, ...]:
    before, after = search.speedups(base[None])[0], search.speedups(best[None])[0]
    found: list[Reason] = []
    for row, view in enumerate(order):
        if (base[row] != best[row]).any():
            gain = after[row] / before[row] - 1 if before[row] else float("nan")
            found.append(
                Reason(
                    job=view.name,
                    devices=int(best[row].sum()),
                    kept=int(base[row].sum()),
                    compared=f"{_POPULATION} allocations of all jobs, bred",
                    gain=float(gain),
                    cost_s=view.restart_s if best[row].any() else 0.0,
                )
            )
    return tuple(found)


class _Search:
    """A genetic search over allocations (states), arrays (population, jobs, nodes)."""

    def __init__(
        self,
        random: np.random.Generator,
        jobs: list[JobView],
        nodes: Nodes,
        base: np.ndarray,
        speedups: np.ndarray,
    ) -> None:
        self._random, self._base, self._table = random, base, speedups
        self._capacity = np.array(nodes.devices)
        self._most = np.array([[_most_devices(view)] for view in jobs])
        age = np.array([view.age_s for view in jobs])
        delay = np.array([view.restart_s for view in jobs])
        moves = np.array([view.restarts for view in jobs])
        self._factor = np.maximum(age - moves * delay, 0.0) / (age + delay)

    def run(self, states: np.ndarray, generations: int) -> np.ndarray:
        """Runs ``generations`` generations.

        Returns the distinct states, fittest first.
        """
        states = self._repair(states)
        values = self.fitness(states)
        for _ in range(generations):
            children = self._repair(self._mutate(self._cross(states, values)))
            states = np.concatenate([states, children])
            values = np.concatenate([values, self.fitness(children)])
            order = np.argsort(-values, kind="stable")
            # States of equal fitness are mostly duplicates. Only one of them is kept.
            fresh = np.diff(values[order], prepend=np.inf) != 0
            kept = order[fresh][:_POPULATION]
            states, values = states[kept], values[kept]
        return states

    def speedups(self, states: np.ndarray) -> np.ndarray:
        """Speed-ups by state and job, shape (population, jobs)."""
        rows = np.arange(states.shape[1])
        wide = np.count_nonzero(states, axis=2)
        return self._table[rows, wide, states.sum(axis=2)]

    def fitness(self, states: np.ndarray) -> np.ndarray:
        """The power mean of each state's speed-ups; moves reduce a job's speed-up.

        The speed-up of a job that has moved often is reduced more.
        """
        moved = np.any(states != self._base, axis=2)
        scaled = self.speedups(states) * np.where(moved, self._factor, 1.0)
        return states.shape[1] / np.sum(1.0 / (scaled + _SMALL), axis=1)

    def _cross(self, states: np.ndarray, values: np.ndarray) -> np.ndarray:
        size = len(states)
        pairs = self._random.integers(size, size=(2, _POPULATION, 2))
        better = np.where(
            values[pairs[..., 0]] >= values[pairs[..., 1]], pairs[..., 0], pairs[..., 1]
        )
        first, second = states[better[0]], states[better[1]]
        point = self._random.integers(states.shape[1], size=(_POPULATION, 1))
        mask = (np.arange(states.shape[1]) < point)[..., None]
        return np.where(mask, second, first)

    def _mutate(self, states: np.ndarray) -> np.ndarray:
        random, shape = self._random, states.shape
        back = random.random(shape[:2]) < 0.1
        states = np.where(back[..., None], self._base, states)
        emptied = random.random(shape[:2]) < 0.1
        emptied = emptied[..., None] & (random.random(shape) < 0.1)
        states = np.where(emptied, 0, states)
        free = (self._capacity - states.sum(axis=1))[:, None, :] >= 1
        anywhere = np.broadcast_to(free, shape)
        grown = anywhere & (states > 0)
        chance = anywhere / np.maximum(anywhere.sum(axis=1, keepdims=True), 1)
        more = grown / np.maximum(grown.sum(axis=1, keepdims=True), 1)
        hit = random.random(shape) < chance + more - chance * more
        high = np.broadcast_to(np.maximum(self._capacity, states), shape)
        return np.where(hit, random.integers(states, high + 1), states)

    def _repair(self, states: np.ndarray) -> np.ndarray:
        """Makes states feasible.

        In the repaired states, at most one job on each node uses several nodes, no job
        has more devices than it may use, and no device belongs to two jobs.
        """
        wide = np.count_nonzero(states, axis=2) > 1
        users = ((states > 0) & wide[..., None]).cumsum(axis=1)
        crowded = (states > 0) & wide[..., None] & (users > 1)
        states = np.where(crowded, 0, states)
        shuffle = np.argsort(self._random.random(states.shape), axis=2)
        mixed = np.take_along_axis(states, shuffle, axis=2)
        mixed = np.minimum(mixed.cumsum(axis=2), self._most)
        mixed = np.diff(mixed, axis=2, prepend=0)
        states = np.take_along_axis(mixed, np.argsort(shuffle, axis=2), axis=2)
        filled = np.minimum(states.cumsum(axis=1), self._capacity)
        return np.diff(filled, axis=1, prepend=0)
