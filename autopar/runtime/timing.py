"""Runs plans of one step side by side on the local devices and times them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar import progress
from autopar.planner.stages.entry import cut_as
from autopar.plans import Plan
from autopar.runtime.placement import device_mesh
from autopar.runtime.planned import PlannedStep, planned_step
from autopar.runtime.stages.planned import pipelined_step
from autopar.runtime.world import World
from autopar.steps.analysis import Analysis
from autopar_passes import jax_compat


def measure_plans(
    analysis: Analysis, plans: Mapping[str, Plan], *, repeats: int = 5, steps: int = 3
) -> dict[str, float]:
    """Returns the median seconds of one step under each plan.

    The plans take turns: the first plan runs ``steps`` steps, then the next plan. So
    other programs on the machine slow down all plans alike. Inputs are synthetic: small
    random floats, and zeros for integers.

    Args:
      analysis: the step that the plans were made for.
      plans: name -> plan.
      repeats: number of turns of each plan; the result is the median over turns.
      steps: number of steps in one turn.
    """
    turns = timed_turns(analysis, plans, repeats=repeats, steps=steps)
    return {name: statistics.median(found) for name, found in turns.items()}


def timed_turns(
    analysis: Analysis, plans: Mapping[str, Plan], *, repeats: int, steps: int
) -> dict[str, list[float]]:
    """Returns the seconds of one step in every turn, measured as in `measure_plans`.

    The lists of all plans have the same length, ``repeats``. The ``i``-th turns of all
    plans run directly one after another. The ratio of two plans' ``i``-th seconds
    therefore does not depend on the load of the machine in other turns.

    Args:
      analysis: the step that the plans were made for.
      plans: name -> plan.
      repeats: number of turns of each plan.
      steps: number of steps in one turn.
    """
    runners: dict[str, _Runner] = {}
    for k, (name, plan) in enumerate(plans.items()):
        progress.say(f"compiling plan {k + 1} of {len(plans)} ({name})")
        runners[name] = _Runner(planned_on_devices(analysis, plan))
        runners[name].turn(2)
    turns: dict[str, list[float]] = {name: [] for name in plans}
    for k in range(repeats):
        for name, runner in runners.items():
            progress.say(f"timing turn {k + 1} of {repeats} ({name})")
            turns[name].append(runner.turn(steps) / steps)
    return turns


def planned_on_devices(analysis: Analysis, plan: Plan) -> PlannedStep:
    """Builds the step of a plan on the local devices."""
    devices = World.current().devices
    if len(plan.stages) > 1:
        cut = cut_as(analysis, plan)
        return pipelined_step(analysis, cut, plan, devices, donate=True)
    mesh = device_mesh(plan, devices)
    return planned_step(analysis, plan, mesh, donate=True)


class _Runner:
    """A compiled step with synthetic inputs; each step gets the last step's state."""

    def __init__(self, planned: PlannedStep) -> None:
        self.planned = planned
        if planned.pipeline is not None:
            planned.compile()
            self.compiled = planned.function
        else:
            self.compiled = planned.lower().compile()
        self.arguments = made_up_inputs(planned)
        sums = planned.sums
        self.codecs = [] if sums is None else [sums.init()]

    def turn(self, steps: int) -> float:
        """Runs steps, each on the state of the step before; returns the seconds."""
        carried = self.planned.analysis.carried_arguments
        start = time.perf_counter()
        out: Sequence[Any] = ()
        for _ in range(steps):
            out = self.compiled(*self.arguments, *self.codecs)
            if self.codecs:
                out, self.codecs[0], *_ = out
            for argument, result in carried.items():
                self.arguments[argument] = out[result]
        jax.block_until_ready(out)
        return time.perf_counter() - start


def made_up_inputs(planned: PlannedStep) -> list[Any]:
    """Returns a synthetic array with its sharding for each flat argument."""
    graph = planned.analysis.graph
    rng = np.random.default_rng(0)
    out: list[Any] = []
    for given, sharding in zip(graph.inputs, planned.in_shardings, strict=True):
        value = graph.values[given.value]
        if jax_compat.is_extended(value.dtype):
            key = jax.random.key(0)
            array: Any = jax.numpy.broadcast_to(key, value.shape)
        elif jax.numpy.issubdtype(value.dtype, jax.numpy.floating):
            array = (0.02 * np.abs(rng.standard_normal(value.shape))).astype(
                value.dtype
            )
        else:
            array = np.zeros(value.shape, value.dtype)
        out.append(jax.device_put(array, sharding))
    return out
