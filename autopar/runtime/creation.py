"""Creates the state of a step in its shards, and rebuilds objects from its arrays."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
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
    """Returns a state as a tuple of leading arguments; a plain tuple stays as it is."""
    return state if type(state) is tuple else (state,)


def flat_state(state: Any) -> tuple[list[Any], Fixed]:
    """Returns the arrays of a state, and the state without its arrays.

    The arrays are in the order of the step's inputs.
    """
    trees = split_objects(splat(state))
    return part([f"state[{k}]" for k in range(len(trees))], trees)


def check_creation(name: str, create_state: Any, batch: Any, others: Any) -> None:
    """Checks the arguments of `autopar.ParallelStep.init`.

    Raises:
      PlanError: ``create_state`` is no function, or ``batch`` and ``others`` are both
        given.
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


def arguments_after(
    batch: Any, others: Sequence[Any] | Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Returns the arguments after the state, by position and by name; None if none is
    given.

    Args:
      batch: the only argument after the state, or None.
      others: all arguments after the state, in order or by name, or None.
    """
    rest = others if batch is None else (batch,)
    if rest is None:
        return None
    return ((), dict(rest)) if isinstance(rest, Mapping) else (tuple(rest), {})


def check_tuple(
    name: str,
    signature: inspect.Signature | None,
    shapes: StateShapes,
    rest: tuple[tuple[Any, ...], dict[str, Any]] | None,
) -> None:
    """Checks that a step takes the values of a tuple as its leading arguments.

    Args:
      name: the name of the step.
      signature: that of the step, if Python knows it.
      shapes: of the state.
      rest: the arguments after the state; None if they are not known.

    Raises:
      PlanError: it does not.
    """
    if shapes.single or signature is None or rest is None:
        return
    given = shapes.arguments()
    try:
        signature.bind(*given, *rest[0], **rest[1])
    except TypeError as error:
        raise PlanError(
            f"{name}: create_state returns a tuple of {len(given)}, whose values are "
            f"the first arguments of the step, one each, but the step does not take "
            f"them so: {error}. If the state is one argument, make it a dictionary or "
            "a NamedTuple."
        ) from error


@dataclasses.dataclass(frozen=True, slots=True)
class StateShapes:
    """The state that a function creates, without its arrays.

    Attributes:
      structs: shapes and dtypes of the arrays.
      fixed: the step's leading arguments, with a placeholder for each array.
      single: whether the step takes the state as a single argument.
      leaves: creates only the arrays, from the function's arguments.
    """

    structs: list[Any]
    fixed: Fixed
    single: bool
    leaves: Callable[..., list[Any]]

    def state(self, arrays: Sequence[Any]) -> Any:
        """Returns the state with these arrays."""
        args = merge_objects(self.fixed.join(arrays))
        return args[0] if self.single else args

    def arguments(self) -> tuple[Any, ...]:
        """Returns the step's leading arguments, with structs instead of arrays."""
        return merge_objects(self.fixed.join(self.structs))


def state_shapes(create_state: Callable[..., Any], args: Sequence[Any]) -> StateShapes:
    """Returns the shapes of a state, without allocating arrays."""
    check_type("args=", args, (list, tuple), "the arguments of create_state")
    found: list[Any] = []

    def flat(*given: Any) -> list[Any]:
        state = create_state(*given)
        arrays, fixed = flat_state(state)
        found.append((fixed, type(state) is not tuple))
        return arrays

    mesh = user_mesh()
    with enter_mesh(mesh):
        try:
            structs = list(jax.eval_shape(flat, *args))
        except TypeError as error:
            _refuse_values(flat, args, error)
            raise
    leaves = off_mesh(leaves_of(create_state), args, mesh)
    fixed, single = found[-1]
    return StateShapes(structs, fixed, single, leaves)


def _refuse_values(
    flat: Callable[..., Any], args: Sequence[Any], error: TypeError
) -> None:
    """Refuses arguments whose values ``create_state`` needs while it is traced.

    Args:
      flat: the function that failed for these arguments.
      args: the arguments of ``create_state``.
      error: what the function raised.

    Raises:
      PlanError: the function works if Python values among the arguments stay as they
        are.
    """
    python = [k for k, arg in enumerate(args) if isinstance(arg, int | float | str)]
    if not python:
        return

    def keeping(*traced: Any) -> Any:
        given = iter(traced)
        return flat(*(a if k in python else next(given) for k, a in enumerate(args)))

    try:
        jax.eval_shape(keeping, *(a for k, a in enumerate(args) if k not in python))
    except Exception:  # values of arguments are not what is wrong
        return
    values = ", ".join(repr(args[k]) for k in python)
    raise PlanError(
        f"create_state needs the value of an argument ({values}), but all arguments "
        "are traced as arrays, without values. Fix such values in the function, as in "
        "init(lambda key: create_state(key, 8), key, batch=batch)."
    ) from error


def leaves_of(create_state: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Returns a function that creates only the arrays of a state.

    ``jax.jit`` needs equal tree structures from all calls. But parts of a state that
    are not arrays may differ between calls: ``apply_fn`` may be bound to a module that
    each call creates. So the function returns the arrays alone.
    """
    return lambda *args: flat_state(create_state(*args))[0]


def replace_leaves(state: Any, leaves: Sequence[Any]) -> Any:
    """Returns the state with other arrays; updates NNX objects in place."""
    _, fixed = flat_state(state)
    out = update_objects(splat(state), fixed.join(leaves))
    return out if type(state) is tuple else out[0]


def with_leaves(state: Any, leaves: Sequence[Any]) -> Any:
    """Returns a state with other leaves; an NNX object becomes an ``nnx.State``."""
    arrays, fixed = flat_state(state)
    out = fixed.join(leaves[: len(arrays)])
    out = jax.tree.map(
        lambda x: x.state if is_object_state(x) else x, out, is_leaf=is_object_state
    )
    return out if type(state) is tuple else out[0]


def plan_shardings(
    plan: Plan, meshes: Sequence[Mesh], count: int
) -> list[NamedSharding]:
    """Returns the shardings of a plan's first inputs.

    Args:
      plan: the plan.
      meshes: from `autopar.runtime.placement.home_meshes`.
      count: the number of inputs.
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
    """Returns shardings that split each array evenly over the devices.

    An array none of whose dimensions is divisible by the number of devices is
    replicated.
    """
    mesh = Mesh(np.array(list(devices), dtype=object), ("all",))
    return [placement.even_sharding(x.shape, mesh) for x in leaves]
