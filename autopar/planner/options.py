"""What a user says about planning: hints, limits and codecs, read and checked."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from autopar.cluster import Cluster
from autopar.cluster.errors import ClusterError
from autopar.errors import PlanError
from autopar.planner.codecs.options import budget_of, parsed
from autopar.planner.hints import LogicalRules, Pins, logical_pins
from autopar.plans import Plan
from autopar_passes.program.calls import Call

# Most plans are proved optimal in a tenth of this; with very tight memory the
# solver would go on for minutes to close the last percent.
SOLVER_SECONDS = 10.0


def as_cluster(given: Cluster | str) -> Cluster:
    """Returns a cluster, or the one that a text such as ``2x4:h100`` describes.

    ``local`` is the devices of this process.

    Raises:
      ClusterError: the text describes none, or it is neither.
    """
    if isinstance(given, Cluster):
        return given
    if not isinstance(given, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ClusterError(
            f"cluster={given!r}: expected an autopar.Cluster or its text, such as "
            "'2x4:h100', 'local', or the path of a TOML file."
        )
    return Cluster.local() if given == "local" else Cluster.parse(given)


def as_plan(given: Plan | str | os.PathLike[str], option: str = "plan") -> Plan:
    """Returns a plan, or the one in a JSON file.

    Args:
      given: a plan, or the path of a file that `autopar.Plan.save` wrote.
      option: what errors call it.

    Raises:
      PlanError: there is no such file, it is no plan, or it is neither.
    """
    if isinstance(given, Plan):
        return given
    if not isinstance(given, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(
            f"{option}={given!r}: expected an autopar.Plan, or the path of its JSON "
            "file, such as 'plan.json'."
        )
    return Plan.load(os.fspath(given))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Hints and limits of the search for a plan; see `autopar.plan`.

    Attributes:
      pins: path pattern of an input -> its ``PartitionSpec``.
      logical_axis_rules: Flax's rules; `with_logical_pins` turns them into pins.
      axis_names: names of the mesh axes, outermost first.
      max_axes: most mesh axes to try; None: two, or one for each level.
      seconds: time limit of the solver for each mesh; None: none.
      split_batch: whether it is an error if no mesh axis divides the batch.
      compression: how gradients are sent: ``none``, ``auto``, or a codec as text.
      error_budget: for ``auto``, the largest relative error of the gradients.
      layouts: a plan whose layouts are kept.

    Raises:
      PlanError: there is no such codec, or the budget is no number of at least 0 or
        is given for other than ``auto``.
    """

    pins: Pins | None = None
    logical_axis_rules: LogicalRules | None = None
    axis_names: Sequence[str] | None = None
    max_axes: int | None = None
    seconds: float | None = SOLVER_SECONDS
    split_batch: bool = True
    compression: str = "none"
    error_budget: float | None = None
    layouts: Plan | None = None

    def __post_init__(self) -> None:
        """Checks the codecs before any work is done."""
        parsed(self.compression)
        budget_of(self.error_budget, self.compression)


# What holds where nothing is said.
DEFAULTS = PlanOptions()


def with_logical_pins(options: PlanOptions, call: Call) -> PlanOptions:
    """The options with Flax's rules turned into pins of a call's arguments.

    A pin that was given wins over a rule.
    """
    named = logical_pins(call, options.logical_axis_rules or ())
    return dataclasses.replace(
        options, pins={**named, **(options.pins or {})}, logical_axis_rules=None
    )


def with_codecs_of(options: PlanOptions, plan: Plan) -> PlanOptions:
    """The options with the choice of codecs that a plan was made with.

    Raises:
      PlanError: the plan's gradients have codecs that nobody asked for in one word.
    """
    mode = plan.compression.mode
    codecs = {g.codec for g in plan.gradients if g.codec}
    # What a codec cannot send, or not with profit, is sent beside it as it is.
    codecs = codecs - {"dense"} or codecs
    if mode == "none" and codecs:
        if len(codecs) > 1:
            raise PlanError(
                f"the plan in use sends gradients by {', '.join(sorted(codecs))}, and "
                "does not say how they were chosen. Plan for the new cluster with "
                "autopar.plan(..., compression=...) and give replan(..., plan=)."
            )
        mode = codecs.pop()
    budget = plan.compression.error_budget if mode == "auto" else None
    return dataclasses.replace(options, compression=mode, error_budget=budget)
