"""Losses, bytes and modelled seconds of a training with a policy."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

# Steps between evaluations.
EVAL_EVERY = 10


@dataclasses.dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
      losses: evaluation losses, after every `EVAL_EVERY` steps.
      nbytes: bytes that one worker has sent until each evaluation.
      time_s: modelled seconds until each evaluation.
      used: codec -> fraction of the steps of compressed gradients with this codec.
    """

    losses: tuple[float, ...]
    nbytes: tuple[float, ...]
    time_s: tuple[float, ...]
    used: dict[str, float]

    @property
    def final(self) -> float:
        """Mean of the last three evaluation losses."""
        return self.after(EVAL_EVERY * len(self.losses))

    def after(self, steps: int) -> float:
        """Mean of the last three evaluation losses up to a step."""
        last = steps // EVAL_EVERY
        return statistics.fmean(self.losses[max(0, last - 3) : last])

    def reach_s(self, target: float) -> float:
        """Modelled seconds until a loss is reached; infinite if it is not reached."""
        for k in range(2, len(self.losses)):
            if statistics.fmean(self.losses[k - 2 : k + 1]) <= target:
                return self.time_s[k]
        return math.inf


@dataclasses.dataclass
class Tally:
    """Adds up bytes and modelled seconds of a run."""

    compute_s: float
    bandwidth: float
    sent: float = 0.0
    clock_s: float = 0.0
    lapped_s: float = 0.0
    marks: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    used: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, codecs: Sequence[str], nbytes: float) -> None:
        """One step."""
        self.sent += nbytes
        self.clock_s += self.compute_s + nbytes / self.bandwidth
        for text in codecs:
            self.used[text] = self.used.get(text, 0) + 1

    def mark(self) -> None:
        """An evaluation."""
        self.marks.append((self.sent, self.clock_s))

    def lap_s(self) -> float:
        """Seconds since the last call."""
        lap, self.lapped_s = self.clock_s - self.lapped_s, self.clock_s
        return lap

    def curve(self, losses: Sequence[float]) -> Curve:
        """The run."""
        total = sum(self.used.values())
        return Curve(
            losses=tuple(losses),
            nbytes=tuple(sent for sent, _ in self.marks),
            time_s=tuple(clock for _, clock in self.marks),
            used={text: count / total for text, count in self.used.items()},
        )


def timed(curve: Curve, compute_s: float, bandwidth: float) -> Curve:
    """The curve of a run without a policy, for another link."""
    time_s = tuple(
        (k + 1) * EVAL_EVERY * compute_s + sent / bandwidth
        for k, sent in enumerate(curve.nbytes)
    )
    return dataclasses.replace(curve, time_s=time_s)


def mix(curve: Curve) -> str:
    """The codecs of large gradients, with their fractions of the steps."""
    return ", ".join(f"{text} {part:.0%}" for text, part in curve.used.items())


def seconds(value: float) -> str:
    """A time as text; a dash for an infinite time."""
    return f"{value:.1f}" if math.isfinite(value) else "-"
