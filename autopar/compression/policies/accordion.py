"""Accordion: little compression in critical regimes of training, much elsewhere.

Agarwal, Wang, Lee, Venkataraman and Papailiopoulos, "Accordion: Adaptive gradient
communication via critical learning regime identification", MLSys 2021 (arXiv
2010.16248). Of each gradient, with ``norm`` that of its windows of steps::

    critical = |previous - norm| / previous >= eta

and the first window is critical, as are those in which the learning rate drops.
Critical gradients use the codec ``low``, the others ``high``. The paper's windows
are epochs; here they are observations.

A report holds the norm of ``w = g + e``, residual included, not of the gradient
``g``, and under ``high`` the residual ``e`` is most of it: comparing it would call
every change of level critical. Taking ``g`` and ``e`` as orthogonal, a window of T
steps from residual ``e_0`` to ``e_T`` has

    E |g|^2 = mean (|w_t|^2 - |e_(t-1)|^2)
            = mean (|w_t|^2 - |e_t|^2) + (|e_T|^2 - |e_0|^2) / T

which is what is compared. The observation after a change of level only gives ``e_0``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from autopar.compression.policies.signals import (
    canonical,
    changes,
    check_count,
    managed,
    restore,
    saved,
)
from autopar.compression.policy import GradientReport, Observation

Track = dict[str, Any]
"""Of one gradient: ``critical``, ``previous`` (norm of the last window or None),
``start`` (squared norm of the residual at the window's start, None: to be taken),
``last`` (the newest one), ``squares`` (sum of |w|^2 - |e|^2) and ``count``."""


@dataclasses.dataclass(slots=True)
class AccordionState:
    """What Accordion remembers.

    Attributes:
      tracks: by gradient; see `Track`.
      step: of the last observation.
    """

    tracks: dict[str, Track] = dataclasses.field(default_factory=dict[str, Track])
    step: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accordion:
    """See the module.

    Attributes:
      low: codec of critical regimes.
      high: codec of all others.
      eta: relative change of the norm from which on a regime is critical.
      every: steps between observations.
      window: observations whose norms are put together.
      drops: steps at which the learning rate drops: the window that starts with
        the observation behind one is critical.
      state: what it remembers.
    """

    low: str = "int8"
    high: str = "powersgd:rank=2"
    eta: float = 0.5
    every: int = 5
    window: int = 4
    drops: tuple[int, ...] = ()
    state: AccordionState = dataclasses.field(
        default_factory=AccordionState, init=False, compare=False
    )

    def __post_init__(self) -> None:
        """Checks the options."""
        object.__setattr__(self, "low", canonical(self.low))
        object.__setattr__(self, "high", canonical(self.high))
        check_count("Accordion", every=self.every, window=self.window)
        if not self.eta > 0:
            raise ValueError(f"Accordion: eta must be positive, got {self.eta}.")

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        """See `autopar.compression.policy.Policy`."""
        state = self.state
        if not seen.finite:
            return None
        if not state.tracks:
            state.tracks = {name: _fresh() for name in managed(seen.gradients)}
        dropped = any(state.step < drop <= seen.step for drop in self.drops)
        for name, track in state.tracks.items():
            report = seen.gradients.get(name)
            if report is not None and report.codec == self._codec(track):
                self._follow(track, report)
            if dropped:  # The last norm stays, to be compared with.
                track.update(critical=True, start=None, squares=0.0, count=0)
        state.step = seen.step
        wish = {name: self._codec(track) for name, track in state.tracks.items()}
        return changes(wish, seen.gradients)

    def critical(self) -> tuple[str, ...]:
        """The gradients that are in a critical regime."""
        return tuple(n for n, track in self.state.tracks.items() if track["critical"])

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values."""
        return saved(self.state)

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Goes on from a saved state.

        Raises:
          ValueError: it is that of another policy.
        """
        restore(self.state, values, "Accordion")

    def _codec(self, track: Track) -> str:
        return self.low if track["critical"] else self.high

    def _follow(self, track: Track, report: GradientReport) -> None:
        """Takes one observation in; decides at the end of the window."""
        residual = report.residual_norm**2
        if track["start"] is None:
            track["start"] = residual
            return
        track["squares"] += report.norm**2 - residual
        track["last"] = residual
        track["count"] += 1
        if track["count"] < self.window:
            return
        norm = _window_norm(track, self.window * self.every)
        previous = track["previous"]
        # The first window has none to compare with, and is critical.
        critical = not previous or abs(previous - norm) / previous >= self.eta
        track["previous"] = norm
        changed = critical != track["critical"]
        start = None if changed else residual
        track.update(critical=critical, start=start, squares=0.0, count=0)


def _fresh() -> Track:
    return {
        "critical": True,
        "previous": None,
        "start": None,
        "last": 0.0,
        "squares": 0.0,
        "count": 0,
    }


def _window_norm(track: Track, steps: int) -> float:
    """Norm of the gradient in a window; see the module."""
    grown = (track["last"] - track["start"]) / steps
    return math.sqrt(max(0.0, track["squares"] / track["count"] + grown))
