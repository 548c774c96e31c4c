"""What was measured of a program's steps, by one job or by all jobs of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autopar.scheduler.models.goodput import StepModel
from autopar.scheduler.models.pollux_form import StepSamples

Fit = Callable[[StepSamples], StepModel]
"""Makes a model of a step's seconds from measured steps."""


class MeasuredSteps:
    """Measured steps, the model that is fitted to them, and the gradients' noise."""

    def __init__(self, fit: Fit) -> None:
        """Nothing was measured.

        Args:
          fit: makes a model of a step's seconds.
        """
        self._fit = fit
        self._steps: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._noise: dict[int, tuple[float, float]] = {}
        self._model: StepModel | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a step was measured."""
        return bool(self._steps)

    @property
    def most_devices(self) -> int:
        """The most devices that a step was measured on; 0 before the first."""
        return max((devices for _, devices, _ in self._steps), default=0)

    @property
    def first_noise(self) -> tuple[float, float]:
        """The noise of the earliest epoch that was measured (`see_noise`).

        A job that has not begun is taken to be as noisy.
        """
        return self._noise[min(self._noise)]

    def see_step(
        self, nodes: int, devices: int, local: int, step_s: float, sync_s: float
    ) -> None:
        """Keeps the first measurement of each configuration.

        Args:
          nodes: that it ran on.
          devices: on all of them.
          local: samples of a device in a microbatch.
          step_s: seconds of a microbatch that synchronises.
          sync_s: seconds of those in which it does.
        """
        if (key := (nodes, devices, local)) not in self._steps:
            self._steps[key] = step_s, sync_s
            self._model = None

    def see_noise(self, epoch: int, sqr: float, var: float) -> None:
        """Keeps the first measurement of each epoch.

        Args:
          epoch: from 0.
          sqr: squared norm of the gradient.
          var: variance of the gradient of the base batch.
        """
        self._noise.setdefault(epoch, (sqr, var))

    def model(self) -> StepModel:
        """The model of all that was measured; the same one until there is more."""
        if self._model is None:
            nodes, devices, local = np.array(list(self._steps), float).T
            step_s, sync_s = np.array(list(self._steps.values())).T
            samples = StepSamples(nodes, devices, local, step_s - sync_s, step_s)
            self._model = self._fit(samples)
        return self._model
