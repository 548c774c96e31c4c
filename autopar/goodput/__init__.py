"""Goodput of one job: the noise of its gradients, and the progress per batch.

>>> from autopar.goodput import NoiseOptions, efficiency, scale_updates
"""

import warnings
from typing import Any

from autopar.goodput.choice import (
    CodecError,
    codec_error,
    efficiency,
    gain,
    goodput,
)
from autopar.goodput.curves import CurvePoint, CurveTable, correct_curve
from autopar.goodput.following import (
    CriticalRegimes,
    Following,
    ProgressRatio,
    progress_ratio,
)
from autopar.goodput.loop import Loop
from autopar.goodput.rates import ScaledState, progress, scale_updates, set_batch
from autopar.goodput.throughput import Interval, Terms, Throughput
from autopar.runtime.noise.averages import NoiseOptions, NoiseScale

__all__ = [
    "CodecError",
    "CriticalRegimes",
    "CurvePoint",
    "CurveTable",
    "Following",
    "Interval",
    "Loop",
    "NoiseOptions",
    "NoiseScale",
    "ProgressRatio",
    "ScaledState",
    "Terms",
    "Throughput",
    "codec_error",
    "correct_curve",
    "efficiency",
    "gain",
    "goodput",
    "progress",
    "progress_ratio",
    "scale_updates",
    "set_batch",
]

# Deprecated names, kept for one release.
_RENAMED = {"corrected": correct_curve, "scaled": scale_updates, "told": set_batch}


def __getattr__(name: str) -> Any:
    """The function of a deprecated name, with a warning that gives the new name."""
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = _RENAMED[name]
    warnings.warn(
        f"autopar.goodput.{name} is now autopar.goodput.{new.__name__}.",
        DeprecationWarning,
        stacklevel=2,
    )
    return new
