"""Sharding rules and FLOPs of equations that are hand-written kernels.

The compiler cannot look into a hand-written kernel. No sharding rule can be read from
the lowering of a kernel, and a host without the device may be unable to lower the
kernel. cuDNN's attention has the rule of this module. A Pallas kernel has the rule that
its grid proves, or the rule that is registered under its name. The compiler cannot look
into a `jax.shard_map` that the step contains either. The rule of such a ``shard_map``
follows from its ``in_specs`` and ``out_specs``.

Model FLOPs of attention kernels that are written in Pallas:

The first operands of an attention kernel are queries, keys and values, and its body has
both matrix products and an exponential. The FLOPs that a kernel runs depend on its
block sizes, on the pairs that its mask skips, and on the values that it recomputes. The
*model FLOPs* depend on none of these. Queries and keys have ``d`` elements, and values
have ``e`` elements. For each pair of a query and a key, masked or not, the model FLOPs
are::

    forward                 scores 2 d, output 2 e
    gradient of queries     2 d
    gradients of the rest   keys 2 d, probabilities 2 e, values 2 e

The backward pass therefore has twice the FLOPs of the forward pass. Automatic
differentiation of the written-out products gives the same ratio (Chowdhery et al.,
"PaLM", 2022, appendix B, whose model FLOPs utilisation does not count recomputation).

Rules and FLOPs of the forward and backward calls of cuDNN's fused attention:

The operands are those of `jax.nn.dot_product_attention(implementation="cudnn")`. The
query has shape ``(batch, q_seq, heads, head_dim)``. Key and value have ``kv_seq`` and
``kv_heads`` instead. If the call's parameter ``layout`` is 1 and not 0, the heads come
before the sequence. An operand that a call does not use has no elements.

Batch and heads may be sharded, where a group of query heads stays with its key head.
The bias may lack the batch or the heads. The call then sums the gradient of the bias
over the shards of the missing dimension. With dropout each shard draws from the same
seed, as under JAX's own partitioning.

The sequence may be sharded if queries and keys have the same sequence length and only a
causal mask distinguishes positions. Shards of keys and values are then passed around a
ring (`autopar_passes.replay.ring`). A bias, dropout, a sliding window, lengths or
segments rule out a sharded sequence, because each block would need its part of them and
the call has no operand for such a part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from autopar_passes import jax_compat
from autopar_passes.program.equations import Equation
from autopar_passes.rules import blockwise, manual, pallas_grid
from autopar_passes.rules import flops as pallas_flops
from autopar_passes.rules.factor_rule import (
    CUDNN_EFFICIENCY,
    GPU,
    PALLAS_EFFICIENCY,
    TPU,
    Dims,
    Exchange,
    FactorKind,
    FactorRule,
    KernelWork,
    registered_rule,
)

# Primitives of a softmax, and of a mask.
EXPONENTIALS = frozenset({"exp", "exp2"})
ORDERINGS = frozenset({"ge", "gt", "le", "lt"})
_DOTS = frozenset({"dot_general", "dot"})
# A causal mask leaves at most this share of the FLOPs of all pairs of query and key.
_LEAST_MASKED = 0.95


def attention_flops(
    params: dict[str, Any],
    operands: Sequence[Any],
    results: Sequence[Any],
    executed: float,
) -> tuple[float, bool] | None:
    """The model FLOPs of a Pallas attention kernel, and whether the kernel is causal.

    Args:
      params: parameters of the ``pallas_call``.
      operands: the abstract operands.
      results: the abstract results.
      executed: FLOPs of the matrix products that the kernel runs.

    Returns:
      None for a kernel that is not an attention kernel.
    """
    mapping = params["grid_mapping"]
    body = list(_equations(params["jaxpr"]))
    kinds = {eqn.primitive.name for eqn in body}
    first = mapping.num_index_operands
    arrays = operands[first:]
    if not (kinds & EXPONENTIALS and kinds & _DOTS) or len(arrays) < 3:
        return None
    query, key, value = arrays[:3]
    rank = len(query.shape)
    same = len(key.shape) == len(value.shape) == rank >= 2
    if not same or query.shape[-1] != key.shape[-1] or _integer(query):
        return None
    keys = _sequence(mapping.block_mappings[1])
    if keys is None:
        return None
    pairs = math.prod(query.shape[:-1]) * float(keys)
    d, e = query.shape[-1], value.shape[-1]
    given = [a for a in arrays if len(a.shape) == rank and a.shape[-1] in (d, e)]
    gradients = sum(_is_like(r, (query, key, value)) for r in results)
    if len(given) == 3:
        products, runs = d + e, d + e
    elif gradients == 1:
        products, runs = d, 2 * d + e
    else:
        products, runs = (d if gradients == 2 else 2 * d) + 2 * e, 2 * (d + e)
    causal = executed < _LEAST_MASKED * 2.0 * runs * pairs or any(map(_orders, body))
    return 2.0 * products * pairs, causal


def is_attention(
    eqn: Equation, operands: Sequence[Any], results: Sequence[Any]
) -> bool:
    """Whether an equation is a kernel that computes the output of attention.

    Kernels of the backward pass of attention are not.

    Args:
      eqn: an equation.
      operands: the abstract operands, each with ``shape`` and ``dtype``.
      results: the abstract results.
    """
    if eqn.primitive != pallas_grid.PRIMITIVE:
        return eqn.primitive in (FORWARD, blockwise.FORWARD)
    if attention_flops(eqn.params, operands, results, 0.0) is None:
        return False
    first = eqn.params["grid_mapping"].num_index_operands
    query, key, value = operands[first : first + 3]
    # A kernel of the backward pass also reads the gradient of the output.
    ends = (query.shape[-1], value.shape[-1])
    rank = len(key.shape)
    given = [
        a for a in operands[first:] if len(a.shape) == rank and a.shape[-1] in ends
    ]
    return len(given) == 3


def _integer(array: Any) -> bool:
    return array.dtype.kind in "biu"


def _is_like(result: Any, of: Sequence[Any]) -> bool:
    """Whether a result has an array's shape, possibly with more leading dims."""
    return any(
        len(result.shape) >= len(array.shape)
        and tuple(result.shape[-len(array.shape) :]) == tuple(array.shape)
        for array in of
    )


def _sequence(mapping: Any) -> int | None:
    """The length of an array's only tiled dim; None if not exactly one is tiled."""
    shape = tuple(mapping.array_aval.shape)[:-1]
    sizes = [getattr(dim, "block_size", 1) for dim in mapping.block_shape[:-1]]
    tiled = [n for n, size in zip(shape, sizes, strict=True) if size > 1]
    return tiled[0] if len(tiled) == 1 else None


def _orders(eqn: Any) -> bool:
    """Whether an equation compares two integer arrays with two or more dimensions."""
    return eqn.primitive.name in ORDERINGS and all(
        len(getattr(atom.aval, "shape", ())) >= 2 and _integer(atom.aval)
        for atom in eqn.invars
    )


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax_compat.subjaxprs(eqn):
            yield from _equations(inner)


FORWARD = "dot_product_attention_fwd_wrapper"
BACKWARD = "dot_product_attention_bwd_wrapper"
PRIMITIVES = frozenset({FORWARD, BACKWARD})
# Primitives whose sequence a ring of devices can share.
RINGS = PRIMITIVES | blockwise.PRIMITIVES
# The number of operands of the forward call. The backward call has three more operands:
# the log-sum-exp of each row, the output, and the gradient of the output.
OPERANDS = 10

# The mask types that mask out the later keys.
_CAUSAL = frozenset({"CAUSAL", "PADDING_CAUSAL"})
# The backward pass runs five products, and the forward pass runs two. The five products
# are the scores, which are recomputed, and the gradients of probabilities, values,
# queries and keys (arXiv 2307.08691, section 4.1).
_BACKWARD_FLOPS = 2.5
# Factors of the heads: a group of query heads shares one key head.
_QUERY_HEADS = ("kv heads", "group")
_KEY_HEADS = ("kv heads",)


class _CallFactors:
    """The factors of one call, numbered in the order of their creation."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.kinds: list[FactorKind] = []
        self.known: dict[str, tuple[int, ...]] = {}

    def new(self, name: str, size: int, kind: FactorKind = FactorKind.BLOCKED) -> None:
        if size > 1:
            self.known[name] = (len(self.sizes),)
            self.sizes.append(size)
            self.kinds.append(kind)

    def dim(self, *names: str) -> tuple[int, ...]:
        return tuple(f for name in names for f in self.known.get(name, ()))

    def whole(self, shape: Sequence[int]) -> Dims:
        """Returns the dims with new factors, none of which may be sharded."""
        dims: list[tuple[int, ...]] = []
        for size in shape:
            name = f"own {len(self.sizes)}"
            self.new(name, size)
            dims.append(self.dim(name))
        return tuple(dims)


class _Call:
    """The sizes and factors of one call of cuDNN's attention."""

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
        free = FactorKind.BLOCKED if paged else FactorKind.PASS
        self.factors = _CallFactors()
        new = self.factors.new
        new("batch", self.batch, free)
        new("kv heads", self.kv_heads, free)
        new("group", self.heads // self.kv_heads)
        self.ring = self.q_seq == self.kv_seq and _goes_around(operands, params)
        if self.ring:
            new("q seq", self.q_seq, FactorKind.EXCHANGED)
            self.factors.known["kv seq"] = self.factors.dim("q seq")
        else:
            new("q seq", self.q_seq)
            new("kv seq", self.kv_seq)
        new("qk dim", self.qk_dim)
        new("v dim", self.v_dim if self.v_dim != self.qk_dim else 1)
        self.paged = paged

    def array(self, seq: str, heads: tuple[str, ...], dim: str) -> Dims:
        """Returns the dims of a query, key, value or output."""
        of = self.factors.dim
        if dim == "v dim" and self.v_dim == self.qk_dim:
            dim = "qk dim"
        middle = (of(*heads), of(seq))
        if not self.heads_first:
            middle = middle[::-1]
        return (of("batch"), *middle, of(dim))

    def operands(self) -> list[Dims]:
        """Returns the dims of query, key and value."""
        return [
            self.array("q seq", _QUERY_HEADS, "qk dim"),
            self.array("kv seq", _KEY_HEADS, "qk dim"),
            self.array("kv seq", _KEY_HEADS, "v dim"),
        ]

    def bias_dims(self) -> Dims:
        """Returns the dims of the bias, which may lack the batch and the heads."""
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
        """Dims of sequence lengths and offsets, with one entry for each example."""
        if not math.prod(shape) or shape[0] != self.batch:
            return self.factors.whole(shape)
        return (self.factors.dim("batch"), *self.factors.whole(shape[1:]))

    def statistics(self, shape: Sequence[int]) -> Dims:
        """Returns the dims of the row statistics, (batch x segments, heads, q_seq)."""
        of = self.factors.dim
        segments = shape[0] // self.batch
        self.factors.new("segments", segments)
        return (of("batch", "segments"), of("kv heads", "group"), of("q seq"))


def attention_rule(
    primitive: str,
    operands: Sequence[Any],
    results: Sequence[Any],
    params: dict[str, Any],
    read: Sequence[bool],
) -> FactorRule | None:
    """Returns the rule of a call of cuDNN's attention; None for sizes without a rule.

    Args:
      primitive: one of `PRIMITIVES`.
      operands: the abstract operands, each with ``shape``.
      results: the abstract results.
      params: parameters of the primitive.
      read: for each result, whether anything reads it.
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
        tuple(factors.sizes),
        tuple(factors.kinds),
        tuple(given),
        tuple(made),
        sums=sums,
        exchanges=_exchanges(call, primitive, params, results, read),
    )


def _goes_around(operands: Sequence[Any], params: dict[str, Any]) -> bool:
    """Whether a ring can compute the call, one block of queries and keys at a time."""
    plain = not params["dropout_rate"] and not params.get("sliding_window_length")
    masked = getattr(params["mask_type"], "name", "") in ("NO_MASK", "CAUSAL")
    return plain and masked and not any(math.prod(o.shape) for o in operands[3:10])


# Bytes of an element of the float32 sums in which the ring adds up gradients.
_SUM_BYTES = 4


def _exchanges(
    call: _Call,
    primitive: str,
    params: dict[str, Any],
    results: Sequence[Any],
    read: Sequence[bool],
) -> tuple[Exchange, ...]:
    """Returns the arrays that shards of a sequence exchange (`replay.ring`)."""
    factors = call.factors.dim("q seq")
    if not call.ring or not factors:
        return ()
    (factor,) = factors
    moved = [Exchange(factor, slot, around=True) for slot in (1, 2)]
    if primitive == BACKWARD:
        wider = max(1, _SUM_BYTES // results[1].dtype.itemsize)
        moved += [
            Exchange(factor, slot, result=True, around=True, widened=wider)
            for slot in (1, 2)
        ]
    if is_causal(params):
        ordered = (0, 1, 2, *((10, 11, 12) if primitive == BACKWARD else ()))
        moved += [Exchange(factor, slot) for slot in ordered]
        made = [slot for slot, one in enumerate(read) if one]
        moved += [Exchange(factor, slot, result=True) for slot in made]
    return tuple(moved)


def attention_kernel(
    primitive: str, operands: Sequence[Any], params: dict[str, Any]
) -> KernelWork:
    """Returns the FLOPs and the other properties of a call of cuDNN's attention.

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
        causal_flops=model if is_causal(params) else 0.0,
    )


def is_causal(params: dict[str, Any]) -> bool:
    """Whether the mask of a call of `RINGS` masks out the later keys."""
    if "form" in params:
        return params["form"].scores.causal
    return getattr(params["mask_type"], "name", "") in _CAUSAL


def sequence_dim(params: dict[str, Any]) -> int:
    """The index of the sequence dimension in queries, keys, values and outputs.

    Attention in blocks brings its operands into the order (batch, heads, sequence,
    elements) before a ring gets them.
    """
    return 2 if params.get("layout", 1) else 1


def params_of_block(params: dict[str, Any], *, causal: bool) -> dict[str, Any]:
    """Returns the parameters of a call on a block of queries and of keys.

    Args:
      params: the parameters of the whole call.
      causal: whether queries and keys are at the same positions, under a causal mask.
    """
    masks = type(params["mask_type"])
    return {**params, "mask_type": masks.CAUSAL if causal else masks.NO_MASK}


def _part(call: _Call, params: dict[str, Any]) -> float:
    """Returns the share of all pairs of a query and a key that the mask allows."""
    part = 0.5 if is_causal(params) else 1.0
    window = params.get("sliding_window_length")
    return part if not window else min(part, window / call.kv_seq)


# Attention kernels whose own cost estimates ignore the mask.
_ATTENTION = ("mha_", "splash_m", "_flash_attention", "flash_attention")


def is_kernel(primitive: str) -> bool:
    """Whether a primitive is a hand-written kernel."""
    single = (pallas_grid.PRIMITIVE, manual.PRIMITIVE)
    return primitive in RINGS or primitive in single


def kernel_name(eqn: Equation) -> str:
    """Returns the name of an equation's kernel for messages and reports."""
    if eqn.primitive != pallas_grid.PRIMITIVE:
        return eqn.primitive
    return pallas_grid.kernel_name(eqn.params)


def kernel_rule(
    eqn: Equation,
    operands: Sequence[Any],
    results: Sequence[Any],
    read: Sequence[bool],
) -> FactorRule | None:
    """Returns the rule of a kernel; None if nothing proves that it may be sharded.

    Args:
      eqn: an equation whose primitive `is_kernel`.
      operands: the abstract operands, each with ``shape`` and ``dtype``.
      results: the abstract results.
      read: for each result, whether anything reads it.

    Raises:
      InputError: a registered rule shards a dimension that the kernel cannot shard.
    """
    if eqn.primitive == manual.PRIMITIVE:
        return manual.manual_rule(operands, results, eqn.params)
    if eqn.primitive in blockwise.PRIMITIVES:
        return blockwise.rule(eqn.primitive, operands, results, eqn.params["form"])
    name = kernel_name(eqn)
    own = registered_rule(name, operands, results, eqn.params)
    if eqn.primitive in PRIMITIVES:
        if own is not None:
            return own
        return attention_rule(eqn.primitive, operands, results, eqn.params, read)
    if own is not None:
        return pallas_grid.check_rule(eqn.params, own, name)
    return pallas_grid.grid_rule(eqn.params, read)


def kernel_work(
    eqn: Equation,
    operands: Sequence[Any],
    results: Sequence[Any],
    arrays: Sequence[Any],
) -> KernelWork:
    """Returns the FLOPs and the other properties of a kernel on whole operands.

    Args:
      eqn: an equation whose primitive `is_kernel`.
      operands: the abstract operands.
      results: the abstract results.
      arrays: for each operand, its array if the program holds the array, else None.
    """
    if eqn.primitive in PRIMITIVES:
        return attention_kernel(eqn.primitive, operands, eqn.params)
    if eqn.primitive in blockwise.PRIMITIVES:
        return blockwise.work(eqn.primitive, operands, eqn.params["form"])
    if eqn.primitive == manual.PRIMITIVE:
        made = manual.manual_kernel(operands, results, eqn.params)
        shards = math.prod(manual.manual_axes(eqn.params).values())
        model, causal = (shards * n for n in _model_flops(eqn.params["jaxpr"], arrays))
        return dataclasses.replace(made, own_model_flops=model, causal_flops=causal)
    return _pallas_work(eqn.params, operands, results, arrays)


def _pallas_work(
    params: dict[str, Any],
    operands: Sequence[Any],
    results: Sequence[Any],
    arrays: Sequence[Any],
) -> KernelWork:
    """See `kernel_work`."""
    name, cost = pallas_grid.kernel_name(params), params.get("cost_estimate")
    found = pallas_flops.count_kernel_flops(params, arrays)
    matrix = found.matrix > 0
    flops, assumed = found.matrix if matrix else found.vector, ""
    attention = attention_flops(params, operands, results, found.matrix)
    model, causal = attention or (None, False)
    if cost is not None and not name.startswith(_ATTENTION):
        flops = float(cost.flops)
    elif not found.exact:
        assumed = f"kernel '{name}': branches that depend on data all run, loops once"
    return KernelWork(
        name=name,
        flops=flops,
        matrix=matrix,
        dtype=found.dtype or str(operands[0].dtype if operands else "float32"),
        efficiency=PALLAS_EFFICIENCY if matrix else 1.0,
        platforms=_platforms(params),
        assumed=assumed,
        own_model_flops=model,
        causal_flops=model if model and causal else 0.0,
    )


def _model_flops(body: Any, arrays: Sequence[Any]) -> tuple[float, float]:
    """The model FLOPs of a ``shard_map`` body, and the FLOPs of causal attention in it.

    Args:
      body: the body, which computes one shard.
      arrays: for each operand, its array if the program holds the array, else None.
    """
    total = causal = 0.0
    jaxpr = getattr(body, "jaxpr", body)
    if len(arrays) != len(jaxpr.invars):
        arrays = [None] * len(jaxpr.invars)
    held = {
        var: array
        for var, array in zip(jaxpr.invars, arrays, strict=True)
        if np.shape(array) == var.aval.shape and array is not None
    }
    for eqn in jaxpr.eqns:
        known = [
            None if isinstance(v, jax_compat.Literal) else held.get(v)
            for v in eqn.invars
        ]
        name, times = eqn.primitive.name, float(eqn.params.get("length", 1))
        given, made = ([v.aval for v in x] for x in (eqn.invars, eqn.outvars))
        if name in PRIMITIVES:
            kernel = attention_kernel(name, given, eqn.params)
            found = [(kernel.model_flops, kernel.causal_flops)]
        elif name == pallas_grid.PRIMITIVE:
            kernel = _pallas_work(eqn.params, given, made, known)
            found = [(kernel.model_flops, kernel.causal_flops)]
        elif inner := list(jax_compat.subjaxprs(eqn)):
            bodies = [_model_flops(x, known) for x in inner]
            found = [max(bodies)] if name == "cond" else bodies
            times = times if name == "scan" else 1.0
        else:
            found = [(pallas_flops.product_flops(eqn), 0.0)]
        total += times * sum(x for x, _ in found)
        causal += times * sum(x for _, x in found)
    return total, causal


def _platforms(params: dict[str, Any]) -> tuple[str, ...]:
    """Returns the devices that a Pallas kernel was written for."""
    if params.get("interpret"):
        return ()
    module = type(params.get("compiler_params")).__module__
    if "triton" in module or "mosaic_gpu" in module:
        return (GPU,)
    return (TPU,) if "mosaic" in module else (GPU, TPU)
