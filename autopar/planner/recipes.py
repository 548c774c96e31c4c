"""The plans that people write by hand, as rules about mesh axes.

Each rule says which arrays each mesh axis may split. The solver finds the best plan
that keeps to the rule.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from autopar.cost.pricer import Pricer
from autopar.layouts.layout import shards
from autopar.layouts.strategies import Strategy, layout_of, strategy_space
from autopar.planner.problem import Restriction, allowed_strategies, small_state
from autopar.steps.analysis import Analysis
from autopar.steps.batch import BATCH, SEQUENCE
from autopar.steps.nodes import Home, Node
from autopar_passes.graph.operators import PRODUCTS
from autopar_passes.graph.roles import InputRole, Role


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """A rule about the axes of a mesh.

    Attributes:
      name: the usual name, such as FSDP.
      data: the mesh axes that split the batch.
      tensor: the mesh axes that split the model.
      shard_parameters: whether parameters are also split over the data axes (ZeRO-3).
      shard_optimizer: whether optimizer state is split over the data axes (ZeRO-1).
        Parameters that the forward and backward pass read only in a narrower dtype may
        be split, too: they are the optimizer's master copies, and only their copies in
        the narrow dtype are gathered.
      sequence: whether arrays between matrix products are split along the sequence over
        the tensor axes.
      within: the data axes over which parameters and optimizer state are split; None:
        all data axes.
      context: axes that split the sequence, also in attention (context parallelism);
        state is split over them in the same way as over the data axes.
    """

    name: str
    data: tuple[int, ...]
    tensor: tuple[int, ...] = ()
    shard_parameters: bool = False
    shard_optimizer: bool = False
    sequence: bool = False
    within: tuple[int, ...] | None = None
    context: tuple[int, ...] = ()

    @property
    def shards(self) -> tuple[int, ...]:
        """The axes over which parameters and optimizer state are split."""
        return (*self.data, *self.context) if self.within is None else self.within

    @property
    def rows(self) -> dict[int, str]:
        """For each axis that does not split the model, ``rows`` or ``sequence``."""
        return dict.fromkeys(self.data, BATCH) | dict.fromkeys(self.context, SEQUENCE)


def has_context(analysis: Analysis) -> bool:
    """Whether the attention of a step may be split along the sequence."""
    return any(op.rule.exchanges for op in analysis.graph.operators)


def recipes(num_axes: int, *, context: bool = False) -> Iterator[Recipe]:
    """Lists the expert plans on a mesh with this many axes.

    Args:
      num_axes: number of axes of the mesh.
      context: whether to add plans that split the sequence of attention.
    """
    every = tuple(range(num_axes))
    yield Recipe("data parallel", every)
    yield Recipe("ZeRO-1", every, shard_optimizer=True)
    yield Recipe("FSDP (ZeRO-3)", every, shard_parameters=True, shard_optimizer=True)
    yield Recipe("tensor parallel", (), every)
    yield Recipe("tensor + sequence parallel", (), every, sequence=True)
    if num_axes > 1:
        data, tensor = every[:-1], every[-1:]
        yield Recipe("data x tensor", data, tensor)
        yield Recipe("data x tensor + sequence", data, tensor, sequence=True)
        yield Recipe("FSDP x tensor", data, tensor, True, True)
        yield Recipe("FSDP x tensor + sequence", data, tensor, True, True, True)
    if context:
        yield Recipe("FSDP + context parallel", (), (), True, True, context=every)
        if num_axes > 1:
            data, last = every[:-1], every[-1:]
            yield Recipe("FSDP x context parallel", data, (), True, True, context=last)
            yield Recipe(
                "context x tensor parallel", (), last, True, True, context=data
            )


def expert_rules(
    analysis: Analysis, num_axes: int
) -> Iterator[tuple[str, Restriction]]:
    """Lists the rules of expert parallel plans on a mesh with this many axes.

    One axis splits the experts of all parameters that have experts. The other axes
    split other dimensions of these parameters, as in FSDP or tensor parallel plans. All
    other arrays are free. A step without experts has no such rules.
    """
    make = functools.partial(_expert_factors, analysis)
    factors = analysis.remember("expert factors", make)
    every = frozenset(range(num_axes))

    def splits(axis: int, node: Node, strategy: Strategy) -> bool:
        factor = factors.get(node.index)
        if factor is None:
            return True
        return axis in strategy[factor] and every.issubset(
            a for own in strategy for a in own
        )

    for axis in range(num_axes if factors else 0):
        yield f"experts over axis {axis}", functools.partial(splits, axis)


def _expert_factors(analysis: Analysis) -> dict[int, int]:
    """Node of a parameter with experts -> the factor that is the experts.

    Experts are a dimension of a parameter that a product has in both operands and in
    its result.
    """
    graph, contraction = analysis.graph, analysis.contraction
    parameters = {i.value for i in graph.inputs if i.role is InputRole.PARAMETER}
    found: dict[int, int] = {}
    for op in graph.operators:
        if op.role is not Role.FORWARD or op.kind not in PRODUCTS:
            continue
        operands, result = op.rule.operands[:2], op.rule.factors_of(op.rule.results[0])
        everywhere = result.intersection(*map(op.rule.factors_of, operands))
        for value, dims in zip(op.inputs[:2], operands, strict=True):
            home = None if value is None else contraction.homes.get(value)
            if home is None:
                continue
            pairs = zip(dims, home.dims, strict=True)
            own = [f for d, f in pairs if not everywhere.isdisjoint(d)]
            if len(own) != 1 or len(own[0]) != 1:
                continue
            stored = _stored(analysis, home.node, own[0][0])
            if stored is not None and stored[0] in parameters:
                found[stored[1]] = stored[2]
    return found


def _stored(analysis: Analysis, node: int, factor: int) -> tuple[int, int, int] | None:
    """The input of which a node's array is a layer or the whole, its node and factor.

    A loop over layers takes a layer out of stacked parameters. None: the array is
    computed.
    """
    graph, contraction = analysis.graph, analysis.contraction
    root = graph.operators[contraction.nodes[node].root]
    if root.kind == "input":
        return root.outputs[0], node, factor
    if root.kind != "slice_step" or root.inputs[0] is None:
        return None
    home = contraction.homes.get(root.inputs[0])
    if home is None:
        return None
    for dims, own in zip(root.rule.operands[0], home.dims, strict=True):
        if dims == (factor,) and len(own) == 1:
            return _stored(analysis, home.node, own[0])
    return None


def restriction_of(analysis: Analysis, recipe: Recipe, pricer: Pricer) -> Restriction:
    """Returns which strategies a recipe allows."""
    labels, rows = analysis.node_labels, recipe.rows
    roles = _node_roles(analysis)
    masters = masters_of(analysis) if recipe.shard_optimizer else frozenset[int]()
    full = {
        node.index: most_split(node, recipe.shards, pricer.sizes)
        for node in analysis.contraction.nodes
    }

    def is_allowed(node: Node, strategy: Strategy) -> bool:
        named = labels.get(node.index, {})
        role = roles.get(node.index)
        has_rows = not {BATCH, *rows.values()}.isdisjoint(named.values())
        used = [(a, named.get(f, "")) for f, axes in enumerate(strategy) for a in axes]
        for axis, name in used:
            if axis in rows and name != rows[axis]:
                free = node.index in masters
                free = free or _may_shard(role, recipe, has_rows, node)
                if axis not in recipe.shards or not free:
                    return False
            if axis in recipe.tensor and not _may_tensor(name, recipe, node):
                return False
        if _must_shard(role, recipe):
            split = sum(1 for axis, _ in used if axis in recipe.shards)
            return split >= full[node.index]
        return True

    return is_allowed


def _may_shard(
    role: InputRole | None, recipe: Recipe, has_rows: bool, node: Node
) -> bool:
    """Whether axes that split rows may split an array without rows too."""
    if role in (InputRole.PARAMETER, InputRole.FROZEN):
        return recipe.shard_parameters
    if role is InputRole.OPTIMIZER_STATE:
        return recipe.shard_optimizer
    return recipe.shard_optimizer and not has_rows and node.kind == "array"


def _may_tensor(name: str, recipe: Recipe, node: Node) -> bool:
    if name == BATCH:
        return False
    if name == SEQUENCE:
        return recipe.sequence and node.kind != "contraction"
    return True


def _must_shard(role: InputRole | None, recipe: Recipe) -> bool:
    if role is InputRole.PARAMETER:
        return recipe.shard_parameters
    return role is InputRole.OPTIMIZER_STATE and recipe.shard_optimizer


def _node_roles(analysis: Analysis) -> dict[int, InputRole]:
    homes = analysis.contraction.homes
    return {
        homes[i.value].node: i.role for i in analysis.graph.inputs if i.value in homes
    }


def least_bytes(analysis: Analysis, rule: Restriction, pricer: Pricer) -> float:
    """Returns a lower bound of the bytes of state on one device under a rule.

    For each input, the bound takes the allowed layout with the most shards, even if
    such layouts of two inputs exclude each other.

    Args:
      analysis: the step.
      rule: the restriction of a recipe, combined with the user's pins.
      pricer: the mesh and cluster.
    """
    graph, homes = analysis.graph, analysis.contraction.homes
    small = small_state(graph, analysis.contraction, pricer.cluster.memory_bytes)
    kept: dict[int, tuple[Strategy, ...]] = {}
    most: dict[Home | None, int] = {None: 1}
    out = 0.0
    for given in graph.inputs:
        if given.role not in (InputRole.PARAMETER, InputRole.OPTIMIZER_STATE):
            continue
        home = homes.get(given.value)
        if home is not None and home not in most:
            number = home.node
            if number not in kept:
                kept[number] = _strategies_left(
                    analysis, rule, number, pricer, number in small
                )
            layouts = (layout_of(strategy, home.dims) for strategy in kept[number])
            most[home] = max(shards(layout, pricer.sizes) for layout in layouts)
        out += graph.values[given.value].nbytes / most[home]
    return out


def _strategies_left(
    analysis: Analysis, rule: Restriction, number: int, pricer: Pricer, small: bool
) -> tuple[Strategy, ...]:
    """Returns the strategies of a node that a rule allows."""
    node = analysis.contraction.nodes[number]
    space = strategy_space(analysis.graph, analysis.contraction, node, pricer.sizes)
    return allowed_strategies(rule, node, space.strategies, small)


def masters_of(analysis: Analysis) -> frozenset[int]:
    """The nodes of parameters that both passes read in a narrower dtype only."""
    graph, homes = analysis.graph, analysis.contraction.homes
    wide = {
        i.value
        for i in graph.inputs
        if i.role is InputRole.PARAMETER and i.value in homes
    }
    for op in graph.operators:
        if op.role is Role.UPDATE or op.kind == "return":
            continue
        for value in wide.intersection(v for v in op.inputs if v is not None):
            given, made = (graph.values[v].dtype for v in (value, op.outputs[0]))
            narrow = op.kind == "convert_element_type"
            if not (narrow and made.itemsize < given.itemsize):
                wide.discard(value)
    return frozenset(homes[value].node for value in wide)


def most_split(node: Node, axes: Sequence[int], sizes: Sequence[int]) -> int:
    """The largest number of these axes that can split the node's array together."""
    left = [size for size, _ in node.factors]
    count = 0
    for axis in axes:
        for k, size in enumerate(left):
            if size % sizes[axis] == 0:
                left[k] = size // sizes[axis]
                count += 1
                break
    return count
