"""Attention with a sharded sequence: keys and values travel around a ring of devices.

Each device keeps its queries. In each round a device receives the keys and values of
its neighbour, runs the kernel on this block, and merges the result into its own. The
merge uses the log-sum-exp of each row (Liu, Zaharia, Abbeel, "Ring Attention with
Blockwise Transformers for Near-Infinite Context", arXiv 2310.01889; the merge is that
of Dao et al., "FlashAttention", arXiv 2205.14135, section 3.1). The backward pass needs
only the log-sum-exp of each whole row: with it, the kernel computes the gradients of a
block. Gradients of keys and values travel around the ring with them. The gradients of a
device's own block stay on the device and are added at the end.

Under a causal mask, a device with later rows has more work. The sequence is therefore
cut into two chunks per device, and device ``i`` of ``n`` has the queries of chunks
``i`` and ``2n - 1 - i`` (Brandon et al., "Striped Attention", arXiv 2311.09431, show
the problem; the order is that of https://github.com/zhuzilin/ring-flash-attention).
With this order, every device computes two unmasked blocks of chunks in every round.
Inputs and outputs are exchanged between the plain order and this order, so the
surrounding program sees only the plain order.

Sums over rounds are computed in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar_passes.rules.factor_rule import worker

Array = Any
# The first round in which a device works on keys and values of another device.
_FIRST = 1
# The kernel of the forward pass: from blocks of queries, keys and values, and whether
# the mask is causal, to the output and the log-sum-exp of each row.
Forward = Callable[[Array, Array, Array, bool], tuple[Array, Array]]
# The kernel of the backward pass: from the same blocks, and the output, the log-sum-exp
# and the output's gradient of whole rows, to the gradients of queries, keys and values.
Backward = Callable[
    [Array, Array, Array, Array, Array, Array, bool], tuple[Array, Array, Array]
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
    """

    axes: tuple[str, ...]
    size: int
    causal: bool
    seq: int

    def forward(
        self, block: Forward, query: Array, key: Array, value: Array
    ) -> tuple[Array, Array]:
        """The output for this device's queries, and the log-sum-exp of its rows.

        Args:
          block: the kernel.
          query: this device's shard of the queries.
          key: this device's shard of the keys.
          value: this device's shard of the values.

        Returns:
          The output, in the dtype of ``query``, and the log-sum-exp in float32, with
          shape (batch, heads, sequence).
        """
        dealt = self._is_dealt(query)
        q, k, v = (self._deal(x, self.seq, dealt) for x in (query, key, value))
        out, rows = block(q, k, v, self.causal)
        parts = 1 + dealt
        held = (
            _chunks(out, self.seq, parts).astype(jnp.float32),
            _chunks(rows, 2, parts),
        )
        queries = _chunks(q, self.seq, parts)

        def turn(number: Any, k: Array, v: Array, held: Any) -> Any:
            keys, values = (_chunks(x, self.seq, parts) for x in (k, v))
            for own, other, seen in self._blocks(number, dealt):
                found = block(queries[own], keys[other], values[other], False)
                held = self._merge(held, own, found, seen)
            return held

        held = self._around(turn, (k, v), held)
        out = _join(held[0].astype(query.dtype), self.seq)
        rows = _join(held[1], 2)
        return self._return(out, self.seq, dealt), self._return(rows, 2, dealt)

    def backward(
        self,
        block: Backward,
        query: Array,
        key: Array,
        value: Array,
        out: Array,
        rows: Array,
        gradient: Array,
    ) -> tuple[Array, Array, Array]:
        """The gradients of this device's queries, keys and values.

        Args:
          block: the kernel.
          query: this device's shard of the queries.
          key: this device's shard of the keys.
          value: this device's shard of the values.
          out: the output of `forward`.
          rows: the log-sum-exp of `forward`.
          gradient: the gradient of the output.
        """
        dealt = self._is_dealt(query)
        parts = 1 + dealt
        # Without the barrier a compiler would keep the shards received in the forward
        # pass.
        given = jax.lax.optimization_barrier((gradient, query, key, value, out, rows))
        gradient, q, k, v, out, rows = given
        q, k, v, out, gradient = (
            self._deal(x, self.seq, dealt) for x in (q, k, v, out, gradient)
        )
        rows = self._deal(rows, 2, dealt)
        of_query, *own = (
            _chunks(x, self.seq, parts).astype(jnp.float32)
            for x in block(q, k, v, out, rows, gradient, self.causal)
        )
        queries, outs, gradients = (
            _chunks(x, self.seq, parts) for x in (q, out, gradient)
        )
        logs = _chunks(rows, 2, parts)

        def part(own: Any, keys: Array, values: Array, seen: Any) -> list[Array]:
            found = block(
                *(queries[own], keys, values),
                *(outs[own], logs[own], gradients[own], False),
            )
            return [jnp.where(seen, x, 0).astype(jnp.float32) for x in found]

        def turn(number: Any, k: Array, v: Array, held: Any) -> Any:
            return self._backward_turn(part, number, (k, v), held, dealt)

        held = of_query, *(jnp.zeros_like(x) for x in own)
        of_query, *travelling = self._around(turn, (k, v), held)
        home = (x + self._send(y) for x, y in zip(own, travelling, strict=True))
        return tuple(
            self._return(_join(x.astype(like.dtype), self.seq), self.seq, dealt)
            for x, like in zip((of_query, *home), (query, key, value), strict=True)
        )

    def _backward_turn(
        self, part: Any, number: Any, moved: tuple[Array, Array], held: Any, dealt: bool
    ) -> Any:
        """Adds the gradients of a round's blocks to the accumulated gradients."""
        of_query, *travelling = held
        if number is not _FIRST:
            travelling = [self._send(x) for x in travelling]
        of_key, of_value = travelling
        keys, values = (_chunks(x, self.seq, 1 + dealt) for x in moved)
        for own, other, seen in self._blocks(number, dealt):
            added = part(own, keys[other], values[other], seen)
            of_query = of_query.at[own].add(added[0])
            of_key = of_key.at[other].add(added[1])
            of_value = of_value.at[other].add(added[2])
        return of_query, of_key, of_value

    def _around(self, turn: Any, moved: tuple[Array, Array], held: Any) -> Any:
        """Runs all rounds after the first, in which each device uses its own block.

        The keys and values of the next round are sent while the current round computes.
        """
        k, v = (self._send(x) for x in moved)

        def step(carry: Any, number: Any) -> Any:
            (k, v), held = carry
            ahead = self._send(k), self._send(v)
            return (ahead, turn(number, k, v, held)), None

        if self.size > _FIRST + 1:
            ((k, v), held), _ = step(((k, v), held), _FIRST)
            numbers = jnp.arange(_FIRST + 1, self.size - 1)
            if len(numbers):
                ((k, v), held), _ = jax.lax.scan(step, ((k, v), held), numbers)
            return turn(self.size - 1, k, v, held)
        return turn(_FIRST, k, v, held)

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
        merged = jnp.logaddexp(rows[own], logs)
        kept, added = (self._by_row(jnp.exp(x - merged)) for x in (rows[own], logs))
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
        if not dealt:
            return x
        even, odd = (
            jax.lax.ppermute(part, self.axes, self._workers(k))
            for k, part in enumerate(jnp.split(x, 2, dim))
        )
        first = self._has_even_first()
        halves = jnp.where(first, even, odd), jnp.where(first, odd, even)
        return jnp.concatenate(halves, dim)

    def _return(self, x: Array, dim: int, dealt: bool) -> Array:
        """The inverse of `_deal`."""
        if not dealt:
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
    """The inverse of `_chunks`."""
    return jnp.concatenate(list(chunks), dim)
