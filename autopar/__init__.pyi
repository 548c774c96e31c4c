"""The public names for type checkers; `__init__.py` imports them on demand."""

from autopar.api import audit as audit
from autopar.api import plan as plan
from autopar.checkpoint.checkpoints import Checkpoints as Checkpoints
from autopar.cluster import Cluster as Cluster
from autopar.elastic.train import elastic as elastic
from autopar.elastic.train import train as train
from autopar.errors import AutoparError as AutoparError
from autopar.errors import CheckpointError as CheckpointError
from autopar.errors import ClusterError as ClusterError
from autopar.errors import CompileError as CompileError
from autopar.errors import EventError as EventError
from autopar.errors import InfeasibleError as InfeasibleError
from autopar.errors import NotFiniteError as NotFiniteError
from autopar.errors import PlanError as PlanError
from autopar.errors import ScheduleError as ScheduleError
from autopar.errors import StageError as StageError
from autopar.errors import TargetError as TargetError
from autopar.errors import TraceError as TraceError
from autopar.plans.schema import Plan as Plan
from autopar.runtime.local.entry import local_steps as local_steps
from autopar.runtime.parallel_step import ParallelStep as ParallelStep
from autopar.runtime.parallelize import parallelize as parallelize
from autopar.version import __version__ as __version__
from autopar_passes.rules.factor_rule import FactorKind as FactorKind
from autopar_passes.rules.factor_rule import FactorRule as FactorRule
from autopar_passes.rules.factor_rule import register_rule as register_rule

__all__ = [
    "AutoparError",
    "CheckpointError",
    "Checkpoints",
    "Cluster",
    "ClusterError",
    "CompileError",
    "EventError",
    "FactorKind",
    "FactorRule",
    "InfeasibleError",
    "NotFiniteError",
    "ParallelStep",
    "Plan",
    "PlanError",
    "ScheduleError",
    "StageError",
    "TargetError",
    "TraceError",
    "__version__",
    "audit",
    "elastic",
    "local_steps",
    "parallelize",
    "plan",
    "register_rule",
    "train",
]
