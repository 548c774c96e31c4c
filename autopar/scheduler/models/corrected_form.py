"""A parametric model of a step's seconds, corrected by nearby measurements.

The model is a parametric form (`PowerTimes`) times a correction. The form's error is
the logarithm of the measured seconds minus the logarithm of the form's prediction. A
Gaussian process over the logarithms of nodes, devices and samples per device predicts
this error. Near measured configurations the process corrects the form. Far from them
the correction is 0.

*The form.* A microbatch of m samples takes ``T_grad = a + b m`` seconds. A
synchronisation takes ``T_sync = c (K/2)^u`` seconds on K devices of one node. On K
devices of n nodes, T_sync is ``d (K/n)^v``, times ``e (n/2)^w`` if n > 2: in a ring
over more than two nodes, devices send to other neighbours, but not more bytes. Work and
synchronisation overlap in part: a step takes ``(T_grad^g + T_sync^g)^(1/g)`` seconds.

The constants other than the exponents are positive, so the fit varies their logarithms.
Gauss-Newton steps minimise the sum of the squared errors and of a prior term for each
constant. If no measurement depends on a constant, the prior alone determines it.

*The process* (`Process`) predicts values near measured values, with their standard
deviation (Rasmussen and Williams, "Gaussian Processes for Machine Learning", MIT Press
2006). A value is the sum of a smooth part and noise. The smooth parts of two points
have the correlation ``(1 + d) exp(-d)`` (Matern's kernel of order 3/2). Here d is
sqrt(3) times the distance of the points, where the coordinate on each axis is divided
by the axis's length scale. Far from all measured points the smooth part has a mean of
0.

The fit chooses the variance of the values, and the smooth part's fraction of this
variance, to maximise the marginal likelihood. The fit computes one eigendecomposition
of the kernel matrix for all fractions that it tries.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy.spatial.distance import cdist

from autopar.scheduler.models.pollux_form import StepSamples


@dataclasses.dataclass(frozen=True, slots=True)
class CorrectedTimes:
    """Predicts the seconds of a step's microbatches.

    Attributes:
      form: predicts seconds without the correction.
      missed: the Gaussian process that predicts the form's error.
    """

    form: PowerTimes
    missed: Process

    def grad_s(self, local: np.ndarray) -> np.ndarray:
        """Seconds of a microbatch, by the form alone; ``local`` samples per device."""
        return self.form.grad_s(local)

    def step_s(
        self, nodes: np.ndarray, devices: np.ndarray, local: np.ndarray
    ) -> np.ndarray:
        """Seconds of the last microbatch of a step, with its synchronisation."""
        seconds = self.form.step_s(nodes, devices, local)
        places, shape = _places(nodes, devices, local)
        return seconds * np.exp(self.missed.mean(places)).reshape(shape)


def fit(samples: StepSamples) -> CorrectedTimes:
    """Fits the form, and a Gaussian process to the form's errors.

    Args:
      samples: the measurements; one measurement is enough.
    """
    form = fit_power_form(samples)
    where = samples.nodes, samples.devices, samples.local
    missed = np.log(samples.step_s / form.step_s(*where))
    return CorrectedTimes(form, fit_process(_places(*where)[0], missed, PRIOR))


def _places(
    nodes: np.ndarray, devices: np.ndarray, local: np.ndarray
) -> tuple[np.ndarray, tuple[int, ...]]:
    """The arguments as points of shape (n, 3), and their common broadcast shape."""
    counts = np.broadcast_arrays(nodes, devices, local)
    axes = [np.log(np.maximum(count, 1)) for count in counts]
    return np.stack([axis.ravel() for axis in axes], axis=1), axes[0].shape


_STEPS = 12
_NOISE = 0.05  # Assumed relative standard deviation of a measurement.
# Means and standard deviations of the priors of log a, log b, log c, log d, u, v,
# log e, w and log(g - 1). The constants are named in the module's docstring. The first
# four means are added to the logarithm of the seconds of a microbatch. All values were
# chosen with the measurements of cifar10, imagenet and ncf that were published with
# Pollux.
_MEAN = np.array([-0.7, -0.7, -3.5, -0.7, 0.5, 0.55, -0.3, 0.1, 0.0])
_SPREAD = np.array([1.0, 1.0, 1.5, 1.5, 0.5, 0.3, 0.2, 0.15, 0.7])


@dataclasses.dataclass(frozen=True, slots=True)
class PowerTimes:
    """The parametric form of the seconds of a step.

    With m samples per device on K devices and n nodes, a microbatch takes
    ``T_grad = a + b m`` seconds. A synchronisation takes ``T_sync = c (K/2)^u`` seconds
    inside a node. Between nodes it takes ``d (K/n)^v``, times ``e (n/2)^w`` where
    n > 2. A step takes ``(T_grad^g + T_sync^g)^(1/g)``.

    Attributes:
      constants: ``(log a, log b, log c, log d, u, v, log e, w, log(g - 1))``.
    """

    constants: tuple[float, ...]

    def grad_s(self, local: np.ndarray) -> np.ndarray:
        """Seconds of a microbatch."""
        return np.exp(self.constants[0]) + np.exp(self.constants[1]) * local

    def step_s(
        self, nodes: np.ndarray, devices: np.ndarray, local: np.ndarray
    ) -> np.ndarray:
        """Seconds of the last microbatch of a step, with its synchronisation."""
        theta = np.array(self.constants)
        log_grad = np.log(self.grad_s(local))
        rows = _sync_rows(np.asarray(nodes, float), np.asarray(devices, float))
        log_sync = np.where(np.asarray(devices) > 1, theta[2:8] @ rows, -30.0)
        g = 1 + np.exp(theta[8])
        return np.exp(np.logaddexp(g * log_grad, g * log_sync) / g)


def fit_power_form(samples: StepSamples, start: PowerTimes | None = None) -> PowerTimes:
    """The constants with the highest posterior probability, given measured steps.

    Args:
      samples: the measurements; one measurement is enough.
      start: constants of an earlier fit to start from, for faster convergence.
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
    """Factors of log c, log d, u, v, log e and w in the sum log T_sync, (6, n)."""
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
    """Weighted errors of log seconds, then prior terms; and their derivatives.

    The derivatives are those by each constant of the form.
    """
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


# The fit tries these values for the smooth part's fraction of the variance. With 0 the
# process predicts 0 everywhere.
_PARTS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98)
# The kernel of a point with itself is 1. Eigenvalues of the kernel matrix below this
# number are rounding errors.
_TINY = 1e-10


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """A Gaussian process conditioned on measured values.

    Attributes:
      points: the measured points, shape (n, axes), divided by ``lengths``.
      lengths: the length scale of each axis.
      variance: variance of a value: of its smooth part and its noise together.
      part: fraction of the variance that is smooth.
      vectors: eigenvectors of the kernel matrix, (n, n).
      weights: inverse eigenvalues of the values' covariance divided by ``variance``,
        (n,).
      pull: the inverse of the values' covariance divided by ``variance``, times the
        values, (n,).
    """

    points: np.ndarray
    lengths: np.ndarray
    variance: float
    part: float
    vectors: np.ndarray
    weights: np.ndarray
    pull: np.ndarray

    def mean(self, at: np.ndarray) -> np.ndarray:
        """The mean of the smooth part, (m,), at points of shape (m, axes)."""
        return self.part * (self._kernel(at) @ self.pull)

    def spread(self, at: np.ndarray) -> np.ndarray:
        """The standard deviation of the smooth part, (m,), at points (m, axes)."""
        seen = self._kernel(at) @ self.vectors
        known = self.part**2 * (seen**2 @ self.weights)
        return np.sqrt(self.variance * np.maximum(self.part - known, 0.0))

    def without(self, groups: np.ndarray) -> np.ndarray:
        """Each value minus the value predicted for it from all other groups, (n,).

        The variance and the smooth fraction come from the fit to all values. The
        formula generalises (5.12) of Rasmussen and Williams to groups of values.

        Args:
          groups: the group of each value, (n,). To predict a value, all values of its
            group are left out.
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
    """The prior of a process.

    Attributes:
      lengths: the length scale of each axis.
      spread: standard deviation of values, noise included.
      count: weight of the prior, as the number of measured values that would have the
        same weight.
    """

    lengths: tuple[float, ...]
    spread: float
    count: float


def fit_process(points: np.ndarray, values: np.ndarray, prior: Prior) -> Process:
    """Fits the variance and its smooth part, by maximum marginal likelihood.

    Args:
      points: the measured points, shape (n, axes).
      values: the measured values, shape (n,).
      prior: the prior of the process.
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
    """Makes a process of this variance; ``part`` of it is smooth (1: no noise)."""
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
    """Matern's kernel for each pair of points, shape (len(one), len(other))."""
    far = cdist(one, other)
    far *= -math.sqrt(3)
    kernel = np.exp(far)
    kernel *= 1 - far
    return kernel


# Length scales of the logarithms of nodes, devices and samples per device. Of the
# lengths that were tried, these have the highest likelihood on Pollux's measurements of
# cifar10, imagenet and ncf. On these programs, the form's errors (in logarithms of
# seconds) have a standard deviation of 0.08 to 0.11. The weight of the prior is the
# number of degrees of freedom that `autopar.goodput.throughput` uses for Student's
# distribution of errors.
PRIOR = Prior(lengths=(0.5, 0.5, 1.5), spread=0.1, count=4.0)
