"""The bytes that a device of a stage holds when each program of the stage begins.

The module replays the order of a step's tasks with sizes in place of arrays: it adds
and drops arrays at the same points as `autopar.runtime.stages.run`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax

from autopar.runtime.stages.pipeline import StagePipeline
from autopar.runtime.stages.stage import RESULT, Sent, Stage, wide
from autopar_passes.jax_compat import itemsize
from autopar_passes.stages.cut import Phase, TaskKey

# A program of a stage: a task, or (by the number of the stage) the program that
# computes the final values of the stage's running sums.
ProgramKey = TaskKey | int
# Value -> bytes on one device.
_Place = dict[int, int]


def held_bytes(pipeline: StagePipeline) -> dict[ProgramKey, int]:
    """Returns, for each program, the bytes of arrays that a device holds as it begins.

    The arrays are the program's arguments, the state of the stage, its running sums,
    and the values of other microbatches that the schedule keeps. A value from another
    stage is held from the time at which it is sent.

    Args:
      pipeline: the tasks.
    """
    held = _HeldBytes(pipeline)
    held.begin()
    for issue in pipeline.order:
        held.run_task(issue.key, issue.microbatch)
    held.end()
    return held.found


def device_bytes(struct: Any) -> int:
    """Returns the bytes of an array on one device, by its shape, dtype and sharding."""
    return _shard_bytes(struct, struct.sharding)


def _shard_bytes(struct: Any, sharding: Any) -> int:
    return math.prod(sharding.shard_shape(tuple(struct.shape))) * itemsize(struct.dtype)


class _HeldBytes:
    """The sizes of the arrays of each stage in the course of a step."""

    def __init__(self, pipeline: StagePipeline) -> None:
        stages = range(len(pipeline.stages))
        self.pipeline = pipeline
        self.step: list[_Place] = [{} for _ in stages]
        self.micro: list[list[_Place]] = [
            [{} for _ in range(pipeline.microbatches)] for _ in stages
        ]
        # Bytes of all arrays of each stage, including those below.
        self.total = [_codec_bytes(stage) for stage in pipeline.stages]
        self.sums = {
            s: sum(device_bytes(wide(pipeline.stages[s].struct(v))) for v in values)
            for s, values in pipeline.sums.items()
        }
        self.found: dict[ProgramKey, int] = {}

    def put(self, stage: int, place: _Place, value: int, nbytes: int) -> None:
        """Adds a value to the arrays that a stage holds."""
        self.total[stage] += nbytes - place.get(value, 0)
        place[value] = nbytes

    def drop(self, stage: int, place: _Place, values: Iterable[int]) -> None:
        """Removes values from the arrays that a stage holds."""
        self.total[stage] -= sum(place.pop(v, 0) for v in values)

    def note(self, key: ProgramKey, stage: int) -> None:
        """Records the bytes that a stage holds as a program begins."""
        self.found[key] = max(self.found.get(key, 0), self.total[stage])

    def begin(self) -> None:
        """Adds the step's inputs, their copies on other stages, and running sums."""
        cut = self.pipeline.cut
        batch, later = cut.parts.flow.batch, cut.parts.gathered
        given = [
            (owner, value, device_bytes(self.pipeline.stages[owner].struct(value)))
            for value, owner in cut.owners.items()
        ]
        given += [
            (copy.sent.stage, value, nbytes)
            for copy in self.pipeline.copies
            for value, nbytes in self.sizes(copy.sent)
        ]
        for stage, value, nbytes in given:
            places = self.micro[stage] if value in batch else [self.step[stage]]
            for place in places if value not in later else ():
                self.put(stage, place, value, nbytes)
        for stage, nbytes in self.sums.items():
            self.total[stage] += nbytes

    def sizes(self, sent: Sent) -> list[tuple[int, int]]:
        """Each value that is sent, with its bytes on a device that receives it."""
        known = self.pipeline.cut.program.values
        return [
            (v, _shard_bytes(sent.codes[v].struct if v in sent.codes else known[v], s))
            for v, s in zip(sent.values, sent.target, strict=True)
        ]

    def run_task(self, key: TaskKey, number: int) -> None:
        """Follows the arrays in a task of a microbatch."""
        call = self.pipeline.calls[key]
        if not call.idle:
            self.note(key, key.stage)
        own, stage = self.micro[key.stage][number], self.pipeline.stages[key.stage]
        for value in call.code.outputs:
            self.put(key.stage, own, value, device_bytes(stage.struct(value)))
        for sent in call.code.sent:
            for value, nbytes in self.sizes(sent):
                place = self.micro[sent.stage][number]
                self.put(sent.stage, place, value, nbytes)
                if value in self.pipeline.kept_codes:
                    self.put(key.stage, own, ~value, nbytes)
        self.drop(key.stage, own, call.last)

    def end(self) -> None:
        """Follows the arrays in the sums over microbatches and in the updates."""
        for stage in self.pipeline.finish:
            self.finish_sums(stage)
        self.join_rows()
        for key, call in self.pipeline.calls.items():
            if key.phase is Phase.UPDATE:
                self.note(key, key.stage)
                self.drop(key.stage, self.step[key.stage], call.code.donated)
                stage = self.pipeline.stages[key.stage].updating(call.code.task)
                for value in call.code.outputs:
                    nbytes = device_bytes(stage.struct(value))
                    self.put(key.stage, self.step[key.stage], value, nbytes)
                self.send_once(key.stage, call.code.sent)

    def finish_sums(self, stage: int) -> None:
        """Follows the arrays in the program that finishes a stage's running sums."""
        self.note(stage, stage)
        self.total[stage] -= self.sums[stage]
        own = self.pipeline.stages[stage].seen_by_updates
        for value in self.pipeline.held[stage]:
            nbytes = device_bytes(own.struct(value))
            self.put(stage, self.step[stage], value, nbytes)
        self.send_once(stage, self.pipeline.finish_sent[stage])

    def send_once(self, stage: int, every: Iterable[Sent]) -> None:
        """Follows values that are sent once per step; the results stay on the stage."""
        for sent in every:
            target = stage if sent.stage == RESULT else sent.stage
            for value, nbytes in self.sizes(sent):
                self.put(target, self.step[target], value, nbytes)

    def join_rows(self) -> None:
        """Follows the values of microbatches that updates read joined to one array."""
        crossed, cut = self.pipeline.crossed, self.pipeline.cut
        for stage, numbers in enumerate(self.micro):
            kept = {v: numbers[-1][v] for v in crossed.same if v in numbers[-1]}
            for value in crossed.rows:
                if all(value in place for place in numbers):
                    kept[value] = sum(place[value] for place in numbers)
            for place in numbers:
                self.drop(stage, place, list(place))
            for value, nbytes in kept.items():
                self.put(stage, self.step[stage], value, nbytes)
        for value, crossing in cut.parts.gathered.items():
            owner = cut.owners[value]
            nbytes = self.step[owner].get(crossing, 0)
            self.put(owner, self.step[owner], value, nbytes)
        for copy in self.pipeline.late_copies:
            self.send_once(copy.stage, [copy.sent])


def _codec_bytes(stage: Stage) -> int:
    """Returns the bytes of the codecs' state on a device of a stage."""
    if stage.sums is None:
        return 0
    state = stage.sums.structs()["gradients"]
    where = stage.sums.shardings()["gradients"]
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(where), strict=True)
    return sum(_shard_bytes(struct, sharding) for struct, sharding in pairs)
