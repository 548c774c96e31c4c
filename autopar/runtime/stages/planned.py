"""Builds the step of a plan of several stages, as a function of its flat arguments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autopar.compilers.targets import room_options
from autopar.compression.synchronise import Fallback
from autopar.errors import PlanError
from autopar.planner.record import assignment_of
from autopar.planner.stages.staged import schedule_of
from autopar.planner.stages.submeshes import one_stage, stage_cluster
from autopar.plans import Plan
from autopar.runtime import placement
from autopar.runtime.gradients.state_restorer import restored_state
from autopar.runtime.gradients.sums import StagedSums, gradient_sums
from autopar.runtime.noise.averages import NoiseOptions
from autopar.runtime.noise.staged import StagedNoise, staged_noise
from autopar.runtime.placement import home_meshes, stage_meshes
from autopar.runtime.planned import PlannedStep
from autopar.runtime.stages.feed import Feed
from autopar.runtime.stages.order import issue_order
from autopar.runtime.stages.pipeline import Crossed, StagePipeline
from autopar.runtime.stages.running_sums import StagedCodecs
from autopar.runtime.stages.stage import Stage
from autopar.runtime.stages.transport import Links
from autopar.runtime.world import World
from autopar.steps.analysis import Analysis
from autopar.steps.batch import batch_rows
from autopar.steps.stages import CutStep
from autopar_passes import jax_compat
from autopar_passes.layer_loops.split import layer_ranges, piece_arguments
from autopar_passes.microbatches.facts import Combine, Microbatched, join_microbatches
from autopar_passes.stages.cut import TaskKey
from autopar_solver import make_table

# Arrays of stacked layers: the pipeline takes their pieces as arguments.
#
# Between steps a stacked array consists of blocks of consecutive pieces: one block on
# each stage, or a single block on one stage. A block needs no copy if it is one piece
# and its own stage runs this piece. Any other block is cut on its stage before a step,
# and its pieces are sent to the stages that run them. After the step, the pieces are
# sent back and joined.


Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LayerBlock:
    """The pieces of a stacked array that one stage holds between steps.

    Attributes:
      places: positions of the pieces among the flat arguments of the pipeline.
      results: positions of the next values of the pieces among the flat results.
      shapes: shape of each piece.
      sharding: sharding of the block, and of each of its pieces, on the stage that
        holds it.
      shardings: sharding of each piece on the stage that runs it.
    """

    places: tuple[int, ...]
    results: tuple[int, ...]
    shapes: tuple[Shape, ...]
    sharding: NamedSharding
    shardings: tuple[NamedSharding, ...]

    @property
    def shape(self) -> Shape:
        """The shape of the block."""
        return (sum(n for n, *_ in self.shapes), *self.shapes[0][1:])

    @functools.cached_property
    def held_shardings(self) -> tuple[NamedSharding, ...]:
        """The sharding of each piece on the stage that holds the block."""
        own = self.sharding.device_set
        return tuple(
            s if s.device_set == own else self.sharding for s in self.shardings
        )

    @property
    def is_piece(self) -> bool:
        """Whether the block is one piece, in the sharding of the block."""
        return self.held_shardings == (self.sharding,)

    @property
    def is_copied(self) -> bool:
        """Whether the stages that run the pieces get copies of all of them."""
        own = self.sharding.device_set
        return not self.is_piece or self.shardings[0].device_set != own


@dataclasses.dataclass(frozen=True, eq=False)
class StackedArray:
    """An array of stacked layers.

    Attributes:
      shape: shape of the array.
      sharding: sharding of the array between steps.
      blocks: the parts of the array on each stage.
    """

    shape: Shape
    sharding: NamedSharding
    blocks: tuple[LayerBlock, ...]


def stacked_array(
    *,
    places: Sequence[int],
    results: Sequence[int],
    sizes: Sequence[int],
    shape: Sequence[int],
    sharding: NamedSharding,
    pieces: Sequence[NamedSharding],
    holders: Sequence[Mesh],
) -> StackedArray:
    """Divides the pieces of an array among the stages that hold them between steps.

    Args:
      places: positions of the pieces among the flat arguments of the pipeline.
      results: positions of the next values of the pieces among the flat results.
      sizes: number of layers of each piece.
      shape: shape of the array.
      sharding: sharding of the array between steps.
      pieces: sharding of each piece during a step; the same layout on every stage.
      holders: the meshes that hold the array: of all stages, or of one.
    """
    each = len(places) // len(holders)

    def block(number: int, mesh: Mesh) -> LayerBlock:
        own = slice(number * each, (number + 1) * each)
        here = (s for s in pieces if s.mesh == mesh)
        return LayerBlock(
            places=tuple(places[own]),
            results=tuple(results[own]),
            shapes=tuple((n, *shape[1:]) for n in sizes[own]),
            sharding=next(here) if len(holders) > 1 else sharding,
            shardings=tuple(pieces[own]),
        )

    blocks = tuple(block(k, mesh) for k, mesh in enumerate(holders))
    return StackedArray(tuple(shape), sharding, blocks)


class _StageBlocks:
    """Cuts all blocks on one stage into pieces, and joins the pieces."""

    def __init__(self, blocks: Sequence[LayerBlock]) -> None:
        """Takes the blocks, which lie on the same devices."""
        self.blocks = tuple(blocks)
        self.copied = [block for block in blocks if not block.is_piece]
        self.here = bool(blocks[0].sharding.addressable_devices)

    def cut(self, arrays: Sequence[Any]) -> list[list[Any]]:
        """Returns the pieces of each block."""
        pairs = list(zip(self.blocks, arrays, strict=True))
        if not self.here:
            return [
                [
                    _absent(n, x.dtype, s)
                    for n, s in zip(b.shapes, b.held_shardings, strict=True)
                ]
                for b, x in pairs
            ]
        copied = [x for b, x in pairs if not b.is_piece]
        made = iter(self._cut(copied) if copied else ())
        return [[x] if b.is_piece else next(made) for b, x in pairs]

    def join(self, pieces: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns the blocks of some pieces."""
        pairs = list(zip(self.blocks, pieces, strict=True))
        if not self.here:
            return [_absent(b.shape, own[0].dtype, b.sharding) for b, own in pairs]
        copied = [list(own) for b, own in pairs if not b.is_piece]
        made = iter(self._join(copied) if copied else ())
        return [own[0] if b.is_piece else next(made) for b, own in pairs]

    @functools.cached_property
    def _cut(self) -> Any:
        def cut(arrays: list[Any]) -> list[list[Any]]:
            return [
                [x[begin:end] for begin, end in layer_ranges([n for n, *_ in b.shapes])]
                for b, x in zip(self.copied, arrays, strict=True)
            ]

        return jax.jit(cut, out_shardings=[list(b.held_shardings) for b in self.copied])

    @functools.cached_property
    def _join(self) -> Any:
        def join(pieces: list[list[Any]]) -> list[Any]:
            return [jnp.concatenate(own) for own in pieces]

        return jax.jit(join, out_shardings=[b.sharding for b in self.copied])

    def clear_cache(self) -> None:
        """Frees compiled code."""
        self._cut.clear_cache()
        self._join.clear_cache()


@dataclasses.dataclass(frozen=True, eq=False)
class WithStacked:
    """A step that takes whole stacked arrays, made of a step that takes their pieces.

    Attributes:
      function: the step that takes pieces.
      arrays: position of a flat argument -> its stacked array.
      inputs: number of flat arguments of ``function``.
      outputs: number of flat results of the step with whole arrays.
      donate: whether a step donates the arrays.
      links: the connections to other processes; None: there is one process.
    """

    function: Any
    arrays: Mapping[int, StackedArray]
    inputs: int
    outputs: int
    donate: bool
    links: Links | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Runs a step.

        Arguments after the step's own flat arguments (state of codecs and of noise) are
        passed to ``function``. Its results after the step's own are returned.
        """
        given = self._cut_arrays(arguments)
        behind = arguments[self._own :]
        returned = self.function(*given, *behind)
        made, *rest = returned if behind else (returned,)
        if self.donate:
            # All tasks that read the old stacked arrays have been issued. The arrays
            # are freed here, because the new arrays, which are joined next, need
            # memory.
            for k, array in self.arrays.items():
                if all(block.is_copied for block in array.blocks):
                    arguments[k].delete()
        out = self._join_results(made)
        return (out, *rest) if behind else out

    def gradients(self, *arguments: Any) -> dict[str, Any]:
        """The partial gradients of a step (`autopar.runtime.stages.feed.Feed`)."""
        return self.function.gradients(*self._cut_arrays(arguments))

    @property
    def _own(self) -> int:
        """Number of flat arguments with whole stacked arrays."""
        blocks = [block for array in self.arrays.values() for block in array.blocks]
        pieces = sum(len(block.places) for block in blocks)
        return self.inputs - pieces + len(self.arrays)

    @functools.cached_property
    def _stages(self) -> list[_StageBlocks]:
        """The blocks on each stage, in the order of the arrays."""
        found: dict[Mesh, list[LayerBlock]] = {}
        for array in self.arrays.values():
            for block in array.blocks:
                found.setdefault(block.sharding.mesh, []).append(block)  # type: ignore[arg-type]
        return [_StageBlocks(blocks) for blocks in found.values()]

    def _cut_arrays(self, arguments: Sequence[Any]) -> list[Any]:
        """Returns the flat arguments, with stacked arrays split into pieces."""
        own = self._own
        given: list[Any] = [*arguments[:own], *([None] * (self.inputs - own))]
        whole = {
            block: _array_of([arguments[k]], block.shape, block.sharding)
            for k, array in self.arrays.items()
            for block in array.blocks
        }
        for stage in self._stages:
            made = stage.cut([whole[block] for block in stage.blocks])
            for block, pieces in zip(stage.blocks, made, strict=True):
                for place, piece in zip(block.places, pieces, strict=True):
                    given[place] = piece
        self._send(given, back=False)
        return given

    def _join_results(self, made: Sequence[Any]) -> list[Any]:
        """Returns the flat results, with the pieces of stacked arrays joined."""
        every = list(made)
        self._send(every, back=True)
        whole: dict[LayerBlock, Any] = {}
        for stage in self._stages:
            pieces = [[every[r] for r in block.results] for block in stage.blocks]
            whole.update(zip(stage.blocks, stage.join(pieces), strict=True))
        for array in self.arrays.values():
            blocks = [whole[block] for block in array.blocks]
            first = array.blocks[0].results[0]
            every[first] = _array_of(blocks, array.shape, array.sharding)
        return every[: self.outputs]

    def _send(self, arrays: list[Any], *, back: bool) -> None:
        """Sends pieces between the stages that hold them and the stages that run them.

        Args:
          arrays: the flat arguments, or the flat results; changed in place.
          back: whether results are sent to the stages that hold them.
        """
        ways: dict[int, tuple[NamedSharding, NamedSharding]] = {}
        for array in self.arrays.values():
            for block in array.blocks:
                places = block.results if back else block.places
                for place, held, run in zip(
                    places, block.held_shardings, block.shardings, strict=True
                ):
                    if held.device_set != run.device_set:
                        ways[place] = (run, held) if back else (held, run)
        if not ways:
            return
        moved = [arrays[k] for k in ways]
        if self.links is None:
            moved = jax.device_put(moved, [target for _, target in ways.values()])
        else:
            routes = [
                self.links.route(arrays[k].shape, arrays[k].dtype, *way)
                for k, way in ways.items()
            ]
            moved = self.links.move_arrays(("layers", back), moved, routes)
        for k, array in zip(ways, moved, strict=True):
            arrays[k] = array

    def clear_cache(self) -> None:
        """Frees compiled code."""
        self.function.clear_cache()
        for stage in self._stages:
            stage.clear_cache()


def _array_of(arrays: Sequence[Any], shape: Shape, sharding: NamedSharding) -> Any:
    """Makes an array from those shards of other arrays that are on its devices."""
    dtype = arrays[0].dtype
    struct, bits = jax_compat.bits_struct(shape, dtype)
    shards = {
        x.device: x.data
        for array in arrays
        for x in jax_compat.key_bits(array).addressable_shards
    }
    devices = list(sharding.mesh.devices.flat)  # type: ignore[union-attr]
    mine = [shards[d] for d in devices if d in shards]
    if not mine:
        return _absent(shape, dtype, sharding)
    made = jax.make_array_from_single_device_arrays(struct, sharding, mine, dtype=bits)
    return jax_compat.with_dtype(made, dtype)


def _absent(shape: Shape, dtype: Any, sharding: NamedSharding) -> Any:
    return placement.absent(jax.ShapeDtypeStruct(shape, dtype), sharding)


def check_world(world: World, plan: Plan, devices: Sequence[Any]) -> None:
    """Checks that a plan of several stages can run in a world.

    Args:
      world: the processes.
      plan: the plan.
      devices: the devices of the plan's cluster, by position.

    Raises:
      PlanError: there are several processes without a coordination service.
    """
    if world.process_count == 1:
        return
    if jax_compat.coordination() is None:
        raise PlanError(
            "stages in several processes find each other by jax.distributed, which "
            "was not started: call jax.distributed.initialize first."
        )


def pipelined_step(
    analysis: Analysis,
    cut: CutStep,
    plan: Plan,
    devices: Sequence[Any],
    *,
    donate: bool,
    wait_s: Callable[[TaskKey], float] | None = None,
    links: Links | None = None,
    noise: NoiseOptions | None = None,
    fallback: Fallback | None = None,
    signals: bool = False,
) -> PlannedStep:
    """Builds a step of several stages, without compiling it.

    Args:
      analysis: the analysis of the step on the whole batch.
      cut: the step cut into the plan's stages.
      plan: the plan.
      devices: the devices of the plan's cluster, by position.
      donate: whether a call of the step donates the carried state.
      wait_s: task -> the least number of seconds that it takes (`StagePipeline`).
      links: the connections to other processes; None: there is one process.
      noise: how the noise of gradients is measured; None: it is not measured.
      fallback: codecs for a bucket whose own codecs send too little of the gradients.
      signals: whether steps measure the signal in the gradients that codecs send.

    Raises:
      PlanError: there are too few devices, the noise cannot be measured, or a codec
        cannot send its gradient.
    """
    meshes = stage_meshes(plan, devices)
    stages = _stages(cut, plan, meshes, fallback, signals=signals)
    codecs = _staged_codecs(cut, stages, fallback, links, donate=donate)
    found, whole = cut.found, cut.analysis.whole or cut.analysis
    table = make_table(schedule_of(plan), len(stages), found.microbatches)
    measured = _staged_noise(analysis, cut, stages, noise, links)
    pipeline = StagePipeline(
        cut.cut,
        stages,
        issue_order(table),
        _crossing_rules(found),
        donate=donate,
        wait_s=wait_s,
        links=links,
        shown=_values_of_results(whole, cut),
        noise=measured,
        codecs=codecs,
        codes=cut.codes,
        masks=cut.masks,
    )
    feed = Feed(whole, cut, pipeline, measured)
    flat = [d for mesh in meshes for d in mesh.devices.flat]
    function, shardings = _as_written(
        analysis, whole, plan, feed, meshes, donate=donate
    )
    sums = None if codecs is None else codecs.sums

    def sums_of(other: Plan) -> StagedSums | None:
        if sums is None:
            return None
        made = _stages(cut, other, meshes, fallback, signals=signals)
        found = {k: s.sums for k, s in enumerate(made) if s.sums is not None}
        return dataclasses.replace(sums, stages=found)

    return PlannedStep(
        analysis,
        plan,
        function,
        Mesh(np.array(flat), ("device",)),
        shardings,
        tuple(home_meshes(plan, meshes)),
        sums=sums,
        sums_of=sums_of,
        gradients=None if sums is None else function.gradients,
        noise=None if measured is None else measured.spec,
        pipeline=pipeline,
    )


def audited_pipeline(
    cut: CutStep, plan: Plan, meshes: Sequence[Mesh | AbstractMesh]
) -> StagePipeline:
    """Returns the tasks of a plan of several stages, for inspection only.

    Args:
      cut: the step cut into the plan's stages.
      plan: the plan.
      meshes: the mesh of each stage, with or without devices.
    """
    stages = _stages(cut, plan, meshes, None, signals=False)
    table = make_table(schedule_of(plan), len(stages), cut.found.microbatches)
    return StagePipeline(
        cut.cut,
        stages,
        issue_order(table),
        _crossing_rules(cut.found),
        codes=cut.codes,
        masks=cut.masks,
    )


def _stages(
    cut: CutStep,
    plan: Plan,
    meshes: Sequence[Any],
    fallback: Fallback | None,
    *,
    signals: bool,
) -> list[Stage]:
    """The stages on their devices, each with the gradients that it sums by codecs."""
    out: list[Stage] = []
    count = 0
    whole = plan.cluster.read()
    for k, (program, stage, mesh) in enumerate(
        zip(cut.programs, cut.stages, meshes, strict=True)
    ):
        own = one_stage(plan, k)
        assignment = assignment_of(stage, own)
        sums = gradient_sums(
            assignment, own, mesh, fallback, signals=signals, first=count
        )
        count += len(own.gradients)
        room = room_options(stage_cluster(whole, plan.stages[k].devices))
        given = plan.compiler_options
        out.append(Stage(program, assignment, mesh, room, given, sums))
    return out


def _staged_codecs(
    cut: CutStep,
    stages: Sequence[Stage],
    fallback: Fallback | None,
    links: Links | None,
    *,
    donate: bool,
) -> StagedCodecs | None:
    """How the stages sum gradients by codecs; None: no stage has codecs."""
    sums = {k: s.sums for k, s in enumerate(stages) if s.sums is not None}
    if not sums:
        return None
    return StagedCodecs(
        StagedSums(sums, _own_device(stages, links), fallback),
        restored_state(cut.analysis),
        tuple(stages),
        donate,
    )


def _own_device(stages: Sequence[Stage], links: Links | None) -> Any:
    """Returns the device of this process that holds values that all processes have."""
    if links is None:
        return stages[0].mesh.devices.flat[0]
    return links.devices[links.index]


def _as_written(
    analysis: Analysis,
    whole: Analysis,
    plan: Plan,
    feed: Feed,
    meshes: Sequence[Mesh],
    *,
    donate: bool,
) -> tuple[Any, list[NamedSharding]]:
    """The function of the step's own flat arguments, and the shardings of these.

    Args:
      analysis: the step as the user wrote it.
      whole: the step with stacked layers split into pieces.
      plan: the plan.
      feed: the step that takes pieces.
      meshes: the mesh of each stage.
      donate: whether a call of the step donates the carried state.
    """
    if not whole.pieces:
        return feed, feed.in_shardings
    homes, inputs = home_meshes(plan, meshes), analysis.graph.inputs
    shardings = list(feed.in_shardings[: len(inputs)])
    arrays: dict[int, StackedArray] = {}
    for k, places in piece_arguments(len(inputs), whole.pieces).items():
        path = inputs[k].path
        spec = PartitionSpec(*(axes or None for axes in plan.home_spec(path)))
        home = plan.home(path)
        shardings[k] = NamedSharding(homes[home], spec)
        arrays[k] = stacked_array(
            places=places,
            results=[whole.carried_arguments[p] for p in places],
            sizes=whole.pieces[k],
            shape=analysis.graph.values[inputs[k].value].shape,
            sharding=shardings[k],
            pieces=[feed.in_shardings[p] for p in places],
            holders=meshes if home == len(meshes) else meshes[home : home + 1],
        )
    made = WithStacked(
        feed,
        arrays,
        len(feed.in_shardings),
        len(analysis.graph.outputs),
        donate,
        feed.pipeline.links,
    )
    return made, shardings


def _staged_noise(
    analysis: Analysis,
    cut: CutStep,
    stages: Sequence[Stage],
    noise: NoiseOptions | None,
    links: Links | None,
) -> StagedNoise | None:
    """Returns the noise measurement of the step; None: the noise is not measured."""
    if noise is None:
        return None
    assignments = [stage.assignment for stage in stages]
    rows = batch_rows((analysis.whole or analysis).graph)
    coded = frozenset[int]().union(*(stage.coded_values for stage in stages))
    device, meshes = _own_device(stages, links), [stage.mesh for stage in stages]
    return staged_noise(cut, assignments, rows, noise, device, meshes, coded)


def _values_of_results(analysis: Analysis, cut: CutStep) -> set[int]:
    """Returns the values of results that are not state."""
    state = set(analysis.carried_arguments.values())
    atoms = enumerate(cut.cut.program.body.outputs)
    return {a for k, a in atoms if k not in state and isinstance(a, int)}


def _crossing_rules(found: Microbatched) -> Crossed:
    """How the values of microbatches are combined."""
    scales: dict[int, float] = {}
    same: set[int] = set()
    rows: dict[int, Any] = {}
    for crossing in found.crossings:
        match crossing.combine:
            case Combine.SUM:
                scales[crossing.value] = 1.0
            case Combine.MEAN:
                scales[crossing.value] = 1.0 / found.microbatches
            case Combine.SAME:
                same.add(crossing.value)
            case Combine.ROWS:
                assert crossing.rows is not None
                rows[crossing.value] = jax.jit(
                    functools.partial(_join_rows, crossing.rows)
                )
    return Crossed(scales=scales, same=frozenset(same), rows=rows)


def _join_rows(rows: Any, arrays: list[Any]) -> Any:
    return join_microbatches(jax.numpy.stack(arrays), rows)
