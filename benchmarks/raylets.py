"""Starts and kills raylets of a Ray cluster on this machine."""

from __future__ import annotations

import os
import signal
from typing import Any

# A raylet gives up if it does not start within 15 s. On a busy machine, it must be
# started several times.
_STARTS = 4


def added(cluster: Any, **options: Any) -> Any:
    """Adds a raylet of one CPU to a `ray.cluster_utils.Cluster`; returns its node.

    Args:
      cluster: the Ray cluster; its first raylet is the head node.
      options: of ``add_node``.

    Raises:
      Exception: Ray's error, if the raylet does not start.
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
