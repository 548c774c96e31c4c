"""All possible stages of a pipeline: each is a range of layers on a submesh option.

A *submesh option* is a number of devices, arranged as one mesh
(`autopar_solver.stages.problem`).

The costs of a range are differences of prefix sums. Only stages that can be part of a
fast enough pipeline are kept, so that large arrays of all ranges exist only for a short
time.
"""

import dataclasses
import math
from typing import Self

import numpy as np

from autopar_solver.stages.problem import LayerCosts, StageProblem
from autopar_solver.stages.schedules.play import Schedule, ScheduleKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entries:
    """Stages as flat arrays, sorted by first layer, then link, then end.

    Attributes:
        first: the first layer of each stage.
        end: the layer after the last layer of the stage.
        option: the submesh option of the stage.
        link: the option's row in the tables of seconds between stages, such as
          ``LayerCosts.latency_s``.
        forward_s: seconds of one microbatch's forward pass.
        backward_s: seconds of one microbatch's gradients of inputs, without
            recomputation.
        weight_s: seconds of one microbatch's gradients of weights.
        step_s: seconds of the work that a stage does once per step, such as the update.
        resident_bytes: bytes that are always held, with copies of shared parameters.
        activation_bytes: activations of one microbatch, without recomputation.
        saving_bytes: the bytes of ``activation_bytes`` that recomputing all possible
            layers saves.
        pending_bytes: bytes kept for a microbatch while its gradients of weights wait
          to be computed.
        running_bytes: the largest number of bytes that one of the layers needs while it
          runs.
        again_bytes: a lower bound of ``running_bytes`` if a stage recomputes at least
            one layer.
        limit_bytes: the memory of a device.
    """

    first: np.ndarray
    end: np.ndarray
    option: np.ndarray
    link: np.ndarray
    forward_s: np.ndarray
    backward_s: np.ndarray
    weight_s: np.ndarray
    step_s: np.ndarray
    resident_bytes: np.ndarray
    activation_bytes: np.ndarray
    saving_bytes: np.ndarray
    pending_bytes: np.ndarray
    running_bytes: np.ndarray
    again_bytes: np.ndarray
    limit_bytes: np.ndarray

    def __len__(self) -> int:
        """The number of stages."""
        return len(self.first)

    def keep(self, mask: np.ndarray) -> Self:
        """Returns the stages for which the mask is true."""
        fields = (field.name for field in dataclasses.fields(self))
        return dataclasses.replace(self, **{f: getattr(self, f)[mask] for f in fields})

    @property
    def total_s(self) -> np.ndarray:
        """Seconds of a microbatch without recomputation."""
        return self.forward_s + self.backward_s + self.weight_s


def can_recompute(costs: LayerCosts) -> np.ndarray:
    """``[layers, options]``: whether recomputing activations saves memory."""
    saves = costs.activation_bytes > costs.boundary_bytes
    return saves & np.isfinite(costs.recompute_s)


def build_entries(
    problem: StageProblem, costs: LayerCosts, limit_s: float = math.inf
) -> Entries:
    """All stages whose work for a whole step takes at most ``limit_s``."""
    first, end, option = np.nonzero(_worthwhile(costs, limit_s))
    end += 1
    link = np.array([option.link for option in problem.options])[option]
    order = np.lexsort((option, end, link, first))
    first, end, option, link = (x[order] for x in (first, end, option, link))
    last = end - 1
    ends = costs.enter[first, option] + costs.leave[last, option]
    again = can_recompute(costs)
    saving = np.where(again, costs.activation_bytes - costs.boundary_bytes, 0.0)
    running = np.where(again, costs.transient_bytes + costs.activation_bytes, np.inf)

    def total(array: np.ndarray) -> np.ndarray:
        sums = _prefix(array)
        return sums[end, option] - sums[first, option]

    step, copies = _shared_costs(problem, first, end, option)
    most = _running(costs.transient_bytes, np.maximum)[first, last, option]
    least = _running(running, np.minimum)[first, last, option]
    limits = [problem.limit_bytes(number) for number in range(len(problem.options))]
    return Entries(
        first=first,
        end=end,
        option=option,
        link=link,
        forward_s=total(_allowed_entries(costs.forward_s)) + ends,
        backward_s=total(costs.backward_input_s) + ends,
        weight_s=total(costs.backward_weight_s),
        step_s=total(costs.step_s) + step,
        resident_bytes=total(costs.resident_bytes) + copies,
        activation_bytes=total(costs.activation_bytes),
        saving_bytes=total(saving),
        pending_bytes=total(costs.pending),
        running_bytes=most,
        again_bytes=np.maximum(most, least),
        limit_bytes=np.array(limits)[option],
    )


def kept_microbatches(
    schedule: Schedule, microbatches: int, later: int, stages: int
) -> list[tuple[int, int]]:
    """Finds how many microbatches a stage holds, and how many are pending.

    Args:
        schedule: a schedule with one chunk per stage.
        microbatches: the number of microbatches of a step.
        later: the number of stages from this stage to the last, both included.
        stages: the number of all stages.

    Returns:
        Pairs of two numbers: of microbatches whose activations are held, and of
        microbatches whose gradients of weights wait at the same time. At any time, the
        stage needs at most the memory of one of the pairs.
    """
    if schedule.kind is ScheduleKind.GPIPE:
        return [(microbatches, 0)]
    held = min(later, microbatches)
    if schedule.kind is ScheduleKind.ONE_F_ONE_B:
        return [(held, 0)]
    both, pending = min(stages, microbatches), min(stages - later + 1, microbatches)
    return [(held, both - held), (both - pending, pending)]


def _prefix(array: np.ndarray) -> np.ndarray:
    """``[layers + 1, options]``: the sum over all layers before each layer."""
    return np.concatenate([np.zeros((1, array.shape[1])), np.cumsum(array, axis=0)])


def _allowed_entries(array: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(array), array, 0.0)


def _worthwhile(costs: LayerCosts, limit_s: float) -> np.ndarray:
    """``[layers, layers, options]``: whether a stage is possible and fast enough."""
    forbidden = _prefix((~np.isfinite(costs.forward_s)).astype(np.float64))
    count = costs.microbatches
    work = _prefix(
        count * (_allowed_entries(costs.forward_s) + costs.backward_input_s)
        + count * costs.backward_weight_s
        + costs.step_s
    )
    layers = np.arange(len(costs.forward_s))
    ordered = (layers[:, None] <= layers[None])[:, :, None]
    possible = ordered & (forbidden[None, 1:] == forbidden[:-1, None])
    ends = 2 * count * (costs.enter[:, None] + costs.leave[None])
    slack = 1e-9 * work[-1].max()
    return possible & (work[None, 1:] - work[:-1, None] + ends <= limit_s + slack)


def _running(array: np.ndarray, fold: np.ufunc) -> np.ndarray:
    """``[layers, layers, options]``: ``fold`` applied over the layers of each range.

    The first two indices of an entry are the first and the last layer of its range.
    """
    layers, options = array.shape
    folded = np.zeros((layers, layers, options))
    for first in range(layers):
        folded[first, first:] = fold.accumulate(array[first:], axis=0)
    return folded


def _shared_costs(
    problem: StageProblem, first: np.ndarray, end: np.ndarray, option: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the cost of parameters that a stage shares with another stage.

    Returns:
      Two arrays: the seconds per step for sending such parameters' gradients, and the
      bytes of the copy that one of the two stages keeps.
    """
    step, copies = np.zeros(len(first)), np.zeros(len(first))
    for shared in problem.shared:
        source = (first <= shared.source) & (shared.source < end)
        target = (first <= shared.target) & (shared.target < end)
        step += np.where(source != target, shared.step_s[option], 0.0)
        copies += np.where(target & ~source, shared.copy_bytes[option], 0.0)
    return step, copies
