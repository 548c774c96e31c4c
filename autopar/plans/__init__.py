"""Plans: plain data that can be saved, read, printed, compared and run."""

from autopar.plans.schema import (
    SCHEMA,
    Compression,
    CopyDecision,
    GradientDecision,
    NodeDecision,
    Plan,
    Predicted,
    Seconds,
    SolverReport,
)

__all__ = [
    "SCHEMA",
    "Compression",
    "CopyDecision",
    "GradientDecision",
    "NodeDecision",
    "Plan",
    "Predicted",
    "Seconds",
    "SolverReport",
]
