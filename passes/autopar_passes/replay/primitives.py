"""Runs equations other than loops and branches, in the layouts of a plan."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar_passes import jax_compat
from autopar_passes.graph.operators import Operator, OperatorGraph
from autopar_passes.graph.ring_order import RingOrder, ring_order
from autopar_passes.layouts import Layout, on_shards, partition_spec
from autopar_passes.program.equations import Equation, Program
from autopar_passes.program.flatten import INLINED, call_body
from autopar_passes.replay.values import LayoutPlan, PlacedOrder, Values
from autopar_passes.rules import (
    blockwise,
    kernels,
    manual,
    pallas_grid,
    ragged,
    shardy,
)
from autopar_passes.rules.factor_rule import FactorKind, FactorRule, worker
from autopar_passes.sums import stacked
from autopar_passes.sums.finish import BY_SHARDS, Sum, behind, run_and_sum
from autopar_passes.sums.stacked import Stacked, stack_partials, sum_partials

# Attention with a sharded sequence: keys and values travel around a ring of devices.
#
# Each device keeps its queries. In each round a device receives the keys and values
# of its neighbour, runs the kernel on this block, and merges the result into its own.
# The merge uses the log-sum-exp of each row (Liu, Zaharia, Abbeel, "Ring Attention
# with Blockwise Transformers for Near-Infinite Context", arXiv 2310.01889; the merge
# is that of Dao et al., "FlashAttention", arXiv 2205.14135, section 3.1). The
# backward pass needs only the log-sum-exp of each whole row: with it, the kernel
# computes the gradients of a block. Gradients of keys and values travel around the
# ring with them. The gradients of a device's own block stay on the device and are
# added at the end.
#
# Under a causal mask, a device with later rows has more work. The sequence is
# therefore cut into two chunks per device, and device ``i`` of ``n`` has the queries
# of chunks ``i`` and ``2n - 1 - i`` (Brandon et al., "Striped Attention", arXiv
# 2311.09431, show the problem; the order is that of
# https://github.com/zhuzilin/ring-flash-attention). With this order, every device
# computes two unmasked blocks of chunks in every round. If the surrounding program
# does not hold tokens in this order (`autopar_passes.graph.ring_order`), inputs and
# outputs are exchanged between the plain order and this order.
#
# Sums over rounds are computed in float32.


Array = Any
# The first round in which a device works on keys and values of another device.
_FIRST = 1
# The kernel of the forward pass: from a block of queries and of arrays beside them, a
# block of keys, values and arrays beside them, and whether the mask is causal, to the
# output and the log-sum-exp of each row.
Forward = Callable[[Sequence[Array], Sequence[Array], bool], tuple[Array, Array]]
# The kernel of the backward pass: from the same blocks, and the output, the log-sum-exp
# and the output's gradient of whole rows, to the gradients of queries, keys and values.
Backward = Callable[
    [Sequence[Array], Sequence[Array], Array, Array, Array, bool],
    tuple[Array, Array, Array],
]


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """The devices over which a sequence is sharded.

    Attributes:
      axes: names of the mesh axes, major to minor.
      size: number of devices.
      causal: whether a query attends to no later key.
      seq: the dimension of the sequence: 1 for (batch, sequence, heads, head_dim), and
        2 for (batch, heads, sequence, head_dim).
      ordered: whether operands and results are in the order of the ring, if it has one
        (`autopar_passes.graph.ring_order`). If not, they are in the plain order.
    """

    axes: tuple[str, ...]
    size: int
    causal: bool
    seq: int
    ordered: bool = False

    def forward(
        self, block: Forward, own: Sequence[Array], moved: Sequence[Array]
    ) -> tuple[Array, Array]:
        """The output for this device's queries, and the log-sum-exp of its rows.

        Args:
          block: the kernel.
          own: this device's shard of the queries, and of other arrays with their
            positions.
          moved: this device's shards of the keys, the values, and other arrays with
            their positions.

        Returns:
          The output, in the dtype of the queries, and the log-sum-exp in float32, with
          shape (batch, heads, sequence).
        """
        dealt = self._is_dealt(own[0])
        own, moved = (
            [self._deal(x, self.seq, dealt) for x in arrays] for arrays in (own, moved)
        )
        out, rows = block(own, moved, self.causal)
        parts = 1 + dealt
        held = (
            _chunks(out, self.seq, parts).astype(jnp.float32),
            _chunks(rows, 2, parts),
        )
        queries = [_chunks(x, self.seq, parts) for x in own]

        def turn(number: Any, moved: Sequence[Array], held: Any) -> Any:
            keys = [_chunks(x, self.seq, parts) for x in moved]
            for mine, other, seen in self._blocks(number, dealt):
                found = block(
                    [x[mine] for x in queries], [x[other] for x in keys], False
                )
                held = self._merge(held, mine, found, seen)
            return held

        held = self._around(turn, moved, held)
        out = _join(held[0].astype(own[0].dtype), self.seq)
        rows = _join(held[1], 2)
        return self._return(out, self.seq, dealt), self._return(rows, 2, dealt)

    def backward(
        self,
        block: Backward,
        own: Sequence[Array],
        moved: Sequence[Array],
        out: Array,
        rows: Array,
        gradient: Array,
    ) -> tuple[Array, Array, Array]:
        """Returns the gradients of this device's queries, keys and values.

        Args:
          block: the kernel.
          own: see `forward`.
          moved: see `forward`.
          out: the output of `forward`.
          rows: the log-sum-exp of `forward`.
          gradient: the gradient of the output.
        """
        dealt = self._is_dealt(own[0])
        parts = 1 + dealt
        # Without the barrier a compiler would keep the shards received in the forward
        # pass.
        given = jax.lax.optimization_barrier((gradient, own, moved, out, rows))
        gradient, own, moved, out, rows = given
        like = own[0], *moved[:2]
        own, moved, (out, gradient) = (
            [self._deal(x, self.seq, dealt) for x in arrays]
            for arrays in (own, moved, (out, gradient))
        )
        rows = self._deal(rows, 2, dealt)
        of_query, *home = (
            _chunks(x, self.seq, parts).astype(jnp.float32)
            for x in block(own, moved, out, rows, gradient, self.causal)
        )
        queries = [_chunks(x, self.seq, parts) for x in own]
        outs, gradients = (_chunks(x, self.seq, parts) for x in (out, gradient))
        logs = _chunks(rows, 2, parts)

        def part(mine: Any, keys: Sequence[Array], seen: Any) -> list[Array]:
            found = block(
                *([x[mine] for x in queries], keys),
                *(outs[mine], logs[mine], gradients[mine], False),
            )
            return [jnp.where(seen, x, 0).astype(jnp.float32) for x in found]

        def turn(number: Any, moved: Sequence[Array], held: Any) -> Any:
            return self._backward_turn(part, number, moved, held, dealt)

        held = of_query, *(jnp.zeros_like(x) for x in home)
        of_query, *travelling = self._around(turn, moved, held)
        home = (x + self._send(y) for x, y in zip(home, travelling, strict=True))
        return tuple(
            self._return(_join(x.astype(y.dtype), self.seq), self.seq, dealt)
            for x, y in zip((of_query, *home), like, strict=True)
        )

    def _backward_turn(
        self, part: Any, number: Any, moved: Sequence[Array], held: Any, dealt: bool
    ) -> Any:
        """Adds the gradients of a round's blocks to the accumulated gradients."""
        of_query, *travelling = held
        if number is not _FIRST:
            travelling = [self._send(x) for x in travelling]
        of_key, of_value = travelling
        keys = [_chunks(x, self.seq, 1 + dealt) for x in moved]
        for own, other, seen in self._blocks(number, dealt):
            added = part(own, [x[other] for x in keys], seen)
            of_query = of_query.at[own].add(added[0])
            of_key = of_key.at[other].add(added[1])
            of_value = of_value.at[other].add(added[2])
        return of_query, of_key, of_value

    def _around(self, turn: Any, moved: Sequence[Array], held: Any) -> Any:
        """Runs all rounds after the first.

        In the first round, each device uses its own keys and values.

        The keys and values of the next round are sent while the current round computes.
        """
        moved = [self._send(x) for x in moved]

        def step(carry: Any, number: Any) -> Any:
            moved, held = carry
            ahead = [self._send(x) for x in moved]
            return (ahead, turn(number, moved, held)), None

        if self.size > _FIRST + 1:
            (moved, held), _ = step((moved, held), _FIRST)
            numbers = jnp.arange(_FIRST + 1, self.size - 1)
            if len(numbers):
                (moved, held), _ = jax.lax.scan(step, (moved, held), numbers)
            return turn(self.size - 1, moved, held)
        return turn(_FIRST, moved, held)

    def _blocks(self, number: Any, dealt: bool) -> Sequence[tuple[Any, Any, Any]]:
        """The blocks of a round: chunks of queries and keys, and whether they count."""
        earlier = jax.lax.axis_index(self.axes) >= number
        if not self.causal:
            return [(0, 0, True)]
        if not dealt:
            return [(0, 0, earlier)]
        same = jnp.where(earlier, 0, 1)
        return [(1, 0, True), (same, same, True)]

    def _merge(
        self, held: tuple[Array, Array], own: Any, found: tuple[Array, Array], seen: Any
    ) -> tuple[Array, Array]:
        out, rows = held
        logs = jnp.where(seen, found[1], -jnp.inf)
        merged, *shares = blockwise.merge_rows(rows[own], logs)
        kept, added = map(self._by_row, shares)
        new = kept * out[own] + added * found[0].astype(jnp.float32)
        return out.at[own].set(new), rows.at[own].set(merged)

    def _by_row(self, rows: Array) -> Array:
        """Reshapes one number per row to broadcast over the elements of a head."""
        return (rows if self.seq == 2 else rows.swapaxes(1, 2))[..., None]

    def _send(self, x: Array) -> Array:
        """Sends an array to the next device; returns the previous device's array."""
        n = self.size
        return jax.lax.ppermute(x, self.axes, [(i, (i + 1) % n) for i in range(n)])

    def _is_dealt(self, query: Array) -> bool:
        """Whether each device works on an early and a late chunk of the sequence."""
        return self.causal and query.shape[self.seq] % 2 == 0

    def _deal(self, x: Array, dim: int, dealt: bool) -> Array:
        """Sends the two chunks of each device to the devices that use the chunks.

        Device ``i`` has the chunks ``2i`` and ``2i + 1``. It uses one chunk with an
        even number and one chunk with an odd number.
        """
        if not dealt or self.ordered:
            return x
        even, odd = (
            jax.lax.ppermute(part, self.axes, self._workers(k))
            for k, part in enumerate(jnp.split(x, 2, dim))
        )
        first = self._has_even_first()
        halves = jnp.where(first, even, odd), jnp.where(first, odd, even)
        return jnp.concatenate(halves, dim)

    def _return(self, x: Array, dim: int, dealt: bool) -> Array:
        """Returns the inverse of `_deal`."""
        if not dealt or self.ordered:
            return x
        early, late = jnp.split(x, 2, dim)
        first = self._has_even_first()
        pairs = jnp.where(first, early, late), jnp.where(first, late, early)
        halves = [
            jax.lax.ppermute(part, self.axes, [(w, i) for i, w in self._workers(k)])
            for k, part in enumerate(pairs)
        ]
        return jnp.concatenate(halves, dim)

    def _workers(self, odd: int) -> list[tuple[int, int]]:
        """Pairs of a device and the device that works on its even (or odd) chunk.

        Args:
          odd: 1 for the chunks with odd numbers, 0 for the chunks with even numbers.
        """
        return [(i, worker(2 * i + odd, self.size)) for i in range(self.size)]

    def _has_even_first(self) -> Array:
        """Whether this device's early chunk has an even number."""
        return jax.lax.axis_index(self.axes) % 2 == 0


def _chunks(x: Array, dim: int, parts: int) -> Array:
    """Splits an array along a dimension, and stacks the chunks in a new first one."""
    return jnp.stack(jnp.split(x, parts, dim))


def _join(chunks: Array, dim: int) -> Array:
    """Returns the inverse of `_chunks`."""
    return jnp.concatenate(list(chunks), dim)


# Hand-written kernels, such as Pallas kernels, run shard by shard, because no compiler
# can partition them.
#
# Every device runs the kernel on its own shards. A Pallas kernel gets the grid of the
# shards; its blocks and its body are unchanged. A result that a kernel sums over its
# shards (`FactorRule.sums`) is also summed over devices before it is used.


# The body of a step's own `jax.shard_map` runs over the mesh of the plan.
#
# The types inside a jaxpr name the mesh that the jaxpr was traced on. The body is
# therefore run equation by equation, with calls inlined and loops traced anew. Every
# type then refers to the mesh that the body runs on.


def run_body(params: dict[str, Any], args: Sequence[Any]) -> list[Any]:
    """Runs the body of a ``shard_map`` on one device's shards.

    The mesh of the ``shard_map`` may have axes of size one that the plan's mesh lacks.
    The function binds these axis names.

    Args:
      params: parameters of the ``shard_map``.
      args: one device's shards of the operands.
    """
    body = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
    alone = {n: 1 for n, size in params["mesh"].shape.items() if size == 1}
    with jax_compat.axis_env(alone):
        return _run(body, (), args)


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, jax_compat.Literal):
            # A NumPy array has no mesh in its type, unlike the constant.
            return np.asarray(atom.val)
        return env[atom]

    for eqn in jaxpr.eqns:
        out = _equation(eqn, [read(a) for a in eqn.invars])
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: Any, args: list[Any]) -> Sequence[Any]:
    name = eqn.primitive.name
    if name in INLINED and (body := call_body(eqn)) is not None:
        return _run(*body, args)
    match name:
        case "scan":
            return _scan(eqn.params, args)
        case "while":
            return _while(eqn.params, args)
        case "cond":
            branches = [_function(b) for b in eqn.params["branches"]]
            return jax.lax.switch(args[0], branches, *args[1:])
        case _:
            return jax_compat.bind_anywhere(eqn, *args)


def _function(closed: Any) -> Callable[..., list[Any]]:
    return lambda *args: _run(closed.jaxpr, closed.consts, args)


def _scan(params: dict[str, Any], args: list[Any]) -> Sequence[Any]:
    body, consts = _function(params["jaxpr"]), args[: params["num_consts"]]
    end = params["num_consts"] + params["num_carry"]

    def step(carry: Any, xs: Any) -> Any:
        out = body(*consts, *carry, *xs)
        return out[: params["num_carry"]], out[params["num_carry"] :]

    carry, stacked = jax.lax.scan(
        step,
        args[params["num_consts"] : end],
        args[end:],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]


def _while(params: dict[str, Any], args: list[Any]) -> Sequence[Any]:
    first, both = params["cond_nconsts"], params["body_nconsts"]
    cond, body = _function(params["cond_jaxpr"]), _function(params["body_jaxpr"])
    of_cond, of_body = args[:first], args[first : first + both]
    return jax.lax.while_loop(
        lambda carry: cond(*of_cond, *carry)[0],
        lambda carry: body(*of_body, *carry),
        args[first + both :],
    )


def kernel_on_shards(
    eqn: Equation,
    rule: FactorRule,
    operands: Sequence[Any],
    layouts: Sequence[Layout],
    results: Sequence[Layout],
    mesh: Any,
    *,
    ordered: bool = False,
) -> list[Any]:
    """Runs a kernel on each device's shards.

    Args:
      eqn: the equation of the kernel.
      rule: the rule of the kernel.
      operands: the whole operands, in their layouts.
      layouts: the layouts of the operands.
      results: the layouts of the results.
      mesh: the mesh of the layouts.
      ordered: see `Ring`.
    """
    axes = _axes_of_factors(rule, layouts)
    if eqn.primitive == manual.PRIMITIVE:
        return _manual(eqn, axes, operands, mesh)

    ring = _ring(eqn, rule, axes, mesh, ordered)

    def run(*shards: Any) -> tuple[Any, ...]:
        if ring is None:
            out = _kernel_shards_bind(eqn, shards)
        else:
            out = _around_ring(eqn, ring, shards)
        for slot, factors in enumerate(rule.sums):
            names = tuple(mesh.axis_names[a] for f in factors for a in axes.get(f, ()))
            if names:
                out[slot] = jax.lax.psum(out[slot], names)
        return tuple(out)

    made = tuple(partition_spec(mesh, layout) for layout in results)
    return list(on_shards(run, operands, layouts, made, mesh))


def _manual(
    eqn: Equation,
    axes: dict[int, tuple[int, ...]],
    operands: Sequence[Any],
    mesh: Any,
) -> list[Any]:
    """Runs a step's own ``shard_map`` over the plan's mesh, under its own names."""
    names = [f"_{name}" for name in mesh.axis_names]
    for f, own in enumerate(manual.manual_axes(eqn.params)):
        (axis,) = axes[f]
        names[axis] = own
    taken = set(names)

    def spec(given: Any) -> Any:
        return jax.sharding.PartitionSpec(
            *(_without_small_axes(entry, taken) for entry in given)
        )

    return list(
        jax.shard_map(
            lambda *shards: tuple(run_body(eqn.params, shards)),
            mesh=jax_compat.renamed_mesh(mesh, tuple(names)),
            in_specs=tuple(spec(s) for s in eqn.params["in_specs"]),
            out_specs=tuple(spec(s) for s in eqn.params["out_specs"]),
            check_vma=eqn.params["check_vma"],
        )(*operands)
    )


def _without_small_axes(entry: Any, names: set[str]) -> Any:
    """Drops from a partition spec's entry the axes that are not in ``names``."""
    if not isinstance(entry, tuple):
        return entry if entry in names else None
    return tuple(n for n in entry if n in names) or None


def _kernel_shards_bind(eqn: Equation, shards: Sequence[Any]) -> list[Any]:
    if eqn.primitive != pallas_grid.PRIMITIVE:
        return jax_compat.bind(eqn.source, *shards)
    shapes = [jax.numpy.shape(x) for x in shards]
    params = pallas_grid.localise_params(eqn.params, shapes)
    return jax_compat.bind_with(eqn, params, *shards)


def _ring(
    eqn: Equation,
    rule: FactorRule,
    axes: dict[int, tuple[int, ...]],
    mesh: Any,
    ordered: bool,
) -> Ring | None:
    """The ring of devices that shard an attention's sequence; None without any."""
    factors = {e.factor for e in rule.exchanges}
    split = tuple(mesh.axis_names[a] for f in factors for a in axes.get(f, ()))
    size = math.prod(mesh.shape[name] for name in split)
    if size == 1:
        return None
    return Ring(
        axes=split,
        size=size,
        causal=kernels.is_causal(eqn.params),
        seq=kernels.sequence_dim(eqn.params),
        ordered=ordered,
    )


def _around_ring(eqn: Equation, ring: Ring, shards: Sequence[Any]) -> list[Any]:
    """Runs attention with its sequence sharded over the devices of a ring."""
    if eqn.primitive in blockwise.PRIMITIVES:
        return blockwise.run(
            eqn.primitive, eqn.params["form"], shards, ring.forward, ring.backward
        )
    query, key, value, *unused = shards[: kernels.OPERANDS]

    def bind(arrays: Sequence[Any], causal: bool, **given: Any) -> list[Any]:
        params = kernels.params_of_block(eqn.params, causal=causal) | given
        return jax_compat.bind_with(eqn, params, *arrays)

    if eqn.primitive == kernels.BACKWARD:
        rows, out, gradient = shards[kernels.OPERANDS :]

        def backward(
            own: Any, moved: Any, out: Any, rows: Any, gradient: Any, causal: bool
        ) -> Any:
            return bind([*own, *moved, *unused, rows, out, gradient], causal)

        return list(
            ring.backward(backward, (query,), (key, value), out, rows, gradient)
        )

    def forward(own: Any, moved: Any, causal: bool) -> Any:
        return bind([*own, *moved, *unused], causal, is_training=True)

    made = ring.forward(forward, (query,), (key, value))
    return list(made if eqn.params["is_training"] else made[:1])


def _axes_of_factors(
    rule: FactorRule, layouts: Sequence[Layout]
) -> dict[int, tuple[int, ...]]:
    """Returns the mesh axes that shard each factor of an operator's rule.

    At most one factor of a dimension may be sharded, unless its factors are in
    `FactorRule.whole`: then each of them is sharded over one axis.
    """
    found: dict[int, tuple[int, ...]] = {}
    for dims, layout in zip(rule.operands, layouts, strict=True):
        for factors, axes in zip(dims, layout, strict=True):
            free = [f for f in factors if f in rule.free]
            if rule.whole:
                found.update((f, (a,)) for f, a in zip(free, axes, strict=True))
            else:
                found.update((f, axes) for f in free)
    return found


# Grouped convolutions run shard by shard, because XLA's partitioner fails on them.


def grouped_convolution(
    params: Mapping[str, Any],
    operands: Sequence[Any],
    layouts: Sequence[Layout],
    rule: FactorRule,
    mesh: Any,
) -> Any:
    """Runs a grouped convolution shard by shard and sums the partial results.

    The partial results are stacked along a new leading dimension, which is sharded over
    the mesh axes that shard a contracted factor. They are summed over this dimension.

    Args:
      params: parameters of the primitive.
      operands: left and right operand, in their layouts.
      layouts: the layouts of the left operand, the right operand and the result.
      rule: the rule of the convolution.
      mesh: the mesh of the layouts.
    """
    left, right, result = layouts
    kept = {a for axes in result for a in axes}
    summed = tuple(sorted({a for x in (left, right) for d in x for a in d} - kept))
    sizes = [mesh.shape[name] for name in mesh.axis_names]
    local = dict(params)
    split = _group_split(rule, result, sizes)
    for name in ("feature_group_count", "batch_group_count"):
        local[name] = max(1, params[name] // split)

    def run(*shards: Any) -> Any:
        return jax.lax.conv_general_dilated_p.bind(*shards, **local)

    stacked = stack_partials(run, operands, (left, right), result, summed, mesh)
    return sum_partials(stacked)


def _group_split(rule: FactorRule, result: Layout, sizes: Sequence[int]) -> int:
    """Returns the number of parts into which a convolution's feature groups are split.

    The groups are the only factor that both operands and the result share. In their
    dimension, such as the channels of the result, the groups are the outer factor, and
    the channels within a group the inner factor. The inner factor is sharded only if
    every group lies on devices of its own.
    """
    common = frozenset.intersection(
        *(rule.factors_of(dims) for dims in (*rule.operands, *rule.results))
    )
    for factors, axes in zip(rule.results[0], result, strict=True):
        if factors and factors[0] in common:
            return min(rule.sizes[factors[0]], math.prod(sizes[a] for a in axes))
    return 1


def run_primitive(values: Values, eqn: Equation, op: Operator) -> list[Any]:
    """Runs an equation that is no loop or branch; returns its results."""
    if len(eqn.outputs) == 1 and values.plan.floating(eqn.outputs[0]):
        return [None]
    if eqn.outputs and values.plan.partial_layout(eqn.outputs[0]) is not None:
        return _partial(values, eqn, op)
    args = [values.operand(op, k, a) for k, a in enumerate(eqn.inputs)]
    if eqn.primitive in BY_SHARDS and (sums := values.plan.sums(eqn.outputs[0])):
        return [_contract(values, eqn, op, args, sums)]
    out = _bind(values, eqn, op, args)
    return [values.pin(x, values.plan.results(op, k)) for k, x in enumerate(out)]


def _partial(values: Values, eqn: Equation, op: Operator) -> list[Any]:
    """Runs an operator whose results stay partial, as stacked arrays."""
    found = values.plan.partial_layout(eqn.outputs[0])
    assert found is not None
    axes, layout = found
    operands = [values.partial_operand(op, k, a) for k, a in enumerate(eqn.inputs)]
    given = [values.plan.operand(op, k) for k in range(len(operands))]
    if any(isinstance(x, Stacked) for x in operands):
        out = stacked.linear(eqn, operands, given, axes, values.mesh)
    else:
        layouts = [
            ((),) * jax.numpy.ndim(x) if layout is None else layout
            for x, layout in zip(operands, given, strict=True)
        ]
        own = values.plan.results(op, 0)
        layout = own[0] if own else layout
        out = [stacked.contribute(eqn, operands, layouts, layout, axes, values.mesh)]
    return [values.defer(v, x) for v, x in zip(eqn.outputs, out, strict=True)]


def _contract(
    values: Values, eqn: Equation, op: Operator, args: list[Any], sums: tuple[Sum, ...]
) -> Any:
    """Runs a contraction and the collectives that complete its sum."""

    def run(*shards: Any) -> Any:
        (out,) = jax_compat.bind(eqn.source, *shards)
        return out

    layouts = [
        values.plan.operand(op, slot) or ((),) * jax.numpy.ndim(x)
        for slot, x in enumerate(args)
    ]
    out = run_and_sum(run, args, layouts, sums, values.mesh)
    return values.pin(out, behind(values.plan.results(op, 0), sums))


def run_barrier(values: Values, eqn: Equation, ops: list[Operator]) -> list[Any]:
    """Runs an optimization barrier: one equation, with one operator per value."""
    args = [values.operand(op, 0, a) for op, a in zip(ops, eqn.inputs, strict=True)]
    out = jax_compat.bind(eqn.source, *args)
    return [
        values.pin(x, values.plan.results(op, 0))
        for op, x in zip(ops, out, strict=True)
    ]


def _bind(values: Values, eqn: Equation, op: Operator, args: list[Any]) -> list[Any]:
    if jax_compat.is_ordered(eqn.source):
        out, values.turn = jax_compat.bind_in_turn(eqn.source, args, values.turn)
        return out
    if op.kernel is not None:
        return _kernel(values, eqn, op, args)
    if eqn.primitive == ragged.IN_BLOCKS:
        return [_ragged_product(values, eqn, op, args)]
    if eqn.primitive != shardy.PRIMITIVE or not shardy.is_grouped(eqn.params):
        return jax_compat.bind(eqn.source, *args)
    left, right = (values.plan.operand(op, slot) for slot in range(2))
    result = values.plan.results(op, 0)
    assert left is not None
    assert right is not None
    layouts = (left, right, result[0])
    return [grouped_convolution(eqn.params, args, layouts, op.rule, values.mesh)]


def _ragged_product(
    values: Values, eqn: Equation, op: Operator, args: list[Any]
) -> Any:
    """Runs a ragged product of blocks of rows, each device with its own blocks."""

    def run(*shards: Any) -> Any:
        (out,) = jax_compat.bind(eqn.source, *shards)
        return out

    layouts, (result,) = _layouts_of(values, op)
    axes = _axes_of_factors(op.rule, layouts)
    reduced = (f for f, k in enumerate(op.rule.kinds) if k is FactorKind.REDUCE)
    summed = tuple(sorted({a for f in reduced for a in axes.get(f, ())}))
    if not summed:
        made = partition_spec(values.mesh, result)
        return on_shards(run, args, layouts, made, values.mesh)
    partials = stack_partials(run, args, layouts, result, summed, values.mesh)
    return sum_partials(partials)


def _layouts_of(values: Values, op: Operator) -> tuple[list[Layout], list[Layout]]:
    """The layouts in which an operator reads its operands and makes its results."""
    given = [
        values.plan.operand(op, slot) or ((),) * len(dims)
        for slot, dims in enumerate(op.rule.operands)
    ]
    made: list[Layout] = []
    for slot, dims in enumerate(op.rule.results):
        own = values.plan.results(op, slot)
        made.append(own[0] if own else ((),) * len(dims))
    return given, made


def _kernel(values: Values, eqn: Equation, op: Operator, args: list[Any]) -> list[Any]:
    """Runs a hand-written kernel on shards."""
    given, made = _layouts_of(values, op)
    run = functools.partial(kernel_on_shards, eqn, op.rule, mesh=values.mesh)
    order = values.order
    if order is None or eqn.index not in order.of.kernels:
        return run(args, given, made)
    if _ring_axes(op, given) == order.axes:
        return run(args, given, made, ordered=True)
    # The layouts of this kernel are not those of the other kernels.
    (factor,) = op.rule.halved_factors

    def turned(arrays: Any, dims: Any, layouts: Any, turn: int) -> list[Any]:
        return [
            order.turned(x, found, turn, layout, values.mesh)
            if (found := [k for k, f in enumerate(own) if factor in f])
            else x
            for x, own, layout in zip(arrays, dims, layouts, strict=True)
        ]

    out = run(turned(args, op.rule.operands, given, -1), given, made)
    return turned(out, op.rule.results, made, 1)


def placed_order(
    program: Program, graph: OperatorGraph, plan: LayoutPlan, mesh: Any
) -> PlacedOrder | None:
    """Returns the order in which a plan holds tokens; None for the plain order.

    The order is that of the ring over which most attention kernels shard the sequence.
    """
    found = ring_order(program, graph.operators)
    if not isinstance(found, RingOrder):
        return None
    rings = collections.Counter(
        _ring_axes(op, [plan.operand(op, k) or () for k in range(len(op.inputs))])
        for op in graph.operators
        if op.equation in found.kernels
    )
    rings.pop((), None)
    for axes, _ in rings.most_common(1):
        size = math.prod(mesh.shape[mesh.axis_names[a]] for a in axes)
        if size > 1 and found.fits(program.values, size):
            return PlacedOrder(found, axes, size)
    return None


def _ring_axes(op: Operator, layouts: Sequence[Layout]) -> tuple[int, ...]:
    """The mesh axes over which an attention kernel shards its sequence."""
    (factor,) = op.rule.halved_factors
    for dims, layout in zip(op.rule.operands, layouts, strict=True):
        for factors, axes in zip(dims, layout, strict=False):
            if factor in factors:
                return tuple(axes)
    return ()
