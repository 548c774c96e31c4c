"""Goodput of one job: the noise of its gradients, and the progress per batch.

>>> from autopar.goodput import NoiseOptions, efficiency, scaled
"""

from autopar.goodput.curves import CurvePoint, CurveTable, corrected
from autopar.goodput.efficiency import (
    CodecError,
    codec_error,
    efficiency,
    gain,
    goodput,
)
from autopar.goodput.following import (
    CriticalRegimes,
    Following,
    ProgressRatio,
    progress_ratio,
)
from autopar.goodput.loop import Loop
from autopar.goodput.rates import ScaledState, progress, scaled, told
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
    "corrected",
    "efficiency",
    "gain",
    "goodput",
    "progress",
    "progress_ratio",
    "scaled",
    "told",
]
