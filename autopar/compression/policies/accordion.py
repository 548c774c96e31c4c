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

A change to ``high`` saves time, and may be put off (`Saving`); the norms are followed
meanwhile. A change back to ``low`` is never put off.
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
"""Of what is decided on together: ``critical``, ``previous`` (norm of the last window
or None), ``start`` (squared norm of the residual at the window's start, None: to be
taken), ``last`` (the newest one), ``squares`` (sum of |w|^2 - |e|^2), ``count`` and,
once followed, ``codec`` (that in use)."""


@dataclasses.dataclass(slots=True)
class AccordionState:
    """The memory of Accordion between observations.

    Attributes:
      members: the gradients that are decided on together, by a name for them.
      tracks: of each of those; see `Track`.
      step: of the last observation.
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
      high: codec of all others.
      eta: relative change of the norm from which on a regime is critical.
      every: steps between observations.
      window: observations whose norms are put together.
      drops: steps at which the learning rate drops: the window that starts with
        the observation behind one is critical.
      horizon: steps for which a regime stays; 0: one window.
      together: whether all gradients have one regime, from their norms together,
        rather than each its own, as in the paper. Each set of codecs is a program
        to be compiled: two of them instead of many.
      state: what it remembers.
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
            # Another than it wants may be in use still.
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
        """Takes one observation in; decides at the end of the window."""
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
