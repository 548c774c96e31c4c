"""Plans a step: shapes of arguments in, analyses and plans out.

Nothing here asks for a device or a process; `autopar.runtime.agreement` makes all
processes use the plan of the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from autopar.cluster import Cluster
from autopar.planner.codecs.choose import Errors
from autopar.planner.options import PlanOptions, with_logical_pins
from autopar.planner.plan import plan_analysis
from autopar.plans import Plan
from autopar.runtime.arguments import signature
from autopar.runtime.recent import Recent
from autopar.steps.analysis import Analysis, analyse

# Most signatures, such as shapes of batches, whose analyses are kept.
ANALYSES = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Analysed:
    """A step on arguments of some shapes.

    Attributes:
      key: the signature of the arguments.
      analysis: the step, traced on them.
      hints: pins that the arguments' logical axes and the options give.
    """

    key: Hashable
    analysis: Analysis
    hints: PlanOptions


class StepPlanner:
    """A step and what is said about planning it; keeps the analyses it has made."""

    def __init__(
        self,
        step: Callable[..., Any],
        options: PlanOptions,
        *,
        capacity: int = ANALYSES,
    ) -> None:
        """Has analysed nothing yet.

        Args:
          step: the train step.
          options: hints and limits.
          capacity: most analyses to keep.
        """
        self.step = step
        self.options = options
        self._analysed: Recent[Hashable, Analysed] = Recent(capacity)

    def analysed(self, structs: Sequence[Any]) -> Analysed:
        """Returns the step on arguments of these shapes.

        Args:
          structs: the arguments, with ``ShapeDtypeStruct``s of global shapes; NNX
            objects as they are.

        Raises:
          TraceError: JAX cannot trace the step.
        """
        key = signature(structs)
        found = self._analysed.get(key)
        if found is None:
            analysis = analyse(self.step, structs)
            hints = with_logical_pins(self.options, self.step, structs)
            found = self._analysed.put(key, Analysed(key, analysis, hints))
        return found

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
        options = analysed.hints
        if codecs is not None:
            options = dataclasses.replace(
                options,
                compression=codecs.compression,
                error_budget=codecs.error_budget,
                layouts=codecs.layouts,
            )
        return plan_analysis(analysed.analysis, cluster, options, sent, errors)
