"""The progress and the speed of a run, as about one line of a ledger per second.

A line of kind ``progress`` holds the number of steps done and of samples consumed, the
median seconds of a step since the line before, and the loss. The loss is the first
number that a step returns. If the batch size follows the gradient noise, the line also
holds the noise scale and the progress of the steps. A line holds microbatches, the
plan's scheme and codecs only if they are not the default.

This module imports JAX. It is separate from `autopar.elastic.ledger`, which supervisors
and `autopar ledger` import without JAX.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from autopar.elastic.ledger import Ledger
from autopar.goodput.configurations import codecs_of_plan
from autopar.plans import Plan

_EVERY_S = 1.0


class Pace:
    """Writes lines of progress to a ledger.

    Attributes:
      loss: the loss of the last line; None: no loss, or a loss that is not finite.
    """

    def __init__(
        self,
        ledger: Ledger,
        every_s: float = _EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Writes nothing yet.

        Args:
          ledger: the ledger for the lines.
          every_s: least seconds between two lines.
          clock: returns the time in seconds.
        """
        self._ledger, self._every_s, self._clock = ledger, every_s, clock
        self._told_s = -math.inf
        self.loss: float | None = None
        self._done_s: float | None = None
        self._seconds: list[float] = []
        # Devices, batch size and plan of a step: times under other values are not
        # comparable.
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
        """Takes a step that has run.

        Args:
          step: number of steps done.
          position: number of samples consumed.
          batch: samples of the next step.
          devices: number of devices of the world that ran the step.
          result: the values that the step returned besides the state.
          plan: fields of the line about the plan (`plan_fields`); None: no fields.
          measured: returns further fields when a line is written; None: no fields.
          last: whether this is the last step. A last step is always written.
          lost: whether the state is not finite any more. Such a step is always written.
        """
        now = self._clock()
        plan = plan or {}
        way = (devices, batch, *sorted(plan.items()))
        if way != self._way:
            # The time since the last step under other values includes the change.
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
        self._ledger.write(
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
    """The fields about a plan: microbatches, scheme and codecs, if it has them."""
    found: dict[str, Any] = {}
    if plan.microbatches > 1:
        found["microbatches"] = plan.microbatches
    if plan.worth is not None and plan.worth.scheme:
        found["scheme"] = plan.worth.scheme
    if codecs := codecs_of_plan(plan):
        found["codecs"] = list(codecs)
    return found


def loss_of(result: Any) -> float | None:
    """The first number in the result of a step; None: the result has no number.

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
