"""Tries one step in a separate process; prints the table row as JSON.

    python benchmarks/third/row.py FAMILY NAME SOURCE [PARTS]

The process imports a step from SOURCE, and plans it at full size for two clusters. It
runs a small version on 8 simulated devices, and compares it with one device; or it runs
the comparisons that PARTS names.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import sys
import time
import traceback
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLUSTERS = ("8x8:h100", "2x4:a100")
DEVICES = 8
# Name -> options that run a step in another way.
WAYS: dict[str, dict[str, Any]] = {
    "microbatches": {"microbatches": 2},
    "stages": {"stages": 2, "schedule": "1f1b", "microbatches": 2},
    "remat": {"remat": "all"},
}
# Eight slow devices on fast links, on which splitting small arrays pays off.
SMALL = "2x4:cpu,efficiency=0.0001,network_latency=1us,network=100GB/s"


def prepared(source: str, name: str) -> None:
    """Sets devices and import paths; must run before JAX is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={DEVICES} "
        "--xla_backend_optimization_level=0"
    )
    for folder in (ROOT / "passes", ROOT / "solver", ROOT):
        sys.path.insert(0, str(folder))
    if source:
        sys.path.insert(0, str(pathlib.Path(source, "examples", name)))
    importlib.import_module("stubs").install()


def planned(build: Any, cluster: str) -> dict[str, Any]:
    """Plans a case at full size."""
    from cases import Size

    import autopar

    made_for = autopar.Cluster.parse(cluster)
    size = Size(full=True, devices=made_for.num_devices)
    case = build(size)
    args, kwargs = case.arguments(size)
    start = time.perf_counter()
    plan = autopar.plan(
        case.step, *args, kwargs=kwargs, cluster=made_for, **case.options
    )
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "mesh": plan.mesh["axes"],
        "step_s": plan.predicted.step_s,
        "unsupported": list(plan.unsupported_ops),
        "changed": case.changed,
    }


def row(family: str, name: str, parts: str) -> dict[str, Any]:
    """All figures of a step; an error replaces the figures of a part that failed."""
    compare = importlib.import_module("compare")
    cases = importlib.import_module("cases")
    build = importlib.import_module(family).CASES[name]
    found: dict[str, Any] = {}
    for cluster in CLUSTERS if "p" in parts else ():
        found[cluster] = attempted(lambda c=cluster: planned(build, c))
    if "p" not in parts or "r" in parts:
        case = build(cases.Size())
        reference = compare.referred(case)
        found["changed"] = case.changed
        if "r" in parts:
            found["run"] = attempted(lambda: compare.compared(case, reference, SMALL))
        for way, options in WAYS.items() if "w" in parts else ():
            found[way] = attempted(
                lambda o=options: compare.compared_way(case, reference, SMALL, o)
            )
    return found


def attempted(do: Any) -> dict[str, Any]:
    """The result of a function, or its error."""
    try:
        return do()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    _family, _name, _source, _parts = (*sys.argv[1:], "pr")[:4]
    prepared(_source, _name)
    print("ROW" + json.dumps(row(_family, _name, _parts)), flush=True)
