"""autopar finds the execution plan that trains a JAX/Flax step fastest, and runs it.

>>> import autopar
>>> cluster = autopar.Cluster.parse("2x4:h100")
>>> cluster.num_devices
8
"""

import importlib
import importlib.util
import typing

from autopar.version import __version__

# The same names as in the stub `__init__.pyi`.
# pyright: reportUnsupportedDunderAll=false
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

# Public name -> the module that defines it. A name is imported on its first use, so
# that the command line can print its help without JAX. Type checkers read
# `__init__.pyi`.
_HOMES = {
    "AutoparError": "autopar.errors",
    "CheckpointError": "autopar.errors",
    "Checkpoints": "autopar.checkpoint.checkpoints",
    "Cluster": "autopar.cluster",
    "ClusterError": "autopar.errors",
    "CompileError": "autopar.errors",
    "EventError": "autopar.errors",
    "FactorKind": "autopar_passes.rules.factor_rule",
    "FactorRule": "autopar_passes.rules.factor_rule",
    "InfeasibleError": "autopar.errors",
    "ParallelStep": "autopar.runtime.parallel_step",
    "Plan": "autopar.plans.schema",
    "PlanError": "autopar.errors",
    "ScheduleError": "autopar.errors",
    "StageError": "autopar.errors",
    "NotFiniteError": "autopar.errors",
    "TargetError": "autopar.errors",
    "TraceError": "autopar.errors",
    "audit": "autopar.api",
    "local_steps": "autopar.runtime.local.entry",
    "parallelize": "autopar.runtime.parallelize",
    "plan": "autopar.api",
    "register_rule": "autopar_passes.rules.factor_rule",
    "train": "autopar.elastic.train",
}


def __getattr__(name: str) -> typing.Any:
    """Imports a public name, or a submodule of the package."""
    if name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = found
        return found
    part = f"{__name__}.{name}"
    if not name.startswith("_") and importlib.util.find_spec(part):
        return importlib.import_module(part)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the public names, including names that are not imported yet."""
    return sorted({*globals(), *__all__})
