"""Tests preparing for worlds that do not include this process."""

from __future__ import annotations

import pytest

from autopar.elastic.processes.preparing import imitated_world
from autopar.elastic.processes.sizing import cluster_of


@pytest.mark.cluster
def test_a_world_larger_than_this_process_has_a_cluster_of_its_own() -> None:
    """Also where the script gives none."""
    world = imitated_world(12, 1)
    found = cluster_of(None, 12, 1, found=world.devices)
    assert [level.size for level in found.levels] == [12, 1]
