"""A step under a plan of several stages, as a function of its flat arguments."""

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
from autopar.compression.fallback import Fallback
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
from autopar.runtime.stages.codecs import StagedCodecs
from autopar.runtime.stages.feed import Feed
from autopar.runtime.stages.order import issue_order
from autopar.runtime.stages.pipeline import Crossed, StagePipeline
from autopar.runtime.stages.routes import Route
from autopar.runtime.stages.stage import Stage
from autopar.runtime.stages.transport import Links
from autopar.runtime.world import World
from autopar.steps.analysis import Analysis
from autopar.steps.batch import batch_rows
from autopar.steps.stages import CutStep
from autopar_passes import jax_compat
from autopar_passes.layer_loops.operators import layer_ranges, piece_arguments
from autopar_passes.microbatches.facts import Combine, Microbatched, join_microbatches
from autopar_passes.stages.cut import TaskKey
from autopar_solver import make_table


@dataclasses.dataclass(frozen=True, eq=False)
class StackedArray:
    """An array whose pieces are arguments of a pipeline.

    Where every stage has an equal piece, the array is split over the stages, and its
    pieces are made of its shards without a copy. Otherwise it is whole on one stage,
    which cuts it, and sends the pieces of others to them and gets them back.

    Attributes:
      places: the flat arguments that are its pieces.
      results: the flat results that are their next values.
      sizes: layers of each piece.
      shape: of the array.
      sharding: where the array lies between steps.
      pieces: where each piece lies.
    """

    places: tuple[int, ...]
    results: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    sharding: NamedSharding
    pieces: tuple[NamedSharding, ...]

    @property
    def spread(self) -> bool:
        """Whether the array is split over stages."""
        return any(p.device_set < self.sharding.device_set for p in self.pieces)

    @property
    def cut_pieces(self) -> list[NamedSharding]:
        """Where each piece lies on the stage that has the whole array."""
        home = self.sharding
        return [p if p.device_set == home.device_set else home for p in self.pieces]

    def apart(self, array: Any, links: Links | None = None) -> list[Any]:
        """The pieces of the array, which lies as it does between steps.

        Args:
          array: the array.
          links: to the other processes; None: there are none.
        """
        if self.spread:
            shards = {
                x.device: x.data for x in jax_compat.key_bits(array).addressable_shards
            }
            return [
                self._make_array(array.dtype, (n, *self.shape[1:]), where, shards)
                for n, where in zip(self.sizes, self.pieces, strict=True)
            ]
        here = bool(self.sharding.addressable_devices)
        cut = list(self._cut(array)) if here else None
        if links is None:
            return jax.device_put(cut, list(self.pieces))
        structs = [
            jax.ShapeDtypeStruct((n, *self.shape[1:]), array.dtype) for n in self.sizes
        ]
        routes = self._routes(links, structs, self.cut_pieces, self.pieces)
        return links.move_arrays(("apart", self.places), cut, routes)

    def join_pieces(self, pieces: Sequence[Any], links: Links | None = None) -> Any:
        """The array of its pieces; arguments are as of `apart`."""
        dtype = pieces[0].dtype
        if self.spread:
            shards = {
                x.device: x.data
                for piece in pieces
                for x in jax_compat.key_bits(piece).addressable_shards
            }
            return self._make_array(dtype, self.shape, self.sharding, shards)
        if links is None:
            return self._put_together(*jax.device_put(list(pieces), self.cut_pieces))
        routes = self._routes(links, pieces, self.pieces, self.cut_pieces)
        moved = links.move_arrays(("joined", self.places), pieces, routes)
        if self.sharding.addressable_devices:
            return self._put_together(*moved)
        return placement.absent(jax.ShapeDtypeStruct(self.shape, dtype), self.sharding)

    @staticmethod
    def _routes(
        links: Links,
        structs: Sequence[Any],
        source: Sequence[NamedSharding],
        target: Sequence[NamedSharding],
    ) -> list[Route]:
        """How the pieces go."""
        return [
            links.route(tuple(s.shape), s.dtype, a, b)
            for s, a, b in zip(structs, source, target, strict=True)
        ]

    def _make_array(
        self,
        dtype: Any,
        shape: tuple[int, ...],
        sharding: NamedSharding,
        shards: Mapping[Any, Any],
    ) -> Any:
        """An array of shards that lie on its devices; this process has some of them."""
        struct, bits = jax_compat.bits_struct(shape, dtype)
        devices = list(sharding.mesh.devices.flat)  # type: ignore[union-attr]
        mine = [shards[d] for d in devices if d in shards]
        if not mine:
            return placement.absent(jax.ShapeDtypeStruct(shape, dtype), sharding)
        made = jax.make_array_from_single_device_arrays(
            struct, sharding, mine, dtype=bits
        )
        return jax_compat.with_dtype(made, dtype)

    @functools.cached_property
    def _cut(self) -> Any:
        def cut(array: Any) -> list[Any]:
            return [array[a:b] for a, b in layer_ranges(self.sizes)]

        return jax.jit(cut, out_shardings=self.cut_pieces)

    @functools.cached_property
    def _put_together(self) -> Any:
        def together(*pieces: Any) -> Any:
            return jnp.concatenate(pieces)

        return jax.jit(together, out_shardings=self.sharding)

    def clear_cache(self) -> None:
        """Frees compiled code."""
        if not self.spread:
            self._cut.clear_cache()
            self._put_together.clear_cache()


@dataclasses.dataclass(frozen=True, eq=False)
class WithStacked:
    """A function of flat arguments in pieces, as one of the arguments as written.

    Attributes:
      function: of the arguments in pieces.
      arrays: flat argument as written -> the array.
      inputs: how many flat arguments there are in pieces.
      outputs: how many flat results there are as written.
      links: to the other processes; None: there are none.
    """

    function: Any
    arrays: Mapping[int, StackedArray]
    inputs: int
    outputs: int
    links: Links | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Runs a step; what comes behind its arguments is handed on, and back."""
        given = self._apart(arguments)
        behind = arguments[self._own :]
        returned = self.function(*given, *behind)
        made, *rest = returned if behind else (returned,)
        out = list(made[: self.outputs])
        for array in self.arrays.values():
            pieces = [made[r] for r in array.results]
            out[array.results[0]] = array.join_pieces(pieces, self.links)
        return (out, *rest) if behind else out

    def gradients(self, *arguments: Any) -> dict[str, Any]:
        """The partial gradients of a step (`autopar.runtime.stages.feed.Feed`)."""
        return self.function.gradients(*self._apart(arguments))

    @property
    def _own(self) -> int:
        """How many flat arguments there are as written."""
        more = sum(len(array.places) - 1 for array in self.arrays.values())
        return self.inputs - more

    def _apart(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments in pieces."""
        own = self._own
        given: list[Any] = [*arguments[:own], *([None] * (self.inputs - own))]
        for k, array in self.arrays.items():
            pieces = array.apart(arguments[k], self.links)
            for place, piece in zip(array.places, pieces, strict=True):
                given[place] = piece
        return given

    def clear_cache(self) -> None:
        """Frees compiled code."""
        self.function.clear_cache()
        for array in self.arrays.values():
            array.clear_cache()


def check_world(world: World, plan: Plan, devices: Sequence[Any]) -> None:
    """Checks that a plan of several stages can run in a world.

    Args:
      world: the processes.
      plan: the plan.
      devices: those of the plan's cluster, by position.

    Raises:
      PlanError: an array of stacked layers is not split over stages, or the processes
        have no coordination service.
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
    donate: bool = True,
    wait_s: Callable[[TaskKey], float] | None = None,
    links: Links | None = None,
    noise: NoiseOptions | None = None,
    fallback: Fallback | None = None,
    signals: bool = False,
) -> PlannedStep:
    """Builds a step of several stages; nothing is compiled yet.

    Args:
      analysis: the step on the whole batch.
      cut: the step as the plan's stages.
      plan: the plan.
      devices: those of the plan's cluster, by position.
      donate: whether the carried state is consumed by the call.
      wait_s: seconds that a task takes at least (`Pipeline`).
      links: to the other processes, where there are several.
      noise: how the noise of gradients is measured; None: it is not.
      fallback: the codecs of a step in which the plan's send too little.
      signals: whether the signal of what codecs send is measured.

    Raises:
      PlanError: there are too few devices, no noise to measure, or a codec that its
        gradient cannot be sent by.
    """
    meshes = stage_meshes(plan, devices)
    stages = _stages(cut, plan, meshes, fallback, signals=signals)
    codecs = _staged_codecs(cut, stages, fallback, links, donate=donate)
    found = cut.found
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
        shown=_values_of_results(analysis, cut),
        noise=measured,
        codecs=codecs,
    )
    whole = cut.analysis.whole or cut.analysis
    feed = Feed(whole, cut, pipeline, measured)
    flat = [d for mesh in meshes for d in mesh.devices.flat]
    function, shardings = _as_written(analysis, whole, plan, feed, meshes)
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
    """The tasks of a plan of several stages, to be looked at and not run.

    Args:
      cut: the step as the plan's stages.
      plan: the plan.
      meshes: of the stages, with devices or without.
    """
    stages = _stages(cut, plan, meshes, None)
    table = make_table(schedule_of(plan), len(stages), cut.found.microbatches)
    return StagePipeline(
        cut.cut, stages, issue_order(table), _crossing_rules(cut.found)
    )


def _stages(
    cut: CutStep,
    plan: Plan,
    meshes: Sequence[Any],
    fallback: Fallback | None,
    *,
    signals: bool = False,
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
        out.append(Stage(program, assignment, mesh, room, sums))
    return out


def _staged_codecs(
    cut: CutStep,
    stages: Sequence[Stage],
    fallback: Fallback | None,
    links: Links | None,
    *,
    donate: bool,
) -> StagedCodecs | None:
    """How the stages sum by codecs; None: none does."""
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
    """The device of this process that has what all processes know."""
    if links is None:
        return stages[0].mesh.devices.flat[0]
    return links.devices[links.index]


def _as_written(
    analysis: Analysis,
    whole: Analysis,
    plan: Plan,
    feed: Feed,
    meshes: Sequence[Mesh],
) -> tuple[Any, list[NamedSharding]]:
    """The function of the step's own arguments, and where these lie.

    Args:
      analysis: the step as it is written.
      whole: the step with stacked layers in pieces.
      plan: the plan.
      feed: the function of arguments in pieces.
      meshes: of the stages.
    """
    if not whole.pieces:
        return feed, feed.in_shardings
    homes, inputs = home_meshes(plan, meshes), analysis.graph.inputs
    shardings = list(feed.in_shardings[: len(inputs)])
    arrays: dict[int, StackedArray] = {}
    for k, places in piece_arguments(len(inputs), whole.pieces).items():
        path = inputs[k].path
        spec = PartitionSpec(*(axes or None for axes in plan.home_spec(path)))
        shardings[k] = NamedSharding(homes[plan.home(path)], spec)
        arrays[k] = StackedArray(
            places=tuple(places),
            results=tuple(whole.carried_arguments[p] for p in places),
            sizes=tuple(whole.pieces[k]),
            shape=tuple(analysis.graph.values[inputs[k].value].shape),
            sharding=shardings[k],
            pieces=tuple(feed.in_shardings[p] for p in places),
        )
    made = WithStacked(
        feed,
        arrays,
        len(feed.in_shardings),
        len(analysis.graph.outputs),
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
    """What is measured of gradients."""
    if noise is None:
        return None
    assignments = [stage.assignment for stage in stages]
    rows = batch_rows((analysis.whole or analysis).graph)
    coded = frozenset[int]().union(*(stage.coded_values for stage in stages))
    device, meshes = _own_device(stages, links), [stage.mesh for stage in stages]
    return staged_noise(cut, assignments, rows, noise, device, meshes, coded)


def _values_of_results(analysis: Analysis, cut: CutStep) -> set[int]:
    """The values of results that are not state."""
    state = set(analysis.carried_arguments.values())
    atoms = enumerate(cut.cut.program.body.outputs)
    return {a for k, a in atoms if k not in state and isinstance(a, int)}


def _crossing_rules(found: Microbatched) -> Crossed:
    """How the values of microbatches are put together."""
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
