"""Adapts a training loop's batch size, microbatches, plan and codecs to gradient noise.

`Loop` is for training loops that a user writes. `autopar.train` uses a `Loop`, too. In
this module a *way* is one choice of batch size, number of microbatches and codecs
(`autopar.goodput.choice.Way`). The running way is the choice now in use.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autopar.goodput.choice import (
    CodecError,
    Decision,
    PhiRange,
    Way,
    decide,
    json_number,
)
from autopar.goodput.following import (
    Following,
    LossGuard,
    check_data,
    check_rule,
    finite,
    loss_in,
)
from autopar.goodput.rates import gain_of, set_batch
from autopar.goodput.studies import (
    Now,
    Said,
    agree_on_first,
    choose_first,
    key_of,
    now_of,
    with_key,
    worth_now,
)
from autopar.goodput.throughput import Throughput
from autopar.goodput.ways import Key, PlannedWay, Ways
from autopar.progress import LOGGER
from autopar.runtime import changing_batches
from autopar.runtime.background import AbandonedError
from autopar.runtime.noise.averages import NoiseOptions, NoiseScale
from autopar.runtime.parallel_step import ParallelStep
from autopar.runtime.world import in_lane

# The lines that a loop with an adaptive batch size writes into the ledger of its run
# (`autopar.elastic.ledger`).


def way_data(made: PlannedWay) -> dict[str, Any]:
    """A planned way (batch, microbatches, codecs) as data for a line of a ledger."""
    return {
        **dataclasses.asdict(made.key),
        "cluster": made.plan.cluster.text,
        "meshes": [dict(s.mesh["axes"]) for s in made.plan.stages],
        "step_s": made.plan.predicted.step_s,
    }


def stay_line(
    made: PlannedWay, decision: Decision, phi: PhiRange | None
) -> dict[str, Any] | None:
    """A ledger line with the reason to keep the running way; None if there is no other.

    Args:
      made: the running way.
      decision: the comparison of the running way with other ways.
      phi: the estimated noise scale of gradients.
    """
    others = [x for x in decision.compared if x is not decision.current]
    if not others:
        return None
    nearest = max(others, key=lambda x: x.pays)
    return {
        "way": way_data(made),
        "nearest_name": nearest.way.name,
        "nearest": nearest.to_data(),
        "compared": len(decision.compared),
        "horizon_s": json_number(decision.horizon_s),
        "phi": None if phi is None else numbers(phi),
    }


def change_line(
    old: PlannedWay,
    new: PlannedWay,
    phi: PhiRange | None,
    decision: Decision,
    pause_s: float,
) -> dict[str, Any]:
    """A ledger line that describes a change of way and its reason.

    Args:
      old: the way before the change.
      new: the way after the change.
      phi: the estimated noise scale of gradients; None: it was not known.
      decision: the comparison that chose the new way.
      pause_s: seconds during which no step ran.
    """
    return {
        "old": way_data(old),
        "new": way_data(new),
        "phi": None if phi is None else numbers(phi),
        "compared": [x.to_data() for x in decision.compared],
        "predicted": {
            "horizon_s": decision.horizon_s,
            **decision.chosen.to_data(),
            "goodput_before": decision.current.goodput,
        },
        "measured": {"pause_s": pause_s},
    }


def cap_line(
    step: int, loss: float, before: LossGuard, now: LossGuard, gain: float
) -> dict[str, Any]:
    """A ledger line with the new limit of the gain, after a loss rose; also warns.

    Args:
      step: number of the step after which the limit is lowered.
      loss: the loss that rose.
      before: the guard before the step.
      now: the guard after the step.
      gain: gain of the step.
    """
    LOGGER.warning(
        "step %d: the loss rose to %.4g, so steps count at most %.3g of the base "
        "batch (%.3g before)", step, loss, now.most, gain,
    )  # fmt: skip
    return {
        "step": step,
        "loss": json_number(loss),
        "limit": before.limit,
        "gain": gain,
        "most": now.most,
    }


def numbers(phi: PhiRange) -> dict[str, float | None]:
    """A noise scale and its bounds as numbers that JSON can hold."""
    found = {"phi": phi.phi, "low": phi.low, "high": phi.high}
    return {k: json_number(x) for k, x in found.items()}


# The uncertainty of the noise scale, from the estimates of single steps.
#
# Each step gives an estimate of the squared norm of the mean gradient and an estimate
# of the variance of a row's gradient. `autopar.runtime.noise` averages the estimates of
# many steps. The standard error of an average is the standard deviation of single
# steps' estimates, divided by the square root of the number of averaged steps.

# The standard deviation is that of the last `_KEPT` steps at most. With fewer than
# `_FEWEST` steps, it is not computed.
_KEPT, _FEWEST = 64, 5


@dataclasses.dataclass(frozen=True, slots=True)
class PhiTrack:
    """Noise estimates of the latest single steps; `with_step` returns a new track.

    Attributes:
      sqr: each step's estimate of the squared norm of the mean gradient.
      var: each step's estimate of the variance of one row's gradient.
      last: the averages after the last step; None before the first step.
    """

    sqr: tuple[float, ...] = ()
    var: tuple[float, ...] = ()
    last: NoiseScale | None = None

    def with_step(self, scale: NoiseScale) -> PhiTrack:
        """Adds the estimates of a step, unless its gradients are not finite."""
        numbers = (scale.local, scale.total, scale.sqr, scale.var)
        seen = self.last is not None and scale.steps == self.last.steps
        if seen or scale.steps < 1 or not all(map(math.isfinite, numbers)):
            return self
        n = max(scale.groups, 2)
        rows = scale.rows * (2 if scale.groups < 2 else 1)
        sqr = (n * scale.total - scale.local) / (n - 1)
        var = (scale.local - scale.total) * rows / (n - 1)
        return PhiTrack((*self.sqr, sqr)[-_KEPT:], (*self.var, var)[-_KEPT:], scale)

    def range(self, decay: float, base_batch: float, sigmas: float) -> PhiRange | None:
        """The noise scale with bounds; None: too few steps have run.

        Args:
          decay: factor by which older estimates lose weight in the running averages,
            per step with the base batch.
          base_batch: rows of the base batch.
          sigmas: distance of the bounds from the estimate, in standard deviations.
        """
        scale = self.last
        if scale is None or len(self.sqr) < _FEWEST or math.isnan(scale.phi):
            return None
        keep = decay ** (scale.rows / base_batch)
        held = min(float(scale.steps), (1 + keep) / max(1 - keep, 1e-9))
        # If a step has only one group of gradients, its gradient is compared with that
        # of the step before. This estimate is biased, so the range is made twice as
        # wide.
        wide = sigmas * (2.0 if scale.biased else 1.0) / math.sqrt(held)
        sqr = wide * statistics.stdev(self.sqr)
        var = wide * statistics.stdev(self.var)
        low = max(0.0, scale.var - var) / (scale.sqr + sqr) if scale.sqr + sqr else 0.0
        rest = scale.sqr - sqr
        high = (scale.var + var) / rest if rest > 0 else math.inf
        return PhiRange(scale.phi, min(low, scale.phi), max(high, scale.phi))

    def to_data(self) -> dict[str, Any]:
        """The track as data that JSON can hold."""
        last = None if self.last is None else dataclasses.asdict(self.last)
        return {"sqr": list(self.sqr), "var": list(self.var), "last": last}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> PhiTrack:
        """The track from the result of `to_data`."""
        found: dict[str, Any] | None = data.get("last")
        last: NoiseScale | None = None
        if found is not None:
            fields: dict[str, Any] = dict(found)
            fields["left_out"] = tuple(found.get("left_out", ()))
            fields["excess"] = math.nan if found["excess"] is None else found["excess"]
            last = NoiseScale(**fields)
        return cls(tuple(data["sqr"]), tuple(data["var"]), last)


# After a change of way, the first `_UNTIMED` steps are not timed, and the next decision
# comes after `_SETTLED` steps.
_UNTIMED, _SETTLED = 2, 8
# The largest number of ways that the loop plans for one decision.
_EXPLORED = 3
# Assumed seconds until the next change of devices, if they are not known.
HORIZON_S = 600.0

# Numbers the loops of this process; a loop has the same number in all processes.
_LANES = itertools.count()

Record = Callable[..., None]
Work = Callable[[], None]


class _CancelledError(Exception):
    """A preparation beside the steps was cancelled."""


class Loop:
    """Chooses the batch size of each step, and changes it if a change pays off.

    >>> # loop = Loop(train, following)
    >>> # batch = source(position, loop.batch_size)
    >>> # state, loss = train(state, batch)
    >>> # state = loop.observe(state, batch, seconds=seconds, loss=loss)

    Attributes:
      step: the step.
      following: the settings of the loop.
      batch_size: rows of the next batch.
      changes: how often batch, microbatches or codecs have changed so far.
    """

    def __init__(
        self,
        step: ParallelStep[..., Any],
        following: Following,
        *,
        record: Record | None = None,
        background: Callable[[Work], None] | None = None,
        horizon_s: Callable[[], float] | None = None,
        rest_s: Callable[[], float] | None = None,
    ) -> None:
        """Begins with the base batch.

        Args:
          step: the step. If it does not measure the noise of its gradients, the loop
            turns the measurement on. This is possible only before the step has run.
          following: the settings of the loop.
          record: called with the kind and the fields of each line for the ledger.
          background: runs planning and compilation concurrently with the steps; None:
            the loop waits for them.
          horizon_s: returns the seconds until the next expected change, such as a
            change of devices.
          rest_s: returns the seconds that the rest of the job takes with the running
            way; None: the job has no known end.

        Raises:
          PlanError: the step has run without measuring noise.
        """
        self.step, self.following = step, following
        options = step.preparation.planner.options
        noise = NoiseOptions(base_batch=following.base_batch)
        changing_batches.measure_noise(step, noise)
        self.batch_size = following.base_batch
        self.changes = 0
        self._record = record or (lambda kind, **fields: None)
        self._background = background
        self._horizon_s = horizon_s or (lambda: HORIZON_S)
        self._rest_s = rest_s or (lambda: math.inf)
        self._ways = Ways(
            step,
            base_batch=following.base_batch,
            max_batch=following.max_batch,
            codecs=following.codecs,
        )
        asked = options.microbatches
        self._parts = asked if isinstance(asked, int) else None
        self._times, self._track = Throughput(), PhiTrack()
        self._rule = following.rule
        self._guard, self._gain = LossGuard(), 1.0
        self._steps = self._since = 0
        self._running: Any = None
        self._world: Any = None
        self._key: Key | None = None
        self._busy, self._cancelled = threading.Event(), threading.Event()
        self._ways.anchors.check = self._check
        self._lane = f"batches {next(_LANES)}"
        self._before: tuple[int, float, float] | None = None
        self._named = False
        self._kept = 0

    def begin(self, state: Any, *rest: Any, **named: Any) -> Any:
        """Writes the batch size into the state before the first step.

        Without this call, `observe` writes it after the first step.

        Args:
          state: the state.
          rest: arguments of the first step after the state, as arrays or
            `jax.ShapeDtypeStruct`. If they are given, the loop chooses the codecs of
            the first step before the step is compiled. The step must then have a plan
            (`ParallelStep.init`).
          named: keyword arguments of the first step.

        Raises:
          PlanError: the state's optimizer does not scale with the batch
            (`scale_updates`).
        """
        check_rule(state, self.following.base_batch)
        self._named = True
        if (rest or named) and self._key is None:
            state = self._begin(state, rest, named)
        return set_batch(state, batch=self.batch_size, phi=self._sure_phi())

    def _now(self, made: PlannedWay, state: Any, rest: Any, named: Any) -> Now:
        way = self._ways.way(made, runs=True)
        return now_of(self.step, made, way, state, rest, named)

    def _begin(self, state: Any, rest: Any, named: Any) -> Any:
        """Chooses the codecs of the first step, and moves the state to its plan."""
        made = self._ways.running(self.batch_size)
        now = self._now(made, state, rest, named)
        said = choose_first(
            self.step.world, self._ways, now, self.following,
            horizon_s=self._horizon_s(), rest_s=self._rest_s(),
        )  # fmt: skip
        found = None if said.key is None else self._prepare(said.key, now)
        if found is None or said.decision is None:
            return state
        state = self._change(state, made, found, said.decision)
        self._before = None  # no step ran before this change
        return state

    @property
    def steps(self) -> int:
        """Number of observed steps, including the steps before a restart (`go_on`)."""
        return self._steps

    @property
    def busy(self) -> bool:
        """Whether another way is being prepared concurrently with the steps."""
        return self._busy.is_set()

    def to_data(self) -> dict[str, Any]:
        """The state of the loop as data that JSON can hold."""
        key = self._key or Key(self.batch_size, 1, "none")
        return {
            "way": dataclasses.asdict(key),
            "base_batch": self.following.base_batch,
            "changes": self.changes,
            "steps": self._steps,
            "since": self._since,
            "times": self._times.to_data(),
            "track": self._track.to_data(),
            "rule": None if self._rule is None else self._rule.to_data(),
            "guard": self._guard.to_data(),
        }

    def go_on(self, data: Mapping[str, Any]) -> None:
        """Restores the state of the loop from the result of `to_data`.

        Raises:
          PlanError: the data come from a loop with another base batch, or not from a
            loop.
        """
        check_data(data, self.following)
        self._key = Key(**data["way"])
        self.batch_size = self._key.rows
        self.changes = int(data["changes"])
        self._steps, self._since = int(data["steps"]), int(data["since"])
        self._times = Throughput.from_data(data["times"])
        self._track = PhiTrack.from_data(data["track"])
        if data.get("guard"):
            self._guard = LossGuard.from_data(data["guard"])
        if self._rule is not None and data.get("rule"):
            self._rule = self._rule.gone_on(data["rule"])

    def observe(
        self, state: Any, *rest: Any, seconds: float, loss: Any = None, **named: Any
    ) -> Any:
        """Records a step that has run; returns the state for the next step.

        This method writes the next batch size and its gain into the state. If the plan
        changes, it also moves the state to the layouts of the new plan. Afterwards
        `batch_size` holds the rows of the next batch.

        Args:
          state: the state that the step returned.
          rest: the arguments of the step after the state: the batch and all others.
          seconds: seconds of the step, without the work between steps.
          loss: the loss of the step, or all results of the step besides the state. If
            the loss is not finite, the step's estimate of the noise is ignored. If the
            loss rises far, the gain gets a lower upper limit
            (`autopar.goodput.following`).
          named: keyword arguments of the step.

        Raises:
          PlanError: the state's optimizer does not scale with the batch
            (`scale_updates`).
        """
        if not self._named:
            check_rule(state, self.following.base_batch)
            self._named = True
        self._steps += 1
        made = self._at()
        if self._since > _UNTIMED:
            terms = made.curve.terms()
            assert terms is not None
            self._times = self._times.with_step(terms, seconds)
            self._settle()
        if finite(loss):
            self._look()
        risen = self._watch(loss)
        if self._steps % self.following.every == 0 and self._since > _SETTLED:
            state = self._follow(state, rest, named, made)
        return self._tell(state) if risen or self._tells() else state

    def _watch(self, result: Any) -> bool:
        """Whether the loss has risen so far that the limit of the gain was lowered."""
        loss = loss_in(result, alone=self.step.world.process_count == 1)
        if loss is None:
            return False
        before, self._guard = self._guard, self._guard.with_step(loss, self._gain)
        if self._guard.alarms == before.alarms:
            return False
        line = cap_line(self._steps, loss, before, self._guard, self._gain)
        self._record("gain capped", **line)
        return True

    def _tells(self) -> bool:
        """Whether to write the gain into the state now.

        To write the gain, the loop must wait for the end of the step. So the loop does
        not write the gain after every step.
        """
        return self._since <= 1 or self._steps % self.following.every == 0

    def _at(self) -> PlannedWay:
        """The running way; forgets all planned ways if other code changed the plan."""
        planned, before = self.step.running.planned, self._running
        if before is not planned:
            # Plans are compared by identity: after processes have restarted, an equal
            # plan may run on other devices.
            same = before is None or before.plan is planned.plan
            if not same or self._world is not self.step.world:
                self._since = 0
                self._ways.forget()
            self._running, self._world = planned, self.step.world
        self._since += 1
        found = self._ways.running(self.batch_size)
        self._key = found.key
        return found

    def _look(self) -> None:
        """Reads the noise scale after a step that measured it."""
        before = self._track
        self._track = before.with_step(self.step.noise_scale)
        if self._rule is not None and self._track is not before and self._track.sqr:
            worth = self.batch_size / self.following.base_batch
            self._rule = self._rule.with_step(self._track.sqr[-1], worth)

    @property
    def way(self) -> Key:
        """The running way."""
        return self._ways.running(self.batch_size).key

    @property
    def error(self) -> CodecError:
        """The squared error that the codecs in use add."""
        made = self._ways.running(self.batch_size)
        return self._ways.way(made, runs=True).error

    def phi(self) -> PhiRange | None:
        """The noise scale with bounds; None: it is not known yet."""
        options = changing_batches.measures_noise(self.step)
        decay = 0.999 if options is None else options.decay
        base = self.following.base_batch
        return self._track.range(decay, base, self.following.sigmas)

    def _tell(self, state: Any) -> Any:
        """Writes the batch size and its gain into the state."""
        way = self._ways.way(self._ways.running(self.batch_size), runs=True)
        phi, most = self._sure_phi(), self._guard.most
        state = set_batch(
            state, batch=self.batch_size, phi=phi, error=way.error, most_gain=most
        )
        self._gain = gain_of(state)
        return state

    def _sure_phi(self) -> float | None:
        """The noise scale from which gains are computed; None: it is not known yet.

        The result is the lower bound of the noise scale. A gain that is too large may
        make the training diverge; a gain that is too small only slows the training.
        """
        phi = self.phi()
        return None if phi is None else phi.low

    def _follow(
        self,
        state: Any,
        rest: Sequence[Any],
        named: Mapping[str, Any],
        made: PlannedWay,
    ) -> Any:
        """Decides on a way, prepares it, and changes to it if the change pays off."""
        if not self.step.world.process_index:
            self._times = self._times.fit()
        now = self._now(made, state, rest, named)
        # Processes that share a pipeline must not prepare ways concurrently.
        alone = self.step.world.process_count == 1
        beside = self._background is not None and (alone or len(made.plan.stages) < 2)
        if not beside:
            self._explore(now)
        said = self._say(now)
        if said.busy:
            return state
        if beside and said.studies:
            self._explore_beside(now)
            return state
        if said.key is None:
            self._tell_kept(made, said.decision)
            return state
        found = self._ways.find(said.key)
        if found is None:
            self._explore_beside(now)
            return state
        if (decision := said.decision) is None:  # another process has compared
            self._times = self._times.fit()
            decision = self._compare(now)
            assert decision is not None  # every process knows the noise scale here
        return self._change(state, made, found, with_key(decision, said.key))

    def _explore(self, now: Now) -> None:
        """Plans the best way; repeats this until the best way has its own plan.

        A way's own plan may predict other seconds than the estimate that was made
        before planning, so that another way becomes the best.
        """
        said = self._say(now, asked=False)
        if said.studies:
            call_of = now.call_of if said.layouts else None
            self._ways.study(now.made, layouts=said.layouts, call_of=call_of)
            said = self._say(now, asked=False)
        for _ in range(_EXPLORED):
            key = said.key
            if key is None or self._ways.find(key) is not None:
                return
            self._prepare(key, now)
            said = self._say(now, asked=False)

    def _prepare(self, key: Key, now: Now) -> PlannedWay | None:
        """Plans and compiles a way. If this fails, records it and returns None."""
        made = self._ways.make(key, now.call_of(key.rows), now.made)
        if made is None:
            reason = self._ways.why_not(key)
            self._record("batch refused", way=dataclasses.asdict(key), reason=reason)
        return made

    def _say(self, now: Now, *, asked: bool = True) -> Said:
        """How the loop continues; the first process decides for all processes.

        Args:
          now: the running way and the step's arguments.
          asked: True if the training loop asks between steps; False if the background
            preparation asks.
        """
        world = self.step.world
        if asked and self._busy.is_set():
            return agree_on_first(world, Said(busy=True))
        if world.process_index:  # only the first process compares ways
            return agree_on_first(world, Said())
        decision = self._compare(now)
        key = None if decision is None else key_of(decision)
        worth = worth_now(
            self._ways, now.made, self._times, decision,
            rest_s=self._rest_s(), horizon_s=self._horizon_s(),
        )  # fmt: skip
        return agree_on_first(
            world, dataclasses.replace(worth, key=key, decision=decision)
        )

    def _explore_beside(self, now: Now) -> None:
        """Runs `_explore` concurrently with the loop, at most once at a time."""
        if self._background is None or self._busy.is_set():
            return
        self._busy.set()
        busy, cancelled = self._busy, self._cancelled  # `resume` may replace them

        def explore() -> None:
            try:
                with in_lane(self._lane):
                    self._explore(now)
            except AbandonedError:
                raise
            except (
                Exception
            ) as error:  # logged; the training goes on in the running way
                if cancelled.is_set():
                    return
                LOGGER.warning("no other way is prepared: %s", error)
                self._record("batch refused", way=None, reason=str(error))
            finally:
                busy.clear()

        self._background(explore)

    def cancel(self) -> None:
        """Makes the preparation beside the steps end before its next plan or program.

        If there are several processes, all of them call this method, and the channel of
        the world ends what waits for the other processes.
        """
        self._cancelled.set()

    def resume(self) -> None:
        """Allows preparations again, after `cancel`.

        A preparation that still compiles was abandoned, and ends by itself.
        """
        self._busy, self._cancelled = threading.Event(), threading.Event()

    def _check(self) -> None:
        """Ends a preparation that is cancelled.

        Raises:
          _CancelledError: the preparation is cancelled.
        """
        if self._cancelled.is_set():
            raise _CancelledError("it is no longer needed")

    def _compare(self, now: Now) -> Decision | None:
        """Compares all ways; returns None while the noise scale is not known."""
        phi, made = self.phi(), now.made
        if phi is None:
            return None
        last = self._track.last
        alone = last is not None and last.groups == 1
        found = self._ways.others(made, now.held, self._parts, alone=alone)
        ways = list(found.values())
        rows = self._rows_by_rule(made, ways)
        decision = decide(
            now.way,
            ways if rows is None else [way for way in ways if way.rows == rows],
            self._times,
            phi,
            base_batch=self.following.base_batch,
            horizon_s=self._horizon_s(),
            rest_s=self._rest_s(),
            sigmas=self.following.sigmas,
            most_gain=self._guard.most,
        )
        if rows is None or rows == made.key.rows or len(decision.compared) < 2:
            return decision
        best = max(decision.compared[1:], key=lambda x: x.goodput)
        return dataclasses.replace(decision, chosen=best)

    def _rows_by_rule(self, made: PlannedWay, ways: Sequence[Way]) -> int | None:
        """The number of rows by Accordion's rule; None if the loop does not use it."""
        if self._rule is None:
            return None
        if self._rule.critical:
            return self.following.base_batch
        return max([made.key.rows, *(way.rows for way in ways)])

    def _tell_kept(self, made: PlannedWay, decision: Decision | None) -> None:
        """Records why the way stays, at the first, 2nd, 4th, 8th ... such decision."""
        line = None if decision is None else stay_line(made, decision, self.phi())
        if line is not None:
            self._kept += 1
            if self._kept.bit_count() == 1:
                self._record("batch kept", **line)

    def _change(
        self, state: Any, old: PlannedWay, new: PlannedWay, decision: Decision
    ) -> Any:
        """Switches the step and the state to another way."""
        begin = time.perf_counter()
        state = changing_batches.go_on(self.step, new.shape, new.plan, state)
        jax.block_until_ready(jax.tree.leaves(state))
        self._running = self.step.running.planned
        self.batch_size, self._since, self._kept = new.key.rows, 0, 0
        self.changes += 1
        runs = decision.current
        self._before = self.changes, runs.step_s, runs.goodput
        pause_s = time.perf_counter() - begin
        line = change_line(old, new, self.phi(), decision, pause_s)
        self._record("batch", number=self.changes, **line)
        return state

    def _settle(self) -> None:
        """Records the measured step time once some steps have run after a change."""
        if self._before is None or self._since < _SETTLED:
            return
        number, step_s, goodput = self._before
        self._before = None
        now = self._times.seen[-1].median()[0]
        judged = self._judged_now(now)
        self._record(
            "batch measured",
            number=number,
            step_before_s=step_s,
            step_after_s=now,
            goodput_before=goodput,
            goodput_after=judged,
        )

    def _judged_now(self, seconds: float) -> float | None:
        """The goodput, computed from the measured seconds of a step."""
        phi = self.phi()
        if phi is None:
            return None
        way = self._ways.way(self._ways.running(self.batch_size), runs=True)
        found = decide(
            way, (), Throughput(), phi,
            base_batch=self.following.base_batch, horizon_s=1.0, sigmas=0.0,
            most_gain=self._guard.most,
        ).current  # fmt: skip
        return self.batch_size / seconds * found.efficiency
