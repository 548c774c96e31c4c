"""Elastic runs of one process whose train step are local steps.

A replica trains where all of its devices are there. If devices leave or join, replicas
leave or join with them. A change begins with an outer step, so that nothing is lost
that a leaving replica has learnt, and a joining replica begins where all others are.
If the devices leave before such an outer step would end, what the leaving replicas
learnt since their last outer step is lost, and the run says so.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.cluster import Cluster
from autopar.elastic.driven import Changer, Rest
from autopar.elastic.replanning import Horizon, Outcome, ReplanOption
from autopar.elastic.samples import Samples
from autopar.errors import PlanError
from autopar.plans import Plan
from autopar.runtime.creation import state_shapes
from autopar.runtime.local import changing_replicas
from autopar.runtime.local.changing_replicas import Joining, Replica, Slots
from autopar.runtime.local.state import LocalState
from autopar.runtime.local.steps import LocalSteps
from autopar.runtime.parallel_step import ParallelStep
from autopar.runtime.world import World
from autopar_passes.program.static_leaves import struct_of

LOGGER = logging.getLogger("autopar")


def finite_of(steps: Sequence[ParallelStep[..., Any]]) -> bool | None:
    """Whether the last step of each replica was finite; None: nobody has looked."""
    flags = [step.finite for step in steps]
    if any(flag is None for flag in flags):
        return None
    return all(bool(np.asarray(flag)) for flag in flags)


def run_step(
    step: LocalSteps, state: LocalState, rest: Sequence[Any], named: Mapping[str, Any]
) -> tuple[LocalState, Any]:
    """Runs local steps; returns the next state and the other results."""
    returned = step(state, *rest, **named)
    if isinstance(returned, LocalState):
        return returned, None
    after, *others = returned
    return after, others[0] if len(others) == 1 else tuple(others)


def others_of(step: LocalSteps, count: int, rest: Rest) -> Any:
    """The arguments after the state, as ``others`` of `LocalSteps.init`.

    Args:
      step: the local steps.
      count: number of leading arguments that are the state.
      rest: the arguments after the state, in order and by name.
    """
    in_order, named = rest
    if not named:
        return in_order
    names = list(step.steps[0].parameters.positional(count + len(in_order)))
    return {**dict(zip(names[count:], in_order, strict=True)), **named}


class OuterSteps:
    """Remembers after which step the last outer step of each fragment was.

    Attributes:
      last: for each fragment, the number of steps done then.
    """

    def __init__(self) -> None:
        """Knows no state yet."""
        self.last: list[int] = []
        self._rounds: list[int] = []

    def begin(self, state: LocalState, last: Sequence[int] | None = None) -> None:
        """Begins with a state.

        Args:
          state: the state.
          last: what another object remembered of it; None: the steps before this state
            count as done before an outer step, such as those of a checkpoint.
        """
        self._rounds = [int(n) for n in state.rounds]
        self.last = list(last or [int(state.step)] * len(self._rounds))

    @property
    def rounds(self) -> tuple[int, ...]:
        """For each fragment, the number of outer steps done."""
        return tuple(self._rounds)

    def look(self, state: LocalState) -> None:
        """Takes note of the outer steps that a call has run."""
        for k, rounds in enumerate(map(int, state.rounds)):
            if rounds != self._rounds[k]:
                self._rounds[k], self.last[k] = rounds, int(state.step)

    def open_steps(self, state: LocalState) -> int:
        """Number of steps since which some array has had no outer step."""
        return int(state.step) - min(self.last)


class OfReplicas:
    """Local steps, for the loop of one process (`autopar.elastic.driven.Driven`)."""

    def __init__(self, step: LocalSteps, *, guards: bool = False) -> None:
        """See `Driven`.

        Args:
          step: the local steps.
          guards: whether a replica keeps its state if its step is not finite.

        Raises:
          PlanError: the training begins on a part of a cluster.
        """
        if step.cluster.ids != tuple(range(step.cluster.num_devices)):
            raise PlanError(
                f"elastic: local steps begin with the whole cluster, not with "
                f"{step.cluster}; send an event when devices leave."
            )
        if guards:
            changing_replicas.guard(step)
        self._step, self.whole, self.outer = step, step.world, OuterSteps()
        self.slots = Slots(step.part.num_devices, tuple(range(step.replicas)))
        self._made: tuple[Callable[..., Any], Sequence[Any], Any] | None = None

    @property
    def step(self) -> LocalSteps:
        """The local steps."""
        return self._step

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
        """See `Driven`: the plan of a replica."""
        return self._step.plan

    @property
    def finite(self) -> Any:
        """See `Driven`."""
        return finite_of(self._step.steps)

    @property
    def compression_state(self) -> Any:
        """See `Driven`: the states of codecs are in the `LocalState`."""
        return None

    def changer(self, rows: int) -> Changer:
        """See `Driven`."""
        return ReplicaChanger(self, rows)

    def study(
        self, create_state: Callable[..., Any], args: Sequence[Any], rest: Rest
    ) -> Any:
        """See `Driven`."""
        count = len(state_shapes(create_state, args).arguments())
        others = others_of(self._step, count, rest)
        structs = jax.tree.map(struct_of, others)
        self._made = create_state, args, structs
        return others

    def init(self, create_state: Callable[..., Any], *args: Any, others: Any) -> Any:
        """See `Driven`."""
        state = self._step.init(create_state, *args, others=others)
        changing_replicas.check_whole(self._step)
        return state

    def describe(self, step: LocalSteps) -> LocalState:
        """The state of a training on other devices, as structs; plans it."""
        assert self._made is not None, "the state was created before"
        create_state, args, others = self._made
        return step.describe(create_state, *args, others=others)

    def arguments(self, samples: Samples, step: int, world: World, state: Any) -> Rest:
        """See `Driven`."""
        if not self.outer.last:
            self.outer.begin(state)
        if world.process_count == 1:
            return samples.arguments(step, world)
        return samples.part(step, world.process_index, world.process_count)

    def call(
        self, state: Any, rest: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """See `Driven`."""
        after, result = run_step(self._step, state, rest, named)
        self.outer.look(after)
        return after, result


class ReplicaChanger:
    """Lets replicas leave and join as devices do.

    Attributes:
      rows: samples of a step; the number of replicas divides them.
    """

    def __init__(
        self,
        driven: OfReplicas,
        rows: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts without changes.

        Args:
          driven: the local steps.
          rows: samples of a step.
          clock: returns the present time in seconds.
        """
        self._driven, self.rows, self._clock = driven, rows, clock
        self._begin_s, self._horizon = clock(), Horizon()

    def horizon_s(self, rest_s: float = math.inf) -> float:
        """Seconds until the next expected change of devices; at most ``rest_s``."""
        seen_s = self._clock() - self._begin_s
        return dataclasses.replace(self._horizon, seen_s=seen_s).expected_s(rest_s)

    def change(
        self,
        cluster: Cluster,
        state: LocalState,
        *,
        measured_s: float | None = None,
        left_s: float = math.inf,
        rest_steps: int | None = None,
    ) -> Outcome:
        """Lets replicas leave and join, so that those whose devices are there train.

        Args:
          cluster: the devices that are available now.
          state: the state of all replicas, which is consumed.
          measured_s: measured seconds of a step; unused.
          left_s: seconds until the devices that leave are gone.
          rest_steps: number of steps left in the run; unused.

        Raises:
          PlanError: no replica can train on the cluster; step and state are then
            unchanged.
        """
        del measured_s, rest_steps
        begin, driven = self._clock(), self._driven
        step, old = driven.step, driven.slots
        if step.world.process_count > 1:
            raise PlanError(
                "elastic: the devices of local steps in several processes change under "
                "`autopar run` only."
            )
        if not driven.outer.last:
            driven.outer.begin(state)
        slots = old.next(cluster, lambda count: self.rows % count == 0)
        if slots.used == old.used:
            return self._outcome("stay", step, state, 0, (begin, begin, begin), {})
        part = slots.cluster(cluster)
        world = World(driven.whole.at(part.ids))
        made = changing_replicas.on_devices(step, world, part, len(slots.used))
        like = driven.describe(made)
        changing_replicas.check_whole(made)
        planned = self._clock()
        for own in made.steps:
            own.preparation.compile(own.running.planned)
        compiled = self._clock()
        fields: dict[str, Any] = {"replicas_before": list(old.used)}
        fields |= {"replicas": list(slots.used), "lost_steps": 0}
        if step.outer_s < left_s - (compiled - begin):
            state = step.synchronise(state)
            driven.outer.look(state)
        elif gone := sorted({*old.used} - {*slots.used}):
            fields["lost_steps"] = lost = driven.outer.open_steps(state)
            LOGGER.warning(
                "replicas %s leave in %.3g s, before an outer step could end: what "
                "they learnt in their last %d steps is lost.", gone, left_s, lost,
            )  # fmt: skip
        moved, nbytes = self._move(made, like, state, slots)
        jax.block_until_ready(jax.tree.leaves(moved))
        last = list(driven.outer.last)
        changing_replicas.adopt(step, made)
        driven.slots = slots
        driven.outer.begin(moved, last)
        return self._outcome(
            "replicas", step, moved, nbytes, (begin, planned, compiled), fields
        )

    def _move(
        self, made: LocalSteps, like: LocalState, state: LocalState, slots: Slots
    ) -> tuple[LocalState, int]:
        """The state of the replicas of the next slots, and the bytes of those new."""
        old = self._driven.slots.used
        shared, parts = changing_replicas.take_apart(self._driven.step, state)
        kept = [parts[k] for k, slot in enumerate(old) if slot in slots.used] or parts
        replicas: list[Replica | Joining] = []
        new = 0
        for slot in slots.used:
            if slot in old:
                replicas.append(parts[old.index(slot)])
            else:
                replicas.append(Joining(kept[new % len(kept)]))
                new += 1
        moved = changing_replicas.put_together(made, like, shared, replicas)
        return moved, new * kept[0].nbytes

    def _outcome(
        self,
        name: str,
        step: LocalSteps,
        state: LocalState,
        nbytes: int,
        times: tuple[float, float, float],
        fields: Mapping[str, Any],
    ) -> Outcome:
        changes = self._horizon.changes + 1
        self._horizon = dataclasses.replace(self._horizon, changes=changes)
        begin, planned, compiled = times
        move_s = 0.0 if name == "stay" else self._clock() - compiled
        chosen = ReplanOption(
            name=name,
            cluster=step.cluster,
            plan=step.plan,
            step_s=max(step.plan.predicted.step_s, 1e-9),
            move_bytes=float(nbytes),
            move_s=move_s,
            compiled=True,
            compile_s=0.0,
        )
        return Outcome(
            state=state,
            chosen=chosen,
            compared=(chosen,),
            horizon_s=self.horizon_s(),
            plan_s=planned - begin,
            compile_s=compiled - planned,
            move_s=move_s,
            fields=fields,
        )
