"""Describes how a planned step sums its gradients, and the state of their codecs.

The state of the codecs is carried from step to step, separately from the train state::

    {
        "step": int32,
        "skipped": int32,
        "due": int32,
        "gradients": {parameter: {"residual": ..., "codec": ...}},
    }

``skipped`` counts the steps in which a gradient was not finite. ``due`` is the number
of steps until the next step whose telemetry is measured. If the telemetry of every step
is measured, ``due`` is missing. A residual is an array ``(n, *shape)`` with a slice for
each of the n workers. Each array of a codec's own state has a leading dim with one
entry for each device.

In a plan of several stages the state holds the gradients of all stages. The state of a
gradient is on the devices of its stage. The counters are on one device of each process.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.compression.adjusting import set_amounts
from autopar.compression.codecs.registry import parse_codec
from autopar.compression.gradient import Feedback, Gradient, check_gradient, init_state
from autopar.compression.synchronise import (
    COLUMNS,
    NON_FINITE,
    Fallback,
    init_level_states,
)
from autopar.errors import PlanError
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Axes, Layout
from autopar.layouts.summation import Bucket, Summation, summation_of
from autopar.planner.codecs.adjusted import check_rooms, codec_of
from autopar.plans import GradientDecision, Plan
from autopar.runtime import placement
from autopar_passes.layouts import partition_spec

State = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One gradient of a *bucket*, a set of gradients that one message carries.

    Attributes:
      decision: the decision of the plan on this gradient.
      gradient: the codec of the gradient and the options of its sum, as each device
        uses them.
      summation: which mesh axes the gradient is summed over, and which part each device
        sums.
      stacked: layout of the stacked partial gradient.
      result: layout of the sum as the codec returns it.
      home: layout of the sum that the operators of the plan read.
      amounts: values of the codec's parameters that are inputs of the program; None: no
        parameter is an input.
      levels: ``gradient`` with the plan's codec, then with each codec of the fallback;
        empty without a fallback.
    """

    decision: GradientDecision
    gradient: Gradient
    summation: Summation
    stacked: Layout
    result: Layout
    home: Layout
    levels: tuple[Gradient, ...] = ()
    amounts: Mapping[str, int] | None = None

    @property
    def bucket(self) -> Bucket[int]:
        """The bucket; gradients of equal buckets are summed together."""
        summation = self.summation
        return Bucket(self.decision.bucket, summation.axes, summation.within)

    def with_amounts(self, state: State) -> State:
        """The state of the first level's codec, with the amounts of this member."""
        if self.amounts is None:
            return state
        now = {name: jnp.int32(value) for name, value in self.amounts.items()}
        return set_amounts(state, now)

    @property
    def residual(self) -> tuple[tuple[int, ...], Layout]:
        """Shape and layout of the residuals of all workers.

        If ``summation.interleaved``, the split dim becomes two dims: one over workers,
        and one inside a worker's part. Only then is a device's residual a contiguous
        block of the array.
        """
        summation, shape = self.summation, self.decision.shape
        layout = list(self.stacked[1:])
        if summation.within:
            layout[summation.dim] = (*layout[summation.dim], *summation.within)
        if summation.interleaved:
            count, d = summation.workers, summation.dim
            shape = (*shape[:d], count, shape[d] // count, *shape[d + 1 :])
            layout.insert(d, ())
        return (summation.workers, *shape), (summation.axes, *layout)


@dataclasses.dataclass(frozen=True, slots=True)
class GradientSums:
    """The sums of the gradients of one planned step.

    Attributes:
      mesh: the mesh of the plan.
      members: value of a gradient -> the gradient; the gradients of a bucket have the
        order of the plan.
      fallback: codecs for a bucket whose own codecs send too little of the gradients.
      signals: whether steps measure the signal in the gradients that are sent.
      every: number of steps from one measurement of telemetry to the next.
    """

    mesh: Any
    members: dict[int, Member]
    fallback: Fallback | None = None
    signals: bool = False
    every: int = 1

    @property
    def parts(self) -> tuple[GradientSums, ...]:
        """The sums of each stage; here of the only stage."""
        return (self,)

    @property
    def num_levels(self) -> int:
        """Number of levels: one for the plan's codec, and one for each fallback codec.

        Each step sends a gradient by one level.
        """
        return 1 + len(self.fallback.codecs) if self.fallback else 1

    def together(self, value: int) -> frozenset[int]:
        """Returns the gradients in the bucket of ``value``.

        The result is empty if codecs do not sum ``value``.
        """
        if value not in self.members:
            return frozenset()
        bucket = self.members[value].bucket
        return frozenset(v for v, m in self.members.items() if m.bucket == bucket)

    def specs(self, member: Member) -> dict[str, Any]:
        """Partition specs of a gradient's state."""
        everywhere = PartitionSpec(self.mesh.axis_names)
        state = jax.eval_shape(lambda: self._fresh(member))
        residual = partition_spec(self.mesh, member.residual[1])
        return {
            "residual": jax.tree.map(lambda _: residual, state["residual"]),
            "codec": jax.tree.map(lambda _: everywhere, state["codec"]),
        }

    def shardings(self) -> State:
        """Shardings of the whole state."""
        gradients = {
            m.decision.name: jax.tree.map(
                lambda spec: NamedSharding(self.mesh, spec),
                self.specs(m),
                is_leaf=lambda x: isinstance(x, PartitionSpec),
            )
            for m in self.members.values()
        }
        step = NamedSharding(self.mesh, PartitionSpec())
        return dict.fromkeys(self._counters, step) | {"gradients": gradients}

    def structs(self) -> State:
        """Returns the shapes and dtypes of the whole state."""
        return jax.eval_shape(self._create)

    def init(self) -> State:
        """Returns the state before the first step, created in its shardings."""
        return jax.jit(self._create, out_shardings=self.shardings())()

    def _fresh(self, member: Member) -> State:
        if not member.levels:
            state = init_state(member.gradient, member.summation.workers)
            return {**state, "codec": member.with_amounts(state["codec"])}
        levels = [[gradient] for gradient in member.levels]
        state = init_level_states(levels, member.summation.workers)[0]
        first, *others = state["codec"]
        return {**state, "codec": (member.with_amounts(first), *others)}

    def _create(self) -> State:
        devices = math.prod(self.mesh.shape.values())
        gradients: dict[str, Any] = {}
        for member in self.members.values():
            local = self._fresh(member)
            residual = local["residual"]
            if not isinstance(residual, tuple):
                residual = jnp.zeros(member.residual[0], residual.dtype)
            codec = jax.tree.map(
                lambda x: jnp.broadcast_to(x, (devices, *x.shape)), local["codec"]
            )
            gradients[member.decision.name] = {"residual": residual, "codec": codec}
        zero = jnp.zeros((), jnp.int32)
        return dict.fromkeys(self._counters, zero) | {"gradients": gradients}

    @property
    def _counters(self) -> tuple[str, ...]:
        """The names of the scalars in the state."""
        return ("step", "skipped", *["due"] * (self.every > 1))


def gradient_sums(
    assignment: Assignment,
    plan: Plan,
    mesh: Any,
    fallback: Fallback | None,
    *,
    first: int = 0,
    signals: bool,
    every: int = 1,
) -> GradientSums | None:
    """Returns the sums of a plan's gradients; None: the compiler sums all gradients.

    Args:
      assignment: the plan as layouts.
      plan: the plan.
      mesh: the mesh that the plan runs on.
      fallback: codecs for a bucket whose own codecs send too little of the gradients.
      first: the seed for the codec of the first gradient; each next gradient has the
        next integer as its seed.
      signals: whether steps measure the signal in the gradients that are sent.
      every: number of steps from one measurement of telemetry to the next. With a
        fallback or with signals, every step is measured.

    Raises:
      PlanError: a codec cannot be used for its gradient, or does not fit its limit; or
        the layouts of the plan do not allow the sum over devices to be deferred.
    """
    chosen = [g for g in plan.gradients if g.codec]
    if not chosen:
        return None
    check_rooms(chosen)
    members: dict[int, Member] = {}
    for number, decision in enumerate(chosen, first):
        members[decision.value] = _member(assignment, decision, number, mesh, fallback)
    often = 1 if fallback is not None or signals else every
    return GradientSums(mesh, members, fallback, signals, often)


def _member(
    assignment: Assignment,
    decision: GradientDecision,
    number: int,
    mesh: Any,
    fallback: Fallback | None,
) -> Member:
    value = decision.value
    found = assignment.partial_layout(value)
    if found is None or value not in assignment.stackings[value].deferral.ends:
        raise PlanError(
            f"gradient '{decision.name}': the plan sends it as '{decision.codec}', but "
            "its layouts do not let its sum over devices wait. Plan again with "
            "compression=, or leave this gradient's codec empty."
        )
    axes, layout = found
    home = assignment.home_layout(value)
    whole = assignment.graph.values[value]
    summation = _summation(assignment, decision, axes, mesh)
    gradient = Gradient(
        name=decision.name,
        shape=summation.local_shape,
        codec=parse_codec(decision.codec),
        feedback=Feedback(
            kind="residual" if decision.feedback else "none",
            average_every=decision.average_every,
        ),
        scatter_dim=summation.scatter_dim,
        seed=number,
        dtype=jnp.dtype(whole.dtype).name,
    )
    levels = fallback.levels_of(gradient) if fallback else ()
    gradient = levels[0] if levels else gradient
    try:
        for level in levels or (gradient,):
            check_gradient(level, whole.dtype, summation.workers)
    except ValueError as error:
        raise PlanError(str(error)) from error
    result = home if summation.scatter or summation.keeps else layout
    member = Member(
        decision, gradient, summation, (axes, *layout), result, home, levels
    )
    return _with_inputs(member) if decision.limit else member


def _with_inputs(member: Member) -> Member:
    """Returns the member with a codec that reads its amounts from the state."""
    gradient, decision = member.gradient, member.decision
    amounts = gradient.codec.amounts(
        gradient.shape, member.summation.workers, scatter=gradient.scatter
    )
    gradient = dataclasses.replace(gradient, codec=codec_of(decision))
    levels = (gradient, *member.levels[1:]) if member.levels else ()
    return dataclasses.replace(
        member, gradient=gradient, levels=levels, amounts=amounts
    )


def _summation(
    assignment: Assignment, decision: GradientDecision, axes: Axes, mesh: Any
) -> Summation:
    """Returns how the devices of a plan share the work of summing a gradient."""
    names = list(mesh.axis_names)
    unknown = set(decision.within) - {names[a] for a in axes}
    within = tuple(a for a in axes if names[a] in decision.within)
    home = assignment.home_layout(decision.value)
    shape = tuple(assignment.graph.values[decision.value].shape)
    summation = summation_of(shape, home, axes, within, assignment.sizes)
    if unknown or summation is None:
        raise PlanError(
            f"gradient '{decision.name}': the plan sums it over "
            f"{', '.join(decision.within)} first, which its layouts do not allow. Plan "
            "again with compression=, or leave within= of this gradient empty."
        )
    return summation


@dataclasses.dataclass(frozen=True, eq=False)
class StagedSums:
    """The sums of the gradients of one step of several stages.

    Attributes:
      stages: number of a stage -> its sums; stages without codecs are left out.
      device: the device of this process that holds the counters.
      fallback: codecs for a bucket whose own codecs send too little of the gradients.
    """

    stages: Mapping[int, GradientSums]
    device: Any
    fallback: Fallback | None = None

    @property
    def members(self) -> dict[int, Member]:
        """Value of a gradient -> the gradient, for all stages."""
        return {v: m for sums in self.stages.values() for v, m in sums.members.items()}

    @property
    def parts(self) -> tuple[GradientSums, ...]:
        """The sums of each stage that has codecs."""
        return tuple(self.stages.values())

    @property
    def every(self) -> int:
        """Steps from one measurement of telemetry to the next.

        Always 1 with several stages.
        """
        return 1

    @property
    def num_levels(self) -> int:
        """Number of levels, as in `GradientSums`."""
        return self.parts[0].num_levels

    @property
    def columns(self) -> int:
        """The number of columns of telemetry that each gradient has."""
        return NON_FINITE + 1 + (COLUMNS if self.signals else 0)

    @property
    def signals(self) -> bool:
        """Whether steps measure the signal in the gradients that are sent."""
        return self.parts[0].signals

    @property
    def counter(self) -> NamedSharding:
        """The sharding of a counter."""
        return NamedSharding(Mesh(np.array([self.device]), ("one",)), PartitionSpec())

    def shardings(self) -> State:
        """Shardings of the whole state."""
        every: dict[str, Any] = {}
        for part in self.parts:
            every |= part.shardings()["gradients"]
        return {"step": self.counter, "skipped": self.counter, "gradients": every}

    def structs(self) -> State:
        """Returns the shapes and dtypes of the whole state."""
        every: dict[str, Any] = {}
        for part in self.parts:
            every |= part.structs()["gradients"]
        count = jax.ShapeDtypeStruct((), jnp.int32)
        return {"step": count, "skipped": count, "gradients": every}

    def init(self) -> State:
        """Returns the state before the first step.

        State on stages of other processes is an array without shards.
        """
        gradients: dict[str, Any] = {}
        for part in self.parts:
            gradients |= _make_state(part)
        zero = jax.device_put(np.int32(0), self.counter)
        return {"step": zero, "skipped": zero, "gradients": gradients}


def _make_state(part: GradientSums) -> dict[str, Any]:
    """Returns the state of one stage's gradients; without shards on other processes."""
    where = part.shardings()["gradients"]
    if part.mesh.local_devices:
        return part.init()["gradients"]
    return jax.tree.map(placement.absent, part.structs()["gradients"], where)


# The sums of a step, of one stage or of several.
AnySums = GradientSums | StagedSums
