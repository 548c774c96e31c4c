"""Measures the squared norms of partial gradients while a planned step runs.

The partial gradients are in memory at two places of a step: before a deferred sum over
devices (`autopar.layouts.stacking`), and in the loop that adds up the gradients of
microbatches. So no gradient is computed a second time. A measurement reads each partial
gradient once more, and adds up a few numbers over the devices.

A second moment is recognised by its computation, not by its name. It is optimizer state
whose next value is a weighted sum of the old value and of the square of the gradient.
Adam, AdamW, NAdam, LAMB, RMSProp and Adagrad have such state in every library.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from autopar.errors import PlanError
from autopar.layouts.assignment import Assignment
from autopar.runtime.gradients.synchroniser import CodecSynchroniser
from autopar.runtime.noise.averages import (
    GradientSource,
    NoiseOptions,
    NoiseSpec,
    Sources,
    State,
    find_sources,
    turn_of,
    update_averages,
)
from autopar.runtime.noise.norms import Norm, device_norms, take_with_norms
from autopar.steps.analysis import Analysis
from autopar_passes.graph.operators import Operator, OperatorGraph, readers
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.layouts import constrain, mesh_sharding
from autopar_passes.program.equations import Equation
from autopar_passes.replay.values import Read
from autopar_passes.sums import stacked
from autopar_passes.sums.stacked import Stacked

# Maps a value to the operators that read it, each with the value's place among the
# operands.
Readers = Mapping[int, Sequence[tuple[Operator, int]]]

# Operators whose output still counts as a gradient (or as its square), because they
# only scale, clip or decay the array.
_KEEPING = frozenset(
    {"add", "add_any", "convert_element_type", "copy", "div", "mul", "neg",
     "select_n", "sub"}
)  # fmt: skip


def second_moments(analysis: Analysis, gradients: Sequence[int]) -> dict[int, int]:
    """Returns gradient -> flat input that holds the second moment of this gradient.

    Gradients without a second moment are missing in the result.

    Args:
      analysis: the analysis of the step.
      gradients: gradients that the optimizer's update reads.
    """
    graph, known = analysis.graph, readers(analysis.graph.operators)
    sources = analysis.program.by_index()
    state = {
        graph.outputs[given.output]: k
        for k, given in enumerate(graph.inputs)
        if given.output >= 0 and given.role is InputRole.OPTIMIZER_STATE
    }
    found: dict[int, int] = {}
    for gradient in gradients:
        squares = [
            value
            for like in _reached_values(graph, known, gradient)
            for value in _squares(known, sources, like)
        ]
        for square in squares:
            moments = [
                state[v] for v in _reached_values(graph, known, square) if v in state
            ]
            if moments:
                found[gradient] = moments[0]
                break
    return found


def _reached_values(graph: OperatorGraph, known: Readers, start: int) -> list[int]:
    """The values that the update computes from ``start`` by `_KEEPING` operators.

    Only values of the same shape are returned. ``start`` comes first, then the others
    by distance.
    """
    shape, seen, left = graph.values[start].shape, [start], [start]
    while left:
        for op, _ in known.get(left.pop(0), []):
            if op.role is not Role.UPDATE or op.kind not in _KEEPING:
                continue
            for value in op.outputs:
                if value not in seen and graph.values[value].shape == shape:
                    seen.append(value)
                    left.append(value)
    return seen


def _squares(known: Readers, sources: Mapping[int, Equation], value: int) -> list[int]:
    """Returns the values that operators compute as the square of ``value``."""
    out: list[int] = []
    for op, _ in known.get(value, []):
        params = sources[op.equation].params if op.equation in sources else {}
        twice = op.kind == "mul" and list(op.inputs) == [value, value]
        if (
            op.kind == "square"
            or (op.kind == "integer_pow" and params.get("y") == 2)
            or twice
        ):
            out.extend(op.outputs)
    return out


@dataclasses.dataclass(frozen=True)
class WholeNoise:
    """The noise measurement of a step that is one program.

    Attributes:
      spec: the gradients, and the averages.
      assignment: the plan as layouts.
      mesh: the mesh of the plan.
      moments: gradient -> flat argument that holds its second moment; empty if
        gradients are not preconditioned.
    """

    spec: NoiseSpec
    assignment: Assignment
    mesh: Any
    moments: Mapping[int, int]

    @functools.cached_property
    def turns(self) -> dict[int, tuple[int, ...]]:
        """Gradient transposed before its sum -> the permutation (`turn_of`)."""
        found = {
            s.value: turn_of(self.assignment, s.value, s.bare)
            for s in self.spec.sources.found
            if s.parts == s.value != s.bare and s.value not in self.spec.coded
        }
        return {value: turn for value, turn in found.items() if turn is not None}


def whole_noise(
    assignment: Assignment,
    mesh: Any,
    options: NoiseOptions,
    coded: frozenset[int],
) -> WholeNoise:
    """Returns the noise measurement of a step that is one program.

    Args:
      assignment: the plan as layouts, from
        `autopar.runtime.noise.averages.with_waiting`.
      mesh: the mesh of the plan.
      options: how gradients are measured.
      coded: gradients that codecs send.

    Raises:
      PlanError: the step has no batch; no gradient of a parameter is found; or
        ``options`` ask for preconditioning and a gradient has no second moment.
    """
    sources = _without(find_sources(assignment), coded)
    if not sources.rows or not sources.found:
        what = "gradients of its parameters" if sources.rows else "batch of rows"
        raise PlanError(
            f"noise_scale: no {what} is found in the step, so the noise of its "
            "gradients cannot be measured. Leave noise_scale= out."
        )
    moments = _moments(assignment, sources) if options.preconditioned else {}
    alone = {s.name: s.value for s in sources.found if s.groups == 1}
    values, home = assignment.graph.values, assignment.home_layout
    spec = NoiseSpec(
        sources,
        options,
        NamedSharding(mesh, PartitionSpec()),
        {name: mesh_sharding(mesh, home(value)) for name, value in alone.items()},
        {
            name: jax.ShapeDtypeStruct(values[value].shape, values[value].dtype)
            for name, value in alone.items()
        },
        coded,
    )
    return WholeNoise(spec, assignment, mesh, moments)


def _moments(assignment: Assignment, sources: Sources) -> dict[int, int]:
    """Gradient -> flat input that holds the second moment of this gradient.

    Raises:
      PlanError: a gradient has no second moment.
    """
    values = {s.value: s.name for s in sources.found}
    found = second_moments(assignment.analysis, list(values))
    if without := [name for value, name in values.items() if value not in found]:
        raise PlanError(
            "noise_scale: preconditioned=True needs an optimizer that keeps second "
            f"moments, as Adam does; the state has none for {', '.join(without[:3])}"
            f"{' and others' if len(without) > 3 else ''}. Leave preconditioned= out."
        )
    return found


def _without(sources: Sources, coded: frozenset[int]) -> Sources:
    """Leaves out gradients that have a single group and are sent by a codec.

    The exact sum of such a gradient is never computed, only the codec's lossy sum, so
    its norm cannot be measured.
    """
    found = [s for s in sources.found if s.groups > 1 or s.value not in coded]
    lost = [s.name for s in sources.found if s.groups == 1 and s.value in coded]
    left_out = (*sources.left_out, *lost)
    return dataclasses.replace(sources, found=tuple(found), left_out=left_out)


class NoiseMeter:
    """Measures the norms in one trace of a step.

    The meter implements the interfaces `Synchroniser` and `Watch` of the replay.
    """

    def __init__(
        self,
        noise: WholeNoise,
        state: State,
        arguments: Sequence[Any],
        codecs: CodecSynchroniser | None = None,
    ) -> None:
        """Starts a step.

        Args:
          noise: the gradients to measure.
          state: the state after the step before.
          arguments: the flat arguments of the step.
          codecs: sums the gradients that codecs send; None: no codec sends gradients.
        """
        self.noise, self.spec = noise, noise.spec
        self.state = state
        self.codecs = codecs
        self._arguments = arguments
        self._by_value = {s.value: s for s in self.spec.sources.found}
        # Value -> its stacked partial sums.
        self._partial: dict[int, Stacked] = {}
        self._parts: dict[int, Norm] = {}
        self._whole: dict[int, Norm] = {}
        # A gradient that a codec sends -> norms on each device, (devices, 3).
        self._sent: dict[int, jax.Array] = {}
        # A gradient -> norms of its microbatches' parts, (microbatches, devices).
        self._micro: dict[int, jax.Array] = {}
        self._values: dict[int, Any] = {}
        self.measured = self.spec.is_measured(state["step"])

    # Methods of a `Synchroniser`.

    def takes(self, value: int) -> frozenset[int]:
        """See `autopar_passes.replay.values.Synchroniser`."""
        if self.codecs is not None and (found := self.codecs.takes(value)):
            return found
        return frozenset({value} & self._by_value.keys())

    def take(self, partials: dict[int, Stacked]) -> dict[int, Any]:
        """See `autopar_passes.replay.values.Synchroniser`."""
        if self.codecs is not None and all(self.codecs.takes(v) for v in partials):
            return self._send(self.codecs, partials)
        self._partial.update(partials)
        return {value: self._total(value, x) for value, x in partials.items()}

    def _total(self, value: int, partial: Stacked) -> Any:
        """Computes the sum of a stacked partial gradient, without a codec.

        If the gradient is transposed, the array before the transposition is summed, and
        the sum is transposed. In this order each device transposes only its shard of
        the sum, not its whole partial gradient.
        """
        turn = self.noise.turns.get(value) or tuple(range(len(partial.layout)))
        back = sorted(range(len(turn)), key=turn.__getitem__)
        array = stacked.sum_partials(
            partial.array.transpose(0, *(1 + dim for dim in back))
        )
        layouts = self.noise.assignment.due(value) or ()
        for layout in layouts:
            before = tuple(layout[dim] for dim in back)
            array = constrain(array, self.noise.mesh, before)
        array = array.transpose(turn)
        return constrain(array, self.noise.mesh, layouts[-1]) if layouts else array

    def _send(
        self, codecs: CodecSynchroniser, partials: dict[int, Stacked]
    ) -> dict[int, Any]:
        """Sums gradients by codecs, and measures their norms before and after."""
        moments = {s.value: self._moment(s) for s in self._by_value.values()}
        replicas = {s.value: s.replicas for s in self._by_value.values()}
        when = None if self.spec.every == 1 else self.measured
        made, rows = take_with_norms(codecs, partials, replicas, when, moments)
        self._sent.update(rows)
        return made

    def _as_kept(self, source: GradientSource, array: Any) -> Norm:
        """Describes a gradient's norm, measured in the layout that operators read."""
        layout = self.noise.assignment.home_layout(source.value)
        array = constrain(array, self.noise.mesh, layout)
        return Norm(array, layout, (), self._moment(source))

    def _parts_of(self, source: GradientSource, partial: Stacked) -> Norm:
        """Returns the norm of a gradient's partial gradients on the data replicas."""
        summed = tuple(a for a in partial.axes if a not in source.replicas)
        return Norm(
            partial.array, (partial.axes, *partial.layout), summed, self._moment(source)
        )

    def _moment(self, source: GradientSource) -> Any:
        position = self.noise.moments.get(source.value)
        return None if position is None else self._arguments[position]

    # Methods of a `Watch`.

    def inside(self, equation: int, read: Read, mesh: Any) -> Any:
        """See `autopar_passes.replay.values.Watch`."""
        sources = self._of_loop(equation)
        if not sources:
            return ()
        wanted = [self._read(source, read, mesh) for source in sources]
        return device_norms(mesh, wanted)

    def _read(self, source: GradientSource, read: Read, mesh: Any) -> Norm:
        """Returns the norm of the partial gradients of all groups."""
        moment = self._moment(source)
        value = source.bare if moment is None else source.parts
        array = self._partial.get(value)
        array = read(value) if array is None else array
        if isinstance(array, Stacked):
            return self._parts_of(source, array)
        layout = self.noise.assignment.home_layout(value)
        return Norm(constrain(array, mesh, layout), layout, (), moment)

    def after(self, equation: int, seen: Any) -> None:
        """See `autopar_passes.replay.values.Watch`."""
        for k, source in enumerate(self._of_loop(equation)):
            self._micro[source.value] = source.share**2 * seen[:, :, k]

    def _of_loop(self, equation: int) -> list[GradientSource]:
        return [s for s in self.spec.sources.found if s.loop == equation]

    def end(self, read: Read) -> None:
        """See `autopar_passes.replay.values.Watch`."""
        for source in self.spec.sources.found:
            if source.value in self._sent:
                continue
            array = read(source.value)
            if isinstance(array, Stacked):
                array = stacked.total(array)
            self._whole[source.value] = whole = self._as_kept(source, array)
            self._values[source.value] = whole.array
            if source.loop < 0 and source.groups > 1:
                parts = self._read(source, read, self.noise.mesh)
                self._parts[source.value] = parts

    # After the step.

    def finish(self) -> State:
        """Returns the state for the next step."""
        state, spec = self.state, self.spec
        norms = self._norms()
        seen = self.measured
        if spec.alone:
            seen = seen & (state["compared"] > 0)
        options = spec.options
        after = update_averages(
            state, norms, spec.groups, options.decay, seen,
            unitless=options.preconditioned,
        )  # fmt: skip
        finite = self._finite()
        after["compared"] = state["compared"] + finite
        after["previous"] = {
            s.name: jnp.where(finite, self._values[s.value], state["previous"][s.name])
            for s in spec.alone
        }
        return after

    def _finite(self) -> jax.Array:
        """Whether all gradients with only one group are finite.

        The state keeps these gradients, because the next step compares its own with
        them.
        """
        arrays = [self._values[s.value] for s in self.spec.alone]
        return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in arrays] or [True]))

    def _norms(self) -> jax.Array:
        """Returns the norms of all gradients, float32 (gradients, 3)."""
        wanted: list[Norm] = []
        for source in self.spec.sources.found:
            wanted.extend(self._norms_to_take(source))
        # ``rows`` has one column for each array whose norm is computed.
        rows = device_norms(self.noise.mesh, wanted) if wanted else None
        columns: list[Any] = []
        place = 0
        for source in self.spec.sources.found:
            own = len(self._norms_to_take(source))
            columns.extend(self._columns(source, rows, place))
            place += own
        found = jnp.sum(jnp.stack(columns, axis=1), axis=0)
        return found.reshape(-1, 3)

    def _norms_to_take(self, source: GradientSource) -> list[Norm]:
        """The norms of a gradient that the loop and codecs have not measured."""
        value = source.value
        if value in self._sent:
            return []
        whole = self._whole[value]
        if source.groups == 1:
            return self._halves_and_sum(source, whole)
        if value in self._micro:
            return [whole]
        return [self._parts[value], whole]

    def _halves_and_sum(self, source: GradientSource, whole: Norm) -> list[Norm]:
        """The norms of the gradient, of that of the step before, and of their mean.

        A gradient with only one group is compared with the gradient of the step before.
        Its two groups are half of each of the two gradients.
        """
        before = self.state["previous"][source.name]
        both = 0.5 * (whole.array.astype(jnp.float32) + before.astype(jnp.float32))
        return [
            whole,
            dataclasses.replace(whole, array=before),
            dataclasses.replace(whole, array=both),
        ]

    def _columns(
        self, source: GradientSource, rows: Any, place: int
    ) -> list[jax.Array]:
        """Returns the three columns of `estimates` for one gradient, each (devices,).

        Args:
          source: the gradient.
          rows: the norms of all gradients on each device, (devices, norms).
          place: number of the first column of this gradient in ``rows``.
        """
        value = source.value
        if value in self._sent:
            sent = self._sent[value]
            parts = self._micro.get(value)
            first = sent[:, 0] if parts is None else parts.sum(0)
            return [first, sent[:, 1], sent[:, 2]]
        if source.groups == 1:
            halves = 0.25 * (rows[:, place] + rows[:, place + 1])
            return [halves, rows[:, place + 2], rows[:, place + 2]]
        if value in self._micro:
            return [self._micro[value].sum(0), rows[:, place], rows[:, place]]
        return [rows[:, place], rows[:, place + 1], rows[:, place + 1]]
