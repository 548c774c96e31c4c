"""cuDNN's fused attention: rules and work of its forward and backward calls.

The operands are those of `jax.nn.dot_product_attention(implementation="cudnn")`:
query ``(batch, q_seq, heads, head_dim)``, key and value with ``kv_seq`` and
``kv_heads``, or with heads before the sequence (layout 1). An operand that a call does
not use has no elements.

Batch and heads may be split; groups of query heads stay with their key head. The bias
may lack batch or heads: its gradient is then summed over their shards by the call.
With dropout each shard draws from the same seed, as under JAX's own partitioning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autopar_passes.rules.factor_rule import Dims, FactorKind, FactorRule
from autopar_passes.rules.kernel import CUDNN_EFFICIENCY, GPU, KernelWork

FORWARD = "dot_product_attention_fwd_wrapper"
BACKWARD = "dot_product_attention_bwd_wrapper"
PRIMITIVES = frozenset({FORWARD, BACKWARD})

# Of the mask types, those that leave out the later keys.
_CAUSAL = frozenset({"CAUSAL", "PADDING_CAUSAL"})
# Five products where the forward pass has two: the scores once more, and the
# gradients of probabilities, values, queries and keys (arXiv 2307.08691, section 4.1).
_BACKWARD_FLOPS = 2.5
# Factors of the heads: a key head is shared by a group of query heads.
_QUERY_HEADS = ("kv heads", "group")
_KEY_HEADS = ("kv heads",)


class _CallFactors:
    """Numbers the factors of one call."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.kinds: list[FactorKind] = []
        self.known: dict[str, tuple[int, ...]] = {}

    def new(self, name: str, size: int, *, free: bool = False) -> None:
        if size > 1:
            self.known[name] = (len(self.sizes),)
            self.sizes.append(size)
            self.kinds.append(FactorKind.PASS if free else FactorKind.BLOCKED)

    def dim(self, *names: str) -> tuple[int, ...]:
        return tuple(f for name in names for f in self.known.get(name, ()))

    def whole(self, shape: Sequence[int]) -> Dims:
        """Dims of their own, none of which may be split."""
        dims: list[tuple[int, ...]] = []
        for size in shape:
            name = f"own {len(self.sizes)}"
            self.new(name, size)
            dims.append(self.dim(name))
        return tuple(dims)


class _Call:
    """The sizes and factors of one call."""

    def __init__(self, operands: Sequence[Any], params: dict[str, Any]) -> None:
        query, key, value, bias = (tuple(o.shape) for o in operands[:4])
        self.heads_first = bool(params["layout"])
        heads, seq = (1, 2) if self.heads_first else (2, 1)
        self.batch, self.heads = query[0], query[heads]
        self.q_seq, self.kv_seq = query[seq], value[seq]
        self.kv_heads = key[heads]
        self.qk_dim, self.v_dim = query[3], value[3]
        self.bias = bias
        paged = any(math.prod(o.shape) for o in operands[8:10])
        self.factors = _CallFactors()
        new = self.factors.new
        new("batch", self.batch, free=not paged)
        new("kv heads", self.kv_heads, free=not paged)
        new("group", self.heads // self.kv_heads)
        new("q seq", self.q_seq)
        new("kv seq", self.kv_seq)
        new("qk dim", self.qk_dim)
        new("v dim", self.v_dim if self.v_dim != self.qk_dim else 1)
        self.paged = paged

    def array(self, seq: str, heads: tuple[str, ...], dim: str) -> Dims:
        """Dims of a query, key, value or output."""
        of = self.factors.dim
        if dim == "v dim" and self.v_dim == self.qk_dim:
            dim = "qk dim"
        middle = (of(*heads), of(seq))
        if not self.heads_first:
            middle = middle[::-1]
        return (of("batch"), *middle, of(dim))

    def operands(self) -> list[Dims]:
        """Dims of query, key and value."""
        return [
            self.array("q seq", _QUERY_HEADS, "qk dim"),
            self.array("kv seq", _KEY_HEADS, "qk dim"),
            self.array("kv seq", _KEY_HEADS, "v dim"),
        ]

    def bias_dims(self) -> Dims:
        """Dims of the bias; it may lack batch and heads."""
        if not math.prod(self.bias):
            return self.factors.whole(self.bias)
        of = self.factors.dim
        batch = of("batch") if self.bias[0] == self.batch else ()
        heads = of("kv heads", "group") if self.bias[1] == self.heads else ()
        return (batch, heads, of("q seq"), of("kv seq"))

    def bias_sums(self) -> tuple[int, ...]:
        """Factors over which the gradient of the bias is summed."""
        of = self.factors.dim
        batch = of("batch") if self.bias[0] == 1 else ()
        heads = of("kv heads") if self.bias[1] == 1 else ()
        return (*batch, *heads)

    def rows(self, shape: Sequence[int]) -> Dims:
        """Dims of lengths and offsets: a row for each example."""
        if not math.prod(shape) or shape[0] != self.batch:
            return self.factors.whole(shape)
        return (self.factors.dim("batch"), *self.factors.whole(shape[1:]))

    def statistics(self, shape: Sequence[int]) -> Dims:
        """Dims of the row statistics, (batch x segments, heads, q_seq)."""
        of = self.factors.dim
        segments = shape[0] // self.batch
        self.factors.new("segments", segments)
        return (of("batch", "segments"), of("kv heads", "group"), of("q seq"))


def attention_rule(
    primitive: str,
    operands: Sequence[Any],
    results: Sequence[Any],
    params: dict[str, Any],
) -> FactorRule | None:
    """Returns the rule of a call; None where the sizes are none that it knows.

    Args:
      primitive: one of `PRIMITIVES`.
      operands: the abstract operands, each with ``shape``.
      results: the abstract results.
      params: parameters of the primitive.
    """
    call = _Call(operands, params)
    known_bias = not math.prod(call.bias) or (
        call.bias[0] in (1, call.batch) and call.bias[1] in (1, call.heads)
    )
    if call.heads % call.kv_heads or not known_bias:
        return None
    output = call.array("q seq", _QUERY_HEADS, "v dim")
    given = [*call.operands(), call.bias_dims()]
    given += [call.rows(o.shape) for o in operands[4:8]]
    given += [call.factors.whole(o.shape) for o in operands[8:10]]
    sums: tuple[tuple[int, ...], ...] = ()
    if primitive == FORWARD:
        made = [output, *(call.statistics(r.shape) for r in results[1:])]
    else:
        given += [call.statistics(operands[10].shape), output, output]
        made = given[: len(results)]
        if len(results) > 3 and call.bias_sums():
            sums = ((), (), (), call.bias_sums())
    factors = call.factors
    return FactorRule(
        tuple(factors.sizes), tuple(factors.kinds), tuple(given), tuple(made), sums=sums
    )


def attention_kernel(
    primitive: str, operands: Sequence[Any], params: dict[str, Any]
) -> KernelWork:
    """Returns the work of a call.

    The forward pass takes ``2 * (qk_dim + v_dim)`` FLOPs for each query, key and head.
    """
    call = _Call(operands, params)
    pairs = float(call.batch * call.heads) * call.q_seq * call.kv_seq
    whole = 2.0 * (call.qk_dim + call.v_dim) * pairs
    backward, flops = primitive == BACKWARD, whole * _part(call, params)
    model = whole * (2.0 if backward else 1.0)
    return KernelWork(
        name="cudnn attention" + (" backward" if backward else ""),
        flops=flops * (_BACKWARD_FLOPS if backward else 1.0),
        matrix=True,
        dtype=str(operands[0].dtype),
        efficiency=CUDNN_EFFICIENCY,
        platforms=(GPU,),
        own_model_flops=model,
        causal_flops=model if _is_causal(params) else 0.0,
    )


def _is_causal(params: dict[str, Any]) -> bool:
    return getattr(params["mask_type"], "name", "") in _CAUSAL


def _part(call: _Call, params: dict[str, Any]) -> float:
    """The part of all pairs of a query and a key that the mask leaves."""
    part = 0.5 if _is_causal(params) else 1.0
    window = params.get("sliding_window_length")
    return part if not window else min(part, window / call.kv_seq)
