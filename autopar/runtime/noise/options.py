"""How the noise of gradients is measured."""

from __future__ import annotations

import dataclasses
from typing import Any

from autopar.errors import PlanError

# Where a measurement sends gradients once more, as beside codecs: one step in so many.
SPARSE = 32
# Of the first `SPARSE` steps one in so many, as nothing is known of the noise yet.
EARLY = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoiseOptions:
    """How the noise of gradients is measured.

    Attributes:
      base_batch: rows of the batch that the learning rate was chosen for, M0; None:
        those of the first batch. Averages forget by ``decay`` in so many rows.
      decay: the part of the averages that a step with the base batch keeps.
      every: measure one step in so many; None: each step, but one in 32 where a
        gradient is sent by a codec, and one in 4 of the first 32. There a measurement
        also sends the gradient as it is.
      preconditioned: whether gradients are divided by the root of the optimizer's
        second moments, as the updates of Adam's family are.
    """

    base_batch: int | None = None
    decay: float = 0.999
    every: int | None = None
    preconditioned: bool = False

    def __post_init__(self) -> None:
        """Checks ranges."""
        for name in ("base_batch", "every"):
            number = getattr(self, name)
            known = isinstance(number, int) and not isinstance(number, bool)
            if number is not None and not (known and number >= 1):
                raise PlanError(
                    f"noise_scale: {name}={number!r}: expected a whole number of at "
                    "least 1, or None."
                )
        if not 0 <= self.decay < 1:
            raise PlanError(
                f"noise_scale: decay={self.decay!r}: expected a part of at least 0 and "
                "below 1, such as 0.999."
            )


def noise_options(given: Any) -> NoiseOptions | None:
    """Reads what was given as ``noise_scale=``; None: nothing is measured.

    Raises:
      PlanError: it is neither a flag nor options.
    """
    if isinstance(given, NoiseOptions):
        return given
    if isinstance(given, bool):
        return NoiseOptions() if given else None
    raise PlanError(
        f"parallelize: noise_scale={given!r}: expected True, False or "
        "autopar.goodput.NoiseOptions(...)."
    )
