"""Computes equal matrix products of an update in batches.

Optimizers such as Muon compute many products for the gradient of each matrix
separately. If the matrix of such a computation is sharded, each product ends in an
all-reduce. This pass instead stacks the matrices for which the update computes the same
function, and computes each stack at once, as ``jax.vmap`` would. The stack can then be
sharded along its new dimension. Each device then computes some whole matrices. One
all-to-all before the computation collects the shards of each matrix, and one all-to-all
after it distributes the results. Megatron-LM distributes the matrices of Muon over
data-parallel ranks in the same way.

A stack has the same number of matrices for each device. The matrices that remain after
this division form a separate stack. If matrices are small, each device gets several,
because one small product leaves most of a device idle. If matrices are large, each
device gets one, so that the device's memory holds the temporaries of only one matrix.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from autopar_passes.program.equal_leaves import ELEMENTWISE, SHAPED
from autopar_passes.program.equations import (
    Atom,
    Equation,
    Program,
    Region,
    Scalar,
    evaluate,
    reads,
)
from autopar_passes.program.flatten import Builder, flatten, next_index

# Only computations with these primitives are stacked. Stacking the operands of any
# other primitive takes about as long as the primitive itself. Factorisations are
# excluded, because compilers do not partition them: each device runs all of them.
_PRODUCTS = frozenset({"dot_general"})
# Primitives that ``jax.vmap`` maps over a stack without extra work. Missing are a
# ``cond`` with one predicate per row, which would compute both branches; random bits,
# which could change; and kernels and external calls, whose behaviour is unknown.
_SAFE = (
    _PRODUCTS
    | ELEMENTWISE
    | SHAPED
    | {
        "concatenate",
        "cumsum",
        "dynamic_slice",
        "dynamic_update_slice",
        "gather",
        "iota",
        "pad",
        "rev",
        "scan",
        "scatter",
        "slice",
        "sort",
        "split",
    }
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Computation:
    """Equations of an update that are connected by the values that they read.

    All equations on the paths between them belong to the computation.

    Attributes:
      equations: the equations in the order of the program.
      inputs: the values that the equations read from others, in order of first use.
      outputs: the values that other equations read.
      form: a key that two computations of the same function share.
    """

    equations: tuple[Equation, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    form: object


# If a device computes several matrices of a batch, their largest arrays together have
# at most this many bytes. A GPU needs milliseconds for a product with a result of this
# size.
MOST_BYTES = 1 << 26


def batch_updates(
    program: Program, update: Collection[int], devices: int
) -> tuple[Program, tuple[int, ...]]:
    """Returns the program in which equal computations of its update run in batches.

    Equations outside of the batches keep their indices, and all values keep their
    numbers.

    Args:
      program: a flat program.
      update: indices of the top-level equations of the update.
      devices: the number of devices that share a batch.

    Returns:
      The program, and the number of computations in each batch. The program is returned
      unchanged if no two computations are equal, or if an equation has side effects,
      whose order could matter.
    """
    if devices < 2 or any(eqn.source.effects for eqn in program.body.equations):
        return program, ()
    alike: dict[object, list[_Computation]] = {}
    for found in _first_of(program, list(_computations(program, update))):
        alike.setdefault(found.form, []).append(found)
    parts = [
        part
        for members in alike.values()
        for part in _parts(members, devices * _at_a_time(program, members[0]), devices)
    ]
    # Computations with the same inputs are not batched, because the compiler merges
    # them.
    batches = [part for part in parts if len({one.inputs for one in part}) > 1]
    if not batches:
        return program, ()
    builder = Builder(program.values, next_index(program))
    for batch in batches:
        _write(builder, program, batch)
    gone = {eqn.index for batch in batches for one in batch for eqn in one.equations}
    made = {v for batch in batches for one in batch for v in one.outputs}
    # No batch depends on another one, so all of them can be placed at the same
    # position.
    ahead: list[Equation] = []
    behind: list[Equation] = []
    for eqn in program.body.equations:
        if eqn.index in gone:
            continue
        late = not made.isdisjoint(reads(eqn))
        (behind if late else ahead).append(eqn)
        if late:
            made.update(eqn.outputs)
    body = dataclasses.replace(
        program.body, equations=(*ahead, *builder.equations, *behind)
    )
    made_of = dataclasses.replace(program, values=tuple(builder.values), body=body)
    return made_of, tuple(map(len, batches))


def _at_a_time(program: Program, one: _Computation) -> int:
    """Returns how many computations like `one` a device runs in one batch."""
    made = (program.values[v].nbytes for eqn in one.equations for v in eqn.outputs)
    return max(1, MOST_BYTES // max(1, *made))


def _parts(
    members: Sequence[_Computation], most: int, devices: int
) -> Iterator[Sequence[_Computation]]:
    """Batches with equal numbers per device, and one batch of the remaining members."""
    even = len(members) - len(members) % devices
    for first in range(0, even, most):
        yield members[first : min(first + most, even)]
    yield members[even:]


def _first_of(
    program: Program, computations: Sequence[_Computation]
) -> list[_Computation]:
    """Returns the computations that depend on no other of the given computations.

    If a step updates twice, later computations depend on earlier ones through the
    second forward pass.
    """
    late = {v for one in computations for v in one.outputs}
    for eqn in program.body.equations:
        if not late.isdisjoint(reads(eqn)):
            late.update(eqn.outputs)
    return [one for one in computations if late.isdisjoint(one.inputs)]


def _computations(program: Program, update: Collection[int]) -> Iterator[_Computation]:
    """Yields the computations of an update; none reads a value of another."""
    own = [eqn for eqn in program.body.equations if eqn.index in update]
    if sum(map(_products, own)) < _LEAST:
        return
    readers: dict[int, set[int]] = {}
    for eqn in program.body.equations:
        for value in reads(eqn):
            readers.setdefault(value, set()).add(eqn.index)
    for value in program.body.outputs:
        if isinstance(value, int):
            readers.setdefault(value, set()).add(_OUTSIDE)
    maker = {v: k for k, eqn in enumerate(own) for v in eqn.outputs}
    for part in _connected_parts(_between(own)):
        if not all(map(_is_safe, part)) or sum(map(_products, part)) < _LEAST:
            continue
        places = {maker[v] for eqn in part for v in eqn.outputs}
        places |= _preparation(program, own, maker, places, readers)
        equations = [own[k] for k in sorted(places)]
        inside = {eqn.index for eqn in equations}
        outputs = tuple(
            v
            for eqn in equations
            for v in eqn.outputs
            if readers.get(v, set()) - inside
        )
        form = _Form(program)
        for eqn in equations:
            form.add(eqn)
        key = (tuple(form.equations), tuple(form.numbers[v] for v in outputs))
        yield _Computation(tuple(equations), tuple(form.given), outputs, key)


# A computation with fewer products is not batched, because the two exchanges of
# matrices would cost more than they save.
_LEAST = 2


def _products(eqn: Equation) -> int:
    """The number of products that an equation computes, with those in its regions."""
    inner = sum(_products(e) for r in eqn.regions for e in r.equations)
    times = eqn.params["length"] if eqn.primitive == "scan" else 1
    return (eqn.primitive in _PRODUCTS) + times * inner


def _is_safe(eqn: Equation) -> bool:
    """Whether an equation and all equations in its regions may run on stacks."""
    return all(e.primitive in _SAFE for e in (eqn, *eqn.inner))


# Stands for the caller among the readers of a value that the program returns.
_OUTSIDE = -1


def _connected_parts(equations: Sequence[Equation]) -> list[list[Equation]]:
    """Divides the equations into parts that read no values of each other."""
    maker = {v: eqn.index for eqn in equations for v in eqn.outputs}
    root = {eqn.index: eqn.index for eqn in equations}

    def find(index: int) -> int:
        while root[index] != index:
            root[index] = root[root[index]]
            index = root[index]
        return index

    for eqn in equations:
        for value in reads(eqn):
            if value in maker:
                root[find(eqn.index)] = find(maker[value])
    parts: dict[int, list[Equation]] = {}
    for eqn in equations:
        parts.setdefault(find(eqn.index), []).append(eqn)
    return list(parts.values())


def _preparation(
    program: Program,
    own: Sequence[Equation],
    maker: Mapping[int, int],
    part: Collection[int],
    readers: Mapping[int, set[int]],
) -> set[int]:
    """Finds reductions to move into a part, because the part then reads fewer bytes.

    A reduction is moved only if nothing else reads its result.

    An example is the norm by which the part divides a matrix. A device that holds the
    whole matrix computes the norm without an all-reduce.

    Args:
      program: a flat program.
      own: the equations of the update.
      maker: value -> the position of its equation in ``own``.
      part: positions of connected equations.
      readers: value -> the indices of the equations that read it.

    Returns:
      Positions of the reductions, and of the equations between them and the part.
    """
    taken = {own[k].index for k in part}
    made = {v for k in part for v in own[k].outputs}
    given = {v for k in part for v in reads(own[k])} - made
    found, best = set[int](), set[int]()
    limit = sum(program.values[v].nbytes for v in given) + 1
    reduces = False
    # Positions of equations that compute the given values. Later equations come first.
    waiting = [-maker[v] for v in given if v in maker]
    heapq.heapify(waiting)
    while waiting:
        place = -heapq.heappop(waiting)
        eqn = own[place]
        alone = all(readers.get(v, set()) <= taken for v in eqn.outputs)
        if place in found or not alone or not _is_safe(eqn):
            continue
        found.add(place)
        taken.add(eqn.index)
        given.difference_update(eqn.outputs)
        given.update(reads(eqn))
        for value in reads(eqn):
            if value in maker:
                heapq.heappush(waiting, -maker[value])
        reduces = reduces or eqn.primitive.startswith("reduce_")
        nbytes = sum(program.values[v].nbytes for v in given)
        if reduces and nbytes < limit:
            best, limit = set(found), nbytes
    return best


def _between(own: Sequence[Equation]) -> list[Equation]:
    """The equations with matrix products, and the equations on paths between them."""
    worth = {eqn.index for eqn in own if _products(eqn)}
    made: set[int] = set()
    behind: set[int] = set()
    for eqn in own:
        if eqn.index in worth or not made.isdisjoint(reads(eqn)):
            behind.add(eqn.index)
            made.update(eqn.outputs)
    needed: set[int] = set()
    ahead: set[int] = set()
    for eqn in reversed(own):
        if eqn.index in worth or not needed.isdisjoint(eqn.outputs):
            ahead.add(eqn.index)
            needed.update(reads(eqn))
    return [eqn for eqn in own if eqn.index in ahead & behind]


class _Form:
    """Builds a key that is equal for equations of the same form.

    The key does not depend on the numbers of the values that the equations read.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        # Value -> number, in the order of first use.
        self.numbers: dict[int, int] = {}
        self.given: list[int] = []
        self.equations: list[object] = []

    def add(self, eqn: Equation) -> None:
        self.equations.append(self.of(eqn))

    def of(self, eqn: Equation) -> object:
        read = tuple(self.atom(a) for a in eqn.inputs)
        regions = tuple(self.region(r) for r in eqn.regions)
        # The parameters that hold programs are left out: the equation's regions are in
        # the key.
        params = tuple(
            (key, _hashable(value))
            for key, value in sorted(eqn.params.items())
            if not (eqn.regions and _holds_program(value))
        )
        return eqn.primitive, params, read, regions, self.define(eqn.outputs)

    def region(self, region: Region) -> object:
        inputs = self.define(region.inputs)
        equations = tuple(self.of(eqn) for eqn in region.equations)
        return inputs, equations, tuple(self.atom(a) for a in region.outputs)

    def define(self, values: Sequence[int]) -> tuple[object, ...]:
        for value in values:
            self.numbers[value] = len(self.numbers)
        return tuple(self.shape(v) for v in values)

    def atom(self, atom: Atom) -> object:
        if isinstance(atom, Scalar):
            return "scalar", str(atom.aval.dtype), str(atom.value)
        if atom not in self.numbers:
            self.given.append(atom)
            self.define((atom,))
        return self.numbers[atom], self.shape(atom)

    def shape(self, value: int) -> tuple[object, ...]:
        of = self.program.values[value]
        return of.shape, str(of.dtype)


def _hashable(value: Any) -> object:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def _holds_program(value: Any) -> bool:
    """Whether a parameter is a jaxpr, or contains one."""
    if isinstance(value, tuple | list):
        return any(map(_holds_program, value))
    return hasattr(value, "eqns")


def _write(builder: Builder, program: Program, batch: Sequence[_Computation]) -> None:
    """Adds the equations of a batch, which compute the results of all members."""
    first = batch[0]
    sub = Program(
        program.values, Region(first.inputs, first.equations, first.outputs), ()
    )
    columns = list(zip(*(one.inputs for one in batch), strict=True))
    shared = [len(set(column)) == 1 for column in columns]
    atoms = [
        value
        for column, same in zip(columns, shared, strict=True)
        for value in (column[:1] if same else column)
    ]
    count = len(batch)

    def run(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        stacks = [
            next(given) if same else _stack_rows(list(itertools.islice(given, count)))
            for same in shared
        ]
        axes = [None if same else 0 for same in shared]
        made = jax.vmap(lambda *xs: evaluate(sub, *xs), axes)(*stacks)
        return [row for stack in made for row in _rows(stack)]

    outputs = zip(*(one.outputs for one in batch), strict=True)
    forms = [builder.values[a] for a in atoms]
    structs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in forms]
    inner = flatten(jax.make_jaxpr(run)(*structs))
    results = list(itertools.chain.from_iterable(outputs))
    builder.add(inner, atoms, first.equations[0].name_stack, results)


def _stack_rows(arrays: Sequence[Any]) -> Any:
    """Stacks arrays along a new first dimension."""
    return jax.lax.concatenate([jax.lax.expand_dims(x, (0,)) for x in arrays], 0)


def _rows(stack: Any) -> list[Any]:
    """Returns the rows of a stack."""
    parts = jax.lax.split(stack, (1,) * stack.shape[0], 0)
    return [jax.lax.squeeze(part, (0,)) for part in parts]
