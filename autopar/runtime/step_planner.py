"""Plans a step: shapes of arguments in, analyses and plans out.

Nothing here asks for a device or a process; `autopar.runtime.agreement` makes all
processes use the plan of the first.
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

# Most signatures, such as shapes of batches, whose analyses are kept.
ANALYSES = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Analysed:
    """A step on arguments of some shapes.

    Attributes:
      key: the signature of the arguments.
      weak: the arrays that are weakly typed and not carried.
      analysis: the step, traced on them.
      hints: pins that the arguments' logical axes and the options give.
    """

    key: Hashable
    weak: frozenset[int]
    analysis: Analysis
    hints: PlanOptions

    def fits(self, call: StepCall) -> bool:
        """Whether a call, with structs of global shapes, runs the same program.

        The weak type of a carried array (a step counter that begins as a Python
        number) is gone after the first call and does not matter.
        """
        weak = _weak(call) - self.analysis.carried_arguments.keys()
        return frozenset(weak) == self.weak and signature(call) == self.key


class StepPlanner:
    """A step and what is said about planning it; keeps the analyses it has made."""

    def __init__(
        self,
        step: Callable[..., Any],
        options: PlanOptions,
        *,
        capacity: int = ANALYSES,
        cache: PlanCache | None = None,
        one_stage: Callable[[], str] = str,
    ) -> None:
        """Has analysed nothing yet.

        Args:
          step: the train step.
          options: hints and limits.
          capacity: most analyses to keep.
          cache: where plans are kept on disk; None: nowhere.
          one_stage: says why stages that nobody asked for are not tried; '': they are.
        """
        self.cache = cache
        self._one_stage = one_stage
        self.step = step
        self.options = options
        self._analysed: Recent[Hashable, tuple[Analysed, ...]] = Recent(capacity)
        # Position of an array of the state -> the sharding in its type, of an explicit
        # mesh. A plan moves the state, and must not change what the step is traced on.
        self._types: dict[int, Any] = {}

    def analyse_structs(self, call: StepCall) -> Analysed:
        """Returns the step on arguments of these shapes.

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
        """Traces the step on the state as it was created, wherever a plan moves it.

        Args:
          structs: of the first arrays of a call, typed as their creation says.
        """
        self._types = {k: x.sharding for k, x in enumerate(structs)}

    def hold(self, spares: Spares) -> None:
        """Plans for devices that hold more of the state; forgets what it analysed.

        Args:
          spares: what they hold beside the state in use.
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
          cluster: what to plan for.
          codecs: whose ``compression``, ``error_budget`` and ``layouts`` hold in
            place of those of this planner.
          sent: a plan whose codecs hold gradient by gradient.
          errors: relative errors that were measured, by gradient and codec.

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
        self, analysed: Analysed, cluster: Cluster, codecs: PlanOptions | None = None
    ) -> Plan | None:
        """The plan that is kept on disk, as `plan` would make it; None: there is none.

        Args:
          analysed: the step.
          cluster: what to plan for.
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
        """Finds a good plan on a cluster in a short time, from the running one.

        Where the options ask for what only the whole search knows, it is `plan`.

        Args:
          analysed: the step.
          cluster: what to plan for.
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
        """Finds a plan for another batch that leaves the state where it is.

        Args:
          analysed: the step with the other batch.
          cluster: that of the running plan.
          running: the plan of the step with its usual batch.
          codecs: as for `plan`.
          sent: as for `plan`.

        Raises:
          InfeasibleError: the batch does not fit the memory of a device like this.
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
        )


def _weak(call: StepCall) -> set[int]:
    """The structs of a call that are weakly typed, such as Python numbers."""
    return {k for k, x in enumerate(call.arrays) if x.weak_type}
