"""Adapts the batch size of a run in all of its processes at the same step.

The measurements and decisions of the loop are stored with the training state of each
step. After processes have joined or left, all processes read them from there. So all of
them change the batch size at the same step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.elastic.loop import Step
from autopar.elastic.samples import Samples
from autopar.goodput.choice import EXACT
from autopar.goodput.following import Following, check_rule
from autopar.goodput.loop import HORIZON_S, Loop, Record
from autopar.goodput.rates import Rule, progress
from autopar.runtime import changing_batches
from autopar.runtime.background import Beside
from autopar.runtime.parallel_step import ParallelStep


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The conditions that end a run with a changing batch size.

    Attributes:
      samples: progress at which the run ends, in rows of the base batch; None: no such
        limit.
      until: a test of each step's result; the run ends once it is true on all
        processes. None: no test.
      steps: number of steps.
    """

    samples: float | None = None
    until: Callable[[Step], bool] | None = None
    steps: float = math.inf

    def is_reached(self, worth: float) -> bool:
        """Whether the run ends at this progress, given in rows of the base batch."""
        return self.samples is not None and worth >= self.samples

    def rest_s(self, step: int, worth: float, gained: float, step_s: float) -> float:
        """Seconds until the run ends; infinite if the end is unknown.

        Args:
          step: number of steps done.
          worth: progress so far, as a number of rows of the base batch.
          gained: progress of the last step, in rows of the base batch.
          step_s: seconds of the last step.
        """
        steps = self.steps - step
        if self.samples is not None and gained > 0:
            steps = min(steps, (self.samples - worth) / gained)
        return math.inf if math.isinf(steps) else max(0.0, steps * step_s)


class TeamFollowing:
    """Adapts the batch size, in each process of a run of several.

    Attributes:
      loop: chooses the batch size.
      ends: conditions that end the run.
      worth: progress so far, in rows of the base batch.
    """

    def __init__(
        self,
        step: ParallelStep[..., Any],
        following: Following,
        *,
        rule: Rule | None,
        ends: Ends,
        record: Record,
        ahead: bool = True,
    ) -> None:
        """Begins with the base batch.

        Args:
          step: the train step.
          following: settings of the adaptive batch size.
          rule: the rule that scales the learning rate, which must be the optimizer's
            rule; None: any rule.
          ends: conditions that end the run.
          record: called with the kind and the fields of each line for the ledger.
          ahead: whether other batches and codecs are planned and compiled beside the
            steps; if not, steps wait for them.
        """
        self._step, self._beside = step, Beside() if ahead else None
        self._rule: Rule | None = rule
        self.ends, self.worth = ends, 0.0
        self._gained, self._step_s = 0.0, 0.0
        self.loop = Loop(
            step,
            following,
            record=record,
            background=None if self._beside is None else self._beside.do,
            horizon_s=lambda: min(HORIZON_S, self._rest_s()),
            rest_s=self._rest_s,
        )

    def begin(self, state: Any) -> Any:
        """Sets the batch size in a new state, or in a state from a checkpoint.

        Raises:
          PlanError: the optimizer was not wrapped with `scale_updates`.
        """
        check_rule(state, self.loop.following.base_batch, self._rule)
        made = self.loop.begin(state)
        self.worth = progress(made)
        return made

    def take(self, notes: Mapping[str, Any]) -> None:
        """Continues from the result of `notes`; called before the step is planned."""
        self.loop.go_on(notes)
        way = notes["way"]
        changing_batches.begin_with(
            self._step, codecs=way["codecs"], microbatches=way["microbatches"]
        )

    def notes(self) -> dict[str, Any]:
        """The loop's measurements and decisions, as data that JSON can hold."""
        return self.loop.to_data()

    def settle(self) -> None:
        """Gives up what is planned or compiled beside the steps.

        All processes of the world call this method before they leave it. It does not
        wait for XLA to end a compilation.
        """
        if self._beside is not None:
            self.loop.cancel()
            self._beside.leave()
            self.loop.resume()

    def measurements(self) -> dict[str, Any]:
        """Measured fields for a line of progress in the ledger.

        Returns:
          ``noise_scale`` in rows of the batch: the text ``inf`` if the mean gradient
          cannot be distinguished from zero, None if it is not known yet. ``progress``
          in rows of the base batch. ``codec_error`` if codecs change the gradients.
        """
        phi = self.loop.phi()
        found: dict[str, Any] = {"noise_scale": None, "progress": self.worth}
        if phi is not None:
            found["noise_scale"] = phi.phi if math.isfinite(phi.phi) else "inf"
        error = self.loop.error
        if math.isfinite(error.own + error.shared) and error != EXACT:
            found["codec_error"] = dataclasses.asdict(error)
        return found

    def after(
        self,
        state: Any,
        rest: Sequence[Any],
        named: Mapping[str, Any],
        seconds: float,
        result: Any,
    ) -> Any:
        """Ends a step; returns the state for the next, whose batch size may differ.

        Args:
          state: the state that the step returned.
          rest: arguments of the step after the state.
          named: arguments of the step by name.
          seconds: seconds of the step.
          result: the values that the step returned besides the state.
        """
        self._step_s = seconds
        made = self.loop.observe(state, *rest, seconds=seconds, loss=result, **named)
        before, self.worth = self.worth, progress(made)
        self._gained = self.worth - before
        return made

    def _rest_s(self) -> float:
        done = self.loop.steps
        return self.ends.rest_s(done, self.worth, self._gained, self._step_s)

    def resize(self, samples: Samples, step: int) -> Samples:
        """The source of samples with the loop's batch size from step ``step`` on."""
        rows = self.loop.batch_size
        return samples if rows == samples.batch else samples.resize(step, rows)
