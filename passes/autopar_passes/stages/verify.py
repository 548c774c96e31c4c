"""Checks that the tasks of a cut compute what the program computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar_passes.graph.errors import GraphError
from autopar_passes.stages.cut import Cut, Phase, TaskKey
from autopar_passes.stages.flow import reads


def verify_cut(found: Cut) -> None:
    """Checks the tasks of a program against it.

    Every equation that some result needs runs in a task; one that is not free runs in
    one task alone, but for those of forward passes that are computed again. A task
    reads inputs of the program, and what tasks make that come before it in every
    schedule.

    Raises:
      GraphError: something is wrong; the message says what.
    """
    for problem in _problems(found):
        raise GraphError(f"the cut into {found.stages} stages is wrong: {problem}.")


def _problems(found: Cut) -> Iterator[str]:
    yield from _missing(found)
    for task in found.tasks.values():
        yield from _reads(found, task.key)


def _missing(found: Cut) -> Iterator[str]:
    flow = found.parts.flow
    runs = Counter(i for t in found.tasks.values() for i in t.equations)
    again = {
        i
        for t in found.tasks.values()
        if t.key.phase is Phase.FORWARD
        for i in t.equations
    }
    for index, eqn in flow.equations.items():
        alone = index not in flow.free and index not in again
        if index in found.parts.part and not runs[index]:
            yield f"equation {index} ({eqn.primitive}) is in no task"
        if alone and runs[index] > 1:
            yield f"equation {index} ({eqn.primitive}) is in {runs[index]} tasks"
    for value in found.program.body.outputs:
        maker = flow.maker.get(value) if isinstance(value, int) else None
        if maker is not None and not any(
            value in t.outputs for t in found.tasks.values()
        ):
            yield f"result {value} leaves no task"


def _reads(found: Cut, key: TaskKey) -> Iterator[str]:
    flow, task = found.parts.flow, found.tasks[key]
    known = {v for v, _ in task.inputs} | set(found.program.body.inputs)
    for index in task.equations:
        eqn = flow.equations[index]
        for value in reads(eqn):
            if value not in known:
                yield f"{key} reads value {value} before it is made"
        known.update(eqn.outputs)
    for value in task.outputs:
        if value not in known:
            yield f"{key} does not make its output {value}"
    for value, maker in task.inputs:
        if maker is None:
            continue
        if maker not in found.tasks or value not in found.tasks[maker].outputs:
            yield f"{key} reads value {value}, which {maker} does not hand out"
        elif not before(maker, key):
            yield f"{key} waits for value {value} of {maker}, which comes later"


def before(one: TaskKey, other: TaskKey) -> bool:
    """Whether a task of a microbatch comes before another in every schedule."""
    return _order(one) < _order(other)


def _order(key: TaskKey) -> tuple[int, int, int]:
    match key.phase:
        case Phase.FORWARD:
            return 0, key.number, 0
        case Phase.BACKWARD | Phase.BACKWARD_INPUT:
            return 1, -key.number, 0
        case Phase.BACKWARD_WEIGHT:
            return 1, -key.number, 1
        case _:
            return 2, key.number, key.stage
