"""A model of a step's seconds that is fitted to few measurements, with priors.

A microbatch of m samples takes ``a + b m``. A synchronisation inside a node takes
``c (K/2)^u`` on K devices. Between nodes it takes ``d (K/n)^v`` on n nodes, times
``e (n/2)^w`` where n > 2: a ring over more than two nodes has other neighbours, not
more bytes. The two overlap: ``(T_grad^g + T_sync^g)^(1/g)``.

All constants but the exponents are positive, so their logarithms are fitted: Gauss and
Newton's steps on the errors of logarithms, each constant held to a prior. Where nothing
was measured the prior decides.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from autopar.scheduler.models.pollux_form import StepSamples

_STEPS = 12
_NOISE = 0.05  # of one measurement, relative
# Priors: of the logarithms of a, b, c, d beside the seconds of a microbatch; of the
# exponents u, v, of log e and of w; of log(g - 1). Chosen on cifar10, imagenet and ncf.
_MEAN = np.array([-0.7, -0.7, -3.5, -0.7, 0.5, 0.55, -0.3, 0.1, 0.0])
_SPREAD = np.array([1.0, 1.0, 1.5, 1.5, 0.5, 0.3, 0.2, 0.15, 0.7])


@dataclasses.dataclass(frozen=True, slots=True)
class PowerTimes:
    """The constants ``(log a, log b, log c, log d, u, v, log e, w, log(g - 1))``."""

    constants: tuple[float, ...]

    def grad_s(self, local: np.ndarray) -> np.ndarray:
        """Seconds of a microbatch."""
        return np.exp(self.constants[0]) + np.exp(self.constants[1]) * local

    def step_s(
        self, nodes: np.ndarray, devices: np.ndarray, local: np.ndarray
    ) -> np.ndarray:
        """Seconds of the microbatch that synchronises."""
        theta = np.array(self.constants)
        log_grad = np.log(self.grad_s(local))
        rows = _sync_rows(np.asarray(nodes, float), np.asarray(devices, float))
        log_sync = np.where(np.asarray(devices) > 1, theta[2:8] @ rows, -30.0)
        g = 1 + np.exp(theta[8])
        return np.exp(np.logaddexp(g * log_grad, g * log_sync) / g)


def fit(samples: StepSamples, start: PowerTimes | None = None) -> PowerTimes:
    """The constants of highest posterior probability for measured steps.

    Args:
      samples: the measurements; one is enough.
      start: constants of an earlier fit, from where it converges faster.
    """
    mean = _MEAN.copy()
    typical = float(np.exp(np.mean(np.log(samples.grad_s))))
    mean[:4] += np.log(typical)
    mean[1] -= np.log(samples.local.mean())
    theta = mean.copy() if start is None else np.array(start.constants)
    rows = _sync_rows(samples.nodes, samples.devices)
    alone = samples.devices <= 1
    error, jacobian = _errors(theta, samples, rows, alone, mean)
    loss, damping = error @ error, 1e-3
    for _ in range(_STEPS):
        normal = jacobian.T @ jacobian
        move = np.linalg.solve(
            normal + damping * np.diag(np.diag(normal)), jacobian.T @ error
        )
        tried = theta - move
        error2, jacobian2 = _errors(tried, samples, rows, alone, mean)
        loss2 = error2 @ error2
        if loss2 < loss:
            done = loss - loss2 < 1e-4 * loss
            theta, error, jacobian, loss = tried, error2, jacobian2, loss2
            damping *= 0.1
            if done:
                break
        else:
            damping *= 10.0
    return PowerTimes(tuple(theta.tolist()))


def _sync_rows(nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
    """What the six constants of a synchronisation are multiplied with; (6, n)."""
    far = (nodes > 1) * 1.0
    near, wide = 1 - far, (nodes > 2) * 1.0
    log_devices, log_nodes = np.log(devices), np.log(nodes)
    return np.array(
        [
            near,
            far,
            near * (log_devices - np.log(2)),
            far * (log_devices - log_nodes),
            wide,
            wide * (log_nodes - np.log(2)),
        ]
    )


def _errors(
    theta: np.ndarray,
    samples: StepSamples,
    rows: np.ndarray,
    alone: np.ndarray,
    mean: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted errors of logarithms and of priors, and their slopes by constant."""
    n = len(samples.local)
    first, second = np.exp(theta[0]), np.exp(theta[1]) * samples.local
    grad = first + second
    log_grad = np.log(grad)
    log_sync = np.where(alone, -30.0, theta[2:8] @ rows)
    g = 1 + np.exp(theta[8])
    log_sum = np.logaddexp(g * log_grad, g * log_sync)
    share = np.exp(g * log_grad - log_sum)
    by_g = (share * log_grad + (1 - share) * log_sync) / g - log_sum / g**2
    slopes = np.zeros((2 * n + len(theta), len(theta)))
    slopes[:n, 0], slopes[:n, 1] = first / grad, second / grad
    slopes[n : 2 * n, :2] = slopes[:n, :2] * share[:, None]
    slopes[n : 2 * n, 2:8] = (rows * np.where(alone, 0.0, 1 - share)).T
    slopes[n : 2 * n, 8] = by_g * (g - 1)
    slopes[: 2 * n] /= _NOISE
    slopes[2 * n :] = np.diag(1 / _SPREAD)
    error = np.concatenate(
        [
            (log_grad - np.log(samples.grad_s)) / _NOISE,
            (log_sum / g - np.log(samples.step_s)) / _NOISE,
            (theta - mean) / _SPREAD,
        ]
    )
    return error, slopes
