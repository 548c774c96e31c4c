"""Contracts the operator graph to nodes, each with its own choice of a sharding.

Kinds of nodes:

* ``input``: an input of the step, and the operators that follow its sharding;
* ``contraction``: an operator such that no single array has all of its factors (a
  product, a convolution, a large reduction, a gather or scatter). The node assigns mesh
  axes to factors. An axis on a reduced factor leaves the result *partial*;
* ``array``: a value, and the element-wise operators, small reductions and transposes
  that follow its sharding. The value and these operators share one assignment of mesh
  axes to dimensions.

Cheap values that need no large operand (``iota``, broadcasts) are *floating*: each
reader computes them in the layout that it needs, so they have no node.

Equal operators of repeated layers form a class (`Operator.class_index`). All operators
of a class share one decision.
"""

from __future__ import annotations

import dataclasses

from autopar_passes.graph.operators import Operator, OperatorGraph, producers
from autopar_passes.graph.roles import InputRole, Role
from autopar_passes.rules.factor_rule import Dims, FactorKind, FactorRule

# If the result of a reduction has at most this fraction of the elements of its operand,
# the reduction belongs to the node of the operand. A larger reduction has its own node,
# and its result may be scattered over devices.
SMALL_REDUCTION = 1 / 8
# An array with fewer elements has no layout to choose.
MIN_ELEMENTS = 2

# Operators that are never recomputed for each reader, because they are costly or end a
# loop's body.
_ANCHORED = frozenset(
    {
        "random_bits",
        "threefry2x32",
        "enter",
        "carry",
        "merge",
        "slice_step",
        "stack_step",
        "optimization_barrier",
    }
)
_CONTRACTIONS = frozenset(
    {
        "dot_general",
        "conv_general_dilated",
        "gather",
        "ragged_dot_in_blocks",
        "scatter-add",
    }
)


@dataclasses.dataclass(slots=True)
class Node:
    """A node of the contracted graph: one choice of a sharding.

    Attributes:
      index: position in `Contraction.nodes`.
      kind: ``input``, ``contraction`` or ``array``.
      factors: for each factor, its size and whether it may be sharded.
      members: operator class -> for each factor of its rule, the node's factor (-1 if
        it is replicated).
      root: the operator class for which the node was created.
      state: whether the node holds state that the step carries. The layout of state may
        use mesh axes in any order.
      whole: factors that must be split by a single mesh axis, which has as many devices
        as the factor has elements.
      halved: factors whose shards have two halves of equal size.
    """

    index: int
    kind: str
    factors: list[tuple[int, bool]]
    members: dict[int, tuple[int, ...]]
    root: int
    state: bool = False
    whole: tuple[int, ...] = ()
    halved: tuple[int, ...] = ()

    def dims(self, op: Operator, dims: Dims) -> Dims:
        """Translates the factors of a member's rule to those of the node."""
        return own_dims(self.members[op.class_index], dims)

    def factors_reduced(self, op: Operator) -> tuple[int, ...]:
        """Returns the node factors that a member reduces, in the order of its rule."""
        mapping = self.members[op.class_index]
        return tuple(
            mapping[f] for f in sorted(op.rule.reduced_factors) if mapping[f] >= 0
        )

    def summed_factors(self, op: Operator) -> list[tuple[int, ...]]:
        """For each result of a member, the node factors over which it is a sum."""
        mapping = self.members[op.class_index]
        return [
            tuple(mapping[f] for f in factors if mapping[f] >= 0)
            for factors in op.rule.sums
        ]


def own_dims(mapping: tuple[int, ...], dims: Dims) -> Dims:
    """Translates factors of a rule to node factors; leaves out replicated factors."""
    return tuple(tuple(mapping[f] for f in d if mapping[f] >= 0) for d in dims)


@dataclasses.dataclass(frozen=True, slots=True)
class Home:
    """The home of a value: the node that decides its layout.

    Attributes:
      node: the position of the node in `Contraction.nodes`.
      dims: for each dimension of the value, the factors of the node.
    """

    node: int
    dims: Dims


@dataclasses.dataclass(slots=True)
class Contraction:
    """The contracted graph.

    Attributes:
      nodes: the nodes.
      node_of: operator class -> its node; missing for floating and tiny operators.
      homes: value -> its home; missing for floating and tiny values.
      floating: values that each reader computes in the layout that it needs.
      producer: value -> the operator that computes it.
    """

    nodes: list[Node]
    node_of: dict[int, int]
    homes: dict[int, Home]
    floating: set[int]
    producer: dict[int, Operator]

    def node(self, op: Operator) -> Node:
        """Returns the node that chooses the sharding of an operator."""
        return self.nodes[self.node_of[op.class_index]]


def contract(graph: OperatorGraph) -> Contraction:
    """Contracts a graph; the first operator of each class stands for the class."""
    return _Contractor(graph).run()


class _Contractor:
    def __init__(self, graph: OperatorGraph) -> None:
        self.graph = graph
        self.out = Contraction([], {}, {}, set(), {})
        self.input_of = {i.value: i for i in graph.inputs}
        # (class, output slot) -> home, which all operators of the class share.
        self.shared: dict[tuple[int, int], Home | None] = {}

    def run(self) -> Contraction:
        self.out.producer.update(producers(self.graph.operators))
        for op in self.graph.operators:
            if op.class_index == op.index and op.kind != "return":
                self.visit(op)
            self.share(op)
        return self.out

    def share(self, op: Operator) -> None:
        """Gives each output of an operator the home that its class has for it."""
        for slot, value in enumerate(op.outputs):
            key = (op.class_index, slot)
            if key not in self.shared:
                continue
            home = self.shared[key]
            if home is None:
                self.out.floating.add(value)
            else:
                self.out.homes[value] = home

    def size(self, value: int | None) -> int:
        return 1 if value is None else self.graph.values[value].size

    def visit(self, op: Operator) -> None:
        largest = max((self.size(v) for v in (*op.inputs, *op.outputs)), default=1)
        if largest < MIN_ELEMENTS:
            return
        if op.kind == "input":
            self.start(op, "input", state=self.is_state(op))
        elif self.floats(op):
            self.shared.update(
                ((op.class_index, s), None) for s in range(len(op.outputs))
            )
        elif self.contracts(op):
            self.contraction(op)
        elif (leader := self.leader(op)) is not None:
            self.follow(op, leader)
        else:
            self.start(op, "array")

    def is_state(self, op: Operator) -> bool:
        given = self.input_of.get(op.outputs[0])
        return given is not None and given.output >= 0

    def floats(self, op: Operator) -> bool:
        """Whether an operator is element-wise and enlarges its operands."""
        if op.kind == "iota":
            return True
        if op.kind in _ANCHORED or len(op.outputs) != 1 or op.kernel is not None:
            return False
        if any(k is not FactorKind.PASS for k in op.rule.kinds):
            return False
        result = op.rule.results[0]
        if any(
            len(d) > 1 for d in (*result, *(d for o in op.rule.operands for d in o))
        ):
            return False
        if not op.rule.factors_of(result) >= op.rule.free:
            return False
        arrays = [
            v for v in op.inputs if v is not None and self.size(v) >= MIN_ELEMENTS
        ]
        return all(
            v in self.out.floating or self.size(v) < self.size(op.outputs[0])
            for v in arrays
        )

    def contracts(self, op: Operator) -> bool:
        if op.kind in _CONTRACTIONS:
            return True
        rule = op.rule
        if not rule.reduced_factors or rule.reduction != "sum":
            return False
        results = sum(self.size(v) for v in op.outputs)
        operands = max((self.size(v) for v in op.inputs), default=1)
        return results > SMALL_REDUCTION * operands

    def leader(self, op: Operator) -> tuple[Home, int] | None:
        """Returns the operand whose sharding the operator follows.

        An operator of the update prefers an operand that is state. Among the other
        operands, parameters come first, then the operand that was produced last.
        """
        best: tuple[tuple[int, int, int], tuple[Home, int]] | None = None
        for k, value in enumerate(op.inputs):
            if value is None or value not in self.out.homes:
                continue
            home = self.out.homes[value]
            if not self.can_follow(op.rule, op.rule.operands[k], home):
                continue
            node = self.out.nodes[home.node]
            state = op.role is Role.UPDATE and node.state
            rank = (int(state), self.is_parameter(node), self.out.producer[value].index)
            if best is None or rank > best[0]:
                best = (rank, (home, k))
        return None if best is None else best[1]

    def is_parameter(self, node: Node) -> int:
        op = self.graph.operators[node.root]
        given = self.input_of.get(op.outputs[0]) if op.kind == "input" else None
        return int(given is not None and given.role is InputRole.PARAMETER)

    def can_follow(self, rule: FactorRule, dims: Dims, home: Home) -> bool:
        """Whether an operator can use the sharding of one operand.

        Each factor must be one whole dimension of the operand, and if the dimension may
        be sharded, the factor may be too.
        """
        node = self.out.nodes[home.node]
        if node.kind == "contraction" or rule.whole or rule.exchanges:
            return False
        seen: set[int] = set()
        for mine, theirs in zip(dims, home.dims, strict=True):
            if len(mine) != len(theirs) or len(mine) > 1:
                return False
            if mine:
                blocked = rule.kinds[mine[0]] is FactorKind.BLOCKED
                if blocked and node.factors[theirs[0]][1]:
                    return False
                seen.add(mine[0])
        simple = all(len(d) <= 1 for r in rule.results for d in r)
        return simple and seen >= rule.free

    def follow(self, op: Operator, leader: tuple[Home, int]) -> None:
        home, k = leader
        mapping = [-1] * len(op.rule.sizes)
        for mine, theirs in zip(op.rule.operands[k], home.dims, strict=True):
            if mine and op.rule.kinds[mine[0]] is not FactorKind.BLOCKED:
                mapping[mine[0]] = theirs[0]
        self.join(op, self.out.nodes[home.node], tuple(mapping))

    def join(self, op: Operator, node: Node, mapping: tuple[int, ...]) -> None:
        node.members[op.class_index] = mapping
        self.out.node_of[op.class_index] = node.index
        for slot, (value, dims) in enumerate(
            zip(op.outputs, op.rule.results, strict=True)
        ):
            if self.size(value) >= MIN_ELEMENTS:
                home = Home(node.index, own_dims(mapping, dims))
                self.shared[op.class_index, slot] = home

    def new_node(
        self, op: Operator, kind: str, state: bool
    ) -> tuple[Node, tuple[int, ...]]:
        factors: list[tuple[int, bool]] = []
        mapping: list[int] = []
        for f, (size, kind_of) in enumerate(
            zip(op.rule.sizes, op.rule.kinds, strict=True)
        ):
            del f
            if size < 2 or kind_of is FactorKind.BLOCKED:
                mapping.append(-1)
            else:
                mapping.append(len(factors))
                factors.append((size, True))
        node = Node(
            len(self.out.nodes),
            kind,
            factors,
            {},
            op.class_index,
            state,
            whole=tuple(mapping[f] for f in op.rule.whole),
            halved=tuple(mapping[f] for f in op.rule.halved_factors),
        )
        self.out.nodes.append(node)
        return node, tuple(mapping)

    def start(self, op: Operator, kind: str, *, state: bool = False) -> None:
        node, mapping = self.new_node(op, kind, state)
        self.join(op, node, mapping)

    def contraction(self, op: Operator) -> None:
        """Adds a node for the operator, and another node for its reduced result."""
        node, mapping = self.new_node(op, "contraction", False)
        node.members[op.class_index] = mapping
        self.out.node_of[op.class_index] = node.index
        for slot, (value, dims) in enumerate(
            zip(op.outputs, op.rule.results, strict=True)
        ):
            if self.size(value) < MIN_ELEMENTS:
                continue
            result = Node(len(self.out.nodes), "array", [], {}, op.class_index, False)
            home_dims: list[tuple[int, ...]] = []
            for d in dims:
                own: list[int] = []
                for f in d:
                    if mapping[f] >= 0:
                        own.append(len(result.factors))
                        result.factors.append(node.factors[mapping[f]])
                home_dims.append(tuple(own))
            self.out.nodes.append(result)
            self.shared[op.class_index, slot] = Home(result.index, tuple(home_dims))
