"""Rubick: devices and plans by the slopes of the jobs' curves.

Zhang et al., MLSys 2025, as its published simulator decides: jobs with flat curves
first, each taking what is free on one node; large models take one of a list of
placements over several nodes, and grow to a larger one where it fits. Guaranteed jobs
come before all others, and start only where they nearly reach what they were promised.
"""

from __future__ import annotations

import collections
import heapq
import math
from collections.abc import Mapping

from autopar.scheduler.jobs import Allocation, Decisions, Views
from autopar.scheduler.models.rubick_form import (
    PER_NODE,
    PROGRAMS,
    BestPlan,
    best_plans,
    curve_plans,
)
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.base import Adapts, changes

_OLD_S = 200_000.0
_FEW_MOVES = 7
_WIDE = 32
# A guaranteed job starts where it would be slower than promised by no more than this.
_NEARLY = 1.5
# With more guaranteed jobs large models are placed anew however often they moved.
_MANY = 12
# Per large model its placements, in order of preference, by number of devices. From the
# published artifact.
_LARGE: dict[str, dict[int, tuple[int, ...]]] = {
    "llama7": {
        16: (88, 4444, 22222222),
        64: (88888888,),
        32: (8888, 44444444),
        8: (8,),
        4: (4,),
        2: (2,),
        1: (1,),
    },
    "llama30": {48: (888888,), 40: (88888,), 32: (8888,), 24: (444444,)},
}


class Rubick:
    """Slopes first; the batch never changes."""

    name = "rubick"
    adapts: Adapts = "devices"
    oracle = False

    def __init__(self) -> None:
        """Nothing has been placed."""
        self._queue: list[str] = []

    def decide(
        self,
        now_s: float,
        jobs: Views,
        nodes: Nodes,
        current: Mapping[str, Allocation],
    ) -> Decisions:
        """One pass over the jobs, one over the nodes, one over the large models."""
        del now_s
        self._queue = [name for name in self._queue if name in jobs]
        known = set(self._queue)
        self._queue += [name for name in jobs if name not in known]
        work = _Round(jobs, nodes, current, known)
        order = sorted(self._queue, key=lambda name: work.slope(name, 1))
        work.release_wide(order)
        stale = work.free()
        for name in sorted(order, key=lambda name: not jobs[name].guaranteed):
            stale = work.free()
            work.schedule(name, stale)
        for node in range(len(nodes.devices)):
            work.grow_on(node, stale.get(node, 0))
        for name in order:
            if jobs[name].application in _LARGE:
                work.place_large(name, grow=True)
        chosen = {name: tuple(places) for name, places in work.places.items() if places}
        why = "slope of the curve, flat ones first"
        return Decisions(
            allocations=chosen,
            plans={name: p for name, p in work.plans.items() if name in chosen},
            reasons=changes(jobs, current, chosen, why),
        )


class _Round:
    """The state of one decision: who has which nodes, under which plan."""

    def __init__(
        self,
        jobs: Views,
        nodes: Nodes,
        current: Mapping[str, Allocation],
        known: set[str],
    ) -> None:
        self.jobs, self.nodes = jobs, nodes
        self.places = {name: list(current.get(name, ())) for name in jobs}
        self.plans: dict[str, str] = {}
        # Slopes are those of before the round, all through it.
        self._before = {name: len(places) for name, places in self.places.items()}
        self._known = known
        self._widest = max(PER_NODE, nodes.widest)
        self._curves: dict[str, tuple[BestPlan, ...]] = {}

    def free(self) -> dict[int, int]:
        """Devices that are free, of nodes that have any."""
        used = collections.Counter(node for a in self.places.values() for node in a)
        left = {i: n - used[i] for i, n in enumerate(self.nodes.devices)}
        return {i: n for i, n in left.items() if n > 0}

    def _best(self, name: str, devices: int) -> BestPlan:
        """By the published tables, or by the job's curve where they lack it."""
        view = self.jobs[name]
        if view.application in PROGRAMS:
            plans = best_plans(view.application)
            return plans[devices] if devices < len(plans) else plans[0]
        if name not in self._curves:
            self._curves[name] = curve_plans(view.curve, self._widest)
        return self._curves[name][min(devices, self._widest)]

    def _asked_speed(self, name: str) -> float:
        """Progress per second of the configuration that slopes are measured in."""
        view = self.jobs[name]
        if view.application in PROGRAMS:
            return PROGRAMS[view.application].asked
        return max(self._best(name, view.asked).speed, math.ulp(0.0))

    def slope(self, name: str, delta: int) -> float:
        """Change of samples per second by device, beside what was asked for."""
        view = self.jobs[name]
        if view.age_s > _OLD_S:
            return 1e9
        held = self._before[name]
        if name in self._known:
            low, high = self._best(name, held), min(held + delta, self._widest)
            gained = low.speed - self._best(name, high).speed
        else:
            gained = self._best(name, delta).speed
        return abs(gained) / self._asked_speed(name) / delta

    def release_wide(self, order: list[str]) -> None:
        """Large models on many devices are placed anew while they moved rarely."""
        many = sum(view.guaranteed for view in self.jobs.values()) > _MANY
        for name in order:
            view = self.jobs[name]
            wide = len(self.places[name]) >= _WIDE
            moves = many or view.restarts < _FEW_MOVES
            if view.application in _LARGE and wide and moves:
                self.places[name] = []

    def schedule(self, name: str, free: dict[int, int]) -> None:
        """Gives a job what is free on one node, its own if it has one."""
        if self.jobs[name].application in _LARGE:
            self.place_large(name, grow=False)
            return
        places, guaranteed = self.places[name], self.jobs[name].guaranteed
        order = sorted(range(len(self.nodes.devices)), key=lambda i: -free.get(i, 0))
        for node in order:
            if places and node not in places:
                continue
            held = places.count(node)
            best = self._best(name, min(free.get(node, 0) + held, self._widest))
            if self._nearly(name, best) if guaranteed else free.get(node, 0):
                self._put(name, node, best.devices)
                return

    def _nearly(self, name: str, best: BestPlan) -> bool:
        """Whether a plan is about as fast as a guaranteed job was promised."""
        view = self.jobs[name]
        known = PROGRAMS.get(view.application)
        promised = view.floor * (known.batch if known else 1)
        return best.speed * _NEARLY >= (promised or self._best(name, view.asked).speed)

    def _put(self, name: str, node: int, devices: int) -> None:
        kept = [other for other in self.places[name] if other != node]
        self.places[name] = kept + [node] * devices
        if plan := self._best(name, devices).plan:
            self.plans[name] = plan

    def grow_on(self, node: int, left: int) -> None:
        """Gives what was free on a node to the job with the steepest curve there."""
        there = [name for name, places in self.places.items() if node in places]
        grown: dict[str, int] = {}
        ends = not there
        while left > 0 and not ends:
            order = sorted(there, key=lambda name: -self.slope(name, left))
            for rank, name in enumerate(order):
                ends = rank == len(order) - 1
                if self.jobs[name].application in _LARGE:
                    continue
                held = self._before[name]
                best = self._best(name, min(held + left, self._widest))
                grown[name] = best.devices
                left -= best.devices - held
                ends = ends or best.devices == held
                break
        for name, devices in grown.items():
            self._put(name, node, devices)

    def place_large(self, name: str, *, grow: bool) -> None:
        """Takes the first placement of a large model's list that fits."""
        sizes = _LARGE[self.jobs[name].application]
        old = self.places[name]
        for devices in sorted(sizes, reverse=True) if grow else sizes:
            if grow and len(self.places[name]) > devices:
                continue
            if grow:
                self.places[name] = []
            free = self.free()
            for placement in sizes[devices]:
                found = _fit_nodes([int(digit) for digit in str(placement)], free)
                if found is not None:
                    self.places[name] = found
                    self.plans[name] = _large_plan(placement)
                    return
        self.places[name] = old


def _large_plan(placement: int) -> str:
    """Offload on one node; over nodes the table's mean stands for all plans."""
    return "zero-offload" if placement < 10 else "3d"


def _fit_nodes(parts: list[int], free: dict[int, int]) -> list[int] | None:
    """A node for each part of a placement; nodes in the order of a heap's array."""
    waiting = [(number, node) for node, number in free.items()]
    left, places = sorted(parts, reverse=True), list[int]()
    while left and waiting:
        # The published code pops from a list that it never made a heap.
        number, node = heapq.heappop(waiting)
        part = next((part for part in left if part <= number), None)
        if part is not None:
            left.remove(part)
            places += [node] * part
    return None if left else places
