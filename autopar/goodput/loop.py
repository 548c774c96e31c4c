"""Lets the batch, the microbatches, the plan and the codecs of a loop follow its noise.

`Loop` is the piece for loops of one's own; `autopar.train` has one inside.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.errors import PlanError
from autopar.goodput.choice import Decision, PhiRange, Ratio, Way, decide
from autopar.goodput.critical import CriticalRegimes
from autopar.goodput.phi_track import PhiTrack
from autopar.goodput.progress_ratio import ProgressRatio
from autopar.goodput.rates import Rule, rule_of, told
from autopar.goodput.throughput import Throughput
from autopar.goodput.ways import Key, Made, Ways
from autopar.progress import LOGGER
from autopar.runtime import changing_batches
from autopar.runtime.exchange import exchanged
from autopar.runtime.noise.options import NoiseOptions
from autopar.runtime.parallel_step import ParallelStep
from autopar_passes.program.calls import Call
from autopar_passes.program.static_leaves import struct_of

# Steps after a change that are not timed, and those before the next decision.
_UNTIMED, _SETTLED = 2, 8
# Seconds until something changes, where nobody knows.
_HORIZON_S = 600.0

Record = Callable[..., None]
Work = Callable[[], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """How a loop's batch follows.

    Attributes:
      base_batch: rows that the learning rate was chosen for, M0.
      max_batch: most rows.
      codecs: what gradients may be sent by, as ``compression=`` says it, with what was
        measured of a row's worth where they are biased (`progress_ratio`).
      rule: ``goodput``, or Accordion's rule (`CriticalRegimes`).
      every: steps between two decisions.
      sigmas: standard deviations within which a gain counts for none.
    """

    base_batch: int
    max_batch: int
    codecs: Mapping[str, Ratio | None] = dataclasses.field(
        default_factory=lambda: {"none": None}
    )
    rule: CriticalRegimes | None = None
    every: int = 10
    sigmas: float = 1.0

    def __post_init__(self) -> None:
        """Checks ranges."""
        for name in ("base_batch", "max_batch", "every"):
            given = getattr(self, name)
            if not isinstance(given, int) or isinstance(given, bool) or given < 1:
                raise PlanError(f"{name}={given!r} must be a whole number, at least 1.")
        if self.max_batch < self.base_batch:
            raise PlanError(
                f"max_batch={self.max_batch} is smaller than "
                f"base_batch={self.base_batch}. The batch grows from the base batch."
            )
        if not self.codecs or not self.sigmas >= 0:
            raise PlanError(
                "expected at least one codec, such as 'none', and sigmas of at least "
                f"0, got codecs={self.codecs!r}, sigmas={self.sigmas!r}."
            )


def codecs_of(
    given: Sequence[str] | Mapping[str, ProgressRatio | float | None], own: str
) -> dict[str, Ratio | None]:
    """The codecs that may be used, with what is known of biased ones.

    Args:
      given: texts as of ``compression=``; or with each the ratio of rows that
        `progress_ratio` has measured, or None.
      own: what the step was made with, which may be used in any case.
    """
    asked = dict(given) if isinstance(given, Mapping) else dict.fromkeys(given)
    return {own: None, **{k: _ratio(x) for k, x in asked.items()}}


def _ratio(given: ProgressRatio | float | None) -> Ratio | None:
    if given is None:
        return None
    if isinstance(given, ProgressRatio):
        low, high = given.interval()
        low = max(low, 0.0) if math.isfinite(low) else 0.0
        return Ratio(given.value, low, high)
    if not 0 < given < math.inf:
        raise PlanError(f"codecs: a ratio of rows must be positive, got {given!r}.")
    return Ratio(given, given, given)


class Loop:
    """Says which batch a step runs with, and changes it where that pays.

    >>> # loop = Loop(train, following)
    >>> # batch = source(position, loop.batch_size)
    >>> # state, loss = train(state, batch)
    >>> # state = loop.observe(state, batch, seconds=seconds, loss=loss)

    Attributes:
      step: the step.
      following: how the batch follows.
      batch_size: rows of the next batch.
      changes: how often the way has changed.
    """

    def __init__(
        self,
        step: ParallelStep[..., Any],
        following: Following,
        *,
        record: Record | None = None,
        background: Callable[[Work], None] | None = None,
        horizon_s: Callable[[], float] | None = None,
    ) -> None:
        """Begins with the base batch.

        Args:
          step: the step; where it does not measure the noise of its gradients and has
            not run yet, it will.
          following: how the batch follows.
          record: takes the kind and the fields of a line of a ledger.
          background: does some work beside the loop; None: the loop waits for it.
          horizon_s: says in how many seconds something else changes.

        Raises:
          PlanError: the step has run without measuring noise.
        """
        self.step, self.following = step, following
        options = step.preparation.planner.options
        changing_batches.measure_noise(step, _noise_options(following, options))
        self.batch_size = following.base_batch
        self.changes = 0
        self._record = record or _no_record
        self._background = background
        self._horizon_s = horizon_s or (lambda: _HORIZON_S)
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
        self._steps = self._since = 0
        self._running: Any = None
        self._key: Key | None = None
        self._lock = threading.Lock()
        self._busy: set[Any] = set()
        self._before: tuple[int, float, float] | None = None
        self._named = False

    def begin(self, state: Any) -> Any:
        """The state before the first step, told the batch; `observe` does it else.

        Raises:
          PlanError: its optimizer does not follow the batch.
        """
        check_rule(state, self.following.base_batch)
        self._named = True
        phi = self.phi()
        return told(state, batch=self.batch_size, phi=None if phi is None else phi.phi)

    def to_data(self) -> dict[str, Any]:
        """Where the loop stands, as JSON can hold it."""
        key = self._key or Key(self.batch_size, 1, "none")
        return {
            "way": dataclasses.asdict(key),
            "base_batch": self.following.base_batch,
            "changes": self.changes,
            "times": self._times.to_data(),
            "track": self._track.to_data(),
            "rule": None if self._rule is None else self._rule.to_data(),
        }

    def go_on(self, data: Mapping[str, Any]) -> None:
        """Goes on where `to_data` was taken, with its batch.

        Raises:
          PlanError: it was taken of a loop with another base batch, or of none.
        """
        check_data(data, self.following)
        self._key = Key(**data["way"])
        self.batch_size = self._key.rows
        self.changes = int(data["changes"])
        self._times = Throughput.from_data(data["times"])
        self._track = PhiTrack.from_data(data["track"])
        if self._rule is not None and data.get("rule"):
            self._rule = self._rule.gone_on(data["rule"])

    def observe(
        self, state: Any, *rest: Any, seconds: float, loss: Any = None, **named: Any
    ) -> Any:
        """Takes a step that has run; returns the state for the next one.

        The state is told the batch and its gain, and moved where the plan changes.
        After this, `batch_size` says how many rows the next batch must have.

        Args:
          state: that the step returned.
          rest: what the step took after the state: the batch and all else.
          seconds: that the step took, with nothing but the step in it.
          loss: of the step, or all that it returned besides the state; where it is
            not finite, nothing is learned of the noise.
          named: what the step took by name.

        Raises:
          PlanError: the state's optimizer does not follow the batch.
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
        if _finite(loss):
            self._look()
        if self._steps % self.following.every == 0 and self._since > _SETTLED:
            state = self._followed(state, rest, named, made)
        return self._told(state) if self._tells() else state

    def _tells(self) -> bool:
        """Whether the gain is written into the state: not each step, as it waits."""
        return self._since <= 1 or self._steps % self.following.every == 0

    def _at(self) -> Made:
        """The way that runs; where it was changed from outside, all begins anew."""
        planned = self.step.running.planned
        if self._running is not planned:
            if self._running is not None and self._running.plan is not planned.plan:
                self._since = 0
                self._ways.forget()
            self._running = planned
        self._since += 1
        found = self._ways.running(self.batch_size)
        self._key = found.key
        return found

    def _look(self) -> None:
        """Reads the noise scale after a step that has measured it."""
        before = self._track
        self._track = before.with_step(self.step.noise_scale)
        if self._rule is not None and self._track is not before and self._track.sqr:
            worth = self.batch_size / self.following.base_batch
            self._rule = self._rule.with_step(self._track.sqr[-1], worth)

    @property
    def way(self) -> Key:
        """The way that runs."""
        return self._ways.running(self.batch_size).key

    def phi(self) -> PhiRange | None:
        """Within what the noise scale lies; None: it is not known yet."""
        options = changing_batches.measures_noise(self.step)
        decay = 0.999 if options is None else options.decay
        base = self.following.base_batch
        return self._track.range(decay, base, self.following.sigmas)

    def _told(self, state: Any) -> Any:
        """The state with the batch and its gain."""
        phi = self.phi()
        way = self._ways.way(self._ways.running(self.batch_size), runs=True)
        number = None if phi is None else phi.phi
        return told(state, batch=self.batch_size, phi=number, error=way.error)

    def _followed(
        self, state: Any, rest: Sequence[Any], named: Mapping[str, Any], made: Made
    ) -> Any:
        """Decides, prepares, and changes the way where that pays."""
        if not self._studied(made):
            return state
        self._times = self._times.fitted()
        key, decision = self._decided(state, made)
        if key is None:
            return state
        call = self._call(key, state, rest, named)
        found = self._prepared(key, call)
        if found is None:
            return state
        # Its own plan may say otherwise than what it was judged by.
        again, decision = self._decided(state, made)
        if again != key or decision is None:
            return state
        return self._change(state, made, found, decision)

    def _studied(self, made: Made) -> bool:
        """Whether the codecs for the layouts that run are chosen."""
        if self._ways.studied(made):
            return True
        return self._worked(("study", made.key), lambda: self._ways.study(made))

    def _prepared(self, key: Key, call: Call) -> Made | None:
        """The way if it is planned and compiled; else that begins."""
        found = self._ways.made(key)
        if found is None and self._worked(key, lambda: self._make(key, call)):
            found = self._ways.made(key)
        return found

    def _make(self, key: Key, call: Call) -> None:
        if self._ways.make(key, call) is None:
            reason = self._ways.why_not(key)
            self._record("batch refused", way=dataclasses.asdict(key), reason=reason)

    def _worked(self, name: Any, work: Work) -> bool:
        """Does some work here and returns true, or beside the loop."""
        if self._background is None or self.step.world.process_count > 1:
            work()
            return True
        with self._lock:
            if name in self._busy:
                return False
            self._busy.add(name)

        def done() -> None:
            try:
                work()
            except Exception as error:  # the loop goes on without it
                LOGGER.warning("cannot prepare %s: %s", name, error)
                self._record("batch refused", way=str(name), reason=str(error))
                return  # it stays among what is busy, and is not tried again
            with self._lock:
                self._busy.discard(name)

        self._background(done)
        return False

    def _call(
        self, key: Key, state: Any, rest: Sequence[Any], named: Mapping[str, Any]
    ) -> Call:
        """The arguments of the step with another number of rows, as structs."""
        batch, *others = rest
        arguments = state if type(state) is tuple else (state,)
        structs = (with_rows(batch, self.batch_size, key.rows), *others)
        return changing_batches.call_of(self.step, (*arguments, *structs), named)

    def _decided(self, state: Any, made: Made) -> tuple[Key | None, Decision | None]:
        """The way to go on by; None: as it is. One process decides for all."""
        decision = self._compared(state, made)
        key: Key | None = None
        if decision is not None and decision.changes:
            way = decision.chosen.way
            key = Key(way.rows, way.microbatches, way.codecs)
        if self.step.world.process_count > 1:
            data = b"" if key is None else json.dumps(dataclasses.asdict(key)).encode()
            told = exchanged(self.step.world, "choosing the batch", data)[0]
            key = Key(**json.loads(told)) if told else None
        return key, decision

    def _compared(self, state: Any, made: Made) -> Decision | None:
        """Compares the ways; None: the noise is not known yet."""
        phi = self.phi()
        if phi is None:
            return None
        last = self._track.last
        alone = last is not None and last.groups == 1
        found = self._ways.others(made, state, self._parts, alone=alone)
        ways = list(found.values())
        rows = self._ruled(made, ways)
        decision = decide(
            self._ways.way(made, runs=True),
            ways if rows is None else [way for way in ways if way.rows == rows],
            self._times,
            phi,
            base_batch=self.following.base_batch,
            horizon_s=self._horizon_s(),
            sigmas=self.following.sigmas,
        )
        if rows is None or rows == made.key.rows or len(decision.compared) < 2:
            return decision
        best = max(decision.compared[1:], key=lambda x: x.goodput)
        return dataclasses.replace(decision, chosen=best)

    def _ruled(self, made: Made, ways: Sequence[Way]) -> int | None:
        """The rows that Accordion's rule wants; None: there is no such rule."""
        if self._rule is None:
            return None
        if self._rule.critical:
            return self.following.base_batch
        return max([made.key.rows, *(way.rows for way in ways)])

    def _change(self, state: Any, old: Made, new: Made, decision: Decision) -> Any:
        """Goes on by another way."""
        begin = time.perf_counter()
        state = changing_batches.go_on(self.step, new.shape, new.plan, state)
        jax.block_until_ready(jax.tree.leaves(state))
        self._running = self.step.running.planned
        self.batch_size, self._since = new.key.rows, 0
        self.changes += 1
        phi = self.phi()
        self._before = (
            self.changes,
            decision.current.step_s,
            decision.current.goodput,
        )
        self._record(
            "batch",
            number=self.changes,
            old=way_data(old),
            new=way_data(new),
            phi=None if phi is None else _numbers(phi),
            compared=[x.to_data() for x in decision.compared],
            predicted={
                "horizon_s": decision.horizon_s,
                **decision.chosen.to_data(),
                "goodput_before": decision.current.goodput,
            },
            measured={"pause_s": time.perf_counter() - begin},
        )
        return state

    def _settle(self) -> None:
        """Writes down, some steps after a change, what a step takes now."""
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
        """The goodput by measured seconds of a step."""
        phi = self.phi()
        if phi is None:
            return None
        way = self._ways.way(self._ways.running(self.batch_size), runs=True)
        found = decide(
            way, (), Throughput(), phi,
            base_batch=self.following.base_batch, horizon_s=1.0, sigmas=0.0,
        ).current  # fmt: skip
        return self.batch_size / seconds * found.efficiency


def way_data(made: Made) -> dict[str, Any]:
    """A way as a line of a ledger has it."""
    return {
        **dataclasses.asdict(made.key),
        "cluster": made.plan.cluster.text,
        "meshes": [dict(s.mesh["axes"]) for s in made.plan.stages],
        "step_s": made.plan.predicted.step_s,
    }


def check_data(data: Any, following: Following) -> None:
    """Checks what a loop is to go on with.

    Raises:
      PlanError: it is of a loop with another base batch, or of none.
    """
    try:
        base, rows = int(data["base_batch"]), int(data["way"]["rows"])
    except (TypeError, KeyError, ValueError) as error:
        raise PlanError(
            f"expected what Loop.to_data() returned, got {data!r}."
        ) from error
    if base != following.base_batch or rows < 1:
        raise PlanError(
            f"base_batch={following.base_batch}, but the run that is gone on with had "
            f"{base}. Give the same, or begin a new run."
        )


def check_rule(state: Any, base_batch: int, rule: Rule | None = None) -> None:
    """Checks that a state's optimizer follows the batch as is said.

    Args:
      state: the train state.
      base_batch: rows of the base batch.
      rule: of the learning rate; None: any.

    Raises:
      PlanError: it does not.
    """
    found, base = rule_of(state)
    if base != base_batch:
        raise PlanError(
            f"base_batch={base_batch}, but the state's optimizer was wrapped by "
            f"scaled(..., base_batch={base}). Give both the same."
        )
    if rule is not None and found != rule:
        raise PlanError(
            f"lr_rule={rule!r}, but the state's optimizer was wrapped by "
            f"scaled(..., {found!r}). Give both the same."
        )


def with_rows(batch: Any, rows: int, wanted: int) -> Any:
    """Structs of a batch with another number of rows.

    Args:
      batch: arrays, or structs.
      rows: of it.
      wanted: rows of the result.
    """

    def struct(leaf: Any) -> Any:
        found = struct_of(leaf)
        if not found.shape or found.shape[0] != rows:
            return found
        shape = (wanted, *found.shape[1:])
        return jax.ShapeDtypeStruct(shape, found.dtype, weak_type=found.weak_type)

    return jax.tree.map(struct, batch)


def _noise_options(following: Following, options: Any) -> NoiseOptions:
    return NoiseOptions(base_batch=following.base_batch)


def _no_record(kind: str, **fields: Any) -> None:
    del kind, fields


def _finite(result: Any) -> bool:
    """Whether all real numbers of what a step returned are finite."""
    found = [np.asarray(x) for x in jax.tree.leaves(result)]
    kinds = [x for x in found if np.issubdtype(x.dtype, np.floating)]
    return all(bool(np.isfinite(x).all()) for x in kinds)


def _numbers(phi: PhiRange) -> dict[str, float | None]:
    found = {"phi": phi.phi, "low": phi.low, "high": phi.high}
    return {k: x if math.isfinite(x) else None for k, x in found.items()}
