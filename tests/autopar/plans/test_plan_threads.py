"""Tests that several threads can read plan files at once.

msgspec inspects a type when it first meets it, and crashes if two threads do this at
once.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import small_step
from checkout import ROOT

READ = """
import sys
import msgspec._utils
from autopar.checkpoint.manifest import Manifest, PlanEntry, decode
from autopar.cluster import Cluster
from autopar.cluster.rates import tables
from autopar.plans import Plan
from autopar.runtime.agreement import exchange_data
from autopar.runtime.state_mover import LeafLayout, StateLayout
from autopar.runtime.world import World

entry = PlanEntry(digest="d", fingerprint="f", structure="s", text="t")
manifest = Manifest(schema=1, version="1", step=1, position=1, created=1.0, name="n",
    state={}, codecs={}, codec_tree=None, plan=entry).encode()
leaf = LeafLayout(shape=(2,), dtype="float32", spec=((),))
layout = StateLayout(leaves={"x": leaf}, meshes=((("a", 2),),)).to_json()
cluster = Cluster.parse("4:cpu").to_data()
asked = []

def hear(frame, event, _):
    if event == "call" and frame.f_code is found.__code__:
        asked.append(str(frame.f_locals["obj"]))

found = msgspec._utils.get_class_annotations
sys.setprofile(hear)
Plan.load(sys.argv[1])
Cluster.from_data(cluster)
tables._file()
decode(manifest, "manifest")
StateLayout.from_json(layout)
exchange_data(World(devices=(0,)), "planning")
sys.setprofile(None)
print(*asked)
"""


def test_reading_asks_nothing_about_types(tmp_path: pathlib.Path) -> None:
    small_step.plan("4:cpu").save(tmp_path / "plan.json")
    path = os.pathsep.join(str(ROOT / part) for part in ("", "solver", "passes"))
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / "plan.json")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("\n", 0), done.stderr
