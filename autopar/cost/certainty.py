"""How sure a predicted time is, from the terms that it is made of.

Each term of a `CostBreakdown` has a relative error: nine in ten of the cases that were
measured, and that no constant was chosen on, lay within it. Terms are taken for
independent of each other, and what is added up within a term for equally wrong, so the
squares of their errors add. Communication that is predicted to be hidden may lie bare
in part, which makes a step longer and never shorter.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final

from autopar.cluster import DeviceSpec
from autopar.cost.breakdown import CostBreakdown, step_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Certainty:
    """Relative errors of terms, within which nine in ten cases lie.

    Attributes:
      matrix: of the time of matrix products.
      vector: of the time of other operators.
      kernel: of the time of starting kernels.
      transfer: of the time of communication, without latency.
      latency: of latencies.
      codec: of the time of codecs.
      step: of the whole step, for what no term knows: how the software around a
        program orders it, waits between its parts, and feeds it.
      bare: the part of hidden communication that may lie bare.
    """

    matrix: float
    vector: float
    kernel: float
    transfer: float
    latency: float
    codec: float
    step: float
    bare: float


# Held-out rows of XLA's tables (docs/record, "Rates against XLA's measurements"):
# products 12 %, collectives from 1 MiB 29 %, smaller ones 30 %. In a step the rate of
# products falls with the card's power: over the sources of published rows that part is
# .61 to .68 of a card of 700 W, so 6 % besides. Other operators: compiled over
# predicted work of kept-out models is .76 to 1.2. Where XLA fuses otherwise, as many
# kernels start as half or twice those predicted. Codecs add a third to all of what they
# take alone. Half to all of what a compiler may hide is hidden in published runs. What
# runs one after the other takes 10 % longer on average than what overlaps (arXiv
# 2507.03114), and the software decides which.
_TABLED = Certainty(
    matrix=math.hypot(0.12, 0.06),
    vector=0.24,
    kernel=0.5,
    transfer=0.29,
    latency=0.30,
    codec=0.6,
    step=0.10,
    bare=0.5,
)
# Assumption where there is no table: a fifth. Presets take .8 of a datasheet's peak,
# one whole step on v5e kept .86 of it, and published steps on TPUs are within 3 %.
_DATASHEET = dataclasses.replace(_TABLED, matrix=0.20)
# Simulated devices and hosts share cores: measured steps of the examples were .42 to
# 1.5 of those predicted, collectives of 256 KiB up to 70 % from a measured profile's
# (docs/record).
_SHARED_CORES = dataclasses.replace(
    _TABLED, matrix=0.35, vector=0.5, transfer=0.5, latency=0.7
)


# How much more memory XLA's compilers take than predicted, at the most: of the programs
# of docs/data/memory.json, on GPUs of plans for little memory, and on CPUs of those of
# docs/record.
MEMORY_MORE: Final = {"gpu": 0.28, "tpu": 1.31, "cpu": 0.08}
# A plan that needs more than this part of the memory is near the limit, and may not
# fit.
NEAR_LIMIT: Final = 0.75


def certainty_of(device: DeviceSpec) -> Certainty:
    """How sure predictions for a device are."""
    if device.kind == "cpu":
        return _SHARED_CORES
    return _TABLED if device.rates else _DATASHEET


def interval_s(cost: CostBreakdown, device: DeviceSpec) -> tuple[float, float]:
    """Seconds between which nine in ten steps should lie.

    >>> from autopar.cluster import Cluster
    >>> device = Cluster.parse("8:v5e").device
    >>> interval_s(CostBreakdown(matrix_s=1.0), device)  # doctest: +ELLIPSIS
    (0.776..., 1.223...)

    Args:
      cost: of a step.
      device: that it runs on.

    Returns:
      The shortest and the longest, around `step_s` of the cost.
    """
    sure, hideable_s = certainty_of(device), cost.hideable_total_s
    bare = max(0.0, 1.0 - cost.cover_s / hideable_s) if hideable_s else 0.0
    middle = step_s(cost)
    terms = (
        sure.matrix * cost.matrix_s,
        sure.vector * cost.vector_s,
        sure.kernel * cost.kernel_s,
        sure.transfer * (cost.waiting_s + bare * cost.hideable_s),
        sure.latency * (cost.waiting_latency_s + bare * cost.hideable_latency_s),
        sure.codec * cost.codec_s,
        sure.step * middle,
    )
    around = math.hypot(*terms)
    above = math.hypot(around, sure.bare * cost.cover_s)
    return max(0.0, middle - around), middle + above
