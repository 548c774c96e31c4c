"""Kills a raylet and adds another one while a script trains on a real Ray cluster."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
from checkout import ROOT

pytestmark = pytest.mark.cluster

PLACES = (ROOT, ROOT / "solver", ROOT / "passes")


@pytest.mark.timeout(600)
def test_a_run_follows_the_nodes(tmp_path: pathlib.Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed; it comes with autopar[ray]")
    if not os.environ.get("AUTOPAR_TEST_RAY"):
        pytest.skip("a Ray cluster takes minutes on a busy machine: make test-ray")
    benchmark = ROOT / "benchmarks" / "ray_elastic.py"
    done = subprocess.run(
        [sys.executable, str(benchmark), "--steps=300", f"--keep={tmp_path}"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, PLACES)),
            "JAX_PLATFORMS": "cpu",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert [len(world) for world in found["worlds"]] == [2, 1, 2]
