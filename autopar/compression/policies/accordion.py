"""Accordion: weak compression in critical regimes of training, strong compression in
other regimes.

Agarwal, Wang, Lee, Venkataraman and Papailiopoulos, "Accordion: Adaptive gradient
communication via critical learning regime identification", MLSys 2021 (arXiv
2010.16248). A gradient is critical in a window of steps if its ``norm`` changes,
relative to the window before, by at least ``eta``::

    critical = |previous - norm| / previous >= eta

The first window is critical, and so are windows in which the learning rate drops.
Critical gradients use the codec ``low``, other gradients use ``high``. The windows of
the paper are epochs; here a window is a number of observations.

A report holds the norm of ``w = g + e``, which is the gradient ``g`` plus the residual
``e``. Under ``high`` most of this norm is the residual, so a comparison of these norms
would call every change of level critical. If ``g`` and ``e`` are taken as orthogonal, a
window of T steps with the residuals ``e_0`` to ``e_T`` has

    E |g|^2 = mean (|w_t|^2 - |e_(t-1)|^2)
            = mean (|w_t|^2 - |e_t|^2) + (|e_T|^2 - |e_0|^2) / T

These values are compared. The first observation after a change of level only provides
``e_0``.

A change to ``high`` saves time and may be postponed (`Saving`). Meanwhile the norms are
still observed. A change back to ``low`` is never postponed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.compression.policies.policy import (
    GradientReport,
    Observation,
    Remembering,
    Saving,
    canonical_text,
    changed_part,
    check_count,
    managed_gradients,
)
from autopar_errors import InputError

Track = dict[str, Any]
"""The memory of a set of gradients that are decided on together. ``critical``;
``previous``, the norm of the last window or None; ``start``, the squared norm of the
residual at the window's start (None: not yet observed); ``last``, the newest squared
norm of the residual; ``squares``, the sum of |w|^2 - |e|^2; ``count``; and after the
first observation ``codec``, the codec in use.
"""


@dataclasses.dataclass(slots=True)
class AccordionState:
    """The memory of Accordion between observations.

    Attributes:
      members: the gradients that are decided on together, by name of the set.
      tracks: the memory of each set; see `Track`.
      step: step of the last observation.
    """

    members: dict[str, list[str]] = dataclasses.field(
        default_factory=dict[str, list[str]]
    )
    tracks: dict[str, Track] = dataclasses.field(default_factory=dict[str, Track])
    step: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accordion(Remembering):
    """See the module.

    Attributes:
      low: codec of critical regimes.
      high: codec of all other regimes.
      eta: the least relative change of the norm in a critical regime.
      every: steps between observations.
      window: number of observations in a window.
      drops: steps at which the learning rate drops. The window that starts with the
        next observation after such a step is critical.
      horizon: number of steps for which a regime is expected to last; 0: one window.
      together: whether all gradients have one regime, decided from their joint norm. If
        False, each gradient has its own regime, as in the paper. Each set of codecs
        needs a compiled program: with one regime there are two programs instead of
        many.
      state: memory of the policy.
    """

    low: str = "int8"
    high: str = "powersgd:rank=2"
    eta: float = 0.5
    every: int = 5
    window: int = 4
    drops: tuple[int, ...] = ()
    together: bool = False
    horizon: int = 0
    state: AccordionState = dataclasses.field(
        default_factory=AccordionState, init=False, compare=False
    )

    def __post_init__(self) -> None:
        """Checks the options."""
        object.__setattr__(self, "low", canonical_text(self.low))
        object.__setattr__(self, "high", canonical_text(self.high))
        check_count("Accordion", every=self.every, window=self.window)
        steps = self.horizon or self.every * self.window
        object.__setattr__(self, "horizon", steps)
        if not self.eta > 0:
            raise InputError(f"Accordion: eta must be positive, got {self.eta}.")

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        """See `autopar.compression.policies.policy.Policy`."""
        state = self.state
        if not seen.finite:
            return None
        if not state.tracks:
            self._begin(seen)
        dropped = any(state.step < drop <= seen.step for drop in self.drops)
        for key, track in state.tracks.items():
            names = [n for n in state.members[key] if n in seen.gradients]
            reports = [seen.gradients[name] for name in names]
            used = {report.codec for report in reports}
            # The codec in use may still differ from the wanted codec.
            if len(used) == 1 and used <= {self.low, self.high}:
                self._follow(track, used.pop(), reports)
            if dropped:  # The last norm stays, to be compared with.
                track.update(critical=True, start=None, squares=0.0, count=0)
        state.step = seen.step
        wish = changed_part(self._wish(), seen.gradients)
        return Saving(wish) if wish and set(wish.values()) == {self.high} else wish

    def critical(self) -> tuple[str, ...]:
        """The gradients that are in a critical regime."""
        return tuple(
            name
            for key, track in self.state.tracks.items()
            if track["critical"]
            for name in self.state.members[key]
        )

    def _begin(self, seen: Observation) -> None:
        names = managed_gradients(seen.gradients)
        together = {"all": names} if names else {}
        state = self.state
        state.members = together if self.together else {name: [name] for name in names}
        state.tracks = {key: _fresh() for key in state.members}

    def _wish(self) -> dict[str, str]:
        return {
            name: self._codec(track)
            for key, track in self.state.tracks.items()
            for name in self.state.members[key]
        }

    def _codec(self, track: Track) -> str:
        return self.low if track["critical"] else self.high

    def _follow(
        self, track: Track, codec: str, reports: Sequence[GradientReport]
    ) -> None:
        """Adds one observation to a window, and decides at the end of the window."""
        if track.get("codec", codec) != codec:
            track.update(start=None, squares=0.0, count=0)
        track["codec"] = codec
        residual = math.fsum(r.residual_norm**2 for r in reports)
        if track["start"] is None:
            track["start"] = residual
            return
        track["squares"] += math.fsum(r.norm**2 for r in reports) - residual
        track["last"] = residual
        track["count"] += 1
        if track["count"] < self.window:
            return
        norm = _window_norm(track, self.window * self.every)
        previous = track["previous"]
        # The first window has no window to compare with, and counts as critical.
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
