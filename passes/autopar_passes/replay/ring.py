"""Attention with a sharded sequence.

Keys and values travel around a ring of devices, or each device gathers them.

Each device keeps its queries. In each round a device receives the keys and values
of its neighbour, runs the kernel on this block, and merges the result into its own.
The merge uses the log-sum-exp of each row (Liu, Zaharia, Abbeel, "Ring Attention
with Blockwise Transformers for Near-Infinite Context", arXiv 2310.01889; the merge
is that of Dao et al., "FlashAttention", arXiv 2205.14135, section 3.1). The
backward pass needs only the log-sum-exp of each whole row: with it, the kernel
computes the gradients of a block. Gradients of keys and values travel around the
ring with them. The gradients of a device's own block stay on the device and are
added at the end.

Under a causal mask, a device with later rows has more work. The sequence is
therefore cut into two chunks per device, and device ``i`` of ``n`` has the queries
of chunks ``i`` and ``2n - 1 - i`` (Brandon et al., "Striped Attention", arXiv
2311.09431, show the problem; the order is that of
https://github.com/zhuzilin/ring-flash-attention). With this order, every device
computes two unmasked blocks of chunks in every round. If the surrounding program
does not hold tokens in this order (`autopar_passes.graph.ring_order`), inputs and
outputs are exchanged between the plain order and this order.

If keys and values are gathered (as in Llama 3, arXiv 2407.21783, section 3.3.2), each
device has the blocks of all rounds from the start. Without a mask, one kernel computes
them together. Under a causal mask, the rounds are those of the ring, and a device
takes the block that it would receive. In the backward pass, keys and values are
gathered again, and gradients are summed over devices by a reduce-scatter.

Sums over rounds are computed in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar_passes import jax_compat
from autopar_passes.program.equations import Equation
from autopar_passes.rules import blockwise, kernels
from autopar_passes.rules.factor_rule import FactorRule, worker

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
      gathered: whether each device gathers keys and values. If not, they travel.
    """

    axes: tuple[str, ...]
    size: int
    causal: bool
    seq: int
    ordered: bool = False
    gathered: bool = False

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
        if self.gathered and not self.causal:
            out, rows = block(own, [self._gather(x) for x in moved], False)
            return out.astype(own[0].dtype), rows
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
          own, moved: see `forward`.
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
        if self.gathered and not self.causal:
            found = self._backward_at_once(block, own, moved, (out, rows, gradient))
            return tuple(x.astype(y.dtype) for x, y in zip(found, like, strict=True))
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

        blocks = (self.size,) if self.gathered else ()
        held = of_query, *(jnp.zeros(blocks + x.shape, x.dtype) for x in home)
        of_query, *others = self._around(turn, moved, held)
        finish = functools.partial(self._scatter, dim=0) if blocks else self._send
        home = (x + finish(y) for x, y in zip(home, others, strict=True))
        return tuple(
            self._return(_join(x.astype(y.dtype), self.seq), self.seq, dealt)
            for x, y in zip((of_query, *home), like, strict=True)
        )

    def _backward_at_once(
        self,
        block: Backward,
        own: Sequence[Array],
        moved: Sequence[Array],
        rest: tuple[Array, Array, Array],
    ) -> list[Array]:
        """The gradients of one call with all keys; ``rest`` is as in `backward`."""
        keys = [self._gather(x) for x in moved]
        of_query, *sums = block(own, keys, *rest, False)
        return [of_query, *(self._scatter(x, self.seq) for x in sums)]

    def _backward_turn(
        self, part: Any, number: Any, moved: Sequence[Array], held: Any, dealt: bool
    ) -> Any:
        """Adds the gradients of a round's blocks to the accumulated gradients.

        Gradients of keys and values travel, or have an entry for each device.
        """
        of_query, *others = held
        if not self.gathered and number is not _FIRST:
            others = [self._send(x) for x in others]
        of_key, of_value = others
        place = (self._owner(number),) if self.gathered else ()
        keys = [_chunks(x, self.seq, 1 + dealt) for x in moved]
        for own, other, seen in self._blocks(number, dealt):
            added = part(own, [x[other] for x in keys], seen)
            of_query = of_query.at[own].add(added[0])
            of_key = of_key.at[*place, other].add(added[1])
            of_value = of_value.at[*place, other].add(added[2])
        return of_query, of_key, of_value

    def _around(self, turn: Any, moved: Sequence[Array], held: Any) -> Any:
        """Runs all rounds after the first.

        In the first round, each device uses its own keys and values.

        The keys and values of the next round are sent while the current round computes.
        """
        if self.gathered:
            return self._over_gathered(turn, moved, held)
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

    def _over_gathered(self, turn: Any, moved: Sequence[Array], held: Any) -> Any:
        """Runs all rounds after the first on gathered keys and values."""
        every = [jax.lax.all_gather(x, self.axes) for x in moved]

        def step(held: Any, number: Any) -> Any:
            owner = self._owner(number)
            return turn(number, [x[owner] for x in every], held), None

        return jax.lax.scan(step, held, jnp.arange(_FIRST, self.size))[0]

    def _owner(self, number: Any) -> Array:
        """The device whose keys and values this device uses in a round."""
        return (jax.lax.axis_index(self.axes) - number) % self.size

    def _gather(self, x: Array) -> Array:
        """The shards of all devices, along the sequence."""
        return jax.lax.all_gather(x, self.axes, axis=self.seq, tiled=True)

    def _scatter(self, x: Array, dim: int) -> Array:
        """This device's part of the sum over devices; parts lie along a dimension.

        A dimension 0 has one entry for each device, and is removed.
        """
        return jax.lax.psum_scatter(
            x.astype(jnp.float32), self.axes, scatter_dimension=dim, tiled=dim > 0
        )

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


def ring_of(
    eqn: Equation,
    rule: FactorRule,
    axes: dict[int, tuple[int, ...]],
    mesh: Any,
    ordered: bool,
    gathered: bool,
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
        gathered=gathered,
    )


def run_around(eqn: Equation, ring: Ring, shards: Sequence[Any]) -> list[Any]:
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
