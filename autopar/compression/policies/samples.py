"""What the policies have in common that choose codecs by samples of the gradients.

Whoever runs the step gives them by ``give_samples`` before an observation, the same
ones on every process: of each partial gradient on one device, with its residual, and
the mean of some steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from autopar.compression.policies.probe import Choice, Probe, check_samples
from autopar.compression.policies.signals import MIN_ELEMENTS, canonical, changes
from autopar.compression.policy import Observation

Chooser = Callable[[Mapping[str, np.ndarray]], Mapping[str, str]]


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


def set_codecs(policy: Any, reference: str, options: Sequence[str]) -> None:
    """Writes a policy's codecs as the reports do."""
    if not options:
        raise ValueError(f"{type(policy).__name__}: needs at least one option.")
    object.__setattr__(policy, "reference", canonical(reference))
    object.__setattr__(policy, "options", tuple(canonical(text) for text in options))


def probed(
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


def observed(
    state: SampleState, choose: Chooser, samples: Samples, seen: Observation
) -> dict[str, str] | None:
    """Chooses anew where there are samples; says what differs."""
    if not seen.finite:
        return None
    newest = samples.take()
    known = {name: s for name, s in newest.items() if name in seen.gradients}
    if known:
        state.codecs.update(choose(known))
    return changes(state.codecs, seen.gradients)
