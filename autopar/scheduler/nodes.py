"""The nodes of a cluster that jobs share: how many devices each has, of which kind."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping

from autopar.cluster.specs import MOST_DEVICES
from autopar.errors import ScheduleError
from autopar.scheduler.jobs import Allocation

_PART = re.compile(r"(\d{1,7})x(\d{1,7})(?::([\w.-]+))?")


@dataclasses.dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes in order.

    Attributes:
      devices: of each node; 0 for a node that is away.
      kinds: the kind of each node's devices; '' where there is one kind only.
    """

    devices: tuple[int, ...]
    kinds: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Nodes:
        """Reads ``16x4`` (nodes x devices) or ``6x4:t4+3x8:rtx``.

        Raises:
          ScheduleError: the text is none of these.
        """
        devices: list[int] = []
        kinds: list[str] = []
        for part in text.split("+"):
            match = _PART.fullmatch(part.strip())
            if match is None or 0 in (int(match[1]), int(match[2])):
                raise ScheduleError(
                    f"cluster {text!r}: {part!r} is no group of nodes; write "
                    "NODESxDEVICES or NODESxDEVICES:KIND, joined by +, such as "
                    "16x4 or 6x4:t4+2x8:a100."
                )
            if sum(devices) + int(match[1]) * int(match[2]) > MOST_DEVICES:
                raise ScheduleError(
                    f"cluster {text!r}: it has more than {MOST_DEVICES} devices; take "
                    "fewer."
                )
            devices += [int(match[2])] * int(match[1])
            kinds += [match[3] or ""] * int(match[1])
        return cls(tuple(devices), tuple(kinds))

    @property
    def total(self) -> int:
        """All devices."""
        return sum(self.devices)

    @property
    def widest(self) -> int:
        """Devices of the largest node."""
        return max(self.devices)

    def of_kind(self, kind: str) -> tuple[int, ...]:
        """The nodes whose devices are of a kind."""
        return tuple(i for i, other in enumerate(self.kinds) if other == kind)

    def kinds_of(self, allocation: Allocation) -> tuple[str, ...]:
        """The kinds of an allocation's devices, each once."""
        return tuple(dict.fromkeys(self.kinds[node] for node in allocation))

    def without(self, away: Iterable[int]) -> Nodes:
        """The same nodes, some of them away: they keep their numbers."""
        gone = set(away)
        kept = (0 if i in gone else n for i, n in enumerate(self.devices))
        return Nodes(tuple(kept), self.kinds)

    def free(self, allocations: Mapping[str, Allocation]) -> list[int]:
        """Devices of each node that no allocation uses.

        Raises:
          ScheduleError: a node is given out more than once.
        """
        used = collections.Counter(node for a in allocations.values() for node in a)
        left = [n - used[i] for i, n in enumerate(self.devices)]
        for i, n in enumerate(left):
            if n < 0:
                raise ScheduleError(
                    f"node {i} has {self.devices[i]} devices and {used[i]} are given "
                    "out; give out each device once."
                )
        return left


def spread_nodes(count: int, per_node: int) -> tuple[int, ...]:
    """The placement with as few nodes as possible.

    >>> spread_nodes(10, 4)
    (4, 4, 2)
    """
    whole, rest = divmod(count, per_node)
    return (per_node,) * whole + ((rest,) if rest else ())
