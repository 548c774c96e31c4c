"""A Gaussian process: values near those that were seen, and how sure they are.

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
from scipy.spatial.distance import cdist  # SciPy comes with JAX

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


def fit(points: np.ndarray, values: np.ndarray, prior: Prior) -> Process:
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
