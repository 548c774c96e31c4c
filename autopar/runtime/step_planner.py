"""Analyses and plans a step from the shapes of its arguments.

This module uses no devices and does not communicate. `autopar.runtime.agreement` makes
all processes use the plan of process 0.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from autopar.cluster import Cluster
from autopar.planner.cache import PlanCache
from autopar.planner.codecs.choose import Errors
from autopar.planner.options import PlanOptions, with_logical_pins
from autopar.planner.plan import plan_analysis, plan_beside
from autopar.planner.warm import can_be_warm, warm_plan
from autopar.plans import Plan
from autopar.runtime.arguments import signature
from autopar.runtime.compile_check import plan_that_fits
from autopar.runtime.recent import Recent
from autopar.steps.analysis import Analysis, analyse_call
from autopar.steps.spares import Spares
from autopar.steps.state import warn_of_state
from autopar_passes.program.calls import StepCall

# The largest number of argument signatures whose analyses are kept.
ANALYSES = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Analysed:
    """The analysis of a step for arguments of given shapes.

    Attributes:
      key: the signature of the arguments.
      weak: positions of arguments that are weakly typed arrays (JAX's weak types).
        State that the step returns with new values is left out.
      analysis: the step, traced on arguments of these shapes.
      hints: the planning options. Logical axis names (Flax) of the arguments are
        already turned into pins, which fix the layouts of these arguments.
    """

    key: Hashable
    weak: frozenset[int]
    analysis: Analysis
    hints: PlanOptions

    def fits(self, call: StepCall) -> bool:
        """Whether a call, with structs of global shapes, runs the same program.

        Weak types of carried arrays are ignored. A carried array (such as a step
        counter that begins as a Python number) has a weak type only in the first call.
        """
        weak = _weak(call) - self.analysis.carried_arguments.keys()
        return frozenset(weak) == self.weak and signature(call) == self.key


class StepPlanner:
    """Analyses and plans one step under given options, and keeps its analyses."""

    def __init__(
        self,
        step: Callable[..., Any],
        options: PlanOptions,
        *,
        capacity: int = ANALYSES,
        cache: PlanCache | None = None,
        one_stage: Callable[[], str] = str,
        may_idle: Callable[[], bool] = lambda: True,
        may_pad: bool = True,
    ) -> None:
        """Creates a planner without analyses.

        Args:
          step: the train step.
          options: hints and limits.
          capacity: the largest number of analyses to keep.
          cache: the folder of saved plans; None to save no plans.
          one_stage: returns the reason why the planner does not try several stages on
            its own; '' if the planner does try several stages.
          may_idle: returns whether devices that do not divide the batch may stay idle.
          may_pad: whether the rows of the batch may be padded.
        """
        self.cache = cache
        self._one_stage, self._may_idle = one_stage, may_idle
        self._may_pad = may_pad
        # Whether every plan must use all devices of its cluster. The caller then
        # plans for smaller clusters by itself.
        self.uses_all = False
        self.step = step
        self.options = options
        self._analysed: Recent[Hashable, tuple[Analysed, ...]] = Recent(capacity)
        # Shardings in the JAX types of state arrays, by the array's position (on a
        # mesh with explicit axes). The step must always be traced with the same types,
        # even after a plan has moved the state to other devices.
        self._types: dict[int, Any] = {}

    def analyse_structs(self, call: StepCall) -> Analysed:
        """Returns the analysis of the step for arguments of these shapes.

        Args:
          call: a call of the step, with structs of global shapes.

        Raises:
          TraceError: JAX cannot trace the step.
        """
        key = signature(call)
        known = self._analysed.get(key) or ()
        for found in known:
            if found.fits(call):
                return found
        call = dataclasses.replace(
            call,
            arrays=[
                x.update(sharding=self._types[k]) if k in self._types else x
                for k, x in enumerate(call.arrays)
            ],
        )
        analysis = dataclasses.replace(
            analyse_call(self.step, call), spares=self.options.spares
        )
        for k in analysis.carried_arguments:
            self._types.setdefault(k, call.arrays[k].sharding)
        warn_of_state(self.step, analysis)
        hints = with_logical_pins(self.options, call)
        weak = frozenset(_weak(call) - analysis.carried_arguments.keys())
        made = Analysed(key, weak, analysis, hints)
        self._analysed.put(key, (*known, made))
        return made

    def hold_types(self, structs: Sequence[Any]) -> None:
        """Fixes the shardings in the types of the state for later traces.

        The step is then always traced with these types, on whatever devices the state
        is.

        Args:
          structs: the structs of the first arrays of a call, with the types that the
            state was created with.
        """
        self._types = {k: x.sharding for k, x in enumerate(structs)}

    def hold(self, spares: Spares) -> None:
        """Makes later plans leave memory free for spare copies of the state.

        A spare copy lets devices recover the state after a failure.

        If the copies differ from those of the last call, all analyses are dropped.

        Args:
          spares: the copies of state that devices hold in addition to the state in use.
        """
        if spares != self.options.spares:
            self.options = dataclasses.replace(self.options, spares=spares)
            self._analysed.discard(lambda _: True)

    def plan(
        self,
        analysed: Analysed,
        cluster: Cluster,
        codecs: PlanOptions | None = None,
        sent: Plan | None = None,
        errors: Errors | None = None,
    ) -> Plan:
        """Finds the plan of a step on a cluster.

        Args:
          analysed: the step.
          cluster: the cluster to plan for.
          codecs: options whose ``compression``, ``error_budget`` and ``layouts``
            replace those of this planner.
          sent: a plan whose codec of each gradient the new plan must use; None to
              choose codecs.
          errors: measured relative errors, by gradient and codec; None if unknown.

        Raises:
          InfeasibleError: no plan fits the memory of a device.
          PlanError: a pin does not fit, or the batch cannot be split.
        """
        options = self._options(analysed, codecs)
        analysis = analysed.analysis
        find = functools.partial(
            plan_that_fits,
            analysis,
            cluster,
            options,
            lambda on, unfit: plan_analysis(
                analysis, on, options, sent, errors, unfit=unfit
            ),
        )
        if self.cache is None or sent is not None or errors:
            return find()
        return self.cache.plan(analysed.analysis, cluster, options, find)

    def plan_on_disk(
        self, analysed: Analysed, cluster: Cluster, codecs: PlanOptions | None
    ) -> Plan | None:
        """Returns a step's plan from the folder of saved plans; None without one.

        The stored plan is the one that `plan` saved for the same arguments.

        Args:
          analysed: the step.
          cluster: the cluster to plan for.
          codecs: as for `plan`.
        """
        if self.cache is None:
            return None
        options = self._options(analysed, codecs)
        return self.cache.find(analysed.analysis, cluster, options)

    def warm(
        self,
        analysed: Analysed,
        cluster: Cluster,
        running: Plan,
        codecs: PlanOptions | None = None,
        sent: Plan | None = None,
        errors: Errors | None = None,
    ) -> Plan:
        """Finds a good plan on a cluster in a short time, from the running plan.

        If `warm_plan` does not support the options, this calls `plan`.

        Args:
          analysed: the step.
          cluster: the cluster to plan for.
          running: the plan in use.
          codecs: as for `plan`.
          sent: as for `plan`.
          errors: as for `plan`.

        Raises:
          InfeasibleError: no plan fits the memory of a device.
          PlanError: a pin does not fit, or the batch cannot be split.
        """
        options = self._options(analysed, codecs)
        if not can_be_warm(cluster, options, running):
            return self.plan(analysed, cluster, codecs, sent, errors)
        return warm_plan(
            analysed.analysis, cluster, options, running, sent=sent, errors=errors
        )

    def plan_beside(
        self,
        analysed: Analysed,
        cluster: Cluster,
        running: Plan,
        codecs: PlanOptions | None = None,
        sent: Plan | None = None,
    ) -> Plan:
        """Finds a plan for another batch size that keeps the state's shardings.

        Args:
          analysed: the step with the other batch size.
          cluster: the cluster of the running plan.
          running: the plan of the step with its usual batch size.
          codecs: as for `plan`.
          sent: as for `plan`.

        Raises:
          InfeasibleError: with the layouts of the state, the batch does not fit the
            memory of a device.
        """
        options = self._options(analysed, codecs)
        return plan_beside(analysed.analysis, cluster, options, running, sent)

    def _options(self, analysed: Analysed, codecs: PlanOptions | None) -> PlanOptions:
        asked = codecs or analysed.hints
        return dataclasses.replace(
            analysed.hints,
            compression=asked.compression,
            error_budget=asked.error_budget,
            layouts=asked.layouts,
            one_stage=self._one_stage(),
            may_idle=self._may_idle() and not self.uses_all,
            may_pad=self._may_pad,
        )


def _weak(call: StepCall) -> set[int]:
    """Returns the positions of a call's weakly typed arrays, such as Python numbers."""
    return {k for k, x in enumerate(call.arrays) if x.weak_type}
