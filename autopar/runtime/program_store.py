"""Keeps the most recently used compiled programs of a step."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from typing import Any

from autopar.compression.synchronise import Fallback
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
    """Programs by step, plan and devices.

    When the store drops a program, it frees the compiled code. Otherwise JAX would keep
    the code for as long as the jitted function lives. A later call of that function
    compiles it again.
    """

    def __init__(
        self,
        *,
        donate: bool,
        fallback: Fallback | None = None,
        noise: NoiseOptions | None = None,
        signals: bool,
        every: int,
        guard: bool = False,
        capacity: int = PROGRAMS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Creates an empty store.

        Args:
          donate: whether programs consume the carried state.
          fallback: the codecs to use in a step in which the plan's codecs would send
            too small a fraction of the gradient.
          noise: how programs measure the noise of gradients; None if they do not.
          signals: whether programs measure the signal in the sent gradients.
          every: telemetry of codecs is measured once in this many steps.
          guard: whether programs are guarded: a step with a NaN or an infinity in its
            results leaves the state unchanged.
          capacity: the largest number of programs.
          clock: returns the current time in seconds.

        The attribute ``compile_s`` holds the seconds of the last compilation.
        """
        self.donate, self.guard = donate, guard
        self.compile_s = 0.0
        self._clock = clock
        # The seconds that each jitted function took to compile, in its first call or
        # before it.
        self._compiled: weakref.WeakKeyDictionary[Any, float]
        self._compiled = weakref.WeakKeyDictionary()
        # A second thread may prepare programs while the main thread trains.
        self._building = threading.RLock()
        self._compiling: weakref.WeakKeyDictionary[Any, threading.Lock]
        self._compiling = weakref.WeakKeyDictionary()
        self.fallback = fallback
        self.noise, self.signals, self.every = noise, signals, every
        self._capacity = capacity
        self._programs = Recent[Hashable, PlannedStep](capacity, self._release)

    def empty(self) -> ProgramStore:
        """Returns an empty store with the same options."""
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
        """Returns the arguments that a program donates, each with its result."""
        return planned.analysis.carried_arguments if self.consumes(planned.plan) else {}

    def consumes(self, plan: Plan) -> bool:
        """Whether the program of a plan donates the carried state.

        With a guard, the step keeps its old state if a result is not finite. The
        program of a pipeline stage ends before all results are known, so under a guard
        it cannot donate the state: the old state stays in memory until the step ends.
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
        """Returns the program of a plan on these devices.

        Builds it if the store lacks it.

        Args:
          analysed: the step.
          plan: the plan.
          devices: at least as many devices as the plan needs; the first are used.
          like: a program whose plan differs only in its codecs; its function for
            partial gradients is reused and not compiled again.
          links: links to the other processes, for a plan of several stages.

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
        """Builds the program of a plan with several stages."""
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
        """Whether the store has a plan's program on these devices, compiled."""
        key = _key(analysed, plan, stage_meshes(plan, devices))
        known = key in list(self._programs)
        return known and self._programs.peek(key).function in self._compiled

    @contextlib.contextmanager
    def compiling(self, program: PlannedStep) -> Generator[None]:
        """Measures the time of compiling a program in the ``with`` block.

        The block compiles the program or calls it for the first time. Another thread
        that wants to compile the same program waits.
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
        """Drops the programs that use any of the given devices, which were lost."""
        gone = set(devices)
        self._programs.discard(lambda p: not gone.isdisjoint(p.mesh.devices.flat))

    def _release(self, program: PlannedStep) -> None:
        """Frees the compiled code of a program, except code shared with others."""
        program.function.clear_cache()
        if program.pipeline is not None or program.gradients is None:
            return
        held = [self._programs.peek(key) for key in self._programs]
        if not any(p.gradients is program.gradients for p in held):
            program.gradients.clear_cache()


def _key(analysed: Analysed, plan: Plan, meshes: Sequence[Any]) -> Hashable:
    """Returns the key of a program: signature, weak types, plan and devices.

    The key has the signature of the arguments instead of their tree structures: a tree
    structure may contain functions, so that structures of equal arguments differ. Codec
    parameters that are inputs of the program are not part of the key.
    """
    used = tuple(d for mesh in meshes for d in mesh.devices.flat)
    return analysed.key, analysed.weak, content_digest(program_plan(plan)), used
