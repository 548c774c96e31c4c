"""Lets users share a cluster, by quotas, shares and priorities.

A quota is the largest number of devices that all jobs of a user may have together.
Before a policy decides, the user's quota is divided among the user's jobs: each job
gets a cap on its devices, and the caps add up to at most the quota. Therefore policies
need not know quotas, and no decision has to be revised afterwards. Running jobs get
their caps first, then waiting jobs in descending order of priority times age. A job
with a cap of 0 waits, and its owner is told the reason.

A user's share is a weight relative to other users; a job's priority is a weight among
the jobs of its user. The policies `fair` and `goodput` use entitlements. A job's
entitlement is the product of two fractions: the user's share divided by the sum of the
shares of all users with jobs, and the job's priority divided by the sum of the
priorities of the user's jobs. Therefore all jobs of a user together are entitled to as
many devices as a single job of another user with the same share.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from autopar.errors import ScheduleError
from autopar.scheduler.jobs import (
    LARGEST_WEIGHT,
    Allocation,
    Decisions,
    JobView,
    Reason,
    Views,
)
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.base import SchedulingPolicy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UserLimits:
    """The quota and the share of a user.

    Attributes:
      devices: the quota: the most devices that the user's jobs may have together; None:
        no limit.
      share: the user's weight relative to other users.

    Raises:
      ScheduleError: a number is out of its range.
    """

    devices: int | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        """Checks ranges."""
        if self.devices is not None and self.devices < 0:
            raise ScheduleError(
                f"a quota is {self.devices} devices; give a whole number of at least 0."
            )
        if not 1 / LARGEST_WEIGHT <= self.share <= LARGEST_WEIGHT:
            raise ScheduleError(
                f"a share is {self.share}; give a number from {1 / LARGEST_WEIGHT:g} "
                f"to {LARGEST_WEIGHT:g}."
            )


Users = Mapping[str, UserLimits]
"""The limits of users by name; other users have no quota, and a share of 1."""


def parse_users(
    quotas: Iterable[str], shares: Iterable[str], known: Users | None = None
) -> dict[str, UserLimits]:
    """Reads texts such as ``anna=8``.

    Args:
      quotas: quotas of users, as texts; ``none`` removes a quota.
      shares: shares of users, as texts.
      known: limits to start from, which the texts change.

    Raises:
      ScheduleError: a text is invalid.

    >>> parse_users(["anna=8"], ["anna=2", "ben=0.5"])["anna"]
    UserLimits(devices=8, share=2.0)
    """
    found = dict(known or {})
    for text in quotas:
        user, number = _pair("--quota", text, "8")
        limits = found.get(user, UserLimits())
        if number == "none":
            found[user] = dataclasses.replace(limits, devices=None)
            continue
        if not number.isdecimal() or len(number) > 9:
            raise ScheduleError(
                f"--quota {text}: give a number of devices, such as 8, or none."
            )
        found[user] = dataclasses.replace(limits, devices=int(number))
    for text in shares:
        user, number = _pair("--share", text, "2")
        try:
            share = float(number)
        except ValueError:
            share = math.nan
        limits = found.get(user, UserLimits())
        found[user] = dataclasses.replace(limits, share=share)
    return found


def _pair(option: str, text: str, number: str) -> tuple[str, str]:
    user, equals, value = text.rpartition("=")
    if not (equals and user):
        raise ScheduleError(f"{option} {text}: write USER={number}.")
    return user, value


def decide_for_users(
    policy: SchedulingPolicy,
    now_s: float,
    jobs: Views,
    nodes: Nodes,
    current: Mapping[str, Allocation],
    users: Users,
) -> Decisions:
    """Lets a policy decide within the users' quotas.

    `Decisions.waits` of the result names the jobs that must wait because of a quota.

    Args:
      policy: the policy.
      now_s: seconds since the beginning of the trace.
      jobs: the waiting and running jobs.
      nodes: the cluster.
      current: allocations of running jobs.
      users: quotas and shares of users.
    """
    if not users:
        return policy.decide(now_s, jobs, nodes, current)
    jobs = {
        name: dataclasses.replace(view, share=users[view.user].share)
        if view.user in users
        else view
        for name, view in jobs.items()
    }
    adapts = policy.adapts != "nothing"
    caps, waits = _caps_of(jobs, nodes, current, users, adapts=adapts)
    told = {name: _limit(view, caps.get(name), adapts) for name, view in jobs.items()}
    if not getattr(policy, "remembers", False):
        told = {name: view for name, view in told.items() if view.cap != 0}
    kept = {name: held for name, held in current.items() if caps.get(name) != 0}
    decided = policy.decide(now_s, told, nodes, kept)
    # A policy that somebody else wrote may ignore caps. Therefore this function
    # enforces the caps.
    chosen = {
        name: given[: caps.get(name)] for name, given in decided.allocations.items()
    }
    stopped = [
        Reason(job=name, devices=0, kept=len(current[name]), compared=waits[name])
        for name in waits
        if current.get(name)
    ]
    reasons = (*(r for r in decided.reasons if r.job not in waits), *stopped)
    return dataclasses.replace(
        decided, allocations=chosen, reasons=reasons, waits=waits
    )


def new_waits(decided: Decisions, before: Mapping[str, str]) -> tuple[Reason, ...]:
    """Reasons why jobs must wait that the previous decision did not have.

    Args:
      decided: the decision.
      before: the reasons of the previous decision, by job.
    """
    moved = {reason.job for reason in decided.reasons}
    return tuple(
        Reason(job=name, devices=0, kept=0, compared=why)
        for name, why in decided.waits.items()
        if before.get(name) != why and name not in moved
    )


def _limit(view: JobView, cap: int | None, adapts: bool) -> JobView:
    """What a policy can see of a job that has a cap."""
    if cap is None:
        return view
    if not adapts:  # it gets what it asks for, or nothing
        return dataclasses.replace(view, cap=cap)
    asked = max(min(view.asked, cap), 1)
    return dataclasses.replace(view, cap=cap, most=min(view.most, cap), asked=asked)


def _caps_of(
    jobs: Views,
    nodes: Nodes,
    current: Mapping[str, Allocation],
    users: Users,
    *,
    adapts: bool,
) -> tuple[dict[str, int], dict[str, str]]:
    """Caps of jobs whose users have quotas, and why some of the jobs must wait."""
    caps: dict[str, int] = {}
    waits: dict[str, str] = {}
    of: dict[str, list[str]] = collections.defaultdict(list)
    for name, view in jobs.items():
        of[view.user].append(name)
    for user, names in of.items():
        quota = users[user].devices if user in users else None
        if quota is None:
            continue
        quota = min(quota, nodes.total)
        needs = {n: jobs[n].least if adapts else jobs[n].asked for n in names}
        admitted, stopped = _admit(user, names, jobs, needs, current, users)
        waits |= stopped
        caps |= dict.fromkeys(stopped, 0)
        own = {name: needs[name] for name in admitted}
        if adapts:
            _grow(own, jobs, current, quota - sum(own.values()))
        caps |= own
    return caps, waits


def _admit(
    user: str,
    names: Sequence[str],
    jobs: Views,
    needs: Mapping[str, int],
    current: Mapping[str, Allocation],
    users: Users,
) -> tuple[list[str], dict[str, str]]:
    """The jobs of a user that may run, and why the user's other jobs must wait.

    If a job does not fit into the quota, all jobs after it in the order must wait, too.
    If they could run, small jobs could keep a large job waiting for ever. A waiting job
    moves forward in the order as it gets older, whatever its priority.
    """
    quota = users[user].devices
    assert quota is not None
    admitted: list[str] = []
    stopped: dict[str, str] = {}
    left, is_full = quota, False
    order = sorted(
        names,
        key=lambda n: (not current.get(n), -jobs[n].priority * jobs[n].age_s),
    )
    for name in order:
        if needs[name] > quota:
            stopped[name] = (
                f"waits: it needs {needs[name]} devices and user {user} may have "
                f"{quota}"
            )
        elif is_full or needs[name] > left:
            is_full = True
            stopped[name] = _full(user, quota, left, needs[name])
        else:
            admitted.append(name)
            left -= needs[name]
    return admitted, stopped


def _full(user: str, quota: int, left: int, needed: int) -> str:
    if left <= 0:
        return f"waits: user {user} has its {quota} devices"
    return (
        f"waits: user {user} has {quota - left} of its {quota} devices, and the next "
        f"job needs more than the rest; this one needs {needed}"
    )


def _grow(
    caps: dict[str, int],
    jobs: Views,
    current: Mapping[str, Allocation],
    left: int,
) -> None:
    """Doubles caps, one at a time: the cap that is smallest relative to its priority.

    The doubling ends when the quota does not allow to double any cap. The devices that
    remain are then added to caps in the same order. Caps grow by doubling so that they
    change seldom. Of jobs with equal ratios, the job that has more devices comes first.
    """
    open_ = [name for name in caps if caps[name] < jobs[name].most]
    while open_ and left > 0:
        name = min(
            open_,
            key=lambda n: (caps[n] / jobs[n].priority, -len(current.get(n, ()))),
        )
        more = min(caps[name], jobs[name].most - caps[name])
        if more > left:
            open_.remove(name)
            continue
        caps[name] += more
        left -= more
        if caps[name] >= jobs[name].most:
            open_.remove(name)
    order = sorted(caps, key=lambda n: caps[n] / jobs[n].priority)
    for name in order:
        more = max(min(jobs[name].most - caps[name], left), 0)
        caps[name] += more
        left -= more
