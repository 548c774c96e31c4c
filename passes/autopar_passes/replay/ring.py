"""Attention whose sequence is split: keys and values go around a ring of devices.

Each device keeps its queries. In each turn it gets the keys and values of the device
before it, runs the kernel on that block, and merges what comes out by the logarithms of
the sums of exponentials (Liu, Zaharia, Abbeel, "Ring Attention with Blockwise
Transformers for Near-Infinite Context", arXiv 2310.01889; the merge is that of Dao et
al., "FlashAttention", arXiv 2205.14135, section 3.1). The backward pass needs nothing
but the same numbers of the whole row: the gradient of a block is the kernel's, and the
gradients of keys and values travel along with them; those of a device's own block wait
for them at home.

Under a causal mask a device with later rows has more to do. So the sequence is cut into
two chunks a device, and device ``i`` of ``n`` works on chunks ``i`` and ``2n - 1 - i``
(Brandon et al., "Striped Attention", arXiv 2311.09431, show the problem; the order is
that of https://github.com/zhuzilin/ring-flash-attention). Then each turn is two blocks
of chunks without a mask, on every device. What comes in and goes out is exchanged
between the plain order and this one, so the program around sees the plain order.

Sums over turns are in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar_passes.rules.factor_rule import worker

Array = Any
# The first turn in which a device has keys and values of another.
_FIRST = 1
# Blocks of queries, keys and values, and whether the mask is causal, to the output and
# the logarithm of the sum of exponentials of each row.
Forward = Callable[[Array, Array, Array, bool], tuple[Array, Array]]
# The same, and the output, these logarithms and the output's gradient of the whole row,
# to the gradients of queries, keys and values.
Backward = Callable[
    [Array, Array, Array, Array, Array, Array, bool], tuple[Array, Array, Array]
]


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """The devices over which a sequence is split.

    Attributes:
      axes: names of the mesh axes, major to minor.
      size: number of devices.
      causal: whether a query sees no later key.
      seq: the dimension of the sequence of (batch, sequence, heads, head_dim), 1, or of
        (batch, heads, sequence, head_dim), 2.
    """

    axes: tuple[str, ...]
    size: int
    causal: bool
    seq: int

    def forward(
        self, block: Forward, query: Array, key: Array, value: Array
    ) -> tuple[Array, Array]:
        """The output of this device's queries, and the logarithms of its rows.

        Args:
          block: the kernel.
          query: this device's shard.
          key: the same.
          value: the same.

        Returns:
          The output, in the type of ``query``, and float32 (batch, heads, sequence).
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
          query: this device's shard.
          key: the same.
          value: the same.
          out: the output of `forward`.
          rows: its logarithms.
          gradient: of the output.
        """
        dealt = self._is_dealt(query)
        parts = 1 + dealt
        # A compiler would keep what the forward pass got, rather than send it again.
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
        """Adds the gradients of a turn's blocks to those that are held."""
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
        """Runs all turns but that in which a device has its own keys and values.

        Those of the next turn are sent beside this one's work.
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
        """The blocks of a turn: chunks of queries and keys, and whether it counts."""
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
        """Numbers of rows as they stand before the elements of a head."""
        return (rows if self.seq == 2 else rows.swapaxes(1, 2))[..., None]

    def _send(self, x: Array) -> Array:
        """An array of the device before this one."""
        n = self.size
        return jax.lax.ppermute(x, self.axes, [(i, (i + 1) % n) for i in range(n)])

    def _is_dealt(self, query: Array) -> bool:
        """Whether each device works on an early chunk and a late one."""
        return self.causal and query.shape[self.seq] % 2 == 0

    def _deal(self, x: Array, dim: int, dealt: bool) -> Array:
        """Chunks ``2i`` and ``2i + 1`` of each device to the devices that work on them.

        Of a device's two chunks one has an even number, and one an odd one.
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
        """Each device, and the one that works on its chunk with an odd number, or not.

        Args:
          odd: 1 for the chunks with odd numbers, 0 for the others.
        """
        return [(i, worker(2 * i + odd, self.size)) for i in range(self.size)]

    def _has_even_first(self) -> Array:
        """Whether this device's early chunk has an even number."""
        return jax.lax.axis_index(self.axes) % 2 == 0


def _chunks(x: Array, dim: int, parts: int) -> Array:
    """An array with its chunks along a dimension stacked in front."""
    return jnp.stack(jnp.split(x, parts, dim))


def _join(chunks: Array, dim: int) -> Array:
    """The inverse of `_chunks`."""
    return jnp.concatenate(list(chunks), dim)
