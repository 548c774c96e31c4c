"""The flat program: a train step without calls, with every value numbered.

The other passes read a `Program`, and `autopar_passes.replay.run` replays it. Nested
calls (``jit``, ``custom_jvp_call``, ``checkpoint`` ...) are inlined. ``scan``,
``while`` and ``cond`` stay equations with regions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar_passes import jax_compat


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """One array of the program; its number is its position in the program.

    ``size`` is the number of elements, and ``nbytes`` the bytes of the whole array.
    ``name`` is the name from `jax.ad_checkpoint.checkpoint_name`, or ''. ``on_host``
    says whether the array is in host memory (``jax.memory.Space.Host``).
    """

    shape: tuple[int, ...]
    dtype: Any
    name: str = dataclasses.field(default="", compare=False)
    on_host: bool = False
    size: int = dataclasses.field(init=False, compare=False)
    nbytes: int = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Computes size and bytes once, because they are read very often."""
        size = math.prod(self.shape)
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "nbytes", size * jax_compat.itemsize(self.dtype))

    @property
    def device_nbytes(self) -> int:
        """Bytes of the whole array in device memory."""
        return 0 if self.on_host else self.nbytes

    @property
    def floating(self) -> bool:
        """Whether the elements are floating-point numbers; False for PRNG keys."""
        extended = jax_compat.is_extended(self.dtype)
        return not extended and bool(jnp.issubdtype(self.dtype, jnp.floating))


@dataclasses.dataclass(frozen=True, slots=True)
class Scalar:
    """A scalar constant in the program (JAX's ``Literal``)."""

    value: Any
    aval: Any


# An operand of an equation: the number of a value, or a constant.
Atom = int | Scalar


@dataclasses.dataclass(frozen=True, slots=True)
class Equation:
    """One primitive application.

    ``source`` is the original JAX equation (primitive, parameters, name stack).
    ``regions`` are the bodies of control flow, in the order of the primitive: scan
    (body), while (cond, body), cond (branches).
    """

    index: int
    source: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    name_stack: str
    regions: tuple[Region, ...] = ()

    @property
    def primitive(self) -> str:
        """Name of the primitive."""
        return self.source.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        """Parameters of the primitive."""
        return self.source.params

    @property
    def arrays(self) -> tuple[int, ...]:
        """The operands that are values."""
        return tuple(a for a in self.inputs if isinstance(a, int))

    @property
    def inner(self) -> list[Equation]:
        """The equations of all regions, and of regions within them."""
        return [eqn for region in self.regions for eqn in walk(region)]


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """A straight-line list of equations with inputs and outputs."""

    inputs: tuple[int, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Atom, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A whole step.

    ``body.inputs`` are the flat arguments followed by ``constants``, the
    arrays that the traced function closed over.
    """

    values: tuple[Value, ...]
    body: Region
    constants: tuple[Any, ...]

    @property
    def num_arguments(self) -> int:
        """Number of flat arguments of the step."""
        return len(self.body.inputs) - len(self.constants)

    @property
    def constant_arrays(self) -> dict[int, Any]:
        """The arrays of ``constants``, by value."""
        values = self.body.inputs[self.num_arguments :]
        return dict(zip(values, self.constants, strict=True))

    def by_index(self) -> dict[int, Equation]:
        """Returns all equations by index, including those in regions."""
        return {eqn.index: eqn for eqn in walk(self.body)}


def walk(region: Region) -> list[Equation]:
    """Returns all equations of a region; bodies come after their equation."""
    return [one for eqn in region.equations for one in (eqn, *eqn.inner)]


def reads(eqn: Equation) -> tuple[int, ...]:
    """Returns the values that an equation and its regions read, each once."""
    found = dict.fromkeys(eqn.arrays)
    for region in eqn.regions:
        known = set(region.inputs)
        for inner in region.equations:
            found.update((v, None) for v in reads(inner) if v not in known)
            known.update(inner.outputs)
        ends = (v for v in region.outputs if isinstance(v, int))
        found.update((v, None) for v in ends if v not in known)
    return tuple(found)


def needed_equations(
    equations: Sequence[Equation],
    values: Iterable[Atom],
    *,
    kept: Callable[[int], bool] = lambda _: False,
    effects: bool = False,
) -> tuple[Equation, ...]:
    """Returns the equations that given values depend on, in their order.

    Args:
      equations: equations in program order.
      values: the values to compute.
      kept: a function that returns whether a value is kept, so that it need not be
        computed.
      effects: whether equations with side effects are needed, too.
    """
    wanted = {v for v in values if isinstance(v, int)}
    found: list[Equation] = []
    for eqn in reversed(equations):
        if not wanted.isdisjoint(eqn.outputs) or (effects and eqn.source.effects):
            found.append(eqn)
            wanted.update(v for v in reads(eqn) if not kept(v))
    return tuple(reversed(found))


def evaluate(program: Program, *arguments: Any) -> list[Any]:
    """Runs the equations of a program one by one.

    Args:
      program: the flat program.
      arguments: the flat arguments of the program.
    """
    return _region(program.body, (*arguments, *program.constants), {})


def _region(region: Region, given: Sequence[Any], outer: Mapping[int, Any]) -> Any:
    arrays = {**outer, **dict(zip(region.inputs, given, strict=True))}
    for eqn in region.equations:
        with jax_compat.source_of(eqn.source):
            made = _equation(eqn, arrays)
        arrays.update(zip(eqn.outputs, made, strict=True))
    return [_read(arrays, a) for a in region.outputs]


def _read(arrays: Mapping[int, Any], atom: Atom) -> Any:
    return atom.value if isinstance(atom, Scalar) else arrays[atom]


def _equation(eqn: Equation, arrays: Mapping[int, Any]) -> Sequence[Any]:
    given = [_read(arrays, a) for a in eqn.inputs]
    if eqn.primitive != "scan":
        return jax_compat.bind(eqn.source, *given)
    params, (body,) = eqn.params, eqn.regions
    consts, carry = params["num_consts"], params["num_carry"]

    def step(carried: Any, sliced: Any) -> Any:
        made = _region(body, (*given[:consts], *carried, *sliced), arrays)
        ends = [
            jax.numpy.asarray(x, like.dtype)
            for x, like in zip(made[:carry], carried, strict=True)
        ]
        return ends, made[carry:]

    first = [jax.numpy.asarray(x) for x in given[consts : consts + carry]]
    ends, stacked = jax.lax.scan(
        step,
        first,
        given[consts + carry :],
        length=params["length"],
        reverse=params["reverse"],
    )
    return [*ends, *stacked]
