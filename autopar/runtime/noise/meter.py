"""Measures the squared norms of partial gradients while a planned step runs.

A gradient's parts are at hand where its sum over devices waits
(`autopar.layouts.stacking`), or where a loop over microbatches adds them up. Nothing is
computed again: each part is read once more, and one sum of a few numbers goes over
the devices.
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
from autopar.runtime.noise.averages import Groups, State, fresh, updated
from autopar.runtime.noise.norms import Norm, device_norms
from autopar.runtime.noise.options import EARLY, SPARSE, NoiseOptions
from autopar.runtime.noise.sent import NORMS, SentGradient, measure_of
from autopar.runtime.noise.sources import Source, Sources, find_sources, turn_of
from autopar.steps.moments import second_moments
from autopar_passes.layouts import constrain, partition_spec
from autopar_passes.replay.layout_plan import Read
from autopar_passes.sums import stacked
from autopar_passes.sums.stacked import Stacked


@dataclasses.dataclass(frozen=True)
class NoiseSpec:
    """What is measured in a planned step.

    Attributes:
      assignment: the plan as layouts.
      mesh: its mesh.
      sources: the gradients.
      options: how they are measured.
      coded: gradients that codecs send.
      moments: gradient -> flat argument that holds its second moment; empty:
        gradients are taken as they are.
    """

    assignment: Assignment
    mesh: Any
    sources: Sources
    options: NoiseOptions
    coded: frozenset[int] = frozenset()
    moments: Mapping[int, int] = dataclasses.field(default_factory=dict[int, int])

    @functools.cached_property
    def groups(self) -> Groups:
        """The groups of each gradient."""
        counts = tuple(s.groups for s in self.sources.found)
        return Groups(counts, self.sources.rows)

    @functools.cached_property
    def turns(self) -> dict[int, tuple[int, ...]]:
        """Gradients that are transposed before they are summed, as of `turn_of`."""
        found = {
            s.value: turn_of(self.assignment, s.value, s.bare)
            for s in self.sources.found
            if s.parts == s.value != s.bare and s.value not in self.coded
        }
        return {value: turn for value, turn in found.items() if turn is not None}

    @property
    def every(self) -> int:
        """One step in so many is measured."""
        return self.options.every or (SPARSE if self.coded else 1)

    def is_measured(self, step: jax.Array) -> jax.Array:
        """Whether a step is measured, a bool scalar.

        Args:
          step: its number, an int32 scalar.
        """
        if self.every == 1:
            return jnp.bool_(True)
        due = step % self.every == 0
        if self.options.every is None:
            due |= (step < self.every) & (step % EARLY == 0)
        return due

    @property
    def alone(self) -> tuple[Source, ...]:
        """The gradients that are compared with those of the step before."""
        return tuple(s for s in self.sources.found if s.groups == 1)

    def create(self) -> State:
        """The state before the first step."""
        values = self.assignment.graph.values
        previous = {
            s.name: jnp.zeros(values[s.value].shape, values[s.value].dtype)
            for s in self.alone
        }
        base = self.options.base_batch or self.sources.rows
        none = jnp.zeros((), jnp.int32)
        return {**fresh(base), "compared": none, "previous": previous}

    def shardings(self) -> State:
        """Where the state lies."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        found = jax.tree.map(lambda _: everywhere, jax.eval_shape(self.create))
        found["previous"] = {
            s.name: NamedSharding(
                self.mesh,
                partition_spec(self.mesh, self.assignment.home_layout(s.value)),
            )
            for s in self.alone
        }
        return found

    def structs(self) -> State:
        """Shapes of the state."""
        return jax.eval_shape(self.create)

    def init(self) -> State:
        """The state before the first step, in its places."""
        return jax.jit(self.create, out_shardings=self.shardings())()


def noise_spec(
    assignment: Assignment,
    mesh: Any,
    options: NoiseOptions,
    coded: frozenset[int] = frozenset(),
) -> NoiseSpec:
    """Says what is measured in a planned step.

    Args:
      assignment: the plan as layouts, of `autopar.runtime.noise.sources.with_waiting`.
      mesh: its mesh.
      options: how.
      coded: gradients that codecs send.

    Raises:
      PlanError: the step has no batch, or no gradient of a parameter is found, or one
        without a second moment is to be preconditioned.
    """
    sources = _without(find_sources(assignment), coded)
    if not sources.rows or not sources.found:
        what = "gradients of its parameters" if sources.rows else "batch of rows"
        raise PlanError(
            f"noise_scale: no {what} is found in the step, so the noise of its "
            "gradients cannot be measured. Leave noise_scale= out."
        )
    moments = _moments(assignment, sources) if options.preconditioned else {}
    return NoiseSpec(assignment, mesh, sources, options, coded, moments)


def _moments(assignment: Assignment, sources: Sources) -> dict[int, int]:
    """The second moment of each gradient.

    Raises:
      PlanError: one has none.
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
    """The sources without those of which only what a codec made of it is whole."""
    found = [s for s in sources.found if s.groups > 1 or s.value not in coded]
    lost = [s.name for s in sources.found if s.groups == 1 and s.value in coded]
    left_out = (*sources.left_out, *lost)
    return dataclasses.replace(sources, found=tuple(found), left_out=left_out)


class NoiseMeter:
    """Measures one trace of a step: a `Synchroniser` and a `Watch` of its replay."""

    def __init__(
        self,
        spec: NoiseSpec,
        state: State,
        arguments: Sequence[Any],
        codecs: CodecSynchroniser | None = None,
    ) -> None:
        """Starts a step.

        Args:
          spec: what is measured.
          state: of the step before.
          arguments: the flat arguments.
          codecs: sums the gradients that codecs send; None: there are none.
        """
        self.spec = spec
        self.state = state
        self.codecs = codecs
        self._arguments = arguments
        self._by_value = {s.value: s for s in spec.sources.found}
        # The sums that were due, before they were taken.
        self._partial: dict[int, Stacked] = {}
        self._parts: dict[int, Norm] = {}
        self._whole: dict[int, Norm] = {}
        # Rows of gradients that codecs send, by gradient: (devices, 3).
        self._sent: dict[int, jax.Array] = {}
        # Of each gradient its microbatches' rows: (microbatches, devices).
        self._micro: dict[int, jax.Array] = {}
        self._values: dict[int, Any] = {}
        self.measured = spec.is_measured(state["step"])

    # As a synchroniser.

    def takes(self, value: int) -> frozenset[int]:
        """See `autopar_passes.replay.layout_plan.Synchroniser`."""
        if self.codecs is not None and (found := self.codecs.takes(value)):
            return found
        return frozenset({value} & self._by_value.keys())

    def take(self, partials: dict[int, Stacked]) -> dict[int, Any]:
        """See `autopar_passes.replay.layout_plan.Synchroniser`."""
        if self.codecs is not None and all(self.codecs.takes(v) for v in partials):
            return self._send(self.codecs, partials)
        self._partial.update(partials)
        return {value: self._total(value, x) for value, x in partials.items()}

    def _total(self, value: int, partial: Stacked) -> Any:
        """Takes a sum as it is, of the array before it was transposed.

        The parts are in memory like that. Were they summed as they are here, each
        device would transpose its whole part, and not what it gets of the sum.
        """
        turn = self.spec.turns.get(value) or tuple(range(len(partial.layout)))
        back = sorted(range(len(turn)), key=turn.__getitem__)
        array = stacked.sum_partials(
            partial.array.transpose(0, *(1 + dim for dim in back))
        )
        layouts = self.spec.assignment.due(value) or ()
        for layout in layouts:
            before = tuple(layout[dim] for dim in back)
            array = constrain(array, self.spec.mesh, before)
        array = array.transpose(turn)
        return constrain(array, self.spec.mesh, layouts[-1]) if layouts else array

    def _send(
        self, codecs: CodecSynchroniser, partials: dict[int, Stacked]
    ) -> dict[int, Any]:
        """Takes sums by codecs, and measures the gradients before and after."""
        places = {v: k for k, v in enumerate(partials) if v in self._by_value}
        known = [self._sent_gradient(codecs, v, k) for v, k in places.items()]
        when = None if self.spec.every == 1 else self.measured
        measure = measure_of(self.spec.mesh, known, when) if known else None
        made, rows = codecs.take_measured(partials, measure)
        for k, value in enumerate(places):
            self._sent[value] = rows[:, NORMS * k : NORMS * (k + 1)]
        return made

    def _sent_gradient(
        self, codecs: CodecSynchroniser, value: int, place: int
    ) -> SentGradient:
        """A gradient as codecs send it."""
        source, member = self._by_value[value], codecs.sums.members[value]
        axes, *layout = member.stacked
        return SentGradient(
            place=place,
            axes=axes,
            layout=tuple(layout),
            inner=tuple(a for a in axes if a not in source.replicas),
            result=member.result,
            moment=self._moment(source),
        )

    def _as_kept(self, source: Source, array: Any) -> Norm:
        """A gradient in the layout in which it is kept."""
        layout = self.spec.assignment.home_layout(source.value)
        array = constrain(array, self.spec.mesh, layout)
        return Norm(array, layout, (), self._moment(source))

    def _parts_of(self, source: Source, partial: Stacked) -> Norm:
        """The partial gradients of the replicas."""
        summed = tuple(a for a in partial.axes if a not in source.replicas)
        return Norm(
            partial.array, (partial.axes, *partial.layout), summed, self._moment(source)
        )

    def _moment(self, source: Source) -> Any:
        position = self.spec.moments.get(source.value)
        return None if position is None else self._arguments[position]

    # As a watch.

    def inside(self, equation: int, read: Read) -> Any:
        """See `autopar_passes.replay.layout_plan.Watch`."""
        sources = self._of_loop(equation)
        if not sources:
            return ()
        wanted = [self._read(source, read) for source in sources]
        return device_norms(self.spec.mesh, wanted)

    def _read(self, source: Source, read: Read) -> Norm:
        """The parts of a gradient's groups."""
        moment = self._moment(source)
        value = source.bare if moment is None else source.parts
        array = self._partial.get(value)
        array = read(value) if array is None else array
        if isinstance(array, Stacked):
            return self._parts_of(source, array)
        layout = self.spec.assignment.home_layout(value)
        return Norm(constrain(array, self.spec.mesh, layout), layout, (), moment)

    def after(self, equation: int, seen: Any) -> None:
        """See `autopar_passes.replay.layout_plan.Watch`."""
        for k, source in enumerate(self._of_loop(equation)):
            self._micro[source.value] = source.share**2 * seen[:, :, k]

    def _of_loop(self, equation: int) -> list[Source]:
        return [s for s in self.spec.sources.found if s.loop == equation]

    def end(self, read: Read) -> None:
        """See `autopar_passes.replay.layout_plan.Watch`."""
        for source in self.spec.sources.found:
            if source.value in self._sent:
                continue
            array = read(source.value)
            if isinstance(array, Stacked):
                array = stacked.total(array)
            self._whole[source.value] = whole = self._as_kept(source, array)
            self._values[source.value] = whole.array
            if source.loop < 0 and source.groups > 1:
                self._parts[source.value] = self._read(source, read)

    # After the step.

    def finish(self) -> State:
        """The state for the next step."""
        state, spec = self.state, self.spec
        norms = self._norms()
        seen = self.measured
        if spec.alone:
            seen = seen & (state["compared"] > 0)
        after = updated(state, norms, spec.groups, spec.options.decay, seen)
        finite = self._finite()
        after["compared"] = state["compared"] + finite
        after["previous"] = {
            s.name: jnp.where(finite, self._values[s.value], state["previous"][s.name])
            for s in spec.alone
        }
        return after

    def _finite(self) -> jax.Array:
        """Whether the gradients are finite that the next step is compared with."""
        arrays = [self._values[s.value] for s in self.spec.alone]
        return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in arrays] or [True]))

    def _norms(self) -> jax.Array:
        """The norms of all gradients, float32 (gradients, 3)."""
        wanted: list[Norm] = []
        for source in self.spec.sources.found:
            wanted.extend(self._asked(source))
        # A column for each norm; without any there is nothing to ask devices for.
        rows = device_norms(self.spec.mesh, wanted) if wanted else None
        columns: list[Any] = []
        place = 0
        for source in self.spec.sources.found:
            own = len(self._asked(source))
            columns.extend(self._columns(source, rows, place))
            place += own
        found = jnp.sum(jnp.stack(columns, axis=1), axis=0)
        return found.reshape(-1, 3)

    def _asked(self, source: Source) -> list[Norm]:
        """The norms that are still to be taken of a gradient."""
        value = source.value
        if value in self._sent:
            return []
        whole = self._whole[value]
        if source.groups == 1:
            return self._differenced(source, whole)
        if value in self._micro:
            return [whole]
        return [self._parts[value], whole]

    def _differenced(self, source: Source, whole: Norm) -> list[Norm]:
        """The halves of two steps' gradients, and their sum."""
        before = self.state["previous"][source.name]
        both = 0.5 * (whole.array.astype(jnp.float32) + before.astype(jnp.float32))
        return [
            whole,
            dataclasses.replace(whole, array=before),
            dataclasses.replace(whole, array=both),
        ]

    def _columns(self, source: Source, rows: Any, place: int) -> list[jax.Array]:
        """A gradient's columns of device norms, each (devices,)."""
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
