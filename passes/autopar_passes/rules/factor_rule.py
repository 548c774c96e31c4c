"""Sharding rules of equations: which dimensions must be sharded alike.

A `FactorRule` lists the *factors* of an equation, as an einsum does: dimensions of
operands and results that must be sharded in the same way are one factor. The rules are
read from the compiler (see `autopar_passes.rules.book`).
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Sequence
from typing import Any


class FactorKind(enum.Enum):
    """The effect of sharding a factor over a mesh axis."""

    PASS = "parallel: each shard is computed alone"
    EXCHANGED = "parallel: shards send each other what they need"
    REDUCE = "reduced: shards hold partial results"
    BLOCKED = "must be replicated"


# Kind of reduction (`FactorRule.reduction`) of an equation that changes values after it
# has reduced them. An example is a gather that fills in elements which are out of
# bounds. Partial results of such an equation can only be all-reduced, never
# reduce-scattered.
INNER = "inner"

# For each dimension of an array, the factors that make it up, major to minor. A
# dimension of size one has no factors: ().
Dims = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """An array that devices send to each other within an operator they share.

    If the factor is not sharded, nothing is sent.

    Attributes:
      factor: the factor of the rule.
      slot: the index of the operand or the result.
      result: whether the array is a result.
      around: whether every device needs the shards of all devices. Either the devices
        pass the shards around a ring while the operator computes, or they gather the
        array, and scatter the sum of a result. The plan decides. If not ``around``,
        each half of a shard goes to the device that works on that half (`worker`), and
        the computation waits for both halves.
      widened: bytes per element as sent, divided by bytes per element of the array.
      placed: whether the halves of shards already are where they are needed
        (`autopar_passes.graph.ring_order`), so that nothing is sent.
    """

    factor: int
    slot: int
    result: bool = False
    around: bool = False
    widened: int = 1
    placed: bool = False

    def messages(self, shards: int) -> int:
        """Returns the number of messages of a device that gathers nothing."""
        if shards < 2 or self.placed:
            return 0
        return shards - 1 if self.around else 2

    def part(self, shards: int) -> float:
        """The size of a message as a share of a shard, averaged over all devices."""
        if self.around:
            return float(self.widened)
        stays = sum(worker(c, shards) == c // 2 for c in range(2 * shards))
        return 0.5 * (1.0 - stays / (2 * shards))


def worker(chunk: int, shards: int) -> int:
    """Returns the device that works on a chunk of a sequence.

    A sequence has two chunks per device. Each device works on an early and a late
    chunk, so that a causal mask leaves all devices the same work.

    >>> [worker(chunk, 2) for chunk in range(4)]
    [0, 1, 1, 0]
    """
    return min(chunk, 2 * shards - 1 - chunk)


@dataclasses.dataclass(frozen=True, slots=True)
class FactorRule:
    """The factors of one equation.

    Attributes:
      sizes: size of each factor.
      kinds: for each factor, the effect of sharding the factor.
      operands: for each operand, the factors of each dimension.
      results: for each result, the factors of each dimension.
      reduction: how partial results combine: ``sum``, ``max``, ``min``, ``or``,
        ``and``, or `INNER`; '' if the equation has no reduction factor.
      sums: for each result, the factors of kind ``PASS`` over which the operator itself
        sums the result if they are sharded; () if there are none.
      whole: factors that must be sharded over exactly one mesh axis, with as many
        devices as the factor has elements. Under any other sharding the operator would
        compute a wrong result.
      exchanges: the arrays that shards send to each other (`FactorKind.EXCHANGED`).
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
        """Factors whose devices exchange half shards (`worker`)."""
        return tuple({e.factor for e in self.exchanges if not e.around})

    @property
    def reduced_factors(self) -> frozenset[int]:
        """Factors whose sharding gives partial results."""
        if FactorKind.REDUCE not in self.kinds:
            return frozenset()
        return frozenset(f for f, k in enumerate(self.kinds) if k is FactorKind.REDUCE)

    reduced = reduced_factors  # the old name, for one release


def replicated_rule(
    operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]
) -> FactorRule:
    """Returns the rule of an equation that needs whole, replicated arrays.

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
    """Returns the rule in which every dimension is a factor of its own.

    Args:
      operands: shape of each operand.
      results: shape of each result.
      kind: the kind of all factors.
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
    """Returns the rule of an equation that computes each element independently.

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


# Share of the matrix units' peak FLOP rate that fused attention kernels reach.
# FlashAttention-3 and cuDNN 9 reach 0.6 to 0.75 of an H100's bfloat16 peak at sequences
# of 2,048 and more; their backward passes reach 0.5 to 0.6 (arXiv 2407.08608, figures 5
# and 6).
CUDNN_EFFICIENCY = 0.6
# The Pallas kernels follow the algorithm of FlashAttention-2, which reaches 0.5 to 0.73
# of an A100's peak (arXiv 2307.08691, section 4.1).
PALLAS_EFFICIENCY = 0.5

# Devices that can run a kernel, as named by `jax.Device.platform`.
GPU, TPU = "gpu", "tpu"


@dataclasses.dataclass(frozen=True, slots=True)
class KernelWork:
    """The work of one kernel on whole arrays.

    A kernel reads its operands once and writes its results once. Intermediate values
    stay on the chip, except for ``inner_bytes``.

    Attributes:
      name: the name of the kernel, as messages and reports show it.
      flops: floating-point operations of one run.
      matrix: whether the matrix units do these operations.
      dtype: NumPy or ml_dtypes name of the elements that the operations work on.
      efficiency: share of the peak rate that the kernel reaches, 0 to 1.
      platforms: kinds of devices that can run the kernel; empty for any device.
      assumed: the assumption behind the FLOPs; empty if there is none.
      own_model_flops: FLOPs of the model's own matrix products, if they differ from
        ``flops``. For attention they count masked pairs, and do not count
        recomputation.
      causal_flops: the part of the model FLOPs that belongs to attention with a causal
        mask.
      inner_bytes: bytes of intermediate values that the kernel reads from memory and
        writes to it.
      held_bytes: the most bytes of them that it holds at once.
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
    inner_bytes: float = 0.0
    held_bytes: float = 0.0

    @property
    def model_flops(self) -> float:
        """FLOPs of the model's own matrix products, without recomputation."""
        if self.own_model_flops is not None:
            return self.own_model_flops
        return self.flops if self.matrix else 0.0


RuleFunction = Callable[[Sequence[Any], Sequence[Any], dict[str, Any]], FactorRule]
_REGISTRY: dict[str, RuleFunction] = {}


def register_rule(primitive: str) -> Callable[[RuleFunction], RuleFunction]:
    """Registers the sharding rule of a primitive, such as a custom call.

    The decorated function takes the abstract operands, the abstract results (each with
    ``shape`` and ``dtype``) and the parameters of the equation. The function returns a
    `FactorRule`, which replaces the compiler's own rule.

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
    """Gives each result of a barrier the factors of the operand that it copies."""
    del results, params
    rule = separate_rule([o.shape for o in operands], [], FactorKind.PASS)
    return dataclasses.replace(rule, results=rule.operands)
