"""What a policy decides, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar.scheduler.jobs import Allocation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a job got what it got.

    Attributes:
      job: its name.
      devices: what it gets.
      kept: what it had.
      compared: what else was looked at, in words.
      gain: predicted progress with the choice over that without, less 1; nan where a
        policy predicts nothing.
      cost_s: seconds the move takes.
    """

    job: str
    devices: int
    kept: int
    compared: str
    gain: float = float("nan")
    cost_s: float = 0.0

    @property
    def text(self) -> str:
        """One line for people."""
        gain = "" if self.gain != self.gain else f", gain {self.gain:+.1%}"
        return (
            f"{self.job}: {self.kept} -> {self.devices} devices{gain}, "
            f"{self.cost_s:g} s to move ({self.compared})"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """The allocation of every job.

    Attributes:
      allocations: the nodes of each job's devices; a job that is missing waits.
      plans: the plan of each job that has plans to choose from.
      reasons: of the jobs whose allocation changes.
      gap: how far the allocation may be from the best, relative; nan where a policy
        proves nothing.
    """

    allocations: Mapping[str, Allocation]
    plans: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    reasons: tuple[Reason, ...] = ()
    gap: float = float("nan")
