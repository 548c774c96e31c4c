"""Tests the order of arms and the meshes of the benchmark of expert parallelism."""

from __future__ import annotations

import importlib
import math
import pathlib
from typing import Any

import pytest

from autopar.cluster import Cluster

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("expert_arms")


def arms(*seconds: tuple[float, float]) -> dict[str, Any]:
    names = "measured_s", "predicted_s"
    return {"arms": [dict(zip(names, one, strict=True)) for one in seconds]}


def test_tau_counts_pairs_of_one_source_that_differ(driver: Any) -> None:
    first = arms((1.0, 5.0), (1.04, 4.0), (2.0, 6.0))  # the first two count as equal
    second = arms((9.0, 1.0), (3.0, 2.0))
    assert driver.pairs([first, second]) == [True, True, False]
    assert driver.tau([first, second]) == pytest.approx(1 / 3)


def test_experts_are_split_over_as_many_devices_as_measured(driver: Any) -> None:
    for source in driver.SOURCES.values():
        cluster = Cluster.parse(source.cluster)
        for _, count in source.arms:
            mesh, layouts, own = driver.mesh_and_layouts(cluster, count)
            assert math.prod(mesh.sizes) == cluster.num_devices
            assert math.prod(mesh.sizes[k] for k in own) == count
            first = layouts["*/up"][0] or ()
            names = (first,) if isinstance(first, str) else first
            assert names == tuple(mesh.names[k] for k in own)
