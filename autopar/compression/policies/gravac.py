"""GraVAC: searches for the compression factor with the largest product of speed and
gain.

Tyagi and Swany, "GraVAC: Adaptive compression for communication-efficient distributed
DL training", CLOUD 2023 (arXiv 2305.12201). A level is a codec with some compression
factor. Its *gain* tells how much of the gradient it sends. Let ``g`` be a gradient,
``w`` the gradient plus the residual, and ``C`` the codec of the level. The option
``gain_of`` chooses one of these definitions of the gain::

    gain       = sum E |C(w)| / sum E |g|          (norms)
               = sum E |C(w)|^2 / sum E |w|^2      (energy)
               = mean min(|C(w)| / |g|, |g| / |C(w)|)  (updates)
               = sum <C, g> / sum <g, g>               (signal)
               = sum <C, g> a / sum <g, g> b           (signal-updates; ``b2``)
    throughput = steps per second x gain

The sums are over all gradients of the step. The first definition is from the published
code (github.com/sahiltyagi4/GraVAC, run/compression_throughput.py), the second from the
text of the paper. The third, with a mean over elements, compares the updates that
optimizers such as Adam make (`sum_updates`). With error feedback the first two
definitions differ. Elements that are delayed are sent in the end, so the first gain
returns to 1 or more once the residual is large enough. The second gain is always
smaller if the residual is larger. Measurements are in docs/record. The first gain suits
SGD with momentum, which suffers little from gradients that arrive late. Adam suffers
much from them: with the first gain, the policy compresses too much. With the second
gain it compresses too little, which costs time but no accuracy, so this gain is the
default. In the third gain, late gradients count less, as they do for Adam.

The policy goes through the levels one at a time, from the smallest compression factor
to the largest. The policy uses each level for a window of observations. As long as
throughput improves by more than the fraction ``omega``, the policy tries the next
level; otherwise it goes back to the smaller factor. Whenever the gain falls below
``epsilon``, the policy also goes one level back. Below the first level, gradients are
sent dense. After ``retry`` windows on a level, the policy tries the next level again,
because gains and links change during training. With the option ``explore``, the worse a
level was, the longer the policy waits before it tries the level again. So, as far as
the measurements are right, trials cost at most the fraction ``explore`` of all
progress. With ``explore`` the policy also compares the level in use at the end of each
window, and not only after the first one.

The published code compresses each gradient twice, by the level in use and by the first
level, so that it can use the first level within the same step.
`autopar.compression.synchronise` implements this. The policy reads only the telemetry
of the level in use.

A change to a level with a larger factor only saves time, so a run may postpone it
(`Saving`). Meanwhile the policy observes the gain of the level in use. A change to a
smaller factor is never postponed.

If the option ``rate`` gives a learning rate that falls with the steps, the throughput
counts each step as longer than it is, by a price in seconds. The reason is that
learning-rate schedules count steps, so the number of steps with a large rate is
limited. Let ``gain`` be the progress of a step on a level as a fraction of the progress
of a dense step, ``pace`` the seconds of a step, and ``rate`` the learning rate. A
training that ends at step K has made::

    progress = sum over steps k of rate(k) gain(k)        in    sum of pace(k)  seconds

To reach a given progress in the fewest seconds, each step must take the level with the
largest ``worth rate(k) gain - pace``, where ``worth`` is what a unit of progress is
worth in seconds. If K may be chosen, the last step must be worth exactly the seconds
that it takes. Let ``best`` be the largest ``gain / pace`` over all levels. Then::

    worth = 1 / (rate(K) best)                            (Pontryagin's principle)
    price = max over levels of  gain falls / best - pace,   falls = rate(k) / rate(K)

So the best level is the one with the largest ``gain / (pace + price)``: each remaining
step is worth ``price`` seconds. With a constant rate the price is 0, and levels are
compared by progress per second. With a falling rate, a larger gain is worth slower
steps, because progress that is lost now would have to be made up later at a small rate.

For the gain ``signal-updates`` the policy keeps a second moment of each gradient. Adam
divides by the root of ``v``, a running mean of the squares of received gradients over
about ``1 / (1 - b2)`` steps. After a change of codec, ``v`` still comes from the
previous codec. If the new codec has a larger residual, it sends little at first.
Divided by its own root mean square, this would look like large updates; divided by the
root of ``v`` it is small, as in Adam. After a change to a codec with a smaller
residual, the large values that leave the residual are divided by the root of a small
``v``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from autopar.compression.policies.policy import (
    DENSE,
    GradientReport,
    Observation,
    Remembering,
    Saving,
    canonical_text,
    changed_part,
    check_count,
    check_share,
    managed_gradients,
    restore_state,
    signal_updates,
    squared_norms,
    sum_norms,
    sum_signals,
    sum_updates,
)
from autopar_errors import InputError, check_type

Stepping = Literal["geometric", "exponential"]

TEN_TO_THOUSAND = ("topk:ratio=0.1", "topk:ratio=0.01", "topk:ratio=0.001")
"""Factors 10, 100 and 1000, the range of the paper's top-k."""


def topk_levels(
    least: float = 10.0,
    most: float = 1000.0,
    factor: float = 10.0,
    stepping: Stepping = "geometric",
) -> tuple[str, ...]:
    """Top-k codecs with compression factors from ``least`` to ``most``.

    Args:
      least: the first compression factor: number of elements divided by number of sent
        elements.
      most: the last factor.
      factor: the second factor divided by the first.
      stepping: with ``geometric``, each factor divided by the previous one is
        ``factor``. With ``exponential``, each of these ratios is the square of the
        previous ratio.

    >>> topk_levels(10, 1000)
    ('topk:ratio=0.1', 'topk', 'topk:ratio=0.001')
    >>> topk_levels(10, 1000, 2, "exponential")
    ('topk:ratio=0.1', 'topk:ratio=0.05', 'topk:ratio=0.0125', 'topk:ratio=0.001')
    """
    for name, given in (("least", least), ("most", most), ("factor", factor)):
        check_type(f"topk_levels: {name}", given, (int, float), "a number, such as 10")
    if not (1.0 <= least <= most and factor > 1.0):
        raise InputError(
            "topk_levels: needs 1 <= least <= most and factor > 1, got least="
            f"{least}, most={most}, factor={factor}."
        )
    if stepping not in ("geometric", "exponential"):
        raise InputError(
            f"topk_levels: stepping must be geometric or exponential, got {stepping!r}."
        )
    factors = [least]
    while factors[-1] < most:
        factors.append(min(factors[-1] * factor, most))
        factor = factor**2 if stepping == "exponential" else factor
    return tuple(canonical_text(f"topk:ratio={1.0 / f:.6g}") for f in factors)


def check_rate(rate: Callable[[int], Any], steps: int) -> None:
    """Raises `InputError` unless the learning rate of the last step is positive."""
    if steps < 1:
        raise InputError(
            f"GraVAC: rate needs the number of steps it is for, got steps={steps}; "
            "say steps=10_000 for a training that may end after so many."
        )
    last = float(rate(steps))
    if not (math.isfinite(last) and last > 0.0):
        raise InputError(
            f"GraVAC: rate({steps}) must be positive, got {last}. Steps at "
            "a rate of 0 make no progress; state a smaller number of steps, by which "
            "the training may have reached what it is for."
        )


def falls_by(rate: Callable[[int], Any], step: int, steps: int) -> float:
    """The learning rate of a step divided by the learning rate of the last step, at
    least 1.

    >>> falls_by(lambda k: 1.0 / (1 + k), 1, 9)
    5.0
    """
    return max(1.0, float(rate(min(step, steps))) / float(rate(steps)))


def step_price_s(levels: Sequence[tuple[float, float]], falls: float) -> float:
    """The seconds that the throughput adds to a step; see the module docstring.

    Args:
      levels: for each level, its gain and the seconds of a step.
      falls: learning rate of this step divided by the learning rate of the last step.

    >>> step_price_s([(0.9, 3.0), (0.6, 1.0)], 1.0)
    0.0
    >>> step_price_s([(0.9, 3.0), (0.6, 1.0)], 4.0)
    3.0
    """
    best = max((gain / pace for gain, pace in levels), default=0.0)
    if best <= 0.0:
        return 0.0
    return max(0.0, *(gain * falls / best - pace for gain, pace in levels))


Moments = dict[str, list[float]]
"""By gradient: the running mean of the squares of sent values, the running mean of the
squares of dense gradients, and the bias correction of both (Kingma and Ba, arXiv
1412.6980, section 3).
"""


def update_moments(
    moments: Moments, reports: Mapping[str, GradientReport], b2: float
) -> list[GradientReport]:
    """Replaces the squares in reports by running means, the second moments.

    Args:
      moments: the second moments before this observation, which this function updates.
      reports: gradient -> report; a report without a signal is returned unchanged.
      b2: factor by which the moments decay from one observation to the next.
    """
    return [_update_moment(moments, n, report, b2) for n, report in reports.items()]


def _update_moment(
    moments: Moments, name: str, report: GradientReport, b2: float
) -> GradientReport:
    found = report.signal
    if found is None:
        return report
    new = (found.sent_square, found.dense_square, 1.0)
    old = moments.get(name, [0.0, 0.0, 0.0])
    kept = [b2 * a + (1.0 - b2) * b for a, b in zip(old, new, strict=True)]
    moments[name] = kept
    sent, dense, weight = kept
    signal = dataclasses.replace(
        found, sent_square=sent / weight, dense_square=dense / weight
    )
    return dataclasses.replace(report, signal=signal)


GainOf = Literal["norms", "energy", "updates", "signal", "signal-updates"]

_SIGNALS = {"signal": sum_signals, "signal-updates": signal_updates}
_SUMS = {
    "norms": sum_norms,
    "energy": squared_norms,
    "updates": sum_updates,
    **_SIGNALS,
}

PUT_OFF = -1


@dataclasses.dataclass(slots=True)
class GraVACState:
    """What GraVAC remembers from one observation to the next.

    Attributes:
      names: the gradients whose codecs the policy changes; empty before the first
        observation.
      level: index of the level in use; -1: gradients are sent dense.
      count: number of observations of this level in the present window. With `PUT_OFF`,
        the change to this level is postponed: the level below is still in use, and
        ``sent`` and ``wanted`` are about it.
      seen: number of observations of this level since the policy changed to it.
      sent: running mean of the numerator of the gain.
      wanted: running mean of the denominator of the gain.
      seconds: seconds of a step, summed over the observations of this window.
      throughput: for each level the last measured throughput; None if not measured.
      paces: for each level, the seconds of a step when its throughput was measured.
      waiting: number of windows before the next level is tried again; 0: the policy
        tries one level after another.
      moments: gradient -> second moments as in Adam, for ``signal-updates``.
    """

    names: list[str] = dataclasses.field(default_factory=list[str])
    level: int = 0
    count: int = 0
    seen: int = 0
    sent: float = 0.0
    wanted: float = 0.0
    seconds: float = 0.0
    throughput: list[float | None] = dataclasses.field(
        default_factory=list[float | None]
    )
    paces: list[float] = dataclasses.field(default_factory=list[float])
    waiting: int = 0
    moments: Moments = dataclasses.field(default_factory=dict[str, list[float]])


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraVAC(Remembering):
    """GraVAC's policy, as described in the module docstring.

    Attributes:
      levels: codecs from the least to the largest compression factor.
      every: number of steps between observations.
      window: number of observations of a level before the policy decides; by default
        ``window`` times ``every`` is the paper's window of 25 steps.
      alpha: smallest weight of a new observation in the running means of the norms.
      epsilon: the least gain.
      gain_of: which definition of the gain is used; see the module docstring.
      omega: a larger compression factor is kept only if it improves throughput by this
        fraction.
      retry: number of windows until the next level is tried again.
      explore: the largest fraction of progress that trials of other levels may cost; 0:
        ``retry`` decides when levels are tried.
      horizon: number of steps for which a level is expected to be used; 0: one window.
      b2: factor by which Adam's second moments decay in a step, for ``signal-updates``;
        the default is optax's.
      rate: learning rate as a function of the step number, such as an optax schedule;
        None: a constant rate.
      steps: if ``rate`` is given, the number of the training's last step.
      state: what the policy remembers.
    """

    levels: tuple[str, ...] = TEN_TO_THOUSAND
    every: int = 5
    window: int = 5
    alpha: float = 0.05
    epsilon: float = 0.75
    gain_of: GainOf = "energy"
    omega: float = 0.05
    retry: int = 8
    explore: float = 0.0
    horizon: int = 0
    b2: float = 0.999
    rate: Callable[[int], Any] | None = None
    steps: int = 0
    state: GraVACState = dataclasses.field(
        default_factory=GraVACState, init=False, compare=False
    )

    def __post_init__(self) -> None:
        """Checks the options."""
        if not self.levels:
            raise InputError("GraVAC: needs at least one level; see topk_levels.")
        object.__setattr__(
            self, "levels", tuple(canonical_text(x) for x in self.levels)
        )
        check_count("GraVAC", every=self.every, window=self.window, retry=self.retry)
        steps = self.horizon or self.every * self.window
        object.__setattr__(self, "horizon", steps)
        if self.gain_of not in _SUMS:
            raise InputError(
                f"GraVAC: gain_of must be one of {', '.join(_SUMS)}, got "
                f"{self.gain_of!r}."
            )
        check_share(
            "GraVAC", epsilon=self.epsilon, alpha=self.alpha, explore=self.explore
        )
        if not 0.0 <= self.b2 < 1.0:
            raise InputError(f"GraVAC: b2 must be from 0 to below 1, got {self.b2}.")
        if self.alpha == 0.0 or self.omega < 0.0:
            raise InputError(
                "GraVAC: alpha must be positive and omega not negative, got alpha="
                f"{self.alpha}, omega={self.omega}."
            )

        if self.rate is not None:
            check_rate(self.rate, self.steps)

    @property
    def signals(self) -> bool:
        """Whether steps must measure the signal in messages for this policy."""
        return self.gain_of in _SIGNALS

    @property
    def codec(self) -> str:
        """The codec in use."""
        return self._codec(self.state.level)

    def _codec(self, level: int) -> str:
        return DENSE if level < 0 else self.levels[level]

    @property
    def gain(self) -> float:
        """The mean gain of the level in use; at most 1 if it comes from signals."""
        if self.state.wanted <= 0:
            return 1.0
        found = self.state.sent / self.state.wanted
        return min(1.0, max(0.0, found)) if self.signals else found

    @property
    def _knows_gain(self) -> bool:
        """Whether the gain is known: too much noise may hide the signal."""
        return not self.signals or self.state.level < 0 or self.state.wanted > 0

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        """See `autopar.compression.policies.policy.Policy`."""
        state = self.state
        if not seen.finite:
            return None
        first = not state.names
        if first:
            state.names = managed_gradients(seen.gradients)
            state.throughput = [None] * len(self.levels)
            state.paces = [0.0] * len(self.levels)
        if (self.explore or not first) and self._take_norms(seen):
            used = state.level - (state.count == PUT_OFF)
            if used >= 0 and self.gain < self.epsilon:
                self._move(used - 1, waiting=self.retry)
            elif self._knows_gain and state.count >= (
                self.window if self._compares() else 1
            ):
                self._judge(seen.step)
        wish = changed_part(dict.fromkeys(state.names, self.codec), seen.gradients)
        return Saving(wish) if wish and self._climbs(wish, seen) else wish

    def _climbs(self, wish: Mapping[str, str], seen: Observation) -> bool:
        """Whether ``wish`` is a step up: all gradients that it changes now have the
        codec of a level below.
        """
        below = {DENSE, *self.levels[: max(0, self.state.level)]}
        return all(seen.gradients[name].codec in below for name in wish)

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restores a saved state.

        Raises:
          InputError: the state belongs to another policy or to other levels.
        """
        found = values.get("throughput", ())
        if len(found) not in (0, len(self.levels)):
            raise InputError(
                f"GraVAC: the saved state is of {len(found)} levels, this one has "
                f"{len(self.levels)}."
            )
        restore_state(self.state, values, "GraVAC")

    def _take_norms(self, seen: Observation) -> bool:
        """Adds the reported norms to the running means.

        Returns False if other codecs than those of this level or the level below are in
        use.
        """
        state = self.state
        found = {n: seen.gradients[n] for n in state.names if n in seen.gradients}
        used = {r.codec for r in found.values()}
        waits = state.level >= 0 and used == {self._codec(state.level - 1)}
        if not waits and used != {self.codec}:
            return False
        if waits != (state.count == PUT_OFF):
            self._begin(PUT_OFF if waits else 0)
        reports = list(found.values())
        if self.gain_of == "signal-updates":
            reports = update_moments(state.moments, found, self.b2**self.every)
        sent, wanted = _SUMS[self.gain_of](reports)
        # While there are fewer than 1 / alpha observations, the mean of the norms is a
        # plain mean over all of them.
        weight = max(self.alpha, 1.0 / (state.seen + 1))
        state.sent += weight * (sent - state.sent)
        state.wanted += weight * (wanted - state.wanted)
        state.seen += 1
        if not waits:
            state.seconds += seen.seconds
            state.count += 1
        return True

    def _begin(self, count: int) -> None:
        """Resets the measurements of the level."""
        state = self.state
        state.sent = state.wanted = state.seconds = 0.0
        state.seen, state.count = 0, count

    def _judge(self, step: int) -> None:
        """Decides on the next level, at the end of a window."""
        state = self.state
        here, top = state.level, state.level + 1 == len(self.levels)
        pace = max(state.seconds, 1e-12) / state.count
        if here >= 0:
            self._remember(pace)
        priced, price = self._priced_throughput(step)
        throughput = (priced[here] if here >= 0 else None) or self.gain / (pace + price)
        below = priced[here - 1] if here > 0 else None
        worse = below is not None and throughput < below * (1.0 + self.omega)
        above = None if top or not self.explore else priced[here + 1]
        watched = self.explore > 0.0 or state.waiting == 0
        if worse and watched:
            self._move(here - 1, waiting=self._wait(throughput, below or 0.0))
        elif above is not None and above > throughput * (1.0 + self.omega):
            self._move(here + 1, waiting=self.retry)
        elif state.waiting > 1:
            self._move(here, waiting=state.waiting - 1)
        else:
            self._move(here if top else here + 1, waiting=self.retry if top else 0)

    def _remember(self, pace: float) -> None:
        """Stores the throughput and the step's seconds for the level in this window."""
        state = self.state
        throughput, known = self.gain / pace, state.throughput[state.level]
        # If trials are rare, a single window is not reliable. So the throughput is
        # averaged with the one measured before.
        if self.explore and known is not None:
            throughput = (throughput + known) / 2
        state.throughput[state.level], state.paces[state.level] = throughput, pace

    def _priced_throughput(self, step: int) -> tuple[list[float | None], float]:
        """The throughput of each level with the price added to the seconds of a step;
        and the price.
        """
        state = self.state
        made = list(zip(state.throughput, state.paces, strict=True))
        price = 0.0
        if self.rate is not None:
            known = [(x * pace, pace) for x, pace in made if x is not None]
            price = step_price_s(known, falls_by(self.rate, step, self.steps))
        return [x and x * pace / (pace + price) for x, pace in made], price

    def _compares(self) -> bool:
        """Whether the policy compares this level with another now.

        With ``explore``, the policy leaves the first level after one observation,
        unless steps on other levels may be expensive.
        """
        known = any(x is not None for x in self.state.throughput)
        return known or self.explore == 0.0 or self.rate is not None

    def _wait(self, tried: float, kept: float) -> int:
        """After how many windows a level that made slower progress is tried again."""
        if not (self.explore and kept > 0.0):
            return self.retry
        return max(self.retry, math.ceil(max(0.0, 1.0 - tried / kept) / self.explore))

    def _move(self, level: int, *, waiting: int) -> None:
        """Starts a window on a level."""
        state = self.state
        if level != state.level:
            state.sent = state.wanted = 0.0
            state.seen = 0
        state.level, state.waiting = level, waiting
        state.count, state.seconds = 0, 0.0
