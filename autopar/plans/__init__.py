"""Plans: plain data that can be saved, loaded, printed, compared, edited and run."""

from autopar.plans.files import SCHEMA, ClusterData
from autopar.plans.records import (
    AS_WRITTEN,
    GATHER,
    RING,
    AttentionDecision,
    AxisUse,
    Compression,
    CopyDecision,
    GatherDecision,
    GradientDecision,
    NodeDecision,
    PipelineData,
    Rematerialisation,
    ReplicaPlan,
    StagePlan,
    Worth,
)
from autopar.plans.schema import (
    NO_SCHEDULE,
    SCHEDULES,
    Plan,
    Predicted,
    Seconds,
    SolverReport,
)
from autopar.plans.specs import Spec

__all__ = [
    "AS_WRITTEN",
    "GATHER",
    "NO_SCHEDULE",
    "RING",
    "SCHEDULES",
    "SCHEMA",
    "AttentionDecision",
    "AxisUse",
    "ClusterData",
    "Compression",
    "CopyDecision",
    "GatherDecision",
    "GradientDecision",
    "NodeDecision",
    "PipelineData",
    "Plan",
    "Predicted",
    "Rematerialisation",
    "ReplicaPlan",
    "Seconds",
    "SolverReport",
    "Spec",
    "StagePlan",
    "Worth",
]
