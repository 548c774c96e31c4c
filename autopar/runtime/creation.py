"""Creates the state of a step in its shards, and puts it back into its objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.errors import PlanError
from autopar.plans import Plan
from autopar.runtime import placement
from autopar_errors import check_type
from autopar_passes.jax_meshes import enter_mesh, off_mesh, user_mesh
from autopar_passes.program.static_leaves import (
    Fixed,
    is_object_state,
    merge_objects,
    part,
    split_objects,
    update_objects,
)


def splat(state: Any) -> tuple[Any, ...]:
    """A state that is a plain tuple holds the step's leading arguments."""
    return state if type(state) is tuple else (state,)


def flat_state(state: Any) -> tuple[list[Any], Fixed]:
    """The arrays of a state in the order of the step's inputs, and what stays fixed."""
    trees = split_objects(splat(state))
    return part([f"state[{k}]" for k in range(len(trees))], trees)


def check_creation(name: str, create_state: Any, batch: Any, others: Any) -> None:
    """Checks the arguments of `autopar.ParallelStep.init`.

    Raises:
      PlanError: the first makes no state, or both of the others are given.
    """
    if not callable(create_state):
        raise PlanError(
            f"{name}: init expects a function that makes the state, got "
            f"{type(create_state).__name__}. For a state that is there already, "
            "just call the step."
        )
    if batch is not None and others is not None:
        raise PlanError(
            f"{name}: init takes batch= or others=, not both: others= holds the batch "
            "as well."
        )


@dataclasses.dataclass(frozen=True, slots=True)
class StateShapes:
    """The state that a function creates, without its arrays.

    Attributes:
      structs: shapes of the arrays.
      fixed: the rest, as a tuple of the step's leading arguments.
      single: whether there is one such argument.
      leaves: creates the arrays alone, of the function's arguments.
    """

    structs: list[Any]
    fixed: Fixed
    single: bool
    leaves: Callable[..., list[Any]]

    def state(self, arrays: Sequence[Any]) -> Any:
        """The state with these arrays."""
        args = merge_objects(self.fixed.join(arrays))
        return args[0] if self.single else args

    def arguments(self) -> tuple[Any, ...]:
        """The step's leading arguments, of structs."""
        return merge_objects(self.fixed.join(self.structs))


def state_shapes(create_state: Callable[..., Any], args: Sequence[Any]) -> StateShapes:
    """The shapes of a state; nothing is allocated."""
    check_type("args=", args, (list, tuple), "the arguments of create_state")
    found: list[Any] = []

    def flat(*given: Any) -> list[Any]:
        state = create_state(*given)
        arrays, fixed = flat_state(state)
        found.append((fixed, type(state) is not tuple))
        return arrays

    mesh = user_mesh()
    with enter_mesh(mesh):
        structs = list(jax.eval_shape(flat, *args))
    leaves = off_mesh(leaves_of(create_state), args, mesh)
    fixed, single = found[-1]
    return StateShapes(structs, fixed, single, leaves)


def leaves_of(create_state: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Creates the arrays of a state alone.

    What a state holds besides (such as ``apply_fn``, bound to a module that is
    made anew each time) may not compare equal from one call to the next.
    """
    return lambda *args: flat_state(create_state(*args))[0]


def replace_leaves(state: Any, leaves: Sequence[Any]) -> Any:
    """The state with other arrays; NNX objects are updated in place."""
    _, fixed = flat_state(state)
    out = update_objects(splat(state), fixed.join(leaves))
    return out if type(state) is tuple else out[0]


def with_leaves(state: Any, leaves: Sequence[Any]) -> Any:
    """The trees of a state with other leaves; NNX objects become their state."""
    arrays, fixed = flat_state(state)
    out = fixed.join(leaves[: len(arrays)])
    out = jax.tree.map(
        lambda x: x.state if is_object_state(x) else x, out, is_leaf=is_object_state
    )
    return out if type(state) is tuple else out[0]


def plan_shardings(
    plan: Plan, meshes: Sequence[Mesh], count: int
) -> list[NamedSharding]:
    """The shardings that a plan gives its first inputs.

    Args:
      plan: the plan.
      meshes: from `autopar.runtime.placement.home_meshes`.
      count: how many inputs.
    """
    out: list[NamedSharding] = []
    for path in list(plan.written_shapes or plan.inputs)[:count]:
        stage = plan.home(path)
        where = PartitionSpec(*(axes or None for axes in plan.home_spec(path)))
        out.append(NamedSharding(meshes[stage], where))
    return out


def even_shardings(
    leaves: Sequence[Any], devices: Sequence[Any]
) -> list[NamedSharding]:
    """Splits each leaf evenly over the devices where one of its dims allows it."""
    mesh = Mesh(np.array(list(devices), dtype=object), ("all",))
    return [placement.even_sharding(x.shape, mesh) for x in leaves]
