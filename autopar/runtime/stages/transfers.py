"""The arrays of one step of a pipeline, and how they move between stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.runtime import placement
from autopar.runtime.noise.staged import Place
from autopar.runtime.stages.codecs import CodecStep
from autopar.runtime.stages.pipeline import Call, StageCopy, StagePipeline
from autopar.runtime.stages.routes import Route
from autopar.runtime.stages.stage import RESULT, Sent
from autopar.runtime.stages.transport import Fetched, Tag
from autopar_passes.stages.cut import TaskKey


class Transfers:
    """Holds the arrays of each stage during one step, and moves them between stages."""

    def __init__(self, pipeline: StagePipeline, microbatches: int) -> None:
        """Starts a step without arrays.

        Args:
          pipeline: the tasks.
          microbatches: number of microbatches.
        """
        self.pipeline = pipeline
        stages = range(len(pipeline.stages))
        self.step: list[dict[int, Any]] = [{} for _ in stages]
        self.micro: list[list[dict[int, Any]]] = [
            [{} for _ in range(microbatches)] for _ in stages
        ]
        self.sums: dict[int, dict[int, Any]] = {}
        self.results: dict[int, Any] = {}
        self.told: dict[int, Any] = {}
        # Task or stage -> the norms that it has measured, one entry per call.
        places = () if pipeline.noise is None else pipeline.noise.columns
        self.noise: dict[Place, list[Any]] = {place: [] for place in places}
        # Tasks that call functions of the host: the task, the microbatch, and a result
        # to wait for.
        self.watched: list[tuple[Call, int, Sequence[Any]]] = []
        # Task -> a result to wait for, if tasks must run alone. No other task reuses
        # this result's memory.
        self.latest: dict[TaskKey, Any] = {}
        # Transfers that were requested from other processes, and transfers that were
        # offered to them.
        self.asked: dict[Tag, Fetched] = {}
        self.handed: set[Tag] = set()
        self.reached = [0 for _ in stages]
        self.codecs: CodecStep | None = None
        # Whether this process has failed. It then sends zeros to other processes.
        self.failed = False

    def makes(self, stage: int) -> bool:
        """Whether this process runs a stage and has not failed."""
        return self.pipeline.here(stage) and not self.failed

    def copy(
        self,
        tag: Tag,
        copy: StageCopy,
        places: Sequence[dict[int, Any]],
        present: Collection[int],
    ) -> None:
        """Sends values of a stage to another stage.

        Args:
          tag: names this transfer.
          copy: the values to send.
          places: the arrays of each stage.
          present: the values to send now; the other values of ``copy`` are skipped.
        """
        source, sent = places[copy.stage], copy.sent
        found = [k for k, v in enumerate(sent.values) if v in present]
        if not found:
            return
        if len(found) < len(sent.values):
            sent = Sent(
                sent.stage,
                tuple(sent.values[k] for k in found),
                tuple(sent.source[k] for k in found),
                tuple(sent.target[k] for k in found),
            )
        arrays = None
        if self.makes(copy.stage):
            arrays = [source[v] for v in sent.values]
            if len(found) == len(copy.sent.values):
                arrays = copy.layout(*arrays)
            elif not self.alone(copy.stage, sent.stage):
                arrays = jax.device_put(arrays, list(sent.source))
            if not self.alone(copy.stage, sent.stage):
                # Another process fetches the arrays at any time of the step. The step
                # may reuse the memory of its inputs before, and the call may free it.
                arrays = [x.copy() for x in arrays]
        self.send(tag, copy.stage, sent, arrays, places[sent.stage])

    def send(
        self,
        tag: Tag,
        stage: int,
        sent: Sent,
        arrays: Sequence[Any] | None,
        place: dict[int, Any],
    ) -> None:
        """Moves arrays to another stage, or to their sharding between steps.

        Args:
          tag: names this transfer.
          stage: the stage that has the arrays.
          sent: the values, and the stage that receives them.
          arrays: the arrays; None if ``stage`` runs in another process.
          place: the arrays of the receiving stage; the moved arrays are added to it.
        """
        pipeline, links = self.pipeline, self.pipeline.links
        if sent.stage == RESULT:
            self.leave_all(tag, stage, sent, arrays)
        elif self.failed:
            self.release(tag, stage, sent)
        elif self.alone(stage, sent.stage):
            assert arrays is not None
            place.update(zip(sent.values, sent.land_arrays(arrays), strict=True))
        elif pipeline.here(stage) or pipeline.here(sent.stage):
            assert links is not None
            routes = self.routes(sent)
            if arrays is not None:
                self.handed.add(tag)
                links.offer(tag, arrays, routes)
            if pipeline.here(sent.stage):
                if tag not in self.asked:
                    self.asked[tag] = links.fetch(tag, routes)
                moved = links.land_pieces(routes, self.asked[tag], arrays)
                place.update(zip(sent.values, moved, strict=True))

    def alone(self, stage: int, other: int) -> bool:
        """Whether two stages run in this process and in no other."""
        pipeline = self.pipeline
        if pipeline.links is None:
            return True
        found = pipeline.processes[stage] | pipeline.processes[other]
        return found == frozenset({pipeline.links.index})

    def release(self, tag: Tag, stage: int, sent: Sent) -> None:
        """Completes a transfer after this process has failed.

        Zeros are sent to the receiver, and received arrays are not used.
        """
        links, pipeline = self.pipeline.links, self.pipeline
        assert links is not None
        if pipeline.here(stage) and tag not in self.handed:
            links.offer(tag, None, self.routes(sent))
        if pipeline.here(sent.stage) and tag not in self.asked:
            self.asked[tag] = links.fetch(tag, self.routes(sent))

    def routes(self, sent: Sent) -> list[Route]:
        """The routes of the values of a transfer to another process."""
        return [
            self.route(*way)
            for way in zip(sent.values, sent.source, sent.target, strict=True)
        ]

    def route(self, value: int, source: NamedSharding, target: NamedSharding) -> Route:
        """The route of a value to another process."""
        assert self.pipeline.links is not None
        found = self.struct(value)
        return self.pipeline.links.route(found.shape, found.dtype, source, target)

    def struct(self, value: int) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a value when its stage sends it."""
        known = self.pipeline.cut.program.values[value]
        struct = jax.ShapeDtypeStruct(known.shape, known.dtype)
        together = self.pipeline.crossed.rows.get(value)
        if together is None or not self.crossing:
            return struct
        return jax.eval_shape(together, [struct] * self.pipeline.microbatches)

    @property
    def crossing(self) -> bool:
        """Whether the values of microbatches have been combined."""
        return not self.micro

    def leave_all(
        self, tag: Tag, stage: int, sent: Sent, arrays: Sequence[Any] | None
    ) -> None:
        """Moves results of a stage to their shardings between steps."""
        if self.pipeline.links is None:
            assert arrays is not None
            self.results.update(zip(sent.values, sent.land_arrays(arrays), strict=True))
            return
        for k, value in enumerate(sent.values):
            array = None if arrays is None else arrays[k]
            self.leave(tag, stage, value, array, sent.source[k], sent.target[k])

    def leave(
        self,
        tag: Any,
        stage: int,
        value: int,
        array: Any,
        source: NamedSharding,
        target: NamedSharding,
    ) -> None:
        """Moves a result to its sharding between steps.

        State goes to the stage that owns it. Results in `StagePipeline.shown` are also
        copied to all processes.
        """
        pipeline = self.pipeline
        if pipeline.links is None:
            self.results[value] = (
                array if source == target else jax.device_put(array, target)
            )
            return
        owner = stage
        if value in pipeline.given:
            owner = pipeline.cut.owners[pipeline.given[value]]
        arrays = [array] if self.makes(stage) else None
        if source == target:
            if arrays is not None:
                self.results[value] = array
        else:
            sent = Sent(owner, (value,), (source,), (target,))
            self.send(("result", tag, value), stage, sent, arrays, self.results)
        if not pipeline.here(owner):
            self.results[value] = placement.absent(self.struct(value), target)
        if value in pipeline.shown:
            self.told[value] = self.show(stage, value, array, source)

    def show(self, stage: int, value: int, array: Any, source: NamedSharding) -> Any:
        """Copies a result to this process from the process that made it."""
        links = self.pipeline.links
        assert links is not None
        tag = ("shown", value)
        if tag in self.handed:
            return array
        self.handed.add(tag)
        given = array if self.makes(stage) else None
        found = links.everywhere(tag, self.struct(value), source, given)
        return array if self.alone(stage, stage) else found

    def leave_unsummed(self, value: int, stage: int) -> None:
        """Moves a result of microbatches that is not summed out of the step."""
        pipeline = self.pipeline
        _, target = pipeline.place(stage, value)
        array = self.step[stage].get(value)
        if pipeline.links is None:
            assert array is not None
            source = array.sharding
        else:
            source = NamedSharding(pipeline.stages[stage].mesh, PartitionSpec())
            array = None if array is None else jax.device_put(array, source)
        if value not in pipeline.given:
            target = source
        self.leave("unsummed", stage, value, array, source, target)
