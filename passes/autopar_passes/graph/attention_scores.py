"""Proves that a step computes a softmax of scores, and finds how it computes scores.

The operators between the products of attention run on random arrays of small sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar_passes.graph.attention_products import (
    BARRIER,
    FOLLOWED,
    IOTA,
    Labels,
    Products,
    RefusedError,
    hashable,
)
from autopar_passes.graph.score_masks import hidden_differences, holds, is_causal
from autopar_passes.program.equal_leaves import ELEMENTWISE
from autopar_passes.program.equations import Atom, Equation, Scalar
from autopar_passes.program.flatten import Builder
from autopar_passes.rules import blockwise
from autopar_passes.rules.blockwise import (
    LAYOUTS,
    REDUCTIONS,
    Constant,
    ScoreMap,
    Step,
)

# Sizes of (b, g, q, k) for which equations are compared.
_SIZES = (2, 2, 5, 6)
# The standard deviations of scores. Wide scores have weights from 0 to 1, so that a
# limit on weights, or a small number that is added to a sum, is seen.
_SPREADS = (1.0, 30.0)
# The largest differences in float64: relative, and as a share of a row's gradient.
_TOLERANCE, _ROUNDING = 1e-6, 1e-12
# The shares of keys that a random mask keeps in a row: rows may be hidden altogether.
_KEPT = (0.0, 0.5, 0.8, 1.0)
_SOFTMAX_BITS = 32
# The magnitudes of a row's gradient, as powers of ten: a limit on gradients is seen.
_MAGNITUDES = (-6.0, 6.0)


# What was compared -> whether it agreed.
Checked = dict[Any, bool]


def find_scores(products: Products, checked: Checked) -> Scores:
    """Returns how scores are computed, after a comparison with a softmax.

    Args:
      products: the products of an attention.
      checked: the comparisons so far; the function adds to them.

    Raises:
      RefusedError: the step computes something else than a softmax, or its gradient.
    """
    parts, steps = products.parts, _Slice(products)
    if parts.of_weights is not None:
        steps.stop_at_gradient(parts.of_weights)
    weights = [p for p in (parts.out, parts.of_value) if p is not None]
    tainted = [p for p in (parts.of_query, parts.of_key) if p is not None]
    ends = [[steps.of(e.inputs[own]) for e, own in x] for x in (weights, tainted)]
    for operand in _operands_of_softmax(products):
        dtype = products.values[operand].dtype
        made = steps.of(operand)
        check = tuple(steps.steps), tuple(steps.shapes()), made, *map(tuple, ends)
        if check not in checked:
            checked[check] = _agrees(steps, made, *ends)
        if not checked[check]:
            continue
        wide = [
            products.values[products.query].dtype,
            products.values[products.product.outputs[0]].dtype,
        ]
        for own in [dtype, *(x for x in wide if jnp.finfo(x).bits > _SOFTMAX_BITS)]:
            if jnp.finfo(own).bits != _SOFTMAX_BITS:
                raise RefusedError(f"its softmax is computed in {own}")
        return Scores(products, operand)
    raise RefusedError(
        "what is computed between its products is not a softmax, or not the "
        "gradient of one"
    )


def _operands_of_softmax(products: Products) -> list[int]:
    """Operands of exponentials, before a maximum is subtracted."""
    (first,) = products.product.outputs
    size = products.values[first].size
    found: list[int] = []
    for eqn in products.search.region.equations:
        if eqn.primitive != "exp" or eqn.outputs[0] not in products.labels:
            continue
        value = eqn.inputs[0]
        if not isinstance(value, int) or products.values[value].size != size:
            continue
        made = products.maker.get(value)
        if made is not None and made.primitive == "sub":
            one = made.inputs[0]
            if isinstance(one, int) and products.values[one].size == size:
                found.append(one)
        found.append(value)
    return [v for v in dict.fromkeys(found) if v in products.labels]


def _axis(label: str, group: Products) -> int:
    """The place of a dimension in (b, g, q, k)."""
    if label == group.keys:
        return 3
    if label == group.queries:
        return 2
    return 0 if label[0] == "B" else 1


class _Slice:
    """The operators between scores and other values, as steps on (b, g, q, k)."""

    def __init__(self, group: Products) -> None:
        self.group = group
        (first,) = group.product.outputs
        self.given: dict[Any, int] = {}
        self.arrays: list[tuple[Labels, Any]] = []
        self.steps: list[tuple[Any, ...]] = []
        # Values, with the labels with which they are read.
        self.known: dict[tuple[int, Labels], Any] = {}
        self.products = {first}
        self._leaf(first, group.labels[first], "scores")

    def _leaf(self, value: int, labels: Labels, key: Any) -> Any:
        names = tuple(n for dims in labels for n in dims)
        number = self.given.setdefault((key, names), len(self.given))
        if number == len(self.arrays):
            self.arrays.append((labels, self.group.values[value].dtype))
        self.known[value, labels] = ("given", number)
        return self.known[value, labels]

    def stop_at_gradient(self, product: Equation) -> None:
        """Lets slices end at the gradient of the weights."""
        (made,) = product.outputs
        (scores,) = self.group.product.outputs
        self._label(made)
        if made not in self.group.labels or _set(self.group.labels[made]) != _set(
            self.group.labels[scores]
        ):
            raise RefusedError("the gradient of its weights has other dimensions")
        self.products.add(made)
        self._leaf(made, self.group.labels[made], "gradient")

    def _label(self, value: int) -> None:
        """Labels a value from its readers."""
        labels, left, seen = self.group.labels, [value], list[int]()
        while left:
            last = left.pop()
            if last in labels:
                continue
            seen.append(last)
            for eqn in self.group.search.readers[last]:
                if eqn.primitive in FOLLOWED:
                    self.group.search.spread(eqn, labels)
                    left += [] if last in labels else eqn.outputs
        for last in reversed(seen):
            for eqn in self.group.search.readers[last]:
                if eqn.primitive in FOLLOWED:
                    self.group.search.spread(eqn, labels)

    def of(self, atom: Atom) -> Any:
        """The number of a value of known labels, as an operand of steps."""
        if isinstance(atom, Scalar):
            return _constant(atom)
        if atom not in self.group.labels:
            raise RefusedError("dimensions of its scores are joined or split")
        return self._of(atom, self.group.labels[atom])

    def _of(self, atom: Atom, own: Labels) -> Any:
        if isinstance(atom, Scalar):
            return _constant(atom)
        if (atom, own) in self.known:
            return self.known[atom, own]
        if atom in self.products:
            raise RefusedError("its scores are read in several orders of dimensions")
        group, labels = self.group, self.group.labels
        eqn = group.maker.get(atom)
        if eqn is not None and eqn.primitive == BARRIER:
            made = self._of(eqn.inputs[eqn.outputs.index(atom)], own)
            self.known[atom, own] = made
            return made
        if (
            eqn is None
            or eqn.primitive not in FOLLOWED
            or not (eqn.primitive in LAYOUTS or self._reaches(atom))
        ):
            return self._leaf(atom, own, group.search.key(atom))
        given = group.search.read_labels(eqn, atom, own, labels)
        read = tuple(map(self._of, eqn.inputs, given))
        axes: tuple[int, ...] = ()
        if eqn.primitive in REDUCTIONS:
            names = [n for a in eqn.params["axes"] for n in given[0][a]]
            axes = tuple(_axis(n, group) for n in names)
            if axes not in ((), (3,)):
                raise RefusedError("its scores are reduced in several ways")
        # Reductions of dimensions of size one do nothing.
        if eqn.primitive in LAYOUTS or (eqn.primitive in REDUCTIONS and not axes):
            self.known[atom, own] = read[0]
            return read[0]
        self.steps.append((eqn.source.primitive, hashable(eqn.params), read, axes))
        self.known[atom, own] = ("step", len(self.steps) - 1)
        return self.known[atom, own]

    def _reaches(self, value: int) -> bool:
        size = self.group.search.size(self.group.product)
        behind = self.group.search.behind(value)
        return any(self.group.search.size(p) == size for p in behind)

    def shapes(self) -> list[tuple[tuple[int, ...], str]]:
        """The shape and the dtype of each given array, for small sizes."""
        found: list[tuple[tuple[int, ...], str]] = []
        for labels, dtype in self.arrays:
            axes = {_axis(n, self.group) for n in _set(labels)}
            shape = tuple(n if a in axes else 1 for a, n in enumerate(_SIZES))
            found.append((shape, str(dtype)))
        return found

    def numbered(self) -> list[Step]:
        """The steps, whose operands are numbered after the given arrays."""
        first = len(self.arrays)

        def number(x: Any) -> Any:
            if isinstance(x, Constant):
                return x
            return x[1] if x[0] == "given" else first + x[1]

        return [
            Step(p, params, tuple(map(number, read)), axes)
            for p, params, read, axes in self.steps
        ]

    def place(self, ref: Any) -> int:
        """The number of a value among given arrays and steps."""
        if isinstance(ref, Constant):
            raise RefusedError("its scores are constant")
        return ref[1] if ref[0] == "given" else len(self.arrays) + ref[1]


def _set(labels: Labels) -> frozenset[str]:
    return frozenset(n for names in labels for n in names)


def _constant(atom: Scalar) -> Constant:
    return Constant(np.asarray(atom.value).item(), str(atom.aval.dtype))


def _agrees(
    steps: _Slice, operand: Any, weights: Sequence[Any], tainted: Sequence[Any]
) -> bool:
    """Whether weights are a softmax of an operand, and gradients its gradients.

    A row whose scores are all ``-inf`` may have any weights that are NaN or 0.
    """
    shapes, program = steps.shapes(), steps.numbered()
    at, sizes = steps.place(operand), shapes[0][0]
    numbers = {key: n for (key, _), n in steps.given.items()}

    def run(scores: Any, given: Sequence[Any]) -> list[Any]:
        made = blockwise.run_steps(program, [scores, *given[1:]], sizes, wide=True)
        return [jnp.broadcast_to(x, sizes) for x in made]

    @jax.jit
    def compare(given: Sequence[Any]) -> list[Any]:
        made = run(given[0], given)
        dead = (made[at] == -jnp.inf).all(-1, keepdims=True)
        expected, pull = jax.vjp(
            lambda x: jax.nn.softmax(run(x, given)[at], axis=-1), given[0]
        )
        pairs = [(made[steps.place(x)], expected, 1.0) for x in weights]
        if tainted:
            gradient = given[numbers["gradient"]]
            most = jnp.abs(gradient).max(-1, keepdims=True)
            (found,) = pull(jnp.broadcast_to(gradient, sizes))
            pairs += [(made[steps.place(x)], found, most) for x in tainted]

        def seen(x: Any) -> Any:
            return jnp.where(dead & jnp.isnan(x), 0.0, x)

        close = [
            (jnp.abs(seen(x) - seen(y)) <= _ROUNDING * most + _TOLERANCE * jnp.abs(y))
            | (seen(x) == seen(y))
            for x, y, most in pairs
        ]
        return [x.all() for x in close]

    random = np.random.default_rng(0)
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu), jax.enable_x64(True):
        for spread in _SPREADS * 2:
            given = [_random(random, *x) for x in shapes]
            rows = random.standard_normal((*sizes[:3], 1))
            given[0] = spread * (given[0] + rows)
            if tainted:
                n = numbers["gradient"]
                given[n] = given[n] * 10.0 ** random.uniform(*_MAGNITUDES, rows.shape)
            if not all(map(bool, compare(given))):
                return False
    return True


def _random(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    kind = jnp.dtype(dtype)
    if kind == np.bool_:
        return random.random(shape) < random.choice(_KEPT, (*shape[:-1], 1))
    if jnp.issubdtype(kind, jnp.floating):
        return random.standard_normal(shape)
    return random.integers(0, 5, shape).astype(kind)


class Scores:
    """The operators from the product of queries and keys to the softmax.

    Attributes:
      map: the operators.
      hidden: see `autopar_passes.graph.score_masks.hidden_differences`.
      only_positions: whether they read no arrays but positions.
    """

    def __init__(self, group: Products, operand: int) -> None:
        """Follows the operand of the softmax back to the product.

        Raises:
          RefusedError: scores read what blocks cannot have.
        """
        self.group = group
        self.leaves: dict[Any, int] = {}
        self.steps: list[tuple[Any, ...]] = []
        (product,) = group.product.outputs
        # Values, with the labels with which they are read.
        self.known: dict[tuple[int, Labels], Any] = {}
        self.known[product, group.labels[product]] = ("leaf", 0)
        self.leaves["product"] = 0
        end = self._of(operand, group.labels[operand])
        first = len(self.leaves)

        def number(x: Any) -> Any:
            if isinstance(x, Constant):
                return x
            return x[1] if x[0] == "leaf" else first + x[1]

        steps = tuple(
            Step(p, params, tuple(map(number, read))) for p, params, read in self.steps
        )
        if isinstance(end, Constant):
            raise RefusedError("its scores are constant")
        places = {n: key for key, n in self.leaves.items()}
        leaves = [_position(places[n], group) for n in range(first)]
        size = group.size(group.keys)
        self.hidden = hidden_differences(steps, leaves, number(end), size)
        self.map = ScoreMap(steps, number(end), is_causal(self.hidden))
        self.only_positions = "" not in leaves

    def _of(self, atom: Atom, own: Labels) -> Any:
        if isinstance(atom, Scalar):
            return _constant(atom)
        if (atom, own) in self.known:
            return self.known[atom, own]
        group = self.group
        eqn = group.maker.get(atom)
        if eqn is group.product:
            raise RefusedError("its scores are read in several orders of dimensions")
        pairs = {group.keys, group.queries} <= _set(own)
        followed = eqn is not None and eqn.primitive in ELEMENTWISE | LAYOUTS
        if eqn is not None and eqn.primitive == IOTA:
            shape = own[eqn.params["dimension"]]
            if len(shape) == 1:
                key = ("iota", *shape, str(eqn.params["dtype"]))
                return self._leaf(atom, own, key)
        floating = group.values[atom].floating
        if not followed and pairs:
            what = "an input" if eqn is None else f"'{eqn.primitive}'"
            raise RefusedError(
                f"it reads an array from {what} with an entry for each pair of tokens"
            )
        if not followed or (floating and not pairs and not self._constant(atom)):
            return self._leaf(atom, own, ("value", atom, own))
        assert eqn is not None
        if eqn.primitive == BARRIER:
            made = self._of(eqn.inputs[eqn.outputs.index(atom)], own)
            self.known[atom, own] = made
            return made
        given = group.search.read_labels(eqn, atom, own, group.labels)
        read = tuple(map(self._of, eqn.inputs, given))
        if eqn.primitive in LAYOUTS:
            self.known[atom, own] = read[0]
            return read[0]
        self.steps.append((eqn.source.primitive, hashable(eqn.params), read))
        self.known[atom, own] = ("step", len(self.steps) - 1)
        return self.known[atom, own]

    def _constant(self, value: int) -> bool:
        """Whether a value depends on constants in the program only."""
        left = [value]
        while left:
            eqn = self.group.maker.get(left.pop())
            if eqn is None or eqn.primitive not in ELEMENTWISE | LAYOUTS:
                return False
            left += eqn.arrays
        return True

    def _leaf(self, value: int, labels: Labels, key: Any) -> Any:
        number = self.leaves.setdefault(key, len(self.leaves))
        self.known[value, labels] = ("leaf", number)
        return self.known[value, labels]

    def operands(
        self, builder: Builder, named: Any, parted: Callable[[int, Labels], int]
    ) -> tuple[list[Equation], list[int], list[tuple[str, ...]]]:
        """Equations to add, and the arrays that scores read, with their labels.

        Args:
          builder: gives new values and equations their numbers.
          named: gives labels the names of a `autopar_passes.rules.blockwise.Form`.
          parted: returns an array with split heads.
        """
        equations: list[Equation] = []
        arrays: list[int] = []
        labels: list[tuple[str, ...]] = []
        for key in list(self.leaves)[1:]:
            if key[0] == "value":
                arrays.append(parted(key[1], key[2]))
                labels.append(named(key[2]))
                continue
            _, label, dtype = key
            size = self.group.size(label)
            closed = jax.make_jaxpr(lambda n=size, t=dtype: jax.lax.iota(t, n))()
            value = builder.value((size,), jnp.dtype(dtype))
            stack = self.group.product.name_stack
            equations.append(
                Equation(builder.index(), closed.jaxpr.eqns[0], (), (value,), stack)
            )
            arrays.append(value)
            labels.append(named(((label,),)))
        return equations, arrays, labels


def _position(key: Any, group: Products) -> str:
    """What a leaf is: 'product', 'q' or 'k' for positions, '' for anything else."""
    if key == "product":
        return key
    if key[0] == "iota" and holds(key[2], group.size(key[1])):
        return {group.keys: "k", group.queries: "q"}.get(key[1], "")
    return ""
