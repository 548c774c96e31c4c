"""What a user says about planning: hints, limits and codecs, read and checked."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Sequence

from autopar.cluster import Cluster
from autopar.cluster.errors import ClusterError
from autopar.errors import PlanError
from autopar.planner.codecs.options import EDITED, budget_of, parsed
from autopar.planner.hints import LogicalRules, Pins, logical_pins
from autopar.planner.limits import SOLVER_SECONDS
from autopar.planner.option_checks import (
    check_hints,
    check_limits,
    check_microbatches,
    check_remat,
    check_stages,
)
from autopar.planner.search import plan_mesh
from autopar.plans import Plan
from autopar.steps import spares
from autopar.steps.spares import Spares
from autopar_passes.program.calls import Call

# What may be said of microbatches; `PlanOptions` has the meaning.
Microbatches = int | str | Sequence[int] | None


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
      microbatches: into how many microbatches the batch is split; ``auto``: as is
        fastest of what fits; several numbers: those of each replica of a cluster of
        unequal devices. None: as the plan given as layouts says, else one.
      coupled: what is done where the loss of a row depends on the others: ``refuse``
        to split the batch, or take the ``microbatch`` for the batch.
      stages: into how many pipeline stages the step is cut; ``auto``: as is fastest.
        None: one.
      remat: how many layers, from the first on, compute their activations again in the
        backward pass, ``all``, or a number with a level as in ``4:dots`` or
        ``4:names=a,b``; ``auto``: as is fastest of what fits; ``none``: none, and the
        step's own ``jax.checkpoint`` is dropped. None: as the plan given as layouts
        says, else as the step does.
      schedule: in which order stages run microbatches: ``gpipe``, ``1f1b``,
        ``interleaved`` or ``zero-bubble``; None: as is fastest, or ``1f1b`` where the
        number of stages is given.
      spares: what devices hold of the state beside the one in use.

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
    microbatches: Microbatches = None
    coupled: str = "refuse"
    stages: int | str | None = None
    schedule: str | None = None
    spares: Spares = spares.NONE
    remat: int | str | None = None

    def __post_init__(self) -> None:
        """Checks the codecs before any work is done."""
        parsed(self.compression)
        budget_of(self.error_budget, self.compression)
        if isinstance(self.microbatches, Sequence) and self.microbatches != "auto":
            object.__setattr__(self, "microbatches", _counts(self.microbatches))
        check_limits(self.max_axes, self.seconds)
        check_microbatches(self.microbatches, self.coupled)
        check_stages(self.stages, self.schedule)
        if isinstance(self.microbatches, tuple) and self.stages not in (None, 1):
            raise PlanError(
                f"microbatches={list(self.microbatches)} are those of replicas, and "
                f"stages={self.stages!r}: give one number, or leave stages out."
            )
        check_remat(self.remat, self.stages)
        check_hints(self.pins, self.logical_axis_rules, self.axis_names)

    @property
    def count(self) -> int:
        """The number of microbatches that is asked for; 1 where none is."""
        asked = self.microbatches
        if isinstance(asked, int):
            return asked
        return 1 if asked is None or isinstance(asked, str) else sum(asked)


def _counts(given: Sequence[int] | str) -> Sequence[int] | str:
    """Numbers as a tuple; a text as it is, which `check_microbatches` refuses."""
    return given if isinstance(given, str) else tuple(given)


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

    Where it has several that nobody asked for in one word (`sent_by_hand`), layouts are
    found for the one that sends most.
    """
    mode = plan.compression.mode
    if mode == "none" or _by_hand(plan):
        sent = _dense_bytes(plan)
        mode = max(sent, key=lambda text: sent[text], default="none")
    budget = plan.compression.error_budget if mode == "auto" else None
    return dataclasses.replace(options, compression=mode, error_budget=budget)


def sent_by_hand(plan: Plan) -> Plan | None:
    """The plan if each gradient has the codec that it was given; else None."""
    several = plan.compression.mode == "none" and len(_dense_bytes(plan)) > 1
    return plan if several or (_by_hand(plan) and _dense_bytes(plan)) else None


def _by_hand(plan: Plan) -> bool:
    return plan.compression.mode == EDITED or "gradients" in plan.edited


def _dense_bytes(plan: Plan) -> dict[str, float]:
    """By codec, what one device would send of its gradients without it.

    What a codec cannot send, or not with profit, is sent beside it as it is.
    """
    found: dict[str, float] = {}
    for g in plan.gradients:
        if g.codec:
            found[g.codec] = found.get(g.codec, 0.0) + g.dense_bytes
    return {text: found[text] for text in set(found) - {"dense"}} or found


def fitting_layouts(options: PlanOptions, cluster: Cluster) -> PlanOptions:
    """The options without layouts to keep, where these do not fit another cluster.

    Layouts are for one mesh. On another new ones are found, which a warning says.
    """
    kept = options.layouts
    if kept is None:
        return options
    try:
        plan_mesh(cluster, kept.axis_names, kept.axis_sizes)
    except PlanError as error:
        warnings.warn(
            f"layouts=: {error} New layouts are found for it, with the same codecs. "
            "Give replan(..., plan=) for layouts of your own.",
            stacklevel=4,
        )
        return dataclasses.replace(options, layouts=None)
    return options
