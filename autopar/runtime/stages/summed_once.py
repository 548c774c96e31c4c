"""Which sums over devices are taken before the tasks that read them.

An update that clips gradients by their norm reads each gradient twice on a stage: for
the norm, and when the norm of all stages is known. These are two tasks, and each would
take the sum over devices. A sum that several tasks read is taken once, by whoever hands
it to them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection

from autopar.runtime.stages.stage import Stage
from autopar_passes.stages.cut import Cut, Phase


def summed_once(stage: Stage, cut: Cut, crossings: Collection[int]) -> Stage:
    """The stage, with the sums that it takes before its tasks read them.

    Args:
      stage: a stage on its devices.
      cut: the tasks of all stages.
      crossings: values of microbatches that are added up.
    """
    updates = [
        task
        for task in cut.of_stage(stage.program.stage)
        if task.key.phase is Phase.UPDATE
    ]
    readers = Counter(v for task in updates for v, _ in task.inputs)
    due = stage.settled.assignment.due
    early = frozenset(
        value
        for value, count in readers.items()
        if count > 1 and value in crossings and due(value) is not None
    )
    handed = frozenset(
        value for task in updates for value in task.outputs if due(value) is not None
    )
    return dataclasses.replace(stage, early=early, handed=handed)
