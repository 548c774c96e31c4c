"""The batch of a run of several processes: one decides, and all change at one step.

What the loop knows is kept with the state of each step. Processes that form another
world take it from there, so they count steps alike and decide at the same ones.
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
    """When a run whose batch follows ends, besides its number of steps.

    Attributes:
      samples: rows of the base batch; None: never.
      until: ends it behind a step for which it is true on all processes; None: never.
      steps: how many steps there are.
    """

    samples: float | None = None
    until: Callable[[Step], bool] | None = None
    steps: float = math.inf

    def is_reached(self, worth: float) -> bool:
        """Whether steps were worth so many rows of the base batch."""
        return self.samples is not None and worth >= self.samples

    def rest_s(self, step: int, worth: float, gained: float, step_s: float) -> float:
        """Seconds until the run ends; infinite where nobody can say.

        Args:
          step: number of steps done.
          worth: rows of the base batch that they were worth.
          gained: rows that the last of them was worth.
          step_s: seconds that it took.
        """
        steps = self.steps - step
        if self.samples is not None and gained > 0:
            steps = min(steps, (self.samples - worth) / gained)
        return math.inf if math.isinf(steps) else max(0.0, steps * step_s)


class TeamFollowing:
    """What chooses the batch in one process among several.

    Attributes:
      loop: makes the choice.
      ends: when the run ends.
      worth: rows of the base batch that the steps were worth.
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
          step: the step.
          following: how the batch follows.
          rule: of the learning rate, which the optimizer must have; None: any.
          ends: when the run ends.
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
        """The state before the first step, or after a checkpoint, told the batch.

        Raises:
          PlanError: its optimizer does not follow the batch.
        """
        check_rule(state, self.loop.following.base_batch, self._rule)
        made = self.loop.begin(state)
        self.worth = progress(made)
        return made

    def take(self, notes: Mapping[str, Any]) -> None:
        """Goes on where notes were taken; the step has no plan in this world yet."""
        self.loop.go_on(notes)
        way = notes["way"]
        changing_batches.begin_with(
            self._step, codecs=way["codecs"], microbatches=way["microbatches"]
        )

    def notes(self) -> dict[str, Any]:
        """Where the loop stands, as JSON can hold it."""
        return self.loop.to_data()

    def measured(self) -> dict[str, Any]:
        """What a line of progress says of the noise and of what steps were worth.

        Returns:
          ``noise_scale`` in rows, the text ``inf`` where noise hides the mean gradient,
          None where it is not known yet; ``progress`` in rows of the base batch; and
          ``codec_error`` where the codecs err.
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
        """The state for the next step, whose batch may be another.

        Args:
          state: that the step returned.
          rest: what the step took after the state.
          named: what it took by name.
          seconds: that it took.
          result: what it returned besides the state.
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
        """The samples from a step on, as many as the loop wants."""
        rows = self.loop.batch_size
        return samples if rows == samples.batch else samples.resize(step, rows)
