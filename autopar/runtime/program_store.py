"""Keeps the compiled programs of a step, the most recently used ones."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from typing import Any

from autopar.compression.fallback import Fallback
from autopar.planner.codecs.adjusted import program_plan
from autopar.planner.option_texts import PROGRAMS
from autopar.planner.stages.entry import cut_as
from autopar.plans import Plan
from autopar.runtime.agreement import content_digest
from autopar.runtime.noise.averages import NoiseOptions
from autopar.runtime.placement import stage_meshes
from autopar.runtime.planned import PlannedStep, planned_step
from autopar.runtime.recent import Recent
from autopar.runtime.stages.planned import pipelined_step
from autopar.runtime.stages.transport import Links
from autopar.runtime.step_planner import Analysed


class ProgramStore:
    """Programs by what they are made of: step, plan, devices.

    A program that goes takes its compiled code with it. JAX keeps compiled code for
    as long as a jitted function lives; a jitted function that somebody still holds
    compiles again when it is called.
    """

    def __init__(
        self,
        *,
        donate: bool = True,
        fallback: Fallback | None = None,
        noise: NoiseOptions | None = None,
        signals: bool = False,
        every: int = 1,
        guard: bool = False,
        capacity: int = PROGRAMS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Holds nothing yet.

        Args:
          donate: whether programs consume the carried state.
          fallback: the codecs of a step in which the plan's send too little.
          noise: how programs measure the noise of gradients; None: they do not.
          signals: whether programs measure the signal of what codecs send.
          every: the telemetry of codecs is measured in one step of so many.
          guard: whether a step that is not finite leaves the state as it was.
          capacity: most programs to hold.
          clock: seconds now.

        ``compile_s`` is the seconds that the program took which was compiled last.
        """
        self.donate, self.guard = donate, guard
        self.compile_s = 0.0
        self._clock = clock
        # Of each jitted function: it is compiled by a call or ahead of it, or by both.
        self._compiled: weakref.WeakKeyDictionary[Any, float]
        self._compiled = weakref.WeakKeyDictionary()
        # A thread may prepare programs beside the one that trains.
        self._building = threading.RLock()
        self._compiling: weakref.WeakKeyDictionary[Any, threading.Lock]
        self._compiling = weakref.WeakKeyDictionary()
        self.fallback = fallback
        self.noise, self.signals, self.every = noise, signals, every
        self._capacity = capacity
        self._programs = Recent[Hashable, PlannedStep](capacity, self._release)

    def empty(self) -> ProgramStore:
        """A store of the same kind that holds nothing yet."""
        return ProgramStore(
            donate=self.donate,
            fallback=self.fallback,
            noise=self.noise,
            signals=self.signals,
            every=self.every,
            guard=self.guard,
            capacity=self._capacity,
        )

    def consumed_arguments(self, planned: PlannedStep) -> dict[int, int]:
        """The carried arguments of a program that its calls consume, with results."""
        return planned.analysis.carried_arguments if self.consumes(planned.plan) else {}

    def consumes(self, plan: Plan) -> bool:
        """Whether the program of a plan consumes the carried state.

        The stages of a pipeline cannot restore it: with a guard it stays until the step
        has ended.
        """
        return self.donate and not (self.guard and len(plan.stages) > 1)

    def clear(self) -> None:
        """Drops all programs."""
        self._programs.discard(lambda _: True)

    def __len__(self) -> int:
        """The number of programs."""
        return len(self._programs)

    def program(
        self,
        analysed: Analysed,
        plan: Plan,
        devices: Sequence[Any],
        like: PlannedStep | None = None,
        links: Links | None = None,
    ) -> PlannedStep:
        """Returns the program of a plan on these devices, made if it is not held.

        Args:
          analysed: the step.
          plan: the plan.
          devices: at least as many as the plan's mesh has; the first are used.
          like: a program of the same plan but for its codecs: probes of gradients
            are not compiled again.
          links: to the other processes, for a plan of several stages.

        Raises:
          PlanError: the plan belongs to another step, or there are too few devices.
        """
        meshes = stage_meshes(plan, devices)
        key = _key(analysed, plan, meshes)
        with self._building:
            found = self._programs.get(key)
            if found is None and len(meshes) > 1:
                made = self._make_pipeline(analysed, plan, devices, links)
                found = self._programs.put(key, made)
            elif found is None:
                made = planned_step(
                    analysed.analysis,
                    plan,
                    meshes[0],
                    donate=self.donate,
                    gradients=None if like is None else like.gradients,
                    fallback=self.fallback,
                    noise=self.noise,
                    signals=self.signals,
                    every=self.every,
                    guard=self.guard,
                )
                found = self._programs.put(key, made)
        if found.plan.gradients == plan.gradients:
            return found
        return found.with_inputs_of(plan)

    def _make_pipeline(
        self,
        analysed: Analysed,
        plan: Plan,
        devices: Sequence[Any],
        links: Links | None,
    ) -> PlannedStep:
        """The program of a plan of several stages."""
        return pipelined_step(
            analysed.analysis,
            cut_as(analysed.analysis, plan),
            plan,
            devices,
            donate=self.consumes(plan),
            links=links,
            noise=self.noise,
            fallback=self.fallback,
            signals=self.signals,
        )

    def is_compiled(
        self, analysed: Analysed, plan: Plan, devices: Sequence[Any]
    ) -> bool:
        """Whether the program of a plan on these devices is held and compiled."""
        key = _key(analysed, plan, stage_meshes(plan, devices))
        known = key in list(self._programs)
        return known and self._programs.peek(key).function in self._compiled

    @contextlib.contextmanager
    def compiling(self, program: PlannedStep) -> Generator[None]:
        """Takes the time in which a program is compiled, by its first call perhaps.

        Another thread that wants the same program waits.
        """
        with self._building:
            lock = self._compiling.setdefault(program.function, threading.Lock())
        with lock:
            begin = self._clock()
            yield
            before = self._compiled.get(program.function, 0.0)
            self.compile_s = before + self._clock() - begin
            self._compiled[program.function] = self.compile_s

    def release(self, devices: Collection[Any]) -> None:
        """Drops the programs that run on any of these devices, which are gone."""
        gone = set(devices)
        self._programs.discard(lambda p: not gone.isdisjoint(p.mesh.devices.flat))

    def _release(self, program: PlannedStep) -> None:
        """Frees compiled code, but for what another program shares."""
        program.function.clear_cache()
        if program.pipeline is not None or program.gradients is None:
            return
        held = [self._programs.peek(key) for key in self._programs]
        if not any(p.gradients is program.gradients for p in held):
            program.gradients.clear_cache()


def _key(analysed: Analysed, plan: Plan, meshes: Sequence[Any]) -> Hashable:
    """What a program is made of.

    The signature, as structures that hold functions make one step two. What is an
    input of the program makes none other.
    """
    used = tuple(d for mesh in meshes for d in mesh.devices.flat)
    return analysed.key, analysed.weak, content_digest(program_plan(plan)), used
