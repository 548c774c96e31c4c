"""Chooses codecs by what they would lose of samples of the gradients.

`LGreCo` is the method of Alimohammadi et al., "L-GreCo: Layerwise-adaptive gradient
compression for efficient data-parallel deep learning", MLSys 2024 (arXiv
2210.17357): the least bytes with no more error, summed over the layers, than a
reference codec makes, all of one family (see `autopar_solver.lgreco`).

`AcrossFamilies` chooses among all families at once, minimises seconds, and counts
errors as the optimizer does. With ``r`` the relative error of a gradient::

    minimise    sum bytes / bandwidth + rounds latency + elements encode_s
    subject to  sum w r^2 <= budget^2 sum w

with ``w`` its number of elements for Adam, which divides each element by the root
of its mean square so that all weigh the same, and its squared norm for SGD.

Both ask for samples: whoever runs the step gives them by `give_samples` before an
observation, the same ones on every process.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from autopar.compression.policies.probe import (
    QUANTISERS,
    Choice,
    Probe,
    check_samples,
    powersgd_family,
    topk_family,
)
from autopar.compression.policies.signals import (
    DENSE,
    MIN_ELEMENTS,
    canonical,
    changes,
    check_count,
    restore,
    saved,
)
from autopar.compression.policy import Observation
from autopar_solver import (
    CodecSelection,
    LGreCoProblem,
    solve_lgreco,
    solve_selection,
)

Optimizer = Literal["adam", "sgd"]


@dataclasses.dataclass(slots=True)
class SampleState:
    """What a policy that needs samples remembers.

    Attributes:
      codecs: those of the last choice; empty before.
    """

    codecs: dict[str, str] = dataclasses.field(default_factory=dict[str, str])


class Samples:
    """The newest samples; taken once."""

    def __init__(self) -> None:
        """Starts without any."""
        self._newest: dict[str, np.ndarray] = {}

    def give(self, samples: Mapping[str, np.ndarray], where: str) -> None:
        """Takes samples in; those of other gradients stay."""
        check_samples(samples, where)
        self._newest.update({n: np.asarray(s, np.float32) for n, s in samples.items()})

    def take(self) -> dict[str, np.ndarray]:
        """Hands them out and keeps none."""
        newest, self._newest = self._newest, {}
        return newest


@dataclasses.dataclass(frozen=True, kw_only=True)
class LGreCo:
    """See the module.

    Attributes:
      probe: how the gradients are summed.
      reference: codec whose error, summed over the layers, is the budget.
      options: codecs to choose from; default: ranks from half to twice four.
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
        _set_codecs(self, self.reference, self.options)
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
        names, found = _probed(
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
        return _observed(self.state, self.choose, self.samples, seen)

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values; samples are not part of it."""
        return saved(self.state)

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Goes on from a saved state.

        Raises:
          ValueError: it is that of another policy.
        """
        restore(self.state, values, "LGreCo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcrossFamilies:
    """See the module.

    Attributes:
      probe: how the gradients are summed.
      bandwidth_bytes_per_s: of the link of one device.
      latency_s: of a round of communication.
      options: codecs to choose from; dense is always one.
      budget: the largest relative error of all gradients together, in the
        optimizer's metric; None: that of the reference.
      reference: codec that defines the budget.
      optimizer: whose metric counts.
      encode_s_per_element: by name of a codec, seconds to encode and decode an
        element; those not named take none.
      every: steps between choices.
      state: what it remembers.
    """

    needs_samples: ClassVar[bool] = True
    probe: Probe
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    options: tuple[str, ...] = (*QUANTISERS, *powersgd_family(4), *topk_family())
    budget: float | None = None
    reference: str = "int4"
    optimizer: Optimizer = "adam"
    encode_s_per_element: Mapping[str, float] = dataclasses.field(
        default_factory=dict[str, float]
    )
    every: int = 100
    state: SampleState = dataclasses.field(
        default_factory=SampleState, init=False, compare=False
    )
    samples: Samples = dataclasses.field(
        default_factory=Samples, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        """Checks the options."""
        _set_codecs(self, self.reference, self.options)
        check_count("AcrossFamilies", every=self.every)
        if not (self.bandwidth_bytes_per_s > 0 and self.latency_s >= 0):
            raise ValueError(
                "AcrossFamilies: bandwidth_bytes_per_s must be positive and latency_s "
                f"not negative, got {self.bandwidth_bytes_per_s} and {self.latency_s}."
            )
        if self.budget is not None and not self.budget >= 0:
            raise ValueError(
                f"AcrossFamilies: budget must not be negative, got {self.budget}."
            )
        if self.optimizer not in ("adam", "sgd"):
            raise ValueError(
                "AcrossFamilies: optimizer must be adam or sgd, got "
                f"{self.optimizer!r}."
            )

    def choose(self, samples: Mapping[str, np.ndarray]) -> Mapping[str, str]:
        """The codecs for gradients with these samples; see `LGreCo.choose`."""
        texts = (DENSE, self.reference, *self.options)
        names, found = _probed(self.probe, samples, texts, DENSE)
        if not names:
            return {}
        weights = [self._weight(samples[name]) for name in names]
        total = math.fsum(weights) or 1.0
        squares = tuple(
            np.array([weight / total * choice.error**2 for choice in row])
            for weight, row in zip(weights, found, strict=True)
        )
        problem = CodecSelection(
            wire_s=tuple(np.array([self._wire_s(c) for c in row]) for row in found),
            local_s=tuple(
                np.array([self._local_s(c, samples[name].size) for c in row])
                for name, row in zip(names, found, strict=True)
            ),
            error=squares,
            ready_s=(0.0,) * len(names),
            backward_s=0.0,
            error_budget=self._budget(found, squares),
        )
        picked = solve_selection(problem).choices
        return {
            name: row[choice].text
            for name, row, choice in zip(names, found, picked, strict=True)
        }

    def give_samples(self, samples: Mapping[str, np.ndarray]) -> None:
        """Takes samples for the next observation.

        Raises:
          ValueError: one holds numbers that are not finite.
        """
        self.samples.give(samples, "AcrossFamilies")

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        """See `autopar.compression.policy.Policy`."""
        return _observed(self.state, self.choose, self.samples, seen)

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values; samples are not part of it."""
        return saved(self.state)

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Goes on from a saved state.

        Raises:
          ValueError: it is that of another policy.
        """
        restore(self.state, values, "AcrossFamilies")

    def _weight(self, sample: np.ndarray) -> float:
        if self.optimizer == "adam":
            return float(sample.size)
        return float(np.sum(np.square(sample.astype(np.float64))))

    def _wire_s(self, choice: Choice) -> float:
        moving = choice.wire_bytes / self.bandwidth_bytes_per_s
        return moving + choice.rounds * self.latency_s

    def _local_s(self, choice: Choice, elements: int) -> float:
        name = choice.text.partition(":")[0]
        return elements * self.encode_s_per_element.get(name, 0.0)

    def _budget(
        self, found: Sequence[Sequence[Choice]], squares: Sequence[np.ndarray]
    ) -> float:
        """The largest sum of weighted squares."""
        if self.budget is not None:
            return self.budget**2
        of_reference = [
            float(row[k])
            for choices, row in zip(found, squares, strict=True)
            for k, choice in enumerate(choices)
            if choice.text == self.reference
        ]
        return math.fsum(of_reference)


def _set_codecs(policy: Any, reference: str, options: Sequence[str]) -> None:
    """Writes a policy's codecs as the reports do."""
    if not options:
        raise ValueError(f"{type(policy).__name__}: needs at least one option.")
    object.__setattr__(policy, "reference", canonical(reference))
    object.__setattr__(policy, "options", tuple(canonical(text) for text in options))


def _probed(
    probe: Probe, samples: Mapping[str, np.ndarray], texts: Sequence[str], must: str
) -> tuple[list[str], list[tuple[Choice, ...]]]:
    """The gradients worth a codec that ``must`` can be used for, and their choices."""
    names: list[str] = []
    found: list[tuple[Choice, ...]] = []
    for name in sorted(samples):
        sample = samples[name]
        if sample.size < MIN_ELEMENTS or sample.ndim < 2:
            continue
        choices = probe.choices(name, sample, tuple(dict.fromkeys(texts)))
        if any(choice.text == must for choice in choices):
            names.append(name)
            found.append(choices)
    return names, found


def _observed(state: SampleState, choose: Any, samples: Samples, seen: Observation):
    """Chooses anew where there are samples; says what differs."""
    if not seen.finite:
        return None
    newest = samples.take()
    known = {name: s for name, s in newest.items() if name in seen.gradients}
    if known:
        state.codecs.update(choose(known))
    return changes(state.codecs, seen.gradients)
