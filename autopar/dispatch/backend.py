"""What a scheduler needs of a cluster: where processes can run, and who runs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from autopar.dispatch.store import JobRecord


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node of a cluster.

    Attributes:
      name: which it keeps.
      devices: how many workers of jobs it can have; each has one device.
      kind: of its devices.
    """

    name: str
    devices: int
    kind: str = "cpu"


class Backend(Protocol):
    """A cluster."""

    @property
    def words(self) -> Mapping[str, str]:
        """How a job's own process reaches the cluster, as plain data."""
        ...

    def places(self) -> Sequence[ClusterNode]:
        """The nodes that are there now."""
        ...

    def close(self) -> None:
        """Ends the connection; jobs go on."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the processes of a job ended.

    Attributes:
      code: 0: the script has ended; `SUSPENDED`: it is to go on later; others: wrong.
      reason: in words.
      lost: whether its workers were lost, through no fault of its script.
    """

    code: int
    reason: str = ""
    lost: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is seen of a job's processes.

    Attributes:
      alive: whether its own process, which supervises the workers, is there.
      ending: how they ended; None: they did not.
      wanted: how many workers it tries to have; None: it does not answer.
      lines: of its progress, since the last look.
    """

    alive: bool
    ending: Ending | None = None
    wanted: int | None = None
    lines: tuple[Mapping[str, Any], ...] = ()


class Runs(Protocol):
    """The processes of jobs, which live on without the scheduler."""

    def start(self, job: JobRecord) -> None:
        """Starts the processes of a job at its places, or takes up those there are.

        A job that was started before with the same number of attempts and is alive is
        left as it is.
        """
        ...

    def look(self, job: JobRecord) -> Look:
        """Looks at the processes of a job."""
        ...

    def move(self, job: JobRecord) -> str:
        """Moves the workers of a job to its places; returns what is wrong, or ''."""
        ...

    def suspend(self, job: JobRecord) -> str:
        """Has a job saved and its processes ended; returns what is wrong, or ''."""
        ...

    def kill(self, job: JobRecord) -> None:
        """Ends the processes of a job at once."""
        ...
