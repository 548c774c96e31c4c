"""A run whose batch, plan and codecs follow its noise: `autopar.train` makes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.cluster import Cluster
from autopar.elastic.beside import Beside
from autopar.elastic.events import Event
from autopar.elastic.ledger import Ledger
from autopar.elastic.loop import ElasticRun, Step
from autopar.elastic.nans import Finiteness
from autopar.elastic.resolve import Resolved
from autopar.errors import PlanError
from autopar.goodput.following import Following
from autopar.goodput.loop import Loop
from autopar.goodput.rates import progress
from autopar.plans import Plan
from autopar.runtime.parallel_step import ParallelStep


class TrainRun:
    """A run of a step whose batch follows; iterate over it to train.

    Attributes:
      run: the elastic run below it.
      loop: what chooses the batch.
    """

    def __init__(
        self,
        run: ElasticRun,
        step: ParallelStep[..., Any],
        following: Following,
        *,
        samples: float | None = None,
        until: Callable[[Step], bool] | None = None,
        beside: Beside | None = None,
    ) -> None:
        """See `autopar.train`, which makes these.

        Args:
          run: the elastic run; it has made no step yet.
          step: the step.
          following: how the batch follows.
          samples: rows of the base batch after which it ends; None: never.
          until: ends the run behind a step for which it is true; None: never.
          beside: prepares other ways; None: steps wait for them.
        """
        self.run, self._beside = run, beside
        self._samples, self._until = samples, until
        self.loop = Loop(
            step,
            following,
            record=self._write,
            background=None if beside is None else beside.do,
            horizon_s=self._horizon_s,
            rest_s=self._rest_s,
        )
        self._step_s = math.nan
        self._worth = 0.0

    def begin(self, create_state: Callable[..., Any], args: Sequence[Any]) -> None:
        """Creates the state, or goes on where a checkpoint was left.

        Args:
          create_state: makes the state.
          args: its arguments.
        """
        self.run.create(create_state, args)
        if self.run.notes is not None:
            self.loop.go_on(self.run.notes)
            self.run.resize(self.loop.batch_size)
        self._step_s = self.run.plan.predicted.step_s
        rest, named = self.run.arguments()
        self.run.state = self.loop.begin(self.run.state, *rest, **named)
        self.run.keep(self.loop.to_data)
        self._worth = progress(self.run.state)

    @property
    def nans(self) -> Finiteness:
        """Counts the steps that were not finite."""
        return self.run.nans

    @property
    def state(self) -> Any:
        """The carried state."""
        return self.run.state

    @property
    def step(self) -> int:
        """Number of the next step."""
        return self.run.step

    @property
    def position(self) -> int:
        """Number of the first sample of the next step."""
        return self.run.position

    @property
    def batch_size(self) -> int:
        """Samples of the next step."""
        return self.loop.batch_size

    @property
    def progress(self) -> float:
        """Rows of the base batch that the steps were worth."""
        return self._worth

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self.run.plan

    @property
    def compression_state(self) -> Any:
        """The state of the codecs (`autopar.ParallelStep.compression_state`)."""
        return self.run.compression_state

    @property
    def ledger(self) -> Ledger:
        """What was written of events, re-plans and changes of the batch."""
        return self.run.ledger

    @property
    def sources(self) -> Any:
        """The sources of events."""
        return self.run.sources

    def change(self, event: Event | Cluster | str | Mapping[str, Any]) -> Resolved:
        """Asks for a change of the devices (`ElasticRun.change`)."""
        return self.run.change(event)

    def stop(self) -> None:
        """Ends the run before the next step."""
        self.run.stop()

    def close(self) -> None:
        """Ends the run and its sources; once is enough, and more do no harm."""
        self.run.close()
        if self._beside is not None:
            self._beside.close()

    def __iter__(self) -> TrainRun:
        """The run itself: it can be left and gone on with."""
        return self

    def __next__(self) -> Step:
        """Runs one step, and lets the batch of the next one follow.

        Raises:
          StopIteration: the run is at its end, or was stopped.
          PlanError: the source has no more samples; the state is that before the step.
        """
        if self._samples is not None and self._worth >= self._samples:
            self.run.stop()
        try:
            done = next(self.run)
        except PlanError:  # such as a source that has no more samples
            self.run.save()
            raise
        self._step_s = done.seconds
        rest, named = self.run.arguments()
        self.run.state = self.loop.observe(
            self.run.state, *rest, seconds=done.seconds, loss=done.result, **named
        )
        if self.loop.batch_size != self.run.batch:
            self.run.resize(self.loop.batch_size)
        self._worth = progress(self.run.state)
        if self._until is not None and self._until(done):
            self.run.stop()
        return done

    def _horizon_s(self) -> float:
        """Seconds until the next change of devices, or the end of the run."""
        steps = self.run.rest_steps
        rest_s = self._rest_s() if steps is None else max(0.0, steps * self._step_s)
        return self.run.horizon_s(rest_s)

    def _rest_s(self) -> float:
        """Seconds that the rest of the rows takes; infinite where no number is said."""
        if self._samples is None:
            return math.inf
        each = float(self.loop.following.base_batch)
        if self._worth > 0 and self.run.step:
            each = self._worth / self.run.step
        return max(0.0, (self._samples - self._worth) / each * self._step_s)

    def _write(self, kind: str, **fields: Any) -> None:
        """Writes a line of the ledger, with where the run stands."""
        where = {"step": self.run.step, "position": self.run.position}
        self.run.ledger.write(kind, **{**where, **fields})
