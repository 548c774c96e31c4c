"""First come, first served; a fair share; and rounds of Gavel."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autopar.scheduler.jobs import Allocation, Decisions, Views
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.base import Adapts, changes, take_fullest, with_counts


class Fifo:
    """Jobs run in the order they came, on what they ask for; none is stopped."""

    name = "fifo"
    adapts: Adapts = "nothing"
    oracle = False

    def decide(
        self,
        now_s: float,
        jobs: Views,
        nodes: Nodes,
        current: Mapping[str, Allocation],
    ) -> Decisions:
        """Starts jobs until the first that does not fit."""
        del now_s
        chosen = dict(current)
        free = nodes.free(chosen)
        for name, view in jobs.items():
            if name in chosen:
                continue
            if view.asked > sum(free):
                break
            chosen[name] = take_fullest(free, view.asked)
        return Decisions(
            allocations=chosen, reasons=changes(jobs, current, chosen, "who came first")
        )


class FairShare:
    """Every job gets as many devices as every other, one at least while there are."""

    name = "fair"
    adapts: Adapts = "batch"
    oracle = False

    def decide(
        self,
        now_s: float,
        jobs: Views,
        nodes: Nodes,
        current: Mapping[str, Allocation],
    ) -> Decisions:
        """Deals devices out in turn; jobs whose number stays are not moved."""
        del now_s
        counts = _equal_shares(jobs, nodes.total)
        order = sorted(counts, key=lambda name: -counts[name])
        chosen = with_counts(counts, order, current, nodes)
        return Decisions(
            allocations=chosen, reasons=changes(jobs, current, chosen, "equal shares")
        )


def _equal_shares(jobs: Views, left: int) -> dict[str, int]:
    """Equal numbers, cut to powers of two so that they change seldom."""
    share = max(left // max(len(jobs), 1), 1)
    share = 2 ** int(np.log2(share))
    counts: dict[str, int] = {}
    for name, view in jobs.items():
        counts[name] = min(share, view.most, left)
        left -= counts[name]
    return counts


class Gavel:
    """Least attained service, normalised: rounds of who was served least.

    Narayanan et al., "Heterogeneity-aware cluster scheduling policies for deep learning
    workloads", OSDI 2020, with max-min fairness: jobs get what they ask for, and the
    one with the least share of time on the devices it asks for runs first.
    """

    name = "gavel"
    adapts: Adapts = "nothing"
    oracle = False
    _round_s = 360.0

    def __init__(self) -> None:
        """The first round begins at once."""
        self._next_s = 0.0

    def decide(
        self,
        now_s: float,
        jobs: Views,
        nodes: Nodes,
        current: Mapping[str, Allocation],
    ) -> Decisions:
        """At the end of a round, the least served first; between, who fits."""
        chosen = dict(current)
        if now_s >= self._next_s:
            self._next_s = now_s + self._round_s
            chosen = {}
        free = nodes.free(chosen)
        for name in sorted(jobs, key=lambda name: _share(jobs, name)):
            if name not in chosen and jobs[name].asked <= sum(free):
                old = current.get(name, ())
                fits = bool(old) and all(free[i] >= old.count(i) for i in set(old))
                chosen[name] = old if fits else take_fullest(free, jobs[name].asked)
                if fits:
                    for node in old:
                        free[node] -= 1
        why = "least share of time served first"
        return Decisions(
            allocations=chosen, reasons=changes(jobs, current, chosen, why)
        )


def _share(jobs: Views, name: str) -> float:
    """The share of its life that a job was served."""
    view = jobs[name]
    return view.served_device_s / (view.asked * max(view.age_s, 1.0))
