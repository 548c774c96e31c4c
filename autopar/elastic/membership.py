"""The seam between the loop and the processes that run it.

`Alone` is the membership of one process: its changes come from the inbox of events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from autopar.cluster import Cluster
from autopar.elastic.inbox import Inbox
from autopar.elastic.resolve import Resolved
from autopar.runtime.state_mover import StateLayout
from autopar.runtime.world import World


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change that the loop carries out before a step.

    Attributes:
      events: what led to it, each with how it was resolved.
      cluster: the next cluster; None: no device is left, and the run ends.
      deadline_s: seconds since the epoch when devices go; infinite: not known.
      reform: whether the processes of the world change: the state leaves the old
        world (`Membership.reform`) before the step is planned for the next.
    """

    events: tuple[Resolved, ...]
    cluster: Cluster | None
    deadline_s: float
    reform: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A part of an array, on the host.

    Attributes:
      start: index of its first element in the whole array, by dimension.
      data: the elements.
    """

    start: tuple[int, ...]
    data: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldState:
    """What a process holds of a run while it belongs to no world.

    Attributes:
      step: number of the next step.
      position: of the next sample.
      layout: how the state is split over the old world's devices.
      pieces: path of an array -> its parts that this process has.
      compression: state of the codecs, on the host; None: there is none.
    """

    step: int
    position: int
    layout: StateLayout
    pieces: Mapping[str, tuple[Piece, ...]]
    compression: Any = None


class Membership(Protocol):
    """Which processes and devices belong to a run, and how that changes.

    Attributes:
      world: the processes and devices now.
    """

    world: World

    def pending(self, step: int) -> Change | None:
        """Returns the change that all processes carry out before a step, or None.

        Args:
          step: number of the step that is about to start.
        """
        ...

    def settled(self, cluster: Cluster) -> None:
        """Tells on which cluster the run goes on, after a change or its refusal."""
        ...

    def broken(self, error: BaseException) -> bool:
        """Returns whether the loss of another process made a step raise this."""
        ...

    def reform(self, held: HeldState) -> HeldState:
        """Leaves the old world, joins the next one, and returns what is held there.

        Args:
          held: the state of this process, on the host.

        Returns:
          At the step that all processes of the new world agree on, the state with at
          least those pieces that this process's devices will need.
        """
        ...


class Alone:
    """The membership of one process, whose world does not change."""

    def __init__(self, world: World, inbox: Inbox) -> None:
        """See `Membership`.

        Args:
          world: this process and its devices.
          inbox: where sources put events.
        """
        self.world = world
        self._inbox = inbox

    def pending(self, step: int) -> Change | None:
        """See `Membership`."""
        del step
        taken = self._inbox.take()
        if not taken:
            return None
        deadline = min(x.event.ends_s for x in taken)
        return Change(events=taken, cluster=taken[-1].cluster, deadline_s=deadline)

    def settled(self, cluster: Cluster) -> None:
        """See `Membership`."""
        self._inbox.settle(cluster)

    def broken(self, error: BaseException) -> bool:
        """See `Membership`; there is no other process."""
        del error
        return False

    def reform(self, held: HeldState) -> HeldState:
        """See `Membership`; the world stays."""
        return held
