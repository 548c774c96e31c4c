"""The power form of a step's seconds, corrected by what was measured nearby.

What the form (`PowerTimes`) misses of the logarithms of measured seconds is a Gaussian
process over the logarithms of nodes, devices and samples of a device. Near what was
measured it corrects the form; far away nothing is left of it.

*The form.* A microbatch of m samples takes ``a + b m``. A synchronisation inside a node
takes ``c (K/2)^u`` on K devices. Between nodes it takes ``d (K/n)^v`` on n nodes, times
``e (n/2)^w`` where n > 2: a ring over more than two nodes has other neighbours, not
more bytes. The two overlap: ``(T_grad^g + T_sync^g)^(1/g)``.

All constants but the exponents are positive, so their logarithms are fitted: Gauss and
Newton's steps on the errors of logarithms, each constant held to a prior. Where nothing
was measured the prior decides.

*The process* (`Process`) says values near those that were seen, and how sure they are:
Rasmussen and Williams, "Gaussian Processes for Machine Learning", MIT Press 2006. A
value is a smooth part and noise. Smooth parts of two points are correlated by Matern's
kernel of order 3/2, ``(1 + d) exp(-d)``, with d the root of 3 times their distance in
units of *lengths*. Far from all points the smooth part is expected to be 0.

The variance of both, and what part of it is smooth, are those of highest marginal
likelihood. One decomposition of the kernel's matrix serves all parts that are tried.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy.spatial.distance import cdist

from autopar.scheduler.models.pollux_form import StepSamples


@dataclasses.dataclass(frozen=True, slots=True)
class CorrectedTimes:
    """Predicts seconds of microbatches.

    Attributes:
      form: the seconds before they are corrected.
      missed: what the form misses of the logarithm of a step's seconds.
    """

    form: PowerTimes
    missed: Process

    def grad_s(self, local: np.ndarray) -> np.ndarray:
        """Seconds of a microbatch of so many samples a device, by the form."""
        return self.form.grad_s(local)

    def step_s(
        self, nodes: np.ndarray, devices: np.ndarray, local: np.ndarray
    ) -> np.ndarray:
        """Seconds of the microbatch that synchronises."""
        seconds = self.form.step_s(nodes, devices, local)
        places, shape = _places(nodes, devices, local)
        return seconds * np.exp(self.missed.mean(places)).reshape(shape)


def fit(samples: StepSamples) -> CorrectedTimes:
    """Fits the form, and a process to what it misses.

    Args:
      samples: the measurements; one is enough.
    """
    form = fit_power_form(samples)
    where = samples.nodes, samples.devices, samples.local
    missed = np.log(samples.step_s / form.step_s(*where))
    return CorrectedTimes(form, fit_process(_places(*where)[0], missed, PRIOR))


def _places(
    nodes: np.ndarray, devices: np.ndarray, local: np.ndarray
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Points of a process, (n, 3), and the shape that is asked for."""
    counts = np.broadcast_arrays(nodes, devices, local)
    axes = [np.log(np.maximum(count, 1)) for count in counts]
    return np.stack([axis.ravel() for axis in axes], axis=1), axes[0].shape


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


def fit_power_form(samples: StepSamples, start: PowerTimes | None = None) -> PowerTimes:
    """The constants of highest posterior probability for measured steps.

    Args:
      samples: the measurements; one is enough.
      start: constants of an earlier fit_power_form, from where it converges faster.
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


# Parts of the variance that are smooth which are tried; with 0 nothing is predicted.
_PARTS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98)
# Below it an eigenvalue is an error of rounding, beside a kernel of 1.
_TINY = 1e-10


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """What is known after some values were seen.

    Attributes:
      points: where, shape (n, axes), in units of lengths.
      lengths: over which values change, by axis.
      variance: of the smooth part and noise together.
      part: of the variance that is smooth.
      vectors: of the kernel's matrix, (n, n).
      weights: the inverse of the eigenvalues of the values' covariance, without the
        variance, (n,).
      pull: by what the kernel is multiplied for a value, (n,).
    """

    points: np.ndarray
    lengths: np.ndarray
    variance: float
    part: float
    vectors: np.ndarray
    weights: np.ndarray
    pull: np.ndarray

    def mean(self, at: np.ndarray) -> np.ndarray:
        """The smooth part at points, shape (m, axes): most likely, (m,)."""
        return self.part * (self._kernel(at) @ self.pull)

    def spread(self, at: np.ndarray) -> np.ndarray:
        """The smooth part's standard deviation at points, (m,)."""
        seen = self._kernel(at) @ self.vectors
        known = self.part**2 * (seen**2 @ self.weights)
        return np.sqrt(self.variance * np.maximum(self.part - known, 0.0))

    def without(self, groups: np.ndarray) -> np.ndarray:
        """Errors of each value if its group had not been seen, (n,).

        Their variance and part are kept. It is the formula of Rasmussen and Williams
        (5.12) for one value, for several at once.

        Args:
          groups: which values are left out together, (n,).
        """
        inverse = (self.vectors * self.weights) @ self.vectors.T
        errors = np.zeros(len(groups))
        for group in np.unique(groups):
            own = groups == group
            errors[own] = np.linalg.solve(inverse[np.ix_(own, own)], self.pull[own])
        return errors

    def _kernel(self, at: np.ndarray) -> np.ndarray:
        return _kernel(np.asarray(at, float) / self.lengths, self.points)


@dataclasses.dataclass(frozen=True, slots=True)
class Prior:
    """What is believed of a process before a value is seen.

    Attributes:
      lengths: over which values change, by axis.
      spread: standard deviation of values, noise included.
      count: for how many values it counts.
    """

    lengths: tuple[float, ...]
    spread: float
    count: float


def fit_process(points: np.ndarray, values: np.ndarray, prior: Prior) -> Process:
    """The process of highest marginal likelihood.

    Args:
      points: where values were seen, shape (n, axes).
      values: shape (n,).
      prior: what is believed before.
    """
    scaled = np.asarray(points, float) / np.array(prior.lengths)
    eigen, vectors = _decompose(scaled)
    along = vectors.T @ values
    count = len(values) + prior.count
    best = (-np.inf, 0.0, 0.0)
    for part in _PARTS:
        mixed = part * eigen + 1 - part
        variance = (prior.count * prior.spread**2 + (along**2 / mixed).sum()) / count
        likely = -(count * np.log(variance) + np.log(mixed).sum()) / 2
        best = max(best, (float(likely), part, float(variance)))
    _, part, variance = best
    return _process(scaled, prior.lengths, variance, part, (eigen, vectors, along))


def process_of(
    points: np.ndarray,
    values: np.ndarray,
    lengths: tuple[float, ...],
    *,
    variance: float,
    part: float,
) -> Process:
    """The process of a variance and a part that are known; a part of 1 has no noise."""
    scaled = np.asarray(points, float) / np.array(lengths)
    eigen, vectors = _decompose(scaled)
    found = eigen, vectors, vectors.T @ values
    return _process(scaled, lengths, variance, part, found)


def _process(
    scaled: np.ndarray,
    lengths: tuple[float, ...],
    variance: float,
    part: float,
    decomposed: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> Process:
    eigen, vectors, along = decomposed
    weights = 1 / (part * eigen + 1 - part)
    pull = vectors @ (along * weights)
    return Process(scaled, np.array(lengths), variance, part, vectors, weights, pull)


def _decompose(scaled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    eigen, vectors = np.linalg.eigh(_kernel(scaled, scaled))
    return np.maximum(eigen, _TINY), vectors


def _kernel(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Matern's kernel between points of two sets, (len(one), len(other))."""
    far = cdist(one, other)
    far *= -math.sqrt(3)
    kernel = np.exp(far)
    kernel *= 1 - far
    return kernel


# Lengths of nodes, devices and samples of a device, of their logarithms: of the ones
# tried, the most likely on cifar10, imagenet and ncf. There the form misses 0.08 to
# 0.11 of the logarithms (standard deviation). It counts for as many values as Student's
# distribution of errors has degrees of freedom (`autopar.goodput.throughput`).
PRIOR = Prior(lengths=(0.5, 0.5, 1.5), spread=0.1, count=4.0)
