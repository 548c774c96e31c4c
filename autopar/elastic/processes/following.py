"""The batch size of a run of several processes: all change it at the same step.

The loop's knowledge is kept with the state of each step. Processes that form another
world read it from there. So all processes count the same steps, and change the batch at
the same step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.elastic.loop import Step
from autopar.elastic.samples import Samples
from autopar.goodput.efficiency import EXACT
from autopar.goodput.following import Following, check_rule
from autopar.goodput.loop import HORIZON_S, Loop, Record
from autopar.goodput.rates import Rule, progress
from autopar.runtime import changing_batches
from autopar.runtime.parallel_step import ParallelStep


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The conditions that end a run with a changing batch size.

    Attributes:
      samples: rows of the base batch after which the run ends; None: no such limit.
      until: ends the run after a step for which it is true on all processes; None: no
        such test.
      steps: number of steps.
    """

    samples: float | None = None
    until: Callable[[Step], bool] | None = None
    steps: float = math.inf

    def is_reached(self, worth: float) -> bool:
        """Whether progress of ``worth`` rows of the base batch ends the run."""
        return self.samples is not None and worth >= self.samples

    def rest_s(self, step: int, worth: float, gained: float, step_s: float) -> float:
        """Seconds until the run ends; infinite if the end is unknown.

        Args:
          step: number of steps done.
          worth: progress of these steps, in rows of the base batch.
          gained: progress of the last step, in rows of the base batch.
          step_s: seconds of the last step.
        """
        steps = self.steps - step
        if self.samples is not None and gained > 0:
            steps = min(steps, (self.samples - worth) / gained)
        return math.inf if math.isinf(steps) else max(0.0, steps * step_s)


class TeamFollowing:
    """Adapts the batch size in one process of several.

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
    ) -> None:
        """Begins with the base batch.

        Args:
          step: the train step.
          following: how the batch size follows the gradient noise.
          rule: rule of the learning rate, which the optimizer must have; None: any
            rule.
          ends: conditions that end the run.
          record: takes the kind and the fields of a line of the ledger.
        """
        self._step = step
        self._rule: Rule | None = rule
        self.ends, self.worth = ends, 0.0
        self._gained, self._step_s = 0.0, 0.0
        self.loop = Loop(
            step,
            following,
            record=record,
            horizon_s=lambda: min(HORIZON_S, self._rest_s()),
            rest_s=self._rest_s,
        )

    def begin(self, state: Any) -> Any:
        """Sets the batch size in a new state, or in a state from a checkpoint.

        Raises:
          PlanError: the optimizer was not wrapped with `scaled`.
        """
        check_rule(state, self.loop.following.base_batch, self._rule)
        made = self.loop.begin(state)
        self.worth = progress(made)
        return made

    def take(self, notes: Mapping[str, Any]) -> None:
        """Continues from notes, before the step has a plan in this world."""
        self.loop.go_on(notes)
        way = notes["way"]
        changing_batches.begin_with(
            self._step, codecs=way["codecs"], microbatches=way["microbatches"]
        )

    def notes(self) -> dict[str, Any]:
        """The loop's knowledge as data that JSON can hold."""
        return self.loop.to_data()

    def measurements(self) -> dict[str, Any]:
        """The measured fields of a line of progress.

        Returns:
          ``noise_scale`` in rows: the text ``inf`` if noise hides the mean gradient,
          None if it is not known yet; ``progress`` in rows of the base batch; and
          ``codec_error`` if the codecs are not exact.
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
        """The state for the next step, whose batch size may differ.

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
        """The samples with the loop's batch size, from a step on."""
        rows = self.loop.batch_size
        return samples if rows == samples.batch else samples.resize(step, rows)
