"""The rule and the work of equations that are hand-written kernels.

Such an equation is opaque to the compiler: no rule can be read from its lowering, which
a host without the device may not even have. cuDNN's attention has the rule of
`autopar_passes.rules.cudnn`; a Pallas kernel has the one that its grid proves, or the
one that is registered under its name. A `jax.shard_map` of the step's own is opaque in
the same way; its specs are its rule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar_passes import jax_compat
from autopar_passes.program.equations import Equation
from autopar_passes.rules import cudnn, manual, pallas_flops, pallas_grid
from autopar_passes.rules.attention import attention_flops
from autopar_passes.rules.factor_rule import FactorRule
from autopar_passes.rules.kernel import GPU, PALLAS_EFFICIENCY, TPU, KernelWork
from autopar_passes.rules.registry import registered_rule

# Kernels of attention, whose own estimates of their cost leave out the mask.
_ATTENTION = ("mha_", "splash_m", "_flash_attention", "flash_attention")


def is_kernel(primitive: str) -> bool:
    """Whether a primitive is a hand-written kernel."""
    single = (pallas_grid.PRIMITIVE, manual.PRIMITIVE)
    return primitive in cudnn.PRIMITIVES or primitive in single


def kernel_name(eqn: Equation) -> str:
    """Returns what people call the kernel of an equation."""
    if eqn.primitive != pallas_grid.PRIMITIVE:
        return eqn.primitive
    return pallas_grid.kernel_name(eqn.params)


def kernel_rule(
    eqn: Equation,
    operands: Sequence[Any],
    results: Sequence[Any],
    read: Sequence[bool],
) -> FactorRule | None:
    """Returns the rule of a kernel; None where nothing proves that it may be split.

    Args:
      eqn: an equation whose primitive `is_kernel`.
      operands: the abstract operands, each with ``shape`` and ``dtype``.
      results: the abstract results.
      read: for each result, whether anything reads it.

    Raises:
      InputError: a registered rule splits what shards of the kernel cannot.
    """
    if eqn.primitive == manual.PRIMITIVE:
        return manual.manual_rule(operands, results, eqn.params)
    name = kernel_name(eqn)
    own = registered_rule(name, operands, results, eqn.params)
    if eqn.primitive in cudnn.PRIMITIVES:
        return own or cudnn.attention_rule(eqn.primitive, operands, results, eqn.params)
    if own is not None:
        return pallas_grid.check_rule(eqn.params, own, name)
    return pallas_grid.grid_rule(eqn.params, read)


def kernel_work(
    eqn: Equation,
    operands: Sequence[Any],
    results: Sequence[Any],
    arrays: Sequence[Any],
) -> KernelWork:
    """Returns the work of a kernel on whole operands.

    Args:
      eqn: an equation whose primitive `is_kernel`.
      operands: the abstract operands.
      results: the abstract results.
      arrays: for each operand, its array where the program holds it, else None.
    """
    if eqn.primitive in cudnn.PRIMITIVES:
        return cudnn.attention_kernel(eqn.primitive, operands, eqn.params)
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
    found = pallas_flops.count(params, arrays)
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
    """The model FLOPs of the body of a ``shard_map``, and the causal part of them.

    Args:
      body: the body, of one shard.
      arrays: for each operand, its array where the program holds it, else None.
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
        if name in cudnn.PRIMITIVES:
            kernel = cudnn.attention_kernel(name, given, eqn.params)
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
    """The devices that a Pallas kernel was written for."""
    if params.get("interpret"):
        return ()
    module = type(params.get("compiler_params")).__module__
    if "triton" in module or "mosaic_gpu" in module:
        return (GPU,)
    return (TPU,) if "mosaic" in module else (GPU, TPU)
