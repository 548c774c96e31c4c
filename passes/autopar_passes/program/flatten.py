"""Turns a closed jaxpr into a flat `Program`."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from autopar_passes import jax_compat
from autopar_passes.jax_meshes import PLACEMENTS
from autopar_passes.program.equations import (
    Atom,
    Equation,
    Program,
    Region,
    Scalar,
    Value,
    needed_equations,
)

# Collectives over an axis that has one replica.
#
# A step that was written for ``jax.pmap`` sums over its replicas by name, as in
# ``jax.lax.pmean(grads, "batch")``. A planned step sees the whole batch at once. It
# therefore has one replica, and each collective over the replicas returns its operands.


R = TypeVar("R")

# Collectives of `jax.lax` whose result over one replica is the operand, up to dims of
# size one.
_COLLECTIVES = frozenset(
    {
        "psum",
        "psum_invariant",
        "pmax",
        "pmin",
        "ppermute",
        "pbroadcast",
        "pvary",
        "pcast",
        "all_gather",
        "all_gather_invariant",
        "all_gather_reduced",
        "all_to_all",
        "reduce_scatter",
    }
)
_UNBOUND = re.compile(r"unbound axis name: (\S+?)\.?(?:\s|$)")


def with_one_replica(run: Callable[[], R]) -> tuple[R, frozenset[str]]:
    """Runs a function with a one-replica axis for each unbound axis name.

    Args:
      run: a function that traces a step; it is called again for each missing name.

    Returns:
      The function's result, and the names.
    """
    names: tuple[str, ...] = ()
    while True:
        try:
            with jax_compat.axis_env(dict.fromkeys(names, 1)):
                return run(), frozenset(names)
        except NameError as error:
            found = unbound_axis(error)
            if not found or found in names:
                raise
            names = (*names, found)


def unbound_axis(error: NameError) -> str:
    """Returns the unbound axis of an error; '' if the error has another cause."""
    found = _UNBOUND.search(str(error))
    return found.group(1) if found else ""


def on_one_replica(
    function: Callable[..., Sequence[Any]], names: Sequence[str]
) -> Callable[..., list[Any]]:
    """Returns a function of arrays with a one-replica axis for each name.

    The planner does not rewrite such a function: JAX compiles it as it is. Inside,
    values that depend on the replica's index have a leading dim of size one. It is
    removed at the end.
    """

    def run(*arrays: Any) -> list[Any]:
        def once(_: Any) -> list[Any]:
            return list(function(*arrays))

        mapped = functools.reduce(_map_over_axis, names, once)
        return mapped(jnp.zeros(()))

    return run


def _map_over_axis(function: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    replicated = jax.vmap(function, axis_name=name)
    return lambda x: [made[0] for made in replicated(x[None])]


def is_collective(eqn: Any, axes: frozenset[str]) -> bool:
    """Whether an equation is a collective over these axes."""
    if not axes or eqn.primitive.name not in _COLLECTIVES:
        return False
    return axis_names(eqn) <= axes


def is_index(eqn: Any, axes: frozenset[str]) -> bool:
    """Whether an equation reads the number of a replica."""
    return eqn.primitive.name == "axis_index" and axis_names(eqn) <= axes


def axis_names(eqn: Any) -> frozenset[Any]:
    """Returns the axes of a collective."""
    found = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return frozenset(found if isinstance(found, (tuple, list)) else (found,))


def reshape_equation(struct: Any, shape: tuple[int, ...]) -> Any:
    """Returns an equation that changes the shape of an array."""
    closed = jax.make_jaxpr(lambda x: jax.lax.reshape(x, shape))(struct)
    return closed.jaxpr.eqns[0]


# Collectives over an axis of `jax.vmap` reduce a dimension.
#
# Inside a ``jax.vmap`` with a named axis, ``jax.lax.psum`` sums over that axis, as in
# the batch normalisation of Equinox. The trace contains a ``psum`` over a dimension.
# The flat program has an ordinary reduction instead, so that all rules for reductions
# apply.

_REDUCTIONS = {
    "psum": jax.lax.reduce_sum,
    "pmax": jax.lax.reduce_max,
    "pmin": jax.lax.reduce_min,
}


def is_reduction(eqn: Any) -> bool:
    """Whether an equation is a collective over dims, not over mesh axes."""
    if eqn.primitive.name not in _REDUCTIONS:
        return False
    axes, groups = eqn.params["axes"], eqn.params.get("axis_index_groups")
    return bool(axes) and groups is None and all(isinstance(a, int) for a in axes)


def reductions(eqn: Any) -> Iterator[Any]:
    """Yields one reduction for each operand of a collective over dimensions."""
    reduce = _REDUCTIONS[eqn.primitive.name]
    axes = tuple(eqn.params["axes"])
    for given, made in zip(eqn.invars, eqn.outvars, strict=True):
        struct = jax.ShapeDtypeStruct(given.aval.shape, given.aval.dtype)
        (one,) = jax.make_jaxpr(lambda x: reduce(x, axes))(struct).jaxpr.eqns
        yield eqn.replace(
            primitive=one.primitive,
            params=one.params,
            invars=[given],
            outvars=[made],
        )


# The parameter that holds the body of a call depends on the primitive. The first
# parameter of this list that a call has is its body.
_BODY_PARAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
INLINED = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "core_closed_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "custom_lin",
        "remat",
        "remat2",
        "checkpoint",
    }
)
_REMAT = frozenset({"remat", "remat2", "checkpoint"})
# Primitives that return their operand unchanged, and that the flat program drops.
# Placements only tell where a value is stored, which the plan decides. The other
# primitives only matter for differentiation, which JAX has finished when it traces the
# step. If these primitives stayed, the compiler would see a second name of the same
# array, and the planner would price a second resharding.
_DROPPED = PLACEMENTS | {"stop_gradient", "name"}


# The parameter ``devices`` of a ``device_put`` of one array to device memory.
_TO_DEVICES = (jax.memory.Space.Device,)


def flatten(
    closed: Any, replicas: frozenset[str] = frozenset(), *, checkpoints: bool = True
) -> Program:
    """Inlines the calls of a closed jaxpr and numbers its values and equations.

    Equations whose results are never read are dropped, as the compiler would drop them.

    Args:
      closed: the jaxpr.
      replicas: names of axes with one replica; collectives over these axes are dropped.
      checkpoints: whether a barrier precedes the equations that ``jax.checkpoint``
        repeats.
    """
    builder = _Builder(replicas, checkpoints=checkpoints)
    constants = list(closed.consts)
    arguments = [builder.new_value(v.aval) for v in closed.jaxpr.invars]
    const_ids = [builder.new_value(v.aval) for v in closed.jaxpr.constvars]
    env: dict[Any, Atom] = dict(zip(closed.jaxpr.invars, arguments, strict=True))
    env.update(zip(closed.jaxpr.constvars, const_ids, strict=True))
    outputs = builder.inline(closed.jaxpr, env, "")
    hoisted = list(builder.hoisted)
    inputs = (*arguments, *const_ids, *(i for i, _ in hoisted))
    body = _live_region(inputs, builder.equations, outputs)
    all_constants = (*constants, *(c for _, c in hoisted))
    for value in _host_arguments(body, frozenset(arguments)):
        builder.values[value] = dataclasses.replace(builder.values[value], on_host=True)
    return Program(tuple(builder.values), body, all_constants)


def _host_arguments(body: Region, arguments: frozenset[int]) -> set[int]:
    """Returns the arguments that a step keeps in host memory.

    Steps are traced for arguments in device memory. A step that keeps an argument on
    the host moves it to devices before anything else reads it.
    """
    moved, read = set[int](), set[int]()
    for eqn in body.equations:
        there = eqn.primitive == "device_put" and eqn.params["devices"] == _TO_DEVICES
        (moved if there else read).update(a for a in eqn.inputs if isinstance(a, int))
    return (moved - read) & arguments


class _Builder:
    """Accumulates values and equations while calls are inlined."""

    def __init__(self, replicas: frozenset[str], *, checkpoints: bool) -> None:
        self.replicas = replicas
        self.checkpoints = checkpoints
        self.values: list[Value] = []
        self.equations: list[Equation] = []
        self.hoisted: list[tuple[int, Any]] = []
        self.next_index = 0

    def new_value(self, aval: Any) -> int:
        shape, host = tuple(getattr(aval, "shape", ())), jax_compat.is_on_host(aval)
        self.values.append(Value(shape, aval.dtype, on_host=host))
        return len(self.values) - 1

    def read(self, env: dict[Any, Atom], atom: Any) -> Atom:
        if isinstance(atom, jax_compat.Literal):
            return self.literal(atom)
        return env[atom]

    def literal(self, atom: Any) -> Atom:
        """Returns a scalar as it is; turns an array literal into a constant input."""
        if getattr(atom.aval, "shape", ()) == ():
            return Scalar(atom.val, atom.aval)
        return self.hoist(atom.aval, atom.val)

    def name(self, value: int, name: str) -> None:
        """Stores a value's name (`jax.ad_checkpoint.checkpoint_name`)."""
        self.values[value] = dataclasses.replace(self.values[value], name=name)

    def hoist(self, aval: Any, array: Any) -> int:
        """Turns a constant array of the program into an input of the program."""
        value = self.new_value(aval)
        self.hoisted.append((value, array))
        return value

    def inline(self, jaxpr: Any, env: dict[Any, Atom], prefix: str) -> list[Atom]:
        for eqn in jaxpr.eqns:
            self.equation(eqn, env, prefix)
        return [self.read(env, v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, env: dict[Any, Atom], prefix: str) -> None:
        name = eqn.primitive.name
        inputs = [self.read(env, v) for v in eqn.invars]
        stack = _join(prefix, jax_compat.name_stack(eqn))
        if name in _DROPPED:
            env[eqn.outvars[0]] = inputs[0]
            if name == "name" and isinstance(inputs[0], int):
                self.name(inputs[0], eqn.params["name"])
            return
        if is_collective(eqn, self.replicas):
            self.alone(eqn, inputs, env, stack)
            return
        if is_index(eqn, self.replicas):
            env[eqn.outvars[0]] = Scalar(np.int32(0), eqn.outvars[0].aval)
            return
        if is_reduction(eqn):
            for given, one in zip(inputs, reductions(eqn), strict=True):
                self.emit(one, [given], env, stack, ())
            return
        if name == "custom_linear_solve":
            self.call(eqn, *_linear_solve(eqn, inputs), env, stack)
            return
        if name in INLINED and (body := call_body(eqn)) is not None:
            self.call(eqn, body, inputs, env, stack)
            return
        regions = tuple(self.region(b, stack) for b in _bodies(eqn))
        self.emit(eqn, inputs, env, stack, regions)

    def alone(
        self, eqn: Any, inputs: list[Atom], env: dict[Any, Atom], stack: str
    ) -> None:
        """Replaces a collective over one replica by its operands, reshaped."""
        for given, var, out in zip(inputs, eqn.invars, eqn.outvars, strict=True):
            if var.aval.shape == out.aval.shape:
                env[out] = given
                continue
            struct = jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
            template = reshape_equation(struct, out.aval.shape)
            inner: dict[Any, Atom] = {}
            self.emit(template, [given], inner, stack, ())
            env[out] = inner[template.outvars[0]]

    def emit(
        self,
        eqn: Any,
        inputs: list[Atom],
        env: dict[Any, Atom],
        stack: str,
        regions: tuple[Region, ...],
    ) -> None:
        outputs = [self.new_value(v.aval) for v in eqn.outvars]
        env.update(zip(eqn.outvars, outputs, strict=True))
        index = self.next_index
        self.next_index += 1
        self.equations.append(
            Equation(index, eqn, tuple(inputs), tuple(outputs), stack, regions)
        )

    def call(
        self,
        eqn: Any,
        body: tuple[Any, list[Any]],
        inputs: list[Atom],
        env: dict[Any, Atom],
        stack: str,
    ) -> None:
        jaxpr, consts = body
        if eqn.primitive.name in _REMAT and eqn.params.get("differentiated", False):
            inputs = self.barrier(eqn, inputs, stack)
        inner: dict[Any, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            inner[var] = self.hoist(var.aval, const)
        outputs = self.inline(jaxpr, inner, stack)
        env.update(zip(eqn.outvars, outputs, strict=True))

    def barrier(self, eqn: Any, inputs: list[Atom], stack: str) -> list[Atom]:
        """Adds a barrier, so that the compiler keeps equations that are recomputed.

        JAX's own lowering of ``checkpoint`` also puts an ``optimization_barrier``
        around the inputs if ``prevent_cse`` is set. Inlining must keep this barrier.
        """
        if not self.checkpoints or not eqn.params.get("prevent_cse", True):
            return inputs
        arrays = [i for i in inputs if isinstance(i, int)]
        if not arrays:
            return inputs
        template = barrier_equation([self.values[i] for i in arrays])
        env: dict[Any, Atom] = {}
        self.emit(template, list(arrays), env, stack, ())
        renamed = dict(zip(arrays, (env[v] for v in template.outvars), strict=True))
        return [renamed[i] if isinstance(i, int) else i for i in inputs]

    def region(self, body: tuple[Any, list[Any]], stack: str) -> Region:
        jaxpr, consts = body
        outer, self.equations = self.equations, []
        inputs = [self.new_value(v.aval) for v in jaxpr.invars]
        env: dict[Any, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.hoist(var.aval, const)
        outputs = self.inline(jaxpr, env, stack)
        region = _live_region(inputs, self.equations, outputs)
        self.equations = outer
        return region


def barrier_equation(values: Sequence[Value]) -> Any:
    """JAX's equation for an ``optimization_barrier`` on values of these types."""
    structs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
    closed = jax.make_jaxpr(lambda xs: jax.lax.optimization_barrier(xs))(structs)
    return closed.jaxpr.eqns[0]


def _split(body: Any) -> tuple[Any, list[Any]]:
    if isinstance(body, jax_compat.ClosedJaxpr):
        return body.jaxpr, list(body.consts)
    return body, []


def call_body(eqn: Any) -> tuple[Any, list[Any]] | None:
    """Returns the jaxpr and the constants of a call that may be inlined."""
    for key in _BODY_PARAMS:
        body = eqn.params.get(key)
        if body is not None and hasattr(body, "eqns"):
            jaxpr, consts = _split(body)
            if len(jaxpr.invars) == len(eqn.invars):
                return jaxpr, consts
    return None


def _linear_solve(
    eqn: Any, inputs: list[Atom]
) -> tuple[tuple[Any, list[Any]], list[Atom]]:
    """Returns ``solve``, the body of a linear solve, and its inputs."""
    lengths = eqn.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    end = start + lengths.solve
    rest = sum((lengths.matvec, lengths.vecmat, lengths.solve, lengths.transpose_solve))
    read = inputs[start:end] + inputs[rest:]
    return _split(eqn.params["jaxprs"].solve), read


def _bodies(eqn: Any) -> list[tuple[Any, list[Any]]]:
    params = eqn.params
    match eqn.primitive.name:
        case "scan":
            return [_split(params["jaxpr"])]
        case "while":
            return [_split(params["cond_jaxpr"]), _split(params["body_jaxpr"])]
        case "cond":
            return [_split(b) for b in params["branches"]]
        case _:
            return []


def _live_region(
    inputs: Sequence[int], equations: Sequence[Equation], outputs: Sequence[Atom]
) -> Region:
    """A region of the equations whose results are read or that have side effects."""
    live = needed_equations(equations, outputs, effects=True)
    return Region(tuple(inputs), live, tuple(outputs))


def _join(prefix: str, stack: str) -> str:
    return f"{prefix}/{stack}" if prefix and stack else prefix or stack


class Builder:
    """Adds values and equations to those of a program, with new numbers.

    Attributes:
      values: all values.
      equations: the added equations, in order.
    """

    def __init__(self, values: Sequence[Value], next_index: int) -> None:
        """Starts without added equations.

        Args:
          values: the values of the program.
          next_index: the first index that no equation has.
        """
        self.values = list(values)
        self.equations: list[Equation] = []
        self.next_index = next_index
        self._traced: dict[Hashable, Program] = {}

    def value(self, shape: tuple[int, ...], dtype: Any) -> int:
        """Adds a value."""
        self.values.append(Value(shape, dtype))
        return len(self.values) - 1

    def like(self, value: Value) -> int:
        """Adds a value with the shape, dtype and name of another value."""
        self.values.append(value)
        return len(self.values) - 1

    def index(self) -> int:
        """Returns a new index for an equation."""
        self.next_index += 1
        return self.next_index - 1

    def call(
        self,
        function: Callable[..., Any],
        atoms: Sequence[int],
        stack: str = "",
        result: int | None = None,
    ) -> Atom:
        """Adds the equations of a function of arrays; returns its only result.

        Args:
          function: a function of arrays, without constants, that returns one array.
          atoms: the values that the function is called with.
          stack: the name stack of the equations.
          result: the value to store the result in, which no equation computes yet; None
            for a new value.
        """
        results = () if result is None else (result,)
        (found,) = self.calls(function, atoms, stack, results)
        return found

    def calls(
        self,
        function: Callable[..., Any],
        atoms: Sequence[int],
        stack: str = "",
        results: Sequence[int] = (),
        key: Hashable = None,
    ) -> list[Any]:
        """Like `call`, for a function that returns one or several arrays.

        Args:
          function: as for `call`.
          atoms: as for `call`.
          stack: as for `call`.
          results: values to store the results in.
          key: a key that is equal only for functions that compute the same from arrays
            of the same types. Such functions are traced once. None: this function is
            traced in any case.
        """
        made = [self.values[a] for a in atoms]
        structs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in made]
        whole = key, tuple((v.shape, v.dtype) for v in made)
        inner = None if key is None else self._traced.get(whole)
        if inner is None:
            inner = flatten(jax.make_jaxpr(function)(*structs))
            if key is not None:
                self._traced[whole] = inner
        return self.add(inner, atoms, stack, results)

    def add(
        self,
        inner: Program,
        atoms: Sequence[int],
        stack: str = "",
        results: Sequence[int] = (),
    ) -> list[Any]:
        """Like `calls`, for a flat program without constants."""
        assert not inner.constants
        numbers = dict(zip(inner.body.outputs, results, strict=False))
        numbers.update(zip(inner.body.inputs, atoms, strict=True))

        def number(value: int) -> int:
            if value not in numbers:
                of = inner.values[value]
                numbers[value] = self.value(of.shape, of.dtype)
            return numbers[value]

        for eqn in inner.body.equations:
            new = renumber_equation(eqn, number, lambda _: self.index())
            self.equations.append(_named(new, stack))
        return list(renumber_atoms(inner.body.outputs, numbers.__getitem__))


def _named(eqn: Equation, stack: str) -> Equation:
    """An equation and its regions with a name stack, from which roles are read."""
    regions = tuple(
        dataclasses.replace(r, equations=tuple(_named(e, stack) for e in r.equations))
        for r in eqn.regions
    )
    return dataclasses.replace(eqn, name_stack=stack, regions=regions)


def renumber_equation(
    eqn: Equation,
    value: Callable[[int], int],
    index: Callable[[int], int] = lambda index: index,
) -> Equation:
    """Returns an equation and its regions with new numbers.

    Args:
      eqn: the equation.
      value: old number of a value -> new number.
      index: old index of an equation -> new index.
    """
    regions = tuple(renumber_region(region, value, index) for region in eqn.regions)
    outputs = tuple(map(value, eqn.outputs))
    number, inputs = index(eqn.index), renumber_atoms(eqn.inputs, value)
    return Equation(number, eqn.source, inputs, outputs, eqn.name_stack, regions)


def renumber_region(
    region: Region,
    value: Callable[[int], int],
    index: Callable[[int], int] = lambda index: index,
) -> Region:
    """Returns a region with new numbers, as `renumber_equation` does an equation."""
    return Region(
        tuple(map(value, region.inputs)),
        tuple(renumber_equation(e, value, index) for e in region.equations),
        renumber_atoms(region.outputs, value),
    )


def renumber_atoms(
    atoms: Sequence[Atom], value: Callable[[int], int]
) -> tuple[Atom, ...]:
    """Atoms with new numbers of values."""
    return tuple(value(a) if isinstance(a, int) else a for a in atoms)


def made_values(equations: Iterable[Equation]) -> list[int]:
    """Returns the values that equations and their regions compute."""
    found: list[int] = []
    for eqn in equations:
        for one in (eqn, *eqn.inner):
            found.extend(one.outputs)
            found.extend(v for region in one.regions for v in region.inputs)
    return found


def next_index(program: Program) -> int:
    """Returns the first index that no equation of a program has."""
    return 1 + max(program.by_index(), default=-1)
