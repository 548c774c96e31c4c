"""What the simulator asks of a job, whatever its tables are."""

from __future__ import annotations

from typing import Protocol

from autopar.scheduler.jobs import Job, JobView


class RunningJob(Protocol):
    """A job in the simulator.

    Attributes:
      job: as it was handed in.
      completed_s: when it ended; None before.
      placement: devices on each of its nodes; () while it waits.
      plan: the plan it runs; '' where there is one only.
      restarts: how often it moved after its start; -1 before.
      failed: why it died; '' where it did not.
    """

    job: Job
    completed_s: float | None
    placement: tuple[int, ...]
    plan: str
    restarts: int
    failed: str

    def advance(self, now_s: float, seconds: float, slowdown: float) -> None:
        """Runs from ``now_s`` for some seconds, slower by a share of its speed."""
        ...

    def reallocate(
        self, placement: tuple[int, ...], plan: str, kinds: tuple[str, ...] = ()
    ) -> None:
        """Moves to a placement on devices of some kinds; () stops it."""
        ...

    def view(self, now_s: float, oracle: bool) -> JobView:
        """What a policy may see."""
        ...

    @property
    def batch(self) -> int:
        """The batch it runs; 0 while it waits."""
        ...
