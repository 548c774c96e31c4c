"""Reports the progress and the speed of a run, about one line per second.

A line of kind ``progress`` holds the number of steps done and of samples consumed, the
median seconds of a step since the previous line, and the loss. The loss is the first
number in the values that a step returns. If the batch size follows the gradient noise,
the line also holds the noise scale, and the progress, as the number of rows of the base
batch that would give the same progress. A line names the number of microbatches, the
plan's parallelism scheme and the codecs only if they are not the default.

This module imports JAX. `autopar.elastic.ledger` is a separate module, because
supervisors and the command `autopar ledger` import it and do not need JAX.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from autopar.goodput.configurations import codecs_of_plan
from autopar.plans import Plan

_EVERY_S = 1.0


class Pace:
    """Reports lines of progress.

    Attributes:
      loss: the loss in the last line; None if there was no loss, or if it was not
        finite.
    """

    def __init__(
        self,
        write: Callable[..., object],
        every_s: float = _EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Writes nothing yet.

        Args:
          write: takes the kind of a line, and its fields by name.
          every_s: least seconds between two lines.
          clock: returns the time in seconds.
        """
        self._write, self._every_s, self._clock = write, every_s, clock
        self._told_s = -math.inf
        self.loss: float | None = None
        self._done_s: float | None = None
        self._seconds: list[float] = []
        # Devices, batch size and plan of the last step. The seconds of two steps are
        # compared only if these values are equal.
        self._way: tuple[Any, ...] = ()

    def take(
        self,
        step: int,
        position: int,
        batch: int,
        devices: int,
        result: Any,
        *,
        plan: Mapping[str, Any] | None = None,
        measured: Callable[[], Mapping[str, Any]] | None = None,
        last: bool = False,
        lost: bool = False,
    ) -> None:
        """Records a step that has run, and writes a line if one is due.

        Args:
          step: number of steps done.
          position: number of samples consumed.
          batch: samples of the next step.
          devices: number of devices that ran the step.
          result: the values that the step returned besides the state.
          plan: fields about the plan for the line (`plan_fields`); None: no fields.
          measured: called when a line is written; returns further fields for it. None:
            no further fields.
          last: whether this is the last step, for which a line is always written.
          lost: whether the state is no longer finite. Then a line is always written.
        """
        now = self._clock()
        plan = plan or {}
        way = (devices, batch, *sorted(plan.items()))
        if way != self._way:
            # The time since the last step includes the change to the new devices, batch
            # size or plan, so it is not the time of a step.
            self._way, self._seconds, self._done_s = way, [], None
        if self._done_s is not None:
            self._seconds.append(now - self._done_s)
        self._done_s = now
        if now - self._told_s < self._every_s and not (last or lost):
            return
        loss = loss_of(result)
        finite = loss is None or math.isfinite(loss)
        self.loss = loss if finite else None
        fields = {} if measured is None else dict(measured())
        self._write(
            "progress",
            step=step,
            position=position,
            batch=batch,
            devices=devices,
            steps=len(self._seconds),
            step_s=statistics.median(self._seconds) if self._seconds else None,
            loss=self.loss,
            finite=finite and not lost,
            noise_scale=fields.pop("noise_scale", None),
            **plan,
            **fields,
        )
        self._told_s, self._seconds = now, []


def plan_fields(plan: Plan) -> dict[str, Any]:
    """Microbatches, scheme and codecs of a plan, where they are not the default."""
    found: dict[str, Any] = {}
    if plan.microbatches > 1:
        found["microbatches"] = plan.microbatches
    if plan.worth is not None and plan.worth.scheme:
        found["scheme"] = plan.worth.scheme
    if codecs := codecs_of_plan(plan):
        found["codecs"] = list(codecs)
    return found


def loss_of(result: Any) -> float | None:
    """The first number in the result of a step; None if it holds no number.

    >>> loss_of({"accuracy": np.ones(3), "loss": np.float32(0.5)})
    0.5
    """
    for leaf in jax.tree.leaves(result):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            continue
        found = np.asarray(leaf)
        if found.ndim == 0 and found.dtype.kind in "fiu":
            return float(found)
        if found.ndim == 0 and jax.numpy.issubdtype(found.dtype, jax.numpy.floating):
            return float(found.astype(np.float32))
    return None
