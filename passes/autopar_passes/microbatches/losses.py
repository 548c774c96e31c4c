"""Finds losses that can be computed in blocks of tokens.

Nothing is matched against a pattern. The search starts from a product with large
results, and follows its dimension of tokens by the sharding rules. Every operator that
reads or computes an array of logits is in the loop over blocks, and every operator
between two of these. An operator in the loop either computes each token alone, or adds
up tokens, and then only the rest of the step reads the sum. All other losses are
refused with a reason.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from autopar_passes.graph.ring_order import reads_no_positions
from autopar_passes.microbatches.facts import Rows, place_of
from autopar_passes.program.equations import (
    Equation,
    Program,
    Region,
    Value,
    reads,
    walk,
)
from autopar_passes.program.flatten import barrier_equation
from autopar_passes.rules.factor_rule import Dims, FactorKind, FactorRule

# An array counts as logits if it has at least this share of the elements of the
# product's result: a step may cut off words that only pad the vocabulary.
LARGE = 0.5
# The vocabulary is at least so many times as large as a hidden state. A reduction over
# the vocabulary makes an array at least so many times smaller.
_WIDER, _REDUCED = 2, 8
# Primitives that reduce or search the words of each token.
_REDUCTIONS = frozenset({"reduce_max", "reduce_sum", "argmax", "top_k", "sort"})
# Further primitives that compute each token alone if their rule passes the tokens.
_ALONE = frozenset(
    {"sort", "top_k", "cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp"}
)
# Primitives that take a part of an array.
_CUTS = frozenset({"slice", "dynamic_slice", "gather", "split"})
# Primitives that add up the elements of their operands.
_SUMS = frozenset({"dot_general", "reduce_sum"})


class _RefusedError(Exception):  # no error of the user: ends the search of one loss
    """A loss cannot be computed in blocks of tokens; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class FoundLosses:
    """The losses of a program that can be computed in blocks of tokens.

    Attributes:
      elements: the number of elements of the largest logits; 0 if there are none.
      words: the number of logits of a token.
      tokens: the number of blocks must divide this number of tokens, which is the size
        of one dimension; 0 if there are no logits.
      refused: why the loss is computed for all tokens at once, or not in blocks of the
        largest dimension of tokens.
    """

    elements: int = 0
    words: int = 0
    tokens: int = 0
    refused: tuple[str, ...] = ()


def find_losses(
    program: Program, rules: Mapping[int, FactorRule], least: float = 0.0
) -> FoundLosses:
    """Finds the losses that can be computed in blocks of tokens.

    Args:
      program: a flat program.
      rules: the sharding rules, by equation.
      least: the number of elements that the largest logits have at least.
    """
    found: list[Loss] = []
    refused: dict[str, None] = {}
    for region in _regions(program.body):
        search = LossSearch(region, program.values, rules)
        for loss in search.losses(LARGE * least, refused):
            found.append(loss)
            least = max(least, loss.elements)
    kept = _largest(found)
    if not kept:
        return FoundLosses(refused=tuple(refused))
    return FoundLosses(
        max(loss.elements for loss in kept),
        max(loss.words for loss in kept),
        math.gcd(*(loss.groups for loss in kept)),
        tuple(dict.fromkeys(loss.reason for loss in kept if loss.reason)),
    )


def _regions(body: Region) -> list[Region]:
    """A region, and all regions within it."""
    return [body, *(r for eqn in walk(body) for r in eqn.regions)]


def _largest(found: Sequence[Loss]) -> list[Loss]:
    """The losses whose logits are about as large as the largest ones."""
    most = max((loss.elements for loss in found), default=0)
    return [loss for loss in found if loss.elements >= LARGE * most]


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """A loss that can be computed in blocks of tokens.

    Attributes:
      equations: the equations of the loop, in program order.
      rows: value -> where its tokens are. Other values that the equations read are the
        same for all tokens.
      sums: values that are sums over tokens.
      waiting: barriers on other values, by the index of a barrier of the loop that also
        has these values.
      elements: the number of elements of the logits.
      words: the number of logits of a token.
      groups: the number of blocks must divide this number of groups of tokens.
      reason: why the largest dimension of tokens is not cut; '' if it is.
    """

    equations: tuple[Equation, ...]
    rows: Mapping[int, Rows]
    sums: frozenset[int]
    waiting: Mapping[int, Equation]
    elements: int
    words: int
    groups: int
    reason: str = ""


class LossSearch:
    """The search for losses among the equations of one region."""

    def __init__(
        self,
        region: Region,
        values: Sequence[Value],
        rules: Mapping[int, FactorRule],
    ) -> None:
        """Indexes the equations by the values that they read and compute.

        Args:
          region: the region.
          values: the values of the program.
          rules: the sharding rules, by equation.
        """
        self.region, self.values, self.rules = region, values, rules
        self.maker: dict[int, Equation] = {}
        self.readers: dict[int, list[Equation]] = collections.defaultdict(list)
        for eqn in region.equations:
            self.maker.update(dict.fromkeys(eqn.outputs, eqn))
            for value in reads(eqn):
                self.readers[value].append(eqn)

    def losses(
        self, least: float, refused: dict[str, None] | None = None
    ) -> Iterator[Loss]:
        """Yields the losses of the region, those with the largest logits first.

        Args:
          least: the number of elements that logits have at least. Logits with much
            fewer elements than others of the region are left out, too.
          refused: gets the reasons why losses are left as they are.
        """
        seen: set[int] = set()
        for product in sorted(self.products(), key=self.elements, reverse=True):
            elements = self.elements(product)
            if elements < least:
                return
            if product.index in seen:
                continue
            loss = self.loss(product, {} if refused is None else refused)
            if loss is not None:
                seen.update(eqn.index for eqn in loss.equations)
                least = max(least, LARGE * elements)
                yield loss

    def elements(self, eqn: Equation) -> int:
        """The number of elements of the first result of an equation."""
        return self.values[eqn.outputs[0]].size

    def products(self) -> list[Equation]:
        """Products with a matrix whose results are larger than the other operand."""
        return [
            eqn
            for eqn in self.region.equations
            if eqn.primitive == "dot_general"
            and len(eqn.arrays) == 2
            and not eqn.params["dimension_numbers"][1][0]
            and self.values[eqn.outputs[0]].floating
            and any(self._sides(eqn))
        ]

    def _sides(self, eqn: Equation) -> list[list[int]]:
        """For each operand that may hold hidden states, its dims in the result.

        The first is the operand with more dims, and each has its largest dim first.
        """
        ranks = [len(self.values[a].shape) for a in eqn.arrays]
        contracted, _ = eqn.params["dimension_numbers"]
        shape = self.values[eqn.outputs[0]].shape
        free = [r - len(c) for r, c in zip(ranks, contracted, strict=True)]
        dims = [range(free[0]), range(free[0], free[0] + free[1])]
        sides = sorted((0, 1), key=lambda k: (-ranks[k], k))
        return [
            sorted((d for d in dims[k] if shape[d] > 1), key=lambda d: (-shape[d], -d))
            for k in sides
            if self.values[eqn.arrays[k]].size * _WIDER <= self.elements(eqn)
        ]

    def loss(self, product: Equation, refused: dict[str, None]) -> Loss | None:
        """The loss of the logits that a product computes; None if there is none."""
        reason = ""
        for side, dims in enumerate(self._sides(product)):
            for k, dim in enumerate(dims):
                try:
                    found = _Tokens(self, product, dim).loss()
                except _NoLossError:
                    continue
                except _RefusedError as error:
                    if side == k == 0:
                        reason = str(error)
                        refused[reason] = None
                    continue
                shape = self.values[product.outputs[0]].shape
                words = self.elements(product) // math.prod(shape[d] for d in dims)
                return dataclasses.replace(found, words=words, reason=reason)
        return None

    def between(self, core: Iterable[int], logits: Collection[int]) -> list[Equation]:
        """The equations of a set, and all equations between two of these, in order.

        Args:
          core: indices of the equations that read or compute logits.
          logits: these values. The other values of a barrier do not depend on them.
        """
        core, known = set(core), set(logits)
        after, values = set[int](), set[int]()
        for eqn in self.region.equations:
            for read, made in _independent(eqn):
                if not values.isdisjoint(read) or (
                    eqn.index in core and not known.isdisjoint((*read, *made))
                ):
                    after.add(eqn.index)
                    values.update(made)
        before, values = set[int](), set[int]()
        for eqn in reversed(self.region.equations):
            for read, made in _independent(eqn):
                if not values.isdisjoint(made) or (
                    eqn.index in core and not known.isdisjoint((*read, *made))
                ):
                    before.add(eqn.index)
                    values.update(read)
        return [e for e in self.region.equations if e.index in after & before]

    def around(
        self, loop: Sequence[Equation], waiting: Mapping[int, Equation]
    ) -> tuple[list[Equation], list[Equation]]:
        """The other equations of the region, before and after a loop of equations.

        The loop is where its last equation is. Equations before this place that read
        results of the loop come after it.

        Args:
          loop: the equations of the loop.
          waiting: barriers that stand in place of some of them, by index.
        """
        inside = {eqn.index for eqn in loop}
        later = {v for eqn in loop for v in eqn.outputs}
        last = max(k for k, e in enumerate(self.region.equations) if e.index in inside)
        before: list[Equation] = []
        after: list[Equation] = []
        for eqn in self.region.equations[: last + 1]:
            if eqn.index in inside and eqn.index not in waiting:
                continue
            eqn = waiting.get(eqn.index, eqn)
            # Side effects keep their order.
            effects = bool(eqn.source.effects) and any(e.source.effects for e in after)
            late = effects or not later.isdisjoint(reads(eqn))
            (after if late else before).append(eqn)
            later.update(eqn.outputs if late else ())
        return before, [*after, *self.region.equations[last + 1 :]]


def _independent(eqn: Equation) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What an equation reads and computes, for each part that is independent."""
    if eqn.primitive != "optimization_barrier":
        return [(reads(eqn), eqn.outputs)]
    pairs = zip(eqn.inputs, eqn.outputs, strict=True)
    return [((a,) if isinstance(a, int) else (), (v,)) for a, v in pairs]


class _NoLossError(Exception):  # no error of the user: ends the search of one loss
    """The results of a product are no logits."""


class _Tokens:
    """Follows one dimension of the logits through the operators of a loss."""

    def __init__(self, search: LossSearch, product: Equation, dim: int) -> None:
        self.search, self.values, self.product = search, search.values, product
        (self.logits,) = product.outputs
        self.least = LARGE * self.values[self.logits].size
        self.rows: dict[int, Rows] = {self.logits: Rows(dim)}
        self.sums: set[int] = set()
        self.groups = self.values[self.logits].shape[dim]
        self.reduced = False
        self.cut: Equation | None = None

    def loss(self) -> Loss:
        """The loss.

        Raises:
          _NoLossError: the results of the product are no logits.
          _RefusedError: the loss cannot be computed in blocks.
        """
        core = self.flood()
        if not self.reduced:
            if self.cut is None:
                raise _NoLossError
            raise _RefusedError(f"{place_of(self.cut)} takes some of the tokens")
        equations, waiting = self.without_others(self.search.between(core, self.rows))
        made = {v for eqn in equations for v in eqn.outputs}
        # The second time, the places of all values that come from outside are known.
        for eqn in (*equations, *equations):
            self.follow(eqn, made)
        self.check_results(made)
        _, after = self.search.around(equations, waiting)
        late = {v for eqn in after for v in eqn.outputs}
        for eqn in equations:
            if not late.isdisjoint(eqn.arrays):
                raise _RefusedError(f"a barrier before {place_of(eqn)} waits for it")
        return Loss(
            tuple(equations),
            self.rows,
            frozenset(self.sums),
            waiting,
            self.values[self.logits].size,
            0,
            self.groups,
        )

    def is_large(self, value: int) -> bool:
        return self.values[value].size >= self.least

    def flood(self) -> set[int]:
        """The equations that read or compute logits; places tokens in all logits."""
        core: set[int] = set()
        waiting = [self.logits]
        while waiting:
            value = waiting.pop()
            maker = self.search.maker.get(value)
            around = [*([] if maker is None else [maker]), *self.search.readers[value]]
            for eqn in around:
                core.add(eqn.index)
                placed = list(self.places(eqn, value))
                if eqn.primitive in _CUTS and eqn.inputs[0] == value:
                    kept = any(v in eqn.outputs for v, _ in placed)
                    self.cut = self.cut if kept else eqn
                for other, rows in placed:
                    self.reduced |= self.is_reduction(eqn, value, other)
                    if self.is_large(other) and other not in self.rows:
                        self.rows[other] = rows
                        waiting.append(other)
        return core

    def without_others(
        self, equations: Sequence[Equation]
    ) -> tuple[list[Equation], dict[int, Equation]]:
        """Takes values out of barriers that the loop neither computes nor cuts.

        Returns:
          The equations, and barriers on the values that are taken out, by index.
        """
        made, kept = set[int](), list[Equation]()
        waiting: dict[int, Equation] = {}
        for eqn in equations:
            if eqn.primitive == "optimization_barrier":
                pairs = list(zip(eqn.inputs, eqn.outputs, strict=True))
                own = [
                    p
                    for p in pairs
                    if p[0] in made or not self.rows.keys().isdisjoint(p)
                ]
                others = [p for p in pairs if p not in own]
                if others:
                    waiting[eqn.index] = self.barrier(eqn, others)
                    eqn = self.barrier(eqn, own)
            kept.append(eqn)
            made.update(eqn.outputs)
        return kept, waiting

    def barrier(self, eqn: Equation, pairs: Sequence[tuple[Any, int]]) -> Equation:
        """A barrier on some of the values of a barrier."""
        inputs, outputs = zip(*pairs, strict=True)
        source = barrier_equation([self.values[v] for v in outputs])
        return dataclasses.replace(eqn, source=source, inputs=inputs, outputs=outputs)

    def is_reduction(self, eqn: Equation, value: int, other: int) -> bool:
        """Whether an equation reduces the words of each token."""
        smaller = self.values[other].size * _REDUCED <= self.values[value].size
        return eqn.primitive in _REDUCTIONS and value in eqn.arrays and smaller

    def places(self, eqn: Equation, value: int) -> Iterator[tuple[int, Rows]]:
        """The values of an equation that have a value's tokens, and where."""
        rows = self.rows[value]
        if eqn.primitive == "optimization_barrier":
            for pair in zip(eqn.inputs, eqn.outputs, strict=True):
                if value in pair:
                    yield from ((v, rows) for v in pair if isinstance(v, int))
        elif eqn.primitive == "reshape":
            (other,) = {*eqn.arrays, *eqn.outputs} - {value}
            found = self.reshaped(self.values[value].shape, rows, other)
            if found is not None:
                yield other, found
        elif eqn.index in self.search.rules and not eqn.regions:
            rule = self.search.rules[eqn.index]
            slots = list(_slots(eqn, rule))
            factors = {dims[rows.dim] for v, dims in slots if v == value}
            for other, dims in slots:
                for dim, of in enumerate(dims):
                    if of in factors and len(of) == 1:
                        yield other, Rows(dim, rows.inner)

    def reshaped(self, shape: tuple[int, ...], rows: Rows, to: int) -> Rows | None:
        """Where the tokens of an array of a shape are in a reshaped array."""
        together = rows.inner * math.prod(shape[rows.dim + 1 :])
        after = self.values[to].shape
        for dim, size in enumerate(after):
            behind = math.prod(after[dim + 1 :])
            if behind <= together < size * behind and together % behind == 0:
                inner = together // behind
                if size % inner:
                    return None
                self.groups = math.gcd(self.groups, size // inner)
                return Rows(dim, inner)
        return None

    def follow(self, eqn: Equation, made: set[int]) -> None:
        """Finds where the tokens are in the values of an equation of the loop."""
        if eqn.source.effects:
            raise _RefusedError(f"{place_of(eqn)} has side effects")
        if eqn.regions:
            raise _RefusedError(f"{place_of(eqn)} reads the logits or the loss")
        for atom in eqn.arrays:
            if atom in self.sums:
                raise _RefusedError(
                    f"{place_of(eqn)} needs a sum over all tokens, for the gradient or "
                    "the loss of each token"
                )
        if eqn.primitive == "optimization_barrier":
            self.follow_barrier(eqn)
        elif eqn.primitive == "reshape":
            self.follow_reshape(eqn)
        else:
            self.follow_rule(eqn, made)

    def follow_barrier(self, eqn: Equation) -> None:
        for atom, value in zip(eqn.inputs, eqn.outputs, strict=True):
            assert isinstance(atom, int)
            rows = self.rows.get(atom) or self.rows[value]
            self.place(eqn, atom, rows)
            self.place(eqn, value, rows)

    def follow_reshape(self, eqn: Equation) -> None:
        (value,), (result,) = eqn.arrays, eqn.outputs
        rows = self.rows.get(value)
        if rows is None and result in self.rows:
            # The operand comes from outside of the loop.
            shape = self.values[result].shape
            rows = self.reshaped(shape, self.rows[result], value)
        shape = self.values[value].shape
        found = None if rows is None else self.reshaped(shape, rows, result)
        if rows is None or found is None or eqn.params["dimensions"] is not None:
            raise _RefusedError(f"{place_of(eqn)} mixes tokens")
        self.place(eqn, value, rows)
        self.place(eqn, result, found)

    def follow_rule(self, eqn: Equation, made: set[int]) -> None:
        rule = self.search.rules[eqn.index]
        slots = list(_slots(eqn, rule))
        known = [
            (d[self.rows[v].dim], self.rows[v]) for v, d in slots if v in self.rows
        ]
        factors = {of for of, _ in known}
        inners = {rows.inner for _, rows in known}
        if len(factors) != 1 or len(inners) != 1 or len(next(iter(factors))) != 1:
            raise _RefusedError(f"{place_of(eqn)} reads tokens in two ways")
        ((factor,),), (inner,) = factors, inners
        for value, dims in slots:
            found = [dim for dim, of in enumerate(dims) if factor in of]
            if len(found) > 1 or any(dims[dim] != (factor,) for dim in found):
                raise _RefusedError(f"{place_of(eqn)} compares tokens with each other")
            inside = value in made and value not in eqn.outputs
            if inside and bool(found) != (value in self.rows):
                raise _RefusedError(f"{place_of(eqn)} reads tokens in two ways")
            if found:
                self.place(eqn, value, Rows(found[0], inner))
        self.check_operator(eqn, rule, factor)

    def check_operator(self, eqn: Equation, rule: FactorRule, factor: int) -> None:
        """Checks that an operator computes each token alone, or adds up tokens."""
        whole = rule.whole or rule.exchanges or rule.sums
        passes = rule.kinds[factor] is FactorKind.PASS
        alone = eqn.primitive in _ALONE and passes
        if eqn.primitive == "iota":
            alone = eqn.params["dimension"] != self.rows[eqn.outputs[0]].dim
        if whole or not (alone or reads_no_positions(eqn, rule, factor)):
            raise _RefusedError(f"{place_of(eqn)} reads the positions of tokens")
        for value in eqn.outputs:
            if value in self.rows:
                if not passes:
                    raise _RefusedError(f"{place_of(eqn)} brings tokens together")
            elif (
                eqn.primitive in _SUMS
                and rule.kinds[factor] is FactorKind.REDUCE
                and rule.reduction == "sum"
            ):
                self.sums.add(value)
            else:
                raise _RefusedError(
                    f"{place_of(eqn)} combines all tokens in another way than a sum"
                )

    def place(self, eqn: Equation, value: int, rows: Rows) -> None:
        if self.rows.setdefault(value, rows) != rows:
            raise _RefusedError(f"{place_of(eqn)} reads tokens in two ways")
        size = self.values[value].shape[rows.dim]
        if size % rows.inner:
            raise _RefusedError(f"{place_of(eqn)} mixes tokens")
        self.groups = math.gcd(self.groups, size // rows.inner)

    def check_results(self, made: set[int]) -> None:
        """Checks that the step returns no logits."""
        for value in made & self.rows.keys():
            if self.is_large(value) and value in self.search.region.outputs:
                raise _RefusedError("the step returns the logits, or their gradients")


def _slots(eqn: Equation, rule: FactorRule) -> Iterator[tuple[int, Dims]]:
    """The operands and results of an equation that are values, with their dims."""
    for atom, dims in zip(eqn.inputs, rule.operands, strict=True):
        if isinstance(atom, int):
            yield atom, dims
    yield from zip(eqn.outputs, rule.results, strict=True)
