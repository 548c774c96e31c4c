"""Optimus: devices one by one to the job whose remaining time shrinks most.

Peng et al., "Optimus: An efficient dynamic resource scheduler for deep learning
clusters", EuroSys 2018, as an oracle: it sees the true steps that are left and the
true seconds of a step.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.scheduler.jobs import Allocation, Decisions, JobView, Views
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.base import Adapts, changes, with_counts


class Optimus:
    """Every job gets one device, then the largest gain in seconds the next one."""

    name = "optimus"
    adapts: Adapts = "devices"
    oracle = True

    def decide(
        self,
        now_s: float,
        jobs: Views,
        nodes: Nodes,
        current: Mapping[str, Allocation],
    ) -> Decisions:
        """Gives devices out greedily; jobs whose number stays are not moved."""
        del now_s
        counts = _counts(jobs, nodes.total)
        order = sorted(jobs, key=counts.__getitem__)
        chosen = with_counts(counts, order, current, nodes)
        why = "largest drop of the remaining seconds for one more device"
        return Decisions(
            allocations=chosen, reasons=changes(jobs, current, chosen, why)
        )


def _counts(jobs: Views, left: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    gains: dict[str, float] = {}
    for name, view in jobs.items():
        counts[name] = min(1, left)
        left -= counts[name]
        gains[name] = _gain(view, counts[name]) if counts[name] and left else 0.0
    while left > 0 and max(gains.values()) > 0:
        name = max(gains, key=gains.__getitem__)
        counts[name] += 1
        # The artifact asks before it takes the device off: the last one may be
        # compared with one more that is not there. It makes no difference.
        gains[name] = _gain(jobs[name], counts[name])
        left -= 1
    return counts


def _gain(view: JobView, devices: int) -> float:
    """Seconds that one more device saves of what is left."""
    oracle = view.oracle
    assert oracle is not None
    if devices + 1 > view.most or devices + 1 > len(oracle.step_s):
        return 0.0
    return (oracle.step_s[devices - 1] - oracle.step_s[devices]) * oracle.remaining
