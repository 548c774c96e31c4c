"""Rubick: chooses devices and plans by the slopes of the jobs' speed curves.

Zhang et al., "Rubick: Exploiting job reconfigurability for deep learning cluster
scheduling", MLSys 2025. The policy decides as in Rubick's published simulator. A slope
is the speed that one more device adds. The policy goes through the jobs in ascending
order of slopes, guaranteed jobs first. Each job gets free devices of one node. But a
large model gets a placement over several nodes, from a fixed list, and later a larger
placement if that fits. A guaranteed job starts only where it comes close to its
guaranteed speed.

`step_ms` models the time of a step with data-parallel plans. A backward pass takes
``k_bwd`` times as long as a forward pass, and overlaps with the exchange of gradients.
Offloading adds transfers between device and host. The constants come from the published
artifact, for nodes of 8 A800.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Mapping

import numpy as np

from autopar.scheduler.jobs import Allocation, Curve, Decisions, Views
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.base import Adapts, changes

_MIB = 1024.0 * 1024.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelledProgram:
    """The constants of a training program with which `step_ms` predicts its steps.

    Attributes:
      batch: samples per step.
      forward_ms: milliseconds of a forward pass on one device.
      parameters: number of parameters, in units of 2**20.
      asked: samples per second on the configuration that the owner asks for; slopes are
        divided by this number.
      pcie: bandwidth between device and host, in megabytes per millisecond.
      link: bandwidth between devices of a node, in megabytes per millisecond.
      k: fitted constants of the terms of a step: (bwd, sync, opt, opt_off, const, off,
        swap).
      scaled: speed-up of a forward pass on 2, 4 and 8 devices over one device; () for
        linear speed-up.
      most: the most samples per device that fit in memory: for plans with offloading,
        for plans with sharded optimizer state, and for the other plans.
    """

    batch: int
    forward_ms: float
    parameters: float
    asked: float
    pcie: float
    link: float
    k: tuple[float, ...]
    scaled: tuple[float, ...] = ()
    most: tuple[float, float, float] = (math.inf, math.inf, math.inf)


@dataclasses.dataclass(frozen=True, slots=True)
class BestPlan:
    """The best plan on at most a given number of devices of one node.

    Attributes:
      speed: samples per second; -1 if no plan is known.
      plan: the plan's name.
      devices: number of devices that the plan uses.
    """

    speed: float
    plan: str
    devices: int


PROGRAMS = {
    "roberta": ModelledProgram(
        batch=64,
        forward_ms=480,
        parameters=355412057 / _MIB,
        asked=64 / 0.234,
        pcie=7.9107385391936935,
        link=50.303643979067175,
        k=(
            1.7226216091452244,
            1.205493103963666,
            1e-08,
            2.200462132207284,
            15.73715000699807,
            16.635258404842535,
            32.9530767089104,
        ),
    ),
    "vit": ModelledProgram(
        batch=64,
        forward_ms=40,
        parameters=85952456 / _MIB,
        asked=64 / 0.049219,
        pcie=6.1646901221266655,
        link=29.7451292741858,
        k=(
            1.0,
            13.54749257672695,
            0.09786337059659733,
            1e-08,
            5.201298157965654,
            15.692686524178942,
            21.647413513688274,
        ),
    ),
    "bert": ModelledProgram(
        batch=32,
        forward_ms=225,
        parameters=336297858 / _MIB,
        asked=32 / 0.15768,
        pcie=64.0,
        link=119.4879085392442,
        k=(
            1.7762507345127174,
            1.1410390978600897,
            1e-08,
            4.400603962116795,
            15.257464643432971,
            37.288983000053264,
            26.221881110226107,
        ),
        scaled=(1.8, 3.2, 5.8),
    ),
    "gpt2": ModelledProgram(
        batch=16,
        forward_ms=1100,
        parameters=1557686400 / _MIB,
        asked=16 / 0.62556,
        pcie=59.720964902105614,
        link=144.83763732303515,
        k=(
            2.2955055547729417,
            71.21658539688131,
            0.05217141753878825,
            4.877226916846699,
            1.786485024931732,
            0.027912731457899787,
            51.48938818523304,
        ),
    ),
    "t5": ModelledProgram(
        batch=16,
        forward_ms=410,
        parameters=1240809472 / _MIB,
        asked=16 / 0.3207,
        pcie=64.0,
        link=161.02246829023724,
        k=(
            1.2754324551852874,
            1.0,
            1e-08,
            3.4538198406863163,
            11.616030890964971,
            224.86968171631415,
            61.68023191529816,
        ),
    ),
    **{
        name: ModelledProgram(
            batch=batch,
            forward_ms=1000,
            parameters=6738423808 / _MIB,
            asked=asked,
            pcie=0.96,
            link=150.0,
            k=(2.0, 10.0, 0.03, 1e-08, 1.0492757598487223, 1.1192066928294584, 1000.0),
            most=(8, 2, 0),
        )
        for name, batch, asked in (("llama7", 8, 8 / 9.4), ("llama30", 4, 4 / 2.759))
    },
}

PER_NODE = 8
_PLANS = ("zero-offload", "zero-dp", "ga")
_SAME = 1.01  # a larger number of devices must make a job 1 % faster


def step_ms(program: ModelledProgram, devices: int, plan: str, again: bool) -> float:
    """Milliseconds of a step on devices of one node.

    Args:
      program: the constants of the program.
      devices: number of devices.
      plan: ``zero-offload``, ``zero-dp`` or ``ga``.
      again: whether the backward pass recomputes activations.
    """
    bwd, sync, opt, opt_off, const, off, swap = program.k
    shares = (2, 4, 8)
    if program.scaled:
        by = program.scaled[shares.index(devices)] if devices in shares else 1.0
    else:
        by = float(devices)
    forward = program.forward_ms / by
    traffic = 8 * program.parameters * (devices - 1) / devices / program.link
    overlapped = (traffic**sync + (bwd * forward) ** sync) ** (1 / sync)
    update, moved = opt * program.parameters, 0.0
    if plan == "zero-offload":
        moved = 4 * program.parameters / devices / program.pcie
        overlapped += off + moved
        update = opt_off * program.parameters / devices
    elif plan == "zero-dp":
        update /= devices
    passes = 2 if again else 1
    return passes * forward + overlapped + update + swap + moved + const


def curve_plans(curve: Curve, most: int) -> tuple[BestPlan, ...]:
    """The best plan for each limit of 0, 1, ..., ``most`` devices of a node.

    Args:
      curve: progress per second of the program.
      most: number of devices of a node.
    """
    devices = np.arange(1, most + 1)
    found = [BestPlan(-1.0, "", 0)]
    for count, speed in zip(
        devices, curve.goodput(np.ones_like(devices), devices), strict=True
    ):
        fewer = found[-1]
        kept = fewer.devices and fewer.speed * _SAME >= speed
        found.append(fewer if kept else BestPlan(float(speed), "", int(count)))
    return tuple(found)


@functools.cache
def best_plans(application: str) -> tuple[BestPlan, ...]:
    """The best plan for each limit of 0, 1, ..., 8 devices of a node, by `PROGRAMS`."""
    program = PROGRAMS[application]
    found = [BestPlan(-1.0, "", 0)]
    for devices in range(1, PER_NODE + 1):
        best = BestPlan(-1.0, "", devices)
        for again, (place, plan) in itertools.product((False, True), enumerate(_PLANS)):
            fits = program.batch / devices <= program.most[place]
            if program.batch % devices or (again and plan != "ga") or not fits:
                continue
            speed = 1000 * program.batch / step_ms(program, devices, plan, again)
            if speed > best.speed:
                best = BestPlan(speed, plan, devices)
        fewer = found[-1]
        kept = devices > 1 and fewer.speed * _SAME >= best.speed
        found.append(fewer if kept else best)
    return tuple(found)


_OLD_S = 200_000.0
_FEW_MOVES = 7
_WIDE = 32
# A guaranteed job starts only if its speed would be at least its guaranteed speed
# divided by this factor.
_NEARLY = 1.5
# If there are more guaranteed jobs than this, large models may be placed anew however
# often they have moved.
_MANY = 12
# The placements of each large model by number of devices, in order of preference, from
# the published artifact. Each digit is a number of devices on one node.
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
    """Chooses devices and plans by slopes; never changes batch sizes."""

    name = "rubick"
    adapts: Adapts = "devices"
    oracle = False

    def __init__(self) -> None:
        """Starts with an empty queue."""
        self._queue: list[str] = []

    def decide(
        self,
        now_s: float,
        jobs: Views,
        nodes: Nodes,
        current: Mapping[str, Allocation],
    ) -> Decisions:
        """Goes through the jobs, then the nodes, then the large models."""
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
    """The state of one decision: nodes and plan of each job."""

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
        # During the whole round, a job's slope is computed at the number of devices
        # that it had before the round.
        self._before = {name: len(places) for name, places in self.places.items()}
        self._known = known
        self._widest = max(PER_NODE, nodes.widest)
        self._curves: dict[str, tuple[BestPlan, ...]] = {}

    def free(self) -> dict[int, int]:
        """Node -> number of its free devices, for nodes that have some."""
        used = collections.Counter(node for a in self.places.values() for node in a)
        left = {i: n - used[i] for i, n in enumerate(self.nodes.devices)}
        return {i: n for i, n in left.items() if n > 0}

    def _best(self, name: str, devices: int) -> BestPlan:
        """The best plan, by the published constants or else by the job's curve."""
        view = self.jobs[name]
        if view.application in PROGRAMS:
            plans = best_plans(view.application)
            return plans[devices] if devices < len(plans) else plans[0]
        if name not in self._curves:
            self._curves[name] = curve_plans(view.curve, self._widest)
        return self._curves[name][min(devices, self._widest)]

    def _limit(self, name: str) -> int:
        """The most devices that a job may have on one node."""
        cap = self.jobs[name].cap
        return self._widest if cap is None else min(self._widest, cap)

    def _asked_speed(self, name: str) -> float:
        """Progress per second on the requested configuration.

        The slopes of jobs are divided by this speed, so that jobs of different programs
        can be compared.
        """
        view = self.jobs[name]
        if view.application in PROGRAMS:
            return PROGRAMS[view.application].asked
        return max(self._best(name, view.asked).speed, math.ulp(0.0))

    def slope(self, name: str, delta: int) -> float:
        """Change of a job's speed per added device, divided by its speed on the devices
        and plan that its owner asks for.
        """
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
        """Takes the devices from large models that have many devices and moved rarely.

        `place_large` then gives these models new placements.
        """
        many = sum(view.guaranteed for view in self.jobs.values()) > _MANY
        for name in order:
            view = self.jobs[name]
            wide = len(self.places[name]) >= _WIDE
            moves = many or view.restarts < _FEW_MOVES
            if view.application in _LARGE and wide and moves:
                self.places[name] = []

    def schedule(self, name: str, free: dict[int, int]) -> None:
        """Gives a job free devices of one node.

        A running job gets them on its own node.
        """
        if self.jobs[name].application in _LARGE:
            self.place_large(name, grow=False)
            return
        places, guaranteed = self.places[name], self.jobs[name].guaranteed
        order = sorted(range(len(self.nodes.devices)), key=lambda i: -free.get(i, 0))
        for node in order:
            if places and node not in places:
                continue
            held = places.count(node)
            best = self._best(name, min(free.get(node, 0) + held, self._limit(name)))
            if self._nearly(name, best) if guaranteed else free.get(node, 0):
                self._put(name, node, best.devices)
                return

    def _nearly(self, name: str, best: BestPlan) -> bool:
        """Whether a plan comes close to a job's guaranteed speed (`_NEARLY`)."""
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
        """Gives a node's free devices to the job on the node with the largest slope."""
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
                best = self._best(name, min(held + left, self._limit(name)))
                grown[name] = best.devices
                left -= best.devices - held
                ends = ends or best.devices == held
                break
        for name, devices in grown.items():
            self._put(name, node, devices)

    def place_large(self, name: str, *, grow: bool) -> None:
        """Gives a large model the first placement in its list that fits."""
        sizes = _LARGE[self.jobs[name].application]
        old = self.places[name]
        for devices in sorted(sizes, reverse=True) if grow else sizes:
            if grow and len(self.places[name]) > devices:
                continue
            cap = self.jobs[name].cap
            if cap is not None and devices > cap:
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
    """The name of a large model's plan in the table of measured plans.

    On one node, it is the plan that offloads state to the host. On several nodes the
    plan is ``3d``, for which the table has the mean of all plans.
    """
    return "zero-offload" if placement < 10 else "3d"


def _fit_nodes(parts: list[int], free: dict[int, int]) -> list[int] | None:
    """Finds a node for each part of a placement; None if a part does not fit.

    Nodes are tried in the same order as in the published code.
    """
    waiting = [(number, node) for node, number in free.items()]
    left, places = sorted(parts, reverse=True), list[int]()
    while left and waiting:
        # Like the published code, this calls `heappop` on a list that is not a heap.
        number, node = heapq.heappop(waiting)
        part = next((part for part in left if part <= number), None)
        if part is not None:
            left.remove(part)
            places += [node] * part
    return None if left else places
