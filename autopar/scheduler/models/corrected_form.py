"""The power form, corrected by what was measured near a configuration.

What the form (`power_form`) misses of the logarithms of measured seconds is a Gaussian
process over the logarithms of nodes, devices and samples of a device. Near what was
measured it corrects the form; far away nothing is left of it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from autopar.scheduler.models import gaussian_process, power_form
from autopar.scheduler.models.gaussian_process import Prior, Process
from autopar.scheduler.models.pollux_form import StepSamples
from autopar.scheduler.models.power_form import PowerTimes

# Lengths of nodes, devices and samples of a device, of their logarithms: of the ones
# tried, the most likely on cifar10, imagenet and ncf. There the form misses 0.08 to
# 0.11 of the logarithms (standard deviation). It counts for as many values as Student's
# distribution of errors has degrees of freedom (`autopar.goodput.throughput`).
PRIOR = Prior(lengths=(0.5, 0.5, 1.5), spread=0.1, count=4.0)


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
    form = power_form.fit(samples)
    where = samples.nodes, samples.devices, samples.local
    missed = np.log(samples.step_s / form.step_s(*where))
    return CorrectedTimes(form, gaussian_process.fit(_places(*where)[0], missed, PRIOR))


def _places(
    nodes: np.ndarray, devices: np.ndarray, local: np.ndarray
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Points of a process, (n, 3), and the shape that is asked for."""
    counts = np.broadcast_arrays(nodes, devices, local)
    axes = [np.log(np.maximum(count, 1)) for count in counts]
    return np.stack([axis.ravel() for axis in axes], axis=1), axes[0].shape
