"""L-GreCo: the least bytes with no more error than one codec makes for all layers.

Alimohammadi et al., "L-GreCo: Layerwise-adaptive gradient compression for efficient
data-parallel deep learning", MLSys 2024 (arXiv 2210.17357): of one family, each layer
gets the parameter with which the bytes are least, while the errors, summed over the
layers, are not more than those of a reference (see `autopar_solver.lgreco`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from autopar.compression.policies.probe import Probe, powersgd_family
from autopar.compression.policies.samples import (
    Samples,
    SampleState,
    observed,
    probed,
    set_codecs,
)
from autopar.compression.policies.signals import check_count, restore, saved
from autopar.compression.policy import Observation
from autopar_solver import LGreCoProblem, solve_lgreco


@dataclasses.dataclass(frozen=True, kw_only=True)
class LGreCo:
    """See the module.

    Attributes:
      probe: how the gradients are summed.
      reference: codec whose error, summed over the layers, is the budget.
      options: codecs to choose from, beside the reference; default: ranks from
        half to twice four.
      every: steps between choices.
      alpha: budget as a multiple of the reference's error.
      state: what it remembers.
    """

    needs_samples: ClassVar[bool] = True
    probe: Probe
    reference: str = "powersgd"
    options: tuple[str, ...] = powersgd_family(4)
    every: int = 100
    alpha: float = 1.0
    state: SampleState = dataclasses.field(
        default_factory=SampleState, init=False, compare=False
    )
    samples: Samples = dataclasses.field(
        default_factory=Samples, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        """Checks the options."""
        set_codecs(self, self.reference, self.options)
        check_count("LGreCo", every=self.every)
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"LGreCo: alpha must be positive, got {self.alpha}.")

    def choose(self, samples: Mapping[str, np.ndarray]) -> Mapping[str, str]:
        """The codecs for gradients with these samples.

        Left out are those for which the reference cannot be used, and all where
        rounding leaves no choice within the budget.

        Args:
          samples: by gradient, of the partial gradient on one device: with its
            residual, and the mean of some steps. Only those with at least
            `MIN_ELEMENTS` are looked at.
        """
        names, found = probed(
            self.probe, samples, (self.reference, *self.options), self.reference
        )
        if not names:
            return {}
        norms = [float(np.linalg.norm(samples[n].astype(np.float64))) for n in names]
        problem = LGreCoProblem(
            error=tuple(
                np.array([norm * choice.error for choice in row])
                for norm, row in zip(norms, found, strict=True)
            ),
            size=tuple(np.array([c.wire_bytes for c in row]) for row in found),
            reference=(0,) * len(names),
            alpha=self.alpha,
        )
        picked = solve_lgreco(problem).choices
        chosen = zip(names, found, picked, strict=True) if picked else ()
        return {name: row[choice].text for name, row, choice in chosen}

    def give_samples(self, samples: Mapping[str, np.ndarray]) -> None:
        """Takes samples for the next observation.

        Raises:
          ValueError: one holds numbers that are not finite.
        """
        self.samples.give(samples, "LGreCo")

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        """See `autopar.compression.policy.Policy`."""
        return observed(self.state, self.choose, self.samples, seen)

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values; samples are not part of it."""
        return saved(self.state)

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Goes on from a saved state.

        Raises:
          ValueError: it is that of another policy.
        """
        restore(self.state, values, "LGreCo")
