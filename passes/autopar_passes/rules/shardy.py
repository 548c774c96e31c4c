"""Reads sharding rules from XLA's own partitioner, Shardy.

The pass ``sdy-populate-op-sharding-rules`` adds a rule to every operation of a
StableHLO module. If an equation lowers to several operations, its rule is the
composition of their rules.

For convolutions, a plan may use only a part of the rule. XLA's partitioner (jaxlib
0.10.2, CPU) computes wrong results if a window dimension is reduced over some but not
all mesh axes: it multiplies the result by the number of replicas. The same happens for
any reduction of a grouped convolution. Other shardings of grouped convolutions abort
the process (``convolution_handler.cc``, "Check failed: new_input_batch_size"). Window
dimensions are therefore never sharded, and a grouped convolution runs shard by shard
(`autopar_passes.replay.primitives`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.mlir import passmanager
from jax.extend.mlir.dialects import sdy

from autopar_passes.rules.factor_rule import (
    INNER,
    Dims,
    FactorKind,
    FactorRule,
    replicated_rule,
)

PRIMITIVE = "conv_general_dilated"


def whole_windows(rule: FactorRule, params: Mapping[str, Any]) -> FactorRule:
    """Returns the rule of a convolution with its window dimensions kept unsharded."""
    numbers = params["dimension_numbers"]
    specs = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    arrays = (*rule.operands, *rule.results)
    windows = {
        factor
        for spec, dims in zip(specs, arrays, strict=True)
        for dim in spec[2:]
        for factor in dims[dim]
    }
    kinds = tuple(
        FactorKind.BLOCKED if f in windows else kind
        for f, kind in enumerate(rule.kinds)
    )
    reduction = rule.reduction if FactorKind.REDUCE in kinds else ""
    return dataclasses.replace(rule, kinds=kinds, reduction=reduction)


def is_grouped(params: Mapping[str, Any]) -> bool:
    """Returns whether a convolution has several groups of features or examples."""
    return max(params["feature_group_count"], params["batch_group_count"]) > 1


# Factors with union and split, to compose the rules of several operations.


@dataclasses.dataclass(slots=True)
class _FactorNode:
    size: int
    parent: int
    blocked: bool = False
    reduced: str = ""
    children: tuple[int, ...] = ()


class FactorForest:
    """A union-find of factors, in which a factor may be split into smaller ones.

    A reshape of ``[32]`` to ``[4, 8]`` splits the factor of size 32 into a major factor
    of 4 and a minor factor of 8, for every value that has the factor.
    """

    def __init__(self) -> None:
        """Starts without factors."""
        self._nodes: list[_FactorNode] = []

    def new(self, size: int) -> int:
        """Adds a factor of ``size`` elements."""
        self._nodes.append(_FactorNode(size, len(self._nodes)))
        return len(self._nodes) - 1

    def find(self, factor: int) -> int:
        """Returns the factor that represents all factors united with this one."""
        nodes = self._nodes
        while nodes[factor].parent != factor:
            nodes[factor].parent = nodes[nodes[factor].parent].parent
            factor = nodes[factor].parent
        return factor

    def leaves(self, factor: int) -> tuple[int, ...]:
        """Returns the smallest factors that a factor is split into, major to minor."""
        root = self.find(factor)
        children = self._nodes[root].children
        if not children:
            return (root,)
        return tuple(leaf for c in children for leaf in self.leaves(c))

    def size(self, factor: int) -> int:
        """Returns the number of elements of a factor."""
        return self._nodes[self.find(factor)].size

    def is_blocked(self, factor: int) -> bool:
        """Returns whether a factor may not be sharded."""
        return self._nodes[self.find(factor)].blocked

    def reduction(self, factor: int) -> str:
        """Returns the kind of reduction of a factor; '' if it is not reduced."""
        return self._nodes[self.find(factor)].reduced

    def block(self, factor: int) -> None:
        """Marks a factor as one that may not be sharded."""
        for leaf in self.leaves(factor):
            self._nodes[leaf].blocked = True

    def reduce(self, factor: int, kind: str) -> None:
        """Marks a factor as reduced by ``kind``.

        A factor that is reduced in two different ways may not be sharded.
        """
        for leaf in self.leaves(factor):
            node = self._nodes[leaf]
            node.blocked |= bool(node.reduced) and node.reduced != kind
            node.reduced = kind

    def unite(self, left: Sequence[int], right: Sequence[int]) -> None:
        """Unites two lists of factors, major to minor, that form the same dimension."""
        a = [leaf for f in left for leaf in self.leaves(f)]
        b = [leaf for f in right for leaf in self.leaves(f)]
        if [self.size(f) for f in a] == [self.size(f) for f in b]:
            for x, y in zip(a, b, strict=True):
                self._join(x, y)
        elif len(a) == 1 and math.prod(map(self.size, b)) == self.size(a[0]):
            self._split(a[0], b)
        elif len(b) == 1 and math.prod(map(self.size, a)) == self.size(b[0]):
            self._split(b[0], a)
        else:
            for leaf in (*a, *b):
                self.block(leaf)

    def _split(self, whole: int, parts: Sequence[int]) -> None:
        node = self._nodes[whole]
        node.children = tuple(parts)
        for part in parts:
            if node.blocked:
                self.block(part)
            if node.reduced:
                self.reduce(part, node.reduced)

    def _join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a == b:
            return
        left, right = self._nodes[a], self._nodes[b]
        right.parent = a
        left.blocked |= right.blocked
        left.blocked |= bool(left.reduced and right.reduced) and (
            left.reduced != right.reduced
        )
        left.reduced = left.reduced or right.reduced


_POPULATE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
# The way in which the body of a reduction or scatter combines two partial results.
_COMBINERS = {
    "stablehlo.add": "sum",
    "stablehlo.maximum": "max",
    "stablehlo.minimum": "min",
    "stablehlo.or": "or",
    "stablehlo.and": "and",
}
_SUMMING = frozenset(
    {"stablehlo.dot_general", "stablehlo.convolution", "stablehlo.gather"}
)
_COMBINING = frozenset({"stablehlo.reduce", "stablehlo.scatter"})
# Operations that create values without operands. They can be created in any sharding
# without communication.
_GENERATORS = frozenset(
    {"stablehlo.constant", "stablehlo.iota", "stablehlo.partition_id"}
)


@dataclasses.dataclass(frozen=True, slots=True)
class LoweredEquation:
    """The facts about a lowered equation that the reader of rules needs.

    Attributes:
      primitive: name of its primitive.
      params: parameters of the primitive.
      constant: for each operand, whether it is a scalar literal in the program.
      operands: shape of each operand.
      results: shape of each result.
    """

    primitive: str
    params: dict[str, Any]
    constant: tuple[bool, ...]
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]

    def replicated_rule(self) -> FactorRule:
        """Returns the rule in which nothing may be sharded."""
        return replicated_rule(self.operands, self.results)


def read_rules(
    module: Any, equations: Sequence[LoweredEquation]
) -> tuple[list[FactorRule], tuple[str, ...]]:
    """Returns the rule of each equation, and the primitives without a rule.

    Args:
      module: a StableHLO module whose main function runs the equations independently,
        each on its own arguments. This call adds attributes to the module.
      equations: the equations, in the order of the arguments and results.
    """
    with module.context:
        passmanager.PassManager.parse(_POPULATE).run(module.operation)
        return _RuleReader(module).read(equations)


class _RuleReader:
    """Unites the factors of a whole module; follows calls and loops."""

    def __init__(self, module: Any) -> None:
        self.forest = FactorForest()
        self.dims: dict[Any, list[int | None]] = {}
        self.owner: dict[Any, int] = {}
        self.unsupported: set[int] = set()
        self.functions = {
            op.attributes["sym_name"].value: op
            for op in module.body.operations
            if "sym_name" in op.attributes
        }

    def read(
        self, equations: Sequence[LoweredEquation]
    ) -> tuple[list[FactorRule], tuple[str, ...]]:
        block = self.functions["main"].regions[0].blocks[0]
        arguments = iter(block.arguments)
        operands: list[list[Any]] = []
        for i, eqn in enumerate(equations):
            own = [None if c else next(arguments) for c in eqn.constant]
            self.owner.update((a, i) for a in own if a is not None)
            operands.append(own)
        returned = iter(self.block(block))
        rules: list[FactorRule] = []
        names: set[str] = set()
        for i, eqn in enumerate(equations):
            results = [next(returned) for _ in eqn.results]
            if i in self.unsupported:
                names.add(eqn.primitive)
                rules.append(eqn.replicated_rule())
            else:
                rules.append(self.rule(eqn, operands[i], results))
        return rules, tuple(sorted(names))

    def of(self, value: Any) -> list[int | None]:
        """Returns the factor of each dimension of an SSA value (None for size one)."""
        if value not in self.dims:
            shape = getattr(value.type, "shape", [])
            self.dims[value] = [self.forest.new(s) if s > 1 else None for s in shape]
        return self.dims[value]

    def same(self, a: Any, b: Any, *, but_last: bool = False) -> None:
        """Declares that two values of the same shape are sharded in the same way."""
        pairs = list(zip(self.of(a), self.of(b), strict=True))
        for x, y in pairs[:-1] if but_last else pairs:
            if x is not None and y is not None:
                self.forest.unite([x], [y])

    def block(self, block: Any, owner: int | None = None) -> list[Any]:
        """Visits a block; returns the values that its terminator returns."""
        for op in block.operations:
            name = op.operation.name
            if name in ("func.return", "stablehlo.return", "sdy.return"):
                return list(op.operands)
            self.operation(op, name, owner)
        return []

    def operation(self, op: Any, name: str, owner: int | None) -> None:
        owners = [self.owner[v] for v in op.operands if v in self.owner]
        eqn = owners[0] if owners else owner
        if eqn is not None:
            self.owner.update((r, eqn) for r in op.results)
        if name in _GENERATORS:
            return
        if name in ("func.call", "call"):
            self.call(op, eqn)
        elif name == "stablehlo.while":
            self.loop(op, eqn)
        elif "sdy.sharding_rule" in op.attributes:
            self.apply(op, name)
        elif name == "stablehlo.optimization_barrier":
            for a, b in zip(op.operands, op.results, strict=True):
                self.same(a, b)
        elif name == "chlo.top_k":
            for result in op.results:
                self.same(op.operands[0], result, but_last=True)
                self.unshardable(result, last_only=True)
            self.unshardable(op.operands[0], last_only=True)
        elif name.startswith("chlo.") and _same_shapes(op):
            for operand in op.operands:
                self.same(operand, op.results[0])
        elif any(_rank(v) for v in (*op.operands, *op.results)):
            self.refuse(op, eqn)

    def unshardable(self, value: Any, *, last_only: bool = False) -> None:
        factors = self.of(value)
        for f in factors[-1:] if last_only else factors:
            if f is not None:
                self.forest.block(f)

    def refuse(self, op: Any, eqn: int | None) -> None:
        for value in (*op.operands, *op.results):
            self.unshardable(value)
        if eqn is not None:
            self.unsupported.add(eqn)

    def call(self, op: Any, eqn: int | None) -> None:
        """Visits the called function anew for each call, which has its own factors."""
        function = self.functions[op.attributes["callee"].value]
        block = function.regions[0].blocks[0]
        outer = self.dims
        self.dims = {
            **outer,
            **{
                a: self.of(v) for a, v in zip(block.arguments, op.operands, strict=True)
            },
        }
        inner_owner = self.owner
        self.owner = dict.fromkeys(block.arguments, eqn) if eqn is not None else {}
        results = [self.of(v) for v in self.block(block, eqn)]
        self.dims, self.owner = outer, inner_owner
        for result, factors in zip(op.results, results, strict=True):
            self.dims[result] = factors

    def loop(self, op: Any, eqn: int | None) -> None:
        for operand, result in zip(op.operands, op.results, strict=True):
            self.same(operand, result)
        for region in op.regions:
            block = region.blocks[0]
            for operand, argument in zip(op.operands, block.arguments, strict=True):
                self.same(operand, argument)
            if eqn is not None:
                self.owner.update((a, eqn) for a in block.arguments)
            out = self.block(block, eqn)
            if len(out) == len(op.results):
                for value, result in zip(out, op.results, strict=True):
                    self.same(value, result)

    def apply(self, op: Any, name: str) -> None:
        """Unites the factors of one operation according to its sharding rule."""
        rule = sdy.OpShardingRuleAttr(op.attributes["sdy.sharding_rule"])
        factors = [self.forest.new(s) for s in rule.factor_sizes]
        mappings = (*rule.operand_mappings, *rule.result_mappings)
        for value, mapping in zip((*op.operands, *op.results), mappings, strict=True):
            dims = sdy.TensorMappingAttr(mapping).dim_mappings
            for dim, factor in zip(dims, self.of(value), strict=True):
                indices = list(sdy.DimMappingAttr(dim).factor_indices)
                real = [factors[i] for i in indices if rule.factor_sizes[i] > 1]
                if factor is not None and real:
                    self.forest.unite([factor], real)
                # The compiler's rule forbids sharding this factor.
                elif factor is not None:
                    self.forest.block(factor)
        kind = _combiner(op, name)
        for i in rule.reduction_factors:
            if kind:
                self.forest.reduce(factors[i], kind)
            else:
                self.forest.block(factors[i])
        for i in (*rule.need_replication_factors, *rule.permutation_factors):
            self.forest.block(factors[i])

    def rule(
        self, eqn: LoweredEquation, operands: list[Any], results: list[Any]
    ) -> FactorRule:
        """Reads the rule of one equation from the united factors."""
        number: dict[int, int] = {}

        def dims(value: Any, shape: tuple[int, ...]) -> Dims:
            if value is None:
                return ()
            factors = self.of(value)[: len(shape)]
            leaves = [() if f is None else self.forest.leaves(f) for f in factors]
            return tuple(
                tuple(number.setdefault(leaf, len(number)) for leaf in dim)
                for dim in leaves
            )

        operand_dims = tuple(
            dims(v, s) for v, s in zip(operands, eqn.operands, strict=True)
        )
        result_dims = tuple(
            dims(v, s) for v, s in zip(results, eqn.results, strict=True)
        )
        produced = {f for r in result_dims for d in r for f in d}
        leaves = sorted(number, key=lambda leaf: number[leaf])
        kinds = tuple(self.kind(leaf, number[leaf] in produced) for leaf in leaves)
        reductions = {
            self.forest.reduction(leaf)
            for leaf, k in zip(leaves, kinds, strict=True)
            if k is FactorKind.REDUCE
        }
        sizes = tuple(self.forest.size(leaf) for leaf in leaves)
        reduction = "".join(reductions)
        if reduction and not all(_reduces(v) for v in results):
            reduction = INNER
        rule = FactorRule(sizes, kinds, operand_dims, result_dims, reduction)
        if len(reductions) > 1:
            return eqn.replicated_rule()
        if eqn.primitive == PRIMITIVE:
            return whole_windows(rule, eqn.params)
        return rule

    def kind(self, leaf: int, produced: bool) -> FactorKind:
        if self.forest.is_blocked(leaf):
            return FactorKind.BLOCKED
        reduced = bool(self.forest.reduction(leaf))
        # The united factors are inconsistent: the factor is reduced but still in the
        # result, or it is missing from the result although no reduction removed it.
        if reduced == produced:
            return FactorKind.BLOCKED
        return FactorKind.REDUCE if reduced else FactorKind.PASS


def _reduces(value: Any) -> bool:
    """Returns whether a value is the direct result of a reduction."""
    owner = getattr(value.owner, "operation", None)
    return owner is not None and owner.name in _SUMMING | _COMBINING


def _rank(value: Any) -> int:
    return len(getattr(value.type, "shape", []))


def _same_shapes(op: Any) -> bool:
    shapes = {tuple(v.type.shape) for v in (*op.operands, *op.results)}
    return len(shapes) == 1


def _combiner(op: Any, name: str) -> str:
    if name in _SUMMING:
        return "sum"
    if name in _COMBINING and len(op.results) == 1:
        body = [o.operation.name for o in op.regions[0].blocks[0].operations]
        return _COMBINERS.get(body[0], "") if len(body) == 2 else ""
    return ""
