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

from autopar.compression.exchange import MeshLinks
from autopar.compression.feedback import Feedback
from autopar.compression.registry import parse_codec
from autopar.compression.synchronise import (
    NON_FINITE,
    Gradient,
    check_gradient,
    init_state,
    settle,
    synchronise,
)
from autopar.errors import PlanError
from autopar.planner.assignment import Assignment
from autopar.planner.gradients import scattered_dim
from autopar.planner.layout import Layout
from autopar.plans import GradientDecision, Plan
from autopar_passes.layouts import constrain, partition_spec
from autopar_passes.stacked import Stacked

State = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One gradient of a bucket.

    Attributes:
      decision: what the plan says of it.
      gradient: how it is summed, on one device.
      links: the mesh axes over which it is summed, worker numbers major to minor.
      stacked: layout of the stacked partial gradient.
      result: layout in which the sum comes out.
      home: layout in which the plan wants it.
    """

    decision: GradientDecision
    gradient: Gradient
    links: tuple[int, ...]
    stacked: Layout
    result: Layout
    home: Layout


@dataclasses.dataclass(frozen=True, slots=True)
class Synchronisation:
    """How the gradients of one planned step are summed.

    Attributes:
      mesh: the mesh of the plan.
      members: by value; those of a bucket in the order of the plan.
    """

    mesh: Any
    members: dict[int, Member]

    def workers(self, member: Member) -> int:
        """Number of devices that a gradient is summed over."""
        names = self.mesh.axis_names
        return math.prod(self.mesh.shape[names[a]] for a in member.links)

    def bucket(self, value: int) -> tuple[int, ...]:
        """The values that are summed together with this one."""
        mine = self.members[value]
        return tuple(
            v
            for v, m in self.members.items()
            if (m.decision.bucket, m.links) == (mine.decision.bucket, mine.links)
        )

    def specs(self, member: Member) -> dict[str, Any]:
        """Partition specs of a gradient's state."""
        everywhere = PartitionSpec(self.mesh.axis_names)
        state = jax.eval_shape(lambda: self._fresh(member))
        stacked = partition_spec(self.mesh, member.stacked)
        return {
            "residual": jax.tree.map(lambda _: stacked, state["residual"]),
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
        return init_state(member.gradient, self.workers(member))

    def _create(self) -> State:
        devices = math.prod(self.mesh.shape.values())
        gradients: dict[str, Any] = {}
        for member in self.members.values():
            local = self._fresh(member)
            residual = local["residual"]
            if not isinstance(residual, tuple):
                shape = (self.workers(member), *member.decision.shape)
                residual = jnp.zeros(shape, residual.dtype)
            codec = jax.tree.map(
                lambda x: jnp.broadcast_to(x, (devices, *x.shape)), local["codec"]
            )
            gradients[member.decision.name] = {"residual": residual, "codec": codec}
        return {"step": jnp.zeros((), jnp.int32), "gradients": gradients}


def synchronisation(assignment: Assignment, plan: Plan, mesh: Any) -> Any:
    """How a plan's gradients are summed, or None where all are left as they are.

    Raises:
      PlanError: a codec cannot be used for its gradient, or the plan's layouts do
        not let its sum wait.
    """
    chosen = [g for g in plan.gradients if g.codec]
    if not chosen:
        return None
    members: dict[int, Member] = {}
    for number, decision in enumerate(chosen):
        members[decision.value] = _member(assignment, decision, number, mesh)
    return Synchronisation(mesh, members)


def _member(
    assignment: Assignment, decision: GradientDecision, number: int, mesh: Any
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
    dim = scattered_dim(home, axes)
    sizes = assignment.sizes
    whole = assignment.graph.values[value]
    local = tuple(
        size // math.prod(sizes[a] for a in split)
        for size, split in zip(whole.shape, layout, strict=True)
    )
    gradient = Gradient(
        name=decision.name,
        shape=local,
        codec=parse_codec(decision.codec),
        feedback=Feedback(
            kind="residual" if decision.feedback else "none",
            average_every=decision.average_every,
        ),
        scatter_dim=dim,
        seed=number,
    )
    links = axes if dim is None else tuple(a for a in home[dim] if a in axes)
    workers = math.prod(sizes[a] for a in links)
    try:
        check_gradient(gradient, whole.dtype, workers)
    except ValueError as error:
        raise PlanError(str(error)) from error
    result = layout if dim is None else home
    return Member(decision, gradient, links, (axes, *layout), result, home)


class StepSynchroniser:
    """The synchroniser of one trace of a step (`autopar_passes.layout_plan`)."""

    def __init__(self, plan: Synchronisation, state: State) -> None:
        """Starts a step with the state that the step before has left."""
        self.plan = plan
        self.state = state
        self.new: dict[str, Any] = {}
        # Of each bucket: its gradients, and a row for each on each device.
        self.sums: list[tuple[list[str], jax.Array]] = []

    def takes(self, value: int) -> frozenset[int]:
        """See `autopar_passes.layout_plan.Synchroniser`."""
        return frozenset(self.plan.bucket(value) if value in self.plan.members else ())

    def take(self, partials: dict[int, Stacked]) -> dict[int, Any]:
        """See `autopar_passes.layout_plan.Synchroniser`."""
        plan = self.plan
        members = [plan.members[v] for v in partials]
        mesh = plan.mesh
        states = [self.state["gradients"][m.decision.name] for m in members]
        state_specs = [plan.specs(m) for m in members]
        everywhere = PartitionSpec(mesh.axis_names)

        def bucket(step: Any, arrays: Any, before: Any) -> Any:
            return _bucket(plan, members, step, arrays, before)

        totals, after, sums = jax.shard_map(
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
            ),
            check_vma=False,
        )(self.state["step"], [x.array for x in partials.values()], states)
        for k, member in enumerate(members):
            self.new[member.decision.name] = after[k]
        self.sums.append(([m.decision.name for m in members], sums))
        return {
            v: constrain(total, mesh, m.home)
            for v, total, m in zip(partials, totals, members, strict=True)
        }

    def finish(self) -> tuple[State, jax.Array]:
        """The state for the next step, and the sums of each gradient, (gradients, 5).

        Where a partial gradient was not finite, the state stays as it was.
        """
        names = [m.decision.name for m in self.plan.members.values()]
        found: dict[str, jax.Array] = {}
        for bucket, rows in self.sums:
            found.update(zip(bucket, jnp.sum(rows, axis=0), strict=True))
        sums = jnp.stack([found[name] for name in names])
        finite = jnp.all(sums[:, NON_FINITE] == 0)
        old = {name: self.state["gradients"][name] for name in names}
        new = {name: self.new[name] for name in names}
        gradients = settle(old, new, finite)
        return {"step": self.state["step"] + 1, "gradients": gradients}, sums


def _bucket(
    plan: Synchronisation,
    members: Sequence[Member],
    step: Any,
    arrays: Sequence[Any],
    before: Sequence[State],
) -> tuple[list[Any], list[State], Any]:
    """Sums a bucket, on one device's arrays."""
    names = tuple(plan.mesh.axis_names[a] for a in members[0].links)
    links = MeshLinks(names, plan.workers(members[0]))
    worker = jax.lax.axis_index(names)
    states = [
        {
            "residual": jax.tree.map(lambda x: x[0], s["residual"]),
            "codec": jax.tree.map(lambda x: x[0], s["codec"]),
        }
        for s in before
    ]
    partials = [x[0] for x in arrays]
    gradients = [m.gradient for m in members]
    totals, after, sums = synchronise(gradients, partials, states, links, worker, step)
    stacked = jax.tree.map(lambda x: x[None], after)
    return totals, stacked, sums[None]
