"""Pollux's model of the seconds of a step.

Qiao et al., "Pollux: Co-adaptive cluster scheduling for goodput-optimized deep
learning", OSDI 2021. A microbatch of m samples takes ``T_grad = a_c + b_c m`` seconds.
A synchronisation over K devices takes ``T_sync = a + b max(K - 2, 0)`` seconds. The
constants a and b are (a_r, b_r) inside a node and (a_n, b_n) between nodes. Work and
synchronisation overlap in part: a step takes ``(T_grad^g + T_sync^g)^(1/g)`` seconds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from scipy.optimize import Bounds, minimize  # SciPy comes with JAX

_TINY = 1e-8
_START = np.array([1e-1, 1e-2] * 3 + [1.0 + 1e-3])


@dataclasses.dataclass(frozen=True, slots=True)
class StepSamples:
    """Measured steps, as arrays of equal length.

    Attributes:
      nodes: number of nodes of each step.
      devices: number of devices of each step.
      local: samples per device in a microbatch.
      grad_s: seconds of a microbatch without synchronisation.
      step_s: seconds of a step's last microbatch, with its synchronisation.
    """

    nodes: np.ndarray
    devices: np.ndarray
    local: np.ndarray
    grad_s: np.ndarray
    step_s: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class PolluxTimes:
    """Pollux's model of the seconds of a step.

    A microbatch of m samples takes ``T_grad = a_c + b_c m``. A synchronisation over K
    devices takes ``T_sync = a + b max(K - 2, 0)``, with (a_r, b_r) inside a node and
    (a_n, b_n) between nodes. A step takes ``(T_grad^g + T_sync^g)^(1/g)``.

    Attributes:
      constants: ``(a_c, b_c, a_n, b_n, a_r, b_r, g)``; g has no unit, all others are
        seconds.
    """

    constants: tuple[float, ...]

    def grad_s(self, local: np.ndarray) -> np.ndarray:
        """Seconds of a microbatch."""
        return self.constants[0] + self.constants[1] * local

    def step_s(
        self, nodes: np.ndarray, devices: np.ndarray, local: np.ndarray
    ) -> np.ndarray:
        """Seconds of the last microbatch of a step, with its synchronisation."""
        g = self.constants[6]
        sync = _sync(np.array(self.constants), nodes, devices)
        return (self.grad_s(local) ** g + sync**g) ** (1 / g)


def fit(samples: StepSamples) -> PolluxTimes:
    """Fits the constants to measured steps.

    A constant on which no measured step depends gets a small, optimistic value.
    """
    low, high, start = _box(samples)
    bounds: Any = Bounds
    bounds = bounds(low, high, keep_feasible=True)  # SciPy's stubs allow no arrays
    result = minimize(_loss, start, args=(samples,), jac=True, bounds=bounds)
    found = result.x
    if not np.any(samples.nodes > 1):
        found[2] = max(found[2], found[4] * 1.1)
        found[3] = max(found[3], found[5] * 1.1)
    return PolluxTimes(tuple(found.tolist()))


def _box(samples: StepSamples) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower bounds, upper bounds and start values of the constants.

    If no sample depends on a constant, both bounds equal the lower bound.
    """
    low = np.array([_TINY] * 6 + [1.0])
    high = np.array([np.inf] * 6 + [10.0])
    start = _START.copy()
    held: list[int] = []
    if not np.any(samples.nodes > 1):
        held += [2, 3]
    if not np.any((samples.nodes == 1) & (samples.devices > 1)):
        held += [4, 5]
    if not np.any(samples.devices > 2):
        held += [3, 5]
    start[held] = high[held] = low[held]
    if len(np.unique(samples.local)) == 1:
        start[0] = low[0] = high[0] = samples.grad_s.mean() / 2
    return low, high, start


def _sync(c: np.ndarray, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
    far, near = nodes > 1, (nodes <= 1) & (devices > 1)
    first = np.where(far, c[2], np.where(near, c[4], _TINY))
    more = np.where(far, c[3], np.where(near, c[5], _TINY))
    return first + more * np.maximum(devices - 2, _TINY)


def _loss(c: np.ndarray, samples: StepSamples) -> tuple[float, np.ndarray]:
    """The objective of the fit and its gradient.

    The objective is the root mean square error of logarithms, plus penalties.
    """
    g = c[6]
    grad = c[0] + c[1] * samples.local
    sync = _sync(c, samples.nodes, samples.devices)
    log_grad, log_sync = np.log(grad), np.log(sync)
    top = np.maximum(log_grad, log_sync)
    log_sum = g * top + np.log(
        np.exp(g * (log_grad - top)) + np.exp(g * (log_sync - top))
    )
    share = np.exp(g * log_grad - log_sum)  # T_grad^g / (T_grad^g + T_sync^g)
    error1 = log_grad - np.log(samples.grad_s)
    error2 = log_sum / g - np.log(samples.step_s)
    rms1, rms2 = _rms(error1), _rms(error2)
    slope1 = error1 / (len(error1) * max(rms1, 1e-300))
    slope2 = error2 / (len(error2) * max(rms2, 1e-300))
    by_grad = (slope1 + slope2 * share) / grad
    by_sync = slope2 * (1 - share) / sync
    by_g = share * log_grad + (1 - share) * log_sync
    by_g = slope2 @ (by_g / g - log_sum / g**2)
    ratio_n, ratio_r = c[3] / c[2], c[5] / c[4]
    loss = rms1 + rms2 + 1e-3 * (g - 1) ** 2 + 1e-2 * (ratio_n**2 + ratio_r**2)
    far = samples.nodes > 1
    near = ~far & (samples.devices > 1)
    wide = np.maximum(samples.devices - 2, _TINY)
    slope = np.array(
        [
            by_grad.sum(),
            by_grad @ samples.local,
            by_sync @ far - 2e-2 * ratio_n**2 / c[2],
            by_sync @ (far * wide) + 2e-2 * ratio_n / c[2],
            by_sync @ near - 2e-2 * ratio_r**2 / c[4],
            by_sync @ (near * wide) + 2e-2 * ratio_r / c[4],
            by_g + 2e-3 * (g - 1),
        ]
    )
    return float(loss), slope


def _rms(errors: np.ndarray) -> float:
    return float(np.sqrt(errors @ errors / len(errors)))
