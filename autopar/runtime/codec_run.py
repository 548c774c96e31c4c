"""Runs steps whose gradients are sent by codecs, and reports the errors of the codecs.

*Telemetry* is what a step measures of its codecs, such as their relative errors. A
*policy* changes codecs while training. *Fallback levels* number the codecs that a step
tries in turn if a codec sends too little of a gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compression.policies.policy import (
    GradientReport,
    MeasuredErrors,
    Observation,
    Policy,
    ProbingPolicy,
    Saving,
    Signal,
)
from autopar.compression.synchronise import (
    ERROR,
    GRADIENT,
    NON_FINITE,
    RESIDUAL,
    SENT,
    WANTED,
)
from autopar.errors import PlanError
from autopar.plans import GradientDecision, Plan
from autopar.runtime import agreement, placement
from autopar.runtime.gradients.codec_state import (
    MeasuredGradient,
    TelemetryReader,
    carry_over,
    check_fits,
    gather_state,
    place_state,
)
from autopar.runtime.gradients.probing import ProbePrograms, measure_errors
from autopar.runtime.gradients.recoding import Adoption, Recoding, saved_s
from autopar.runtime.gradients.sums import AnySums, Member, State
from autopar.runtime.noise.averages import (
    NoiseScale,
    NoiseSpec,
    fresh,
    noise_scale,
)
from autopar.runtime.planned import PlannedStep
from autopar.runtime.stages.transport import Links
from autopar.runtime.world import World


class Telemetry(dict[str, GradientReport]):
    """Telemetry of compressed gradients, by parameter.

    Attributes:
      reason: why the telemetry is empty; '' if it is not empty.
    """

    def __init__(
        self, reports: Mapping[str, GradientReport] | None = None, *, reason: str = ""
    ) -> None:
        """Holds reports, or the reason why there are none."""
        super().__init__(reports or {})
        self.reason = reason

    def __repr__(self) -> str:
        """The reports, or the reason."""
        return super().__repr__() if self else f"<no telemetry: {self.reason}>"


_NO_CODEC = (
    "no gradient has a codec under this plan; compression= of autopar.parallelize "
    "asks for one"
)


class CodecRun:
    """The codecs of a running step: their state, their telemetry and their policy."""

    def __init__(self, policy: Policy | None) -> None:
        """Creates a run without codec state; the first step creates the state."""
        self.policy = policy
        self.recoding = Recoding()
        self.adoption = Adoption()
        # A policy gets the errors of codecs in its observations and reacts to them.
        # So warnings of large errors are given only without a policy.
        self._reader = TelemetryReader(warns=policy is None)
        self._probed: dict[str, dict[str, float]] = {}
        self._state: State | None = None
        self._saved: Any = None
        self._owner: AnySums | None = None
        self._links: Links | None = None
        self._telemetry: Any = None
        # `_known` is the telemetry of the last step that measured it. `_turn` counts
        # the steps that have updated the codecs' state.
        self._known: Any = None
        self._turn = 0
        self._level: Any = None
        self._taken: Any = None
        # The last columns of the telemetry measure the signal of gradients.
        # `_signals` is the sum of these columns over the steps since the policy's last
        # observation.
        self._signals: Any = None
        # Whether the counts of fallback levels and the sums of signals restart at 0
        # with the next step.
        self._count_anew = True
        self._planned: PlannedStep | None = None
        self._since = 0.0
        self._steps = 0
        self._done = 0
        self._measured: dict[str, MeasuredErrors] = {}
        self._probes = ProbePrograms()

    def copy_state(self, plan: Plan | None) -> Any:
        """Returns a copy of the state after the last step; None before the first step.

        The next step donates the state itself, but not the copy.

        Args:
          plan: the plan in use; its codecs are saved with the state.
        """
        self._reader.look(wait=True)
        if self._state is None or plan is None:
            return self._saved
        texts = self.recoding.texts(plan, self._state["gradients"])
        state = {name: x for name, x in self._state.items() if name != "due"}
        return {**jax.tree.map(copy_array, state), "codecs": texts}

    def restore(self, state: Any, *, held: bool) -> None:
        """Takes a saved codec state, which the next step places on its devices.

        Args:
          state: the saved state; None to start without residuals (the errors that error
              feedback carries from step to step).
          held: whether plans without codecs may run first. The saved state then waits
            for the next plan with codecs.
        """
        self._saved, self._state, self._owner = state, None, None
        if held and state is not None:
            kept = {k: x for k, x in state.items() if k != "codecs"}
            self._saved, self._state = None, kept

    @property
    def has_saved(self) -> bool:
        """Whether a restored state has not been used by a step yet."""
        return self._saved is not None

    def resume_plan(self, plan: Plan) -> Plan:
        """Returns the plan with the codecs of a restored state that is not used yet.

        Raises:
          PlanError: a saved codec is not known in this process.
        """
        return (
            self.recoding.plan_as_saved(plan, self._saved) if self.has_saved else plan
        )

    def check_unused(self, plan: Plan) -> None:
        """Checks that a restored state is not lost because a plan has no codecs.

        Raises:
          PlanError: a state was restored and not used yet.
        """
        if self.has_saved:
            raise PlanError(
                f"compression_state: a state was restored, and this plan ({plan.mesh}) "
                "compresses no gradient, so its residuals would be lost. Plan with the "
                "compression= that it was saved under, or assign None."
            )

    @property
    def errors(self) -> dict[str, dict[str, float]]:
        """Measured relative errors, by gradient and codec.

        Errors of codecs in use come from the latest steps. Errors of other codecs come
        from *probes*: measurements of unused codecs that a policy requested.
        """
        self._reader.look(wait=True)
        return self.known_errors

    @property
    def known_errors(self) -> dict[str, dict[str, float]]:
        """The errors that have been read so far; any thread may read them."""
        names = {*self._probed, *self._reader.errors}
        return {
            name: self._probed.get(name, {}) | self._reader.errors.get(name, {})
            for name in names
        }

    def assume_errors(self, errors: Mapping[str, Mapping[str, float]]) -> None:
        """Takes errors that another process has measured as those of probes."""
        self._probed = {name: dict(found) for name, found in errors.items()}

    def start_anew(self) -> None:
        """Drops the codec state of earlier steps, but no restored, unused state."""
        if self._state is not None:
            self._state, self._owner = None, None

    def move(self, links: Links | None) -> None:
        """Lets the next step move the codecs' state to other devices.

        Args:
          links: links to the other processes that hold old or new devices; None if all
            devices belong to this process, or if the devices stay the same.
        """
        self._links = self._links or links

    def check(self, sums: AnySums | None) -> None:
        """Checks that the codecs' state can be carried over to another plan.

        The next step carries the state over, not this method. Until then
        `ParallelStep.recode` may choose codecs that keep a residual which the codecs of
        this plan would drop.

        Raises:
          PlanError: the state does not fit the plan's gradients.
        """
        if sums is not None and self._state is not None:
            check_fits(self._state, sums)

    def prepare(
        self, planned: PlannedStep, placed: Sequence[Any], world: World
    ) -> None:
        """Creates the codecs' state for a step, and measures the codecs to be probed.

        Before that, it warns if earlier steps had a gradient that was not finite and
        therefore kept their old state. Python may turn this warning into an error. The
        warning comes before any array is donated, so that such an error loses no array.
        """
        self._reader.look()
        assert planned.sums is not None
        state = self._state_for(planned.sums)
        probes = self.policy.probes if isinstance(self.policy, ProbingPolicy) else ()
        if probes and self._is_observed(self._done + 1):
            self._measure(probes, planned, placed, state, world)

    def run(
        self, planned: PlannedStep, placed: Sequence[Any], noise: Sequence[Any] = ()
    ) -> tuple[Any, ...]:
        """Runs one prepared step, and keeps the codecs' new state.

        Args:
          planned: the program.
          placed: the flat arguments of the program.
          noise: the averages of the noise scale; empty if it is not measured.

        Returns:
          The flat results, and the new averages.
        """
        sums = planned.sums
        assert sums is not None
        state = self._state_for(sums)
        # The first run of a program includes its compilation, so it is not timed.
        new = self._planned is not planned
        flat, self._state, self._telemetry, self._level, *rest = planned.function(
            *placed, state, *noise
        )
        turn, self._turn = self._turn, self._turn + 1
        if turn % sums.every == 0:
            self._known = self._telemetry
        self._count(sums, new)
        self._planned = planned
        self._done += 1
        decisions = [m.decision for m in sums.members.values()]
        sent = [
            MeasuredGradient(g.name, "" if sums.fallback else g.codec, g.error)
            for g in decisions
        ]
        self._reader.add(self._done, turn, sent, self._telemetry)
        if new:
            jax.block_until_ready(self._telemetry)
            self._since, self._steps = time.perf_counter(), 0
        else:
            self._steps += 1
        return flat, *rest

    def _count(self, sums: AnySums, new: bool) -> None:
        """Adds the step's fallback levels to counts on the devices."""
        anew = new or self._count_anew
        if sums.fallback is not None:
            self._taken = self._level if anew else _add(self._taken, self._level)
        if self._telemetry.shape[1] > NON_FINITE + 1:
            more = self._telemetry[:, NON_FINITE + 1 :]
            self._signals = more if anew else _add(self._signals, more)
        self._count_anew = False

    def _is_observed(self, done: int) -> bool:
        """Whether the policy gets an observation of the step with this number."""
        return self.policy is not None and done % max(1, self.policy.every) == 0

    def _measure(
        self,
        probes: Sequence[str],
        planned: PlannedStep,
        placed: Sequence[Any],
        state: State,
        world: World,
    ) -> None:
        """Measures the errors that codecs would have in the next step.

        The policy's time of a step does not include this measurement.
        """
        assert planned.sums is not None
        jax.block_until_ready(self._telemetry)
        begin = time.perf_counter()
        partials = planned.gradients(*placed)
        self._measured = measure_errors(
            planned.sums, partials, state, probes, world, self._probes, planned.links
        )
        for name, found in self._measured.items():
            known = self._probed.setdefault(name, {})
            known.update({choice.text: choice.error for choice in found.choices})
        self._since += time.perf_counter() - begin

    def _state_for(self, sums: AnySums) -> State:
        if self._owner is not sums:
            if self._state is not None:
                before, links = self._state, self._links
                state = before if links is None else gather_state(before, links)
                self._state, self._links = carry_over(state, sums), None
            elif self._saved is not None:
                self._state = place_state(self._saved, sums)
            else:
                self._state = sums.init()
            self._saved, self._owner, self._turn = None, sums, 0
        assert self._state is not None
        return self._state

    def report(self, running: PlannedStep | None) -> Telemetry:
        """Returns the telemetry of gradients, by parameter.

        The telemetry of each gradient is that of the last step that measured telemetry.
        If a gradient is not finite in the latest step, its telemetry is that of the
        latest step.

        Args:
          running: the program in use; None if there is none yet.

        Raises:
          PlanError: no step has run yet.
        """
        if running is not None and running.sums is None:
            return Telemetry(reason=_NO_CODEC)
        if self._planned is None:
            raise PlanError(
                "telemetry: no step has run yet with compressed gradients. Call the "
                "step first; gradients are compressed where compression= says so."
            )
        self._reader.look(wait=True)
        skipped = 0 if self._state is None else int(np.asarray(self._state["skipped"]))
        last, known = (np.asarray(x, float) for x in (self._telemetry, self._known))
        bad = ~np.isfinite(last[:, WANTED])
        telemetry = np.where(bad[:, None], last, known)
        sums = self._planned.sums
        assert sums is not None
        reports = {
            m.decision.name: _report(m.decision, row, skipped)
            for m, row in zip(sums.members.values(), telemetry, strict=True)
        }
        if telemetry.shape[1] > NON_FINITE + 1:
            carried = np.asarray(self._signals, dtype=float)
            reports = {
                name: dataclasses.replace(report, signal=Signal.of(row))
                for (name, report), row in zip(reports.items(), carried, strict=True)
            }
        for name, codec in self.adoption.waiting.items():
            if name in reports:
                reports[name] = dataclasses.replace(reports[name], put_off=codec)
        return Telemetry(self._with_levels(sums, reports) if sums.fallback else reports)

    def _with_levels(
        self, sums: AnySums, reports: dict[str, GradientReport]
    ) -> dict[str, GradientReport]:
        """Returns the reports with the counts of each gradient's fallback levels added.

        The bytes in a report become the bytes that the last step's fallback level
        sends.
        """
        last = np.argmax(np.asarray(self._level), axis=1)
        counts = np.asarray(self._taken)
        found: dict[str, GradientReport] = {}
        for member, level, count in zip(
            sums.members.values(), last.tolist(), counts.tolist(), strict=True
        ):
            report = reports[member.decision.name]
            found[member.decision.name] = dataclasses.replace(
                report,
                wire_bytes=_wire_bytes(member, level),
                level=level,
                taken=tuple(count),
            )
        return found

    def plan_of_policy(self, plan: Plan, codecs: Mapping[str, str]) -> Plan:
        """Returns the plan with the policy's codecs, where gradients can use them."""
        often = getattr(self.policy, "often", False)
        return self.recoding.change_codecs(plan, codecs, lenient=True, often=often)

    def adopts(
        self,
        wish: Mapping[str, str],
        before: Plan,
        after: Plan,
        compile_s: Callable[[], float],
        *,
        compiled: bool,
    ) -> bool:
        """Decides whether the next step uses the codecs that the policy wants.

        Args:
          wish: the codecs that the policy wants.
          before: the plan in use.
          after: the plan with the wanted codecs.
          compile_s: returns the seconds of the last compilation, the same number on
            all processes.
          compiled: whether the program of ``after`` is compiled already.
        """
        if after is before:
            self.adoption.withdrawn()
            return False
        if compiled:
            self.adoption.follow(wish, compiled=True, why="compiled before")
            return True
        if not isinstance(wish, Saving):
            self.adoption.follow(wish, compiled=False)
            return True
        assert self.policy is not None
        steps = max(1, self.policy.every, getattr(self.policy, "horizon", 0))
        return self.adoption.judge(wish, saved_s(before, after), steps, compile_s())

    def finite(self) -> bool:
        """Whether every gradient of the last step was finite."""
        return not np.asarray(self._telemetry)[:, NON_FINITE].any()

    def advise(self, world: World) -> Mapping[str, str] | None:
        """Returns the codecs that the policy wants from now on; None for no change."""
        if self.policy is None or not self._is_observed(self._done):
            return None
        self.adoption.count_missed(self._done)
        gradients, finite = self.report(self._planned), self.finite()
        seconds = (time.perf_counter() - self._since) / max(1, self._steps)
        seconds = agreement.shared_number(world, seconds)
        self._since, self._steps = time.perf_counter(), 0
        measured, self._measured = self._measured, {}
        self._count_anew = True
        seen = Observation(self._done, seconds, gradients, finite, measured)
        wish = self.policy.observe(seen)
        if not wish:
            self.adoption.withdrawn()
        return wish


def copy_array(array: Any) -> Any:
    """Returns a copy of an array; an array without local shards is not copied."""
    lies = getattr(array, "sharding", None)
    return jnp.copy(array) if lies is None or lies.addressable_devices else array


@jax.jit
def _add(counts: jax.Array, more: jax.Array) -> jax.Array:
    return counts + more


def _wire_bytes(member: Member, level: int) -> float:
    """Returns the bytes that one device sends for a gradient at a fallback level."""
    if level == 0:
        return member.decision.wire_bytes
    gradient, workers = member.levels[level], member.summation.workers
    scatter = gradient.scatter
    return gradient.codec.wire_bytes(gradient.shape, workers, scatter=scatter)


def _report(
    decision: GradientDecision, row: np.ndarray, skipped: int
) -> GradientReport:
    wanted = float(row[WANTED])
    # If a norm is infinite or NaN, a ratio to it is reported as NaN.
    part = wanted if np.isfinite(wanted) else np.nan
    return GradientReport(
        codec=decision.codec,
        elements=int(np.prod(decision.shape)),
        wire_bytes=decision.wire_bytes,
        dense_bytes=decision.dense_bytes,
        norm=_root(wanted),
        relative_error=_root(row[ERROR] / part) if wanted else 0.0,
        gain=float(row[SENT] / part) if wanted else 1.0,
        residual_norm=_root(row[RESIDUAL]),
        gradient_norm=_root(row[GRADIENT]),
        skipped=skipped,
    )


def _root(square: float) -> float:
    """Returns the square root of a squared norm; NaN if the norm was not measured."""
    return math.sqrt(square) if square >= 0 else math.nan


# Keeps the running averages from which the noise scale of gradients is computed.
#
# The *noise scale* says how much gradients of single rows vary, compared with the
# gradient itself (`autopar.runtime.noise.averages`).
#
# The averages are carried over from step to step, and from one plan of the step to the
# next.


class NoiseRun:
    """Measures the noise scale of gradients over the steps of a training run."""

    def __init__(self) -> None:
        """Creates a run without averages; the first step creates them."""
        self._state: State | None = None
        self._saved: Any = None
        self._owner: NoiseSpec | None = None

    def run(
        self, planned: PlannedStep, placed: Sequence[Any], codecs: CodecRun
    ) -> list[Any]:
        """Runs one prepared step; returns its flat results.

        Args:
          planned: the program.
          placed: the flat arguments of the program.
          codecs: runs the steps whose gradients have codecs.
        """
        states = self._states(planned)
        if planned.sums is not None:
            flat, *made = codecs.run(planned, placed, states)
        elif states:
            flat, *made = planned.function(*placed, *states)
        else:
            return planned.function(*placed)
        if made:
            (self._state,) = made
        return flat

    def _states(self, planned: PlannedStep) -> tuple[State, ...]:
        """The averages in a tuple if a program takes them, else an empty tuple."""
        spec = planned.noise
        if spec is None:
            return ()
        if self._owner is not spec:
            before = self._saved if self._state is None else self._state
            made = spec.init() if before is None else carried_over(before, spec)
            self._state, self._saved, self._owner = made, None, spec
        assert self._state is not None
        return (self._state,)

    @property
    def copy_averages(self) -> Any:
        """Returns a copy of the averages; None before the first step."""
        found = self._saved if self._state is None else self._state
        return None if found is None else jax.tree.map(jnp.copy, found)

    def restore(self, state: Any) -> None:
        """Restores saved averages, which the next step places.

        Raises:
          PlanError: the value does not hold averages.
        """
        if state is not None:
            check(state)
        self._saved, self._state, self._owner = state, None, None

    def start_anew(self) -> None:
        """Drops the averages of earlier steps, but not restored averages.

        Restored averages are kept, because the next step has not used them yet.
        """
        if self._state is not None:
            self._state, self._owner = None, None

    def scale(self) -> NoiseScale:
        """Returns the noise scale after the last step.

        Raises:
          PlanError: no step has measured the noise scale yet.
        """
        if self._state is None or self._owner is None:
            raise PlanError(
                "noise_scale: no step has measured it yet. Give "
                "autopar.parallelize(..., noise_scale=True) and call the step first."
            )
        spec = self._owner
        return noise_scale(self._state, spec.groups, spec.sources.left_out)


@functools.cache
def _known_names() -> frozenset[str]:
    """Returns the names of the arrays in saved averages.

    The names are not a constant of the module, because computing them creates arrays,
    which would start JAX's backend during the import.
    """
    return frozenset({*fresh(1.0), "compared", "previous"})


def check(state: Any) -> None:
    """Checks that a state has the form of `ParallelStep.noise_state`.

    Raises:
      PlanError: the state has another form.
    """
    if not isinstance(state, dict) or frozenset(map(str, state)) != _known_names():
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise PlanError(
            f"noise_state: expected what was read from step.noise_state, got {found}."
        )


def carried_over(state: State, spec: NoiseSpec) -> State:
    """Converts averages to another plan of the same step.

    In general the averages do not depend on the plan, because all plans measure the
    same parameters and rows. There is one exception: with a single group of workers,
    the averages are biased in another way. If one plan has a single group and the other
    plan has several, the averages therefore start anew, as in Pollux.

    Args:
      state: the averages after some steps, as JAX or NumPy arrays.
      spec: how the new plan measures the noise.
    """
    known, wanted = spec.create(), spec.structs()
    before = dict(state["previous"])
    fits = {
        name: array
        for name, array in before.items()
        if name in wanted["previous"]
        and tuple(array.shape) == wanted["previous"][name].shape
    }
    made = {**known, **{k: x for k, x in state.items() if k != "previous"}}
    made["previous"] = {**known["previous"], **fits}
    if len(fits) < len(known["previous"]):
        made["compared"] = known["compared"]
    if bool(before) != bool(known["previous"]):
        made.update({k: known[k] for k in ("weight", "sqr", "var", "excess", "steps")})
    if spec.options.base_batch is not None:
        made["base_batch"] = known["base_batch"]
    # The averages are copied because a step donates them. Fresh averages may contain
    # one array several times, and an array can be donated only once.
    return jax.tree.map(
        lambda x, like, where: placement.place(jnp.array(x, like.dtype), where),
        jax.tree.map(_of_this_process, made),
        wanted,
        spec.shardings(),
    )


def _of_this_process(array: Any) -> Any:
    """Returns a replicated global array as a NumPy array; other arrays unchanged."""
    alike = placement.is_global(array) and array.is_fully_replicated
    return np.asarray(array) if alike else array


class HasNoise:
    """The properties of a step that measures the noise of its gradients."""

    _noise: NoiseRun

    @property
    def noise_scale(self) -> NoiseScale:
        """The noise scale of the gradients, averaged over steps (``noise_scale=``)."""
        return self._noise.scale()

    @property
    def noise_state(self) -> Any:
        """The averages behind `noise_scale`, to be saved with the train state."""
        return self._noise.copy_averages

    @noise_state.setter
    def noise_state(self, state: Any) -> None:
        self._noise.restore(state)
