"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable

from autopar.errors import ScheduleError
from autopar.scheduler.policies.base import SchedulingPolicy
from autopar.scheduler.policies.fifo import FairShare, Fifo, Gavel
from autopar.scheduler.policies.goodput import Goodput
from autopar.scheduler.policies.optimus import Optimus
from autopar.scheduler.policies.pollux import Pollux
from autopar.scheduler.policies.rubick import Rubick
from autopar.scheduler.policies.sia import Sia
from autopar.scheduler.policies.tiresias import Tiresias

POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "fifo": Fifo,
    "fair": FairShare,
    "tiresias": Tiresias,
    "optimus": Optimus,
    "gavel": Gavel,
    "pollux": Pollux,
    "sia": Sia,
    "rubick": Rubick,
    "goodput": Goodput,
}


def policy_of(name: str) -> SchedulingPolicy:
    """A new policy of a name.

    Raises:
      ScheduleError: there is none.
    """
    if name not in POLICIES:
        raise ScheduleError(
            f"policy {name!r}: there is none; choose one of {', '.join(POLICIES)}."
        )
    return POLICIES[name]()
