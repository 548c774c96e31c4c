"""What a policy is: it changes how gradients are sent while training goes on.

A policy looks at the telemetry of a step every so often and answers with the
codecs to use from the next step on, or None to leave them. Each set of codecs is
one compiled program, kept, so a policy that goes back and forth between a few
sets compiles each of them once.

>>> class Halve:
...     every = 100
...     def observe(self, seen):
...         return {name: "int8" for name in seen.gradients}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class GradientReport:
    """What the last step says of one gradient.

    Attributes:
      codec: how it was sent, as text.
      elements: of the whole gradient.
      wire_bytes: bytes that one device sends for it in a step.
      dense_bytes: bytes that one device would send without a codec.
      norm: L2 norm over all workers of what was to be sent, residual included:
        the root of the sum of the squares of the workers' norms.
      relative_error: of what was sent, in the L2 norm.
      gain: squared norm of what was sent, as a part of that of what was to be.
      residual_norm: L2 norm of the residuals of all workers.
    """

    codec: str
    elements: int
    wire_bytes: float
    dense_bytes: float
    norm: float
    relative_error: float
    gain: float
    residual_norm: float


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """What a policy sees.

    Attributes:
      step: number of steps done.
      seconds: of a step, the mean since the last observation, without those that
        compiled; the same on all processes.
      gradients: by name of the parameter.
      finite: whether every gradient was.
    """

    step: int
    seconds: float
    gradients: Mapping[str, GradientReport]
    finite: bool


class Policy(Protocol):
    """Chooses codecs while training; the same on every process."""

    @property
    def every(self) -> int:
        """Steps between observations."""
        ...

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        """The codecs by gradient from now on; those left out stay; None: all stay."""
        ...
