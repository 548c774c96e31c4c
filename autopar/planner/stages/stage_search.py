"""Searches the layouts of each stage of a pipeline."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from autopar.cluster import Cluster, MeshShape
from autopar.cost.pricer import Pricer
from autopar.errors import InfeasibleError, PlanError
from autopar.layouts.strategies import Strategy, layout_of
from autopar.planner.candidate import Candidate
from autopar.planner.codecs.choose import CodecRequest
from autopar.planner.hints import (
    Pins,
    check_pinned,
    fitting_meshes,
    pin_restriction,
    pinned_layouts,
)
from autopar.planner.options import PlanOptions
from autopar.planner.problem import Restriction
from autopar.planner.recipes import Recipe, restriction_of
from autopar.planner.search import candidate_meshes, meshes_for_manual, search
from autopar.planner.stages.codecs import summed_once
from autopar.progress import say
from autopar.steps.analysis import Analysis
from autopar.steps.nodes import Node
from autopar.steps.stages import CutStep
from autopar_passes.layer_loops.split import whole_path
from autopar_passes.layouts import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageSite:
    """The devices and the mesh of a stage.

    Attributes:
      devices: positions in the cluster, in the order of the mesh.
      cluster: these devices as a cluster.
      mesh: logical mesh of the stage; None: the search chooses the best mesh.
    """

    devices: tuple[int, ...]
    cluster: Cluster
    mesh: MeshShape | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageHints:
    """Hints about the layouts of all stages.

    Attributes:
      pins: pattern of an input's path -> its layout on the mesh of its stage.
      axis_names: names of the axes of each stage's mesh.
      max_axes: the most axes of a stage's mesh.
      seconds: time limit of the search of a stage on one mesh.
      recipe: a rule about the axes of each stage's mesh; None: no rule.
      keeps_meshes: whether each stage has the mesh of its `StageSite`, whatever the
        other hints are.
    """

    pins: Mapping[str, PartitionSpec] = dataclasses.field(default_factory=dict)
    axis_names: tuple[str, ...] | None = None
    max_axes: int | None = None
    seconds: float | None = None
    recipe: Recipe | None = None
    keeps_meshes: bool = False

    @property
    def about_meshes(self) -> bool:
        """Whether any hint is about meshes."""
        names, most = self.axis_names, self.max_axes
        return bool(self.pins) or names is not None or most is not None


def hints_of(options: PlanOptions) -> StageHints:
    """Returns the hints that the planning options contain."""
    names = options.axis_names
    return StageHints(
        pins=dict(options.pins or {}),
        axis_names=None if names is None else tuple(names),
        max_axes=options.max_axes,
        seconds=options.seconds,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageSearch:
    """The search of the stages of one pipeline.

    Attributes:
      cut: the step as stages.
      sites: where the stages run.
      hints: hints about the layouts of the stages.
      codecs: the user's request about codecs, which the search of layouts takes into
        account; None: the search assumes no codecs.
      known: results of earlier searches.
    """

    cut: CutStep
    sites: tuple[StageSite, ...]
    hints: StageHints
    codecs: CodecRequest | None = None
    known: dict[object, Candidate] = dataclasses.field(
        default_factory=dict[object, Candidate]
    )

    def all(self, rooms: Sequence[float]) -> list[Candidate]:
        """Returns the best layouts of each stage; equal stages are searched only once.

        Args:
          rooms: by stage, the bytes that a device may hold while one microbatch runs.

        Raises:
          InfeasibleError: a stage does not fit.
          PlanError: a pin does not fit.
        """
        check_matches(self.cut, self.hints.pins)
        found: dict[int, Candidate] = {}
        count = len(self.sites)
        # All stages give the pieces of one array the same layout: that of a stage in
        # the middle.
        middle = count // 2
        for number in sorted(range(count), key=lambda k: k != middle):
            say(f"planning stage {number + 1} of {count}")
            site, analysis = self.sites[number], self.cut.stages[number]
            pins = own_pins(analysis, self.hints.pins)
            key = (
                analysis.fingerprint,
                site.cluster.fingerprint(),
                site.mesh,
                rooms[number],
                tuple((path, str(spec)) for path, spec in pins.items()),
            )
            if key not in self.known:
                like = found.get(middle)
                self.known[key] = self.one(number, rooms[number], pins, like)
            found[number] = _alike(analysis, self.known[key])
        return [found[k] for k in range(count)]

    def one(
        self, number: int, room: float, pins: Pins, like: Candidate | None
    ) -> Candidate:
        """Returns the best layouts of a stage.

        Args:
          number: number of the stage.
          room: bytes that a device may hold while one microbatch runs, which limits the
            layouts.
          pins: pins of the stage's inputs.
          like: layouts of a stage that has pieces of the same arrays; these pieces get
            the same layouts here.
        """
        site, analysis = self.sites[number], self.cut.stages[number]
        meshes = self._meshes(analysis, site, pins)
        lies = {} if like is None else layouts_like(analysis, like)
        if like is not None and lies:
            meshes = [like.pricer.mesh]
        meshes = meshes_for_manual(analysis, site.cluster, meshes)
        restriction = self._restriction(analysis, pins, lies)
        device = dataclasses.replace(site.cluster.device, memory_bytes=math.floor(room))
        limited = dataclasses.replace(site.cluster, device=device)
        best = self._search_stage(analysis, limited, meshes, restriction)
        if like is None and not has_equal_pieces(analysis, best):
            return self.one(number, room, pins, best)
        check_pinned(pins, analysis, best.assignment, best.pricer.mesh)
        pricer = dataclasses.replace(best.pricer, cluster=site.cluster)
        return dataclasses.replace(best, pricer=pricer, sending=None)

    def _search_stage(
        self,
        analysis: Analysis,
        cluster: Cluster,
        meshes: Sequence[MeshShape],
        restriction: Callable[[Pricer], Restriction] | None,
    ) -> Candidate:
        """The best layouts of a stage, given the user's request about codecs."""

        def find_layouts(codecs: CodecRequest | None) -> Candidate:
            return search(
                analysis if codecs is None else summed_once(analysis),
                cluster,
                meshes=meshes,
                seconds=self.hints.seconds,
                restriction=restriction,
                codecs=codecs,
            ).best

        if self.codecs is None or self.codecs.chooses:
            return find_layouts(self.codecs)
        try:
            return find_layouts(self.codecs)
        except InfeasibleError:
            raise
        except PlanError:  # no gradient of the stage can be sent by the codec
            return find_layouts(None)

    def _restriction(
        self, analysis: Analysis, pins: Pins, lies: Mapping[int, Layout]
    ) -> Callable[[Pricer], Restriction] | None:
        """The strategies that pins, pieces of the same arrays and a recipe allow; None:
        all.
        """
        recipe, chunked = self.hints.recipe, _chunked_layers(analysis)
        if not (lies or pins or chunked or recipe):
            return None

        def rules_of(pricer: Pricer) -> Restriction:
            given = pinned_layouts(analysis, pins, pricer.mesh)
            rules = [pin_restriction(analysis, {**lies, **given})]
            if split := [v for v in chunked if given.get(v, ((),))[0]]:
                paths = {i.value: i.path for i in analysis.graph.inputs}
                raise PlanError(
                    f"'{whole_path(paths[split[0]])}': a pin splits its layers, of "
                    "which a stage runs several chunks. Pin another dimension, or use "
                    "schedule='1f1b'."
                )
            if chunked:
                rules.append(_unsplit_layers(analysis, chunked))
            if recipe is not None:
                rules.append(restriction_of(analysis, recipe, pricer))
            return lambda node, strategy: all(rule(node, strategy) for rule in rules)

        return rules_of

    def _meshes(
        self, analysis: Analysis, site: StageSite, pins: Pins
    ) -> list[MeshShape]:
        """Returns the meshes that a stage may have."""
        hints = self.hints
        if site.mesh is not None and (hints.keeps_meshes or not hints.about_meshes):
            return [site.mesh]
        meshes = candidate_meshes(site.cluster, hints.max_axes, hints.axis_names)
        return fitting_meshes(analysis, pins, meshes) if pins else meshes


def _chunked_layers(analysis: Analysis) -> frozenset[int]:
    """The inputs of a stage that are pieces of an array with several pieces there."""
    inputs = analysis.graph.inputs
    counts = Counter(whole_path(given.path) for given in inputs)
    return frozenset(
        given.value
        for given in inputs
        if (whole := whole_path(given.path)) and counts[whole] > 1
    )


def _unsplit_layers(analysis: Analysis, chunked: Collection[int]) -> Restriction:
    """Allows no strategy that splits the layers of pieces, their first dimension.

    The array of these pieces lies on the stage in the order of its layers. If their
    layers were split over devices, the devices of the stage would exchange layers in
    every step.
    """
    wanted: dict[int, list[Any]] = defaultdict(list)
    for value, home in analysis.contraction.homes.items():
        if value in chunked:
            wanted[home.node].append(home.dims)

    def is_allowed(node: Node, strategy: Strategy) -> bool:
        found = wanted.get(node.index, ())
        return not any(layout_of(strategy, dims)[0] for dims in found)

    return is_allowed


def own_pins(analysis: Analysis, pins: Pins) -> dict[str, PartitionSpec]:
    """Returns the pins of a stage's inputs, each by its path.

    A pin of an array of stacked layers becomes a pin of each of its pieces.
    """
    out: dict[str, PartitionSpec] = {}
    for given in analysis.graph.inputs:
        for pattern, spec in pins.items():
            if fnmatch.fnmatchcase(whole_path(given.path) or given.path, pattern):
                out[_escape(given.path)] = spec
    return out


def _escape(path: str) -> str:
    """Returns a pattern that matches only this path."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in path)


def check_matches(cut: CutStep, pins: Pins) -> None:
    """Raises `PlanError` if a pin matches no input of the step."""
    paths = [
        whole_path(given.path) or given.path
        for stage in cut.stages
        for given in stage.graph.inputs
    ]
    for pattern in pins:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
            raise PlanError(
                f"pin '{pattern}' matches no input of any stage; inputs are named like "
                f"{', '.join(paths[:3])}."
            )


def layouts_like(analysis: Analysis, other: Candidate) -> dict[int, Layout]:
    """Returns the layouts that another stage gives to its pieces of a stage's arrays.

    Args:
      analysis: the stage.
      other: the layouts of the other stage.

    Returns:
      The value of each piece on the stage -> its layout on the other stage.
    """
    given = {
        whole_path(i.path): i.value
        for i in other.assignment.analysis.graph.inputs
        if whole_path(i.path)
    }
    return {
        i.value: other.assignment.home_layout(given[whole])
        for i in analysis.graph.inputs
        if (whole := whole_path(i.path)) in given
    }


def has_equal_pieces(analysis: Analysis, found: Candidate) -> bool:
    """Whether the pieces of each array have the same layout on a stage.

    Args:
      analysis: the stage.
      found: its layouts.
    """
    layouts = layouts_like(analysis, found)
    own = found.assignment.home_layout
    return all(own(value) == layout for value, layout in layouts.items())


def _alike(analysis: Analysis, other: Candidate) -> Candidate:
    """Returns the layouts of a stage for another stage with the same program."""
    assignment = dataclasses.replace(other.assignment, analysis=analysis)
    return dataclasses.replace(other, assignment=assignment)
