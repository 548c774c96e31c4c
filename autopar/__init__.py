"""autopar finds the execution plan that trains a JAX/Flax step fastest, and runs it.

>>> import autopar
>>> cluster = autopar.Cluster.parse("2x4:h100")
>>> cluster.num_devices
8
"""

from autopar.api import audit, plan
from autopar.cluster import Cluster
from autopar.errors import (
    AutoparError,
    ClusterError,
    InfeasibleError,
    PlanError,
    TargetError,
    TraceError,
)
from autopar.plans.schema import Plan
from autopar.runtime.parallel_step import ParallelStep
from autopar.runtime.parallelize import parallelize
from autopar.version import __version__
from autopar_passes.rules.factor_rule import FactorKind, FactorRule
from autopar_passes.rules.registry import register_rule

__all__ = [
    "AutoparError",
    "Cluster",
    "ClusterError",
    "FactorKind",
    "FactorRule",
    "InfeasibleError",
    "ParallelStep",
    "Plan",
    "PlanError",
    "TargetError",
    "TraceError",
    "__version__",
    "audit",
    "parallelize",
    "plan",
    "register_rule",
]
