"""Cuts a step into pipeline stages, independently of a cluster."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import jax

from autopar.errors import PlanError
from autopar.plans.records import AS_WRITTEN
from autopar.progress import say
from autopar.steps.analysis import Analysis, analyse_again, analyse_program
from autopar.steps.batch import BATCH
from autopar.steps.microbatches import over_microbatches
from autopar.steps.program_text import operator_name
from autopar_passes.graph.build import build_graph
from autopar_passes.graph.operators import GraphInput, producers
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.jax_compat import is_ordered, source_line
from autopar_passes.layer_loops.split import in_pieces, whole_path
from autopar_passes.microbatches.facts import Microbatched
from autopar_passes.program.equations import Equation
from autopar_passes.stages.cut import Cut, StageProgram, cut, stage_program, verify_cut
from autopar_passes.stages.parts import CutError, Parts, hoist_sums, parts_of


class ArrayCode(Protocol):
    """How an array is encoded as bytes while one stage sends it to another."""

    @property
    def codec(self) -> str:
        """Text of the codec."""
        ...

    @property
    def lead(self) -> int:
        """The number of leading dims that the array and its code have in common."""
        ...

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the encoded array."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded array."""
        ...

    def encode(self, array: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Encodes the array, with the mask of another code if the code has one."""
        ...

    def decode(self, code: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Decodes the array."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class CutStep:
    """A step cut into the stages of a pipeline.

    Attributes:
      found: the split of the step into microbatches.
      analysis: the analysis of the program of one microbatch.
      cut: the tasks of the step.
      programs: the program of each stage.
      stages: the analysis of each stage. Operators that run for each microbatch are
        counted once per microbatch.
      again: indices of the forward equations that the backward pass recomputes.
      codes: value -> its code, for the activations and cotangents that stages send each
        other encoded (`autopar.planner.stages.cut_codecs`).
      masks: cotangent -> the activation whose code is the mask of its code.
      unmasked: the tasks without the inputs that masks need; None: the same.
    """

    found: Microbatched
    analysis: Analysis
    cut: Cut
    programs: tuple[StageProgram, ...]
    stages: tuple[Analysis, ...]
    again: frozenset[int] = frozenset()
    codes: Mapping[int, ArrayCode] = dataclasses.field(
        default_factory=dict[int, ArrayCode]
    )
    masks: Mapping[int, int] = dataclasses.field(default_factory=dict[int, int])
    unmasked: Cut | None = None

    def sent_bytes(self, value: int) -> float:
        """The bytes of a value that a task of a microbatch sends to another stage."""
        code = self.codes.get(value)
        dense = self.analysis.graph.values[value].nbytes
        return float(dense if code is None else code.nbytes)


def cut_step(
    analysis: Analysis,
    found: Microbatched,
    *,
    layers: Sequence[int],
    parts: Sequence[int],
    stages: int,
    recomputed: Sequence[int] = (),
    split_backward: bool = False,
) -> CutStep:
    """Cuts a step into the stages of a pipeline.

    Args:
      analysis: the analysis of the program of one microbatch, ``found.traced.program``.
      found: the split of the step into microbatches.
      layers: the forward equation at which each layer begins.
      parts: the layer at which each part begins. A part is a run of successive layers.
        Part ``k`` is on stage ``k % stages``.
      stages: the number of stages.
      recomputed: the layers whose activations the backward pass recomputes.
      split_backward: whether the gradients of weights are separate tasks.

    Raises:
      CutError: the parts do not begin at different equations of the forward pass.
    """
    program, graph = analysis.program, analysis.graph
    arguments = program.body.inputs
    split = [*found.batch, *([] if found.number is None else [found.number])]
    batch = [arguments[k] for k in split]
    starts = [layers[k] for k in parts]
    stage_of = [k % stages for k in range(len(parts))]
    gathered = {arguments[k]: v for k, v in found.gathered.items()}

    known: Any = {"batch": batch, "gathered": gathered}
    placed = parts_of(program, graph, starts, once=found.once, **known)
    late = hoist_sums(found, placed, stage_of)
    if late is not found:
        found = late
        placed = parts_of(program, graph, starts, once=found.once, **known)
    again: set[int] = set()
    if recomputed:
        by_layer = parts_of(program, graph, layers, once=found.once, **known)
        again = _computed_again(by_layer, set(recomputed))
    tasks = cut(
        placed,
        stage_of,
        [c.value for c in found.crossings],
        split_backward=split_backward,
        recomputed=again,
    )
    _check_order(program.body.equations, found, placed, stages)
    verify_cut(tasks)
    programs = tuple(stage_program(tasks, k) for k in range(stages))
    made = tuple(_analyse_stage(analysis, found, tasks, p) for p in programs)
    return CutStep(
        found=found,
        analysis=analysis,
        cut=tasks,
        programs=programs,
        stages=made,
        again=frozenset(again),
    )


def _computed_again(layers: Parts, wanted: Collection[int]) -> set[int]:
    """Returns the forward equations that the backward pass of some layers recomputes.

    Values that another layer reads are kept, so each layer is recomputed from its
    stored inputs.

    Args:
      layers: the layer that holds each equation.
      wanted: the layers whose activations are recomputed.
    """
    flow = layers.flow
    return {
        index
        for index, layer in layers.part.items()
        if layer in wanted
        and flow.roles[index] is Role.FORWARD
        and all(
            layers.part.get(reader, layer) == layer
            for value in flow.equations[index].outputs
            for reader in flow.readers.get(value, ())
            if flow.roles[reader] is Role.FORWARD
        )
    }


def _check_order(
    equations: Sequence[Equation], found: Microbatched, placed: Parts, stages: int
) -> None:
    """Raises `CutError` if ordered callbacks are in several tasks."""
    ordered = [e for e in equations if is_ordered(e.source)]
    where = {placed.part.get(e.index, 0) % stages for e in ordered}
    repeated = [e for e in ordered if e.index not in found.once]
    if len(where) > 1 or (repeated and found.microbatches > 1):
        eqn = (repeated or ordered)[-1]
        raise CutError(
            f"'{eqn.primitive}' ({source_line(eqn.source)}) calls the host in order, "
            "and stages run at the same time. Give ordered=False, or plan with "
            "stages=1."
        )


def _analyse_stage(
    analysis: Analysis, found: Microbatched, tasks: Cut, stage: StageProgram
) -> Analysis:
    """Analyses a stage that runs for each microbatch."""
    paths = analysis.input_paths
    makers = producers(analysis.graph.operators)
    received = [
        f"received/{operator_name(analysis, makers[v].index)}:{v}"
        for v in stage.received
    ]
    whole = {given.value: given for given in analysis.graph.inputs}
    graph = build_graph(
        stage.program,
        input_paths=[*(paths[v] for v in stage.given), *received],
        carried=stage.carried,
        like=[
            *(whole[v] for v in stage.given),
            *(_of_rows(analysis, v) for v in stage.received),
        ],
    )
    made = {v for op in graph.operators for v in op.outputs}
    graph = dataclasses.replace(graph, accumulated=found.accumulated_values & made)
    made = analyse_program(stage.program, graph)
    made = dataclasses.replace(made, spares=analysis.spares)
    return dataclasses.replace(
        over_microbatches(made, found), programs=_programs(tasks, stage.stage)
    )


def _programs(tasks: Cut, stage: int) -> dict[int, int]:
    """Equation of a stage, also in a region -> the last task of the stage that runs it.

    The tasks are numbered in the order in which they run.
    """
    equations = tasks.parts.flow.equations
    out: dict[int, int] = {}
    for number, task in enumerate(tasks.of_stage(stage)):
        for index in task.equations:
            out[index] = number
            out.update((inner.index, number) for inner in equations[index].inner)
    return out


def _of_rows(analysis: Analysis, value: int) -> GraphInput:
    """The input of a stage that another stage sends, with its batch dimension."""
    dims = analysis.dim_labels.dims.get(value, [])
    rows = dims.index(BATCH) if BATCH in dims else -1
    return GraphInput(value, "", InputRole.BATCH, rows=rows)


def even_pieces(analysis: Analysis, count: int) -> dict[int, tuple[int, ...]]:
    """Divides stacked layers of the state into pieces of about equal length.

    Args:
      analysis: the analysis of the step as it is written.
      count: the number of pieces. If this number divides the number of layers of some
        stacks, only these are cut. Otherwise all are cut, and the first pieces have one
        layer more than the last.

    Returns:
      Flat argument -> the number of layers of each of its pieces.
    """
    stacked = analysis.stacked_inputs if count > 1 else {}
    divided = {k: layers for k, layers in stacked.items() if layers % count == 0}
    return {
        k: tuple(layers // count + (n < layers % count) for n in range(count))
        for k, layers in (divided or stacked).items()
        if layers >= count
    }


def with_pieces(analysis: Analysis, sizes: Mapping[int, Sequence[int]]) -> Analysis:
    """Returns the analysis of a step whose loops over layers are divided into pieces.

    Args:
      analysis: the analysis of the step as it is written, on the whole batch.
      sizes: flat argument -> the number of layers of each of its pieces.
    """
    if not sizes:
        return analysis
    key = tuple((k, tuple(own)) for k, own in sorted(sizes.items()))

    def make() -> Analysis:
        start = time.perf_counter()
        say("cutting loops over layers")
        traced = in_pieces(analysis.pytrees, sizes)
        changes: Any = {"pieces": dict(key), "remat": AS_WRITTEN}
        return analyse_again(analysis, traced, start, same_inputs=False, **changes)

    return analysis.remember(("pieces", key), make)


def sizes_by_path(analysis: Analysis) -> dict[str, tuple[int, ...]]:
    """Path of an argument in the step as it is written -> the sizes of its pieces."""
    inputs = analysis.graph.inputs
    return {
        whole_path(inputs[k].path): tuple(own) for k, own in analysis.pieces.items()
    }


def sizes_from_paths(
    analysis: Analysis, sizes: Mapping[str, Sequence[int]]
) -> dict[int, tuple[int, ...]]:
    """Returns flat argument -> sizes of pieces, the inverse of `sizes_by_path`.

    Raises:
      PlanError: the step has no such argument.
    """
    places = {given.path: k for k, given in enumerate(analysis.graph.inputs)}
    if missing := [path for path in sizes if path not in places]:
        raise PlanError(
            f"the plan cuts '{missing[0]}' into pieces, which the step does not have. "
            "Make a new plan with autopar.plan."
        )
    return {places[path]: tuple(own) for path, own in sizes.items()}
