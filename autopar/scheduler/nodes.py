"""The nodes of a shared cluster, and the placement of jobs on nodes.

`pack` places jobs of given sizes on nodes and moves as few running jobs as possible.

A job's size is a power of two of devices inside a node, or a number of whole nodes.
With these sizes, a job can always be placed if its size is at most the number of free
devices: smaller jobs can be moved to common nodes to make room.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from autopar.cluster.specs import MOST_DEVICES
from autopar.errors import ScheduleError
from autopar.scheduler.jobs import Allocation

_PART = re.compile(r"(\d{1,7})x(\d{1,7})(?::([\w.-]+))?")


@dataclasses.dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a cluster, numbered from 0.

    Attributes:
      devices: number of devices of each node; 0 for a node that has left.
      kinds: the kind of each node's devices; '' if the cluster has only one kind.
    """

    devices: tuple[int, ...]
    kinds: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Nodes:
        """Reads ``16x4`` (nodes x devices) or ``6x4:t4+3x8:rtx``.

        Raises:
          ScheduleError: the text has neither form.
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
        """The number of devices of all nodes."""
        return sum(self.devices)

    @property
    def widest(self) -> int:
        """The number of devices of the largest node."""
        return max(self.devices)

    def of_kind(self, kind: str) -> tuple[int, ...]:
        """The numbers of the nodes that have devices of a kind."""
        return tuple(i for i, other in enumerate(self.kinds) if other == kind)

    def kinds_of(self, allocation: Allocation) -> tuple[str, ...]:
        """The kinds of an allocation's devices, each once."""
        return tuple(dict.fromkeys(self.kinds[node] for node in allocation))

    def without(self, away: Iterable[int]) -> Nodes:
        """The cluster without the devices of some nodes; nodes keep their numbers."""
        gone = set(away)
        kept = (0 if i in gone else n for i, n in enumerate(self.devices))
        return Nodes(tuple(kept), self.kinds)

    def free(self, allocations: Mapping[str, Allocation]) -> list[int]:
        """The number of devices of each node that no allocation uses.

        Raises:
          ScheduleError: allocations use more devices of a node than it has.
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
    """How many devices to take on each node, for ``count`` devices on the fewest nodes.

    >>> spread_nodes(10, 4)
    (4, 4, 2)
    """
    whole, rest = divmod(count, per_node)
    return (per_node,) * whole + ((rest,) if rest else ())


def sizes_of(per_node: int, total: int) -> list[int]:
    """The possible sizes of a job: powers of two inside a node, then whole nodes.

    >>> sizes_of(8, 24)
    [1, 2, 4, 8, 16, 24]
    """
    small: list[int] = []
    while 2 ** len(small) < per_node:
        small.append(2 ** len(small))
    return [n for n in [*small, *range(per_node, total + 1, per_node)] if n <= total]


def pack(
    wanted: Mapping[str, tuple[int, Sequence[int]]],
    current: Mapping[str, Allocation],
    nodes: Nodes,
    costs: Mapping[str, float] | None = None,
) -> dict[str, Allocation]:
    """Places jobs on nodes.

    Args:
      wanted: for each job, its number of devices and the nodes that it may use.
      current: the present allocations. A job that already has the wanted number of
        devices on allowed nodes stays there, unless a job that gets whole nodes needs
        the place.
      nodes: the cluster.
      costs: the cost to move each job that could stay; 0 for jobs without an entry. If
        a job needs whole nodes, the nodes whose jobs have the least total cost are
        cleared for it. Of nodes with equal cost, the node with the fewest used devices
        is cleared first.

    Returns:
      The allocations, without the jobs for which no place was found.
    """
    chosen = {
        name: places
        for name, places in current.items()
        if name in wanted and _has(places, *wanted[name])
    }
    free = nodes.free(chosen)
    waiting = [name for name in wanted if wanted[name][0] and name not in chosen]
    while waiting:
        waiting.sort(key=lambda name: -wanted[name][0])
        name = waiting.pop(0)
        count, allowed = wanted[name]
        if _place(count, allowed, free, nodes) is None:
            for other in _in_the_way(count, allowed, chosen, nodes, costs):
                for node in chosen.pop(other):
                    free[node] += 1
                waiting.append(other)
        places = _place(count, allowed, free, nodes)
        if places is not None:
            chosen[name] = places
            for node in places:
                free[node] -= 1
    return chosen


def _has(places: Allocation, count: int, allowed: Sequence[int]) -> bool:
    return len(places) == count and set(places) <= set(allowed)


def _place(
    count: int, allowed: Sequence[int], free: list[int], nodes: Nodes
) -> Allocation | None:
    """Chooses free whole nodes for a job, or else the fullest node on which it fits."""
    per_node = max((nodes.devices[i] for i in allowed), default=0)
    if not per_node:
        return None
    if count < per_node:
        room = [i for i in allowed if free[i] >= count]
        return (min(room, key=lambda i: (free[i], i)),) * count if room else None
    whole = [i for i in allowed if free[i] == nodes.devices[i] == per_node]
    if len(whole) * per_node < count:
        return None
    return tuple(node for node in whole[: count // per_node] for _ in range(per_node))


def _in_the_way(
    count: int,
    allowed: Sequence[int],
    chosen: Mapping[str, Allocation],
    nodes: Nodes,
    costs: Mapping[str, float] | None,
) -> list[str]:
    """The smaller jobs on the nodes that are cheapest to clear for a job."""
    per_node = max((nodes.devices[i] for i in allowed), default=1)
    users: dict[int, list[str]] = {i: [] for i in allowed}
    for name, places in chosen.items():
        for node in set(places) & set(users):
            users[node].append(name)
    open_nodes = [
        i
        for i in allowed
        if nodes.devices[i]
        and all(len(chosen[name]) < min(count, per_node) for name in users[i])
    ]

    def cost(node: int) -> tuple[float, int, int]:
        told = costs or {}
        used = sum(chosen[name].count(node) for name in users[node])
        return sum(told.get(name, 0.0) for name in users[node]), used, node

    open_nodes.sort(key=cost)
    needed = open_nodes[: max(count // per_node, 1)]
    return sorted({name for node in needed for name in users[node]})
