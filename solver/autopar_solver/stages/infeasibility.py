"""Explains why no pipeline fits: by the stage that every pipeline must have."""

import numpy as np

from autopar_solver.stages.entries import Entries, build_entries, kept_microbatches
from autopar_solver.stages.problem import LayerCosts, StageProblem
from autopar_solver.stages.relaxation import Chain, chain_of, fits_devices
from autopar_solver.stages.schedules.tasks import Schedule
from autopar_solver.stages.solution import BindingMemory
from autopar_solver.stages.terms import crossings_of, device_table


def binding_memory(problem: StageProblem) -> BindingMemory | None:
    """The stage that comes nearest to its memory, and is still over it.

    Whatever the pipeline, some stage is over its memory by at least the same share,
    even if it holds one microbatch and computes everything again. None if that does
    not explain it: then layers are forbidden, or devices are too few.
    """
    found = [
        binding
        for costs in problem.costs
        for schedule in problem.schedules
        if (binding := _binding(problem, costs, schedule)) is not None
    ]
    explained = len(found) == len(problem.costs) * len(problem.schedules)
    if not explained:
        return None
    return min(found, key=lambda binding: binding.least_bytes / binding.limit_bytes)


def _binding(
    problem: StageProblem, costs: LayerCosts, schedule: Schedule
) -> BindingMemory | None:
    entries = build_entries(problem, costs)
    taken = device_table(problem, range(len(problem.options)))
    # Chunks of a device group are stages that take its devices once.
    devices = np.array([group.devices * schedule.chunks for group in problem.groups])
    cross = crossings_of(problem, costs, schedule).cross
    chain = chain_of(entries, taken, devices, cross)
    used = _least_bytes(entries, schedule, costs.microbatches)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(used > 0, used / entries.limit_bytes, 0.0)
    entry = _needed(chain, share)
    if entry is None or share[entry] <= 1:
        return None
    return BindingMemory(
        first=int(entries.first[entry]),
        last=int(entries.end[entry]) - 1,
        option=int(entries.option[entry]),
        least_bytes=float(used[entry]),
        limit_bytes=float(entries.limit_bytes[entry]),
    )


def _least_bytes(entries: Entries, schedule: Schedule, microbatches: int) -> np.ndarray:
    """What each stage needs at the place of the pipeline where it needs least."""
    held = 1
    if schedule.chunks == 1:
        held = kept_microbatches(schedule, microbatches, 1, 1)[0][0]
    kept = entries.running_bytes + held * entries.activation_bytes
    least = entries.activation_bytes - entries.saving_bytes
    again = entries.again_bytes + held * least
    return entries.resident_bytes + np.minimum(kept, again)


def _needed(chain: Chain, share: np.ndarray) -> int | None:
    """The stage of least share without which no chain is possible."""
    order = np.argsort(share, kind="stable")
    low, high = 0, len(order)
    if not high or not fits_devices(chain, np.ones(high, bool)):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        allowed = np.zeros(len(order), bool)
        allowed[order[:middle]] = True
        if fits_devices(chain, allowed):
            high = middle
        else:
            low = middle
    return int(order[high - 1])
