"""Goodput: samples per second times what a sample is worth at its batch."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

_CANDIDATES = 50


class StepModel(Protocol):
    """Predicts seconds of microbatches."""

    def grad_s(self, local: np.ndarray) -> np.ndarray:
        """Seconds of a microbatch of so many samples a device."""
        ...

    def step_s(
        self, nodes: np.ndarray, devices: np.ndarray, local: np.ndarray
    ) -> np.ndarray:
        """Seconds of the microbatch that synchronises."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What batches a program allows.

    Attributes:
      base: the batch it was written for; progress counts in its samples.
      largest: no larger batch.
      least_local: samples of a device in a microbatch, at least.
      most_local: at most.
    """

    base: int
    largest: int
    least_local: int
    most_local: int


@dataclasses.dataclass(frozen=True, slots=True)
class Best:
    """The best batch of each configuration; arrays of one shape.

    Attributes:
      goodput: samples of the base batch per second; 0 where nothing fits.
      local: samples of a device in a microbatch.
      more: microbatches before the last.
    """

    goodput: np.ndarray
    local: np.ndarray
    more: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class GoodputCurve:
    """The goodput of one job, best batch inside, by nodes and devices.

    Attributes:
      times: seconds of its steps.
      sqr: squared norm of its gradient.
      var: variance of the gradient of the base batch.
      limits: the batches it allows.
    """

    times: StepModel
    sqr: float
    var: float
    limits: Limits

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Samples of the base batch per second."""
        return self.best(nodes, devices).goodput

    def efficiency(self, batch: np.ndarray) -> np.ndarray:
        """What a sample is worth beside one of the base batch.

        With noise scale phi = base x var / sqr it is (phi + base) / (phi + batch).
        """
        scale = batch / self.limits.base
        below = self.var / scale + self.sqr
        gain = np.where(below > 0, (self.var + self.sqr) / below, 1.0)
        return gain / scale

    def best(self, nodes: np.ndarray, devices: np.ndarray) -> Best:
        """Tries 50 batches for each configuration and takes the best.

        Args:
          nodes: of each configuration, shape (n,).
          devices: of each configuration, shape (n,).
        """
        limits = self.limits
        nodes, devices = np.atleast_1d(nodes), np.atleast_1d(devices)
        local, more = self._splits(devices)
        batch = np.maximum(devices * local * (more + 1), 1)
        seconds = more * self.times.grad_s(local)
        seconds = seconds + self.times.step_s(nodes, devices, local)
        value = batch / seconds * self.efficiency(batch)
        fits = (limits.least_local <= local) & (local <= limits.most_local)
        value = np.where(fits, value, 0.0)
        chosen = value.argmax(axis=0), np.arange(len(devices))
        return Best(value[chosen], local[chosen], more[chosen])

    def _splits(self, devices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Microbatches of each candidate batch (rows) on each configuration."""
        limits = self.limits
        least = np.maximum(limits.base, limits.least_local * devices)
        batches = np.geomspace(
            least, np.maximum(limits.largest, least), num=_CANDIDATES
        )
        # Where even the least is too large, no candidate is left.
        batches = np.where(least <= limits.largest, batches, 0.0)
        share = batches / devices
        more = np.ceil(share / limits.most_local - 1e-8) - 1
        alone = (devices == 1) & (share > limits.base + 1e-8)
        more = np.maximum(np.where(alone, np.maximum(more, 1), more), 0).astype(int)
        local = np.ceil(share / (more + 1) - 1e-8).astype(int)
        return local, more
