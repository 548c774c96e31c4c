"""The errors that autopar raises for a user's mistakes.

All are ``ValueError``s::

    ValueError
    ├── TraceError            the step cannot be traced
    ├── ClusterError          a cluster description is wrong
    └── AutoparError
        ├── PlanError         a plan is wrong, or belongs to another step
        │   └── InfeasibleError   no plan fits the memory of a device
        └── TargetError       a command-line target cannot be loaded
"""

from __future__ import annotations

from autopar.cluster.errors import ClusterError
from autopar_passes.program.trace import TraceError

__all__ = [
    "AutoparError",
    "ClusterError",
    "InfeasibleError",
    "PlanError",
    "TargetError",
    "TraceError",
]


class AutoparError(ValueError):
    """Base of the errors raised here; the message says what to do."""


class PlanError(AutoparError):
    """A plan cannot be made, read or applied."""


class InfeasibleError(PlanError):
    """No plan fits the memory of a device."""


class TargetError(AutoparError):
    """A target such as ``file.py:function`` cannot be loaded."""
