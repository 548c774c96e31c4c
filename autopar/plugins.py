"""Parts that other packages add to autopar, by entry points.

A package names its parts in its ``pyproject.toml``, such as::

    [project.entry-points."autopar.scheduling_policies"]
    shortest = "my_package:Shortest"
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

#: Groups of entry points: classes of codecs, policies of the scheduler (called without
#: arguments), and launchers of `autopar run` (called with script and processes).
CODECS = "autopar.codecs"
SCHEDULING_POLICIES = "autopar.scheduling_policies"
LAUNCHERS = "autopar.launchers"


def plugin_names(group: str) -> list[str]:
    """The names of the parts of a group, in order.

    Args:
      group: name of the group of entry points.
    """
    return sorted({point.name for point in metadata.entry_points(group=group)})


def load_plugin(group: str, name: str) -> Any | None:
    """Imports a part; None: no installed package adds one with this name.

    Args:
      group: name of the group of entry points.
      name: name of the part.

    Raises:
      Exception: the package that adds the part cannot be imported.
    """
    for point in metadata.entry_points(group=group, name=name):
        return point.load()
    return None
