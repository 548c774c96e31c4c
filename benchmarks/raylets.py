"""Raylets of a local Ray cluster, which benchmarks start and kill."""

from __future__ import annotations

import os
import signal
from typing import Any

# A raylet gives up after 15 s, which a busy machine may need more than once.
_STARTS = 4


def added(cluster: Any, **options: Any) -> Any:
    """Adds a raylet of one CPU to a `ray.cluster_utils.Cluster`; returns its node.

    Args:
      cluster: to add to; the first raylet is the head.
      options: of ``add_node``.

    Raises:
      Exception: of Ray, where none starts.
    """
    for attempt in range(_STARTS):
        try:
            return cluster.add_node(**{"num_cpus": 1, **options})
        except Exception:
            if attempt + 1 == _STARTS:
                raise
    raise AssertionError("the last start returns or raises")


def kill(node: Any) -> None:
    """Kills the raylet of a node by SIGKILL."""
    for info in node.all_processes["raylet"]:
        os.kill(info.process.pid, signal.SIGKILL)
