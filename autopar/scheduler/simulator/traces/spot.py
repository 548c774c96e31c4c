"""Reads traces of spot instances: when nodes leave and when they come back."""

from __future__ import annotations

import pathlib

from autopar.errors import ScheduleError
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.simulator.engine import NodeEvent
from autopar.scheduler.simulator.tables import read_rows

COLUMNS = ("at_s", "node", "event")


def read_events(path: pathlib.Path, nodes: Nodes) -> tuple[NodeEvent, ...]:
    """Reads events from a file with columns at_s, node and event (leave or join).

    Raises:
      ScheduleError: a row is invalid; the message names the row.
    """
    found: list[NodeEvent] = []
    for row in read_rows(path, COLUMNS):
        node, event = row.whole("node", 0), row.text("event")
        if node >= len(nodes.devices):
            raise ScheduleError(
                f"{row.where}: node {node} is not there; the cluster has nodes 0 to "
                f"{len(nodes.devices) - 1}."
            )
        if event not in ("leave", "join"):
            raise ScheduleError(f"{row.where}: event {event!r}; write leave or join.")
        found.append(
            NodeEvent(at_s=row.number("at_s", 0.0), node=node, away=event == "leave")
        )
    return tuple(found)
