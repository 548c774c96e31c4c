"""Splits loops over layers, and their state, into pieces.

A loop over stacked layers is one equation, and its parameters are arrays with a layer
dimension. In the new program, each such array is several arguments, one for each piece
of its layers. The loop becomes several loops, one after another. Computations on the
arrays that treat layers independently, such as an optimizer's update, run piece by
piece. If an operator needs all layers, the pieces are concatenated before it, so every
program keeps its meaning.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar_errors import InputError
from autopar_passes import jax_compat
from autopar_passes.program.equations import Atom, Equation, Program, Region
from autopar_passes.program.flatten import (
    Builder,
    made_values,
    next_index,
    renumber_equation,
    renumber_region,
)
from autopar_passes.program.trace import TracedStep

# The effect of operators on a layer dimension that is split into pieces.
#
# A *piece* holds some consecutive layers of a stacked array.


def layer_ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns, for each piece, its first layer and the layer after its last.

    >>> layer_ranges([2, 3])
    [(0, 2), (2, 5)]
    """
    ends = list(itertools.accumulate(sizes))
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def piece_paths(path: str, sizes: Sequence[int]) -> list[str]:
    """Returns the paths of the pieces of an array.

    >>> piece_paths("params/kernel", [2, 3])
    ['params/kernel@0:2', 'params/kernel@2:5']
    """
    return [f"{path}@{a}:{b}" for a, b in layer_ranges(sizes)]


def piece_arguments(
    count: int, sizes: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """Flat argument -> the flat arguments that are its pieces.

    Args:
      count: the number of arguments of the step before the split.
      sizes: flat argument -> the number of layers of each of its pieces.
    """
    out: dict[int, list[int]] = {}
    for k in sorted(sizes):
        more = len(sizes[k]) - 1
        out[k] = [k, *range(count, count + more)]
        count += more
    return out


def piece_holders(
    sizes: Sequence[int], stages: Sequence[int], count: int
) -> tuple[int, ...]:
    """For each piece of an array, the pipeline stage that holds it between steps.

    If the pieces have equal sizes and each stage runs the same number of them, the
    array is sharded over the stages: the first stage holds the first pieces, and so on.
    Otherwise the stage of the first piece holds the whole array.

    Args:
      sizes: the sizes of the pieces.
      stages: the stage that runs each piece.
      count: the number of stages.

    >>> piece_holders([2, 2, 2, 2], [0, 1, 0, 1], 2)
    (0, 0, 1, 1)
    >>> piece_holders([2, 1], [0, 1], 2)
    (0, 0)
    """
    each = len(sizes) // count
    even = all(list(stages).count(stage) == each for stage in range(count))
    if len(set(sizes)) > 1 or not even:
        return (stages[0],) * len(sizes)
    return tuple(k // each for k in range(len(sizes)))


def whole_path(path: str) -> str:
    """The path of the array that a piece belongs to; empty if the path is no piece's.

    >>> whole_path("params/kernel@0:2")
    'params/kernel'
    >>> whole_path("params/kernel")
    ''
    """
    whole, _, layers = path.rpartition("@")
    return whole if layers.replace(":", "").isdecimal() else ""


# Elementwise operators.
POINTWISE = frozenset(
    {
        "abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp",
        "convert_element_type", "copy", "copy_p", "cos", "cosh", "div", "eq", "erf",
        "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag",
        "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt",
        "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "real",
        "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
        "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt",
        "square", "sub", "tan", "tanh", "xor",
    }
)  # fmt: skip

# Operators that reduce dimensions -> the function that combines the results of two
# pieces.
REDUCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": jax.lax.add,
    "reduce_max": jax.lax.max,
    "reduce_min": jax.lax.min,
    "reduce_prod": jax.lax.mul,
    "reduce_and": jax.lax.bitwise_and,
    "reduce_or": jax.lax.bitwise_or,
}


def in_order(program: Program) -> Program:
    """Returns the program with equations renumbered, each body before its loop."""
    numbers: dict[int, int] = {}

    def count(region: Region) -> None:
        for eqn in region.equations:
            for inner in eqn.regions:
                count(inner)
            numbers[eqn.index] = len(numbers)

    count(program.body)
    equations = tuple(
        renumber_equation(e, lambda v: v, numbers.__getitem__)
        for e in program.body.equations
    )
    return dataclasses.replace(
        program, body=dataclasses.replace(program.body, equations=equations)
    )


_Changed = tuple[int, Callable[[int], dict[str, Any]]]


def move_dim(
    eqn: Equation, dim: int, shapes: Sequence[tuple[int, ...]]
) -> _Changed | None:
    """Returns the position of a dimension after an operator; None if unknown.

    The position is also None if the result has no such dimension.

    The function also returns a function from the size of a piece to the operator's
    parameters on this piece.
    """
    params, shape = eqn.params, shapes[0]
    match eqn.primitive:
        case "broadcast_in_dim":
            to = params["broadcast_dimensions"][dim]
            if params["shape"][to] != shape[dim]:
                return None
            return to, lambda n: {"shape": _with(params["shape"], to, n)}
        case "reshape":
            before, out = math.prod(shape[:dim]), params["new_sizes"]
            for to, size in enumerate(out):
                if math.prod(out[:to]) == before and size == shape[dim]:
                    return to, lambda n, to=to: {"new_sizes": _with(out, to, n)}
            return None
        case "transpose":
            return params["permutation"].index(dim), lambda _: {}
        case "squeeze":
            dims = params["dimensions"]
            return dim - sum(d < dim for d in dims), lambda _: {}
        case "concatenate" if params["dimension"] != dim:
            return dim, lambda _: {}
        case _:
            return None


def resize_dim(
    eqn: Equation, dim: int, sizes: Sequence[int]
) -> list[dict[str, Any]] | None:
    """Returns the parameters of a slice or padding on each piece of a dimension.

    The result is None for any other operator than a slice or padding, and if a piece
    would be empty.
    """
    params = eqn.params
    if eqn.primitive == "slice":
        start, limit = params["start_indices"], params["limit_indices"]
        strides = params["strides"]
        ends = [
            (max(start[dim], a), min(limit[dim], b)) for a, b in layer_ranges(sizes)
        ]
        if any(a >= b for a, b in ends) or (strides and strides[dim] != 1):
            return None
        return [
            {
                "start_indices": _with(start, dim, a - begin),
                "limit_indices": _with(limit, dim, b - begin),
            }
            for (a, b), (begin, _) in zip(ends, layer_ranges(sizes), strict=True)
        ]
    if eqn.primitive == "pad":
        config = params["padding_config"]
        low, high, inner = config[dim]
        if min(low, high) < 0 or inner:
            return None
        return [
            {
                "padding_config": (
                    *config[:dim],
                    (low * (k == 0), high * (k == len(sizes) - 1), 0),
                    *config[dim + 1 :],
                )
            }
            for k in range(len(sizes))
        ]
    return None


def _with(sizes: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """A value that the new program holds in pieces.

    Attributes:
      values: the numbers of the pieces, in the order of the layers.
      dim: the dimension that is split.
      sizes: the size of each piece in that dimension.
    """

    values: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]


def in_pieces(traced: TracedStep, sizes: Mapping[int, Sequence[int]]) -> TracedStep:
    """Returns a step whose stacked state is in pieces.

    The first piece of an argument takes the argument's place. The other pieces come
    after all arguments. Results are treated in the same way.

    Args:
      traced: the step.
      sizes: carried flat argument -> the number of layers of each of its pieces.

    Raises:
      InputError: an argument is not carried, or its sizes do not sum to its layers.
    """
    if not sizes:
        return traced
    _check_sizes(traced, sizes)
    splitter = Splitter(traced.program, sizes)
    program = splitter.run({traced.carried[k]: k for k in sizes})
    inputs, outputs = len(traced.input_paths), len(traced.output_paths)
    into, out = list(traced.input_paths), list(traced.output_paths)
    carried = dict(traced.carried)
    for k in sorted(sizes):
        result = traced.carried[k]
        names = piece_paths(traced.input_paths[k], sizes[k])
        after = piece_paths(traced.output_paths[result], sizes[k])
        into[k], out[result] = names[0], after[0]
        into.extend(names[1:])
        out.extend(after[1:])
        for _ in names[1:]:
            carried[inputs] = outputs
            inputs, outputs = inputs + 1, outputs + 1
    return dataclasses.replace(
        traced,
        program=program,
        input_paths=tuple(into),
        output_paths=tuple(out),
        carried=carried,
    )


def _check_sizes(traced: TracedStep, sizes: Mapping[int, Sequence[int]]) -> None:
    """Raises `InputError` if pieces do not belong to a carried argument."""
    for k, own in sizes.items():
        value = traced.program.values[traced.program.body.inputs[k]]
        if k not in traced.carried or not value.shape or sum(own) != value.shape[0]:
            raise InputError(
                f"pieces of {list(own)} layers do not make up argument {k}, "
                f"'{traced.input_paths[k]}' of shape {value.shape}."
            )


class Splitter:
    """Rewrites a program in one pass over its equations.

    Attributes:
      sliced: the values that were cut into pieces because an operator combines them
        with a value in pieces.
      loops: the original indices of the loops that were cut.
    """

    def __init__(self, program: Program, sizes: Mapping[int, Sequence[int]]) -> None:
        """Starts from the arguments that are in pieces.

        Args:
          program: the flat program.
          sizes: flat argument -> sizes of its pieces.
        """
        self.program = program
        self.builder = Builder(program.values, next_index(program))
        self.pieces: dict[int, Pieces] = {}
        self.whole: dict[int, int] = {}
        self.cuts: dict[tuple[int, int], Pieces] = {}
        self.sliced: set[int] = set()
        self.loops: set[int] = set()
        self.stack = ""
        arguments = program.body.inputs
        for k, own in sizes.items():
            self.pieces[arguments[k]] = self.fresh(arguments[k], 0, tuple(own))

    def run(self, results: Mapping[int, int]) -> Program:
        """Writes the program.

        Args:
          results: flat result -> the flat argument that it is the next value of.
        """
        for eqn in self.program.body.equations:
            self.equation(eqn)
        body, arguments = self.program.body, self.program.num_arguments
        into = list(body.inputs[:arguments])
        for k in sorted(results.values()):
            own = self.pieces[body.inputs[k]].values
            into[k] = own[0]
            into.extend(own[1:])
        out = [a if k in results else self.read(a) for k, a in enumerate(body.outputs)]
        for k, argument in sorted(results.items(), key=lambda pair: pair[1]):
            like = self.pieces[body.inputs[argument]]
            own = self.piece(body.outputs[k], like.dim, like.sizes)
            out[k] = own[0]
            out.extend(own[1:])
        region = Region(
            (*into, *body.inputs[arguments:]),
            tuple(self.builder.equations),
            tuple(out),
        )
        return in_order(
            Program(tuple(self.builder.values), region, self.program.constants)
        )

    # Values.

    def fresh(self, value: int, dim: int, sizes: tuple[int, ...]) -> Pieces:
        """Creates new values for the pieces of a value."""
        of = self.program.values[value]
        made = tuple(
            self.builder.value((*of.shape[:dim], n, *of.shape[dim + 1 :]), of.dtype)
            for n in sizes
        )
        return Pieces(made, dim, sizes)

    def read(self, atom: Atom) -> Atom:
        """Returns an atom as a whole, concatenated if necessary."""
        if not isinstance(atom, int) or atom not in self.pieces:
            return self.whole.get(atom, atom) if isinstance(atom, int) else atom
        if atom not in self.whole:
            own = self.pieces[atom]
            (self.whole[atom],) = self.emit(
                lambda *xs: jax.lax.concatenate(xs, own.dim), own.values
            )
        return self.whole[atom]

    def piece(self, atom: Atom, dim: int, sizes: tuple[int, ...]) -> Sequence[Atom]:
        """Returns an array's pieces; slices the array if the program holds it whole."""
        if not isinstance(atom, int):
            return [atom for _ in sizes]
        own = self.pieces.get(atom)
        if own is not None and (own.dim, own.sizes) == (dim, sizes):
            return own.values
        known = self.cuts.get((atom, dim))
        if known is None or known.sizes != sizes:
            self.sliced.add(atom)
            whole = self.read(atom)
            assert isinstance(whole, int)
            made = [
                self.emit(
                    lambda x, a=a, b=b: jax.lax.slice_in_dim(x, a, b, axis=dim), [whole]
                )[0]
                for a, b in layer_ranges(sizes)
            ]
            known = self.cuts[atom, dim] = Pieces(tuple(made), dim, sizes)
        return known.values

    def emit(self, function: Callable[..., Any], atoms: Sequence[Atom]) -> list[int]:
        """Traces a function of arrays and adds its equations to the program."""
        given = [a for a in atoms if isinstance(a, int)]

        def call(*arrays: Any) -> Any:
            left = iter(arrays)
            return function(
                *(next(left) if isinstance(a, int) else a.value for a in atoms)
            )

        return self.builder.calls(call, given, self.stack)

    def add_bound(
        self, eqn: Equation, atoms: Sequence[Atom], **changed: Any
    ) -> list[int]:
        """Adds an equation's primitive on other operands, with changed parameters."""
        source = eqn.source
        if changed:
            source = source.replace(params={**source.params, **changed})
        shapes = [self.struct(a) for a in atoms]
        made = jax.eval_shape(
            lambda *xs: jax_compat.bind(
                source,
                *(
                    a.value if not isinstance(a, int) else x
                    for a, x in zip(atoms, xs, strict=True)
                ),
            ),
            *shapes,
        )
        outputs = tuple(self.builder.value(tuple(s.shape), s.dtype) for s in made)
        self.builder.equations.append(
            Equation(
                self.builder.index(), source, tuple(atoms), outputs, eqn.name_stack
            )
        )
        return list(outputs)

    def struct(self, atom: Atom) -> Any:
        """Returns the shape and dtype of an atom."""
        if not isinstance(atom, int):
            return jax.ShapeDtypeStruct((), jnp.asarray(atom.value).dtype)
        value = self.builder.values[atom]
        return jax.ShapeDtypeStruct(value.shape, value.dtype)

    def shape(self, atom: Atom) -> tuple[int, ...]:
        """Returns the shape of an atom of the original program."""
        return self.program.values[atom].shape if isinstance(atom, int) else ()

    # Equations.

    def equation(self, eqn: Equation) -> None:
        """Writes one equation, in pieces if possible."""
        self.stack = eqn.name_stack
        cut = {a for a in eqn.arrays if a in self.pieces}
        if cut and self.in_pieces(eqn, cut):
            return
        kept = dataclasses.replace(eqn, inputs=tuple(self.read(a) for a in eqn.inputs))
        self.builder.equations.append(kept)

    def in_pieces(self, eqn: Equation, cut: Collection[int]) -> bool:
        """Writes an equation that reads pieces.

        Returns False if it needs whole arrays.
        """
        kind = eqn.primitive
        if kind == "scan":
            return self.loop(eqn)
        splits = {(self.pieces[a].dim, self.pieces[a].sizes) for a in cut}
        if len(splits) != 1:
            return False
        ((dim, sizes),) = splits
        if kind in POINTWISE:
            return self.pointwise(eqn, dim, sizes)
        if kind == "optimization_barrier":
            return self.barrier(eqn, cut, dim, sizes)
        if kind in REDUCTIONS:
            return self.reduction(eqn, dim, sizes)
        if kind == "dot_general":
            return self.product(eqn, dim, sizes)
        if (own := resize_dim(eqn, dim, sizes)) is not None and eqn.inputs[0] in cut:
            return self.resize(eqn, own)
        changed = move_dim(eqn, dim, [self.shape(a) for a in eqn.inputs])
        if changed is None or len(cut) != len(eqn.inputs):
            return False
        to, parameters = changed
        return self.each(
            eqn, [dim] * len(eqn.inputs), sizes, to, [parameters(n) for n in sizes]
        )

    def each(
        self,
        eqn: Equation,
        dims: Sequence[int | None],
        sizes: tuple[int, ...],
        to: int,
        changed: Sequence[Mapping[str, Any]] = (),
    ) -> bool:
        """Writes an equation's primitive once for each piece.

        Args:
          eqn: the equation.
          dims: for each operand, the split dimension; None if the operand is read
            whole.
          sizes: the sizes of the pieces.
          to: the split dimension of the result.
          changed: the changed parameters of the primitive on each piece.
        """
        given = [
            [self.read(a)] * len(sizes) if d is None else self.piece(a, d, sizes)
            for a, d in zip(eqn.inputs, dims, strict=True)
        ]
        made = [
            self.add_bound(eqn, atoms, **(changed[k] if changed else {}))[0]
            for k, atoms in enumerate(zip(*given, strict=True))
        ]
        self.pieces[eqn.outputs[0]] = Pieces(tuple(made), to, sizes)
        return True

    def resize(self, eqn: Equation, changed: Sequence[Mapping[str, Any]]) -> bool:
        """Writes a slice or padding along the layers, piece by piece."""
        value, *rest = eqn.inputs
        assert isinstance(value, int)
        of = self.pieces[value]
        made = [
            self.add_bound(eqn, [piece, *map(self.read, rest)], **own)[0]
            for piece, own in zip(of.values, changed, strict=True)
        ]
        sizes = tuple(self.builder.values[v].shape[of.dim] for v in made)
        self.pieces[eqn.outputs[0]] = Pieces(tuple(made), of.dim, sizes)
        return True

    def pointwise(self, eqn: Equation, dim: int, sizes: tuple[int, ...]) -> bool:
        """Writes an elementwise primitive; cuts the whole arrays that it reads."""
        shape = self.shape(eqn.outputs[0])
        shapes = [self.shape(a) for a in eqn.inputs]
        if len(eqn.outputs) != 1 or any(s not in ((), shape) for s in shapes):
            return False
        return self.each(eqn, [dim if s else None for s in shapes], sizes, dim)

    def barrier(
        self, eqn: Equation, cut: Collection[int], dim: int, sizes: tuple[int, ...]
    ) -> bool:
        """Writes one barrier for each piece, and one for the values not in pieces."""
        pairs = list(zip(eqn.inputs, eqn.outputs, strict=True))
        split = [(a, out) for a, out in pairs if a in cut]
        made = [
            self.add_bound(eqn, [self.pieces[a].values[k] for a, _ in split])  # type: ignore[index]
            for k in range(len(sizes))
        ]
        for place, (_, out) in enumerate(split):
            self.pieces[out] = Pieces(tuple(m[place] for m in made), dim, sizes)
        rest = [(a, out) for a, out in pairs if a not in cut]
        if rest:
            found = self.add_bound(eqn, [self.read(a) for a, _ in rest])
            self.whole.update(zip((out for _, out in rest), found, strict=True))
        return True

    def reduction(self, eqn: Equation, dim: int, sizes: tuple[int, ...]) -> bool:
        """Writes a reduction of each piece; combines the results across pieces."""
        axes = eqn.params["axes"]
        if dim not in axes:
            return self.each(eqn, [dim], sizes, dim - sum(a < dim for a in axes))
        made = [
            self.add_bound(eqn, [v])[0] for v in self.piece(eqn.inputs[0], dim, sizes)
        ]
        return self.together(eqn, made, REDUCTIONS[eqn.primitive])

    def together(
        self, eqn: Equation, made: Sequence[int], two: Callable[[Any, Any], Any]
    ) -> bool:
        """Combines the results of an operator on the pieces into its whole result."""
        result = made[0]
        for other in made[1:]:
            (result,) = self.emit(two, [result, other])
        self.whole[eqn.outputs[0]] = result
        return True

    def product(self, eqn: Equation, dim: int, sizes: tuple[int, ...]) -> bool:
        """Writes a matrix product.

        Layers may be a batch, contracted or free dimension.
        """
        contracted, batched = eqn.params["dimension_numbers"]
        left, right = eqn.inputs
        for dims, over in ((batched, False), (contracted, True)):
            for place, (a, b) in enumerate(zip(*dims, strict=True)):
                ours = (left in self.pieces and a == dim) or (
                    right in self.pieces and b == dim
                )
                if ours and over:
                    made = [
                        self.add_bound(eqn, pair)[0]
                        for pair in zip(
                            self.piece(left, a, sizes),
                            self.piece(right, b, sizes),
                            strict=True,
                        )
                    ]
                    return self.together(eqn, made, jax.lax.add)
                if ours:
                    return self.each(eqn, [a, b], sizes, place)
        if left in self.pieces and right in self.pieces:
            return False
        before = len(batched[0])
        ranks = [len(self.shape(a)) for a in eqn.inputs]
        free = [
            [d for d in range(rank) if d not in contracted[k] and d not in batched[k]]
            for k, rank in enumerate(ranks)
        ]
        if left in self.pieces:
            return self.each(eqn, [dim, None], sizes, before + free[0].index(dim))
        to = before + len(free[0]) + free[1].index(dim)
        return self.each(eqn, [None, dim], sizes, to)

    def loop(self, eqn: Equation) -> bool:
        """Writes a loop over layers as one loop for each piece, one after another."""
        params = eqn.params
        first = params["num_consts"] + params["num_carry"]
        sizes = {
            self.pieces[a].sizes
            for a in eqn.inputs[first:]
            if isinstance(a, int) and a in self.pieces and self.pieces[a].dim == 0
        }
        if len(sizes) != 1:
            return False
        self.cut(eqn, *sizes)
        return True

    def cut(self, eqn: Equation, own: tuple[int, ...]) -> list[int]:
        """Writes a loop as several loops, one after another.

        Args:
          eqn: the loop.
          own: the number of slices of the stacked arrays that each loop processes.

        Returns:
          The indices of the loops, in the order of their slices.
        """
        params = eqn.params
        first = params["num_consts"] + params["num_carry"]
        self.loops.add(eqn.index)
        indices = [0] * len(own)
        consts = [self.read(a) for a in eqn.inputs[: params["num_consts"]]]
        carry = [self.read(a) for a in eqn.inputs[params["num_consts"] : first]]
        given = [self.piece(a, 0, own) for a in eqn.inputs[first:]]
        stacked = [self.fresh(v, 0, own) for v in eqn.outputs[params["num_carry"] :]]
        order, ends = list(range(len(own))), list[int]()
        for k in reversed(order) if params["reverse"] else order:
            ends = [
                self.builder.value(
                    self.program.values[v].shape, self.program.values[v].dtype
                )
                for v in eqn.outputs[: params["num_carry"]]
            ]
            read = (*consts, *carry, *(x[k] for x in given))
            made = self.shorter(
                eqn, own[k], read, (*ends, *(x.values[k] for x in stacked))
            )
            self.builder.equations.append(made)
            indices[k] = made.index
            carry = list(ends)
        self.whole.update(zip(eqn.outputs, ends, strict=False))
        self.pieces.update(
            zip(eqn.outputs[params["num_carry"] :], stacked, strict=True)
        )
        return indices

    def shorter(
        self, eqn: Equation, length: int, read: Sequence[Atom], made: Sequence[int]
    ) -> Equation:
        """Returns a loop of fewer iterations, with new values and equations."""
        return Equation(
            self.builder.index(),
            eqn.source.replace(params={**eqn.params, "length": length}),
            tuple(read),
            tuple(made),
            eqn.name_stack,
            tuple(self.copy_region(r) for r in eqn.regions),
        )

    def copy_region(self, region: Region) -> Region:
        """Returns a copy of a body, with new values and equations."""
        values = (*region.inputs, *made_values(region.equations))
        own = {v: self.builder.like(self.program.values[v]) for v in values}
        index = self.builder.index
        return renumber_region(region, lambda v: own.get(v, v), lambda _: index())


def stacked_state(program: Program, carried: Mapping[int, int]) -> dict[int, int]:
    """Finds the carried arguments that are stacked layers.

    A top-level loop reads such an argument slice by slice, possibly after a conversion.
    An argument that is updated together with such an array element by element is
    included too.

    Args:
      program: the flat program of a step.
      carried: flat argument -> flat result that is its next value.

    Returns:
      Flat argument -> its number of layers, which is its first dimension.
    """
    comes_from = _sources(program, carried)
    found: dict[int, int] = {}
    for eqn in program.body.equations:
        if eqn.primitive == "scan" and eqn.params["length"] > 1:
            first = eqn.params["num_consts"] + eqn.params["num_carry"]
            for atom in eqn.inputs[first:]:
                if isinstance(atom, int) and atom in comes_from:
                    k = comes_from[atom]
                    found[k] = program.values[program.body.inputs[k]].shape[0]
    while found:
        splitter = Splitter(program, {k: (1, n - 1) for k, n in found.items()})
        splitter.run({carried[k]: k for k in found})
        more = {comes_from[v] for v in splitter.sliced if v in comes_from}
        more = {
            k
            for k in more - found.keys()
            if program.values[program.body.inputs[k]].shape[0] in found.values()
        }
        if not more:
            break
        for k in more:
            found[k] = program.values[program.body.inputs[k]].shape[0]
    return dict(sorted(found.items()))


def _sources(program: Program, carried: Mapping[int, int]) -> dict[int, int]:
    """Maps a value to the carried argument of which it is a copy or elementwise map."""
    values, arguments = program.values, program.body.inputs
    found = {arguments[k]: k for k in carried if values[arguments[k]].shape}
    for eqn in program.body.equations:
        if eqn.primitive == "slice" and isinstance(read := eqn.inputs[0], int):
            (made,) = eqn.outputs
            if read in found and values[read].shape[1:] == values[made].shape[1:]:
                # This value is a slice of the layer dimension.
                found[made] = found[read]
        if eqn.primitive not in POINTWISE or len(eqn.outputs) != 1:
            continue
        shape = values[eqn.outputs[0]].shape
        arrays = [a for a in eqn.arrays if values[a].shape == shape]
        if len(arrays) == 1 and arrays[0] in found:
            found[eqn.outputs[0]] = found[arrays[0]]
    return found
