"""What the training loop of one process asks of its train step.

A planned step (`autopar.parallelize`) and local steps (`autopar.local_steps`) give the
same answers, so that one loop trains both (`autopar.elastic.loop`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from autopar.cluster import Cluster
from autopar.elastic.replanning import Outcome, Replanner
from autopar.elastic.samples import Samples, planned_batch
from autopar.elastic.saves import carried_out, splat
from autopar.plans import Plan
from autopar.runtime import changing_batches
from autopar.runtime.creation import state_shapes
from autopar.runtime.local.steps import LocalSteps
from autopar.runtime.parallel_step import ParallelStep
from autopar.runtime.world import World

TrainStep = ParallelStep[..., Any] | LocalSteps
Rest = tuple[tuple[Any, ...], dict[str, Any]]


class Changer(Protocol):
    """Moves a train step and its state to other devices (`Replanner`).

    Attributes:
      rows: samples of a step.
    """

    rows: int

    def change(
        self,
        cluster: Cluster,
        state: Any,
        *,
        measured_s: float | None = None,
        left_s: float = ...,
        rest_steps: int | None = None,
    ) -> Outcome:
        """See `Replanner.change`."""
        ...

    def horizon_s(self, rest_s: float = ...) -> float:
        """See `Replanner.horizon_s`."""
        ...


class Driven(Protocol):
    """A train step that a loop runs."""

    @property
    def world(self) -> World:
        """The processes and devices of the step."""
        ...

    @property
    def cluster(self) -> Cluster:
        """The cluster of the step."""
        ...

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        ...

    @property
    def finite(self) -> Any:
        """Whether the last step was finite; None: the step does not look."""
        ...

    @property
    def compression_state(self) -> Any:
        """The state of the codecs that the step holds itself; None: it holds none."""
        ...

    def changer(self, rows: int) -> Changer:
        """What moves the step to other devices; ``rows`` are the samples of a step."""
        ...

    def study(
        self, create_state: Callable[..., Any], args: Sequence[Any], rest: Rest
    ) -> Sequence[Any] | Mapping[str, Any]:
        """Takes note of the arguments of the step, before it is planned.

        Args:
          create_state: makes the state.
          args: arguments of ``create_state``.
          rest: the arguments after the state, in order and by name.

        Returns:
          The arguments after the state, as ``others`` of the step's ``init``.
        """
        ...

    def init(self, create_state: Callable[..., Any], *args: Any, others: Any) -> Any:
        """Creates the state."""
        ...

    def arguments(self, samples: Samples, step: int, world: World, state: Any) -> Rest:
        """The arguments of a step after the state, in order and by name."""
        ...

    def call(
        self, state: Any, rest: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Runs a step; returns the next state and the other results."""
        ...


class OfPlan:
    """A planned step."""

    def __init__(self, step: ParallelStep[..., Any]) -> None:
        """See `Driven`.

        Args:
          step: the step.
        """
        # A re-plan plans for a whole cluster and for parts of it, and compares the
        # plans.
        step.preparation.planner.uses_all = True
        self._step = step

    @property
    def world(self) -> World:
        """See `Driven`."""
        return self._step.world

    @property
    def cluster(self) -> Cluster:
        """See `Driven`."""
        return self._step.cluster

    @property
    def plan(self) -> Plan:
        """See `Driven`."""
        return self._step.plan

    @property
    def finite(self) -> Any:
        """See `Driven`."""
        return self._step.finite

    @property
    def compression_state(self) -> Any:
        """See `Driven`."""
        return self._step.compression_state

    def changer(self, rows: int) -> Changer:
        """See `Driven`."""
        return Replanner(self._step, rows)

    def study(
        self, create_state: Callable[..., Any], args: Sequence[Any], rest: Rest
    ) -> Sequence[Any] | Mapping[str, Any]:
        """See `Driven`."""
        in_order, named = rest
        if named or self.world.process_count > 1:
            count = len(state_shapes(create_state, args).arguments())
            changing_batches.read_rows(self._step, count)
            if named:
                names = list(inspect.signature(self._step).parameters)
                named = {names[count]: in_order[0], **named}
        return named or in_order

    def init(self, create_state: Callable[..., Any], *args: Any, others: Any) -> Any:
        """See `Driven`."""
        return self._step.init(create_state, *args, others=others)

    def arguments(self, samples: Samples, step: int, world: World, state: Any) -> Rest:
        """See `Driven`."""
        planned = self._step.running.planned
        known = planned_batch(planned, len(splat(state)), world)
        return samples.arguments(step, world, known)

    def call(
        self, state: Any, rest: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """See `Driven`."""
        returned = self._step(*splat(state), *rest, **named)
        return carried_out(self._step.running.analysed.analysis, state, returned)
