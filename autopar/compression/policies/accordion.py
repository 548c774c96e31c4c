"""Accordion: compresses gradients less in critical regimes of training, and more in
other regimes.

Agarwal, Wang, Lee, Venkataraman and Papailiopoulos, "Accordion: Adaptive gradient
communication via critical learning regime identification", MLSys 2021 (arXiv
2010.16248). A gradient is *critical* in a window of steps if its ``norm`` differs from
its norm in the previous window by at least the fraction ``eta``::

    critical = |previous - norm| / previous >= eta

The first window counts as critical, and so do windows in which the learning rate drops.
Critical gradients are sent by the codec ``low``, other gradients by the codec ``high``.
In the paper a window is an epoch; here it is a number of observations.

A report holds the norm of ``w = g + e``, the gradient ``g`` plus the residual ``e``.
With the codec ``high``, most of this norm comes from the residual. So every change of
codec would look critical if these norms were compared. Assume that ``g`` and ``e`` are
orthogonal. Then a window of T steps with the residuals ``e_0`` to ``e_T`` has

    E |g|^2 = mean (|w_t|^2 - |e_(t-1)|^2)
            = mean (|w_t|^2 - |e_t|^2) + (|e_T|^2 - |e_0|^2) / T

Accordion compares these values. The first observation after a change of codec is only
used for ``e_0``.

A change to ``high`` only saves time, so a run may postpone it (`Saving`). Until then,
Accordion continues to observe norms. A change back to ``low`` is never postponed.
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
    """What Accordion remembers from one observation to the next.

    Attributes:
      members: name of a set of gradients -> the gradients, for which one decision is
        made.
      tracks: name of a set of gradients -> its norms in the present window (`Track`).
      step: step of the last observation.
    """

    members: dict[str, list[str]] = dataclasses.field(
        default_factory=dict[str, list[str]]
    )
    tracks: dict[str, Track] = dataclasses.field(default_factory=dict[str, Track])
    step: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accordion(Remembering):
    """Accordion's policy; the rule is in the module docstring.

    Attributes:
      low: codec in critical regimes.
      high: codec in all other regimes.
      eta: a regime is critical if the norm changed by at least this fraction.
      every: number of steps between observations.
      window: number of observations in a window.
      drops: numbers of the steps at which the learning rate drops. After such a step,
        the window that starts with the next observation counts as critical.
      horizon: number of steps for which a regime is expected to last, to compare the
        time that a change saves with its cost; 0: one window.
      together: whether all gradients have one regime, which follows from the norm of
        all of them together. If False, each gradient has its own regime, as in the
        paper. Each combination of codecs needs a compiled program of its own: with one
        regime there are two programs, and otherwise many.
      state: what the policy remembers.
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
            # If the run has postponed a change, the codec in use is not the chosen
            # codec.
            if len(used) == 1 and used <= {self.low, self.high}:
                self._follow(track, used.pop(), reports)
            if dropped:  # The last norm stays, for the comparison with the next window.
                track.update(critical=True, start=None, squares=0.0, count=0)
        state.step = seen.step
        wish = changed_part(self._wish(), seen.gradients)
        return Saving(wish) if wish and set(wish.values()) == {self.high} else wish

    def critical(self) -> tuple[str, ...]:
        """Names of the gradients that are in a critical regime."""
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
        """Adds an observation to a window; at the end of the window, decides."""
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
        # The first window has no previous window to be compared with, so it counts as
        # critical.
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
    """Norm of the gradient in a window, by the formula of the module docstring."""
    grown = (track["last"] - track["start"]) / steps
    return math.sqrt(max(0.0, track["squares"] / track["count"] + grown))
