"""Sharding rules of equations: which dimensions are the same factor.

A `FactorRule` says of each equation which dimensions of its operands and
results are one and the same *factor*, as an einsum does. The rules are read
from the compiler (see `autopar_passes.rules.book`).
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Sequence
from typing import Any


class FactorKind(enum.Enum):
    """What happens when a mesh axis is assigned to a factor."""

    PASS = "parallel: each shard is computed alone"
    EXCHANGED = "parallel: shards send each other what they need"
    REDUCE = "reduced: shards hold partial results"
    BLOCKED = "must be replicated"


# `FactorRule.reduction` of an equation that reduces and then goes on, such as a
# gather that fills in what is out of bounds: it must reduce to every device.
INNER = "inner"

# Per dimension, the factors that make it up, major to minor. () is a
# dimension of size one.
Dims = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """An array that the shards of an operator send each other.

    Nothing is sent where the factor is not split.

    Attributes:
      factor: of the rule.
      slot: of the operand, or of the result.
      result: whether it is a result.
      around: whether it goes around, shard after shard, beside the operator's work.
        Else it is dealt: of its two halves each goes to the device that works on it
        (`worker`), and the work waits for both.
      widened: how many times wider its elements are than those of the array.
    """

    factor: int
    slot: int
    result: bool = False
    around: bool = False
    widened: int = 1

    def messages(self, shards: int) -> int:
        """How many messages a device sends."""
        if shards < 2:
            return 0
        return shards - 1 if self.around else 2

    def part(self, shards: int) -> float:
        """The part of a shard in a message, of all devices on average."""
        if self.around:
            return float(self.widened)
        stays = sum(worker(c, shards) == c // 2 for c in range(2 * shards))
        return 0.5 * (1.0 - stays / (2 * shards))


def worker(chunk: int, shards: int) -> int:
    """The device that works on a chunk, of two for each device: early and late ones.

    >>> [worker(chunk, 2) for chunk in range(4)]
    [0, 1, 1, 0]
    """
    return min(chunk, 2 * shards - 1 - chunk)


@dataclasses.dataclass(frozen=True, slots=True)
class FactorRule:
    """The factors of one equation.

    Attributes:
      sizes: size of each factor.
      kinds: what sharding each factor means.
      operands: for each operand, the factors of each dimension.
      results: the same for each result.
      reduction: how partial results combine: ``sum``, ``max``, ``min``, ``or``,
        ``and``, or `INNER`; '' where there is no reduction factor.
      sums: for each result, the parallel factors over whose shards the operator
        itself adds it up before it hands it on; () where there are none.
      whole: factors that one mesh axis of their size must split; no other way of
        running the operator means the same.
      exchanges: what shards send each other (`FactorKind.EXCHANGED`).
    """

    sizes: tuple[int, ...]
    kinds: tuple[FactorKind, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    reduction: str = ""
    sums: tuple[tuple[int, ...], ...] = ()
    whole: tuple[int, ...] = ()
    exchanges: tuple[Exchange, ...] = ()

    def factors_of(self, dims: Dims) -> frozenset[int]:
        """Returns the factors that appear in one operand or result."""
        return frozenset(f for dim in dims for f in dim)

    @property
    def free(self) -> frozenset[int]:
        """Factors of more than one element that may be sharded."""
        return frozenset(
            f
            for f, (size, kind) in enumerate(zip(self.sizes, self.kinds, strict=True))
            if size > 1 and kind is not FactorKind.BLOCKED
        )

    @property
    def halved_factors(self) -> tuple[int, ...]:
        """Factors of whose shards the halves are dealt to devices."""
        return tuple({e.factor for e in self.exchanges if not e.around})

    @property
    def reduced_factors(self) -> frozenset[int]:
        """Factors whose sharding leaves partial results."""
        if FactorKind.REDUCE not in self.kinds:
            return frozenset()
        return frozenset(f for f, k in enumerate(self.kinds) if k is FactorKind.REDUCE)

    reduced = reduced_factors  # the old name, for one release


def replicated_rule(
    operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]
) -> FactorRule:
    """Returns the rule of an equation that must see whole arrays.

    Args:
      operands: shape of each operand.
      results: shape of each result.
    """
    return separate_rule(operands, results, FactorKind.BLOCKED)


def separate_rule(
    operands: Sequence[tuple[int, ...]],
    results: Sequence[tuple[int, ...]],
    kind: FactorKind,
) -> FactorRule:
    """Returns the rule in which no two dimensions are the same factor.

    Args:
      operands: shape of each operand.
      results: shape of each result.
      kind: of all factors.
    """
    numbers = itertools.count()
    dims = [
        tuple((next(numbers),) if size > 1 else () for size in shape)
        for shape in (*operands, *results)
    ]
    sizes = tuple(s for shape in (*operands, *results) for s in shape if s > 1)
    kinds = (kind,) * len(sizes)
    count = len(operands)
    return FactorRule(sizes, kinds, tuple(dims[:count]), tuple(dims[count:]))


def elementwise_rule(
    operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]
) -> FactorRule:
    """Returns the rule of an equation that works on each element alone.

    Every operand must be a scalar or have the shape of the results.
    """
    shape = results[0]
    factors = [d for d, size in enumerate(shape) if size > 1]
    number = {d: f for f, d in enumerate(factors)}
    dims: Dims = tuple((number[d],) if d in number else () for d in range(len(shape)))
    return FactorRule(
        tuple(shape[d] for d in factors),
        (FactorKind.PASS,) * len(factors),
        tuple(dims if s == shape else ((),) * len(s) for s in operands),
        tuple(dims for _ in results),
    )


# Part of the matrix peak that kernels of fused attention reach. FlashAttention-3 and
# cuDNN 9 reach 0.6 to 0.75 of an H100's bfloat16 peak at sequences of 2,048 and more
# (arXiv 2407.08608, figures 5 and 6; their backward passes 0.5 to 0.6).
CUDNN_EFFICIENCY = 0.6
# FlashAttention-2, whose algorithm the Pallas kernels follow, reaches 0.5 to 0.73 of
# an A100's peak (arXiv 2307.08691, section 4.1).
PALLAS_EFFICIENCY = 0.5

# Devices that can run a kernel, in the words of `jax.Device.platform`.
GPU, TPU = "gpu", "tpu"


@dataclasses.dataclass(frozen=True, slots=True)
class KernelWork:
    """The work of one kernel on whole arrays.

    A kernel reads its operands and writes its results once; what it holds in between
    stays on the chip.

    Attributes:
      name: what people call it.
      flops: floating-point operations, each time it runs.
      matrix: whether the matrix units do them.
      dtype: NumPy or ml_dtypes name of what they work on.
      efficiency: part of the peak rate that it reaches, 0 to 1.
      platforms: kinds of devices that can run it; empty: any.
      assumed: what the FLOPs assume; empty: nothing.
      own_model_flops: FLOPs of the model's own products, where they are other than what
        it runs: attention without its mask, and without what it computes again.
      causal_flops: the part of these that is attention with a causal mask.
    """

    name: str
    flops: float
    matrix: bool
    dtype: str
    efficiency: float
    platforms: tuple[str, ...] = ()
    assumed: str = ""
    own_model_flops: float | None = None
    causal_flops: float = 0.0

    @property
    def model_flops(self) -> float:
        """FLOPs of the model's own products."""
        if self.own_model_flops is not None:
            return self.own_model_flops
        return self.flops if self.matrix else 0.0


RuleFunction = Callable[[Sequence[Any], Sequence[Any], dict[str, Any]], FactorRule]
_REGISTRY: dict[str, RuleFunction] = {}


def register_rule(primitive: str) -> Callable[[RuleFunction], RuleFunction]:
    """Registers the sharding rule of a primitive, such as a custom call.

    The decorated function takes the abstract operands, the abstract results
    (each with ``shape`` and ``dtype``) and the parameters of the equation, and
    returns a `FactorRule`. It wins over the compiler's own rule.

    >>> @register_rule("my_custom_call")
    ... def _(operands, results, params):
    ...     return elementwise_rule(
    ...         [o.shape for o in operands], [r.shape for r in results])
    """

    def add(function: RuleFunction) -> RuleFunction:
        _REGISTRY[primitive] = function
        return function

    return add


def registered_rule(
    primitive: str,
    operands: Sequence[Any],
    results: Sequence[Any],
    params: dict[str, Any],
) -> FactorRule | None:
    """Returns the user's rule for an equation, or None if none is registered."""
    function = _REGISTRY.get(primitive)
    return None if function is None else function(operands, results, params)


@register_rule("optimization_barrier")
def _barrier(
    operands: Sequence[Any], results: Sequence[Any], params: dict[str, Any]
) -> FactorRule:
    """Each result is its operand: the barrier is an identity of many values."""
    del results, params
    rule = separate_rule([o.shape for o in operands], [], FactorKind.PASS)
    return dataclasses.replace(rule, results=rule.operands)
