"""The mesh of ``jax.set_mesh``, and programs without the layouts that it adds.

With explicit axes, every array's type includes the array's layout on the user's mesh. A
plan chooses new layouts. A step is therefore traced under the user's mesh and run
without it. JAX's functions that read, set and remove a mesh are private (0.10.2).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax._src.named_sharding import UNSPECIFIED as _UNSPECIFIED
from jax.extend import core as jex_core
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# The error of a step that does not fit the explicit mesh it is traced under.
ShardingTypeError = _core.ShardingTypeError

# Primitives that only state the placement of an array.
PLACEMENTS = frozenset({"sharding_constraint", "mesh_cast", "reshard"})


@dataclasses.dataclass(frozen=True, slots=True)
class UserMesh:
    """The mesh that a caller has set.

    Attributes:
      abstract: the axes of the mesh, as returned by ``jax.sharding.get_abstract_mesh``.
      concrete: the mesh with devices; None if only the abstract mesh is set.
    """

    abstract: Any
    concrete: Any


class _Held(threading.local):
    """The mesh that `without_mesh` has removed in this thread, to be set again."""

    inside = False
    mesh: UserMesh | None = None


_held = _Held()


def user_mesh() -> UserMesh | None:
    """Returns the mesh that the caller has set, even within `without_mesh`."""
    if _held.inside:
        return _held.mesh
    abstract = _mesh.get_abstract_mesh()
    if abstract.empty:
        return None
    concrete = _mesh.get_concrete_mesh()
    return UserMesh(abstract, None if concrete.empty else concrete)


@contextlib.contextmanager
def without_mesh() -> Generator[None]:
    """Removes the caller's mesh within the context; `user_mesh` still returns it."""
    found = None if _held.inside else user_mesh()
    if found is None:
        yield
        return
    unset = _config.config_ext.unset
    _held.inside, _held.mesh = True, found
    try:
        with _set(unset, unset):
            yield
    finally:
        _held.inside, _held.mesh = False, None


@contextlib.contextmanager
def enter_mesh(mesh: UserMesh | None) -> Generator[None]:
    """Sets a mesh, even while JAX traces; None changes nothing."""
    if mesh is None:
        yield
        return
    concrete = _config.config_ext.unset if mesh.concrete is None else mesh.concrete
    with _set(mesh.abstract, concrete):
        yield


@contextlib.contextmanager
def _set(abstract: Any, concrete: Any) -> Generator[None]:
    before = _config.abstract_mesh_context_manager.swap_local(abstract)
    devices = _config.device_context.swap_local(concrete)
    try:
        yield
    finally:
        _config.abstract_mesh_context_manager.set_local(before)
        _config.device_context.set_local(devices)


def explicit_sharding(leaf: Any) -> NamedSharding | None:
    """Returns the sharding in the type of an array or a struct; None if it has none."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def on_mesh(struct: Any, mesh: UserMesh | None) -> Any:
    """Returns a struct that can be traced under a mesh.

    If the array is on another mesh, its sharding has no meaning under this mesh and is
    removed. If no mesh is set, JAX would require a result sharding for every operation,
    so the sharding is removed too. A mesh axis that does not divide its dimension is
    removed from the sharding. For example, a mesh axis of 8 devices does not divide the
    4 rows of a microbatch.
    """
    sharding = explicit_sharding(struct)
    if sharding is None:
        return struct
    if mesh is None or sharding.mesh.abstract_mesh != mesh.abstract:
        return struct.update(sharding=None)
    sizes, spec = sharding.mesh.shape, list(sharding.spec)
    for dim, names in enumerate(spec):
        names = names if isinstance(names, tuple) else (names,)
        parts = math.prod(sizes[n] for n in names if n in sizes)
        if struct.shape[dim] % parts:
            spec[dim] = None
    if spec == list(sharding.spec):
        return struct
    return struct.update(sharding=NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def drop_shardings(closed: Any) -> Any:
    """Returns a closed jaxpr without the shardings that it states.

    Primitives such as ``reshard`` are removed. A ``shard_map`` keeps its own mesh. The
    results of the program do not change, because an explicit sharding only tells where
    parts of an array are.
    """
    return jex_core.ClosedJaxpr(_jaxpr(closed.jaxpr), closed.consts)


# JAX shares cached jaxprs between traces, such as the jaxpr of a scatter's sum.
# Programs are compared by these jaxprs, so each jaxpr must have exactly one form
# without shardings.
_unsharded: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _jaxpr(jaxpr: Any) -> Any:
    found = _unsharded.get(jaxpr)
    if found is not None:
        return found
    atoms: dict[Any, Any] = {}

    def define(var: Any) -> Any:
        made = type(var)(_aval(var.aval))
        atoms[var] = made
        return made

    def read(atom: Any) -> Any:
        if isinstance(atom, jex_core.Literal):
            return jex_core.Literal(atom.val, _aval(atom.aval))
        return atoms[atom]

    constants = [define(v) for v in jaxpr.constvars]
    inputs = [define(v) for v in jaxpr.invars]
    equations: list[Any] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in PLACEMENTS:
            atoms[eqn.outvars[0]] = read(eqn.invars[0])
            continue
        given = [read(v) for v in eqn.invars]
        equations.append(
            eqn.replace(
                invars=given,
                outvars=[define(v) for v in eqn.outvars],
                params=_params(eqn),
                ctx=_without_mesh(eqn.ctx),
            )
        )
    made = jaxpr.replace(
        constvars=constants,
        invars=inputs,
        outvars=[read(v) for v in jaxpr.outvars],
        eqns=equations,
    )
    _unsharded[jaxpr] = made
    return made


def _params(eqn: Any) -> dict[str, Any]:
    if eqn.primitive.name == "shard_map":
        return eqn.params
    found = {k: _param(k, v) for k, v in eqn.params.items()}
    if "ctx_mesh" in found:
        found["ctx_mesh"] = _mesh.empty_concrete_mesh
    return found


def _param(name: str, value: Any) -> Any:
    if name in ("in_shardings", "out_shardings"):
        return tuple(_UNSPECIFIED for _ in value)
    if isinstance(value, jex_core.ClosedJaxpr):
        return drop_shardings(value)
    if isinstance(value, jex_core.Jaxpr):
        return _jaxpr(value)
    if type(value) in (tuple, list):
        return type(value)(_param(name, v) for v in value)
    if isinstance(value, NamedSharding) and name.endswith("sharding"):
        return None
    return _aval(value)


def _aval(value: Any) -> Any:
    """Returns a type without its sharding; any other object unchanged."""
    if not isinstance(value, _core.ShapedArray):
        return value
    return _core.ShapedArray(
        value.shape, value.dtype, value.weak_type, memory_space=value.memory_space
    )


def _without_mesh(context: Any) -> Any:
    """Returns an equation's context as if the equation had been made without a mesh."""
    if context.cur_abstract_mesh.empty:
        return context
    with context.manager, _set(_mesh.empty_abstract_mesh, _config.config_ext.unset):
        return type(context)()


def off_mesh(
    function: Callable[..., Any], args: Sequence[Any], mesh: UserMesh | None
) -> Callable[..., Any]:
    """Returns a function that is traced under a mesh and runs without the mesh.

    Args:
      function: a function from trees of arrays to a tree of arrays.
      args: the arguments, arrays or structs; their types may name axes of a mesh.
      mesh: the mesh; if it is None, the function is returned unchanged.
    """
    if mesh is None:
        return function
    typed = jax.tree.map(lambda x: on_mesh(_struct(x), mesh), tuple(args))

    def run(*given: Any) -> Any:
        with enter_mesh(mesh):
            traced = jax.jit(function).trace(*typed)
        plain = jex_core.jaxpr_as_fun(drop_shardings(traced.jaxpr))
        made = plain(*jax.tree.leaves(given))
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), made)

    return run


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    given: Any = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(
        given.shape,
        given.dtype,
        weak_type=given.weak_type,
        sharding=explicit_sharding(leaf),
    )
