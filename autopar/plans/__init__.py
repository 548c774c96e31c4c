"""Plans: plain data that can be saved, read, printed, compared, edited and run."""

from autopar.plans.cluster_data import ClusterData
from autopar.plans.files import SCHEMA
from autopar.plans.gradients import Compression, GradientDecision
from autopar.plans.pipeline import PipelineData
from autopar.plans.rematerialisation import AS_WRITTEN, Rematerialisation
from autopar.plans.replicas import ReplicaPlan
from autopar.plans.schema import (
    NO_SCHEDULE,
    SCHEDULES,
    Plan,
    Predicted,
    Seconds,
    SolverReport,
)
from autopar.plans.specs import Spec
from autopar.plans.stage import CopyDecision, NodeDecision, StagePlan
from autopar.plans.worth import AxisUse, Worth

__all__ = [
    "AS_WRITTEN",
    "NO_SCHEDULE",
    "SCHEDULES",
    "SCHEMA",
    "AxisUse",
    "ClusterData",
    "Compression",
    "CopyDecision",
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
