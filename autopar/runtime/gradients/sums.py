"""Takes the sums of gradients through codecs while a planned step runs.

The replay hands over stacked partial gradients; a bucket of them is summed in
one `jax.shard_map` that is manual over all mesh axes, so that a gradient which
is split over other axes is never gathered and only payloads cross the links.

The state of the codecs is carried from step to step beside the train state::

    {"step": int32, "gradients": {parameter: {"residual": ..., "codec": ...}}}

A residual is an array ``(n, *shape)``, a slice for each of the n workers; the
arrays of a codec's own state have one leading entry for each device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from autopar.compression.codecs.registry import parse_codec
from autopar.compression.exchange import MeshLinks
from autopar.compression.fallback import (
    Fallback,
    init_level_states,
    synchronise_levels,
)
from autopar.compression.feedback import Feedback
from autopar.compression.synchronise import (
    NON_FINITE,
    Gradient,
    check_gradient,
    init_state,
    settle,
    synchronise,
)
from autopar.errors import PlanError
from autopar.layouts.assignment import Assignment
from autopar.layouts.layout import Axes, Layout
from autopar.layouts.summation import Summation, summation_of
from autopar.plans import GradientDecision, Plan
from autopar.runtime.gradients.within import gather_within, sum_within
from autopar_passes.layouts import constrain, partition_spec
from autopar_passes.sums.stacked import Stacked

State = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One gradient of a bucket.

    Attributes:
      decision: what the plan says of it.
      gradient: how it is summed, on one device.
      summation: how the devices share the work.
      stacked: layout of the stacked partial gradient.
      result: layout in which the sum comes out.
      home: layout in which the plan wants it.
      levels: ``gradient`` and what the step falls back to; empty without that.
    """

    decision: GradientDecision
    gradient: Gradient
    summation: Summation
    stacked: Layout
    result: Layout
    home: Layout
    levels: tuple[Gradient, ...] = ()

    @property
    def together(self) -> tuple[object, ...]:
        """What gradients that are summed together have in common."""
        return (self.decision.bucket, self.summation.axes, self.summation.within)

    @property
    def residual(self) -> tuple[tuple[int, ...], Layout]:
        """Shape and layout of the residuals of all workers.

        Where the workers' parts of a dim are the outer ones, that dim is two: else
        what a device holds would be no block of the array.
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
class Synchronisation:
    """How the gradients of one planned step are summed.

    Attributes:
      mesh: the mesh of the plan.
      members: by value; those of a bucket in the order of the plan.
      fallback: what a bucket is sent by where its codecs send too little.
    """

    mesh: Any
    members: dict[int, Member]
    fallback: Fallback | None = None

    @property
    def num_levels(self) -> int:
        """Number of ways to send a gradient, of which each step takes one."""
        return 1 + len(self.fallback.codecs) if self.fallback else 1

    def bucket(self, value: int) -> tuple[int, ...]:
        """The values that are summed together with this one."""
        mine = self.members[value]
        return tuple(v for v, m in self.members.items() if m.together == mine.together)

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
        return {"step": step, "gradients": gradients}

    def structs(self) -> State:
        """Shapes of the whole state."""
        return jax.eval_shape(self._create)

    def init(self) -> State:
        """The state before the first step, made in its shards."""
        return jax.jit(self._create, out_shardings=self.shardings())()

    def _fresh(self, member: Member) -> State:
        if not member.levels:
            return init_state(member.gradient, member.summation.workers)
        levels = [[gradient] for gradient in member.levels]
        return init_level_states(levels, member.summation.workers)[0]

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
        return {"step": jnp.zeros((), jnp.int32), "gradients": gradients}


def synchronisation(
    assignment: Assignment, plan: Plan, mesh: Any, fallback: Fallback | None = None
) -> Any:
    """How a plan's gradients are summed, or None where all are left as they are.

    Args:
      assignment: the plan as layouts.
      plan: the plan.
      mesh: the mesh it runs on.
      fallback: by what a step is sent in which the plan's codecs send too little.

    Raises:
      PlanError: a codec cannot be used for its gradient, or the plan's layouts do
        not let its sum wait.
    """
    chosen = [g for g in plan.gradients if g.codec]
    if not chosen:
        return None
    members: dict[int, Member] = {}
    for number, decision in enumerate(chosen):
        members[decision.value] = _member(assignment, decision, number, mesh, fallback)
    return Synchronisation(mesh, members, fallback)


def _member(
    assignment: Assignment,
    decision: GradientDecision,
    number: int,
    mesh: Any,
    fallback: Fallback | None,
) -> Member:
    value = decision.value
    found = assignment.stacked(value)
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
    )
    levels = fallback.levels_of(gradient) if fallback else ()
    gradient = levels[0] if levels else gradient
    try:
        for level in levels or (gradient,):
            check_gradient(level, whole.dtype, summation.workers)
    except ValueError as error:
        raise PlanError(str(error)) from error
    result = home if summation.scatter or summation.keeps else layout
    return Member(decision, gradient, summation, (axes, *layout), result, home, levels)


def _summation(
    assignment: Assignment, decision: GradientDecision, axes: Axes, mesh: Any
) -> Summation:
    """How a plan's devices share the work of a gradient."""
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


class StepSynchroniser:
    """The synchroniser of one trace of a step (`autopar_passes.replay.layout_plan`)."""

    def __init__(self, plan: Synchronisation, state: State) -> None:
        """Starts a step with the state that the step before has left."""
        self.plan = plan
        self.state = state
        self.new: dict[str, Any] = {}
        # Of each bucket: its gradients, and a row for each on each device.
        self.sums: list[tuple[list[str], jax.Array]] = []
        # Of each gradient the level that was taken.
        self.levels: dict[str, jax.Array] = {}
        self._totals: jax.Array | None = None

    def takes(self, value: int) -> frozenset[int]:
        """See `autopar_passes.replay.layout_plan.Synchroniser`."""
        return frozenset(self.plan.bucket(value) if value in self.plan.members else ())

    def take(self, partials: dict[int, Stacked]) -> dict[int, Any]:
        """See `autopar_passes.replay.layout_plan.Synchroniser`."""
        plan = self.plan
        members = [plan.members[v] for v in partials]
        mesh = plan.mesh
        states = [self.state["gradients"][m.decision.name] for m in members]
        state_specs = [plan.specs(m) for m in members]
        everywhere = PartitionSpec(mesh.axis_names)

        def bucket(step: Any, arrays: Any, before: Any) -> Any:
            return _bucket(plan, members, step, arrays, before)

        totals, after, sums, level = jax.shard_map(
            bucket,
            mesh=mesh,
            in_specs=(
                PartitionSpec(),
                [partition_spec(mesh, m.stacked) for m in members],
                state_specs,
            ),
            out_specs=(
                [partition_spec(mesh, m.result) for m in members],
                state_specs,
                everywhere,
                PartitionSpec(),
            ),
            check_vma=False,
        )(self.state["step"], [x.array for x in partials.values()], states)
        for k, member in enumerate(members):
            self.new[member.decision.name] = after[k]
            self.levels[member.decision.name] = level
        self.sums.append(([m.decision.name for m in members], sums))
        return {
            v: constrain(total, mesh, m.home)
            for v, total, m in zip(partials, totals, members, strict=True)
        }

    @property
    def complete(self) -> bool:
        """Whether all sums were taken."""
        return len(self.new) == len(self.plan.members)

    @property
    def finite(self) -> jax.Array:
        """Whether all partial gradients were, a bool scalar; once all were taken."""
        return jnp.all(self._sums()[:, NON_FINITE] == 0)

    def finish(self) -> tuple[State, jax.Array]:
        """The state for the next step, and the sums of each gradient, (gradients, 6).

        Where a partial gradient was not finite, the state stays as it was.
        """
        names = [m.decision.name for m in self.plan.members.values()]
        old = {name: self.state["gradients"][name] for name in names}
        new = {name: self.new[name] for name in names}
        gradients = settle(old, new, self.finite)
        after = {"step": self.state["step"] + 1, "gradients": gradients}
        return after, self._sums()

    def _sums(self) -> jax.Array:
        if self._totals is None:
            found: dict[str, jax.Array] = {}
            for bucket, rows in self.sums:
                found.update(zip(bucket, jnp.sum(rows, axis=0), strict=True))
            names = [m.decision.name for m in self.plan.members.values()]
            self._totals = jnp.stack([found[name] for name in names])
        return self._totals

    def taken(self) -> jax.Array:
        """Of each gradient 1 at the level that was taken, int32 (gradients, levels)."""
        names = [m.decision.name for m in self.plan.members.values()]
        levels = jnp.stack([self.levels[name] for name in names])
        return jax.nn.one_hot(levels, self.plan.num_levels, dtype=jnp.int32)


def _bucket(
    plan: Synchronisation,
    members: Sequence[Member],
    step: Any,
    arrays: Sequence[Any],
    before: Sequence[State],
) -> tuple[list[Any], list[State], Any, jax.Array]:
    """Sums a bucket, on one device's arrays; also says by which level."""
    mesh_names = plan.mesh.axis_names
    summation = members[0].summation
    names = tuple(mesh_names[a] for a in summation.axes)
    links = MeshLinks(names, summation.workers)
    worker = jax.lax.axis_index(names)
    gradients = [m.gradient for m in members]
    states = [_local(g, s) for g, s in zip(gradients, before, strict=True)]
    fast = tuple(mesh_names[a] for a in summation.within)
    summations = [m.summation for m in members]
    partials = sum_within(summations, [x[0] for x in arrays], fast)
    totals, after, sums, level = _summed(
        plan, members, partials, states, links, worker, step
    )
    totals = [
        total.astype(x.dtype)
        for total, x in zip(
            gather_within(summations, totals, fast), arrays, strict=True
        )
    ]
    kept = [_global(s, old) for s, old in zip(after, before, strict=True)]
    return totals, kept, sums[None], level


def _summed(
    plan: Synchronisation,
    members: Sequence[Member],
    partials: Sequence[Any],
    states: Sequence[State],
    links: MeshLinks,
    worker: Any,
    step: Any,
) -> tuple[list[Any], list[State], Any, jax.Array]:
    """Sums a bucket by the plan's codecs, or by what it falls back to.

    All devices of the mesh take the same level: gradients that are split over other
    axes stand beside those that are not, whose copies must stay equal.
    """
    if plan.fallback is None:
        gradients = [m.gradient for m in members]
        found = synchronise(gradients, partials, states, links, worker, step)
        return *found, jnp.int32(0)
    levels = list(zip(*(m.levels for m in members), strict=True))
    names = plan.mesh.axis_names
    everyone = MeshLinks(names, math.prod(plan.mesh.shape.values()))
    return synchronise_levels(
        levels,
        partials,
        states,
        links,
        worker,
        step,
        plan.fallback.least_gain,
        everyone,
    )


def _local(gradient: Gradient, state: State) -> State:
    """One device's state without the leading dims of the arrays of all."""
    return {
        "residual": jax.tree.map(
            lambda x: x[0].reshape(gradient.shape), state["residual"]
        ),
        "codec": jax.tree.map(lambda x: x[0], state["codec"]),
    }


def _global(state: State, like: State) -> State:
    """The opposite of `_local`."""
    return jax.tree.map(lambda new, old: new[None].reshape(old.shape), state, like)
