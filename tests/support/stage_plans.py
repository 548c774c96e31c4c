"""Plans of several stages, built by hand."""

from __future__ import annotations

from typing import Any

import msgspec

from autopar import Cluster
from autopar.plans import (
    SCHEMA,
    ClusterData,
    GradientDecision,
    NodeDecision,
    Plan,
    Predicted,
    Seconds,
    SolverReport,
    StagePlan,
)

SPLIT = (("data",), ())
CLUSTER = Cluster.parse("2x4:cpu")


def make_gradient(name: str, workers: int, **changes: Any) -> GradientDecision:
    """A gradient whose codec sends a quarter of the bytes."""
    made = GradientDecision(
        name=name,
        value=3,
        shape=(16, 16),
        local_shape=(16, 16),
        axes=("data",),
        workers=workers,
        codec="int8",
        dense_bytes=1024.0,
        wire_bytes=256.0,
    )
    return msgspec.structs.replace(made, **changes)


def make_stage(name: str, devices: tuple[int, ...], **changes: Any) -> StagePlan:
    """A stage of one layer on a mesh of one axis."""
    kernel = f"params/{name}/kernel"
    stage = StagePlan(
        name=name,
        devices=devices,
        mesh={"axes": {"data": len(devices)}},
        inputs={kernel: ((), ()), f"batch/{name}": SPLIT},
        outputs={kernel: ((), ())},
        nodes=(
            NodeDecision(
                name=f"{name}/dot", kind="contraction", factors=(16, 16), axes=SPLIT
            ),
        ),
        copies=(),
        gradients=(make_gradient(kernel, len(devices)),),
    )
    return msgspec.structs.replace(stage, **changes)


def make_plan(*stages: StagePlan, **changes: Any) -> Plan:
    """A plan of two stages by default: the halves of a cluster, each with one layer."""
    halves = (make_stage("front", (0, 1, 2, 3)), make_stage("back", (4, 5, 6, 7)))
    stages = stages or halves
    plan = Plan(
        schema=SCHEMA,
        version="0.0",
        cluster=ClusterData.of(CLUSTER),
        stages=stages,
        predicted=Predicted(
            step_s=0.003,
            compute_s=0.002,
            communication_s=0.001,
            communication_bytes=4096.0,
            peak_memory_bytes=2.5e9,
        ),
        solver=SolverReport(
            status="proved optimal", gap=0.0, seconds=1.0, cost=0.003, bound=0.003
        ),
        seconds=Seconds(trace=0.5, graph=0.25, solve=1.0, total=1.75),
        roles={
            path: path.split("/")[0].replace("params", "parameter")
            for stage in stages
            for path in stage.inputs
        },
        unsupported_ops=(),
        assumed=(),
        fingerprint="0" * 16,
        structure="1" * 16,
        microbatches=4,
        schedule="1f1b" if len(stages) > 1 else "none",
        shapes={path: (16, 16) for stage in stages for path in stage.inputs},
    )
    return msgspec.structs.replace(plan, **changes).with_checks()
