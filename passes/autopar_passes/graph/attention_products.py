"""Finds the products of attention that a step writes out.

The search starts at a product whose result reaches an exponential of the same size, and
follows its scores, element by element, to the products that read them. The operands and
dimensions of these products give them their roles: two products belong to the forward
pass, and four to the backward pass, of which some may be missing.

Dimensions have labels: B0, B1, ... for batch dimensions of the product of queries and
keys, L0, ... and R0, ... for its other dimensions, C0 for the contracted one, and E for
the elements of values.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from autopar_passes.program.equal_leaves import ELEMENTWISE
from autopar_passes.program.equations import Atom, Equation, Region, Value
from autopar_passes.rules.blockwise import LAYOUTS, REDUCTIONS
from autopar_passes.rules.factor_rule import FactorRule

PRODUCT, IOTA, BARRIER = "dot_general", "iota", "optimization_barrier"
FOLLOWED = ELEMENTWISE | LAYOUTS | REDUCTIONS
# The labels of each dimension of a value; () for a dimension of size one.
Labels = tuple[tuple[str, ...], ...]


class RefusedError(Exception):
    """Attention that cannot be computed in blocks, with the reason."""


class NotAttentionError(Exception):
    """An exponential that is not a softmax between two products."""


class Search:
    """The equations of a region."""

    def __init__(
        self,
        region: Region,
        values: Sequence[Value],
        rules: Mapping[int, FactorRule],
    ) -> None:
        """Finds who computes and who reads each value.

        Args:
          region: the region.
          values: the values of the program.
          rules: the sharding rules, by equation.
        """
        self.region, self.values, self.rules = region, values, rules
        self.maker: dict[int, Equation] = {}
        self.readers: dict[int, list[Equation]] = collections.defaultdict(list)
        self.place = {eqn.index: k for k, eqn in enumerate(region.equations)}
        for eqn in region.equations:
            self.maker.update(dict.fromkeys(eqn.outputs, eqn))
            for value in dict.fromkeys(eqn.arrays):
                self.readers[value].append(eqn)
        self.keys: dict[int, Any] = {}

    def products(self) -> list[Equation]:
        """Products whose result reaches an exponential of the same size."""
        found: dict[int, Equation] = {}
        for eqn in self.region.equations:
            if eqn.primitive == "exp" and isinstance(eqn.inputs[0], int):
                size = self.values[eqn.inputs[0]].size
                behind = [p for p in self.behind(eqn.inputs[0]) if self.size(p) == size]
                found.update((p.index, p) for p in behind)
        return list(found.values())

    def size(self, eqn: Equation) -> int:
        """The number of elements of an equation's first result."""
        return self.values[eqn.outputs[0]].size

    def behind(self, value: int) -> list[Equation]:
        """The products that a value is computed from, without products between."""
        left, seen, found = [value], set[int](), list[Equation]()
        while left:
            value = left.pop()
            eqn = self.maker.get(value)
            if value in seen or eqn is None:
                continue
            seen.add(value)
            if eqn.primitive == PRODUCT:
                found.append(eqn)
            elif eqn.primitive == BARRIER:
                left.append(eqn.arrays[eqn.outputs.index(value)])
            elif eqn.primitive in FOLLOWED:
                left += eqn.arrays
        return found

    def key(self, value: int) -> Any:
        """Equal for values that equal operators compute from the same values."""
        if value not in self.keys:
            eqn = self.maker.get(value)
            made: Any = value
            if eqn is not None and eqn.primitive == BARRIER:
                made = self.key(eqn.arrays[eqn.outputs.index(value)])
            elif eqn is not None and (
                eqn.primitive in FOLLOWED or eqn.primitive == IOTA
            ):
                read = [
                    self.key(a) if isinstance(a, int) else (str(a.aval), str(a.value))
                    for a in eqn.inputs
                ]
                made = eqn.primitive, hashable(eqn.params), tuple(read)
            self.keys[value] = made
        return self.keys[value]

    def spread(self, eqn: Equation, known: dict[int, Labels]) -> None:
        """Labels the operands and results of an equation whose labels follow."""
        if eqn.primitive == BARRIER:
            for given, made in zip(eqn.inputs, eqn.outputs, strict=True):
                if isinstance(given, int):
                    for a, b in ((given, made), (made, given)):
                        if a in known:
                            known.setdefault(b, known[a])
            return
        rule = self.rules.get(eqn.index)
        if rule is None:
            return
        slots = [
            *zip(eqn.inputs, rule.operands, strict=True),
            *zip(eqn.outputs, rule.results, strict=True),
        ]
        label: dict[int, str] = {}
        for value, dims in slots:
            if not isinstance(value, int) or value not in known:
                continue
            for factors, names in zip(dims, known[value], strict=True):
                if len(factors) == len(names):
                    label.update(zip(factors, names, strict=True))
        for value, dims in slots:
            if not isinstance(value, int) or value in known:
                continue
            if all(f in label for factors in dims for f in factors):
                known[value] = tuple(tuple(label[f] for f in fs) for fs in dims)

    def read_labels(
        self, eqn: Equation, value: int, labels: Labels, known: Mapping[int, Labels]
    ) -> list[Labels]:
        """The labels of the operands of an equation, from those of a result.

        An array may be read several times, each time with other labels: positions that
        a mask compares belong to queries and to keys.

        Args:
          eqn: the equation.
          value: the result.
          labels: its labels.
          known: labels of operands, for the dimensions that a reduction removes.

        Raises:
          RefusedError: the labels do not follow.
        """
        if eqn.primitive == BARRIER:
            return [labels] * len(eqn.inputs)
        joined = RefusedError("dimensions of its scores are joined or split")
        rule, label = self.rules.get(eqn.index), dict[int, str]()
        if rule is None:
            raise joined
        for factors, names in zip(
            rule.results[eqn.outputs.index(value)], labels, strict=True
        ):
            if len(factors) == len(names):
                label.update(zip(factors, names, strict=True))
        found: list[Labels] = []
        for atom, dims in zip(eqn.inputs, rule.operands, strict=True):
            if eqn.primitive in REDUCTIONS and isinstance(atom, int) and atom in known:
                for factors, names in zip(dims, known[atom], strict=True):
                    for factor, name in zip(factors, names, strict=False):
                        label.setdefault(factor, name)
            if not all(f in label for factors in dims for f in factors):
                raise joined
            found.append(tuple(tuple(label[f] for f in fs) for fs in dims))
        return found


def hashable(params: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The parameters of an equation, sorted, as a key."""
    found: list[tuple[str, Any]] = []
    for name, value in sorted(params.items()):
        try:
            hash(value)
            found.append((name, value))
        except TypeError:
            found.append((name, repr(value)))
    return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True)
class _Dot:
    """The dimensions of a product, for one of its operands.

    Attributes:
      own: the operand's number, 0 or 1.
      batch: pairs of batch dimensions, of this operand and of the other one.
      summed: pairs of contracted dimensions.
      free: the other dimensions of this operand.
      others: the other dimensions of the other operand.
    """

    own: int
    batch: tuple[tuple[int, int], ...]
    summed: tuple[tuple[int, int], ...]
    free: tuple[int, ...]
    others: tuple[int, ...]

    def out(self, mine: Sequence[Any], theirs: Sequence[Any]) -> tuple[Any, ...]:
        """What the result has for each dimension, from what the operands have."""
        batch = [mine[a] for a, _ in self.batch]
        ends = [mine[d] for d in self.free], [theirs[d] for d in self.others]
        first, second = ends if self.own == 0 else ends[::-1]
        return (*batch, *first, *second)


def _dot(eqn: Equation, own: int, ranks: Sequence[int]) -> _Dot:
    (summed, other_summed), (batch, other_batch) = eqn.params["dimension_numbers"]
    pairs = tuple(zip(batch, other_batch, strict=True))
    sums = tuple(zip(summed, other_summed, strict=True))
    if own:
        pairs, sums = (tuple((b, a) for a, b in x) for x in (pairs, sums))
    mine, theirs = {a for a, _ in (*pairs, *sums)}, {b for _, b in (*pairs, *sums)}
    free = tuple(d for d in range(ranks[own]) if d not in mine)
    others = tuple(d for d in range(ranks[1 - own]) if d not in theirs)
    return _Dot(own, pairs, sums, free, others)


@dataclasses.dataclass(slots=True)
class Parts:
    """The products of one attention; None for those that it has not.

    Each is the equation, and the number of its operand that has scores.
    """

    out: tuple[Equation, int] | None = None
    of_query: tuple[Equation, int] | None = None
    of_key: tuple[Equation, int] | None = None
    of_value: tuple[Equation, int] | None = None
    of_weights: Equation | None = None


class Products:
    """The products of one attention.

    Attributes:
      search: the region.
      product: the product of queries and keys.
      labels: value -> the labels of its dimensions, for the scores and what is read and
        computed with them.
      parts: the other products.
      keys: the label of the positions of keys.
      queries: the label of the positions of queries.
      rows: the labels of the other dimensions of queries, with their positions.
      depth: the label of the elements of queries and keys.
      query: the queries; ``query_labels`` has their labels.
      key: the keys; ``key_labels`` has their labels.
    """

    def __init__(self, search: Search, product: Equation) -> None:
        """Finds the products.

        Raises:
          NotAttentionError: the product does not compute scores.
          RefusedError: it computes scores of attention that must stay as it is written.
        """
        self.search, self.product = search, product
        self.values, self.maker = search.values, search.maker
        self.labels: dict[int, Labels] = {}
        self.parts = Parts()
        self.keys = ""  # the label of the keys' positions
        self._label_product()
        touching = self._follow()
        self._find_parts(touching)
        self._refuse_stored()

    def _dims(self, value: int, names: Sequence[str]) -> Labels:
        shape = self.values[value].shape
        return tuple((n,) if s > 1 else () for n, s in zip(names, shape, strict=True))

    def _ranks(self, eqn: Equation) -> list[int]:
        return [
            len(self.values[a].shape) if isinstance(a, int) else 0 for a in eqn.inputs
        ]

    def _label_product(self) -> None:
        """Names the dimensions of the product: B batch, L and R free, C contracted."""
        eqn = self.product
        if len(eqn.arrays) != 2:
            raise NotAttentionError
        dot = _dot(eqn, 0, self._ranks(eqn))
        one, other = eqn.arrays
        left = [""] * self._ranks(eqn)[0]
        right = [""] * self._ranks(eqn)[1]
        for k, (a, b) in enumerate(dot.batch):
            left[a] = right[b] = f"B{k}"
        for k, (a, b) in enumerate(dot.summed):
            left[a] = right[b] = f"C{k}"
        for k, d in enumerate(dot.free):
            left[d] = f"L{k}"
        for k, d in enumerate(dot.others):
            right[d] = f"R{k}"
        self.sides = self._dims(one, left), self._dims(other, right)
        (made,) = eqn.outputs
        self.labels[made] = self._dims(made, dot.out(left, right))

    def _follow(self) -> list[tuple[Equation, int]]:
        """Follows scores forward; returns the products that read them."""
        (first,) = self.product.outputs
        size = self.values[first].size
        left, seen = [first], {first}
        touching: dict[tuple[int, int], tuple[Equation, int]] = {}
        self.reduced: set[str] = set()
        while left:
            value = left.pop()
            for eqn in self.search.readers[value]:
                if eqn.primitive == PRODUCT:
                    if self.values[value].size == size:
                        for k, a in enumerate(eqn.inputs):
                            if a == value:
                                touching[eqn.index, k] = (eqn, k)
                    continue
                if eqn.primitive not in FOLLOWED or value not in self.labels:
                    continue
                self.search.spread(eqn, self.labels)
                if eqn.primitive in REDUCTIONS and self.values[value].size == size:
                    axes = eqn.params["axes"]
                    names = {n for a in axes for n in self.labels[value][a]}
                    self.reduced |= names if len(names) == 1 else {"", *names}
                for made in eqn.outputs:
                    if made in self.labels and made not in seen:
                        seen.add(made)
                        left.append(made)
        return [touching[k] for k in sorted(touching)]

    def _find_parts(self, touching: Sequence[tuple[Equation, int]]) -> None:
        """Finds the roles of the products that read scores."""
        # The softmax adds up over keys, and a product with weights has no batch.
        known = [n for n in self.reduced if n and n[0] in "LR"]
        if not touching or not known:
            raise NotAttentionError
        if len(known) > 1 or any(not n or n[0] == "B" for n in self.reduced):
            raise RefusedError(
                "its scores or their gradients are reduced in several ways, as for "
                "gradients of a bias"
            )
        (self.keys,) = known
        side = 1 if self.keys[0] == "R" else 0
        free = [n for (n,) in filter(None, self.sides[side]) if n[0] in "LR"]
        rows = [n for (n,) in filter(None, self.sides[1 - side]) if n[0] in "LR"]
        self.query, self.key = (self.product.arrays[k] for k in (1 - side, side))
        self.query_labels, self.key_labels = self.sides[1 - side], self.sides[side]
        batch = [n for (n,) in filter(None, self.query_labels) if n[0] == "B"]
        if free != [self.keys] or not rows or not batch:
            raise NotAttentionError
        self.rows = rows
        parts = self.parts
        for eqn, own in touching:
            self._take(eqn, own)
        self._find_weights_gradient()
        if parts.out is None and parts.of_weights is None:
            raise NotAttentionError
        if parts.out is None and parts.of_value is None:
            raise NotAttentionError
        depth = [n for (n,) in filter(None, self.query_labels) if n[0] == "C"]
        if len(depth) != 1:
            raise RefusedError("queries and keys have several dimensions of elements")
        size = self.size(self.keys)
        alike = [n for n in self.rows if self.size(n) == size]
        if len(alike) != 1:
            raise RefusedError("queries and keys have different positions")
        (self.queries,) = alike
        self.depth = depth[0]

    def size(self, label: str) -> int:
        """The size of the dimensions with a label."""
        for value, labels in (
            (self.query, self.query_labels),
            (self.key, self.key_labels),
        ):
            for names, size in zip(labels, self.values[value].shape, strict=True):
                if names == (label,):
                    return size
        raise AssertionError(label)

    def _refuse_stored(self) -> None:
        """Refuses attention whose weights are results of the region.

        Raises:
          RefusedError: they are.
        """
        size = self.search.size(self.product)
        for value in self.search.region.outputs:
            if not isinstance(value, int) or self.values[value].size != size:
                continue
            if self.product in self.search.behind(value):
                raise RefusedError(
                    "the step, or a loop over its layers, stores its weights: put "
                    "jax.checkpoint around each layer"
                )

    def _summed(self, eqn: Equation, own: int) -> set[str]:
        dot = _dot(eqn, own, self._ranks(eqn))
        value = eqn.inputs[own]
        if not isinstance(value, int) or value not in self.labels:
            return set()
        return {n for a, _ in dot.summed for n in self.labels[value][a]}

    def _take(self, eqn: Equation, own: int) -> None:
        """Gives a product that reads scores its role."""
        names = self._summed(eqn, own)
        other = eqn.inputs[1 - own]
        parts = self.parts
        tainted = self.other_products(eqn.inputs[own])
        if names == {self.keys}:
            role = "of_query" if tainted else "out"
            right = other == self.key if tainted else True
        elif names == set(self.rows):
            role = "of_key" if tainted else "of_value"
            right = other == self.query if tainted else True
        else:
            raise RefusedError("a product reads its scores in another way")
        if not right or getattr(parts, role) is not None:
            raise RefusedError("several products read its scores")
        setattr(parts, role, (eqn, own))

    def other_products(self, value: Atom) -> list[Equation]:
        """Products of the size of scores behind a value, without that of the scores."""
        if not isinstance(value, int):
            return []
        size = self.search.size(self.product)
        return [
            p
            for p in self.search.behind(value)
            if p is not self.product and self.search.size(p) == size
        ]

    def _find_weights_gradient(self) -> None:
        parts = self.parts
        found: dict[int, Equation] = {}
        for part in (parts.of_query, parts.of_key):
            if part is not None:
                eqn, own = part
                found.update((p.index, p) for p in self.other_products(eqn.inputs[own]))
        if len(found) > 1:
            raise RefusedError("its scores are a sum of several products")
        for eqn in found.values():
            parts.of_weights = eqn

    def replaced(self) -> set[int]:
        """The equations of products that new equations replace."""
        parts = self.parts
        found = (parts.out, parts.of_query, parts.of_key, parts.of_value)
        return {p[0].index for p in found if p is not None}

    def names(self) -> list[str]:
        """All labels of queries and keys."""
        labels = (*self.query_labels, *self.key_labels)
        return sorted({n for names in labels for n in names})

    def side(self, part: tuple[Equation, int], free: str) -> tuple[int, Labels, Labels]:
        """The operand of a product beside the scores, its labels and the result's.

        Args:
          part: the product.
          free: the label of the operand's own dimension.
        """
        eqn, own = part
        dot = _dot(eqn, own, self._ranks(eqn))
        scores, other = eqn.inputs[own], eqn.inputs[1 - own]
        if not isinstance(scores, int) or not isinstance(other, int):
            raise RefusedError("an operand of a product is a constant")
        mine = self.labels[scores]
        theirs: list[tuple[str, ...]] = [()] * len(self.values[other].shape)
        for a, b in (*dot.batch, *dot.summed):
            theirs[b] = mine[a]
        large = [d for d in dot.others if self.values[other].shape[d] > 1]
        if len(large) != 1:
            raise RefusedError("an operand of a product has other dimensions")
        theirs[large[0]] = (free,)
        return other, tuple(theirs), dot.out(mine, theirs)

    def _weights_gradient(self) -> tuple[tuple[int, Labels], tuple[int, Labels]]:
        """The operands of the gradient of the weights: the output's, and the values."""
        eqn = self.parts.of_weights
        assert eqn is not None
        made = self.labels[eqn.outputs[0]]
        sides: list[tuple[int, Labels]] = []
        for own in range(2):
            dot = _dot(eqn, own, self._ranks(eqn))
            value = eqn.inputs[own]
            assert isinstance(value, int)
            shape = self.values[value].shape
            if len([a for a, _ in dot.summed if shape[a] > 1]) != 1:
                raise RefusedError("values have several dimensions of elements")
            # Where each dimension of the operand is in the result.
            at = dot.out(range(len(shape)), [-1] * self._ranks(eqn)[1 - own])
            labels: list[tuple[str, ...]] = [()] * len(shape)
            for names, d in zip(made, at, strict=True):
                if d >= 0:
                    labels[d] = names
            for a, _ in dot.summed:
                labels[a] = ("E",) if shape[a] > 1 else ()
            sides.append((value, tuple(labels)))
        with_keys = [x for x in sides if (self.keys,) in x[1]]
        others = [x for x in sides if (self.keys,) not in x[1]]
        if len(with_keys) != 1:
            raise RefusedError("the gradient of its weights is another product")
        return others[0], with_keys[0]

    def value(self) -> tuple[int, Labels]:
        """The values, and their labels."""
        found: list[tuple[int, Labels]] = []
        if self.parts.out is not None:
            found.append(self.side(self.parts.out, "E")[:2])
        if self.parts.of_weights is not None:
            found.append(self._weights_gradient()[1])
        if any(x != found[0] for x in found):
            raise RefusedError("the backward pass reads other values")
        if not found:
            raise RefusedError("its values are not known")
        return found[0]

    def gradient(self) -> tuple[int, Labels]:
        """The gradient of the output, and its labels."""
        found: list[tuple[int, Labels]] = []
        if self.parts.of_value is not None:
            found.append(self.side(self.parts.of_value, "E")[:2])
        if self.parts.of_weights is not None:
            found.append(self._weights_gradient()[0])
        if any(x != found[0] for x in found):
            raise RefusedError("the backward pass reads several gradients")
        return found[0]

    def out_labels(self) -> Labels:
        """The labels of the output."""
        if self.parts.out is not None:
            return self.side(self.parts.out, "E")[2]
        return self.gradient()[1]
